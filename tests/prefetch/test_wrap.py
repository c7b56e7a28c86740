"""Anybody's loader, read ahead: nothing lost, nothing early, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from support.device.batches import Step, detection
from support.device.training_loop import pretend
from support.threads.waits import LONG, until
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lit_async_data import prefetched
from lit_async_data.device.feed import HostBatch
from lit_async_data.errors import ClosedError, ConfigError, TransferError, TransformError, WorkerError
from lit_async_data.host import supervisor
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.prefetch import reader_thread as puller
from lit_async_data.testing import ArraySource, FakeStreams


class Loader:
    """Writes down who calls what; each ``next`` can be held up."""

    def __init__(self, batches=6, *, fail=(), gate=None):
        self.batches = batches
        self.fail = dict(fail)
        self.gate = gate
        self.waiting = threading.Event()
        self.log = []
        self.threads = []
        self.epoch = 0
        self.batch_size = 3

    def __len__(self):
        return self.batches

    def set_epoch(self, epoch):
        self.log.append(f"set_epoch {epoch}")
        self.epoch = epoch

    def __iter__(self):
        self.log.append("iter")
        assert threading.current_thread() is threading.main_thread()
        return Iterator(self)


class Iterator:
    def __init__(self, loader):
        self.loader, self.step = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        loader, step = self.loader, self.step
        loader.threads.append(threading.current_thread())
        if loader.gate is not None and step:
            loader.waiting.set()
            assert loader.gate.acquire(timeout=LONG)
        if step >= loader.batches:
            raise StopIteration
        self.step += 1
        if step in loader.fail:
            raise loader.fail[step]
        return {"x": torch.full((2, 2), step), "epoch": loader.epoch, "step": step}


class Stateful(Loader):
    """One whose state is what its last iterator has given, as with StatefulDataLoader."""

    start = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state = {"given": 0}

    def __iter__(self):
        iterator = super().__iter__()
        iterator.step, self.start = self.start, 0
        return self.counted(iterator)

    def counted(self, iterator):
        for batch in iterator:
            self.state["given"] = batch["step"] + 1
            yield batch
        self.state["given"] = 0

    def state_dict(self):
        return self.state  # the very dict that it goes on to change

    def load_state_dict(self, state):
        self.log.append("load")
        self.state, self.start = dict(state), state["given"]


def steps(batches):
    return [batch["step"] for batch in batches]


def read_ahead(loader, count):
    """Wait until at least `count` batches are ready on the host."""
    found = loader.machinery.engine.feed.reader
    until(found, lambda: found.ready >= count)


def reader():
    return [thread for thread in threading.enumerate() if "lit_async_data reader" in thread.name]


@pytest.fixture
def streamed(monkeypatch):
    """Has what is prefetched take this pretended device for its own."""

    def on(streams):
        pretend(monkeypatch, lambda device: streams)
        return streams

    return on


# -- passes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_batches_come_in_order_and_as_they_are_pass_after_pass(depth):
    loader = [{"a": object()}, None, "text", (1, [torch.ones(2)])]
    with prefetched(loader, depth, device="cpu") as batches:
        for _ in range(3):
            for given, made in zip(loader, batches, strict=True):
                assert made is given


def test_iter_is_called_with_the_first_batch_and_after_set_epoch():
    loader = Loader()
    with prefetched(loader, device="cpu") as batches:
        iter(batches)
        iter(batches)
        batches.machinery.prefetch()
        assert loader.log == []
        for epoch in range(2):
            batches.set_epoch(epoch)
            assert {batch["epoch"] for batch in batches} == {epoch}
        assert loader.log == ["set_epoch 0", "iter", "set_epoch 1", "iter"]


def test_the_next_pass_is_not_begun_before_it_is_asked_for():
    loader = Loader()
    with prefetched(loader, device="cpu") as batches:
        assert steps(batches) == list(range(6))
        batches.machinery.prefetch()
        with pytest.raises(StopIteration):
            next(batches)
        assert loader.log == ["iter"]
        assert reader() == []


@pytest.mark.parametrize("depth", [0, 2])
def test_a_pass_that_was_left_early_is_followed_by_a_whole_one(depth):
    loader = Loader()
    with prefetched(loader, depth, device="cpu") as batches:
        for _ in range(3):
            assert next(iter(batches))["step"] == 0
        assert next(batches)["step"] == 1
        assert steps(batches) == list(range(6))


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


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_read_ahead_than_was_asked_for(depth):
    loader = Loader(20)
    with prefetched(loader, depth, device="cpu") as batches:
        next(batches)
        for step in range(1, 5):
            read_ahead(batches, depth)
            assert len(loader.threads) == step + depth
            next(batches)
        assert set(loader.threads) == set(reader())


def test_a_depth_of_0_starts_no_thread():
    loader = Loader()
    with prefetched(loader, 0, device="cpu") as batches:
        assert steps(batches) == list(range(6))
        assert set(loader.threads) == {threading.main_thread()}


def test_a_dataloader_without_workers_is_read_in_the_loop_which_is_said_once(caplog):
    class Here(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            assert threading.current_thread() is threading.main_thread()
            return index

    with prefetched(DataLoader(Here(), batch_size=2), device="cpu") as batches:
        for _ in range(2):
            assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the DataLoader has num_workers=0"]
    assert "num_workers=1 or more" in caplog.text


def test_an_iterator_has_one_pass_and_that_is_said_once(caplog):
    with prefetched((number for number in range(3)), device="cpu") as batches:
        assert list(batches) == [0, 1, 2]
        assert "used up" not in caplog.text
        assert list(batches) == list(batches) == []
    assert caplog.text.count("is an iterator, which its first pass has used up") == 1


def test_what_has_getitem_alone_can_be_iterated_over():
    class Old:
        def __getitem__(self, index):
            if index == 3:
                raise IndexError
            return index

    with prefetched(Old(), device="cpu") as batches:
        assert list(batches) == [0, 1, 2]


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


def test_an_unsized_loader_has_no_length():
    with prefetched(number for number in range(3)) as batches:
        with pytest.raises(TypeError):
            len(batches)
        assert batches
        assert list(batches) == [0, 1, 2]
    assert len(prefetched([1, 2])) == 2
    assert not prefetched([])


class ForgetsWhatCameMeanwhile(puller.ReaderThread):
    def serve(self):
        left = super().serve()
        self.asked = left
        return left


@pytest.mark.parametrize(("made", "right"), [(puller.ReaderThread, True), (ForgetsWhatCameMeanwhile, False)])
def test_the_thread_may_ask_again_at_once(monkeypatch, made, right):
    """1. The consumer answers what the thread has asked. 2. The thread asks again. 3. The consumer goes on."""

    class Answer(queue.SimpleQueue):
        def put(self, answer):
            super().put(answer)
            if answer[0] == 1:
                until(pulling, lambda: pulling.asked.answer is not self)

    monkeypatch.setattr(queue, "SimpleQueue", Answer)
    pulling = made(iter("x"), lambda batch, ask: HostBatch(nbytes=ask(lambda: 1) + ask(lambda: 2)), 1)
    with pulling._lock:
        pulling._reader()
    until(pulling, lambda: pulling.asked is not None)
    pulling.serve()
    assert (pulling.asked is not None) is right
    if right:
        assert pulling.get().host.nbytes == 3
    pulling.close()


# -- errors ------------------------------------------------------------------------------------------------------------


class MineError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_an_error_comes_at_its_place_once_and_as_it_was_raised(depth):
    error = MineError(1, 2)
    with prefetched(Loader(fail={2: error}), depth, device="cpu") as batches:
        for _ in range(2):
            assert steps([next(iter(batches)), next(batches)]) == [0, 1]
            with pytest.raises(MineError) as caught:
                next(batches)
            assert caught.value is error
            assert steps([next(batches) for _ in range(3)]) == [3, 4, 5]
            with pytest.raises(StopIteration):
                next(batches)


def test_after_an_error_nothing_is_read_before_it_is_asked_for():
    loader = Loader(fail={1: MineError(1, 2)})
    with prefetched(loader, 4, device="cpu") as batches:
        next(batches)
        read_ahead(batches, 1)
        for thread in reader():
            thread.join(LONG)
        batches.machinery.prefetch()
        assert len(loader.threads) == 2
        with pytest.raises(MineError):
            next(batches)
        assert len(loader.threads) == 2
        assert next(batches)["step"] == 2


def test_a_generator_is_over_after_its_error():
    def generator():
        yield 1
        raise SystemExit("mine")

    with prefetched(generator(), device="cpu") as batches:
        assert next(batches) == 1
        with pytest.raises(SystemExit, match="mine"):
            next(batches)
        assert list(batches) == []


def test_an_error_of_iter_is_raised_and_the_pass_can_be_begun_again():
    class Fails(Loader):
        def __iter__(self):
            iterator = super().__iter__()
            if len(self.log) == 1:
                raise OSError("not yet")
            return iterator

    with prefetched(Fails(), device="cpu") as batches:
        with pytest.raises(OSError, match="not yet"):
            next(batches)
        assert [next(batches)["step"] for _ in range(6)] == list(range(6))


def test_a_keyboard_interrupt_in_a_read_of_our_own_thread_ends_the_pass():
    loader = Loader(fail={1: KeyboardInterrupt()})
    with prefetched(loader, 0, device="cpu") as batches:
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(2):
            with pytest.raises(ClosedError, match="an interrupt has ended this pass after 1 batches"):
                next(batches)
        loader.fail.clear()
        assert steps(batches) == list(range(6))


def test_a_keyboard_interrupt_that_the_loader_raises_in_its_thread_comes_at_its_place():
    with prefetched(Loader(fail={1: KeyboardInterrupt()}), 2, device="cpu") as batches:
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert next(batches)["step"] == 2


def test_a_keyboard_interrupt_while_waiting_ends_the_pass(monkeypatch):
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        arrived = batches.machinery.engine.feed.reader.arrived
        with monkeypatch.context() as patch:
            patch.setattr(arrived, "wait", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
            assert loader.waiting.wait(LONG)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        loader.gate.release(99)
        with pytest.raises(ClosedError, match="an interrupt has ended this pass after 1 batches"):
            next(batches)
        assert steps(batches) == list(range(6))


def test_a_transform_that_fails_is_an_error_at_its_place():
    def transform(batch):
        return 1 / batch

    with prefetched([1, 0, 2], device="cpu", device_transform=transform) as batches:
        assert next(batches) == 1
        with pytest.raises(TransformError, match="batch 1 of epoch 0: ZeroDivisionError"):
            next(batches)
        assert next(batches) == 0.5


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
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        assert loader.waiting.wait(LONG)
        monkeypatch.setattr(
            puller.log, "warning", lambda *args: (said.append(args[0] % args[1:]), loader.gate.release(99))
        )
        assert steps([next(batches) for _ in range(5)]) == [1, 2, 3, 4, 5]
    assert "has been at the loader's next() for" in said[0]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_is_final_and_may_come_twice():
    batches = prefetched(Loader(), device="cpu")
    next(batches)
    batches.close()
    batches.close()
    assert reader() == []
    for call in (batches.machinery.prefetch, lambda: next(batches)):
        with pytest.raises(ClosedError):
            call()
    assert batches.stats().batches == 1


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


def test_garbage_collection_does_the_same_as_close():
    batches = prefetched(Loader(100), device="cpu")
    next(batches)
    read_ahead(batches, 2)
    assert len(reader()) == 1
    del batches
    assert reader() == []


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


def test_a_program_ends_without_close():
    program = (
        "import itertools, lit_async_data\n"
        "batches = lit_async_data.prefetched(itertools.count(), device='cpu')\n"
        "print(next(batches), next(batches))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "0 1\n"
    assert done.stderr == ""


def test_a_fork_is_told(monkeypatch):
    batches = prefetched(Loader(), device="cpu")
    next(batches)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(WorkerError, match="cannot be used in its fork"):
            next(batches)
        batches.machinery.engine.close()  # nothing of another process is touched
        assert len(reader()) == 1
    batches.close()


# -- the loader's own --------------------------------------------------------------------------------------------------


def test_attributes_are_those_of_the_loader():
    loader = DataLoader(range(4), batch_size=2)
    batches = prefetched(loader)
    assert batches.loader is loader
    assert batches.dataset is loader.dataset
    assert batches.batch_size == 2
    assert batches.sampler is loader.sampler
    batches.worker_init_fn = print  # as Lightning does
    assert loader.worker_init_fn is print
    assert "worker_init_fn" not in vars(batches)
    batches.mine = 7
    assert batches.mine == 7
    assert not hasattr(loader, "mine")
    with pytest.raises(AttributeError, match="no_such_thing"):
        batches.no_such_thing
    assert not hasattr(batches, "_iterator")  # Lightning would end its workers
    assert repr(batches).startswith("<PrefetchedLoader of ")


def test_it_can_be_pickled_and_copied():
    batches = prefetched([-1, 2, -3], 3, device="cpu", device_transform=abs)
    next(batches)
    for other in (pickle.loads(pickle.dumps(batches)), copy.copy(batches), copy.deepcopy(batches)):
        assert list(other) == [1, 2, 3]
        assert other.device_depth == 3
    assert next(batches) == 2
    batches.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": 7}, "7 cannot be iterated over"),
        ({"loader": AsyncLoader(ArraySource({"x": np.arange(3)}), {"batch_size": 1})}, "AsyncLoader prefetches by"),
        ({"loader": prefetched([1])}, "PrefetchedLoader prefetches by itself"),
        ({"loader": [1], "device_depth": -1}, "device_depth: -1"),
        ({"loader": [1], "device_depth": True}, "device_depth: True"),
        ({"loader": [1], "device": "gpu"}, "device: 'gpu'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        prefetched(**options)


def test_what_was_waited_for_and_read_is_counted():
    with prefetched(Loader(), device="cpu") as batches:
        for _ in range(2):
            list(batches)
        stats = batches.stats()
        assert stats.batches == stats.read.batches == 12
        assert stats.read.bytes == 12 * 32
        assert stats.wait_s > 0
        assert stats.metrics()["data/device_wait_ms"] == stats.metrics()["data/wait_ms"]


def test_what_was_ready_is_counted():
    with prefetched(Loader(), 3, device="cpu") as batches:
        next(batches)
        read_ahead(batches, 3)
        next(batches)
        assert batches.stats().queue_fill == 3


# -- states ------------------------------------------------------------------------------------------------------------


@runtime_checkable
class HasState(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("depth", [0, 3])
def test_a_state_is_that_after_the_last_batch_that_was_handed_out(depth):
    loader = Stateful()
    with prefetched(loader, depth, device="cpu") as batches:
        assert isinstance(batches, HasState)
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


def test_a_loader_without_a_state_has_none():
    batches = prefetched([1])
    assert not isinstance(batches, HasState)
    assert not hasattr(batches, "state_dict")


@pytest.mark.parametrize("slow", ["side", "compute"])
def test_states_are_not_those_of_batches_on_their_way_to_the_device(streamed, slow):
    streamed(FakeStreams(slow))
    with prefetched(Stateful(), 2) as batches:
        for given in range(1, 7):
            next(batches)
            batches.machinery.prefetch()
            assert batches.state_dict() == {"given": given}
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.state_dict() == {"given": 0}


# -- on a device -------------------------------------------------------------------------------------------------------


class Detection(Loader):
    def __iter__(self):
        return (detection(batch["step"]) for batch in super().__iter__())


@pytest.mark.parametrize("slow", ["side", "compute"])
@pytest.mark.parametrize("externally_driven", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_batches_of_any_form_arrive_on_a_device_with_streams(streamed, slow, externally_driven, depth):
    streams = streamed(FakeStreams(slow))
    step = Step(streams)
    with prefetched(Detection(), depth) as batches:
        batches.externally_driven = externally_driven
        for _ in range(3):
            for number, batch in enumerate(batches):
                if externally_driven:
                    batches.machinery.prefetch()
                step(batch, detection(number))
                del batch
                if externally_driven:
                    batches.machinery.prefetch()
        next(iter(batches))  # a pass that is left early
        for number, batch in zip(range(2), batches, strict=False):
            step(batch, detection(number))
        streams.synchronize()
    assert step.seen
    assert step.wrong == []


class OneThread(FakeStreams):
    """A device that may be called by one thread only."""

    def __getattribute__(self, name):
        assert threading.current_thread() is threading.main_thread(), name
        return super().__getattribute__(name)


def test_the_thread_makes_no_call_to_the_device(streamed):
    streamed(OneThread("compute"))
    loader = Detection()
    with prefetched(loader, 2) as batches:
        for _ in range(2):
            assert len(list(batches)) == 6
    assert threading.main_thread() not in loader.threads[1:]


def test_the_end_of_a_pass_leaves_nothing_on_the_device(streamed):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), 2) as batches:
        list(batches)
        assert not batches.machinery.engine.queue.tickets
        assert not batches.machinery.engine.queue.copying


def test_room_is_kept_for_one_batch_where_nothing_is_read_ahead(streamed):
    streamed(FakeStreams("side"))
    with prefetched(DataLoader(range(20), batch_size=2), 3) as batches:
        for _ in range(4):
            next(batches)
        assert [ticket.allocated is not None for ticket in batches.machinery.engine.queue.tickets] == [True]


@pytest.mark.parametrize("depth", [0, 2])
def test_what_the_canary_finds_about_a_batch_costs_none_of_those_behind_it(streamed, depth):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), depth) as batches:
        batches.verify_copies = 2
        first = next(batches)
        assert first["step"] == 0
        first["x"].numpy()[...] = 7
        if depth:
            read_ahead(batches, depth)
            batches.machinery.prefetch()
        assert next(batches)["step"] == 1
        with pytest.raises(TransferError, match="x of batch 0 of epoch 0"):
            next(batches)
        assert steps(next(batches) for _ in range(4)) == [2, 3, 4, 5]


def test_nothing_is_reserved_for_batches_after_the_last(streamed):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), 2) as batches:
        batches.externally_driven = True
        for _ in range(6):
            next(batches)
        read_ahead(batches, 1)
        batches.machinery.prefetch()  # the end is found
        batches.machinery.prefetch()
        assert {ticket.block for ticket in batches.machinery.engine.queue.tickets} == {None}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_draw_for_their_own_batches(monkeypatch, rank):
    def drawing(batch, rng):
        return torch.rand((), generator=rng).item()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with prefetched([1, 2], device="cpu", device_transform=drawing) as batches:
        drawn = [*batches, *batches]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with prefetched([1, 2], device="cpu", device_transform=drawing) as batches:
        again = [*batches, *batches]
    assert (drawn == again) is (rank == 0)
    assert len(set(drawn + again)) == (4 if rank == 0 else 8)


def test_a_device_transform_runs_on_the_side_stream(streamed):
    streams = streamed(FakeStreams("side"))

    def transform(batch):
        streams.launch("transform", lambda: None)
        return batch["step"]

    with prefetched(Loader(), 2, device_transform=transform) as batches:
        assert list(batches) == list(range(6))
    assert {stream for name, stream in streams.calls if name == "transform"} == {"side"}


def test_a_device_that_is_set_serves_from_the_next_pass_on(monkeypatch):
    monkeypatch.setattr("lit_async_data.device.streams.checked_device", torch.device)
    loader = Loader()
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        before = batches.machinery.engine
        batches.device = "mps"
        assert batches.device == torch.device("mps")
        assert steps(next(batches) for _ in range(2)) == [1, 2]
        assert steps(batches) == list(range(6))
        assert batches.machinery.engine is not before
        assert batches.machinery.engine.device == torch.device("mps")
        assert batches.stats().read.batches >= 9


def test_one_device_has_one_name(monkeypatch):
    monkeypatch.setattr("lit_async_data.device.streams.checked_device", torch.device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert prefetched([1], device="cuda").device == torch.device("cuda:3")
    assert prefetched([1], device="cuda:1").device == torch.device("cuda:1")
    batches = prefetched([1])  # built before its rank has chosen its device
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert batches.device == torch.device("cuda:3")


def test_without_an_accelerator_the_device_is_the_cpu():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert prefetched([1]).device == torch.device("cpu")


# -- several ranks -----------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class KnowsItsRank(RandomSampler):
    rank = 1


def distributed(**options):
    return DistributedSampler(range(4), num_replicas=2, rank=1, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("loader", "judged"),
    [
        (lambda: DataLoader(range(4), shuffle=True), True),
        (lambda: DataLoader(range(4), batch_sampler=[[0, 1]]), True),
        (lambda: DataLoader(range(4), sampler=distributed()), False),
        (
            lambda: DataLoader(range(4), batch_sampler=torch.utils.data.BatchSampler(distributed(), 2, False)),
            False,
        ),
        (lambda: DataLoader(range(4), sampler=DistributedSampler(range(4), num_replicas=1, rank=0)), False),
        (lambda: DataLoader(range(4), sampler=KnowsItsRank(range(4))), False),
        (lambda: DataLoader(Stream()), False),
        (lambda: [1, 2], False),
    ],
)
def test_ranks_do_not_read_the_same(monkeypatch, ranks, loader, judged):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)  # asked by torch's own iterator
    with prefetched(loader(), device="cpu") as batches:
        if judged and ranks > 1:
            with pytest.raises(ConfigError, match=r"sampler=DistributedSampler\(dataset\)"):
                next(batches)
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        assert len(list(batches)) > 0


# -- worker processes, and Lightning -----------------------------------------------------------------------------------


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 7:
            raise MineError(index, "is wrong")
        return {"x": torch.full((3,), index), "name": f"{index}"}


@pytest.fixture
def feeders_end():
    """Threads that multiprocessing leaves to themselves when workers have ended."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(LONG)


def shut_down(iterator):
    """End the workers of an iterator that its DataLoader keeps."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


@pytest.mark.usefixtures("feeders_end")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataloader_with_workers(persistent):
    loader = DataLoader(range(12), batch_size=2, num_workers=1, persistent_workers=persistent)
    with prefetched(loader, device="cpu") as batches:
        assert len(batches) == 6
        for _ in range(2):
            next(iter(batches))
            assert [batch.tolist() for batch in batches] == [[n, n + 1] for n in range(0, 12, 2)]
    if persistent:
        shut_down(loader._iterator)


@pytest.mark.usefixtures("feeders_end")
def test_an_error_in_a_worker_is_that_which_the_dataloader_raises():
    with prefetched(DataLoader(Numbers(), batch_size=2, num_workers=1), device="cpu") as batches:
        assert [next(batches)["name"] for _ in range(3)] == [["0", "1"], ["2", "3"], ["4", "5"]]
        with pytest.raises(Exception, match="7 is wrong") as caught:
            next(batches)
        assert "Caught MineError in DataLoader worker process 0" in str(caught.value)
        assert next(batches)["name"] == ["8", "9"]
        # Torch's own error refers to itself and to the iterator: without this, the collector would end the worker.
        shut_down(batches.machinery.engine.feed.reader.iterator)


@pytest.mark.usefixtures("feeders_end")
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


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_the_trainer_takes_it(tmp_path):
    import pytorch_lightning as pl

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append((self.current_epoch, batch["epoch"], batch["step"]))
            return self.layer(batch["x"].float().flatten()).sum()

        def validation_step(self, batch, index):
            assert batch["step"] == index

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Sampled(Loader):
        @property
        def sampler(self):
            return self  # where Lightning looks for set_epoch

    model, loader = Model(), Sampled()
    with prefetched(loader) as train, prefetched(Loader(2)) as val:
        pl.Trainer(
            max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
            default_root_dir=tmp_path, val_check_interval=3, enable_model_summary=False,
        ).fit(model, train, val)  # fmt: skip
    assert model.seen == [(epoch, epoch, step) for epoch in range(2) for step in range(6)]
    assert loader.log == ["set_epoch 0", "iter", "set_epoch 1", "iter"]


# -- passes that are taken up again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
def test_what_iter_gives_goes_on_where_it_is(depth):
    with prefetched(Loader(), depth, device="cpu") as batches:
        one = iter(batches)
        assert steps([next(one)]) == [0]
        assert steps(itertools.islice(one, 2)) == [1, 2]
        assert steps(one) == [3, 4, 5]
        assert steps(one) == []
        assert steps(batches) == list(range(6))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_generator_that_was_left_goes_on(depth):
    with prefetched((number for number in range(5)), depth, device="cpu") as batches:
        for number in batches:
            if number == 1:
                break
        if depth:  # until those that a new pass would lose have been read
            pulling = batches.machinery.engine.feed.reader
            until(pulling, lambda: pulling.ready == depth)
        assert list(batches) == [2, 3, 4]
        assert list(batches) == []


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


@pytest.mark.parametrize("depth", [0, 1, 3])
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


def test_a_transform_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"^device_transform: 3 cannot be called"):
        AsyncLoader(ArraySource({"x": np.zeros(3)}), {"batch_size": 1}, device_transform=3)
