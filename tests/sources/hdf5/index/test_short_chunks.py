"""Files with an impossible index are refused, naming the chunk. h5py returns heap memory or other bytes for it."""

import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files.damage import LOCKED, ODD, VALUES, check_refused, key_of, made, patch, read_all

from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.index import records
from lit_async_data.sources.hdf5.storage.codecs import Filter, fletcher32


@pytest.mark.parametrize(("kind", "whole"), [("scale-offset", 97), ("n-bit", 91)])
@pytest.mark.parametrize("fewer", [1, 0, -1, -20, -56, -88])
def test_a_packed_chunk_of_too_few_bytes_is_damage(tmp_path, kind, whole, fewer):
    path = tmp_path / "x.h5"
    info = made(path, **LOCKED[kind])
    needed = whole - 1  # libhdf5 writes one byte that it does not read
    assert info.size == whole
    patch(path, key_of(path, info), "<I", needed + fewer)
    if fewer >= 0:
        assert (read_all(path) == VALUES).all()
        return
    check_refused(
        path, rf", chunk \(25, 0\) of {needed + fewer} bytes at byte {info.byte_offset}: only {needed + fewer} of"
    )


def shuffled(data):
    whole = len(data) // 4 * 4
    return np.frombuffer(data[:whole], np.uint8).reshape(-1, 4).T.tobytes() + data[whole:]


AFTERWARDS = {
    "gzip": zlib.compress,
    "shuffle": shuffled,
    "fletcher32": lambda data: data + fletcher32(np.frombuffer(data, np.uint8)).to_bytes(4, "little"),
}


@pytest.mark.parametrize(
    "names",
    [
        ["scaleoffset", "gzip"],
        ["scaleoffset", "shuffle", "gzip", "fletcher32"],
        ["scaleoffset", "fletcher32"],
        ["nbit", "gzip"],
        ["nbit", "fletcher32", "gzip"],
        ["gzip"],
        ["gzip", "shuffle", "fletcher32"],
    ],
    ids=" ".join,
)
def test_a_chunk_that_decodes_to_too_few_bytes_is_damage_where_h5py_reads_it_too(tmp_path, names):
    """Its checksums are right: the writer gave the filters too few bytes."""
    path, alone, content = tmp_path / "x.h5", tmp_path / "alone.h5", VALUES[25:30].tobytes()
    dtype = ODD if "nbit" in names else "<i4"
    made(path, names, dtype, maxshape=(50, None), libver="v110")
    if names[0] != "gzip":
        made(alone, names[:1], dtype)
        names = names[1:]
        with h5py.File(alone) as file:
            content = file["data"].id.read_direct_chunk((25, 0))[1]
    for cut in (len(content), 40):
        stored = content[:cut]
        for name in names:
            stored = AFTERWARDS[name](stored)
        with h5py.File(path, "r+") as file:
            file["data"].id.write_direct_chunk((25, 0), stored)
        if cut != 40:
            assert (read_all(path) == VALUES).all()
    check_refused(path, r", chunk \(25, 0\) of \d+ bytes: (only 40 of|40 bytes instead of 120)")


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from([("i1", 1), ("u2", 2), (">i4", 4), ("u8", 8)]),
    st.integers(1, 40),
    st.sampled_from([None, 0, 5]),
)
def test_a_healthy_packed_chunk_is_never_refused(first, last, dtype, count, fill):
    name, size = dtype
    values = np.linspace(first % 2 ** (8 * size - 1), last % 2 ** (8 * size - 1), count).astype(name)
    with h5py.File("x.h5", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("data", data=values, chunks=(count,), scaleoffset=0, fillvalue=fill)
        records.check_chunk_lengths(dataset, 0, 0, count)
        floats = file.create_dataset("floats", data=values.astype("f8"), chunks=(count,), scaleoffset=3)
        records.check_chunk_lengths(floats, 0, 0, count)


@pytest.mark.parametrize(
    ("filter_", "head", "message"),
    [
        (Filter(records.SCALEOFFSET, (2, 0, 30, 0, 4)), 33, "33 bits per value, but a value has 4 bytes"),
        (Filter(records.SCALEOFFSET, (2, 0, 29, 0, 4)), 20, "116 bytes instead of 120"),
        (Filter(records.NBIT, (8, 0, 29, 1, 4, 0, 24, 0)), 0, "116 bytes instead of 120"),
        (Filter(records.NBIT, (8, 1, 30, 1, 4, 0, 32, 0)), 0, "96 bytes instead of 120"),
        (Filter(records.SCALEOFFSET, (2, 32, 30, 0, 4)), 0, "96 bytes instead of 120"),  # stored unchanged
    ],
)
def test_the_head_of_a_packed_chunk_must_fit_the_dataset(filter_, head, message):
    data = np.frombuffer(head.to_bytes(4, "little") + bytes(92), np.uint8)
    with pytest.raises(CorruptError, match=message):
        records.check_chunk_length((filter_,), 0, data, 120)
    records.check_chunk_length((filter_,), 1, np.zeros(120, np.uint8), 120)  # without the filter


def test_what_inflates_beyond_a_chunk_is_not_left_to_libhdf5(tmp_path):
    """libhdf5 would take memory for all of it."""
    path = tmp_path / "x.h5"
    made(path, ["scaleoffset", "gzip"])
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((25, 0), zlib.compress(bytes(10**6)))
    check_refused(path, r", chunk \(25, 0\) of \d+ bytes.*inflates beyond the \d+ bytes")
