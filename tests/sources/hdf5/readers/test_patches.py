"""Patches of volumes, on grids and drawn, and points of clouds: of every way of storage, against whole arrays."""

import contextlib
import itertools
import pickle

import h5py
import numpy as np
import pytest
from support.files.damage import VALUES, damage_chunk, key_of, made
from support.files.damage import patch as damage
from support.sources.oracle import read, refused

from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, SubsetSource, folds, split, statistics
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MemoryBudgetError, MissingError, ResumeError
from lit_async_data.lightning.display import summary_lines
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.testing import check_contract

SHAPES = [(20, 31, 17), (9, 40, 22), (33, 8, 12)]
CHUNKS = (4, 7, 5)
STORED = {
    "raw": {},
    "big-endian": {"dtype": ">i2"},
    "chunked": {"chunks": CHUNKS},
    "gzip": {"chunks": CHUNKS, "compression": "gzip", "shuffle": True},
    "gzip, big-endian": {"chunks": CHUNKS, "compression": "gzip", "dtype": ">i2"},
    "only libhdf5": {"chunks": CHUNKS, "scaleoffset": 0},
    "one chunk": {"chunks": (8, 8, 8), "compression": "lzf", "maxshape": (None, None, None)},
}


def volumes(shapes=SHAPES):
    return [np.random.default_rng(number).integers(-1000, 3000, shape) for number, shape in enumerate(shapes)]


def write(folder, shapes=SHAPES, **options):
    for number, volume in enumerate(volumes(shapes)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            own = options
            if "chunks" in options:
                own = options | {"chunks": tuple(map(min, options["chunks"], volume.shape))}
            file.create_dataset("ct", data=volume.astype("i2"), **own)
            file["mask"] = (volume > 500).astype("u1")
            file.attrs["age"] = 40 + number
    return str(folder / "*.h5")


def cut(volume, origin, size, pad=None):
    """A patch, and which of its elements are real."""
    inside = volume[tuple(slice(begin, begin + n) for begin, n in zip(origin, size))]
    missing = [(0, n - m) for n, m in zip(size, inside.shape)]
    assert pad or not np.any(missing)
    how = {"mode": "edge"} if pad == "last" else {}
    return np.pad(inside, missing, **how), np.pad(np.ones(inside.shape, bool), missing)


def grid(shape, size, stride):
    """The origins of patches that cover a volume, one axis after the other."""
    axes = []
    for n, patch, step in zip(shape, size, stride):
        firsts = [0]
        while firsts[-1] + patch < n:
            firsts.append(min(firsts[-1] + step, n - patch))
        axes.append(firsts)
    return list(itertools.product(*axes))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("stored", STORED)
def test_2000_drawn_patches_of_two_epochs_equal_slices_of_whole_arrays(tmp_path, stored, mapped):
    fields = {"x": Field("ct", patch=(6, 8, 7)), "y": Field("mask", patch=(6, 8, 7), dtype="float32")}
    fields["age"] = Field(attr="age")
    path = write(tmp_path, **STORED[stored])
    source = HDF5Source(path, fields, patches_per_volume=350, memory_map=mapped)
    found, places = volumes(), set()
    options = {"batch_size": 50, "shuffle": True, "return_indices": True, "cache_bytes": [2**24, 20_000][mapped]}
    with AsyncLoader(source, options) as loader:
        for batch in itertools.chain(loader, loader):
            assert batch["x"].dtype.itemsize == 2
            for x, y, origin, other, age, sample in zip(
                *(batch[key].numpy() for key in ("x", "y", "x_origin", "y_origin", "age", "index")), strict=True
            ):
                volume = found[sample // 350]
                expected, _ = cut(volume, origin, (6, 8, 7))
                np.testing.assert_array_equal(x, expected)
                np.testing.assert_array_equal(y, expected > 500)
                assert origin.tolist() == other.tolist()
                assert age == 40 + sample // 350
                places.add((sample // 350, *origin))
    for number, shape in enumerate(SHAPES):
        seen = np.array([place[1:] for place in places if place[0] == number])
        assert seen.min(0).tolist() == [0, 0, 0]
        assert seen.max(0).tolist() == [n - size for n, size in zip(shape, (6, 8, 7))]


def test_a_volume_is_the_unit_of_the_shuffle_beside_a_large_attribute(tmp_path):
    path = write(tmp_path)
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "a") as file:
            file["ct"].attrs["affine"] = np.eye(4) * number
    fields = {"affine": Field("ct", attr="affine"), "x": Field("ct", patch=(1, 2, 2))}
    source = HDF5Source(path, fields, patches_per_volume=5)
    assert source.chunks.runs == (ChunkRun(5, 5),) * 3
    np.testing.assert_array_equal(read(source, np.arange(15))["affine"][:, 3, 3], np.repeat([0, 1, 2], 5))


@pytest.mark.parametrize("pad", ["zero", "last"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("stride", [None, (5, 3, 12), (12, 12, 12)])
def test_patches_of_a_grid_cover_each_volume_in_order(tmp_path, stored, stride, pad):
    size = (12, 12, 20)  # larger than two of the volumes
    path = write(tmp_path, **STORED[stored])
    source = HDF5Source(path, {"x": Field("ct", patch=size, stride=stride, pad=pad)})
    batch = read(pickle.loads(pickle.dumps(source)), np.arange(len(source))[::-1])
    places = [(volume, each) for volume in volumes() for each in grid(volume.shape, size, stride or size)]
    assert len(source) == len(places)
    for row, (volume, origin) in enumerate(places):
        patch, real = cut(volume, origin, size, pad)
        sample = len(places) - 1 - row
        np.testing.assert_array_equal(batch["x"][sample], patch)
        np.testing.assert_array_equal(batch["x_mask"][sample], real)
        assert tuple(batch["x_origin"][sample]) == origin
        assert source.locate([row])[0].file.endswith(".h5")


@pytest.mark.parametrize("layout", ["CDHW", "DHWC", "DCHW", None], ids=str)
@pytest.mark.parametrize("stored", [{}, {"chunks": True, "compression": "gzip"}], ids=["raw", "gzip"])
def test_channels_of_one_dataset_or_of_several_are_whole_and_come_first(h5, layout, stored):
    volume, patch = np.random.default_rng(0).random((7, 12, 9, 2), np.float32), {"patch": (4, 5, 12), "pad": "last"}
    if layout:
        written, x = {"v": np.moveaxis(volume, -1, layout.index("C"))}, Field("v", **patch)
    else:
        written, x = {"a": volume[..., 0], "b": volume[..., 1]}, Field(["a", "b"], dtype="float64", **patch)
    path = h5(**{name: {"data": values, **stored} for name, values in written.items()}, m=volume[..., 0] > 0.5)
    fields = {"x": x, "y": Field("m", **patch)}
    source = HDF5Source(path, fields, layout=layout and {"x": layout}, patches_per_volume=40)
    assert source.spec["x"].shape == (2, 4, 5, 12)
    batch = read(source, np.arange(40))
    for x, y, real, origin in zip(*(batch[key] for key in ("x", "y", "x_mask", "y_origin"))):
        expected = [cut(volume[..., channel], origin, (4, 5, 12), "last") for channel in range(2)]
        np.testing.assert_array_equal(x, [values for values, _ in expected])
        np.testing.assert_array_equal(y, expected[0][0] > 0.5)
        np.testing.assert_array_equal(real, expected[0][1])


@pytest.mark.parametrize(
    ("names", "field", "layout", "channels"),
    [
        ("a", {"patch": (4, 5, 4)}, None, 1),
        (["a", "b"], {"patch": (4, 5, 4)}, None, 2),
        (["a", "b"], {"points": 5}, None, 2),
        ("a", {"patch": (4, 3, 4)}, {"x": "DCHW"}, 5),
    ],
    ids=["patch", "two datasets", "points", "C"],
)
def test_only_channels_have_statistics_of_their_own_without_padding(h5, names, field, layout, channels):
    values = np.random.default_rng(0).normal(size=(4, 5, 3, 3) if layout else (4, 5, 3))
    path = h5(**dict.fromkeys(names, values))
    source = HDF5Source(path, {"x": Field(names, pad="last", dtype="float64", **field)}, layout=layout)
    found = statistics(source)["x"]
    assert np.size(found.mean) == channels
    of_each = (0, 2, 3) if layout else None
    np.testing.assert_allclose(found.mean, values.mean(of_each))
    np.testing.assert_allclose(found.std, values.std(of_each))


def test_a_pass_over_other_places_is_not_resumed(tmp_path):
    path = write(tmp_path, SHAPES[:1])
    one = HDF5Source(path, {"x": Field("ct", patch=(10, 31, 17))})
    two = HDF5Source(path, {"x": Field("ct", patch=(10, 31, 17))}, patches_per_volume=2)
    assert len(one) == len(two)
    options = {"batch_size": 1, "shuffle": False}
    with AsyncLoader(one, options) as loader, AsyncLoader(two, options) as other:
        next(loader)
        with pytest.raises(ResumeError, match="patches of x"):
            other.load_state_dict(loader.state_dict())


def test_other_padding_is_another_fingerprint(tmp_path):
    path = write(tmp_path, SHAPES[:1])
    found = [HDF5Source(path, {"x": Field("ct", patch=(30, 31, 17), pad=pad)}) for pad in ("zero", "last", "zero")]
    zero, last, same = (each.fingerprint() for each in found)
    assert zero == same != last


def test_a_patch_and_its_origin_are_no_columns(tmp_path):
    fields = {"x": Field("ct", patch=(8, 7, 5)), "age": Field(attr="age")}
    source = HDF5Source(write(tmp_path), fields, patches_per_volume=2)
    np.testing.assert_array_equal(source.column("age"), [40, 40, 41, 41, 42, 42])
    for key in ("x", "x_origin"):
        with pytest.raises(MissingError, match=f"no field '{key}' with one value per sample; .*: age$"):
            source.column(key)


PATCH = {"patch": (6, 8, 7)}
CT, MASK = Field("ct", **PATCH), Field("mask", **PATCH)
DRAWN = {
    "patches": ("x_origin", {"x": CT}, {}),
    "points": ("x_points", {"x": Field("ct", points=4)}, {}),
    "classes": ("x_origin", {"x": CT, "y": MASK}, {"foreground": {"y": {1: 0.5}}}),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stored", "drawn"),
    [("raw", "patches"), ("gzip", "patches"), ("only libhdf5", "patches"), ("gzip", "points"), ("raw", "classes")],
)
def test_places_agree_between_ranks_workers_epochs_and_after_a_resume(tmp_path, stored, drawn):
    path = write(tmp_path, [(length, 31, 17) for length in (20, 9, 33)], **STORED[stored])
    place, fields, drawing = DRAWN[drawn]
    options = {"batch_size": 3, "shuffle": True, "seed": 5, "return_indices": True}

    def of(batches):
        return [(batch["index"].tolist(), batch[place].tolist(), int(batch["x"].sum())) for batch in batches]

    def loader(rank=0, world_size=1, **more):
        source = HDF5Source(path, fields, patches_per_volume=8, **drawing)
        return AsyncLoader(source, options | more, rank=rank, world_size=world_size)

    with loader(workers=1) as one:
        first, second = of(one), of(one)
    places = {sample: origin for batch in first for sample, origin in zip(*batch[:2])}
    assert places != {sample: origin for batch in second for sample, origin in zip(*batch[:2])}
    with loader(workers=3) as three:
        assert of(three) == first
    with loader(workers=2, worker_kind="process") as processes:
        assert of(processes) == first
    dealt = {}
    for rank in range(2):
        with loader(rank, 2) as each:
            dealt |= {sample: origin for batch in of(each) for sample, origin in zip(*batch[:2])}
    assert dealt == places
    with loader() as stopped:
        batches = iter(stopped)
        before = [next(batches) for _ in range(3)]
        state = stopped.state_dict()
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert of(before) + of(resumed) == first
    with loader(augment=False) as fixed:
        one, two = ({sample: at for batch in of(fixed) for sample, at in zip(*batch[:2])} for _ in range(2))
        assert one == two != places


@pytest.mark.parametrize("patches_per_volume", [None, 6])
@pytest.mark.parametrize("stored", ["raw", "chunked", "gzip", "only libhdf5"])
def test_a_source_of_patches_keeps_the_contract(tmp_path, stored, patches_per_volume):
    path = write(tmp_path, **STORED[stored])
    fields = {"x": Field("ct", patch=(6, 16, 7), pad="last"), "age": Field(attr="age")}
    check_contract(HDF5Source(path, fields, patches_per_volume=patches_per_volume))


@pytest.mark.parametrize("field", [{"patch": (6, 7)}, {"points": 6}], ids=["patches", "points"])
def test_fixed_places_are_those_of_their_volume(tmp_path, field):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, numbers in ((first, (1, 3)), (second, (0, 1, 2, 3))):
        folder.mkdir()
        for number in numbers:
            with h5py.File(folder / f"{number}.h5", "w") as file:
                file.create_dataset("a/x", data=np.arange(3000).reshape(60, 50), chunks=(2, 50), compression="gzip")
                file["b/x"] = np.arange(3000).reshape(60, 50)

    def found(folder, **options):
        source = HDF5Source(f"{folder}/*.h5", {"x": Field("x", **field)}, group="?", patches_per_volume=5, **options)
        with AsyncLoader(source, {"batch_size": 7, "augment": False, "shuffle": False}) as loader:
            epochs = [np.concatenate([batch["x"].numpy() for batch in loader]) for _ in range(2)]
        np.testing.assert_array_equal(*epochs)
        return epochs[0]

    few, many = found(first), found(second).reshape(8, -1)
    assert len(np.unique(many, axis=0)) == 8
    np.testing.assert_array_equal(few.reshape(4, -1), many[[2, 3, 6, 7]])
    np.testing.assert_array_equal(found(first, exclude=[2, 7]), np.delete(few, [2, 7], 0))


def test_groups_have_volumes_too(h5):
    gzip = {"chunks": (4, 5, 6), "compression": "gzip"}
    path = h5(**{f"scans/{number}/ct": {"data": volume, **gzip} for number, volume in enumerate(volumes())})
    options = {"fields": {"x": Field("ct", patch=(5, 8, 12))}, "group": "scans/*"}
    few, many = (HDF5Source(path, **options, patches_per_volume=count) for count in (4, 100))
    assert [(part.group, part.samples) for part in few.parts] == [(f"scans/{n}", 4) for n in range(3)]
    assert few.chunks.runs == (ChunkRun(4, 4),) * 3
    assert 0 < many.memory(1).decoded < many.memory().cacheable / 2  # the chunks of one volume
    with pytest.raises(MemoryBudgetError, match=r"decoded need .* over the budget of 60000"):
        AsyncLoader(many, {"batch_size": 2, "shuffle": True, "memory_budget": 60_000})
    batch = read(few, [0, 5, 11])
    for sample, volume in enumerate(volumes()):
        np.testing.assert_array_equal(batch["x"][sample], cut(volume, batch["x_origin"][sample], (5, 8, 12))[0])


def test_patches_of_one_volume_are_not_torn_apart_by_a_split(tmp_path, caplog):
    path = write(tmp_path, SHAPES)
    source = HDF5Source(path, {"x": Field("ct", patch=(8, 8, 8))})
    for cut, how in (split, {"train": 0.7, "val": 0.3}), (folds, 2):
        with pytest.raises(ConfigError, match=r"patches of one volume.* groups='file'") as caught:
            cut(source, how)
        assert "time" not in str(caught.value)
    assert split(source, {"train": 0.7, "val": 0.3}, groups="file").overlap == 0
    assert not caplog.messages
    half = np.arange(len(source)) % 2
    assert split(source, {"train": 0.5, "val": 0.5}, groups=half).overlap == 70  # some share values with no other
    assert "patches of one volume, like windows that all share values, stay together by groups='file'" in caplog.text
    drawn = HDF5Source(path, {"x": Field("ct", patch=(1, 1, 1))}, patches_per_volume=4)
    assert split(drawn, {"train": 0.5, "val": 0.5}, groups=np.arange(12) % 2).overlap == 12
    alone = SubsetSource(drawn, [0, 4, 8])  # one patch of each volume
    assert [sides.overlap for sides in folds(alone, 3)] == [0] * 3


def test_only_patches_that_share_values_count_as_overlap(h5, caplog):
    path = h5(x=np.zeros((6, 40, 3)), small=np.zeros((6, 20, 3)))
    fields = [{"x": Field(name, patch=(1, 16), stride=(1, 8))} for name in ("x", "small")]
    grid, small = (HDF5Source(path, each, layout={"x": "DHC"}) for each in fields)
    for source, each in ((grid, 4), (small, 2), (ConcatSource([grid, small]), 0)):
        first = np.arange(len(source)) // each % 6 if each else np.append(np.arange(24) // 4, np.arange(12) // 2)
        sides = split(source, {"train": [0, 1, 2, 3], "val": [4, 5]}, groups=first)  # places along the first axis
        again = split(sides["train"], {"a": [0, 1], "b": [2]}, groups=sides["train"].group_codes)
        assert (sides.overlap, again.overlap) == (0, 0)
    assert not caplog.messages
    torn = split(grid, {"train": [0], "val": [1]}, groups=(np.arange(24) == 5).astype(int))
    assert torn.overlap == 4  # the patches of one place along the first axis
    last = HDF5Source(path, {"x": Field("x", patch=(4, 40))}, layout={"x": "DHC"})  # at 0 and 2, where it ends
    assert split(last, {"train": [0], "val": [1]}, groups=[0, 1]).overlap == 2


def test_sources_of_one_file_that_share_no_dataset_share_no_values(h5, caplog):
    names = ["a", "b", "c"]
    path = h5(**{name: np.zeros((8, 9)) for name in names}, y=np.arange(8))
    volumes = [HDF5Source(path, {"x": Field(name, patch=(4, 4))}, patches_per_volume=4) for name in names]
    windows = [HDF5Source(path, {"x": Field(name, window=(0, 3))}, stride=n) for n, name in enumerate(names, 1)]
    for sources in (volumes, windows):
        of = np.repeat([0, 1, 2], [len(source) for source in sources])
        both = ConcatSource(sources)
        assert split(both, {"train": [0, 1], "val": [2]}, groups=of).overlap == 0
        assert split(pickle.loads(pickle.dumps(both)), {"train": [0], "val": [1, 2]}, groups=of).overlap == 0
        with pytest.raises(ConfigError, match=r"number of groups .file. is 1"):
            split(both, {"train": 0.5, "val": 0.5}, groups="file")
    assert not caplog.messages
    shared = ConcatSource([HDF5Source(path, {"x": name, "y": "y"}) for name in names])
    assert split(shared, {"train": [0], "val": [1, 2]}, groups=np.repeat([0, 1, 2], 8)).overlap == 24
    with h5py.File(path, "a") as file:
        file["hard"], file["soft"] = file["a"], h5py.SoftLink("/a")
    for other in ("hard", "soft"):  # the same values under another name
        linked = [HDF5Source(path, {"x": Field(name, window=(0, 3))}) for name in ("a", other)]
        assert split(ConcatSource(linked), {"train": [0], "val": [1]}, groups=np.repeat([0, 1], 6)).overlap == 12


@pytest.mark.parametrize("filters", [["gzip"], ["scaleoffset"]])
def test_a_damaged_chunk_fails_the_patches_that_touch_it(tmp_path, filters):
    """Of a packed chunk of too few bytes libhdf5 would read others."""
    path = tmp_path / "x.h5"
    info = made(path, filters=filters)  # of rows 25 to 29
    if filters == ["gzip"]:
        damage_chunk(path, "data", (25, 0), bytes(40), skip=0)
    else:
        damage(path, key_of(path, info), "<I", 60)
    source = HDF5Source(path, {"x": Field("data", patch=(4, 3))})
    origins = read(source, np.arange(len(source)), ["x_origin"])["x_origin"]
    for sample, (row, column) in enumerate(origins.tolist()):
        if row + 4 > 25 and row < 30:
            with pytest.raises(CorruptError, match=r"chunk \(25, 0\)") as caught:
                read(source, [0, sample])
            assert caught.value.sample_id == sample
        else:
            patch = read(source, [sample])["x"][0]
            np.testing.assert_array_equal(patch, VALUES[row : row + 4, column : column + 3])


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_damaged_chunk_costs_an_epoch_only_the_patches_that_touch_it(tmp_path, on_error):
    path, size, sets = tmp_path / "0.h5", (4, 7, 5), []
    write(tmp_path, SHAPES[:1], **STORED["gzip"])
    for damaged in (False, True):
        if damaged:
            damage_chunk(path, "ct", (8, 14, 10), bytes(40), skip=0)
        source = HDF5Source(path, {"x": Field("ct", patch=size)}, patches_per_volume=60)
        options = {"batch_size": 8, "shuffle": True, "seed": 3, "on_error": on_error if damaged else "raise"}
        with AsyncLoader(source, options | {"max_bad": 1.0}) as loader:
            sets.append([{tuple(o) for batch in loader for o in batch["x_origin"].tolist()} for _ in range(6)])
    for whole, around in zip(*sets):
        touching = {o for o in whole if all(a < b + n and b < a + n for a, b, n in zip(o, (8, 14, 10), size))}
        assert touching
        assert around >= whole - touching
        assert on_error == "substitute" or around == whole - touching


@pytest.mark.parametrize("count", [None, 2, 60])
@pytest.mark.parametrize("layout", [None, "CDHW"])
def test_the_bytes_decoded_for_each_one_used_are_said(tmp_path, monkeypatch, count, layout):
    decoded, decode = [], FilterPipeline.decode
    monkeypatch.setattr(FilterPipeline, "decode", lambda *given: decoded.append(decode(*given)) or decoded[-1])
    with h5py.File(tmp_path / "x.h5", "w") as file:
        shape, chunks = (40, 31, 17), (8, 7, 5)
        stored = ((2, *shape), (1, *chunks)) if layout else (shape, chunks)
        file.create_dataset("x", *stored[:1], "i2", chunks=stored[1], compression="gzip")
        file["x"][...] = 1
    options = {"batch_size": 1, "shuffle": True, "workers": 0}  # a worker reads ahead, also of the next epoch
    used = nbytes = 0
    for seed in range(40):  # each with a new cache
        fields = {"x": Field("x", patch=(9, 8, 7))}
        source = HDF5Source(tmp_path / "x.h5", fields, layout=layout, patches_per_volume=count)
        with contextlib.closing(source), AsyncLoader(source, options | {"seed": seed}) as loader:
            expected, line = source.chunks.amplification, summary_lines(loader)[1]
            assert f"1 of 1 volumes; about {expected:.1f} bytes are decoded for each one that patches use" in line
            decoded.clear()
            used += sum(batch["x"].numel() * 2 for batch in loader)
            nbytes += sum(map(len, decoded))
    assert nbytes / used == pytest.approx(expected, rel=0.1 if count else 1e-6)


# Points of clouds; a sample has 100.
COUNTS = (5000, 777, 60)
CLOUDS = {
    "raw": ({}, {}),
    "chunked": ({"chunks": (64, 3)}, {"chunks": (64,)}),
    "gzip": ({"chunks": (64, 3), "compression": "gzip"}, {"chunks": (150,), "compression": "lzf"}),
    "torn rows": ({"chunks": (64, 2), "compression": "gzip"}, {}),
    "only libhdf5": ({"chunks": (64, 3), "scaleoffset": 0}, {}),
}


def clouds():
    rngs = [np.random.default_rng(number) for number in range(len(COUNTS))]
    return [(rng.integers(-999, 999, (count, 3)).astype("i4"), np.arange(count)) for rng, count in zip(rngs, COUNTS)]


def write_clouds(folder, stored):
    for number, ((xyz, numbers), count) in enumerate(zip(clouds(), COUNTS)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            for name, values, options in zip(("xyz", "number"), (xyz, numbers), CLOUDS[stored]):
                file.create_dataset(name, data=values, **(options if count >= 150 else {}))
            file["red"] = numbers % 7
            file["green"] = numbers % 9
    return str(folder / "*.h5")


def points_of(path, count=60, **options):
    points = {"points": 100, "pad": "last"}
    fields = {"x": Field("xyz", dtype="float32", **points), "n": Field("number", **points)}
    fields["colour"] = Field(["red", "green"], **points)
    return HDF5Source(path, fields, patches_per_volume=count, **options)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("stored", CLOUDS)
def test_2000_samples_equal_rows_of_whole_arrays(tmp_path, stored, mapped):
    source, found = points_of(write_clouds(tmp_path, stored), 700, memory_map=mapped), clouds()
    assert source.spec["x_mask"].shape == source.spec["x_points"].shape == (100,)
    assert source.spec["colour"].shape == (2, 100)
    seen = set()
    with AsyncLoader(source, {"batch_size": 50, "shuffle": True, "return_indices": True}) as loader:
        for batch in loader:
            keys = ("x", "n", "colour", "x_points", "n_points", "x_mask", "index")
            for x, n, colour, points, others, real, sample in zip(*(batch[key].numpy() for key in keys), strict=True):
                xyz, numbers = found[sample // 700]
                np.testing.assert_array_equal(x, xyz[points])
                np.testing.assert_array_equal(n, numbers[points])
                np.testing.assert_array_equal(colour, [points % 7, points % 9])
                np.testing.assert_array_equal(points, others)
                assert real.sum() == len(set(points[real])) == min(100, len(xyz))
                seen.update((sample // 700, point) for point in points)
    assert len(seen) == sum(COUNTS)


@pytest.mark.parametrize(
    ("count", "size", "chunk"),
    [
        *((210, size, 64) for size in (10, 100, 200)),
        *((65, 64, 64), (66, 1, 64), (192, 64, 64), (130, 129, 64)),
        *((6400, 100, 64), (300, 10, None), (1000, 500, None)),
    ],
)
def test_all_points_are_drawn_as_often_also_of_a_short_chunk_and_of_few_chunks(h5, count, size, chunk):
    stored = {} if chunk is None else {"chunks": (chunk,), "compression": "gzip"}
    path = h5(n={"data": np.arange(count), **stored})
    drawn = read(HDF5Source(path, {"n": Field("n", points=size)}, patches_per_volume=20_000), range(20_000))
    for points in drawn["n"][:200]:
        assert len(set(points)) == size
        assert count < 6400 or len(set(points // chunk)) == 2
    share = size / count
    often = np.bincount(drawn["n"].ravel(), minlength=count) - 20_000 * share
    assert abs(often).max() < 4.5 * (20_000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("count", [None, 6])
@pytest.mark.parametrize("stored", CLOUDS)
def test_a_source_of_points_keeps_the_contract(tmp_path, stored, count):
    check_contract(points_of(write_clouds(tmp_path, stored), count))


def test_without_draws_points_follow_each_other(tmp_path):
    source = pickle.loads(pickle.dumps(points_of(write_clouds(tmp_path, "gzip"), None)))
    points = read(source, np.arange(len(source)), ["n_points", "n"])
    assert len(source) == 50 + 8 + 1
    for cloud, first, end in zip(range(3), (0, 50, 58), (50, 58, 59)):
        assert set(points["n"][first:end].ravel()) == set(range(COUNTS[cloud]))
        np.testing.assert_array_equal(points["n"][first:end], points["n_points"][first:end])


TEN, MANY, OTHER = Field("xyz", points=10), Field("xyz", points=1001), Field("other", points=10)


@pytest.mark.parametrize(
    ("fields", "options", "error", "words"),
    [
        ({"x": MANY}, {}, FormatError, ["shape (1000, 3), smaller than a sample (1001, 3)", "pad='zero'"]),
        ({"x": TEN, "y": OTHER}, {}, FormatError, ["/other", "10 of 999 points", "10 of 1000 points"]),
        ({"x": TEN, "y": Field("xyz", points=20)}, {}, FormatError, ["20 of", "10 of"]),
        ({"x": TEN, "y": "xyz"}, {}, ConfigError, ["fields.y"]),
        ({"x": TEN}, {"layout": {"x": "PC"}}, ConfigError, ["layout", "PC", "axis 0"]),
        ({"x": {"name": "xyz", "points": 0}}, {}, ConfigError, ["points: 0 is not"]),
        ({"x": {"name": "xyz", "points": 9, "window": 2}}, {}, ConfigError, ["window: does not apply to points"]),
    ],
)
def test_a_fault_of_points_is_named_before_training(h5, fields, options, error, words):
    refused(error, words, h5(xyz=np.zeros((1000, 3)), other=np.zeros(999)), fields, patches_per_volume=4, **options)
