"""Samples that come one after the other in a batch are those that are stored; what is fetched for those behind."""

import collections
import functools

import numpy as np
import pytest
from support.device.training_loop import pretend
from support.plans import plan_of
from support.sources import reader_sources as acts
from support.sources.sequences import READERS, check_equal, concat, joined_samples_of, loader_of, samples_of, stored
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, split
from lit_async_data.batch import spec
from lit_async_data.engine.pipeline import sample_reader
from lit_async_data.engine.pipeline.sample_reader import LOOKS, Ahead
from lit_async_data.errors import ConfigError, FormatError, TransformError
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.plan import BatchIndex, Schedule, Shares
from lit_async_data.testing import ArraySource

BY = [pytest.param({}, id="by length"), pytest.param({"batch_by": None, "batch_elements": None}, id="any")]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(("options", "hooks"), READERS)
def test_all_readers_give_samples_one_after_the_other(source, options, hooks, by):
    with loader_of(concat(source), hooks=hooks, **options, **by) as loader:
        found = {n: x for batch in loader for n, x in joined_samples_of(batch).items()}
    check_equal(found, stored(source))


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.processes)])
@pytest.mark.parametrize(("joined", "by"), [(False, {}), *((True, by.values[0]) for by in BY)])
def test_a_device_gets_the_same_samples(source, monkeypatch, kind, joined, by):
    streams, found = FakeStreams("side"), {}
    pretend(monkeypatch, lambda device: streams)
    with loader_of(concat(source) if joined else source, workers=1, worker_kind=kind, **by) as loader:
        for batch in loader:
            streams.synchronize()
            found |= (joined_samples_of if joined else samples_of)(batch)
    check_equal(found, stored(source))


def test_slots_have_room_for_the_longest_samples_of_a_batch(source):
    lengths, element = sorted((len(x) for x in stored(source).values()), reverse=True), 4
    for options, most in [({}, sum(lengths[:16])), ({"weights": "y"}, 16 * lengths[0])]:
        with loader_of(concat(source), workers=0, batch_by=None, batch_elements=None, **options) as loader:
            layout = loader.footprint.layout
            assert layout.small_start == -(-most * element // 512) * 512
            assert all(joined_samples_of(batch) for batch in loader)


@pytest.mark.parametrize("hooks", [{}, {"sample_transform": acts.copied}], ids=["plain", "sample_transform"])
def test_joined_samples_are_read_in_the_memory_of_a_batch(source, monkeypatch, hooks):
    for module in (spec, sample_reader):
        monkeypatch.setattr(module, "RUN_BYTES", 1)
    source, read, taken, found = concat(source), HDF5Source.read_into, [], {}

    def read_into(self, samples, out):
        taken.append(max(array.nbytes for array in out.values()))
        read(self, samples, out)

    monkeypatch.setattr(HDF5Source, "read_into", read_into)
    with loader_of(source, workers=0, batch_by=None, batch_elements=None, hooks=hooks) as loader:
        scratch = loader.footprint.budget.scratch
        assert scratch < source.spec["x"].nbytes * 16
        taken.clear()
        for batch in loader:
            assert max(taken) <= (scratch if hooks else batch["x"].nbytes)
            found |= joined_samples_of(batch)
            taken.clear()
    check_equal(found, stored(source))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("function", "text"), [(acts.longer, "'?x'?"), (acts.relabelled, "changed x_length of sample")]
)
def test_no_length_of_joined_samples_changes_on_the_host(source, function, text, by):
    loader = loader_of(concat(source), workers=0, shuffle=False, hooks={"sample_transform": function}, **by)
    with loader, pytest.raises(TransformError, match=text):
        list(loader)


@pytest.mark.parametrize("ragged", ["concat", "pad"])
def test_transforms_take_samples_of_one_element_at_most(h5, ragged):
    path = h5(**{"x/values": np.float32([5, 6, 7]), "x/offsets": [0, 1, 1, 2, 3]})
    source = HDF5Source(path, {"x": Field("x", ragged=ragged)})
    options = {"batch_size": 4, "shuffle": False, "workers": 0}
    with AsyncLoader(source, options, sample_transform=acts.copied) as loader:
        assert next(loader)["x"].flatten().tolist() == ([5, 6, 7] if ragged == "concat" else [5, 0, 6, 7])
    source.close()


def test_joined_samples_are_read_and_put_together_padded(source):
    assert np.array_equal(concat(source)[0]["x"], source[0]["x"])
    with pytest.raises(FormatError, match="'x' has concat False in"):
        ConcatSource([concat(source), source])
    clash = HDF5Source(source.paths, {"x": Field("x", ragged="concat"), "x_offsets": "y"})
    with pytest.raises(ConfigError, match="ragged: the source has a field 'x_offsets' of its own"):
        loader_of(clash)


def test_a_split_and_lengths_of_the_user_do_as_well(source):
    sides = split(source, {"train": 0.5, "val": 0.5})
    wanted = {n: x for n, x in stored(source).items() if n in sides["val"].samples}
    with loader_of(sides["val"], workers=0) as loader:
        check_equal({n: x for batch in loader for n, x in samples_of(batch).items()}, wanted)
    arrays, lengths = ArraySource({"x": np.arange(40.0)}), np.arange(40) % 7 + 1
    with loader_of(arrays, batch_by=lengths, batch_elements=14, workers=0) as loader:
        batches = [batch["index"].tolist() for batch in loader]
    assert all(len(batch) * lengths[batch].max() <= 14 for batch in batches)
    assert len({number for batch in batches for number in batch}) == 40


@pytest.mark.parametrize(
    ("given", "option", "text"),
    [
        ({"batch_by": "z"}, "batch_by", "'z' is not one of the fields"),
        ({"batch_by": [1, 2, 3]}, "batch_by", "not the lengths of the 307 samples"),
        ({"batch_by": np.full(307, 5)}, "batch_by", "samples of x have other lengths"),
        ({"batch_elements": 100}, "batch_elements", "alone takes 180 elements"),
        ({"weights": "y"}, "weights", "cannot be combined with batch_by"),
        ({"buckets": [50, 100]}, "buckets", "the last bucket ends at 100"),
    ],
)
def test_options_that_do_not_fit_are_named(source, given, option, text):
    with pytest.raises(ConfigError, match=text) as caught:
        loader_of(source, **given)
    assert caught.value.option in (option, None)


RUN = ChunkRun(100, 10)


def schedule_of(shuffle):
    plan = functools.partial(plan_of, length=100, batch_size=2, shuffle=shuffle, seed=0, runs=(RUN,), shuffle_chunks=2)
    return Schedule(plan, shuffled=True)


class Storage:
    """A source that notes what is asked of it, and says whether anything had to be fetched."""

    def __init__(self, cold=True):
        self.cold, self.fetched, self.decoded = cold, [], []

    def fetch(self, samples):
        self.fetched.append(samples.tolist())
        return self.cold

    def decode(self, samples, chunk_group):
        self.decoded += [(chunk_group, chunk) for chunk in (samples // 10).tolist()]


def read(storage, rounds, shuffle="none"):
    """Have workers read ahead after batches; those of a round have all been read before the first of them does."""
    ahead, schedule = Ahead(storage, 4, Shares(ChunkExtents([RUN]))), schedule_of(shuffle)
    unread = set(range(51))
    for steps in rounds:
        unread -= set(steps)
        for step in steps:
            ahead(schedule, [BatchIndex(0, step)], BatchIndex(*divmod(min(unread), 50)))


def test_at_first_all_that_come_are_fetched_and_then_the_last_one():
    read(storage := Storage(), [[0], [1]])
    assert storage.fetched == [[8, 9], [2, 3, 4, 5, 6, 7], [10, 11]]


def test_while_all_is_in_memory_it_looks_only_now_and_then():
    read(storage := Storage(cold=False), [[step] for step in range(2 * LOOKS + 2)])
    assert storage.fetched == [[8, 9], [8 + 2 * (LOOKS + 1), 9 + 2 * (LOOKS + 1)]]


def test_each_chunk_is_decoded_once_whichever_worker_comes_first():
    read(storage := Storage(), [[1], [0], [2, 3], [4], [6], [5], *([n, n + 1] for n in range(7, 49, 2)), [49]], "chunk")
    turns = [*((0, number) for number in range(1, 5)), (1, 0)]
    assert collections.Counter(chunk_group for chunk_group, _ in storage.decoded) == dict.fromkeys(turns, 2)
    assert len(set(storage.decoded)) == 10
