"""Datasets of variable length, whose values lie in the global heap, are read as h5py reads them."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from support.files.sequences import STORED, check, sequences, written

from lit_async_data import AsyncLoader, CorruptError, Field, HDF5Source
from lit_async_data.tools.pack import pack


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


@pytest.mark.parametrize("where", ["heap", "offsets"])
def test_a_packed_file_holds_them_padded_with_their_lengths(path, where):
    values = sequences(np.int16)
    written(path, values, np.int16)
    pack(HDF5Source(path, {"x": {"heap": "x", "offsets": "z"}[where], "y": "y"}), Path(path).with_name("packed.h5"))
    check(HDF5Source(Path(path).with_name("packed.h5"), {"x": "x", "x_length": "x_length"}), values)


def test_a_value_that_the_heap_lacks_is_an_error_that_names_its_row(path):
    values = sequences(np.int32)
    written(path, values, np.int32)
    data = bytearray(Path(path).read_bytes())
    places = [found.start() for found in re.finditer(b"GCOL", data)]
    data[places[0] : places[0] + 4] = b"XXXX"
    Path(path).write_bytes(data)
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
