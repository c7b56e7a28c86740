"""Random points of clouds: of every way of storage, against rows of whole arrays."""

import pickle

import h5py
import numpy as np
import pytest
from support.sources.oracle import read, refused

from lit_async_data import AsyncLoader, ConfigError, Field, FormatError, HDF5Source, statistics
from lit_async_data.testing import check_contract

COUNTS = (5000, 777, 60)  # points of the clouds; a sample has 100
STORED = {
    "raw": ({}, {}),
    "chunked": ({"chunks": (64, 3)}, {"chunks": (64,)}),
    "gzip": ({"chunks": (64, 3), "compression": "gzip"}, {"chunks": (150,), "compression": "lzf"}),
    "torn rows": ({"chunks": (64, 2), "compression": "gzip"}, {}),
    "only libhdf5": ({"chunks": (64, 3), "scaleoffset": 0}, {}),
}


def clouds():
    rngs = [np.random.default_rng(number) for number in range(len(COUNTS))]
    return [(rng.integers(-999, 999, (count, 3)).astype("i4"), np.arange(count)) for rng, count in zip(rngs, COUNTS)]


def write(folder, stored):
    for number, ((xyz, numbers), count) in enumerate(zip(clouds(), COUNTS)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            for name, values, options in zip(("xyz", "number"), (xyz, numbers), STORED[stored]):
                file.create_dataset(name, data=values, **(options if count >= 150 else {}))
            file["red"] = numbers % 7
            file["green"] = numbers % 9
    return str(folder / "*.h5")


def source_of(path, count=60, **options):
    points = {"points": 100, "pad": "last"}
    fields = {"x": Field("xyz", dtype="float32", **points), "n": Field("number", **points)}
    fields["colour"] = Field(["red", "green"], **points)
    return HDF5Source(path, fields, patches_per_volume=count, **options)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("stored", STORED)
def test_2000_samples_equal_rows_of_whole_arrays(tmp_path, stored, mapped):
    source, found = source_of(write(tmp_path, stored), 700, memory_map=mapped), clouds()
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


def test_a_sample_decodes_few_chunks_and_all_points_are_drawn_as_often(h5):
    path = h5(n={"data": np.arange(6400), "chunks": (64,), "compression": "gzip"})
    source = HDF5Source(path, {"n": Field("n", points=100)}, patches_per_volume=6400)
    drawn = read(source, np.arange(6400))["n"]
    chunks = [len(set(sample // 64)) for sample in drawn]
    assert set(chunks) == {2}
    often = np.bincount(drawn.ravel() % 64, minlength=64) / 100  # of a place within its chunk, 100 on average
    assert abs(often - 100).max() < 10


@pytest.mark.parametrize(
    ("count", "size", "chunk"),
    [
        *((210, size, 64) for size in (10, 50, 100, 200)),
        *((65, 64, 64), (66, 1, 64), (100, 99, 64), (192, 64, 64), (130, 129, 64)),
        *((300, 10, None), (200, 10, None), (1000, 500, None)),
    ],
)
def test_points_of_a_short_chunk_are_drawn_as_often_as_others(h5, count, size, chunk):
    stored = {} if chunk is None else {"chunks": (chunk,), "compression": "gzip"}
    path = h5(n={"data": np.arange(count), **stored})
    drawn = read(HDF5Source(path, {"n": Field("n", points=size)}, patches_per_volume=20_000), range(20_000))
    for points in drawn["n"][:200]:
        assert len(set(points)) == size
    share = size / count
    often = np.bincount(drawn["n"].ravel(), minlength=count) - 20_000 * share
    assert abs(often).max() < 4.5 * (20_000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("count", [None, 6])
@pytest.mark.parametrize("stored", STORED)
def test_a_source_of_points_keeps_the_contract(tmp_path, stored, count):
    check_contract(source_of(write(tmp_path, stored), count))


def test_without_draws_points_follow_each_other(tmp_path):
    source = pickle.loads(pickle.dumps(source_of(write(tmp_path, "gzip"), None)))
    points = read(source, np.arange(len(source)), ["n_points", "n"])
    assert len(source) == 50 + 8 + 1
    for cloud, first, end in zip(range(3), (0, 50, 58), (50, 58, 59)):
        assert set(points["n"][first:end].ravel()) == set(range(COUNTS[cloud]))
        np.testing.assert_array_equal(points["n"][first:end], points["n_points"][first:end])


def test_padding_is_not_in_the_statistics(tmp_path):
    found = statistics(source_of(write(tmp_path, "raw"), None), axis=None)["n"]
    assert (found.count, found.max) == (5000 + 800 + 60, 4999)


TEN, MANY, OTHER = Field("xyz", points=10), Field("xyz", points=1001), Field("other", points=10)


@pytest.mark.parametrize(
    ("fields", "options", "error", "words"),
    [
        ({"x": MANY}, {}, FormatError, ["shape (1000, 3), smaller than a sample (1001, 3)", "pad='zero'"]),
        ({"x": TEN, "y": OTHER}, {}, FormatError, ["/other", "10 of 999 points", "10 of 1000 points"]),
        ({"x": TEN, "y": Field("xyz", points=20)}, {}, FormatError, ["20 of", "10 of"]),
        ({"x": TEN, "y": Field("xyz", patch=(10, 3))}, {}, FormatError, ["10 of 1000", "(10, 3)"]),
        ({"x": TEN, "y": "xyz"}, {}, ConfigError, ["fields.y"]),
        ({"x": TEN}, {"layout": {"x": "PC"}}, ConfigError, ["layout", "PC", "axis 0"]),
        ({"x": TEN}, {"stride": 2}, ConfigError, ["stride"]),
    ],
)
def test_a_fault_is_named_before_training(h5, fields, options, error, words):
    refused(error, words, h5(xyz=np.zeros((1000, 3)), other=np.zeros(999)), fields, patches_per_volume=4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 0}, "points: 0 is not"),
        ({"points": 9, "patch": (9, 3)}, "points: does not apply to patches"),
        ({"points": 9, "window": (0, 2)}, "window: does not apply to points"),
        ({"points": 9, "stride": 4}, "stride: does not apply to points"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Field("x", **options)
