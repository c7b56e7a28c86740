"""The places of chunks in a file, and their lengths: believed, left to h5py, or an error that names the chunk."""

import os
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files.damage import LOCKED, ODD, VALUES, check_refused, key_of, made, patch, read_all
from support.sources.oracle import read, refused

from lit_async_data import CorruptError, HDF5Source
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.storage.codecs import Filter, fletcher32


@pytest.fixture
def with_user_block(path):
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("data", data=np.zeros((20, 6), "i4"), chunks=(4, 6), compression="gzip")
    return path


def records_changed(monkeypatch, path, place, change):
    """Lets libhdf5 list other records of chunks: their corners, masks, offsets and sizes."""
    with h5py.File(path) as file:
        rows = index.records_of(file["data"])
        assert index.columns_of(file["data"]) is not None
    rows[place] = change(rows)
    monkeypatch.setattr(index, "records_of", lambda _: rows)


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        ((0, 3), lambda rows: rows[1, 3] + 1, r"0, 0\): overlaps another chunk"),
        ((4, 3), lambda rows: 0, r"16, 0\): begins in the head of the file \(\d+ bytes at byte 0\)"),
        ((4, 3), lambda rows: -8, r"16, 0\): lies where no file reaches \(\d+ bytes at byte 18446744073709551608\)"),
        ((4, 3), lambda rows: 2**62, r"16, 0\): ends behind the \d+ bytes of the file; was it truncated"),
        ((4, 4), lambda rows: 0, r"16, 0\): has the wrong size: a chunk has 96 bytes before .* are 1 \(0 bytes"),
        # Unfiltered, as some writers mark it, but not of the full size.
        ((4, 2), lambda rows: 2**32 - 1, r"16, 0\): .*has the wrong size"),
        ((4, 1), lambda rows: -6, r"16, -6\): is listed, but no chunk begins there"),
        ((4, 0), lambda rows: 20, r"20, 0\): is listed, but"),
        ((4, 0), lambda rows: 1, r"1, 0\): is listed, but"),
        ((1, 0), lambda rows: 0, r"0, 0\): is listed twice"),
    ],
)
def test_one_impossible_record_is_damage_and_names_its_chunk(with_user_block, monkeypatch, place, change, said):
    path = with_user_block
    records_changed(monkeypatch, path, place, change)
    with pytest.raises(CorruptError, match=rf"^{path}:/data, chunk \({said}") as caught:
        HDF5Source(path, ["data"])
    assert (caught.value.file, caught.value.dataset) == (path, "data")


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (np.s_[:, 3], lambda rows: rows[:, 3] - 512),  # counted from the user block's end, as before HDF5 1.14.4
        (np.s_[:, 2], lambda rows: 2),  # skips a filter that does not exist
        ((4, 4), lambda rows: 2**32),  # 4 GiB
    ],
    ids=["offset", "mask", "size"],
)
def test_unusual_records_are_left_to_h5py(with_user_block, monkeypatch, place, change):
    os.truncate(with_user_block, 2**33)
    records_changed(monkeypatch, with_user_block, place, change)
    source = HDF5Source(with_user_block, ["data"])
    assert source.chunks.reading == "locked"
    assert (read(source, [3, 19])["data"] == 0).all()


@pytest.mark.parametrize(("libver", "nbytes"), [("earliest", 120), ("v110", 40)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maxshape": (20, None)},  # which h5py reads, since HDF5 gives wrong places of chunks
        {"shuffle": True, "shape": (19, 6)},  # likewise, since nothing tells whether the edge was shuffled
        {"scaleoffset": 0, "filter_mask": 1},  # which only libhdf5 decodes
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_an_uncompressed_chunk_of_the_wrong_size_is_damage(path, options, nbytes, libver):
    """libhdf5 returns uninitialised memory for missing bytes. Later formats do not store the size of unfiltered
    chunks, so a chunk that is too short overlaps the next."""
    given = {"shape": (20, 6), **options}
    mask = given.pop("filter_mask", 0)
    with h5py.File(path, "w", libver=(libver, "v110")) as file:
        dataset = file.create_dataset("data", dtype="i4", chunks=(4, 6), **given)
        dataset.id.write_direct_chunk((8, 0), bytes(nbytes), filter_mask=mask)
        dataset[:8] = np.arange(48).reshape(8, 6)
    said = rf"{path}:/data, chunk \(\d+, \d+\): .*(has the wrong size|overlaps another)"
    with pytest.raises(CorruptError, match=said):
        HDF5Source(path, ["data"])


def test_an_index_that_libhdf5_cannot_list_is_damage(h5):
    path = h5(data={"data": np.ones((20, 6)), "chunks": (4, 6), "maxshape": (None, None)})
    node = Path(path).read_bytes().rindex(b"TREE")  # that of the chunks: the other is of the group's names
    patch(path, node + 5, "B", 255)  # its level
    refused(CorruptError, [f"{path}:/data: has chunks that libhdf5 cannot list: ", "is damaged"], path, ["data"])


@pytest.mark.parametrize(("kind", "whole"), [("scale-offset", 97), ("n-bit", 91)])
@pytest.mark.parametrize("fewer", [0, -1, -88])
def test_a_packed_chunk_of_too_few_bytes_is_damage(path, kind, whole, fewer):
    info = made(path, **LOCKED[kind])
    needed = whole - 1  # libhdf5 writes one byte that it does not read
    assert info.size == whole
    patch(path, key_of(path, info), "<I", needed + fewer)
    if fewer == 0:
        assert (read_all(path) == VALUES).all()
    else:
        check_refused(path, rf", chunk \(25, 0\): only {needed + fewer} of")


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
        ["scaleoffset", "shuffle", "gzip", "fletcher32"],
        ["scaleoffset", "fletcher32"],
        ["nbit", "gzip"],
        ["gzip"],
        ["gzip", "shuffle", "fletcher32"],
    ],
    ids=" ".join,
)
def test_a_chunk_that_decodes_to_too_few_bytes_is_damage_where_h5py_reads_it_too(path, tmp_path, names):
    """Its checksums are right: the writer gave the filters too few bytes."""
    alone, content = tmp_path / "alone.h5", VALUES[25:30].tobytes()
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
    check_refused(path, r", chunk \(25, 0\): (only 40 of|40 bytes instead of 120)")


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
        index.check_chunk_lengths(dataset)
        floats = file.create_dataset("floats", data=values.astype("f8"), chunks=(count,), scaleoffset=3)
        index.check_chunk_lengths(floats)


@pytest.mark.parametrize(
    ("filter_", "head", "message"),
    [
        (Filter(index.SCALEOFFSET, (2, 0, 30, 0, 4)), 33, "33 bits per value, but a value has 4 bytes"),
        (Filter(index.NBIT, (8, 0, 29, 1, 4, 0, 24, 0)), 0, "116 bytes instead of 120"),
        (Filter(index.SCALEOFFSET, (2, 32, 30, 0, 4)), 0, "96 bytes instead of 120"),  # stored unchanged
    ],
)
def test_the_head_of_a_packed_chunk_must_fit_the_dataset(filter_, head, message):
    data = np.frombuffer(head.to_bytes(4, "little") + bytes(92), np.uint8)
    with pytest.raises(CorruptError, match=message):
        index.check_chunk_length((filter_,), 0, data, 120)
