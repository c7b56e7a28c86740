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
from support.sources.oracle import read_from, refused

from lit_async_data import CorruptError, HDF5Source
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.storage.codecs import Filter, fletcher32


def read(path, samples):
    return read_from(path, {"data": "data"}, samples)["data"]


def chunked(h5, *, shape=(20, 6), chunks=(4, 6), **options):
    values = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    return h5(data={"data": values, "chunks": chunks, **options}), values


def records_in(path):
    with h5py.File(path) as file:
        return index.records_of(file["data"])


def columns_from(path, rows, monkeypatch):
    monkeypatch.setattr(index, "records_of", lambda _: rows)
    with h5py.File(path) as file:
        return index.columns_of(file["data"])


@pytest.mark.parametrize(("size", "usual"), [(2**32 - 1, True), (2**32, False)])
def test_a_chunk_of_4_gib_is_left_to_h5py(h5, monkeypatch, size, usual):
    path, _ = chunked(h5, compression="gzip")
    os.truncate(path, 2**33)
    rows = records_in(path)
    rows[4, 4] = size
    assert (columns_from(path, rows, monkeypatch) is not None) == usual


def with_user_block(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("data", data=np.zeros((20, 6), "i4"), chunks=(4, 6), compression="gzip")
    return path


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        ((0, 3), lambda rows: rows[1, 3] + 1, r"0, 0\): overlaps another chunk"),
        ((4, 3), lambda rows: 0, r"16, 0\): begins in the head of the file \(\d+ bytes at byte 0\)"),
        ((4, 3), lambda rows: 2**62, r"16, 0\): ends behind the \d+ bytes of the file; was it truncated"),
        ((4, 4), lambda rows: 2**32, r"16, 0\): ends behind"),
        ((4, 4), lambda rows: 0, r"16, 0\): has the wrong size: a chunk has 96 bytes before .* are 1 \(0 bytes"),
        # Unfiltered, but not of the full size; and the same, as some writers mark it.
        ((4, 2), lambda rows: 1, r"16, 0\): .*has the wrong size"),
        ((4, 2), lambda rows: 2**32 - 1, r"16, 0\): .*has the wrong size"),
        ((4, 1), lambda rows: -6, r"16, -6\): is listed, but no chunk begins there"),
        ((4, 0), lambda rows: 20, r"20, 0\): is listed, but"),
        ((4, 0), lambda rows: 1, r"1, 0\): is listed, but"),
        ((4, 0), lambda rows: 0, r"0, 0\): is listed twice"),
        ((1, 0), lambda rows: 0, r"0, 0\): is listed twice"),  # one after the other
    ],
)
def test_one_impossible_record_is_damage_and_names_its_chunk(tmp_path, monkeypatch, place, change, said):
    path = with_user_block(tmp_path)
    rows = records_in(path)
    assert columns_from(path, rows, monkeypatch) is not None
    rows[place] = change(rows)
    with pytest.raises(CorruptError, match=rf"^{path}:/data, chunk \({said}") as caught:
        HDF5Source(path, ["data"])
    assert (caught.value.file, caught.value.dataset) == (path, "data")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        (3, lambda rows: rows[:, 3] - 512),  # counted from the user block's end, as before HDF5 1.14.4
        (2, lambda rows: 2),  # skips a filter that does not exist
    ],
)
def test_unusual_records_are_left_to_h5py(tmp_path, monkeypatch, column, change):
    path = with_user_block(tmp_path)
    rows = records_in(path)
    rows[:, column] = change(rows)
    columns_from(path, rows, monkeypatch)
    assert HDF5Source(path, ["data"]).chunks.reading == "locked"
    assert (read(path, [3, 19]) == 0).all()


@pytest.mark.parametrize(("libver", "nbytes"), [("earliest", 40), ("earliest", 120), ("v110", 40)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maxshape": (20, None)},  # which h5py reads, since HDF5 gives wrong places of chunks
        {"shuffle": True, "shape": (19, 6)},  # likewise, since nothing tells whether the edge was shuffled
        {"fletcher32": True, "maxshape": (20, None)},
        {"compression": "gzip", "filter_mask": 1},
        {"scaleoffset": 0, "filter_mask": 1},  # which only libhdf5 decodes
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_an_uncompressed_chunk_of_the_wrong_size_is_damage(tmp_path, options, nbytes, libver):
    """libhdf5 returns uninitialised memory for missing bytes. Later formats do not store the size of unfiltered
    chunks, so a chunk that is too short overlaps the next."""
    path, mask = str(tmp_path / "x.h5"), options.get("filter_mask", 0)
    made = {"shape": (20, 6)} | {name: value for name, value in options.items() if name != "filter_mask"}
    with h5py.File(path, "w", libver=(libver, "v110")) as file:
        dataset = file.create_dataset("data", dtype="i4", chunks=(4, 6), **made)
        dataset.id.write_direct_chunk((8, 0), bytes(nbytes), filter_mask=mask)
        dataset[:8] = np.arange(48).reshape(8, 6)
    said = rf"{path}:/data, chunk \(\d+, \d+\): .*(has the wrong size|overlaps another)"
    with pytest.raises(CorruptError, match=said):
        HDF5Source(path, ["data"])


@pytest.mark.parametrize("options", [{}, {"maxshape": (20, None)}], ids=["index", "h5py"])
@pytest.mark.parametrize("unusual", [0, 2**32 - 1])
def test_an_unusual_record_hides_no_impossible_one(tmp_path, options, unusual):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", (20, 6), "i4", chunks=(4, 6), **options)
        for row, nbytes in [(0, 96), (4, 96), (8, 40), (12, 96)]:
            dataset.id.write_direct_chunk((row, 0), bytes(nbytes), filter_mask=unusual if row == 0 else 0)
    refused(CorruptError, ["chunk (8, 0): has the wrong size: ", " (40 bytes"], path, ["data"])


def test_an_index_that_libhdf5_cannot_list_is_damage(h5):
    path, _ = chunked(h5, maxshape=(None, None))
    node = Path(path).read_bytes().rindex(b"TREE")  # that of the chunks: the other is of the group's names
    patch(path, node + 5, "B", 255)  # its level
    refused(CorruptError, [f"{path}:/data: has chunks that libhdf5 cannot list: ", "is damaged"], path, ["data"])


@pytest.mark.parametrize("kind", LOCKED)
@pytest.mark.parametrize(
    ("column", "corner", "message"),
    [
        (0, 20, r", chunk \(20, 0\): is listed twice"),
        (0, 2**63 // 5 * 5 + 5, r", chunk \(-\d+, 0\): is listed, but no chunk begins there"),
        (3, 2**63 + 8, r", chunk \(25, 0\): lies where no file reaches \(\d+ bytes at byte 9223372036854775816\)"),
    ],
)
def test_an_impossible_corner_is_damage_where_h5py_reads_it_too(tmp_path, kind, column, corner, message):
    path = tmp_path / "x.h5"
    info = made(path, **LOCKED[kind])
    read_all(path)
    patch(path, key_of(path, info) + 8 + 8 * column, "<Q", corner)
    check_refused(path, message)


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
        (Filter(index.SCALEOFFSET, (2, 0, 29, 0, 4)), 20, "116 bytes instead of 120"),
        (Filter(index.NBIT, (8, 0, 29, 1, 4, 0, 24, 0)), 0, "116 bytes instead of 120"),
        (Filter(index.NBIT, (8, 1, 30, 1, 4, 0, 32, 0)), 0, "96 bytes instead of 120"),
        (Filter(index.SCALEOFFSET, (2, 32, 30, 0, 4)), 0, "96 bytes instead of 120"),  # stored unchanged
    ],
)
def test_the_head_of_a_packed_chunk_must_fit_the_dataset(filter_, head, message):
    data = np.frombuffer(head.to_bytes(4, "little") + bytes(92), np.uint8)
    with pytest.raises(CorruptError, match=message):
        index.check_chunk_length((filter_,), 0, data, 120)
    index.check_chunk_length((filter_,), 1, np.zeros(120, np.uint8), 120)  # without the filter
