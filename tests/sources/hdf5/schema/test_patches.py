"""Patches: what does not fit is named; and shares of drawn patches with a class in their middle."""

import h5py
import numpy as np
import pytest
from support.sources.oracle import read, refused

from lit_async_data import AsyncLoader, ConfigError, Field, FormatError, HDF5Source
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.schema import patches

FLAT, PATCH = Field("ct", patch=(8, 7)), {"patch": (8, 7, 3)}
CT, STRIDED = Field("ct", **PATCH), Field("mask", **PATCH, stride=(1, 1, 1))
BOTH, UNLIKE = {"x": CT, "y": Field("mask", **PATCH)}, ["0.h5:/other", "(20, 31, 18)", "(20, 31, 17)"]
SIZES = ["/mask", "patches (8, 7, 4)", "/ct", "patches (8, 7, 3)"]
FAULTS = [
    ({"x": Field("ct", patch=(21, 8, 7))}, {}, FormatError, ["0.h5:/ct", "(20, 31, 17)", "(21, 8, 7)", "pad='zero'"]),
    ({"x": FLAT}, {}, ConfigError, ["fields.x.patch", "2 axes", "(20, 31, 17)", "layout"]),
    ({"x": FLAT}, {"layout": "NDHW"}, ConfigError, ["'NDHW' for", "without N"]),
    ({"x": FLAT}, {"layout": "HW"}, ConfigError, ["'HW' names 2 axes", "has 3", "(20, 31, 17)"]),
    ({"x": FLAT}, {"layout": {"x": 3}}, ConfigError, ["layout", "3"]),
    ({"x": CT, "y": Field("other", **PATCH)}, {}, FormatError, [*UNLIKE, "ct"]),
    ({"x": CT, "y": Field("mask", patch=(8, 7, 4))}, {}, FormatError, SIZES),
    ({"x": CT, "y": STRIDED}, {}, FormatError, ["/mask", "stride (1, 1, 1)", "stride (8, 7, 3)"]),
    ({"x": CT, "y": "rows"}, {}, ConfigError, ["fields.y", "0.h5:/rows", "table="]),
    ({"x": Field(["ct", "other"], **PATCH)}, {}, FormatError, UNLIKE),
    ({"x": Field("c*", **PATCH)}, {"sample": "group"}, ConfigError, ["sample", "volumes"]),
    ({"x": Field("empty", patch=(1, 1))}, {}, FormatError, ["0.h5:/empty", "(0, 4)"]),
    ({"x": CT}, {"stride": 2}, ConfigError, ["stride", "Field(stride=…)"]),
    ({"x": CT}, {"patches_per_volume": 0}, ConfigError, ["patches_per_volume", "0"]),
    ({"x": STRIDED}, {"patches_per_volume": 4}, ConfigError, ["fields.x.stride"]),
    ({"x": "rows"}, {"patches_per_volume": 4}, ConfigError, ["patches_per_volume", "patch=(32, 64, 64)"]),
    (BOTH, {"foreground": {"y": {7: 0.5}}}, ConfigError, ["foreground.y", "is 7"]),
    (BOTH, {"foreground": {"y": {1: 0}}}, ConfigError, ["foreground.y", "{1: 0}", "above 0"]),
    (BOTH, {"foreground": {"y": {1: 0.7, 2: 0.6}}}, ConfigError, ["foreground.y", "at most 1"]),
    (BOTH, {"foreground": {"y": {}}}, ConfigError, ["foreground.y"]),
    (BOTH, {"foreground": {"y": {1: True}}}, ConfigError, ["foreground.y", "{1: True} are not shares"]),
    (BOTH, {"foreground": {"y": {"tumour": 0.5}}}, ConfigError, ["foreground.y", "tumour"]),
    (BOTH, {"foreground": 0.5}, ConfigError, ["foreground", "0.5", "write {'y': {1: 0.33}}"]),
    (BOTH, {"foreground": {"y": {1: 0.5}, "x": {1: 0.5}}}, ConfigError, ["foreground", "name one of x, y"]),
    (BOTH, {"foreground": {"y": {1: 0.5}}, "patches_per_volume": None}, ConfigError, ["patches_per_volume"]),
    (BOTH, {"foreground": {"x": {1: 0.5}}}, ConfigError, ["foreground.x", "0.h5:/ct", "whole numbers"]),
    ({"x": CT, "x_origin": Field("mask", **PATCH)}, {}, ConfigError, ["x_origin", "the origin"]),
]


@pytest.mark.parametrize(("fields", "options", "error", "words"), FAULTS, ids=lambda each: "")
def test_a_fault_is_named_before_training(h5, fields, options, error, words):
    volumes = {"ct": np.zeros((20, 31, 17)), "mask": np.zeros((20, 31, 17), "u1"), "other": np.zeros((20, 31, 18))}
    path = h5("0.h5", **volumes, rows=np.arange(27), empty=np.zeros((0, 4)))
    options = ({"patches_per_volume": 4} if "foreground" in options else {}) | options
    refused(error, words, path, fields, **options)


SHAPES, SIZE = [(30, 40, 50), (24, 36, 28), (16, 16, 16)], (8, 9, 10)


def masks():
    """Class 1 is a small ball, class 2 a corner; the last volume has neither."""
    found = [np.zeros(shape, "u1") for shape in SHAPES]
    for mask, centre in zip(found, [(20, 20, 30), (6, 30, 9)]):
        near = sum(
            (np.arange(n) - c).reshape([-1 if a == b else 1 for b in range(3)]) ** 2
            for a, (n, c) in enumerate(zip(mask.shape, centre))
        )
        mask[near < 9] = 1
        mask[-1, -1, -1] = 2
    return found


def write(folder, **options):
    for number, mask in enumerate(masks()):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file.create_dataset("ct", data=np.random.default_rng(number).integers(0, 99, mask.shape), **options)
            file.create_dataset("mask", data=mask, **options)
    return str(folder / "*.h5")


def source_of(path, shares, **options):
    fields = {"x": Field("ct", patch=SIZE), "y": Field("mask", patch=SIZE)}
    return HDF5Source(path, fields, patches_per_volume=700, foreground=shares, **options)


@pytest.mark.parametrize("stored", [{}, {"chunks": (8, 8, 8), "compression": "gzip"}], ids=["raw", "gzip"])
def test_2000_patches_have_a_class_in_their_middle_by_its_share(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(patches, "SCANNED", 5000)  # the volumes take several pieces
    path = write(tmp_path, **stored)
    source, everywhere = source_of(path, {"y": {1: 0.4, 2: 0.25}}), source_of(path, None)
    with AsyncLoader(source, {"batch_size": 50, "shuffle": True, "return_indices": True}) as loader:
        batches = [{key: value.numpy() for key, value in batch.items()} for batch in loader]
    found = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    volumes, shares = masks(), {1: [], 2: []}
    for x, y, origin, other, sample in zip(*(found[key] for key in ("x", "y", "x_origin", "y_origin", "index"))):
        mask = volumes[sample // 700]
        box = tuple(slice(first, first + n) for first, n in zip(origin, SIZE))
        assert origin.tolist() == other.tolist()
        np.testing.assert_array_equal(y, mask[box])
        np.testing.assert_array_equal(x, np.random.default_rng(sample // 700).integers(0, 99, mask.shape)[box])
        if sample < 1400:
            shares[1].append(y[4, 4, 5] == 1)
            shares[2].append((origin == np.subtract(mask.shape, SIZE)).all())  # the corner has no patch around it
    plain = read(everywhere, np.arange(1400), ["y"])["y"][:, 4, 4, 5]
    assert abs(np.mean(shares[1]) - 0.4 - 0.35 * np.mean(plain == 1)) < 0.03
    assert abs(np.mean(shares[2]) - 0.25) < 0.03
    seen = {tuple(origin) for origin, sample in zip(found["y_origin"], found["index"]) if sample < 700}
    assert len(seen) > 300  # patches of class 1 lie around many of its elements, others anywhere


def test_a_volume_without_the_class_has_patches_anywhere(tmp_path, caplog):
    path = write(tmp_path)
    source, everywhere = source_of(path, {"y": {1: 1.0}}), source_of(path, None)
    assert [each.getMessage() for each in caplog.records] == [f"1 of 3 volumes have no class 1: {tmp_path / '2.h5'}"]
    every = np.arange(2100)
    foreground, plain = (read(each, every, ["y", "y_origin"]) for each in (source, everywhere))
    assert (foreground["y"][:1400, 4, 4, 5] == 1).all()
    np.testing.assert_array_equal(foreground["y_origin"][1400:], plain["y_origin"][1400:])


@pytest.mark.processes
def test_fixed_patches_of_many_volumes_of_one_shape_have_the_shares(h5):
    mask = np.zeros((30, 40, 50), "u1")
    mask[10:13, 15:19, 20:25] = 1
    paths, fields = [h5(f"{number}.h5", mask=mask) for number in range(40)], {"y": Field("mask", patch=SIZE)}
    for count in (1, 8):
        source = HDF5Source(paths, fields, patches_per_volume=count, foreground={"y": {1: 0.33}})
        assert abs(read(source, np.arange(len(source)), ["y"])["y"][:, 4, 4, 5].mean() - 0.33) < 0.12


@pytest.mark.parametrize("chunks", [None, (8, 8, 8)])
@pytest.mark.parametrize("most", [777, 2**20])
def test_elements_of_a_class_are_drawn_evenly_and_rare_ones_are_all_there(h5, chunks, most, monkeypatch):
    monkeypatch.setattr(patches, "SCANNED", most)
    mask = np.zeros((40, 48, 40), "u1")
    mask[:32], mask[39, 5, 7:10] = 1, 2
    path, fields = h5(mask={"data": mask, "chunks": chunks}), {"y": Field("mask", patch=SIZE)}
    source = HDF5Source(path, fields, patches_per_volume=1, foreground={"y": {1: 0.5, 2: 0.1}})
    (_, common), (_, rare) = source.stored_parts[0].fields["y"].patches.centres
    assert rare.tolist() == np.flatnonzero(mask == 2).tolist()
    assert len(set(common)) == len(common) == patches.CENTRES
    assert (mask.ravel()[common] == 1).all()
    cells = np.ravel_multi_index(np.array(np.unravel_index(common, mask.shape)) // 8, (4, 6, 5))
    expected = patches.CENTRES / 120
    assert ((np.bincount(cells, minlength=120) - expected) ** 2 / expected).sum() < 190  # chi² of 119; p = 3e-5


def test_classes_are_read_once_with_a_cache_dir(tmp_path, monkeypatch):
    path = write(tmp_path)
    monkeypatch.setattr(index, "changed_recently", lambda *_: False)
    kept = tmp_path / "kept"
    first = source_of(path, {"y": {1: 0.5}}, cache_dir=kept)
    stored = []
    monkeypatch.setattr(index.IndexCache, "store", lambda self, key, columns: stored.append(key))
    again = source_of(path, {"y": {1: 0.5}}, cache_dir=kept)
    assert stored == []
    every = np.arange(0, 2100, 50)
    np.testing.assert_array_equal(read(first, every)["x"], read(again, every)["x"])
    source_of(path, {"y": {2: 0.5}}, cache_dir=kept)  # other classes
    assert len(stored) == 3


def test_numbers_of_numpy_are_classes_and_shares_and_other_shares_are_other_samples(tmp_path):
    path = write(tmp_path)
    own, same = source_of(path, {"y": {np.int64(1): np.float32(0.5)}}), source_of(path, {"y": {1: 0.5}})
    assert own.fingerprint() == same.fingerprint() != source_of(path, {"y": {1: 0.6}}).fingerprint()
    origins = (read(each, np.arange(len(own)), ["y_origin"])["y_origin"] for each in (own, same))
    np.testing.assert_array_equal(*origins)
