"""Rows that h5py reads or that lie scattered; converted values; sequences."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.hdf5 import LATE, create, needs_libhdf5, stored_as
from support.files.sequences import STORED, sequences, written
from support.files.sequences import check as check_sequences
from support.memory import SMALL, peak
from support.sources.oracle import read, refused_when_read

from lit_async_data import AsyncLoader, Field, FormatError, HDF5Source, SourceError
from lit_async_data.sources.hdf5.readers import readers
from lit_async_data.tools.pack import pack


@pytest.mark.usefixtures("no_extra_codecs")
@pytest.mark.parametrize("kind", ["contiguous", "rows", "gzip", "lzf"])
@pytest.mark.parametrize("dtype", ["u8", ">u8"])
def test_a_label_beyond_int64_is_an_error_wherever_it_lies(path, kind, dtype):
    arguments, _ = stored_as(kind, (7,))
    with h5py.File(path, "w") as file:
        create(file, "labels", dtype=dtype, **arguments)[...] = [1, 2, 2**63 - 1, 2**63, 2**64 - 1, 6, 7]
    source = HDF5Source(path, {"x": "labels"})
    assert read(source, [2, 6, 0, 2])["x"].tolist() == [2**63 - 1, 7, 1, 2**63 - 1]
    for bad in (3, 4):
        for samples in ([bad], [0, bad], [bad, 6, 0], [5, bad, bad]):
            with pytest.raises(FormatError, match=f"labels.*{2**63 if bad == 3 else 2**64 - 1}"):
                read(source, samples)


@needs_libhdf5
def test_a_dataset_with_no_values_at_all_is_an_error_as_in_h5py(path):
    with h5py.File(path, "w", libver=("earliest", "v110")) as file:
        create(file, "data", (9, 3), "i4", undefined_fill=True, alloc=LATE)
    refused_when_read(SourceError, ["data"], path, {"x": "data"}, [1])


@pytest.mark.parametrize(("dtype", "fill"), [(None, -100), (None, 0), (None, 300), ("int64", -100), ("float32", -100)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", ["heap", "offsets"])
def test_padding_has_the_value_and_the_side_that_are_asked_for(path, where, dtype, fill, side):
    values = sequences(np.int16)
    written(path, values, np.int16)
    field = Field({"heap": "x", "offsets": "z"}[where], dtype=dtype, fill=fill, pad_side=side)
    source = HDF5Source(path, {"x": field, "y": "y"})
    with AsyncLoader(source, {"batch_size": 8, "batch_by": "x", "workers": 0}) as loader:
        for batch in loader:
            for row, x, length in zip(batch["y"].tolist(), batch["x"], batch["x_length"].tolist(), strict=True):
                rest = len(x) - length
                padding, found = (x[:rest], x[rest:]) if side == "left" else (x[length:], x[:length])
                assert np.array_equal(found.numpy(), values[row])
                assert (padding == fill).all()


ROWS = np.random.default_rng(0).integers(0, 8, (128, 64, 256), np.uint8)


def test_converted_values_are_read_in_small_blocks(h5, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 2**18)
    source = HDF5Source(h5(data=ROWS.astype("f8")), {"x": Field("data", dtype="float32")})
    order = np.random.default_rng(1).permutation(128)
    out = {"x": np.empty((128, *ROWS.shape[1:]), np.float32)}
    assert peak(lambda: source.read_into(order, out)) < 4 * 2**18 + SMALL  # of 16 MiB
    assert (out["x"] == ROWS[order]).all()
    assert (read(source, order[:3])["x"] == ROWS[order[:3]]).all()


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i2", "<f8"])
@pytest.mark.parametrize("stored", STORED)
def test_sequences_are_read_as_stored(path, dtype, stored):
    values = sequences(dtype)
    written(path, values, np.dtype(dtype), **STORED[stored])
    for mapped in (True, False):
        source = HDF5Source(path, {"x": "x", "y": "y"}, memory_map=mapped)
        assert source.spec["x"].shape == (900,)
        check_sequences(source, values)
        check_sequences(pickle.loads(pickle.dumps(source)), values)
        source.close()


@pytest.mark.parametrize("where", ["heap", "offsets"])
def test_a_packed_file_holds_them_padded_with_their_lengths(path, where):
    values = sequences(np.int16)
    written(path, values, np.int16)
    packed = Path(path).with_name("packed.h5")
    pack(HDF5Source(path, {"x": {"heap": "x", "offsets": "z"}[where], "y": "y"}), packed)
    check_sequences(HDF5Source(packed, {"x": "x", "x_length": "x_length"}), values)
