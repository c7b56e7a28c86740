"""What all sources made of sources do: reading, reading ahead, and closing those inside."""

import contextlib
import dataclasses
import itertools

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunks import chunk_numbers
from support.sources.parted import Failing, batches_of, numbered, parted, read

from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, ManifestSource, SubsetSource
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, ReadError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import Location, MemoryNeeds, Part, Remote, StorageLayout
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder
from lit_async_data.testing import ArraySource


class Ahead(ArraySource):
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
        return MemoryNeeds(100 * chunks, 7, self._decodable)

    def reserve(self, chunks, cache_bytes):
        self.calls.append(("reserve", chunks, cache_bytes))
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
    assert subset.memory(3) == MemoryNeeds(300, 7, 1000)
    subset.reserve(4, 50)()
    subset.close()
    end = [("released",), ("close",)]
    assert whole.calls == [("fetch", [1, 9]), ("decode", [8], (0, 3)), ("reserve", 4, 50), *end]


def test_several_sources_share_the_cache_by_what_must_be_decoded():
    small, large = Ahead(5, decodable=1000), Ahead(5, decodable=3000)
    both = ConcatSource([small, numbered(5), large])
    assert both.fetch(np.array([14, 0, 6, 11]))
    both.decode(np.array([1, 7]), None)
    assert both.memory(3) == MemoryNeeds(600, 7, 4000)
    release = both.reserve(4, 400)
    assert ("released",) not in small.calls + large.calls
    release()
    both.close()
    end = [("released",), ("close",)]
    assert small.calls == [("fetch", [0]), ("decode", [1], None), ("reserve", 4, 100), *end]
    assert large.calls == [("fetch", [4, 1]), ("reserve", 4, 300), *end]


def test_a_reservation_is_released_if_another_source_cannot_reserve(monkeypatch):
    one, other = Ahead(), Ahead()
    monkeypatch.setattr(other, "reserve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ConcatSource([one, other]).reserve(1, 2)
    assert one.calls == [("reserve", 1, 1), ("released",)]


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


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_samples_run_through_all_sources(lengths, data):
    begins = np.cumsum([0, *lengths]).tolist()
    both = ConcatSource([numbered(length, first) for length, first in zip(lengths, begins)])
    assert len(both) == begins[-1]
    samples = data.draw(st.lists(st.integers(0, len(both) - 1), max_size=20))
    assert read(both, samples) == samples
    where = [max(n for n, begin in enumerate(begins) if begin <= sample) for sample in samples]
    expected = [Location("ArraySource", "/", sample - begins[n]) for sample, n in zip(samples, where)]
    assert both.locate(samples) == both.locate(np.array(samples, np.int32)) == expected


def test_locate_knows_the_samples_of_subsets():
    both = ConcatSource([numbered(3), SubsetSource(parted(), [9, 1])])
    places = [("files/a.h5", "/", 1), ("files/b.h5", "/", 5), ("ArraySource", "/", 0)]
    assert both.locate([4, 3, 0]) == [Location(*place) for place in places]
    with pytest.raises(IndexError, match=r"whole numbers below 5, not 1\.5"):
        both.locate([1.5])
    with pytest.raises(IndexError, match=r"whole numbers below 5, not 1\.5"):
        SubsetSource(both, [4, 0]).locate([1.5])


def test_no_sources_are_refused():
    with pytest.raises(ConfigError, match=r"^sources: empty; give at least one"):
        ConcatSource([])


def test_chunks_of_all_are_read_as_the_slowest_is():
    runs = (ChunkRun(4, 2), ChunkRun(6, 3))
    layouts = [
        StorageLayout(runs, reading="copied", spread=1.5),
        StorageLayout(reading="decoded", compressed=True, chunks_per_run=4),
        StorageLayout(reading="locked"),
    ]
    sources = [ArraySource({"y": np.arange(10)}, parts={"a.h5": 10}, chunks=layout) for layout in layouts]
    assert ConcatSource(sources).chunks == StorageLayout(
        (*runs, ChunkRun(10, 1), ChunkRun(10, 1)), compressed=True, reading="decoded", spread=1.5, chunks_per_run=4
    )
    assert ConcatSource(sources[1:]).chunks == StorageLayout(compressed=True, reading="decoded", chunks_per_run=4)
    assert ConcatSource([sources[2], sources[0]]).chunks.reading == "locked"
    assert ConcatSource(sources).chunks.order is None
    costs = {"spread": 2.0, "chunks_per_run": 3, "amplification": 4.0, "alone": 5.0}
    costs |= {"chunks_per_sample": 6.0, "overlap": 7}
    costly = StorageLayout(compressed=True, random=True, ahead=True, largest=False, left_out="2 rows", **costs)
    for pair in itertools.permutations([ArraySource({"y": np.arange(10)}, chunks=costly), numbered()]):
        assert ConcatSource(pair).chunks == costly
    turned = StorageLayout(runs, order=np.arange(10)[::-1])
    both = ConcatSource([sources[0], ArraySource({"y": np.arange(10)}, chunks=turned)])
    assert both.chunks.order.tolist() == [*range(10), *range(19, 9, -1)]


def test_parts_columns_and_overlap_of_all():
    one, two = parted({"a.h5": 1, "b.h5": 2}, overlap=2), parted({"c.h5": 2}, overlap=5)
    both = ConcatSource([one, numbered(4), two, SubsetSource(numbered(4), [1])])
    parts = {"a.h5": 1, "b.h5": 2, "sources[1]": 4, "c.h5": 2, "sources[3]": 1}
    assert [(part.name, part.samples) for part in both.parts] == list(parts.items())
    assert both.chunks.overlap == 5
    assert both.column("y").tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 1]
    assert [part.name for part in both.places().parts] == [part.name for part in both.parts]
    subset = SubsetSource(SubsetSource(both, [9, 5, 2, 0]), [2, 1])
    assert (subset.chunks.overlap, subset.column("y").tolist()) == (5, [2, 2])
    with pytest.raises(MissingError, match="nobody"):
        subset.column("nobody")


def test_a_column_of_text_and_numbers_is_refused():
    text, number = (parted({"a.h5": 2}, who=np.array(who)) for who in (["p", "q"], [1, 2]))
    with pytest.raises(FormatError, match=r"'who' holds numbers in 1 of 2 .*, but text in ArraySource"):
        ConcatSource([text, SubsetSource(number, [1])]).column("who")


def test_an_error_names_the_sample_as_the_whole_counts_it():
    among = SubsetSource(Failing(5, bad=4), [0, 4])
    for both in (ConcatSource([numbered(3), Failing(5, bad=4)]), ConcatSource([numbered(6), among])):
        with pytest.raises(CorruptError) as caught:
            read(both, [0, 7])
        assert caught.value.sample_id == 7
    with pytest.raises(CorruptError) as caught:
        read(ConcatSource([Failing(5, 1, CorruptError("?"))]), [1])
    assert caught.value.sample_id is None
    with pytest.raises(CorruptError) as caught:  # what was not asked for has no number that anybody knows
        read(ConcatSource([Failing(5, 1, CorruptError("?", sample_id=3))]), [1])
    assert caught.value.sample_id is None


def test_numbers_that_a_file_names_beside_a_table(h5):
    names = {"y": {"cat": 2, "dog": 7}, "z": {"cat": 7, "dog": 2}}
    path = h5(**{key: {"data": [7, 2], "dtype": h5py.enum_dtype(each, "i1")} for key, each in names.items()})
    table, classes = pa.table({"y": ["dog", "cat"]}), ["dog", "cat"]
    of_file = [HDF5Source(path, {"y": Field(name, classes=classes)}) for name in "yz"]
    of_table = ManifestSource(table, {"y": {"name": "y", "classes": classes}})
    both = ConcatSource([of_file[0], of_table, of_file[1]])
    assert both.spec.names("y", both.column("y")).tolist() == ["dog", "cat", "dog", "cat", "cat", "dog"]
    stored = [HDF5Source(path, {"y": name}) for name in ("y", "z")]
    with pytest.raises(FormatError, match=r"'y' is 2 dog, 7 cat in sources\[2\].*, but 2 cat, 7 dog in sources\[0\]"):
        ConcatSource([stored[0], ArraySource({"y": np.arange(3)}), stored[1]])
    assert ConcatSource([ArraySource({"y": np.arange(3)}), stored[0]]).spec["y"].meanings == ((2, "cat"), (7, "dog"))


some_runs = st.lists(st.builds(ChunkRun, samples=st.integers(1, 40), rows=st.integers(1, 12)), min_size=1, max_size=5)


@pytest.mark.parametrize("given", [[7, 3, 3, 0], np.array([7, 3, 3, 0], np.uint8), (7, 3, 3, 0)])
def test_a_subset_reads_its_samples_in_its_order(given):
    subset = SubsetSource(numbered(), given)
    assert len(subset) == 4
    assert read(subset, [0, 1, 2, 3, 0]) == [7, 3, 3, 0, 7]
    assert read(subset, []) == []
    assert subset.samples.dtype == np.int64
    assert subset.spec == numbered().spec


def test_a_subset_keeps_a_copy_that_nobody_can_write_to():
    mine = np.array([1, 2, 3])
    subset = SubsetSource(numbered(), mine)
    mine[:] = 0
    assert read(subset, [0, 1, 2]) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        subset.samples[0] = 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty; select at least one"),
        ([False] * 10, "empty; select at least one"),
        ([True] * 9, "a mask of 9 values for 10 samples"),
        ([True] * 11, "a mask of 11 values for 10 samples"),
        ([0, 10], "10 is not a sample number; the source has 0 to 9"),
        ([0, -1], "-1 is not a sample"),
        (np.array([2**64 - 1], np.uint64), "18446744073709551615 is not a sample"),
        ([1.0, 2.0], "1.0 is neither a whole number nor a bool"),
        (["a"], "'a' is neither"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (3, r"shape \(\)"),
    ],
)
def test_samples_that_are_none_are_refused(given, message):
    with pytest.raises(ConfigError, match=f"^samples: .*{message}"):
        SubsetSource(numbered(), given)


def test_samples_are_named_by_their_numbers_in_the_innermost_whole():
    outer = SubsetSource(SubsetSource(parted(), [9, 8, 5, 1]), [3, 0, 1])
    ids = outer.ids(np.array([0, 1, 2]))
    assert ids.tolist() == outer.ids([0, 1, 2]).tolist() == [1, 9, 8] == read(outer, [0, 1, 2])
    places = [("files/a.h5", "/", 1), ("files/b.h5", "/", 5), ("files/b.h5", "/", 4)]
    assert outer.locate(ids) == list(itertools.starmap(Location, places))
    for numbers, lost in (([0, 1], 0), ([9, 5], 5)):  # not even one that the source within has
        with pytest.raises(IndexError, match=f"^sample {lost} is not one of the 3 of 10 samples of "):
            outer.locate(numbers)


def test_group_codes_are_one_for_each_sample():
    assert SubsetSource(numbered(), [1, 2], group_codes=[5, 6]).group_codes.tolist() == [5, 6]
    assert SubsetSource(numbered(), [1, 2]).group_codes is None
    with pytest.raises(ConfigError, match=r"^group_codes: .*2 samples"):
        SubsetSource(numbered(), [1, 2], group_codes=[5])


@given(some_runs, st.data())
def test_runs_of_a_subset_are_those_counted_one_by_one(runs, data):
    length = sum(run.samples for run in runs)
    sorted_or_not = st.sampled_from([sorted, list])
    numbers = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=60))
    samples = data.draw(sorted_or_not)(numbers)
    whole = parted({"a.h5": length}, runs=runs)
    found = SubsetSource(whole, samples).chunks.runs
    chunks = chunk_numbers(runs)
    by_hand = [len(list(same)) for _, same in itertools.groupby(chunks[sample] for sample in samples)]
    counts = [run.rows for run in found for _ in range(run.samples // run.rows)]
    assert counts == by_hand
    assert all(run.samples % run.rows == 0 for run in found)
    assert all(one.rows != other.rows for one, other in itertools.pairwise(found)), "equal neighbours are one run"


def test_what_else_is_known_of_chunks_is_that_of_the_whole():
    layout = StorageLayout((ChunkRun(10, 4),), compressed=True, reading="decoded", spread=1.5, chunks_per_run=3)
    whole = ArraySource({"y": np.arange(10)}, parts={"a.h5": 10}, chunks=layout)
    assert SubsetSource(whole, [0, 1, 5, 9]).chunks == StorageLayout(
        (ChunkRun(2, 2), ChunkRun(2, 1)), compressed=True, reading="decoded", spread=1.5, chunks_per_run=3
    )
    alone = StorageLayout(reading="python")
    whole = ArraySource({"y": np.arange(10)}, parts={"a.h5": 10}, chunks=alone)
    assert SubsetSource(whole, [0, 1]).chunks == alone


@pytest.mark.parametrize(
    ("samples", "parts"),
    [
        ([1, 2, 8], [("files/a.h5", "/", "a.h5", 2), ("files/c.h5", "/", "c.h5", 1)]),
        (
            [5, 6, 1, 2, 1, 1, 9],
            [
                ("files/b.h5", "/left", "b.h5:/left", 2),
                *[("files/a.h5", "/", "a.h5", 2)] * 2,
                ("files/c.h5", "/", "c.h5", 1),
            ],
        ),
    ],
)
def test_parts_without_samples_are_gone_and_another_one_begins_where_numbers_go_back(samples, parts):
    whole = parted({"a.h5": 4, "b.h5:/left": 3, "c.h5": 3})
    assert list(SubsetSource(whole, samples).parts) == list(itertools.starmap(Part, parts))


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_a_loader_name_samples_as_the_whole_does(workers):
    subset = SubsetSource(Failing(20, bad=13, error=OSError(5, "gone")), [19, 18, 17, 16, 13, 12, 11, 10])
    options = {"shuffle": "none", "workers": workers}
    with AsyncLoader(subset, {"batch_size": 4, **options}) as loader:
        assert next(loader)["y"].tolist() == [19, 18, 17, 16]
        with pytest.raises(ReadError, match=r"\(samples 13, 12, 11, … \(4 in all\)\)") as caught:
            next(loader)
        assert caught.value.sample_id == 13


@pytest.mark.parametrize(
    ("runs", "samples", "nbytes", "requests"),
    [
        ((), np.arange(20), 2000, 20),
        ((ChunkRun(100, 10),), np.arange(20), 2000, 20),  # two chunks of ten
        ((ChunkRun(100, 10),), np.arange(0, 100, 10), 10000, 100),  # one sample of each
        ((ChunkRun(50, 10), ChunkRun(50, 5)), np.arange(99, 89, -1), 1334, 14),  # two chunks of fifteen
        ((ChunkRun(100, 10),), np.arange(100).repeat(2), 10000, 100),
        ((), np.arange(100).repeat(2), 10000, 100),
    ],
)
def test_a_subset_fetches_its_share_over_the_network(runs, samples, nbytes, requests):
    whole = ArraySource({"x": np.arange(100)}, chunks=StorageLayout(runs, remote=Remote(10000, 100, "folder")))
    subset = SubsetSource(whole, samples)
    assert subset.chunks.remote == Remote(nbytes, requests, "folder")
    backwards = dataclasses.replace(whole.chunks, order=np.arange(100)[::-1])
    turned = SubsetSource(ArraySource({"x": np.arange(100)}, chunks=backwards), 99 - samples)
    assert turned.chunks.remote == subset.chunks.remote
    (both,) = {ConcatSource([subset, subset]).chunks.remote}
    assert both == Remote(2 * nbytes, 2 * requests, "folder")
