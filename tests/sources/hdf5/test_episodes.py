"""Episodes end to end: windows, padding, steps and splits keep to them, as to groups; values of edges between rows."""

import shutil

import h5py
import numpy as np
import pytest
from support.files.damage import damage_chunk
from support.files.encoded_images import IMAGES
from support.sources.oracle import read, refused

from lit_async_data import ConcatSource, Field, HDF5Source, split
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError

LENGTHS = [7, 1, 12, 3, 20, 2]
ROWS = sum(LENGTHS)
ENDS = np.cumsum(LENGTHS)
STARTS = ENDS - LENGTHS
IDS = np.repeat([4, 0, 9, 3, 1, 2], LENGTHS)
IS_LAST = np.isin(np.arange(ROWS), ENDS - 1)
OBS = np.random.default_rng(0).integers(0, 999, (ROWS, 4), np.int16)
# By the programs that write them so.
LAYOUTS = {
    "LeRobot": ("episode_index", {"episode_index": IDS}),
    "text": ("name", {"name": [f"trial {number}" for number in IDS]}),
    "D4RL": (
        {"flags": ["terminals", "timeouts"]},
        {"terminals": IS_LAST & (IDS < 3), "timeouts": IS_LAST & (IDS >= 3)},
    ),
    "an unfinished episode": ({"flags": "done"}, {"done": np.where(np.arange(ROWS) < ROWS - 1, IS_LAST, 0)}),
    "diffusion-policy": ({"ends": "meta/episode_ends"}, {"meta/episode_ends": ENDS}),
    "Minari": ({"lengths": "total_steps"}, {"total_steps": np.array(LENGTHS)[:, None]}),
    "starts": ({"starts": "ep_offset"}, {"ep_offset": STARTS}),
    "offsets": ({"offsets": "ptr"}, {"ptr": np.append(0, ENDS)}),
    "OGBench": ({"starts": "ep_offset", "lengths": "ep_len"}, {"ep_offset": STARTS, "ep_len": LENGTHS}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The same episodes end to end, and in groups."""
    path = tmp_path_factory.mktemp("episodes") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("obs", data=OBS, chunks=(5, 4), compression="gzip")
        file["action"], file["action2"] = OBS[:, :2] + 0.5, OBS[:, 2:] + 0.25
        for name, values in {name: each for _, columns in LAYOUTS.values() for name, each in columns.items()}.items():
            file[name] = values
        for number, (first, end) in enumerate(zip(STARTS, ENDS, strict=True)):
            for name in ("obs", "action", "action2"):
                file[f"part_{number}/{name}"] = file[name][first:end]
    return path


FIELDS = {
    "windows": {"x": Field("obs", window=(-1, 2)), "y": Field("action", window=2)},
    "padded": {"x": Field("obs", window=(-4, 3), pad="last"), "y": Field("action", window=(0, 16), pad="zero")},
    "beside it": {"x": Field("obs", window=(-30, -24), pad="last"), "y": Field("obs", window=(5, 9), pad="zero")},
    "channels": {"x": Field(["action", "action2"], window=(-3, 3), pad="last"), "y": "obs"},
}


@pytest.mark.parametrize("stride", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fields", FIELDS)
def test_episodes_end_to_end_are_read_as_groups_are(path, layout, fields, stride):
    given = FIELDS[fields]
    flat = HDF5Source(path, given, episodes=LAYOUTS[layout][0], stride=stride)
    groups = HDF5Source(path, given, group="part_*", stride=stride)
    every = np.arange(len(groups))
    found, expected = read(flat, every), read(groups, every)
    assert list(found) == list(expected)
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)
    alone = [read(flat, [sample]) for sample in every[::5]]
    np.testing.assert_array_equal(np.concatenate([each["x"] for each in alone]), expected["x"][::5])
    rows = np.array([place.row for place in flat.locate(every)])
    in_group = [place.row for place in groups.locate(every)]
    assert (rows - STARTS[np.searchsorted(ENDS, rows, "right")]).tolist() == in_group


def test_windows_that_overlap_are_split_by_episodes_or_time(h5):
    source = HDF5Source(h5(x=np.arange(40), ends=[20, 40]), {"x": Field("x", window=(0, 3))}, episodes={"ends": "ends"})
    with pytest.raises(ConfigError, match="groups='episode' the samples of an episode, groups='time'"):
        split(source, {"train": 0.5, "val": 0.5})


def test_episodes_change_no_side_of_samples_that_are_drawn_alone(h5):
    paths = [h5(f"{n}.h5", x=np.arange(40), ends=[10, 20, 40]) for n in range(2)]
    both = HDF5Source(paths, ["x"], episodes={"ends": "ends"})
    alone = HDF5Source(paths[1], ["x"], episodes={"ends": "ends"})
    sides = [split(each, {"train": 0.5, "val": 0.5})["train"].samples for each in (both, alone)]
    assert (sides[0][sides[0] >= 40] - 40).tolist() == sides[1].tolist()


def test_rows_that_begin_no_window_and_episodes_that_are_too_short_are_said(h5):
    path = h5(x=np.arange(12), ends=[2, 7, 11])
    source = HDF5Source(path, {"x": Field("x", window=(-1, 3))}, episodes={"ends": "ends"})
    assert read(source, np.arange(len(source)))["x"].tolist() == [[2, 3, 4, 5], [3, 4, 5, 6], [7, 8, 9, 10]]
    assert "9 of 12 rows begin no window (the start and the end of each episode)" in repr(source)
    said = [path, "(episodes of at most 5 rows): shorter than the windows of a sample, 6 rows"]
    refused(FormatError, said, path, {"x": Field("x", window=(0, 6))}, episodes={"ends": "ends"})
    said = ["row", "5 is one of the 12 rows", "its window leaves them", "need rows 2 to 4"]
    refused(ConfigError, said[1:], path, {"x": Field("x", window=(0, 3))}, episodes={"ends": "ends"}, rows=[3, 5])
    chosen = HDF5Source(path, {"x": Field("x", window=(0, 3))}, episodes={"ends": "ends"}, rows=[8, 3])
    assert read(chosen, [0, 1])["x"].tolist() == [[8, 9, 10], [3, 4, 5]]


@pytest.mark.parametrize(
    ("episodes", "error", "said"),
    [
        ("nothing", MissingError, ["episodes: ", "nothing"]),
        ("short", FormatError, ["short: has shape (3,)", "one value for each of the 12 rows", "{'ends': NAME}"]),
        ("again", FormatError, ["again, row 8: ", "0 begins an episode again", "episodes={'flags': NAME}"]),
        ({"ends": "beyond"}, CorruptError, ["beyond, row 1: 5 to 13 of 12", "ends must never fall, nor exceed 12"]),
        ("dones", ConfigError, ["dones holds flags, not ids; write {'flags': NAME}"]),
        ({"lengths": "negative"}, CorruptError, ["negative, row 1: ", "not be negative"]),
        ({"starts": "short", "lengths": "short"}, CorruptError, ["short, row 2: 7 to 14 of 12", "must begin behind"]),
        ({"ends": "fractions"}, FormatError, ["fractions", "integers"]),
        ({"ends": "short", "flags": "again"}, ConfigError, ["episodes: ", "neither"]),
        ({"flags": []}, ConfigError, ["episodes: {'flags': []} is neither"]),
        (3, ConfigError, ["episodes: 3 is neither"]),
        ({"ends": "none"}, FormatError, ["none: holds no episode for 12 rows; write their bounds, or leave the file"]),
    ],
    ids=str,
)
def test_wrong_episodes_are_named(h5, episodes, error, said):
    path = h5(
        x=np.arange(12),
        short=[0, 3, 7],
        again=[0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0],
        beyond=[5, 13],
        negative=[5, -1, 3],
        fractions=[0.5, 7],
        none=np.zeros(0, int),
        dones=np.arange(12) == 11,
    )
    refused(error, said, path, {"x": "x"}, episodes=episodes)


NAMED = {"numbers": [7, 9], "again": [9, 8], "texts": [b"u", b"v"], "other": [0, 1]}


def numbered(h5, name, **more):
    ids = {key: np.repeat(of, [4, 6]) for key, of in NAMED.items()}
    return h5(f"{name}.h5", x=np.arange(10), ends=[4, 10], **ids, **more)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([("a", "numbers")], [7, 9]),
        ([("a", "texts")], ["u", "v"]),
        ([("a", {"ends": "ends"})], [0, 1]),
        ([("a", "numbers"), ("b", "other")], [0, 1, 7, 9]),
        ([("a", "numbers"), ("b", "again")], ["a.h5:7", "a.h5:9", "b.h5:8", "b.h5:9"]),
        ([("a", "texts"), ("b", "texts")], ["a.h5:u", "a.h5:v", "b.h5:u", "b.h5:v"]),
        ([("a", {"ends": "ends"}), ("b", {"ends": "ends"})], ["a.h5:0", "a.h5:1", "b.h5:0", "b.h5:1"]),
    ],
    ids=str,
)
def test_the_id_of_an_episode_is_that_of_the_file_and_one_of_its_file(h5, given, found):
    (paths, rules), fields = zip(*given, strict=True), {"x": Field("x", window=(0, 2))}
    paths = [numbered(h5, name) for name in paths]
    apart = ConcatSource([HDF5Source(path, fields, episodes=rule) for path, rule in zip(paths, rules, strict=True)])
    together = [HDF5Source(paths, fields, episodes=rules[0])] * (len({*map(str, rules)}) == 1)
    for source in (apart, *together):
        names = source.column("episode")
        assert len(names) == len(source)
        assert np.unique(names).tolist() == found
        sides = split(source, {"train": found[:1], "val": found[1:]}, groups="episode")
        assert set(sides["train"].column("episode")) == {found[0]}
        drawn = split(source, {"train": 0.5, "val": 0.5}, groups="episode")
        assert set(drawn["train"].column("episode")).isdisjoint(drawn["val"].column("episode"))


def test_sides_of_one_file_have_its_episodes_and_files_of_one_name_have_others(h5, tmp_path):
    for folder in "pq":
        (tmp_path / folder).mkdir()
    (first, second), rule = (numbered(h5, f"{folder}/x") for folder in "pq"), "numbers"
    source, other = (HDF5Source(path, ["x"], episodes=rule) for path in (first, second))
    sides = split(source, {"train": 0.5, "val": 0.5})
    assert np.unique(ConcatSource([*sides.values()]).column("episode")).tolist() == [7, 9]
    names = np.unique(ConcatSource([sides["val"], other]).column("episode")).tolist()
    assert names == [f"x.h5 of {path}:{number}" for path in (first, second) for number in (7, 9)]


def test_a_dataset_named_episode_is_hidden_by_ids_only(h5):
    path = numbered(h5, "a", episode=np.repeat([5, 6, 7], [4, 3, 3]))
    by_ends, by_ids = (HDF5Source(path, ["x"], episodes=each) for each in ({"ends": "ends"}, "numbers"))
    assert np.unique(by_ends.column("episode")).tolist() == [5, 6, 7]
    assert np.unique(by_ids.column("episode")).tolist() == [7, 9]


@pytest.mark.parametrize("spelling", ["episode", "column:episode"])
@pytest.mark.parametrize("kind", [{"kind": "text"}, {"classes": ["v", "u"]}], ids=str)
def test_ids_are_not_decoded_as_numbers_of_the_field_that_holds_them(h5, spelling, kind):
    path = numbered(h5, "a")
    source = HDF5Source(path, {"x": "x", "episode": Field("texts", **kind)}, episodes="texts")
    for how in ("by", "groups"):
        sides = split(source, {"train": ["u"], "val": ["v"]}, **{how: spelling})
        assert [side.samples.tolist() for side in sides.values()] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


def test_an_id_of_minus_100_is_an_episode(h5):
    source = HDF5Source(h5("a.h5", x=np.arange(4), ids=[-100, -100, 1, 1]), ["x"], episodes="ids")
    assert split(source, {"train": [-100], "val": [1]}, by="episode")["train"].samples.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("field", "rule"),
    [(Field("other"), "numbers"), (Field("numbers", attr="unit"), "numbers"), ("kind", {"ends": "ends"})],
)
def test_another_field_named_as_the_ids_is_refused(h5, tmp_path, field, rule):
    (table := tmp_path / "table.csv").write_text("file,kind\na.h5,7\n")  # the numbers of episodes would stand for it
    given, said = {"x": "x", "episode": field}, ["fields.episode: names the ids of episodes=", "another key"]
    refused(ConfigError, said, numbered(h5, "a"), given, episodes=rule, table=table, on="file")


@pytest.mark.parametrize("dtype", [np.float64, np.uint64, np.int8])
def test_ids_that_files_store_as_other_numbers_are_the_same(h5, dtype):
    ids = {name: np.array([0, 0, 1, 1], kind) for name, kind in (("a", dtype), ("b", int))}
    paths = [h5(f"{name}.h5", x=np.arange(4), id=each) for name, each in ids.items()]
    source = HDF5Source(paths, ["x"], episodes="id")
    assert np.unique(source.column("episode")).tolist() == ["a.h5:0", "a.h5:1", "b.h5:0", "b.h5:1"]


def test_a_column_keeps_its_values_over_files(h5):
    large = 2**63 + 1
    paths = [h5("a.h5", x=[1], id=np.array([large], "u8"), who=[b"u"]), h5("b.h5", x=[2], id=[-1], who=[7])]
    source = HDF5Source(paths, ["x"])
    assert source.column("id").tolist() == [large, -1]
    with pytest.raises(FormatError, match=r"'who' holds numbers in .*b\.h5, but text in .*a\.h5; store it as one type"):
        source.column("who")


def test_nan_is_no_flag_and_no_id(h5):
    path = h5(x=np.arange(6), good=[0, 0, 0, 0, 0, True], last=[0, 0, np.nan, 0, 0, 1], id=[0, 0, np.nan, 1, 1, 1])
    for flags in ("last", ["good", "last"]):
        refused(FormatError, ["/last, row 2: is nan, no flag"], path, {"x": "x"}, episodes={"flags": flags})
    refused(FormatError, ["/id, row 2: is nan, no id"], path, {"x": "x"}, episodes="id")


def test_ends_that_are_last_rows_bring_one_warning(h5, caplog):
    ends = {"last": [2, 5, 9], "end": [3, 6, 10], "starts": [0, 3, 6], "lengths": [3, 3, 3]}
    paths = [h5(f"{number}.h5", x=np.arange(10), **ends) for number in range(2)]
    said = f"{paths[0]}: the last end is at 9 of 10 rows; if ends are last rows, write each plus 1"
    for rules in ({"ends": "last"}, {"lengths": "lengths"}, {"starts": "starts", "lengths": "lengths"}):
        HDF5Source(paths, {"x": Field("x", window=(0, 2))}, episodes=rules)
        assert caplog.messages == [said]
        caplog.clear()
    HDF5Source(paths, ["x"], episodes={"ends": "end"})
    HDF5Source(paths, {"x": Field("x", starts="starts")})
    assert caplog.messages == []


def test_whole_episodes_of_encoded_images_as_the_error_says(tmp_path):
    with h5py.File(path := str(tmp_path / "x.h5"), "w") as file:
        frames = file.create_dataset("frames", 6, h5py.vlen_dtype("u1"))
        for row, image in enumerate(IMAGES[:6]):
            frames[row] = np.frombuffer(image, "u1")
        file["end"], file["start"] = [4, 6], [0, 4]
    said = ["window=(0, LONGEST), pad='zero'", "episodes={'ends': NAME} and rows= their first rows", "not Field(ends=)"]
    refused(FormatError, said, path, {"x": Field("frames", decode="image", ends="end")})
    field = Field("frames", decode="image", image_size=8, window=(0, 4), pad="zero")
    batch = read(HDF5Source(path, {"x": field}, episodes={"ends": "end"}, rows="start"), np.arange(2))
    assert batch["x_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    single = read(HDF5Source(path, {"x": Field("frames", decode="image", image_size=8)}), np.arange(6))["x"]
    np.testing.assert_array_equal(batch["x"][1, :2], single[4:])


# `per="edge"`: a value before each row and one behind the last, as T + 1 observations beside T actions.
ACTIONS = [7, 1, 12, 4]
OBSERVATIONS = [1000 * n + np.arange((length + 1) * 2).reshape(-1, 2) for n, length in enumerate(ACTIONS)]
FLAT, GROUPS = {"episodes": {"lengths": "steps"}}, {"group": "episode_*"}


@pytest.fixture(scope="module")
def minari(tmp_path_factory):
    """Minari's groups, and the same end to end."""
    path = tmp_path_factory.mktemp("edges") / "x.h5"
    actions = [1000 * n + np.arange(length) + 0.5 for n, length in enumerate(ACTIONS)]
    with h5py.File(path, "w") as file:
        for n, (own, action) in enumerate(zip(OBSERVATIONS, actions, strict=True)):
            file.create_dataset(f"episode_{n}/obs", data=own, chunks=(2, 2), compression="gzip")
            file[f"episode_{n}/action"] = action
        file.create_dataset("obs", data=np.concatenate(OBSERVATIONS), chunks=(5, 2), compression="gzip")
        file["action"], file["steps"] = np.concatenate(actions), ACTIONS
    return str(path)


def around_actions(offsets, pad):
    """The observations of each sample, in plain loops."""
    found = []
    for n, length in enumerate(ACTIONS):
        for row in range(length):
            rows = [row + offset for offset in offsets]
            if pad or (min(rows) >= 0 and max(rows) <= length):
                zero = [pad == "zero" and not 0 <= each <= length for each in rows]
                values = [
                    OBSERVATIONS[n][min(max(each, 0), length)] * (not none)
                    for each, none in zip(rows, zero, strict=True)
                ]
                found.append((n, row, np.array(values)))
    return found


@pytest.mark.parametrize("place", [FLAT, GROUPS], ids=["flat", "groups"])
@pytest.mark.parametrize("pad", [None, "last", "zero"])
@pytest.mark.parametrize("offsets", [(0, 1), (0,), (1,), (-1, 1), (0, 1, 2, 3), (2, -2)], ids=str)
def test_observations_are_before_and_behind_each_action(minari, place, pad, offsets):
    fields = {"obs": Field("obs", offsets=offsets, pad=pad, per="edge"), "action": "action"}
    source, wanted = HDF5Source(minari, fields, **place), around_actions(offsets, pad)
    for every in (np.arange(len(wanted)), np.random.default_rng(0).integers(0, len(wanted), 500)):
        batch = read(source, every)
        assert len(source) == len(wanted)
        np.testing.assert_array_equal(batch["obs"], np.stack([values for _, _, values in wanted])[every])
        assert batch["action"].tolist() == [1000 * wanted[k][0] + wanted[k][1] + 0.5 for k in every]


def test_sides_by_time_share_no_observation(minari):
    source = HDF5Source(minari, {"obs": Field("obs", offsets=[0, 1], per="edge"), "action": "action"}, **FLAT)
    sides = split(source, {"train": 0.5, "val": 0.5}, groups="time")
    rows = [{*read(side, np.arange(len(side)))["obs"][:, :, 0].ravel().tolist()} for side in sides.values()]
    assert rows[0].isdisjoint(rows[1])


def test_without_a_window_a_row_has_the_value_before_it(minari):
    fields = {"obs": Field("obs", per="edge", column=0), "action": "action"}
    for place in (FLAT, GROUPS):
        source = HDF5Source(minari, fields, **place)
        assert source.column("obs").tolist() == [values[0, 0] for _, _, values in around_actions((0,), None)]
    channels = Field(["obs", "obs"], offsets=[0, 1], per="edge")
    chosen = HDF5Source(minari, {"obs": channels, "action": "action"}, rows=[7], **FLAT)
    assert read(chosen, [0])["obs"].tolist() == [[[[1000, 1001]] * 2, [[1002, 1003]] * 2]]


def test_wrong_edges_are_named(minari):
    edge = Field("obs", per="edge")
    said = ["the fields have different lengths", "one behind the last, write 'obs': Field(…, per='edge')"]
    for place in (FLAT, GROUPS):
        refused(FormatError, said, minari, {"obs": "obs", "action": "action"}, **place)
    said = ["/obs: has 28 values, but per='edge' needs 25, one more than rows in each part or episode, of 24 rows"]
    refused(FormatError, said, minari, {"obs": edge, "action": "action"})
    refused(ConfigError, ["fields: all have a value per edge"], minari, {"obs": edge}, **GROUPS)
    timed = {"name": "obs", "per": "edge", "time": "t", "offsets": [0.5]}
    refused(ConfigError, ["time: does not apply to values of edges"], minari, {"obs": timed})
    channels = [{"name": "obs", "per": "edge"}, {"name": "obs"}]
    refused(ConfigError, ["per: obs and obs have different ones"], minari, {"obs": channels})


def test_an_error_names_the_sample_that_reads_the_row(minari, tmp_path):
    damaged = tmp_path / "damaged.h5"
    shutil.copy(minari, damaged)
    damage_chunk(damaged, "obs", (20, 0))  # to row 24, of the third episode, which begins at 10
    source = HDF5Source(damaged, {"obs": Field("obs", offsets=[0, 2], per="edge"), "action": "action"}, **FLAT)
    with pytest.raises(CorruptError) as caught:
        read(source, [14, 15])  # rows 18 and 20, 19 and 21, of samples that lack the last row of each episode
    own = source.locate([caught.value.sample_id])[0].row + 2
    assert caught.value.row in (own, own + 2)
