import contextlib
import functools
import gc
import os
import queue
import re
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest
from support.threads.waits import until

from lit_async_data.batch import spec as spec_module
from lit_async_data.batch.spec import BatchLayout, BatchSpec, Extent, FieldSpec
from lit_async_data.engine import supervisor
from lit_async_data.engine.device.inline_queue import InlineQueue
from lit_async_data.engine.device.slot_feed import SlotFeed
from lit_async_data.engine.pipeline.slots import FILLING, READY, SlotPool
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.engine.resources.memory import allocated
from lit_async_data.errors import ClosedError, ReadError, SourceError, StalledError, WorkerError
from lit_async_data.order.plan import BatchIndex, EpochPlan, Schedule
from lit_async_data.sources.contract.stage_clock import Work

SPEC = BatchSpec({"x": FieldSpec((), np.dtype(np.int64))}, as_mapping=True)
LENGTH, BATCH = 12, 4


def copy_numbers(epoch, samples, out):
    out["x"][...] = samples


class Gate:
    """A read that waits to be let through, batch by batch, and says what it was asked for."""

    def __init__(self):
        self.asked = []
        self._doors = {}
        self._lock = threading.Lock()
        self.arrived = threading.Semaphore(0)

    def door(self, first):
        with self._lock:
            return self._doors.setdefault(first, threading.Event())

    def open(self, *firsts):
        for first in firsts:
            self.door(first).set()

    def __call__(self, epoch, samples, out):
        first = int(samples[0])
        self.asked.append(first)
        self.arrived.release()
        assert self.door(first).wait(30)
        copy_numbers(epoch, samples, out)

    def wait_for(self, reads):
        for _ in range(reads):
            assert self.arrived.acquire(timeout=30)


@pytest.fixture(autouse=True)
def however_slow_the_machine_is(monkeypatch):
    """How many batches are read together depends on the time that they take; few tests are about that."""
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 1e9)


@contextlib.contextmanager
def running(
    read=copy_numbers, *, workers=1, depth=2, most_slots=10, timeout_s=30.0, length=LENGTH, batches=1, ahead=None
):
    layout = BatchLayout(SPEC, BATCH, batches)
    schedule = Schedule(
        lambda **at: EpochPlan(length=length, batch_size=BATCH, shuffle="none", seed=0, **at), shuffled=True
    )
    made = ThreadPipeline(
        read,
        schedule,
        layout,
        functools.partial(allocated, layout.nbytes, pinned=False),
        workers=workers,
        slots=depth + 1,
        most_slots=most_slots,
        timeout_s=timeout_s,
        ahead=ahead,
    )
    try:
        yield made
    finally:
        made.close()


def taken(pipeline, key):
    """The batch of a key, its slot given back."""
    filled = pipeline.get(key)
    (batch,) = filled.batches
    if batch.error is not None:
        raise batch.error
    memory = pipeline.pool.memory(filled.slot)
    values = pipeline.layout.views(memory, Extent(batch.rows), batch.first)["x"].tolist()
    pipeline.pool.drop(filled.slot)
    return values


def epoch(pipeline, number):
    return [taken(pipeline, BatchIndex(number, step)) for step in range(3)]


WHOLE = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_in_order_epoch_after_epoch(workers):
    with running(workers=workers) as pipeline:
        assert [epoch(pipeline, number) for number in range(5)] == [WHOLE] * 5


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


def test_epochs_start_no_threads():
    with running() as pipeline:
        epoch(pipeline, 0)
        before = set(threading.enumerate())
        for number in range(1, 20):
            epoch(pipeline, number)
        assert set(threading.enumerate()) == before


def failing_at(first, error):
    def read(epoch, samples, out):
        if samples[0] == first:
            raise error
        copy_numbers(epoch, samples, out)

    return read


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


def test_an_error_that_says_where_it_happened_is_passed_on_as_it_is():
    error = SourceError("f.h5:/data[4]: bad", file="f.h5", row=4)
    with running(failing_at(0, error)) as pipeline, pytest.raises(SourceError) as caught:
        taken(pipeline, BatchIndex(0, 0))
    assert caught.value is error
    assert (error.stage, error.worker, error.row) == ("read", 0, 4)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RecursionError(), MemoryError()], ids=repr)
def test_nothing_that_a_read_raises_kills_a_worker(error):
    with running(failing_at(0, error)) as pipeline:
        with pytest.raises(ReadError, match=type(error).__name__):
            taken(pipeline, BatchIndex(0, 0))
        assert taken(pipeline, BatchIndex(0, 1)) == WHOLE[1]


def test_an_interrupt_in_the_callers_thread_is_an_interrupt():
    """What follows it is the loader's business: see test_interrupts.py."""
    with running(failing_at(0, KeyboardInterrupt()), workers=0) as pipeline, pytest.raises(KeyboardInterrupt):
        taken(pipeline, BatchIndex(0, 0))


def test_a_dead_worker_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(ThreadPipeline, "_work", lambda self, worker: False)
    with running() as pipeline, pytest.raises(WorkerError, match="worker 0 is dead") as caught:
        pipeline.get(BatchIndex(0, 0))
    assert caught.value.worker == 0


def test_a_worker_that_died_of_an_error_says_of_which(monkeypatch):
    def claim(self):
        raise MemoryError("no more")

    monkeypatch.setattr(ThreadPipeline, "_claim", claim)
    with running() as pipeline, pytest.raises(WorkerError, match=r"ended by MemoryError: no more; close") as caught:
        pipeline.get(BatchIndex(0, 0))
    assert isinstance(caught.value.__cause__, MemoryError)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_planning_comes_at_its_place(workers, monkeypatch):
    """It killed the worker, whose death then had no cause."""
    stretch = EpochPlan.stretch

    def planned(self, step, count):
        if step == 1:
            raise MemoryError("no more")
        return stretch(self, step, count)

    monkeypatch.setattr(EpochPlan, "stretch", planned)
    with running(workers=workers) as pipeline:
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        with pytest.raises(ReadError, match=r"^batch 1 of epoch 0 could not be read: MemoryError: no more$") as caught:
            taken(pipeline, BatchIndex(0, 1))
        assert isinstance(caught.value.__cause__, MemoryError)
        assert taken(pipeline, BatchIndex(0, 2)) == WHOLE[2]


class PutsLate:
    """Slots that are put here become vacant when somebody waits for one."""

    def __init__(self):
        self._there, self._late = queue.SimpleQueue(), []

    def put(self, slot):
        self._late.append(slot)

    def get_nowait(self):
        return self._there.get_nowait()

    def get(self, timeout):
        for slot in self._late:
            self._there.put(slot)
        self._late.clear()
        return self._there.get(timeout=timeout)


def test_a_batch_that_another_thread_is_dropping_is_waited_for():
    """1. The lease is dead. 2. The consumer asks for a slot. 3. The slot becomes vacant."""
    with running(workers=0, depth=0, most_slots=1) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        there, pipeline.pool.vacant = pipeline.pool.vacant, PutsLate()
        pipeline.pool.vacant.put(there.get_nowait())
        assert pipeline.pool.take() == 0
        pipeline.pool.abandon(0)
        assert taken(pipeline, BatchIndex(0, 0)) == WHOLE[0]
        assert taken(pipeline, BatchIndex(0, 1)) == WHOLE[1]


def test_a_slot_that_never_becomes_vacant_is_an_error(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    with running(workers=0, depth=0, most_slots=1) as pipeline:
        batch = kept(pipeline, BatchIndex(0, 0))
        pipeline.timeout_s = 0.1
        with pytest.raises(StalledError, match=r"no slot became free in 0.1 s: 1 of 1 hold batches"):
            pipeline.get(BatchIndex(0, 1))
        del batch


def logged(caplog):
    return [record.getMessage() for record in caplog.records if "please report" in record.getMessage()]


@pytest.mark.parametrize(("error", "lines"), [(ValueError("a bug"), 1), (SourceError("the disk"), 0)])
def test_what_goes_wrong_in_preparing_is_logged_once_unless_it_is_the_sources(error, lines, caplog):
    def ahead(schedule, keys, unread):
        raise error

    with running(ahead=ahead) as pipeline:
        for number in range(3):
            assert epoch(pipeline, number) == WHOLE
    assert len(logged(caplog)) == lines
    if lines:
        (line,) = logged(caplog)
        assert "in ahead" in line
        assert "ValueError: a bug" in line


def test_an_error_of_reading_together_that_no_batch_has_alone_is_logged_once(caplog):
    def read(epoch, samples, out):
        if len(samples) > BATCH:
            raise RuntimeError("dictionary changed size")
        copy_numbers(epoch, samples, out)

    with running(read, length=24, batches=6) as pipeline:
        inline = InlineQueue(SlotFeed(pipeline), 1, None)
        for number in range(3):
            assert [taken_from(inline, BatchIndex(number, step)).tolist()[0] for step in range(6)] == [
                0,
                4,
                8,
                12,
                16,
                20,
            ]
        inline.close()
    (line,) = logged(caplog)
    assert "RuntimeError: dictionary changed size" in line


def test_a_thread_that_cannot_start_is_an_error(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with running() as pipeline, pytest.raises(WorkerError, match="worker 0 could not be started: can't start new"):
        pipeline.get(BatchIndex(0, 0))


def test_a_stalled_read_is_an_error_that_says_what_every_worker_is_at(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    gate = Gate()
    with running(gate) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(1)
        pipeline.timeout_s = 0.01
        what = r"batch 0 of epoch 0 .* worker 0 has been at batch 0 .*samples 0, 1, 2"
        with pytest.raises(StalledError, match=rf"{what}.* \(in test_pipeline.py:\d+ __call__ > ") as caught:
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
    assert re.match(
        r"the loop has waited 0 s for batch 0 of epoch 0 \(stage read\): worker \d has been at batch 0 ", said[0]
    )
    assert re.search(r"; worker \d has been at batch 1 of epoch 0, samples 4, 5, 6, .* for 6\d", said[0])


def test_a_batch_of_an_older_generation_is_thrown_away():
    gate = Gate()
    with running(gate, depth=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 1))
        gate.wait_for(1)  # 1. the worker has claimed (0, 1) and reads
        pipeline.prefetch(BatchIndex(7, 0))  # 2. the consumer wants (7, 0)
        gate.open(4)  # 3. the worker is done with (0, 1)
        gate.wait_for(1)
        assert gate.asked == [4, 0]
        assert not pipeline.ready
        gate.open(0, 8)
        assert epoch(pipeline, 7) == WHOLE
        assert len(pipeline.pool) == 3


def test_what_is_wanted_already_is_not_read_again():
    gate = Gate()
    gate.open(0, 4, 8)
    with running(gate, depth=2) as pipeline:
        for key in (BatchIndex(0, 0), BatchIndex(0, 1)):
            pipeline.prefetch(key)
            pipeline.prefetch(key)
            taken(pipeline, key)
        gate.wait_for(3)
        assert gate.asked[:3] == [0, 4, 8]


def kept(pipeline, key):
    """The batch of a key, its slot on a lease."""
    filled = pipeline.get(key)
    (batch,) = filled.batches
    memory = pipeline.pool.lend(filled.slot)
    return pipeline.layout.views(memory, Extent(batch.rows), batch.first)["x"]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_ring_grows_when_the_user_keeps_every_slot(workers):
    with running(workers=workers, most_slots=100) as pipeline:
        batches = [kept(pipeline, BatchIndex(number, step)) for number in range(4) for step in range(3)]
        assert [batch.tolist() for batch in batches] == WHOLE * 4
        assert 12 <= len(pipeline.pool) <= 24


def test_the_ring_does_not_grow_when_batches_are_let_go():
    with running(workers=2, depth=1) as pipeline:
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


def taken_from(queue, key):
    return queue.take(key)["x"]


def read_sizes(length, batches, epochs=2, **options):
    """How many samples each read asked for, and what was taken."""
    sizes, values = [], []

    def read(epoch, samples, out):
        sizes.append(len(samples))
        copy_numbers(epoch, samples, out)

    with running(read, length=length, batches=batches, **options) as pipeline:
        queue = InlineQueue(SlotFeed(pipeline), 1, None)
        for number in range(epochs):
            for step in range(-(-length // BATCH)):
                values += taken_from(queue, BatchIndex(number, step)).tolist()
        queue.close()
    return sizes, values


def test_small_batches_are_read_together_the_first_alone_and_never_over_an_epoch():
    sizes, values = read_sizes(42, batches=4)
    assert values == list(range(42)) * 2
    assert sizes[:7] == [4, 8, 16, 14, 16, 16, 10]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("batches", [1, 2, 5])
def test_order_is_kept_however_many_are_read_together(workers, batches):
    _, values = read_sizes(42, batches, epochs=5, workers=workers)
    assert values == list(range(42)) * 5


def test_a_slot_that_comes_free_is_filled_while_batches_of_the_next_one_are_used(monkeypatch):
    """Else it would be read in the last step of the next slot alone, where the user keeps the other slots."""
    asked = []
    with running(length=40, batches=2, workers=0) as pipeline:
        feed = SlotFeed(pipeline)
        for step in range(2):
            feed.lend(BatchIndex(0, step))
        monkeypatch.setattr(pipeline, "prefetch", asked.append)
        vacant = pipeline.pool.take_all()
        feed.prefetch(BatchIndex(0, 2))  # lies in the slot of the batch before
        assert not asked
        pipeline.pool.abandon(vacant[0])
        feed.prefetch(BatchIndex(0, 2))
    assert asked == [BatchIndex(0, 3)]


@pytest.mark.parametrize(
    ("ms", "sizes"), [(30, [1, 1, 1, 1]), (20, [1, 1, 1, 1]), (8, [1, 2, 2, 2]), (5, [1, 2, 4, 4])]
)
def test_no_more_batches_are_read_together_than_can_be_in_twenty_milliseconds(monkeypatch, ms, sizes):
    pace = Pace(monkeypatch, ms)
    with running(pace.read, length=200, batches=8, workers=0) as pipeline:
        for _ in range(4):
            pace.take(pipeline)
    assert pace.sizes == sizes


def test_the_number_of_batches_read_together_follows_the_pace_of_reading(monkeypatch):
    pace = Pace(monkeypatch, ms=1)
    with running(pace.read, length=400, batches=8, workers=0) as pipeline:
        for ms in (1, 1, 1, 1, 10, 10, 2, 2, 2, 1):
            pace.ms = ms
            pace.take(pipeline)
    assert pace.sizes == [1, 2, 4, 8, 8, 2, 2, 4, 8, 8]


def test_workers_that_begin_before_the_pace_is_known_read_one_batch_each():
    gate = Gate()
    with running(gate, workers=5, depth=5, batches=8, length=400) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(5)
        assert sorted(gate.asked) == [0, 4, 8, 12, 16]
        gate.open(*range(0, 400, 4))


class Pace:
    """Reads batches that each take ``ms`` milliseconds by a fake clock, and takes slots one after another."""

    def __init__(self, monkeypatch, ms):
        self.ms, self.sizes, self._next = ms, [], BatchIndex(0, 0)
        monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 0.02)
        clock = types.SimpleNamespace(take=lambda: Work(seconds=self.ms * self.sizes[-1] / 1000))
        monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.CLOCK", clock)

    def read(self, epoch, samples, out):
        self.sizes.append(len(samples) // BATCH)
        copy_numbers(epoch, samples, out)

    def take(self, pipeline):
        filled = pipeline.get(self._next)
        pipeline.pool.drop(filled.slot)
        self._next = BatchIndex(0, filled.batches[-1].key.step + 1)


def test_batches_that_wait_are_counted_without_those_that_could_not_be_read():
    def read(epoch, samples, out):
        if 9 in samples:
            raise SourceError("nine")
        copy_numbers(epoch, samples, out)

    with running(read, length=24, batches=6, depth=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        until(pipeline, lambda: pipeline.ready == 1 + 1 + 3)  # of 1, 2 and 3 batches
        for step, left in ((0, 4), (1, 3), (3, 0)):
            pipeline.get(BatchIndex(0, step))
            assert pipeline.ready == left


def test_of_batches_read_together_only_the_bad_one_fails():
    def read(epoch, samples, out):
        if 9 in samples:
            raise SourceError("nine")
        copy_numbers(epoch, samples, out)

    with running(read, length=24, batches=6) as pipeline:
        queue = InlineQueue(SlotFeed(pipeline), 1, None)
        for step in range(6):
            if step == 2:
                with pytest.raises(SourceError) as caught:
                    queue.take(BatchIndex(0, step))
                assert "in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)" in caught.value.__notes__
            else:
                assert taken_from(queue, BatchIndex(0, step)).tolist() == [4 * step + i for i in range(4)]
        queue.close()


def test_keeping_one_of_several_keeps_its_slot_and_nothing_ever_changes(monkeypatch):
    monkeypatch.setattr(spec_module, "SMALL_BYTES", 0)  # so that even these are handed out as they lie in the slot
    with running(length=24, batches=3, most_slots=100) as pipeline:
        queue = InlineQueue(SlotFeed(pipeline), 1, None)
        held = {}
        for number in range(3):
            for step in range(6):
                array = taken_from(queue, BatchIndex(number, step))
                if step % 3 == 1:
                    held[number, step] = array
        del array
        assert {key: array.tolist() for key, array in held.items()} == {
            (number, step): [4 * step + i for i in range(4)] for number, step in held
        }
        queue.close()
        assert pipeline.pool.held == len(held)
        held.clear()
        assert pipeline.pool.held == 0


def test_a_seek_lets_go_of_the_batches_that_were_to_come(monkeypatch):
    monkeypatch.setattr(spec_module, "SMALL_BYTES", 0)
    with running(length=24, batches=3, depth=1) as pipeline:
        queue = InlineQueue(SlotFeed(pipeline), 1, None)
        for number in range(20):
            for step in range(number % 5):
                assert taken_from(queue, BatchIndex(number, step)).tolist()[0] == 4 * step
            queue.prefetch(BatchIndex(number + 1, 0))
        queue.close()
        assert len(pipeline.pool) == 2


@pytest.mark.parametrize("started", [False, True])
def test_close_is_idempotent_and_what_follows_says_so(started):
    with running() as pipeline:
        if started:
            taken(pipeline, BatchIndex(0, 0))
        pipeline.close()
        pipeline.close()
        with pytest.raises(ClosedError):
            pipeline.get(BatchIndex(0, 1))


def test_close_wakes_a_consumer_that_waits(monkeypatch):
    monkeypatch.setattr(supervisor, "THREADS_S", 0.0)
    gate = Gate()
    errors = []

    def consume(pipeline):
        with pytest.raises(ClosedError) as caught:
            pipeline.get(BatchIndex(0, 0))
        errors.append(caught.value)

    with running(gate) as pipeline:
        consumer = threading.Thread(target=consume, args=(pipeline,))
        consumer.start()
        gate.wait_for(1)
        pipeline.close()
        consumer.join(30)
        assert len(errors) == 1
        gate.open(0)
        pipeline.workers[0].join(30)


def test_close_does_not_wait_for_a_read_that_hangs(monkeypatch):
    monkeypatch.setattr(supervisor, "THREADS_S", 0.0)
    gate = Gate()
    with running(gate) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(1)
        pipeline.close()  # returns, although the worker is inside the read
        assert pipeline.workers[0].alive
        gate.open(0)
        pipeline.workers[0].join(30)
        assert not pipeline.workers[0].alive


def test_nothing_starts_and_nothing_is_allocated_before_the_first_request():
    before = threading.active_count()
    with running() as pipeline:
        assert threading.active_count() == before
        assert len(pipeline.pool) == 0


def test_a_fork_is_told_that_it_cannot_use_it():
    with running() as pipeline:
        taken(pipeline, BatchIndex(0, 0))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pipeline.check()
            except WorkerError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                pipeline.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_interpreter_that_forgets_to_close_ends_at_once():
    program = """
import itertools
import numpy as np
from lit_async_data import AsyncLoader, prefetched
from lit_async_data.testing import ArraySource
loader = AsyncLoader(ArraySource({"x": np.zeros((1000, 1000))}), dict(batch_size=4, workers=2))
theirs = prefetched(itertools.count(), device="cpu")
batches = next(loader), next(theirs)
raise KeyError("mine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 3, done.stderr  # those of the traceback


# Mutants: the tests above can fail.


def test_without_generations_a_stale_batch_stays_for_ever(monkeypatch):
    """The mutant of `test_a_batch_of_an_older_generation_is_thrown_away`: forgetting does not count generations."""

    def seek(self, key):
        self._cursor = key
        for filled in self._claimed.values():
            if filled is not None and filled.good:
                self.pool.drop(filled.slot)
        self._claimed.clear()

    monkeypatch.setattr(ThreadPipeline, "_seek", seek)
    gate = Gate()
    with running(gate, depth=2) as pipeline:
        pipeline.prefetch(BatchIndex(0, 1))
        gate.wait_for(1)
        pipeline.prefetch(BatchIndex(7, 0))
        gate.open(4)
        gate.wait_for(1)
        assert pipeline.ready == 1
        gate.open(0, 8)


def test_an_ndarray_as_lease_loses_its_slot_while_a_slice_lives(monkeypatch):
    """The mutant of the leases: with a view instead of an exporter, numpy collapses `.base` past it."""

    class View(np.ndarray):
        pass

    def lend(pool, slot):
        pool.move(slot, "lend")
        lease = pool.memory(slot).view(View)
        pool._leases[slot] = weakref.ref(lease)
        weakref.finalize(lease, pool.vacant.put, slot).atexit = False
        return lease.view(np.ndarray)

    monkeypatch.setattr(SlotPool, "lend", lend)
    with running() as pipeline:
        array = kept(pipeline, BatchIndex(0, 0))[1:2]
        gc.collect()
        assert pipeline.pool.held == 0
        assert len(array) == 1


class Scripted:
    """A tuner that says these numbers, one for each wait."""

    settled = False

    def __init__(self, *counts):
        self.count, self.counts = 1, list(counts)

    def waited(self, seconds, batches):
        assert seconds >= 0
        self.count = self.counts.pop(0) if self.counts else self.count
        return self.count


def test_workers_that_come_and_go_change_neither_order_nor_batches():
    with running(depth=1) as pipeline:
        pipeline._tuner = Scripted(2, 3, 4, 3)
        assert [epoch(pipeline, number) for number in range(200)] == [WHOLE] * 200
        pipeline.set_workers(3)
        assert len(pipeline.pool) == 5  # one for each worker, and one that is handed out
        assert [epoch(pipeline, number) for number in range(200, 205)] == [WHOLE] * 5


def test_a_worker_that_was_added_reads_beside_the_first():
    gate = Gate()
    with running(gate, depth=1) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(1)
        pipeline.set_workers(2)
        gate.wait_for(1)  # both are inside a read
        gate.open(0, 4, 8)
        assert epoch(pipeline, 0) == WHOLE


def test_a_worker_that_is_taken_back_finishes_its_batch_and_is_not_missed():
    gate = Gate()
    with running(gate, workers=2, depth=1) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(2)
        workers = list(pipeline.workers)
        pipeline.set_workers(1)
        gate.open(0, 4, 8)
        assert [epoch(pipeline, 0), epoch(pipeline, 1), epoch(pipeline, 2)] == [WHOLE] * 3
        assert pipeline.workers == workers[:1]
        pipeline.check()
    assert not any(worker.alive for worker in workers)


def test_no_slot_is_added_over_the_budget():
    with running(depth=1, most_slots=3) as pipeline:
        pipeline._tuner = Scripted(2, 3, 4, 5)
        assert [epoch(pipeline, number) for number in range(100)] == [WHOLE] * 100
        assert len(pipeline.pool) <= 3
