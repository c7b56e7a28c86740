"""Datasets of variable length, whose values lie in the global heap, are read as h5py reads them."""

import itertools
import pickle
import re

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, Field, HDF5Source
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.hdf5.index import cache
from lit_async_data.sources.hdf5.schema import sequences as stored_sequences
from lit_async_data.tools.pack.packing import pack

STORED = {
    "contiguous": {},
    "chunks": {"chunks": (7,)},
    "gzip": {"chunks": (16,), "compression": "gzip", "shuffle": True},  # which libhdf5 skips, as it cannot be undone
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.h5"


def sequences(dtype, count=60):
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 40, count)
    lengths[[3, 5]] = 0, 900  # one is larger than a collection of the heap
    return [generator.integers(0, 100, length).astype(dtype) for length in lengths]


def written(path, values, dtype, **options):
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (len(values),), h5py.vlen_dtype(dtype), **options)
        for row, value in enumerate(values):
            dataset[row] = value
        file["y"] = np.arange(len(values))


def check(source, values):
    batch = source.__getitems__(range(len(values)))
    for one, value in zip(batch, values, strict=True):
        assert one["x_length"] == len(value)
        assert np.array_equal(one["x"][: len(value)], value)
        assert not one["x"][len(value) :].any()


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i2", "<f8"])
@pytest.mark.parametrize("stored", STORED)
def test_sequences_are_read_as_stored(path, dtype, stored):
    values = sequences(dtype)
    written(path, values, np.dtype(dtype), **STORED[stored])
    for mapped in (True, False):
        source = HDF5Source(path, {"x": "x", "y": "y"}, memory_map=mapped)
        assert source.spec["x"].shape == (900,)
        check(source, values)
        check(pickle.loads(pickle.dumps(source)), values)
        source.close()


@pytest.mark.parametrize("earliest", [True, False])
def test_any_version_of_the_format(path, earliest):
    with h5py.File(path, "w", libver="earliest" if earliest else "latest") as file:
        file.create_dataset("x", (3,), h5py.vlen_dtype(np.int16), chunks=(2,))[1] = np.arange(5, dtype=np.int16)
    check(HDF5Source(path, {"x": "x"}), [[], range(5), []])


def test_text_as_bytes(path):
    text = ["CCO", "", "c1ccccc1", "Δ"]
    with h5py.File(path, "w") as file:
        file["x"] = text
    check(HDF5Source(path, {"x": Field("x", dtype="uint8")}), [list(each.encode()) for each in text])


def test_casts_lengths_and_batches_by_length(path):
    values = sequences(np.int32)
    written(path, values, np.int32)
    check(HDF5Source(path, {"x": Field("x", dtype="float32", max_length=1000)}), values)
    source = HDF5Source(path, {"x": Field("x", dtype="int64"), "y": "y"})
    with AsyncLoader(source, {"batch_size": 8, "batch_by": "x", "batch_elements": 900, "workers": 2}) as loader:
        for batch in loader:
            assert batch["x"].numel() <= 900
            for row, x, length in zip(batch["y"].tolist(), batch["x"], batch["x_length"].tolist(), strict=True):
                assert np.array_equal(x[:length].numpy(), values[row])
    source.close()


@pytest.mark.parametrize("where", ["heap", "offsets"])
def test_a_packed_file_holds_them_padded_with_their_lengths(path, where):
    values = sequences(np.int16)
    written(path, values, np.int16)
    with h5py.File(path, "a") as file:
        file["z/values"], file["z/offsets"] = np.concatenate(values), np.cumsum([0, *map(len, values)])
    pack(HDF5Source(path, {"x": {"heap": "x", "offsets": "z"}[where], "y": "y"}), path.with_name("packed.h5"))
    check(HDF5Source(path.with_name("packed.h5"), {"x": "x", "x_length": "x_length"}), values)


@pytest.mark.parametrize(("dtype", "fill"), [(None, -100), (None, 0), (None, 300), ("int64", -100), ("float32", -100)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", ["heap", "offsets"])
def test_padding_has_the_value_and_the_side_that_are_asked_for(path, where, dtype, fill, side):
    values = sequences(np.int16)
    written(path, values, np.int16)
    with h5py.File(path, "a") as file:
        file["z/values"], file["z/offsets"] = np.concatenate(values), np.cumsum([0, *map(len, values)])
    field = Field({"heap": "x", "offsets": "z"}[where], dtype=dtype, fill=fill, pad_side=side)
    source = HDF5Source(path, {"x": field, "y": "y"})
    with AsyncLoader(source, {"batch_size": 8, "batch_by": "x", "workers": 0}) as loader:
        for batch in loader:
            for row, x, length in zip(batch["y"].tolist(), batch["x"], batch["x_length"].tolist(), strict=True):
                rest = len(x) - length
                padding, found = (x[:rest], x[rest:]) if side == "left" else (x[length:], x[:length])
                assert np.array_equal(found.numpy(), values[row])
                assert (padding == fill).all()
    source.close()


def test_padding_that_only_the_delivered_type_holds_is_not_left_to_the_device(path):
    written(path, sequences(np.uint8), np.uint8)
    assert HDF5Source(path, {"x": Field("x", dtype="int64")}).spec["x"].narrow == np.uint8
    assert HDF5Source(path, {"x": Field("x", dtype="int64", fill=-100)}).spec["x"].narrow is None


def test_a_value_that_the_heap_lacks_is_an_error_that_names_its_row(path):
    values = sequences(np.int32)
    written(path, values, np.int32)
    data = bytearray(path.read_bytes())
    places = [found.start() for found in re.finditer(b"GCOL", data)]
    data[places[0] : places[0] + 4] = b"XXXX"
    path.write_bytes(data)
    source, bad = HDF5Source(path, {"x": "x"}), []
    for row, value in enumerate(values):
        try:
            found = source[row]["x"][: len(value)]
        except CorruptError as error:
            bad.append((row, error.row, error.sample_id))
            continue
        assert np.array_equal(found, value)
    assert all(row == named == sample for row, named, sample in bad)
    assert 0 < len(bad) < len(values)
    source.close()


def with_wrong_references(path, values):
    written(path, values, np.int32)
    with h5py.File(path) as file:
        begin = file["x"].id.get_offset()
    data = bytearray(path.read_bytes())
    for row, place, wrong in [(9, 4, b"\xff" * 7), (20, 0, b"\xff" * 4)]:  # an address and a length
        data[begin + 16 * row + place : begin + 16 * row + place + len(wrong)] = wrong
    path.write_bytes(data)


def with_wrong_offsets(path, values):
    offsets = np.cumsum([0, *map(len, values)])
    offsets[[10, 30]] = 2**40, 5
    with h5py.File(path, "w") as file:
        file.create_dataset("x/values", data=np.concatenate(values), chunks=(50,), compression="gzip")
        file["x/offsets"], file["y"] = offsets, np.arange(len(values))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize(
    "damage",
    [
        (with_wrong_references, (9, 20), "refers to a place outside of the file"),
        (with_wrong_offsets, (9, 10, 29, 30), r"\d+ to \d+ of \d+ elements; it must begin with 0, never fall and end"),
    ],
)
def test_samples_that_are_nowhere_are_told_at_opening_and_named_when_read(path, damage, kind, caplog):
    values, (damaged, lost, said) = sequences(np.int32), damage
    damaged(path, values)
    source = HDF5Source(path, {"x": "x", "y": "y"})
    assert re.search(rf"{len(lost)} of 60 samples cannot be read: \S+, row 9: {said}", caplog.text)
    assert caplog.text.count("cannot be read") == 1
    for row in lost:
        values[row] = values[0]  # lends its length, so that no bucket is of bad ones
        with pytest.raises(CorruptError, match=f"row {row}: {said}") as caught:
            source[row]
        error = caught.value
        assert (error.file, error.dataset, error.row, error.sample_id) == (str(path), "x", row, row)
    assert source.column("x_length").tolist() == list(map(len, values))
    options = {"batch_size": 8, "batch_by": "x", "workers": 1, "worker_kind": kind, "on_error": "skip", "max_bad": 4}
    left = {row: values[row] for row in range(60) if row not in lost}
    with AsyncLoader(source, options) as loader:
        found = {y: x[:n].tolist() for batch in loader for y, x, n in zip(*map(batch.get, ("y", "x", "x_length")))}
    assert {int(row): value for row, value in found.items()} == {row: value.tolist() for row, value in left.items()}
    caplog.clear()
    check(HDF5Source(path, {"x": "x"}, exclude=lost), left.values())
    assert "cannot be read" not in caplog.text
    with pytest.raises(CorruptError, match=f"row 9: {said}"):
        HDF5Source(path, {"x": "x"}, rows=lost)


@pytest.mark.parametrize(
    ("offsets", "lost"),
    [
        ([0, 2, 4, 6, 8, 10], []),
        ([0, 2, 4, 9, 11, 13], [3, 4]),  # the values end early
        ([0, 2, 4, 6, 0, 0], [3, 4]),  # the last were never written
        ([0, 2, 4, 0, 0, 0, 0, 8, 10], [2, 3, 4, 5, 6]),
        ([0, 4, 2, 6, 8, 10], [0, 1, 2]),  # either of two may be wrong
        ([0, 2, 4, -1, 8, 10], [2, 3]),
        ([0, 2, 4, 6, 8, 9, 7, 10], [5, 6]),
        ([1, 3, 5, 7, 9, 11], None),  # counted from 1
        ([20, 24, 30], None),  # those of another part
        ([0, 2, 4, 6, 8], None),  # the end is missing
        ([0, 12], None),
        ([0, 8, 16, 24, 32, 40], None),  # in bytes
        ([0, 8, 0, 24, 32, 40], None),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_an_offset_is_right_if_no_other_contradicts_it(path, offsets, lost, sparse):
    with h5py.File(path, "w") as file:
        names = ("data", "indices", "indptr") if sparse else ("values", "none", "offsets")
        for name, values in zip(names, (np.arange(1, 11), np.arange(10), offsets), strict=True):
            file[f"x/{name}"] = values
        if sparse:
            file["x"].attrs.update({"encoding-type": "csr_matrix", "shape": (len(offsets) - 1, 10)})
    if lost is None:
        with pytest.raises(CorruptError, match=rf"x/{names[2]}, row \d: \d+ to \d+ of 10 elements; it must"):
            HDF5Source(path, {"x": "x"})
        return
    source = HDF5Source(path, {"x": "x"})
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if row in lost:
            with pytest.raises(
                CorruptError, match=f"x/{names[2]}, row {row}: {begin} to {end} of 10 elements; it must"
            ):
                source[row]
        else:
            assert sorted(filter(None, source[row]["x"].tolist())) == [*range(begin + 1, end + 1)]


def test_references_are_kept_until_the_file_changes(path, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "changed_recently", lambda *_: False)
    monkeypatch.setattr(cache, "FEWEST_CHUNKS", 9)
    for values in (sequences(np.int32), sequences(np.int32)[::-1]):
        written(path, values, np.int32, **STORED["chunks"])
        check(HDF5Source(path, {"x": "x"}, cache_dir=tmp_path), values)
        with monkeypatch.context() as patch:
            patch.setattr(stored_sequences, "_stored_references", None)
            check(HDF5Source(path, {"x": "x"}, cache_dir=tmp_path), values)


def test_references_that_cannot_be_decoded_are_found_at_opening(path):
    written(path, sequences(np.int32), np.int32, **STORED["gzip"])
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(2)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + 4 : chunk.byte_offset + 20] = bytes(16)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"row 32: .*deflate") as caught:
        HDF5Source(path, {"x": "x"})
    assert (caught.value.file, caught.value.dataset, caught.value.row) == (str(path), "x", 32)


def test_references_in_another_file_are_refused(path, tmp_path):
    written(path, sequences(np.int32), np.int32)
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink(path.name, "/x")
    with pytest.raises(FormatError, match="since other files hold its values"):
        HDF5Source(tmp_path / "link.h5", {"x": "x"}, allow_external=True)


@pytest.mark.parametrize(
    ("field", "kind", "text"),
    [
        (Field("x", window=(0, 2)), ConfigError, "window: does not apply"),
        (Field("x", max_length=10), FormatError, "raise max_length"),
        (Field("x", dtype="uint8", fill=-100), ConfigError, "fields.x.fill: -100 is not a value of uint8"),
        (Field("x", fill=0.5), ConfigError, "fields.x.fill: 0.5 is not a value of int32"),
        (Field("y", fill=1), ConfigError, "fields.x.fill: .*holds no samples of variable length"),
        (Field("y", null="drop"), ConfigError, "fields.x.null: .*holds no text"),
        (Field("two"), FormatError, "on 2 axes"),
        (Field("nested"), FormatError, "values of variable length"),
        (Field("unwritten"), FormatError, "since none was ever written"),
    ],
)
def test_what_does_not_fit_is_named(path, field, kind, text):
    written(path, sequences(np.int32), np.int32)
    with h5py.File(path, "a") as file:
        file.create_dataset("two", (2, 2), h5py.vlen_dtype(np.int32))[0, 0] = np.arange(3)
        file.create_dataset("nested", (2,), h5py.vlen_dtype(np.dtype([("a", "i4")])))
        file.create_dataset("unwritten", (2,), h5py.vlen_dtype(np.int32))
    with pytest.raises(kind, match=text):
        HDF5Source(path, {"x": field})


def test_a_user_block_changes_nothing(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("x", (2,), h5py.vlen_dtype(np.int32))[0] = np.arange(3)
        file.create_dataset("chunks", (2,), h5py.vlen_dtype(np.int32), chunks=(1,))[1] = np.arange(4)
    check(HDF5Source(path, {"x": "x"}), [range(3), []])
    check(HDF5Source(path, {"x": "chunks"}), [[], range(4)])
