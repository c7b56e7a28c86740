"""Shares of drawn patches with a class in their middle."""

import math

import h5py
import numpy as np
import pytest
from support.sources.oracle import read, refused

from lit_async_data import AsyncLoader, ConfigError, Field, FormatError, HDF5Source
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.schema import patches

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


@pytest.mark.parametrize(
    ("shape", "chunk", "most"),
    [
        ((30, 40, 50), (8, 8, 8), 5000),
        ((30, 40, 50), (30, 40, 1), 5000),
        ((7, 300), (1, 1), 64),
        ((9,), (4,), 1),
        ((3, 5, 7, 2), (1, 1, 1, 1), 10**6),
    ],
)
def test_each_chunk_of_classes_is_decoded_once(shape, chunk, most, monkeypatch):
    monkeypatch.setattr(patches, "SCANNED", most)
    often = np.zeros(shape, int)
    for box in patches._boxes(shape, chunk):
        often[box] += 1
        assert often[box].size <= max(most, math.prod(chunk))
        assert not any(span.start % n or (span.stop % n and span.stop < m) for span, n, m in zip(box, chunk, shape))
    assert (often == 1).all()


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


@pytest.mark.parametrize(
    ("foreground", "options", "error", "words"),
    [
        ({"y": {7: 0.5}}, {}, ConfigError, ["foreground.y", "3 volumes is 7"]),
        ({"y": {1: 0}}, {}, ConfigError, ["foreground.y", "{1: 0}", "above 0"]),
        ({"y": {1: 0.7, 2: 0.6}}, {}, ConfigError, ["foreground.y", "at most 1"]),
        ({"y": {}}, {}, ConfigError, ["foreground.y"]),
        ({"y": 0.5}, {}, ConfigError, ["foreground.y", "0.5"]),
        ({"y": {1: 0.5, 2: math.nan}}, {}, ConfigError, ["foreground.y", "nan"]),
        ({"y": {1: True}}, {}, ConfigError, ["foreground.y", "{1: True} are not shares"]),
        ({"y": {1: "half"}}, {}, ConfigError, ["foreground.y", "half"]),
        ({"y": {"tumour": 0.5}}, {}, ConfigError, ["foreground.y", "tumour"]),
        (0.5, {}, ConfigError, ["foreground", "0.5", "write {'y': {1: 0.33}}"]),
        ({"z": {1: 0.5}}, {}, ConfigError, ["foreground", "'z'"]),
        ({"y": {1: 0.5}, "x": {1: 0.5}}, {}, ConfigError, ["foreground", "name one of x, y"]),
        ({"y": {1: 0.5}}, {"patches_per_volume": None}, ConfigError, ["foreground", "patches_per_volume"]),
        ({"x": {1: 0.5}}, {}, ConfigError, ["foreground.x", "0.h5:/ct", "whole numbers"]),
    ],
)
def test_a_fault_is_named_before_training(tmp_path, foreground, options, error, words):
    write(tmp_path)
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "a") as file:
            values = file["ct"][...]
            del file["ct"]
            file["ct"] = values.astype("f4")
    fields = {"x": Field("ct", patch=SIZE), "y": Field("mask", patch=SIZE)}
    options = {"patches_per_volume": 4, "foreground": foreground} | options
    refused(error, words, str(tmp_path / "*.h5"), fields, **options)


def test_a_mask_of_another_shape_is_refused(tmp_path):
    write(tmp_path)
    with h5py.File(tmp_path / "1.h5", "a") as file:
        del file["mask"]
        file["mask"] = np.zeros((24, 36, 27), "u1")
    fields = {"x": Field("ct", patch=SIZE), "y": Field("mask", patch=SIZE)}
    words = ["1.h5:/mask", "(24, 36, 27)", "(24, 36, 28)"]
    refused(FormatError, words, str(tmp_path / "*.h5"), fields, patches_per_volume=4, foreground={"y": {1: 0.5}})
