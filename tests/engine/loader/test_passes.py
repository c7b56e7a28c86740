"""Each ``iter`` of a loader is an iterator of its own, as with a DataLoader in one process."""

import contextlib
import copy
import gc
import itertools
import pickle

import pytest
import torch
from support.device.training_loop import pretend
from support.sources import numbered
from support.sources.numbered import BATCH, LENGTH
from support.sources.numbered import batches as plan
from support.threads.interrupts import interrupted
from torch.utils.data import DataLoader
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import prefetched
from lit_async_data.errors import ClosedError, TransformError


def loader_of(shuffle="global", workers=2, **options):
    return numbered.loader_of(shuffle=shuffle, workers=workers, **options)


def foreign(workers=0, **options):
    return prefetched(DataLoader(range(LENGTH), batch_size=BATCH, num_workers=workers, **options), device="cpu")


def numbers(batch):
    return (batch["y"] if isinstance(batch, dict) else batch).tolist()


STORED, STEPS = plan(0, "none"), 5
MADE = {
    "AsyncLoader": lambda: loader_of("none"),
    "AsyncLoader, caller's thread": lambda: loader_of("none", 0),
    "DataLoader": foreign,
    "DataLoader, persistent worker": lambda: foreign(1, persistent_workers=True),
    "list": lambda: prefetched([torch.tensor(each) for each in STORED], device="cpu"),
}
every_loader = pytest.mark.parametrize("made", MADE.values(), ids=MADE)


@every_loader
def test_two_iterators_at_once_have_places_of_their_own(made):
    with made() as loader:
        assert [(numbers(a), numbers(b)) for a, b in zip(loader, loader, strict=True)] == [(b, b) for b in STORED]
        assert [numbers(batch) for batch in loader] == STORED


@every_loader
def test_looks_inside_a_loop_and_iterators_that_are_never_advanced_change_nothing(made):
    with made() as loader:
        kept = [iter(loader) for _ in range(3)]
        assert loader._run.engine is None
        seen = []
        for batch in loader:
            seen.append(numbers(batch))
            assert numbers(next(iter(loader))) == STORED[0]
        assert seen == [numbers(batch) for batch in kept[1]] == STORED
        assert list(kept[1]) == []  # stays over
        kept[0].close()
        assert list(kept[0]) == []


@every_loader
def test_a_closed_loader_ends_all_its_iterators(made):
    with made() as loader:
        first, beside = iter(loader), iter(loader)
        next(first)
        next(beside)
    for passing in (first, beside, iter(loader)):
        with pytest.raises(ClosedError):
            next(passing)


def test_which_epoch_comes_next_never_depends_on_others_beside(caplog):
    def run():
        with loader_of() as loader:
            for epoch in range(3):
                seen, beside = [], []
                for batch in loader:
                    seen.append(numbers(batch))
                    if len(seen) in (2, 4):
                        beside.append(numbers(next(iter(loader))))
                assert seen == plan(epoch)
                assert beside[0] != beside[1]  # the order of each is keyed by its number, too
                assert not set(map(tuple, beside)) & set(map(tuple, itertools.chain(*map(plan, range(4)))))
                yield beside

    found = [*run()]
    assert caplog.text.count("read in the loop, without reading ahead") == 1
    assert found == [*run()]


def test_an_iterator_beside_changes_neither_state_nor_statistics_and_shares_nothing():
    with loader_of(device_depth=0) as loader:
        passing = iter(loader)
        kept = next(passing)
        state, stats = loader.state_dict(), loader.stats()
        beside = list(loader)
        assert (loader.state_dict(), loader.stats().batches) == (state, stats.batches)
        for batch in beside:
            assert torch.equal(batch["x"], batch["y"].float()[:, None].expand_as(batch["x"]))
        assert numbers(kept) == plan(0)[0]
        assert [numbers(batch) for batch in passing] == plan(0)[1:]


def test_the_next_iterator_reads_ahead_when_the_first_is_dropped_and_next_goes_on_after_a_break(caplog):
    with loader_of() as loader:
        for batch in loader:
            assert numbers(batch) == plan(0)[0]
            break
        assert [numbers(next(loader)) for _ in range(4)] == plan(0)[1:]
        held = iter(loader)
        next(held)
        del held
        assert [numbers(batch) for batch in loader] == plan(2)
    assert not caplog.text


def test_set_epoch_gives_the_engine_to_the_next_and_the_one_before_goes_on_beside():
    with loader_of() as loader:
        before = iter(loader)
        next(before)
        loader.set_epoch(7)
        assert [numbers(batch) for batch in loader] == plan(7)
        assert [numbers(batch) for batch in before] == plan(0)[1:]


def test_a_place_that_is_loaded_is_for_the_next_iterator_after_a_look_too():
    with loader_of() as loader, loader_of() as other:
        passing = iter(loader)
        next(passing), next(passing)
        next(iter(loader))
        other.load_state_dict(loader.state_dict())
        begun = iter(other)
        assert numbers(next(begun)) == plan(0)[2]
        assert len(list(other)) == STEPS
        assert [numbers(batch) for batch in begun] == plan(0)[3:]


@pytest.mark.parametrize("late", ["side", "compute"])
def test_an_iterator_beside_copies_on_the_stream_of_the_loop(monkeypatch, late):
    streams = FakeStreams(late)
    pretend(monkeypatch, lambda device: streams)
    with loader_of("none") as loader:
        for batch, other in zip(loader, iter(loader), strict=True):
            assert numbers(other) == other["x"][:, 0].tolist()  # no wait: nothing of it was given to another stream
            streams.synchronize()
            assert numbers(batch) == numbers(other)


@pytest.mark.parametrize("made", [lambda: loader_of("none"), foreign])
def test_an_iterator_keeps_its_loader_and_a_copy_of_it_has_no_place(made):
    passing = iter(made())
    gc.collect()
    assert numbers(next(passing)) == STORED[0]
    for copied in (copy.copy(passing), copy.deepcopy(passing), pickle.loads(pickle.dumps(passing))):
        with pytest.raises(ClosedError, match=r"a copy of a pass.*write iter\(loader\)"):
            next(copied)
    assert numbers(next(passing)) == STORED[1]


def test_an_iterator_beside_goes_on_behind_a_batch_that_failed():
    class Broken(list):
        def __getitem__(self, index):
            return 1 // 0 if index == BATCH else index

    with prefetched(DataLoader(Broken(range(LENGTH)), batch_size=BATCH), device="cpu") as loader:
        first, beside = iter(loader), iter(loader)
        assert numbers(next(first)) == numbers(next(beside)) == STORED[0]
        with pytest.raises(ZeroDivisionError):
            next(beside)
        assert [numbers(batch) for batch in beside] == STORED[2:]


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_in_evaluation_a_shuffle_that_is_asked_for_is_alike_in_each_pass(shuffle):
    with loader_of(shuffle) as loader:
        loader.evaluation = True
        loader.set_epoch(3)
        assert [[numbers(batch) for batch in loader] for _ in range(2)] == [plan(0), plan(0)]  # epochs are ignored
        loader.evaluation = False
        loader.set_epoch(2)
        assert [numbers(batch) for batch in loader] == plan(2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("error", "goes_on"), [(KeyboardInterrupt, 1), (TransformError, 2)])
def test_the_next_iterator_reads_ahead_though_a_traceback_keeps_the_last(workers, error, goes_on, caplog):
    failing = [error]

    def fails_once(batch):
        if failing[-1] is TransformError and batch["y"][0] == BATCH:
            failing.append(None)
            raise ValueError("no batch")
        return batch

    with loader_of("none", workers, batch_transform=fails_once) as loader:
        left = iter(loader)
        assert numbers(next(left)) == STORED[0]
        interrupt = interrupted(30) if error is KeyboardInterrupt else contextlib.nullcontext()
        with pytest.raises(error), interrupt:
            next(left)
        assert [numbers(batch) for batch in loader] == STORED
        assert not [record for record in caplog.records if "another iterator" in record.getMessage()]
        assert [numbers(batch) for batch in left] == STORED[goes_on:]


def test_an_interrupt_loses_no_batch_of_an_iterator_beside():
    taken, place = [], 0
    while not taken:  # until the interrupt comes too late for the batch
        with loader_of("none", 0) as loader:
            first, beside = iter(loader), iter(loader)
            assert numbers(next(first)) == numbers(next(beside)) == STORED[0]
            with contextlib.suppress(KeyboardInterrupt), interrupted(place):
                taken = [next(beside)]
            assert numbers(next(beside)) == STORED[1 + len(taken)], place
        place += 1
