"""Batches come in order, as far ahead as there are slots, and as many at once as can be read in a moment. A slot is
lent as long as anything made from it lives."""

import gc
import itertools
import re
import sys
import threading
import types

import numpy as np
import pytest
import torch
from support.threads.number_pipelines import BATCH, WHOLE, Gate, copy_numbers, epoch, failing_at, kept, running, taken
from support.threads.waits import until

from lit_async_data.engine import supervisor
from lit_async_data.engine.device.feeds import LentFeed
from lit_async_data.engine.device.queues import InlineQueue
from lit_async_data.engine.pipeline.pipeline import FILLING, READY, TRANSITIONS, SlotPool, SlotState
from lit_async_data.errors import ReadError, SourceError, StalledError
from lit_async_data.order.plan import BatchIndex, EpochPlan
from lit_async_data.sources.contract.stage_clock import Work

pytestmark = pytest.mark.usefixtures("however_slow_the_machine_is")


def test_order_is_kept_when_a_later_batch_is_read_first():
    gate = Gate()
    with running(gate, workers=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(2)
        gate.open(4)
        until(pipeline, lambda: pipeline.ready == 1)
        assert pipeline.poll(BatchIndex(0, 0)) is None
        gate.open(0, 8)
        assert epoch(pipeline, 0) == WHOLE


def test_no_more_is_read_ahead_than_there_are_slots():
    gate = Gate()
    gate.open(0, 4, 8)
    with running(gate, depth=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(3)
        until(pipeline, lambda: pipeline.ready == 3)
        assert gate.asked == [0, 4, 8]
        assert len(pipeline.pool) == 3


def test_the_end_of_an_epoch_drains_nothing():
    """The first batches of the next epoch are read while the last of this one is still to be asked for."""
    gate = Gate()
    gate.open(0, 4, 8)
    with running(gate, depth=3) as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        gate.wait_for(5)
        assert gate.asked == [0, 4, 8, 0, 4]
        assert taken(pipeline, BatchIndex(0, 1)) == WHOLE[1]


def test_a_stalled_read_is_an_error_that_says_what_every_worker_is_at(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    gate = Gate()
    with running(gate) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(1)
        pipeline.timeout_s = 0.01
        what = r"batch 0 of epoch 0 .* worker 0 has been at batch 0 .*samples 0, 1, 2"
        with pytest.raises(StalledError, match=what) as caught:
            pipeline.get(BatchIndex(0, 0))
        assert (caught.value.stage, caught.value.worker) == ("read", 0)
        gate.open(0, 4, 8)


def test_a_long_wait_is_a_warning_that_first_says_who_has_the_batch(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    gate, said = Gate(), []

    def warned(text, *given):
        said.append(text % given)
        gate.open(0, 4, 8)

    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.log.warning", warned)
    with running(gate, workers=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(2)
        pipeline.warn_after_s = 0.0
        # The other one has been at its batch for longer.
        for worker in pipeline.workers:
            task, since = worker.task
            worker.task = (task, since - 60 * task.keys[0].step)
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
    begin = r"the loop has waited 0 s for batch 0 of epoch 0 \(stage read\): worker \d has been at batch 0 "
    assert re.match(begin + r".*; worker \d has been at batch 1 of epoch 0, samples 4, 5, 6, .* for 6\d", said[0])


def test_a_batch_of_an_older_generation_is_thrown_away():
    """Without generations it would stay for ever."""
    gate = Gate()
    with running(gate, depth=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 1))
        gate.wait_for(1)  # 1. the worker has claimed (0, 1) and reads
        pipeline.prefetch(BatchIndex(7, 0))  # 2. the consumer wants (7, 0)
        gate.open(4)  # 3. the worker is done with (0, 1)
        gate.wait_for(1)
        assert gate.asked == [4, 0]
        assert pipeline.ready == 0
        gate.open(0, 8)
        assert epoch(pipeline, 7) == WHOLE
        assert len(pipeline.pool) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ring_grows_when_the_user_keeps_every_slot_and_only_then(workers):
    with running(workers=workers, most_slots=100) as pipeline:
        batches = [kept(pipeline, BatchIndex(number, step)) for number in range(4) for step in range(3)]
        assert [batch.tolist() for batch in batches] == WHOLE * 4
        assert 12 <= len(pipeline.pool) <= 24
    with running(workers=workers, depth=1) as pipeline:
        for number in range(200):
            for step in range(3):
                batch = kept(pipeline, BatchIndex(number, step))
        assert batch.tolist() == WHOLE[2]
        assert len(pipeline.pool) == 2


def test_the_last_free_slot_must_be_copied_when_the_budget_is_spent():
    with running(most_slots=3, depth=2) as pipeline:
        first = kept(pipeline, BatchIndex(0, 0))
        second = pipeline.get(BatchIndex(0, 1))
        assert not pipeline.must_copy()
        lent = pipeline.pool.lend(second.slot)
        assert pipeline.get(BatchIndex(0, 2)).good
        assert pipeline.must_copy()
        del first
        assert not pipeline.must_copy()
        del lent


def read_sizes(length, batches, epochs=2, **options):
    """How many samples each read asked for, and what was taken."""
    sizes, values = [], []

    def read(keyed, out):
        sizes.append(len(keyed.samples))
        copy_numbers(keyed, out)

    with running(read, length=length, batches=batches, **options) as pipeline:
        queue = InlineQueue(LentFeed(pipeline), 1, None)
        for number in range(epochs):
            for step in range(-(-length // BATCH)):
                values += queue.take(BatchIndex(number, step))["x"].tolist()
        queue.close()
    return sizes, values


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("batches", "together"), [(1, [4] * 10), (2, [4, 8, 8, 8, 8, 6]), (4, [4, 8, 16, 14, 16, 16, 10])]
)
def test_small_batches_are_read_together_in_order_the_first_alone_and_never_over_an_epoch(batches, together, workers):
    sizes, values = read_sizes(42, batches, epochs=5, workers=workers)
    assert values == list(range(42)) * 5
    assert workers > 1 or sizes[: len(together)] == together


@pytest.mark.parametrize(
    ("paces", "sizes"),
    [
        ([20] * 4, [1, 1, 1, 1]),
        ([8] * 4, [1, 2, 2, 2]),
        ([1, 1, 1, 1, 10, 10, 2, 2, 2, 1], [1, 2, 4, 8, 8, 2, 2, 4, 8, 8]),
    ],
)
def test_no_more_batches_are_read_together_than_can_be_in_twenty_milliseconds_at_their_pace(monkeypatch, paces, sizes):
    pace = Pace(monkeypatch)
    with running(pace.read, length=400, batches=8, workers=0) as pipeline:
        for pace.ms in paces:
            pace.take(pipeline)
    assert pace.sizes == sizes


class Pace:
    """Reads batches that each take ``ms`` milliseconds by a fake clock, and takes slots one after another."""

    def __init__(self, monkeypatch):
        self.ms, self.sizes, self._next = 0, [], BatchIndex(0, 0)
        monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 0.02)
        clock = types.SimpleNamespace(take=lambda: Work(seconds=self.ms * self.sizes[-1] / 1000))
        monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.CLOCK", clock)

    def read(self, keyed, out):
        self.sizes.append(len(keyed.samples) // BATCH)
        copy_numbers(keyed, out)

    def take(self, pipeline):
        filled = pipeline.get(self._next)
        pipeline.pool.move(filled.slot, "drop")
        self._next = BatchIndex(0, filled.batches[-1].key.step + 1)


def test_batches_that_wait_are_counted_without_those_that_could_not_be_read():
    with running(failing_at(9, SourceError("nine")), length=24, batches=6, depth=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        until(pipeline, lambda: pipeline.ready == 1 + 1 + 3)  # of 1, 2 and 3 batches
        for step, left in ((0, 4), (1, 3), (3, 0)):
            pipeline.get(BatchIndex(0, step))
            assert pipeline.ready == left
        read = pipeline.done
        assert (read.batches, read.bytes) == (5, 5 * BATCH * pipeline.layout.sample_bytes)


class Scripted:
    settled = False

    def __init__(self, *counts):
        self.count, self.counts = 1, list(counts)

    def waited(self, seconds, batches):
        assert seconds >= 0
        self.count = self.counts.pop(0) if self.counts else self.count
        return self.count


@pytest.mark.parametrize(("most", "slots"), [(10, 5), (3, 3)])  # one for each worker, and one that is handed out
def test_workers_that_come_and_go_change_neither_order_nor_batches(most, slots):
    with running(depth=1, most_slots=most) as pipeline:
        pipeline._tuner = Scripted(2, 3, 4, 3)
        assert [epoch(pipeline, number) for number in range(200)] == [WHOLE] * 200
        pipeline.set_workers(3)
        assert len(pipeline.pool) == slots
        assert [epoch(pipeline, number) for number in range(200, 205)] == [WHOLE] * 5


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_comes_at_its_place_once_and_the_order_goes_on(workers):
    with running(failing_at(4, OSError(5, "Input/output error")), workers=workers) as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        with pytest.raises(ReadError, match=r"batch 1 of epoch 0 \(samples 4, 5, 6, … \(4 in all\)\)") as caught:
            taken(pipeline, BatchIndex(0, 1))
        assert caught.value.sample_id == 4
        assert caught.value.worker == (None if workers == 0 else pytest.approx(0, abs=1))
        assert isinstance(caught.value.__cause__, OSError)
        assert taken(pipeline, BatchIndex(0, 2)) == WHOLE[2]
        assert pipeline.pool.count(FILLING) + pipeline.pool.count(READY) <= len(pipeline.pool)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RecursionError(), MemoryError()], ids=repr)
def test_nothing_that_a_read_raises_kills_a_worker(error):
    with running(failing_at(0, error)) as pipeline:
        with pytest.raises(ReadError, match=type(error).__name__):
            taken(pipeline, BatchIndex(0, 0))
        assert taken(pipeline, BatchIndex(0, 1)) == WHOLE[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_planning_comes_at_its_place(workers, monkeypatch):
    """It killed the worker, whose death then had no cause."""
    stretch = EpochPlan.stretch
    monkeypatch.setattr(EpochPlan, "stretch", lambda plan, step, count: 1 // (step != 1) and stretch(plan, step, count))
    with running(workers=workers) as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        with pytest.raises(ReadError, match=r"^batch 1 of epoch 0 could not be read: ZeroDivisionError: ") as caught:
            taken(pipeline, BatchIndex(0, 1))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert taken(pipeline, BatchIndex(0, 2)) == WHOLE[2]


def test_of_batches_read_together_only_the_bad_one_fails():
    with running(failing_at(9, SourceError("nine")), length=24, batches=6) as pipeline:
        queue = InlineQueue(LentFeed(pipeline), 1, None)
        for step in range(6):
            if step == 2:
                with pytest.raises(SourceError) as caught:
                    queue.take(BatchIndex(0, step))
                assert "in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)" in caught.value.__notes__
            else:
                assert queue.take(BatchIndex(0, step))["x"].tolist() == [4 * step + i for i in range(4)]
        queue.close()


EVENTS = {event: lambda pool, slot, event=event: pool.move(slot, event) for _, event in TRANSITIONS}
EVENTS["lend"] = SlotPool.lend
# How a free slot comes into a state.
WAYS = {
    SlotState.FREE: [],
    SlotState.FILLING: ["take"],
    SlotState.READY: ["take", "filled"],
    SlotState.LENT: ["take", "filled", "lend"],
    SlotState.COPYING: ["take", "filled", "copy"],
}


def pool_of(slots, nbytes=1000):
    return SlotPool([np.zeros(nbytes, np.uint8) for _ in range(slots)])


def lent(pool):
    slot = pool.take(timeout=0)
    pool.move(slot, "filled")
    return pool.lend(slot)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, EVENTS)), ids=str)
def test_an_event_moves_a_slot_as_the_table_says_or_changes_nothing(state, event):
    pool = pool_of(1)
    for before in WAYS[state]:
        pool.move(0, before)
    assert pool._states[0] is state
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(RuntimeError, match=f"slot 0 is {state.name} and cannot {event}"):
            EVENTS[event](pool, 0)
        assert pool._states[0] is state
    else:
        kept = EVENTS[event](pool, 0)
        assert pool._states[0] is after
        del kept


KEPT = {
    "a slice": lambda array: array[1:2],
    "a reshaped tensor": lambda array: torch.from_numpy(array).view(torch.float32).reshape(2, 125)[1],
    "an autograd graph": lambda array: (
        torch.from_numpy(array).view(torch.float32) * torch.ones(250, requires_grad=True)
    ).sum(),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())
def test_a_slot_is_lent_as_long_as_anything_made_from_it_lives(kept):
    pool = pool_of(1)
    something = kept(lent(pool))
    gc.collect()
    assert pool.held == 1
    assert pool.take(timeout=0) is None
    del something
    assert pool.held == 0
    assert pool.take(timeout=0) == 0


def test_a_lease_may_end_inside_the_lock_of_the_ring():
    """1. A thread holds the ring's lock. 2. It allocates; garbage collection drops the last view of a lease. 3. The
    finalizer runs in that thread, inside the lock. Did it ask for a lock that is not reentrant, it would wait for
    itself."""
    pool = pool_of(2)
    cycle = [lent(pool)]
    cycle.append(cycle)
    del cycle
    done = threading.Event()

    def collect():
        with pool._lock:
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(60)
    assert {pool.take(timeout=0), pool.take(timeout=0)} == {0, 1}


def test_what_is_lent_outlives_the_ring():
    pool = pool_of(1)
    array = lent(pool)
    array[:] = 7
    pool.memories.clear()
    del pool
    gc.collect()
    assert (array == 7).all()


def test_a_waiting_taker_is_woken_by_the_end_of_a_lease():
    pool = pool_of(1)
    held = [lent(pool)]
    taken = []
    thread = threading.Thread(target=lambda: taken.append(pool.take(timeout=30)))
    thread.start()
    held.clear()
    thread.join(30)
    assert taken == [0]


def test_who_waits_is_not_left_beside_a_free_slot():
    """1. A waits for a slot. 2. Two become vacant, and B collects both. 3. B takes one; the other must wake A."""
    pool = pool_of(2)
    slots = [pool.take(timeout=0), pool.take(timeout=0)]
    got = []
    waiting = threading.Thread(target=lambda: got.append(pool.take(timeout=60)))
    for slot in slots:
        pool.move(slot, "abandon")
    got.append(pool.take(timeout=0))
    waiting.start()
    waiting.join(60)
    assert sorted(got) == sorted(slots)


def test_being_woken_is_not_lost_among_free_slots():
    pool = pool_of(2)
    pool.wake(1)
    assert [pool.take(timeout=0) for _ in range(4)].count(None) == 2


def test_the_end_of_a_lease_runs_no_python_code():
    """Else an interrupt can arrive there, which CPython prints and drops: Ctrl-C would have no effect."""
    pool = pool_of(1)
    kept = lent(pool)[3:]
    called = []
    sys.setprofile(lambda frame, event, argument: called.append((event, frame.f_code.co_name)))
    try:
        del kept
    finally:
        sys.setprofile(None)
    assert [name for event, name in called if event == "call"] == []
    assert pool.take(timeout=0) == 0
