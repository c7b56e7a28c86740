"""Files with an impossible index are refused, naming the chunk. h5py returns heap memory or other bytes for it."""

import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files.hdf5 import create
from support.sources.oracle import read_from

from lit_async_data import HDF5Source
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.index import records, short_chunks
from lit_async_data.sources.hdf5.storage.codecs import Filter, fletcher32

VALUES = np.random.default_rng(1).integers(0, 10**6, (50, 6)).astype("<i4")
ODD = h5py.h5t.STD_I32LE.copy()  # numpy has no such type, so h5py must read it
ODD.set_precision(24)
EDGE = {"filters": ["shuffle"], "shape": (52, 7)}  # edge chunks may or may not be shuffled
LOCKED = {
    "scale-offset": {"filters": ["scaleoffset"]},
    "n-bit": {"filters": ["nbit"], "dtype": ODD},
    "odd type": {"dtype": ODD},
    "shuffle at an edge": EDGE,
}
STORED = {"plain": {}, "gzip": {"filters": ["gzip"]}, **LOCKED}


def made(path, filters=(), dtype="<i4", shape=(50, 6), maxshape=None, **options):
    """Writes a dataset of chunks of (5, 6); returns the record of the chunk of rows 25 to 29."""
    with h5py.File(path, "w", **options) as file:
        dataset = create(file, "data", shape, dtype, chunks=(5, 6), filters=filters, maxshape=maxshape)
        dataset[...] = np.resize(VALUES, shape)
        file.flush()
        found = []
        dataset.id.chunk_iter(lambda info: found.append(info) if info.chunk_offset == (25, 0) else None)
    return found[0] if found else None  # libhdf5 lists wrong ones if only the second axis is unlimited


def patch(path, at, layout, value):
    content = bytearray(Path(path).read_bytes())
    struct.pack_into(layout, content, at, value)
    Path(path).write_bytes(content)


def key_of(path, info, user_block=0):
    """Where the record of a chunk begins in a B-tree of version 1: size, mask, corner, 0, address."""
    return Path(path).read_bytes().index(struct.pack("<Q", info.byte_offset - user_block)) - 32


def read_all(path):
    return read_from(str(path), {"data": "data"})["data"]


def check_refused(path, message):
    with pytest.raises(CorruptError, match=rf"^{path}:/data{message}.*restore") as caught:
        read_all(path)
    assert (caught.value.file, caught.value.dataset) == (str(path), "data")


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


@pytest.mark.parametrize("short", [False, True])
def test_a_short_chunk_of_a_dataset_that_is_read_whole_is_damage(tmp_path, short):
    """Rows are chosen when the source is built, by h5py: it would take memory that was never written."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(20)
        kept = file.create_dataset("kept", data=np.arange(10), chunks=(5,), compression="gzip")
        content = np.arange(5, 10).tobytes()
        kept.id.write_direct_chunk((5,), zlib.compress(content[:8] if short else content))
    if short:
        with pytest.raises(CorruptError, match=r"^rows: .*x.h5:/kept, chunk \(5,\) .*8 bytes instead of 40"):
            HDF5Source(path, ["data"], rows="kept")
    else:
        assert len(HDF5Source(path, ["data"], rows="kept")) == 10


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
        short_chunks.check_chunk_lengths(dataset, 0, 0, count)
        floats = file.create_dataset("floats", data=values.astype("f8"), chunks=(count,), scaleoffset=3)
        short_chunks.check_chunk_lengths(floats, 0, 0, count)


@pytest.mark.parametrize(
    ("filter_", "head", "message"),
    [
        (Filter(short_chunks.SCALEOFFSET, (2, 0, 30, 0, 4)), 33, "33 bits per value, but a value has 4 bytes"),
        (Filter(short_chunks.SCALEOFFSET, (2, 0, 29, 0, 4)), 20, "116 bytes instead of 120"),
        (Filter(short_chunks.NBIT, (8, 0, 29, 1, 4, 0, 24, 0)), 0, "116 bytes instead of 120"),
        (Filter(short_chunks.NBIT, (8, 1, 30, 1, 4, 0, 32, 0)), 0, "96 bytes instead of 120"),
        (Filter(short_chunks.SCALEOFFSET, (2, 32, 30, 0, 4)), 0, "96 bytes instead of 120"),  # stored unchanged
    ],
)
def test_the_head_of_a_packed_chunk_must_fit_the_dataset(filter_, head, message):
    data = np.frombuffer(head.to_bytes(4, "little") + bytes(92), np.uint8)
    with pytest.raises(CorruptError, match=message):
        short_chunks.check_chunk_length((filter_,), 0, data, 120)
    short_chunks.check_chunk_length((filter_,), 1, np.zeros(120, np.uint8), 120)  # without the filter


@pytest.mark.parametrize("kind", LOCKED)
@pytest.mark.parametrize(
    ("column", "corner", "message"),
    [
        (0, 20, r", chunk \(20, 0\): is listed twice"),
        (0, 10**6, r", chunk \(1000000, 0\): is listed, but no chunk begins there"),
        (1, 12, r", chunk \(25, 12\): is listed, but no chunk begins there"),
        (0, 2**63 // 5 * 5 + 5, r", chunk \(\d+, 0\): its \d+ bytes at byte \d+ lie where no file reaches"),
    ],
)
def test_an_impossible_corner_is_damage_where_h5py_reads_it_too(tmp_path, kind, column, corner, message):
    path = tmp_path / "x.h5"
    info = made(path, **LOCKED[kind])
    read_all(path)
    patch(path, key_of(path, info) + 8 + 8 * column, "<Q", corner)
    check_refused(path, message)


@pytest.mark.parametrize(("user_block", "begin"), [(0, 8), (0, 95), (512, 512), (512, 512 + 95), (512, 8)])
@pytest.mark.parametrize("kind", STORED)
def test_a_chunk_in_the_superblock_or_the_user_block_is_damage(tmp_path, user_block, begin, kind):
    path = tmp_path / "x.h5"
    info = made(path, **STORED[kind], userblock_size=user_block)
    patch(path, key_of(path, info, user_block) + 32, "<Q", (begin - user_block) % 2**64)
    check_refused(path, rf", chunk \(25, 0\): its {info.size} bytes at byte {begin} begin in the head")


def test_addresses_may_count_from_the_end_of_the_user_block_where_libhdf5_does_so(tmp_path, monkeypatch):
    path = tmp_path / "x.h5"
    made(path, userblock_size=8192)
    monkeypatch.setattr(records, "absolute", lambda: False)
    with h5py.File(path) as file:
        rules = records._ChunkRules.of(file["data"])
    offsets, sizes = np.array([4096]), np.array([120])
    assert not rules.allow(offsets, sizes, sizes * 0)  # h5py must read them
    rules.check(np.array([[0, 0]]), offsets, sizes, sizes * 0)
    with pytest.raises(CorruptError, match="begin in the head"):
        rules.check(np.array([[0, 0]]), offsets * 0 + 95, sizes, sizes * 0)


@pytest.mark.parametrize(("libver", "begin"), [("earliest", 96), ("v110", 48)])
def test_the_length_of_the_superblock_is_known(tmp_path, libver, begin):
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        assert records.superblock_bytes(file) == begin
    assert (tmp_path / "x.h5").read_bytes()[begin : begin + 4] in (b"OHDR", b"\1\0\1\0")  # of the root group


@pytest.mark.parametrize("user_block", [0, 512])
@pytest.mark.parametrize("dtype", ["<i4", ODD])
def test_values_in_one_piece_in_the_superblock_are_damage(tmp_path, user_block, dtype):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", userblock_size=user_block) as file:
        dataset = create(file, "data", (50, 6), dtype)
        dataset[...] = VALUES
        file.flush()
        offset = dataset.id.get_offset()
    assert (read_all(path) == VALUES).all()
    patch(path, path.read_bytes().index(struct.pack("<QQ", offset - user_block, 1200)), "<Q", 8)
    check_refused(path, rf": its values begin at byte {user_block + 8}, in the head of the file")
