"""What all sources made of sources do; and `MixtureSource` in a loader: shares, resume, bad samples, bad input."""

import contextlib
import dataclasses
import itertools
import pickle

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunks import chunk_numbers
from support.sources.parted import Failing, batches_of, numbered, parted, read

import lit_async_data as lad
from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, ManifestSource, SubsetSource
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, ReadError
from lit_async_data.lightning.display import summary_lines
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import Location, MemoryNeeds, Part, Remote, StorageLayout
from lit_async_data.testing import ArraySource, check_contract


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


def test_if_one_source_fails_the_reservations_of_others_are_released_and_all_are_closed(monkeypatch):
    one, other, last = Ahead(), Ahead(), Ahead()
    for name in ("reserve", "close"):
        monkeypatch.setattr(other, name, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ConcatSource([one, other, last]).reserve(1, 3)
    with pytest.raises(ZeroDivisionError):
        ConcatSource([one, other, last]).close()
    assert one.calls == [("reserve", 1, 1), ("released",), ("close",)]
    assert last.calls == [("close",)]


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
        SubsetSource(both, [4, 0]).locate([1.5])


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


@pytest.mark.parametrize("given", [(7, 3, 3, 0), np.array([7, 3, 3, 0], np.uint8)])
def test_a_subset_reads_its_samples_in_its_order(given):
    subset = SubsetSource(numbered(), given)
    assert len(subset) == 4
    assert subset.group_codes is None
    assert SubsetSource(numbered(), given, group_codes=[5, 6, 6, 5]).group_codes.tolist() == [5, 6, 6, 5]
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


def test_samples_are_named_by_their_numbers_in_the_innermost_whole():
    outer = SubsetSource(SubsetSource(parted(), [9, 8, 5, 1]), [3, 0, 1])
    ids = outer.ids(np.array([0, 1, 2]))
    assert ids.tolist() == outer.ids([0, 1, 2]).tolist() == [1, 9, 8] == read(outer, [0, 1, 2])
    places = [("files/a.h5", "/", 1), ("files/b.h5", "/", 5), ("files/b.h5", "/", 4)]
    assert outer.locate(ids) == list(itertools.starmap(Location, places))
    for numbers, lost in (([0, 1], 0), ([9, 5], 5)):  # not even one that the source within has
        with pytest.raises(IndexError, match=f"^sample {lost} is not one of the 3 of 10 samples of "):
            outer.locate(numbers)


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


def test_parts_without_samples_are_gone_and_another_one_begins_where_numbers_go_back():
    whole = parted({"a.h5": 4, "b.h5:/left": 3, "c.h5": 3})
    a, b, c = (Part(f"files/{part[:4]}", part[5:] or "/", part, 2) for part in ("a.h5", "b.h5:/left", "c.h5"))
    one_of_c = c._replace(samples=1)
    for samples, parts in {(1, 2, 8): [a, one_of_c], (5, 6, 1, 2, 1, 1, 9): [b, a, a, one_of_c]}.items():
        assert list(SubsetSource(whole, samples).parts) == parts


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


SHARES = {"sim": 0.6, "real": 0.15, "third": 0.25}


def arrays(length, first=0):
    return ArraySource({"x": np.arange(length * 3.0).reshape(length, 3), "y": first + np.arange(length)})


def mixed(**options):
    return lad.MixtureSource({"sim": (arrays(300), 7), "real": (arrays(20, 1000), 3)}, **options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder, rng, images = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0), {}
    for name, rows, how in (("sim", 700, "gzip"), ("real", 90, None), ("third", 333, "gzip")):
        images[name] = rng.integers(0, 255, (rows, 6, 5), np.uint8)
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=images[name], chunks=(16, 6, 5), compression=how)
            file["y"] = np.arange(rows)
    return folder, images


@pytest.fixture
def files(stored):
    folder, _ = stored
    sources = {name: lad.HDF5Source(folder / f"{name}.h5", {"x": "x", "y": "y"}) for name in SHARES}
    shared = {name: (source, SHARES[name]) for name, source in sources.items()}
    with contextlib.closing(lad.MixtureSource(shared, epoch=2000)) as mixture:
        yield mixture


@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
@pytest.mark.parametrize(
    "workers", [0, 2, pytest.param(("process", 2), marks=pytest.mark.processes)], ids=["caller", "threads", "processes"]
)
def test_2000_samples_are_those_of_the_files_in_their_shares(files, stored, shuffle, workers):
    kind, workers = workers if isinstance(workers, tuple) else ("thread", workers)
    options = {"batch_size": 32, "shuffle": shuffle, "shuffle_chunks": 4, "workers": workers, "worker_kind": kind}
    wrong, taken = 0, 0
    with lad.AsyncLoader(files, options if workers else options | {"worker_kind": "auto"}) as loader:
        for batch in loader:
            x, y, names = batch["x"].numpy(), batch["y"].tolist(), files.spec.names("source", batch["source"]).tolist()
            wrong += sum((x[n] != stored[1][names[n]][y[n]]).any() for n in range(len(y)))
            taken += len(y)
            assert all(abs(names.count(name) - share * len(y)) < 1 for name, share in SHARES.items())
    assert (wrong, taken) == (0, 2016)  # 63 batches


def test_the_contract_of_a_source_holds(files):
    for source in (files, mixed(), mixed(source_key=None), pickle.loads(pickle.dumps(mixed()))):
        check_contract(source)


def test_a_chunk_of_each_source_is_decoded_once_per_pass(files, stored):
    options = {"batch_size": 32, "shuffle": "chunk", "shuffle_chunks": 4, "workers": 0}
    with lad.AsyncLoader(files, options) as loader:
        assert sum(len(batch["y"]) for batch in loader) == 2016
        decoded = loader.stats().read.decoded / files.spec["x"].nbytes
        passes = {name: loader.order.decks.counts[n] for n, name in enumerate(files.names)}
    rounds = sum(-(-passes[name] // len(stored[1][name])) * (len(stored[1][name]) + 16) for name in ("sim", "third"))
    assert passes["sim"] + passes["third"] - 100 < decoded <= rounds


@pytest.mark.parametrize("options", [{}, {"on_error": "skip"}, {"on_error": "substitute"}])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2)])
def test_a_resume_on_other_ranks_goes_on_around_the_same_bad_samples(options, before, after):
    class Bad(ArraySource):
        def read_into(self, samples, out):
            if options and (samples % 7 == 3).any():
                raise CorruptError("a hole", row=3)
            super().read_into(samples, out)

    sources = [Bad({"y": first + np.arange(size)}) for first, size in ((0, 200), (1000, 30))]
    mixture = lad.MixtureSource({"sim": (sources[0], 2), "real": (sources[1], 1)}, epoch=288)

    def loaders(ranks, state=None):
        for rank in range(ranks):
            given = {"batch_size": 6, "shuffle": True, "workers": 0, "max_bad": 1.0, **options}
            loader = lad.AsyncLoader(mixture, given, rank=rank, world_size=ranks)
            if state is not None:
                loader.load_state_dict(state)
            yield loader

    whole = sorted(itertools.chain.from_iterable(batch["y"].tolist() for batch in next(loaders(1))))
    seen = []
    for loader in loaders(before):
        for batch in itertools.islice(loader, 3):
            seen += batch["y"].tolist()
        state = loader.state_dict()
    for loader in loaders(after, state):
        for batch in loader:
            if len(batch["y"]) == 6:
                assert np.bincount(batch["source"], minlength=2).tolist() == [4, 2]
            seen += batch["y"].tolist()
    assert sorted(seen) == whole


@pytest.mark.parametrize(
    ("share", "batch_size", "said"),
    [
        (0.7, 16, "batch_size, of a mixture: 8 in the checkpoint, 16 now"),
        (0.70000004, 8, r"shares: a 0\.7, b 0\.3.* in the checkpoint, a 0\.70000001"),
        (0.5, 8, r"samples of an epoch: .*\(force_resume=True\)$"),  # not a word of exclude
    ],
)
def test_another_batch_size_or_share_in_the_middle_of_an_epoch_is_refused(share, batch_size, said):
    def loader(share, batch_size):
        mixture = lad.MixtureSource({"a": (SIM, share), "b": (REAL, 0.3)})
        return lad.AsyncLoader(mixture, {"batch_size": batch_size, "shuffle": True})

    with loader(0.7, 8) as first:
        next(first)
        state = first.state_dict()
    with pytest.raises(lad.ResumeError, match=said):
        loader(share, batch_size).load_state_dict(state)


def test_fewer_samples_than_ranks_can_remain_since_the_last_step_is_completed():
    with lad.AsyncLoader(mixed(epoch=33), {"batch_size": 16, "shuffle": True}) as loader:
        batches = [next(loader)["y"].tolist() for _ in range(2)]
        state = loader.state_dict()
        rest = next(loader)["y"].tolist()
    for rank in range(3):
        with lad.AsyncLoader(mixed(epoch=33), {"batch_size": 16, "shuffle": True}, rank=rank, world_size=3) as loader:
            loader.load_state_dict(state)
            (last,) = [batch["y"].tolist() for batch in loader]
        assert len(last) == 16
        assert (last == rest) == (rank == 0)
    assert all(len(batch) == 16 for batch in batches)


def test_an_epoch_ends_with_a_source_with_all_or_after_a_number_of_samples():
    for epoch, samples in (("sim", (300, 0)), ("real", (0, 20)), (None, (300, 20)), (100, (70, 30))):
        with lad.AsyncLoader(mixed(epoch=epoch), {"batch_size": 16}) as loader:
            batches = [np.bincount(batch["source"], minlength=2) for batch in loader]
            line = summary_lines(loader)[1]
        assert (sum(batches) >= samples).all()
        assert (sum(batches[:-1]) < samples).any()
        assert f"{sum(batches)[1]} of real ({sum(batches)[1] / 20:.3g} × its 20)" in line


def test_repeated_samples_draw_new_random_numbers():
    mixture = lad.MixtureSource({"a": (arrays(50), 1), "b": (arrays(4, 1000), 1)})

    def noisy(sample, rng):
        return {**sample, "drawn": rng.integers(2**31)}

    with lad.AsyncLoader(mixture, {"batch_size": 10, "shuffle": True}, sample_transform=noisy) as loader:
        drawn = np.concatenate([batch["drawn"] for batch in loader])
    assert len({*drawn.tolist()}) == len(drawn) > 90


def test_a_mixture_of_mixtures_divides_its_share():
    inner = lad.MixtureSource({"p": (arrays(10), 1), "q": (arrays(30, 100), 3)})
    outer = lad.MixtureSource({"syn": (inner, 0.5), "real": (arrays(20, 1000), 0.5)}, epoch="syn")
    assert (outer.names, outer.shares) == (("syn/p", "syn/q", "real"), (0.125, 0.375, 0.5))
    check_contract(outer)
    with lad.AsyncLoader(outer, {"batch_size": 12, "shuffle": True}) as loader:
        batches = [np.bincount(batch["source"], minlength=3) for batch in loader]
    assert (sum(batches)[:2] >= [10, 30]).all()
    assert (sum(batches[:-1])[:2] < [10, 30]).any()
    for counts in batches:
        assert counts[2] == counts[:2].sum() == 6  # within one of the outer shares, too


def test_fields_of_a_source_get_the_keys_of_the_batch():
    other = ArraySource({"image": np.full((6, 3), 9.0), "label": np.arange(6) + 50, "rest": np.zeros(6)})
    sources = {"sim": (arrays(30), 1), "real": {"source": other, "share": 1}}
    mixture = lad.MixtureSource(sources, fields={"real": {"x": "image", "y": "label"}})
    check_contract(mixture)
    assert mixture.column("y").tolist() == [*range(30), *range(50, 56)]
    assert mixture.column("source").tolist() == [0] * 30 + [1] * 6
    assert lad.statistics(mixture)["x"].mean == pytest.approx(np.r_[np.arange(90.0), np.full(18, 9.0)].mean())
    with lad.AsyncLoader(mixture, {"batch_size": 4}) as loader:
        batch = next(loader)
    assert (batch["y"].tolist(), batch["x"][2:].unique().tolist()) == ([0, 1, 50, 51], [9.0])


def test_classes_are_numbered_alike_in_all_sources():
    class Texts(ArraySource):
        asked = None

        def with_classes(self, classes):
            made = type(self)(self._arrays)
            made.asked = dict(classes)
            return made

    pairs = {"a": (Texts({"y": np.arange(3)}), 1), "b": (Texts({"z": np.arange(3)}), 2)}
    mixture = lad.MixtureSource(pairs, fields={"b": {"y": "z"}})
    changed = mixture.with_classes({"y": ("auk", "owl")})
    assert (changed.shares, changed.names) == (mixture.shares, mixture.names)
    assert changed.sources[0].asked == {"y": ("auk", "owl")}
    assert changed.sources[1].sources[0].asked == {"z": ("auk", "owl")}


SIM, REAL, OTHER = arrays(300), arrays(20), ArraySource({"z": np.zeros((4, 3)), "y": np.arange(4)})


def inside(**options):
    return {"in": (lad.MixtureSource({"b": (SIM, 1)}, **options), 1)}


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({"sim": (SIM, 0), "real": (REAL, 0.3)}, {}, "sources: sim has share 0; give a number above 0"),
        ({"sim": (SIM, float("nan"))}, {}, "sim has share nan"),
        ({"sim": SIM}, {}, "give a source and its share: 'sim'"),
        ({"sim": (3, 0.5)}, {}, "sources.sim: 3 is not a source"),
        ({}, {}, "names no sources"),
        ({0: (SIM, 1)}, {}, "give a source and its share: '0'"),
        ({"a": inside()["in"], "a/b": (REAL, 1)}, {}, "'a/b' seems to be a source of 'a'; rename"),
        (inside(epoch="b"), {}, "sources: in is a mixture with epoch='b', source_key='source'; only the outermost"),
        (inside(source_key="robot"), {}, "in is a mixture with epoch=None, source_key='robot'; only the outermost"),
        ({"sim": (arrays(0), 1)}, {}, r"sim has no samples \(ArraySource\)"),
        ({"sim": (SIM, 1)}, {"epoch": "rael"}, "epoch: 'rael' is not a whole number from 1 on or one of the sources"),
        ({"sim": (SIM, 1)}, {"epoch": True}, "epoch: True is not a whole"),
        ({"sim": (SIM, 1)}, {"source_key": "y"}, "source_key: the sources have a field 'y' of their own"),
        ({"sim": (SIM, 1)}, {"fields": {"real": {}}}, "fields: 'real' is not one of the sources sim"),
        ({"sim": (SIM, 1)}, {"fields": {"sim": {"x": "z"}}}, "fields: sim has no field 'z'; it has x, y"),
        ({"sim": (SIM, 1)}, {"fields": {"sim": {"x": "x", "y": "x"}}}, "fields: sim has a field twice"),
        ({"sim": (SIM, 1), "real": (OTHER, 1)}, {}, "'real' .* has dicts of z, y, but 'sim' .* x, y; .* renames"),
    ],
)
def test_bad_input_is_named(sources, options, message):
    with pytest.raises((ConfigError, FormatError), match=message):
        lad.MixtureSource(sources, **options)


def rare(**options):
    return lad.MixtureSource({"sim": (SIM, 1), "real": (REAL, 1e-9)}, **options)


def loaded(mixture, **options):
    return lad.AsyncLoader(mixture, {"batch_size": 4} | options)


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (lambda: SubsetSource(SIM, []), "^samples: empty; select at least one"),
        (lambda: SubsetSource(SIM, [False] * 300), "^samples: empty; select at least one"),
        (lambda: SubsetSource(SIM, [True] * 301), "^samples: a mask of 301 values for 300 samples"),
        (lambda: SubsetSource(SIM, [0, 300]), "^samples: 300 is not a sample number; the source has 0 to 299"),
        (lambda: SubsetSource(SIM, np.array([2**64 - 1], np.uint64)), "^samples: 18446744073709551615 is not a sample"),
        (lambda: SubsetSource(SIM, [1.0, 2.0]), "^samples: 1.0 is neither a whole number nor a bool"),
        (lambda: SubsetSource(SIM, [[1, 2]]), r"^samples: .*shape \(1, 2\)"),
        (lambda: SubsetSource(SIM, [1, 2], group_codes=[5]), "^group_codes: .*2 samples"),
        (lambda: ConcatSource([]), "^sources: empty; give at least one"),
        (lambda: ConcatSource([mixed(), SIM]), "would lose its shares; use its sources one by one"),
        (lambda: SubsetSource(mixed(), [0, 319]), "source: sim .* would lose its shares"),
        (lambda: lad.split(mixed(), {"train": 0.5}), "would lose its shares"),
        (lambda: loaded(mixed(), weights=np.ones(320)), "weights: sim .* would lose its shares"),
        (lambda: loaded(mixed(), batch_by="y"), "batch_by: sim .* would lose its shares"),
        (lambda: loaded(rare()), "real has share 1e-09, too little .* epoch of 300 samples"),
        (lambda: loaded(rare(epoch=100)), "real has share 1e-09, too little .* epoch of 100 samples"),
    ],
)
def test_what_cannot_be_is_refused(used, message):
    with pytest.raises(ConfigError, match=message):
        used()


def test_an_inner_mixture_may_have_the_key_of_the_outer_one():
    for key in (None, "source", "robot"):
        inner = lad.MixtureSource({"p": (SIM, 1)}, source_key=key)
        assert lad.MixtureSource({"in": (inner, 1)}, source_key=key or "robot").names == ("in/p",)


def test_keys_of_dicts_come_in_any_order():
    other = ArraySource({"y": np.arange(50) + 1000, "x": np.full((50, 3), 7.0)})
    for source in (lad.MixtureSource({"sim": (SIM, 1), "other": (other, 1)}), lad.ConcatSource([SIM, other])):
        check_contract(source)
        assert list(source.spec)[:2] == ["x", "y"]
        with lad.AsyncLoader(source, {"batch_size": 50, "shuffle": "global"}) as loader:
            batch = next(loader)
        assert ((batch["x"] == 7).all(axis=1) == (batch["y"] >= 1000)).all()


@pytest.mark.parametrize(("epoch", "batch_size", "world_size"), [(None, 8, 1), (70, 8, 1), (64, 8, 3)])
def test_evaluation_refuses_a_mixture_whose_samples_come_again(epoch, batch_size, world_size):
    loader = lad.AsyncLoader(mixed(epoch=epoch), {"batch_size": batch_size}, world_size=world_size)
    with pytest.raises(lad.ConfigError, match=r"of real \(.* × its 20\): samples come again.* val=\[sim, real\]"):
        loader.evaluation = True
    assert not loader.evaluation
    val = lad.AsyncDataModule(train=SIM, val=mixed(), loader={"batch_size": 8})
    with pytest.raises(lad.ConfigError, match="samples come again"):
        val.val_dataloader()
