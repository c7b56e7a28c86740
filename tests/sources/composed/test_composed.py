"""What all sources made of sources do: reading, reading ahead, and closing those inside."""

import contextlib

import numpy as np
import pytest
from support.sources.parted import batches_of, numbered, read

from lit_async_data import AsyncLoader, ConcatSource, HDF5Source, SubsetSource
from lit_async_data.sources.contract.source import MemoryNeeds, StorageLayout
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder
from lit_async_data.testing import ArraySource


class Ahead(ArraySource):
    """Records what it is asked to fetch, decode and reserve."""

    chunks = StorageLayout(ahead=True)

    def __init__(self, length=10, decodable=1000):
        super().__init__({"y": np.arange(length)})
        self.calls, self._decodable = [], decodable

    def fetch(self, samples):
        self.calls.append(("fetch", samples.tolist()))
        return True

    def decode(self, samples, chunk_group):
        self.calls.append(("decode", samples.tolist(), chunk_group))

    def memory(self, chunks=0):
        return MemoryNeeds(100 * chunks, 7, self._decodable, 20)

    def reserve(self, chunks, cache_bytes, fetched_bytes):
        self.calls.append(("reserve", chunks, cache_bytes, fetched_bytes))
        return lambda: self.calls.append(("released",))

    def close(self):
        self.calls.append(("close",))


@pytest.mark.parametrize("source", [SubsetSource(numbered(), [7, 3, 4]), ConcatSource([numbered(2), numbered(1)])])
@pytest.mark.parametrize("sample", [3, -1])
def test_samples_that_are_not_there_are_an_index_error(source, sample):
    for use in (lambda samples: read(source, samples), lambda samples: source.locate(source.ids(np.array(samples)))):
        with pytest.raises(IndexError, match=f"sample {sample} of 3 in "):
            use([0, sample])


def test_a_subset_has_the_whole_source_read_ahead():
    whole = Ahead()
    subset = SubsetSource(whole, [9, 8, 1])
    assert subset.chunks.ahead
    assert subset.fetch(np.array([2, 0]))
    subset.decode(np.array([1]), (0, 3))
    assert subset.memory(3) == MemoryNeeds(300, 7, 1000, 20)
    subset.reserve(4, 50, 60)()
    subset.close()
    end = [("released",), ("close",)]
    assert whole.calls == [("fetch", [1, 9]), ("decode", [8], (0, 3)), ("reserve", 4, 50, 60), *end]


def test_several_sources_share_the_cache_by_what_must_be_decoded():
    small, large = Ahead(5, decodable=1000), Ahead(5, decodable=3000)
    both = ConcatSource([small, numbered(5), large])
    assert both.fetch(np.array([14, 0, 6, 11]))
    both.decode(np.array([1, 7]), None)
    assert both.memory(3) == MemoryNeeds(600, 7, 4000, 20)
    release = both.reserve(4, 400, 1000)
    assert ("released",) not in small.calls + large.calls
    release()
    both.close()
    end = [("released",), ("close",)]
    assert small.calls == [("fetch", [0]), ("decode", [1], None), ("reserve", 4, 100, 500), *end]
    assert large.calls == [("fetch", [4, 1]), ("reserve", 4, 300, 500), *end]


def test_a_reservation_is_released_if_another_source_cannot_reserve(monkeypatch):
    one, other = Ahead(), Ahead()
    monkeypatch.setattr(other, "reserve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ConcatSource([one, other]).reserve(1, 1, 2)
    assert one.calls == [("reserve", 1, 0, 1), ("released",)]


def test_all_are_closed_even_if_one_fails(monkeypatch):
    one, other, last = Ahead(), Ahead(), Ahead()
    monkeypatch.setattr(other, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ConcatSource([one, other, last]).close()
    assert one.calls == last.calls == [("close",)]


@pytest.fixture
def packed(h5):
    """Two files of packed chunks of 16 samples, in which each row is its number in the whole."""
    numbers = np.repeat(np.arange(300)[:, None], 50, axis=1)
    chunks = {"chunks": (16, 50), "compression": "gzip"}
    return [
        h5(f"{name}.h5", data={"data": numbers[begin:end], **chunks}, labels=np.arange(begin, end))
        for name, begin, end in (("a", 0, 130), ("b", 130, 300))
    ]


@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
def test_packed_files_are_read_in_part_and_together(packed, shuffle):
    mask = np.random.default_rng(0).random(300) < 0.7
    both = ConcatSource([HDF5Source(packed[0]), HDF5Source(packed[1])])
    with contextlib.closing(HDF5Source(packed)) as whole, contextlib.closing(both):
        assert both.chunks == whole.chunks
        for source, own in ((SubsetSource(whole, mask), np.flatnonzero(mask)), (both, np.arange(300))):
            batches = batches_of(source, shuffle=shuffle, workers=2, return_indices=True, cache_bytes=10_000)
            for data, labels, ids in batches:
                assert np.array_equal(labels, ids)
                assert np.array_equal(data, np.repeat(np.asarray(labels)[:, None], 50, axis=1))
            seen = np.concatenate([ids for *_, ids in batches])
            assert np.array_equal(np.sort(seen), np.repeat(own, 2))


def test_each_stored_chunk_of_a_subset_is_decoded_once(packed, monkeypatch):
    real, decoded = IndexedSlabDecoder.decode, []
    monkeypatch.setattr(
        IndexedSlabDecoder, "decode", lambda self, number: decoded.append((self, number)) or real(self, number)
    )
    mask = np.random.default_rng(0).random(300) < 0.7
    options = {"batch_size": 4, "shuffle": "chunk", "shuffle_chunks": 3, "workers": 0}
    with contextlib.closing(HDF5Source(packed)) as whole, AsyncLoader(SubsetSource(whole, mask), options) as loader:
        list(loader)
    assert len(decoded) == len(set(decoded)) == 9 + 11
