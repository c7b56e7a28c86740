"""The batches and states of a loader, pass after pass."""

import logging
import os
import threading

import pytest
from support.threads.noted_loaders import Loader, Stateful, listed, numbers, read_ahead, reader, shut_down, steps
from support.threads.waits import LONG
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import prefetched
from lit_async_data.engine import supervisor
from lit_async_data.errors import WorkerError


def function():
    yield from numbers()


@pytest.mark.parametrize(("made", "depth"), [(function, 0), (lambda: iter(numbers()), 2)])
def test_an_iterator_has_one_pass_and_that_is_said_once(caplog, made, depth):
    with prefetched(made(), depth, device="cpu") as batches:
        assert listed(batches) == [0, 1, 2, 3, 4, 5]
        assert "used up" not in caplog.text
        assert list(batches) == list(batches) == []
    assert caplog.text.count("is an iterator, which its first pass has used up") == 1


def test_a_pass_ends_before_the_next_begins(monkeypatch):
    """1. A pass is left while the thread is in `next`. 2. Another is begun: `iter` waits for that `next`, since a
    loader with persistent workers has one iterator for all passes."""
    monkeypatch.setattr(supervisor, "THREADS_S", 0.01)
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        assert loader.waiting.wait(LONG)

        def let_it_end(*_):
            monkeypatch.setattr(supervisor, "THREADS_S", LONG)
            loader.gate.release(99)

        monkeypatch.setattr(logging.Logger, "warning", let_it_end)  # called while it waits
        assert steps(batches) == list(range(6))
        assert loader.log == ["iter", "iter"]


def test_a_fork_is_told(monkeypatch):
    batches = prefetched(Loader(), device="cpu")
    next(batches)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(WorkerError, match="cannot be used in its fork"):
            next(batches)
        batches._machinery.engine.close()  # nothing of another process is touched
        assert len(reader()) == 1
    batches.close()


def test_nothing_is_reserved_for_batches_after_the_last(streamed):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), 2) as batches:
        batches._machinery.wiring.externally_driven = True
        for _ in range(6):
            next(batches)
        read_ahead(batches, 1)
        batches._machinery.prefetch()  # the end is found
        batches._machinery.prefetch()
        assert {ticket.block for ticket in batches._machinery.engine.queue.tickets} == {None}


@pytest.mark.parametrize("depth", [0, 3])
def test_a_state_is_that_after_the_last_batch_that_was_handed_out(depth):
    loader = Stateful()
    with prefetched(loader, depth, device="cpu") as batches:
        assert batches.state_dict() == {"given": 0}
        for given in range(1, 4):
            next(batches)
            if depth and given == 1:
                read_ahead(batches, 3)
            assert batches.state_dict() == {"given": given}
        state = dict(batches.state_dict())
        assert steps(batches) == list(range(6))
        assert batches.state_dict() == {"given": 0}
        next(iter(batches))
        batches.load_state_dict(state)
        assert batches.state_dict() == {"given": 3}
        assert steps(batches) == [3, 4, 5]
        assert steps(batches) == list(range(6))


@pytest.mark.parametrize("slow", ["side", "compute"])
def test_states_are_not_those_of_batches_on_their_way_to_the_device(streamed, slow):
    streamed(FakeStreams(slow))
    with prefetched(Stateful(), 2) as batches:
        for given in range(1, 7):
            next(batches)
            batches._machinery.prefetch()
            assert batches.state_dict() == {"given": given}
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.state_dict() == {"given": 0}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_torchdata_counts_batches_that_were_handed_out(workers):
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def built():
        return prefetched(StatefulDataLoader(range(12), batch_size=2, num_workers=workers), device="cpu")

    with built() as batches:
        for _ in range(2):
            next(batches)
        if workers:
            read_ahead(batches, 2)
        state = batches.state_dict()
        shut_down(batches.loader._iterator)
    with built() as batches:
        batches.load_state_dict(state)
        assert next(batches).tolist() == [4, 5]
        assert [batch.tolist() for batch in batches] == [[n, n + 1] for n in range(0, 12, 2)]
        shut_down(batches.loader._iterator)


class Prepared:
    """As Accelerate's loaders without ``use_stateful_dataloader``: the methods are there, and their state is not."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_state_that_cannot_be_asked_for_is_no_error_of_a_batch(depth):
    with prefetched(Prepared([1, 2, 3]), depth, device="cpu") as batches:
        for _ in range(2):
            assert list(batches) == [1, 2, 3]
        assert next(iter(batches)) == 1
        for _ in range(2):
            with pytest.raises(AttributeError, match="dl_state_dict"):
                batches.state_dict()
        assert list(batches) == [1, 2, 3]
        with pytest.raises(AttributeError, match="base_dataloader"):
            batches.load_state_dict({})
        assert list(batches) == [1, 2, 3]


def test_a_state_that_is_no_method_is_none():
    class Odd(list):
        state_dict = None
        load_state_dict = None

    with prefetched(Odd([1, 2]), device="cpu") as batches:
        assert list(batches) == [1, 2]
        assert batches.state_dict is None
