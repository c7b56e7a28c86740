"""Chunks read without libhdf5: what comes out is what h5py reads, or an error that names the chunk."""

from __future__ import annotations

import threading
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5 import codecs, index
from lit_async_data.sources.hdf5.chunked import KEPT_BYTES, ChunkedReader, DecodedChunks
from lit_async_data.sources.hdf5.codecs import DEFLATE, FLETCHER32, SHUFFLE, Filter, FilterPipeline, fletcher32
from lit_async_data.sources.hdf5.readers import H5pyReader


def read(path, samples, **options):
    source = HDF5Source(path, ["data"], **options)
    samples = np.asarray(samples)
    out = {"data": np.full((len(samples), *source.spec["data"].stored_shape), 77, source.spec["data"].dtype)}
    try:
        source.read_into(samples, out)
    finally:
        source.close()
    return source.spec["data"].delivered(out["data"])


def reader_of(path):
    source = HDF5Source(path, ["data"])
    source.close()
    return type(source._readers[0]["data"])


# -- codecs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["libdeflate", "zlib"])
def inflater(request, monkeypatch):
    if request.param == "zlib":
        monkeypatch.setattr(codecs, "_inflated", codecs._inflated_by_zlib)


filters = st.lists(st.sampled_from([SHUFFLE, DEFLATE, FLETCHER32]), unique=True)  # in any order


@given(st.binary(min_size=1, max_size=400), filters, st.sampled_from([1, 2, 4, 8]), st.integers(0, 7))
def test_a_chunk_decodes_to_what_was_encoded(content, which, itemsize, left_out):
    """Encoded here by another hand: shuffle by transposing, the checksum by HDF5's own loop."""
    stored, mask = content, 0
    for number, filter_ in enumerate(which):
        if left_out >> number & 1:
            mask |= 1 << number
        elif filter_ == SHUFFLE:
            whole = len(stored) // itemsize * itemsize
            table = np.frombuffer(stored[:whole], np.uint8).reshape(-1, itemsize)
            stored = table.T.tobytes() + stored[whole:]
        elif filter_ == DEFLATE:
            stored = zlib.compress(stored, 1)
        else:
            stored += checksum(stored).to_bytes(4, "little")
    pipeline = tuple(Filter(filter_, (itemsize,)) for filter_ in which)
    decoded = FilterPipeline(pipeline, len(content)).decoded(np.frombuffer(stored, np.uint8), mask)
    assert decoded.tobytes() == content


def checksum(data):
    """HDF5's loop, word by word, folding as it goes."""
    first = second = 0
    for at in range(0, len(data), 2):
        first += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        first = (first & 0xFFFF) + (first >> 16)
        second += first
        second = (second & 0xFFFF) + (second >> 16)
    return second << 16 | first


@given(st.binary(max_size=2000))
def test_the_checksum_is_that_of_hdf5(data):
    assert fletcher32(np.frombuffer(data, np.uint8)) == checksum(data)


def test_the_checksum_is_exact_over_many_words(monkeypatch):
    data = np.full(10_001, 255, np.uint8)
    whole = fletcher32(data)
    monkeypatch.setattr(codecs, "_SUM_WORDS", 7)
    assert fletcher32(data) == whole == checksum(data.tobytes())


@pytest.mark.usefixtures("inflater")
@pytest.mark.parametrize(
    ("which", "stored"),
    [
        ((DEFLATE,), zlib.compress(b"x" * 15)),
        ((DEFLATE,), zlib.compress(b"x" * 17)),
        ((DEFLATE,), zlib.compress(b"x" * 10**6)),
        ((DEFLATE,), zlib.compress(b"x" * 16)[:-6]),
        ((DEFLATE,), b"rubbish"),
        ((DEFLATE,), b""),
        ((), b"x" * 15),
        ((FLETCHER32,), b"x" * 16 + b"\0\0\0\0"),
        ((FLETCHER32,), b"xy"),
    ],
)
def test_what_does_not_decode_to_exactly_a_chunk_is_refused(which, stored):
    with pytest.raises(CorruptError):
        FilterPipeline(tuple(Filter(w) for w in which), 16).decoded(np.frombuffer(stored, np.uint8), 0)


# -- the index ---------------------------------------------------------------------------------------------------------


def chunked(h5, *, shape=(20, 6), chunks=(4, 6), **options):
    values = np.arange(np.prod(shape), dtype="i4").reshape(shape)
    return h5(data={"data": values, "chunks": chunks, **options}), values


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"compression": "gzip", "shuffle": True}])
def test_plain_chunks_are_read_without_libhdf5(h5, options):
    path, values = chunked(h5, **options)
    assert reader_of(path) is ChunkedReader
    assert (read(path, [19, 0, 7, 7]) == values[[19, 0, 7, 7]]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"scaleoffset": 0},
        {"shuffle": True, "chunks": (3, 6)},  # nothing tells whether the chunk at the edge was shuffled
        {"compression": "gzip", "maxshape": (20, None)},  # HDF5 gives wrong places of chunks here
    ],
)
def test_what_is_not_known_to_come_out_right_is_left_to_h5py(h5, options):
    path, values = chunked(h5, **options)
    assert reader_of(path) is H5pyReader
    assert (read(path, [19, 0, 7]) == values[[19, 0, 7]]).all()


def test_an_unfiltered_edge_chunk_is_left_to_h5py(h5):
    """A dataset may be told not to filter chunks at an edge; the index then says of them that they were filtered. h5py
    cannot make such a dataset, so one edge chunk is put in as it would lie there."""
    path, values = chunked(h5, shape=(18, 6), compression="gzip")
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((16, 0), np.resize(values[16:], (4, 6)).tobytes(), filter_mask=0)
    assert reader_of(path) is H5pyReader


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("libver", ["earliest", "v110"])
@pytest.mark.parametrize("maxshape", [None, (None, 6), (None, None), (100, 6)])
def test_every_kind_of_chunk_index_is_understood(tmp_path, userblock, libver, maxshape):
    path = str(tmp_path / "x.h5")
    values = np.arange(114, dtype="f8").reshape(19, 6)
    with h5py.File(path, "w", userblock_size=userblock, libver=(libver, "v110")) as file:
        file.create_dataset("data", data=values, chunks=(4, 4), maxshape=maxshape, compression="gzip")
    assert reader_of(path) is ChunkedReader
    assert (read(path, np.arange(18, -1, -1)) == values[::-1]).all()


@pytest.mark.parametrize("fill", [None, 7])
def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path, fill):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("data", (20, 6), "i4", chunks=(4, 6), compression="gzip", fillvalue=fill)[8:12] = 1
    assert reader_of(path) is ChunkedReader
    assert read(path, [0, 8, 19])[:, 0].tolist() == [fill or 0, 1, fill or 0]


def test_a_dataset_that_was_resized_shows_its_present_extent(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("data", data=np.arange(40), chunks=(8,), maxshape=(None,), compression="gzip")
        dataset.resize((30,))
        dataset.resize((35,))
    assert read(path, [29, 30, 34]).tolist() == [29, 0, 0]


def test_a_dataset_of_too_many_chunks_is_left_to_h5py(h5, monkeypatch):
    monkeypatch.setattr(index, "MOST_CHUNKS", 4)
    path, _ = chunked(h5)
    assert reader_of(path) is H5pyReader


@pytest.mark.parametrize("claim", ["offsets", "sizes", "corners", "masks", "double"])
def test_an_index_that_cannot_be_true_is_not_believed(h5, monkeypatch, claim):
    path, values = chunked(h5, compression="gzip")
    # A row is corner, corner, mask, offset, size.
    column, value = {"offsets": (3, 10**6), "sizes": (4, 0), "corners": (0, 1), "masks": (2, 2), "double": (0, 0)}[
        claim
    ]
    with h5py.File(path) as file:
        records = index.records_of(file["data"])
    records[:, column] = value
    monkeypatch.setattr(index, "records_of", lambda dataset: records)
    assert reader_of(path) is H5pyReader
    assert (read(path, [3, 19]) == values[[3, 19]]).all()


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [zlib.compress(b"\1" * 16), zlib.compress(b"\1" * 160), b"\1" * 16])
def test_a_chunk_of_the_wrong_length_is_an_error_and_not_rubbish(h5, content):
    """h5py returns memory that was never written for the first, and cuts the second."""
    path, values = chunked(h5, compression="gzip")
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((8, 0), content)
    assert (read(path, [0, 12]) == values[[0, 12]]).all()
    with pytest.raises(CorruptError, match=rf"{path}:/data, chunk \(8, 0\) at byte \d+: .*restore the file") as caught:
        read(path, [0, 9])
    assert (caught.value.file, caught.value.dataset, caught.value.row) == (path, "data", 8)


def test_a_chunk_that_no_filter_touched_is_read_as_it_is(h5):
    path, values = chunked(h5, compression="gzip", shuffle=True)
    with h5py.File(path, "r+") as file:
        file["data"].id.write_direct_chunk((8, 0), (values[8:12] + 1).tobytes(), filter_mask=3)
    assert reader_of(path) is ChunkedReader
    assert (read(path, [9, 0]) == values[[9, 0]] + [[1], [0]]).all()


# -- decoding once -----------------------------------------------------------------------------------------------------


def test_batches_smaller_than_a_chunk_decode_it_once_in_order(h5, monkeypatch):
    path, _ = chunked(h5, shape=(64, 6), chunks=(32, 6), compression="gzip")
    decoded = []
    once = FilterPipeline.decoded
    monkeypatch.setattr(FilterPipeline, "decoded", lambda *args: decoded.append(1) or once(*args))
    source = HDF5Source(path, ["data"])
    decoded.clear()
    with AsyncLoader(source, {"batch_size": 4, "shuffle": "none", "workers": 0, "queue_depth": 1}) as loader:
        assert len(list(loader)) == 16
    source.close()
    assert len(decoded) == 2


def test_the_chunks_kept_are_the_newest():
    kept = DecodedChunks(2)
    for number in (1, 2, 1, 3):
        if kept.get(number) is None:
            kept.put(number, np.array(number))
    assert [kept.get(number) is not None for number in (1, 2, 3)] == [True, False, True]
    assert KEPT_BYTES == 16 * 2**20


def test_several_threads_read_the_same_chunks(h5):
    path, values = chunked(h5, shape=(200, 6), compression="gzip")
    source = HDF5Source(path, ["data"])
    wrong = []

    def reads(seed):
        random = np.random.default_rng(seed)
        for _ in range(50):
            rows = random.integers(0, 200, 20)
            out = np.empty((20, 6), "i4")
            source.read_into(rows, {"data": out})
            wrong.extend(rows[(out != values[rows]).any(1)].tolist())

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    source.close()
    assert wrong == []
