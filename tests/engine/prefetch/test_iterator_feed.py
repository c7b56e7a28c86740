"""The batches and states of a loader, pass after pass."""

import contextlib
import gc
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
from support.threads.noted_loaders import Loader, MineError, Stateful, listed, numbers, read_ahead, reader, steps
from support.threads.waits import LONG
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import prefetched
from lit_async_data.engine import supervisor
from lit_async_data.engine.device.queues import InlineQueue
from lit_async_data.engine.prefetch import iterator_feed as puller
from lit_async_data.engine.prefetch.iterator_feed import IteratorFeed, ReaderThread
from lit_async_data.errors import ClosedError, WorkerError
from lit_async_data.order.plan import BatchIndex


@pytest.mark.parametrize(("made", "depth"), [(lambda: (each for each in numbers()), 0), (lambda: iter(numbers()), 2)])
def test_an_iterator_has_one_pass_and_that_is_said_once(caplog, made, depth):
    with prefetched(made(), depth, device="cpu") as batches:
        assert listed(batches) == [0, 1, 2, 3, 4, 5]
        assert "used up" not in caplog.text
        assert list(batches) == list(batches) == []
    assert caplog.text.count("is an iterator, which its first pass has used up") == 1


def test_a_fork_is_told(monkeypatch):
    batches = prefetched(Loader(), device="cpu")
    next(batches)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(WorkerError, match="cannot be used in its fork"):
            next(batches)
        batches._run.engine.close()  # nothing of another process is touched
        assert len(reader()) == 1
    batches.close()


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
            batches._prefetch()
            assert batches.state_dict() == {"given": given}
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.state_dict() == {"given": 0}


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


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_read_ahead_than_was_asked_for(depth):
    loader = Loader(20)
    with prefetched(loader, depth, device="cpu") as batches:
        next(batches)
        for step in range(1, 5):
            read_ahead(batches, depth)
            assert len(loader.threads) == step + depth
            next(batches)
            assert batches.stats().queue_fill == depth
        assert batches.stats().read.starved == 1  # the first batch alone was waited for
        assert set(loader.threads) == set(reader())


def test_a_depth_of_0_starts_no_thread():
    loader = Loader()
    with prefetched(loader, 0, device="cpu") as batches:
        assert steps(batches) == list(range(6))
        assert set(loader.threads) == {threading.main_thread()}


def test_the_depth_can_be_changed_in_the_middle_of_a_pass():
    loader = Loader(12)
    with prefetched(loader, 3, device="cpu") as batches:
        seen = [next(batches)["step"]]
        read_ahead(batches, 3)
        for depth in (0, 2, 1, 0, 4):
            batches.device_depth = depth
            seen += [next(batches)["step"], next(batches)["step"]]
        assert seen + steps([next(batches)]) == list(range(12))
        assert batches.device_depth == 4


@pytest.mark.parametrize(
    ("error", "at", "depth"), [(MineError(1, 2), 0, 1), (MineError(1, 2), 4, 10), (TimeoutError(), 2, 0)], ids=repr
)
def test_an_error_comes_at_its_place_as_it_was_raised_and_the_rest_after_it(error, at, depth, anywhere):
    with prefetched(Loader(5, fail={at: error}), depth, device="cpu") as batches:
        for _ in range(2):
            pass_ = iter(batches)
            assert [next(pass_)["step"] for _ in range(at)] == list(range(at))
            with pytest.raises(type(error)) as caught:
                next(pass_)
            assert caught.value is error
            assert steps(pass_) == list(range(at + 1, 5))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_of_the_loader_ends_the_pass_as_an_interrupt_does(error, depth, anywhere):
    with prefetched(Loader(5, fail={1: error}), depth, device="cpu") as batches:
        assert next(batches)["step"] == 0
        with pytest.raises(type(error)) as caught:
            next(batches)
        assert caught.value is error
        with pytest.raises(ClosedError, match=f"^{type(error).__name__} has ended this pass after 1 batches"):
            next(batches)
        assert next(iter(batches))["step"] == 0


def test_after_an_error_nothing_is_read_before_it_is_asked_for():
    loader = Loader(fail={1: MineError(1, 2)})
    with prefetched(loader, 4, device="cpu") as batches:
        next(batches)
        read_ahead(batches, 1)
        for thread in reader():
            thread.join(LONG)
        batches._prefetch()
        assert len(loader.threads) == 2
        with pytest.raises(MineError):
            next(batches)
        assert len(loader.threads) == 2
        assert next(batches)["step"] == 2


def test_an_error_keeps_no_loader_alive():
    loader = Loader(fail={0: MineError(1, 2)})
    batches = prefetched(loader, device="cpu")
    gc.disable()
    try:
        with contextlib.suppress(MineError):
            next(batches)
        alive = weakref.ref(batches)
        loader.fail[0].__traceback__ = None  # its frames are those of whoever called
        del batches
        assert alive() is None
    finally:
        gc.enable()


def test_a_long_wait_is_worth_a_line(monkeypatch):
    said = []
    monkeypatch.setattr(puller, "LONG_S", 0.0)
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    loader = Loader(gate=(gate := threading.Semaphore(0)))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        assert loader.waiting.wait(LONG)
        monkeypatch.setattr(puller.log, "warning", lambda *args: (said.append(args[0] % args[1:]), gate.release(99)))
        assert steps([next(batches) for _ in range(5)]) == [1, 2, 3, 4, 5]
    assert "has been at the loader's next() for" in said[0]


def test_a_pass_that_waits_for_a_next_of_the_pass_before_says_so(monkeypatch):
    """1. A pass is left while the thread is in `next`. 2. Another is begun: `iter` waits for that `next`, since a
    loader with persistent workers has one iterator for all passes."""
    gate, waiting, said = threading.Semaphore(1), threading.Event(), []

    def gated():
        for number in range(4):
            waiting.set() if number else None
            assert gate.acquire(timeout=LONG)
            yield number

    class Kept:
        iterator = gated()

        def __iter__(self):
            return self.iterator

    with prefetched(Kept(), device="cpu") as batches:
        assert next(iter(batches)) == 0
        assert waiting.wait(LONG)
        monkeypatch.setattr(puller, "LONG_S", 0.0)
        monkeypatch.setattr(supervisor, "POLL_S", 0.001)
        monkeypatch.setattr(puller.log, "warning", lambda *args: (said.append(args[0] % args[1:]), gate.release(9)))
        assert list(batches) == [1, 2, 3]
    assert said[0].startswith("cannot begin a pass for 0 s: worker 0 has been at the loader's next() for")


def test_close_leaves_a_next_that_does_not_return_behind(monkeypatch):
    monkeypatch.setattr(supervisor, "THREADS_S", 0.01)
    loader = Loader(gate=threading.Semaphore(0))
    batches = prefetched(loader, device="cpu")
    next(batches)
    assert loader.waiting.wait(LONG)
    batches.close()
    (left,) = reader()
    loader.gate.release(99)
    left.join(LONG)
    assert not left.is_alive()
    assert len(loader.threads) == 2


def test_what_was_read_ahead_goes_with_the_pass():
    class Batch:
        pass

    made = []

    def make(_):
        batch = Batch()
        made.append(weakref.ref(batch))
        return batch

    with prefetched(map(make, range(5)), device="cpu") as batches:
        next(batches)
        read_ahead(batches, 2)
    assert len(made) == 3
    assert [ref() for ref in made] == [None] * 3


class OneThread(FakeStreams):
    """A device that may be called by one thread only."""

    def __getattribute__(self, name):
        assert threading.current_thread() is threading.main_thread(), name
        return super().__getattribute__(name)


def test_the_thread_makes_no_call_to_the_device(streamed):
    streamed(OneThread("compute"))
    loader = Loader()
    with prefetched(loader, 2) as batches:
        for _ in range(2):
            assert len(list(batches)) == 6
    assert threading.main_thread() not in loader.threads[1:]


@pytest.mark.parametrize("anew", [False, True])
def test_a_pass_that_another_thread_ends_is_an_error_and_not_over(monkeypatch, anywhere, anew):
    """1. The consumer waits for a batch, or for the thread's, to begin a pass. 2. Another thread closes the loader."""
    monkeypatch.setattr(supervisor, "THREADS_S", 0.01)
    loader = Loader(gate=threading.Semaphore(0))
    batches = prefetched(loader, device_depth=1)
    pass_ = iter(batches)
    next(pass_)
    assert loader.waiting.wait(LONG)
    found, closes = batches._run.engine.feed.reader, iter([batches.close])
    monkeypatch.setattr(found.arrived, "wait", lambda seconds: next(closes)())
    pass_ = iter(batches) if anew else pass_
    with pytest.raises(ClosedError, match="another thread has closed or stopped this loader"):
        next(pass_)
    with pytest.raises(ClosedError, match="build a new one"):
        next(pass_)
    loader.gate.release(99)
    for left in reader():
        left.join(LONG)


MOMENTS = [(Loader, "__iter__", 0), (ReaderThread, "_pull", 0), (ReaderThread, "_pull", 2)]


@pytest.mark.parametrize("end", ["close", "stop"])
@pytest.mark.parametrize(("place", "name", "given"), [*MOMENTS, (InlineQueue, "prefetch", 2)])
def test_a_loader_that_another_thread_ends_within_next_gives_no_batch_twice(monkeypatch, place, name, given, end):
    batches, kept = prefetched(Loader(), 2 if name == "__iter__" else 0, device="cpu"), getattr(place, name)
    pass_ = iter(batches)
    assert [next(pass_)["step"] for _ in range(given)] == list(range(given))

    def ended(*args, **options):
        monkeypatch.undo()
        getattr(batches, end)()
        return kept(*args, **options)

    monkeypatch.setattr(place, name, ended)
    if name == "prefetch":
        assert next(pass_)["step"] == given
    for _ in range(2 if given else 1):
        with pytest.raises(ClosedError):
            next(pass_)
    assert reader() == []
    if end == "stop":
        assert steps(batches) == list(range(6))
    batches.close()
    for call in (batches._prefetch, lambda: next(batches), lambda: next(iter(batches))):
        with pytest.raises(ClosedError, match="build a new one"):
            call()


KEY = BatchIndex(0, 0)
ASKED = {
    "room": lambda feed: feed.has_room,
    "batches": lambda feed: feed.ready,
    "the next": lambda feed: feed.poll(KEY),
    "to go on": lambda feed: feed.prefetch(KEY),
    "to rest": lambda feed: feed.rest(wait=True),
    "more": lambda feed: setattr(feed, "depth", 3),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_feed_that_another_thread_closes_at_any_moment_breaks_nothing(asked):
    class Closed(IteratorFeed):
        """Another thread closes it once it has been asked for its reader."""

        @property
        def reader(self):
            found = vars(self).pop("found", None)
            if found is not None:
                found.close()
            return found

        @reader.setter
        def reader(self, found):
            vars(self)["found"] = found

    feed = Closed([], lambda batch, here: batch, 0)
    feed.reader, feed.expected = ReaderThread(iter([]), feed._prepare, 0), KEY
    ASKED[asked](feed)
    with pytest.raises(ClosedError):
        feed.close() or feed.get(KEY)


def test_memory_of_what_was_read_ahead_goes_back_with_the_pass():
    released = []
    batch = SimpleNamespace(error=None, release=lambda: released.append(1))
    reader = ReaderThread(iter([1, 2]), lambda _, here: batch, depth=1)
    assert reader._reader() is not None
    assert reader.arrived.wait(LONG)
    assert reader.close()
    assert released == [1]
