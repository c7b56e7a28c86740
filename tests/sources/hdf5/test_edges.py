"""`per="edge"`: a value before each row and one behind the last, as T + 1 observations beside T actions."""

import shutil

import h5py
import numpy as np
import pytest
from support.files.damage import damage_chunk
from support.sources.oracle import read, refused

from lit_async_data import ConfigError, CorruptError, Field, FormatError, HDF5Source, split

LENGTHS = [7, 1, 12, 4]
OBS = [1000 * n + np.arange((length + 1) * 2).reshape(-1, 2) for n, length in enumerate(LENGTHS)]
FLAT, GROUPS = {"episodes": {"lengths": "steps"}}, {"group": "episode_*"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Minari's groups, and the same end to end."""
    path = tmp_path_factory.mktemp("edges") / "x.h5"
    actions = [1000 * n + np.arange(length) + 0.5 for n, length in enumerate(LENGTHS)]
    with h5py.File(path, "w") as file:
        for n, (own, action) in enumerate(zip(OBS, actions, strict=True)):
            file.create_dataset(f"episode_{n}/obs", data=own, chunks=(2, 2), compression="gzip")
            file[f"episode_{n}/action"] = action
        file.create_dataset("obs", data=np.concatenate(OBS), chunks=(5, 2), compression="gzip")
        file["action"], file["steps"] = np.concatenate(actions), LENGTHS
    return str(path)


def expected(offsets, pad):
    """The observations of each sample, in plain loops."""
    found = []
    for n, length in enumerate(LENGTHS):
        for row in range(length):
            rows = [row + offset for offset in offsets]
            if pad or (min(rows) >= 0 and max(rows) <= length):
                zero = [pad == "zero" and not 0 <= each <= length for each in rows]
                values = [OBS[n][min(max(each, 0), length)] * (not none) for each, none in zip(rows, zero, strict=True)]
                found.append((n, row, np.array(values)))
    return found


@pytest.mark.parametrize("place", [FLAT, GROUPS], ids=["flat", "groups"])
@pytest.mark.parametrize("pad", [None, "last", "zero"])
@pytest.mark.parametrize("offsets", [(0, 1), (0,), (1,), (-1, 1), (0, 1, 2, 3), (2, -2)], ids=str)
def test_observations_are_before_and_behind_each_action(path, place, pad, offsets):
    fields = {"obs": Field("obs", offsets=offsets, pad=pad, per="edge"), "action": "action"}
    source, wanted = HDF5Source(path, fields, **place), expected(offsets, pad)
    for every in (np.arange(len(wanted)), np.random.default_rng(0).integers(0, len(wanted), 500)):
        batch = read(source, every)
        assert len(source) == len(wanted)
        np.testing.assert_array_equal(batch["obs"], np.stack([values for _, _, values in wanted])[every])
        assert batch["action"].tolist() == [1000 * wanted[k][0] + wanted[k][1] + 0.5 for k in every]


def test_sides_by_time_share_no_observation(path):
    source = HDF5Source(path, {"obs": Field("obs", offsets=[0, 1], per="edge"), "action": "action"}, **FLAT)
    sides = split(source, {"train": 0.5, "val": 0.5}, groups="time")
    rows = [{*read(side, np.arange(len(side)))["obs"][:, :, 0].ravel().tolist()} for side in sides.values()]
    assert rows[0].isdisjoint(rows[1])


def test_without_a_window_a_row_has_the_value_before_it(path):
    fields = {"obs": Field("obs", per="edge", column=0), "action": "action"}
    for place in (FLAT, GROUPS):
        source = HDF5Source(path, fields, **place)
        assert source.column("obs").tolist() == [values[0, 0] for _, _, values in expected((0,), None)]
    channels = Field(["obs", "obs"], offsets=[0, 1], per="edge")
    chosen = HDF5Source(path, {"obs": channels, "action": "action"}, rows=[7], **FLAT)
    assert read(chosen, [0])["obs"].tolist() == [[[[1000, 1001]] * 2, [[1002, 1003]] * 2]]


@pytest.mark.parametrize("place", [FLAT, GROUPS], ids=["flat", "groups"])
def test_the_message_about_one_value_more_names_the_cure(path, place):
    said = ["the fields have different lengths", "one behind the last, write 'obs': Field(…, per='edge')"]
    refused(FormatError, said, path, {"obs": "obs", "action": "action"}, **place)


def test_wrong_edges_are_named(path):
    edge = Field("obs", per="edge")
    said = ["/obs: has 28 values, but per='edge' needs 25, one more than rows in each part or episode, of 24 rows"]
    refused(FormatError, said, path, {"obs": edge, "action": "action"})
    refused(ConfigError, ["fields: all have a value per edge"], path, {"obs": edge}, **GROUPS)
    timed = {"name": "obs", "per": "edge", "time": "t", "offsets": [0.5]}
    refused(ConfigError, ["time: does not apply to values of edges"], path, {"obs": timed})
    channels = [{"name": "obs", "per": "edge"}, {"name": "obs"}]
    refused(ConfigError, ["per: obs and obs have different ones"], path, {"obs": channels})


def test_an_error_names_the_sample_that_reads_the_row(path, tmp_path):
    damaged = tmp_path / "damaged.h5"
    shutil.copy(path, damaged)
    damage_chunk(damaged, "obs", (20, 0))  # to row 24, of the third episode, which begins at 10
    source = HDF5Source(damaged, {"obs": Field("obs", offsets=[0, 2], per="edge"), "action": "action"}, **FLAT)
    with pytest.raises(CorruptError) as caught:
        read(source, [14, 15])  # rows 18 and 20, 19 and 21, of samples that lack the last row of each episode
    own = source.locate([caught.value.sample_id])[0].row + 2
    assert caught.value.row in (own, own + 2)
