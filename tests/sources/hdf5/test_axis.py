"""`episodes={"axis": 0}`: windows along the steps of episodes on an axis of their own; `per="episode"`."""

import itertools

import h5py
import numpy as np
import pytest
from support.files.damage import damage_chunk
from support.files.hdf5 import STORAGES, create, stored_as
from support.sources.oracle import read, refused

from lit_async_data import AsyncLoader, ConfigError, CorruptError, Field, FormatError, HDF5Source, split
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder

E, T, C = 7, 23, 3
VALUES = np.random.default_rng(0).integers(-99, 99, (E, T, C), np.int16)
# Episodes and steps in a chunk; with 2, chunks have two of the three channels.
CHUNKS = [(1, 1, C), (1, 5, C), (1, T, 2), (E, T, C), (2, T, C), (2, 5, C), (3, 4, 2), (E, 1, C), (9, 30, C)]
FIELDS = {
    "single": Field("x"),
    "window": Field("x", window=(-2, 3)),
    "padded": Field("x", window=(-4, 2), pad="last"),
    "longer than an episode": Field("x", window=(-30, 10), pad="zero", dtype="float32"),
    "offsets": Field("x", offsets=[4, -5, 0], pad="last"),
    "column": Field("x", window=(0, 3), column=1, pad="last"),
    "channels": Field(["x", "x"], window=(-2, 1), pad="zero"),
}


def expected(field, lengths=None):
    """The value of each sample, in plain loops, by episode and step."""
    found = {}
    for e, step in itertools.product(range(E), range(T)):
        length = T if lengths is None else lengths[e]
        rows = np.array(field.steps) + step
        inside = (rows >= 0) & (rows < length)
        if step < length and (field.pad or inside.all()):
            values = VALUES[e][rows.clip(0, length - 1)] * (inside[:, None] | (field.pad != "zero"))
            values = values if field.column is None else values[:, field.column]
            values = np.stack([values, values], 1) if field.stacked else values
            found[e, step] = values[0] if field.rows is None else values
    return found


def check(path, field, axis, lengths=None):
    wanted = expected(field, lengths)
    rule = {"axis": axis} if lengths is None else {"axis": axis, "lengths": "lengths"}
    source = HDF5Source(path, {"x": field, "first": "first", "k": Field("k", per="episode")}, episodes=rule)
    places, values = list(wanted), np.stack([*wanted.values()])
    first, k = np.array([VALUES[place][0] for place in places]), np.array([[e, 5] for e, _ in places])
    assert [divmod(place.row, T) for place in source.locate(range(len(source)))] == places
    drawn = np.random.default_rng(1).integers(0, len(places), 2000)
    for samples in (np.arange(len(places)), drawn, drawn[:7]):
        batch = read(source, samples)
        np.testing.assert_array_equal(batch["x"], values[samples])
        np.testing.assert_array_equal(batch["first"], first[samples])
        np.testing.assert_array_equal(batch["k"], k[samples])
    return source, values


def written(path, values=VALUES, *, axis=0, maxshape=None, **options):
    """A file with the values, steps before episodes if these have axis 1."""
    with h5py.File(path, "w") as file:
        if axis and "chunks" in options:
            options["chunks"] = [options["chunks"][each] for each in (1, 0, 2)]
        own = values.swapaxes(0, axis)
        if "chunks" in options:
            options["chunks"] = tuple(options["chunks"])
        file.create_dataset("x", data=own, maxshape=maxshape, **options)
        file["first"], file["k"] = own[..., 0], np.stack([np.arange(E), np.full(E, 5)], 1)
        file["name"] = [f"run {number % 3}" for number in range(E)]
        file["lengths"] = LENGTHS
    return path


LENGTHS = [23, 1, 7, 0, 20, 23, 3]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_windows_in_chunks_of_any_shape(path, chunks, compression, axis):
    written(path, axis=axis, chunks=chunks, compression=compression, maxshape=(None,) * 3)
    for field in FIELDS.values():
        check(path, field, axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("storage", STORAGES)
def test_windows_in_every_storage(path, storage, axis):
    written(path, axis=axis)
    with h5py.File(path, "r+") as file:
        own = file["x"][...]
        del file["x"]
        create(file, "x", dtype=">i2", **stored_as(storage, own.shape)[0])[...] = own
    for key in ("window", "padded", "column"):
        check(path, FIELDS[key], axis)


def test_windows_of_lengths_beside_padding(path):
    for options in ({}, {"chunks": (2, 5, C), "compression": "gzip"}):
        written(path, **options)
        for field in FIELDS.values():
            check(path, field, 0, LENGTHS)


@pytest.mark.parametrize(
    ("chunks", "axis", "times"),
    [((1, 5, C), 0, 2), ((1, 5, C), 1, 2), ((E, T, C), 0, 1), ((2, 5, C), 0, 1), ((2, 5, C), 1, 1), ((2, T, 2), 0, 1)],
)
def test_a_shuffle_by_chunks_decodes_each_about_once(path, monkeypatch, chunks, axis, times):
    source, values = check(written(path, axis=axis, chunks=chunks, compression="gzip"), FIELDS["padded"], axis)
    source.close()
    decoded, chunk = [], IndexedSlabDecoder.chunk
    monkeypatch.setattr(IndexedSlabDecoder, "chunk", lambda self, n: decoded.append(n) or chunk(self, n))
    options = {"batch_size": 8, "shuffle": "chunk", "shuffle_chunks": 2, "return_indices": True}
    seen = []
    with AsyncLoader(source, {**options, "worker_kind": "thread", "workers": 1}) as loader:
        for batch in loader:
            seen += batch["index"].tolist()
            np.testing.assert_array_equal(batch["x"].numpy(), values[batch["index"].numpy()])
    assert sorted(seen) == list(range(E * T))
    assert len(decoded) <= times * np.prod(-(-np.array(VALUES.shape) // chunks))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("chunks", "runs", "together"),
    [
        ((1, 5, C), [(20, 5), (3, 3)] * E, 1),  # each chunk is a unit
        ((2, 5, C), [(6 * T, 2 * T), (T, T)], 5),  # all chunks of two episodes
    ],
)
def test_a_unit_of_the_shuffle_is_the_chunks_of_consecutive_rows(path, chunks, runs, together, axis):
    source, _ = check(written(path, axis=axis, chunks=chunks, compression="gzip"), FIELDS["single"], axis)
    assert [(run.samples, run.rows) for run in source.chunks.runs] == runs
    assert source.chunks.spread == 1
    assert source.memory(1).decoded == together * np.prod(chunks) * VALUES.itemsize


def test_observations_are_one_more_than_actions(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("obs", data=VALUES, chunks=(2, 5, C), compression="gzip")
        file["action"], file["lengths"] = VALUES[:, :-1, 0], [T - 1, 4, 0, 1, T - 1, 2, 5]
        lengths = file["lengths"][...]
    fields = {"obs": Field("obs", offsets=[0, 1, 3], per="edge", pad="last"), "action": "action"}
    for rule, steps in (({"axis": 0}, [T - 1] * E), ({"axis": 0, "lengths": "lengths"}, lengths)):
        source = HDF5Source(path, fields, episodes=rule)
        places = [(e, t) for e in range(E) for t in range(steps[e])]
        batch = read(source, np.arange(len(source)))
        wanted = [VALUES[e, np.minimum([t, t + 1, t + 3], steps[e])] for e, t in places]
        np.testing.assert_array_equal(batch["obs"], wanted)
        np.testing.assert_array_equal(batch["action"], [VALUES[place][0] for place in places])


@pytest.mark.parametrize("shape", ["of each episode", "of every episode"])
def test_seconds_count_from_the_times_of_steps(path, shape):
    times = np.arange(T) / 10 + (5 * np.arange(E)[:, None] if shape == "of each episode" else 0)
    with h5py.File(written(path), "r+") as file:
        file["t"] = times
    fields = {"x": Field("x", offsets=[-0.2, 0.1], time="t", pad="last")}
    found = read(HDF5Source(path, fields, **AXIS), np.arange(E * T))["x"]
    rows = (np.arange(T)[:, None] + [-2, 1]).clip(0, T - 1)
    np.testing.assert_array_equal(found, VALUES[:, rows].reshape(E * T, 2, C))


def test_a_mask_and_columns_count_steps_of_episodes(path):
    mask = np.random.default_rng(0).random((T, E)) < 0.3
    with h5py.File(written(path, axis=1), "r+") as file:
        file["mask"], file["label"] = mask, np.arange(T * E).reshape(T, E)
    source = HDF5Source(path, {"x": "x"}, episodes={"axis": 1}, rows="mask")
    assert source.column("label").tolist() == [t * E + e for e in range(E) for t in range(T) if mask[t, e]]
    every = HDF5Source(path, {"x": Field("x", window=(0, 2)), "y": Field("name", per="episode")}, episodes={"axis": 1})
    assert every.column("episode").tolist() == np.repeat(np.arange(E), T - 1).tolist()
    assert every.column("y").tolist() == np.repeat(np.arange(E) % 3, T - 1).tolist()
    sides = split(every, {"train": 0.5, "val": 0.5}, groups="episode")
    assert set(sides["train"].column("episode")).isdisjoint(sides["val"].column("episode"))


@pytest.mark.parametrize("layout", ["CENHW", "EHNWC", "CNEHW"])
def test_a_layout_names_the_axis_of_steps(h5, layout):
    values = np.random.default_rng(0).normal(size=(2, 5, 6, 3, 4))  # C, E, N, H, W
    stored = np.einsum(f"CENHW->{layout}", values)
    if abs(layout.index("E") - layout.index("N")) > 1:
        what = ["x.h5:/x: has episodes on axis 0 and their rows on axis 2, with others between them"]
        refused(FormatError, what, h5(x=stored), {"x": "x"}, layout=layout, episodes={"axis": 0})
        return
    path = h5(x=stored, y={"data": stored, "chunks": (2, 2, 2, 3, 3), "compression": "gzip"})
    fields = {"x": Field("x", window=(0, 2)), "y": Field("y", window=(0, 2))}
    rule = {"axis": layout.index("E")}
    batch = read(HDF5Source(path, fields, layout=dict.fromkeys(fields, layout), episodes=rule), np.arange(25))
    wanted = [values[:, e, t : t + 2] for e in range(5) for t in range(5)]
    for key in fields:
        np.testing.assert_array_equal(batch[key], wanted)


EPISODES = {"ids": np.repeat([3, 1, 2], [4, 1, 5]), "ends": [4, 5, 10]}


@pytest.mark.parametrize("episodes", ["ids", {"ends": "ends"}], ids=str)
def test_values_of_episodes_that_lie_end_to_end(h5, episodes):
    path = h5(x=np.arange(10), label=[b"a", b"b", b"a"], size=[[1, 2], [3, 4], [5, 6]], **EPISODES)
    fields = {"label": Field("label", per="episode"), "x": Field("x", window=(0, 2), pad="last")}
    source = HDF5Source(path, fields | {"size": Field("size", per="episode")}, episodes=episodes)
    assert list(source.spec) == ["label", "x", "size", "x_mask"]
    batch = read(source, [9, 0, 4, 5, 3])
    assert batch["label"].tolist() == [0, 0, 1, 0, 0]
    assert batch["size"].tolist() == [[5, 6], [1, 2], [3, 4], [5, 6], [1, 2]]
    said = ["/x: has 10 values, but per='episode' needs one for each of 3 episodes"]
    refused(FormatError, said, path, {"y": "x", "x": Field("x", per="episode")}, episodes=episodes)
    refused(ConfigError, ["fields.label.per: 'episode' needs episodes="], path, fields)
    refused(ConfigError, ["all have a value per edge or episode"], path, {"x": fields["label"]}, episodes=episodes)


AXIS, X = {"episodes": {"axis": 0}}, {"x": "x"}
LONG, SHORT = ({"episodes": {"axis": 0, "lengths": name}} for name in ("long", "short"))
WINDOW = {"name": "x", "per": "episode", "window": 1}
OTHERS = "different episodes: x has 7 of 23 steps, k has 7 of 2 steps"


@pytest.mark.parametrize(
    ("error", "said", "fields", "options"),
    [
        (ConfigError, ["episodes.axis: -1 is not a whole number from 0 on"], X, {"episodes": {"axis": -1}}),
        (ConfigError, ["episodes: ", "is neither"], X, {"episodes": {"axis": 0, "ends": "lengths"}}),
        (ConfigError, ["sample: 'group' goes neither with", "episodes"], X, {"sample": "group", **AXIS}),
        (FormatError, ["/x: has shape (7, 23, 3), without axis 3"], X, {"episodes": {"axis": 3}}),
        (FormatError, ["/lengths: has shape (7,)", "Field(…, per='episode')"], X | {"y": "lengths"}, AXIS),
        (FormatError, [OTHERS, "per='episode'", "per='edge'"], X | {"y": "k"}, AXIS),
        (FormatError, ["different episodes"], X | {"y": "turned"}, AXIS),
        (FormatError, ["different episodes"], {"x": Field("first", per="edge"), "y": "first"}, AXIS),
        (ConfigError, ["layout: 'TC'", "with N for the samples"], X, {"layout": "NTC", **AXIS}),
        (ConfigError, ["window: does not apply to values of episodes"], {"x": WINDOW}, AXIS),
        (CorruptError, ["/long, row 1: ", "each must begin behind the one before it"], X, LONG),
        (CorruptError, ["/short: holds 7 starts for 3 lengths"], X, SHORT),
    ],
)
def test_wrong_axes_are_named(path, error, said, fields, options):
    with h5py.File(written(path), "r+") as file:
        file["turned"], file["long"], file["short"] = file["first"][...].T, [24] + [1] * (E - 1), [1, 2, 3]
    refused(error, said, path, fields, **options)


@pytest.mark.parametrize("chunks", [(1, 5, C), (2, 5, C)], ids=str)
def test_an_error_names_the_chunk_and_the_step(path, chunks):
    damage_chunk(written(path, chunks=chunks, compression="gzip"), "x", (4, 10, 0))
    source = HDF5Source(path, {"x": Field("x", window=(0, 2))}, **AXIS)
    with pytest.raises(CorruptError, match=r"/x, chunk \(4, 10, 0\) at byte") as caught:
        read(source, [4 * (T - 1) + 8, 4 * (T - 1) + 9, 0])  # steps 8 and 9, 9 and 10
    assert (caught.value.row, caught.value.sample_id) == (4 * T + 10, 4 * (T - 1) + 9)
    assert source.locate([caught.value.sample_id])[0].row == 4 * T + 9
