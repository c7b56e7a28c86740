"""`ThreadPipeline`: slots that threads of this process fill; chunks that are read ahead.

It decodes the chunks that fall due, and fetches the data of later batches from storage if they are not in memory.

A worker takes a free slot, claims the next batches under the lock, and reads them without it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine.pipeline.pipeline import Activity, FilledSlot, Pipeline, Read, ReadTask, place_of
from lit_async_data.engine.pipeline.sample_reader import AroundBadSamples
from lit_async_data.engine.resources.memory import Room
from lit_async_data.engine.resources.plan import WorkerTuner
from lit_async_data.engine.supervisor import COALESCING, PREPARING, Bell, ThreadWorker, Unexpected, all_ended, awaited
from lit_async_data.errors import StalledError, WorkerError
from lit_async_data.order.due import Shares, due
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import ALL, BatchIndex, Schedule, Share
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.stage_clock import CLOCK

# Reads after which a worker checks again whether anything must be fetched, if nothing was the last time.
LOOKS = 8


class Ahead:
    """Fetches and decodes for later batches. Called by several workers at once.

    Args:
        source: Where samples come from.
        batches: Batches between the one that is read and the last one that is fetched.
        shares: How several readers share each batch.
    """

    def __init__(self, source: Source, batches: int, shares: Shares) -> None:
        self._source = source
        self._batches = batches
        self._shares = shares
        # Whether the source reads whole files ahead.
        self._holds = source.memory().files > 0
        self._walked: BatchIndex | None = None  # the first batch whose chunks have not fallen due yet
        self._idle = 0
        self._fetching = False

    def __call__(self, schedule: Schedule, keys: Sequence[BatchIndex], unread: BatchIndex, share: Share = ALL) -> None:
        """Decode and fetch for the batches after these, as far as their samples are in a share."""
        # Without a lock: chunks that two workers take at once are decoded once all the same.
        begin, self._walked = min(self._walked or keys[0], unread), unread
        for chunk_group, samples in due(schedule, begin, unread, self._shares, share):
            self._source.decode(samples, chunk_group)
        self._fetch(schedule, keys, share)

    def _fetch(self, schedule: Schedule, keys: Sequence[BatchIndex], share: Share) -> None:
        if self._idle > 0:
            self._idle -= 1  # without a lock: two workers may count as one, and then look one read later
            return
        coming = [schedule.following(keys[-1])]
        while len(coming) < self._batches:
            coming.append(schedule.following(coming[-1]))
        # While everything seems to be in memory, only the last ones are asked for. A source that holds files is asked
        # for the nearest first: its threads begin them in this order.
        asked = 0 if self._holds and not self._fetching else max(len(coming) - len(keys), 0)
        found = self._source.fetch(self._samples(schedule, coming[asked:], share))
        if found and not self._fetching and asked:
            self._source.fetch(self._samples(schedule, coming[:asked], share))
        self._fetching = found
        if not found:
            self._idle = LOOKS

    def _samples(self, schedule: Schedule, keys: Sequence[BatchIndex], share: Share) -> Indices:
        found = []
        for epoch, step in keys:
            plan = schedule.plan(epoch)
            samples = plan.batch(step)
            found.append(samples[self._shares.own(plan, plan.bounds(step)[0], samples, share)])
        return np.concatenate(found)


log = logging.getLogger(__name__)

# Called by a worker after a read, with the order, the batches just read, and the first that has not been read.
AfterRead = Callable[[Schedule, Sequence[BatchIndex], BatchIndex], None]


class Reading(NamedTuple):
    """How the threads of a pipeline read."""

    read: Read
    ahead: AfterRead | None = None  # called by a worker after each read, to fetch or decode for later batches
    source: Source | None = None  # says by what numbers errors name samples, and where these are stored
    around: AroundBadSamples | None = None


class ThreadPipeline(Pipeline):
    """Batches that reader threads read ahead, in order. One consumer at a time; it may be another thread each time.

    Args:
        reading: How samples are read.
        schedule: The endless order of batches.
        room: The slots.
        allocate: Returns memory for one slot.
        workers: Reader threads; 0 reads in the consumer's thread when it asks.
        timeout_s: Seconds to wait for a batch.
        tuner: As for `Pipeline`.
    """

    _not_forked = "its threads do not exist there; build it in the child"

    def __init__(
        self,
        reading: Reading,
        schedule: Schedule,
        room: Room,
        allocate: Callable[[], Bytes],
        *,
        workers: int,
        timeout_s: float,
        tuner: WorkerTuner | None = None,
    ) -> None:
        super().__init__(schedule, room, timeout_s=timeout_s, tuner=tuner)
        self._read, self._ahead, self._source, self._around = reading
        self._ids: Callable[[Indices], Indices] = np.asarray if self._source is None else self._source.ids
        self._allocate = allocate
        self.workers = [ThreadWorker(number, self._work) for number in range(workers)]
        self.worker_count = workers
        self._retired: list[ThreadWorker] = []  # they end with the task that they are at
        self._started = False
        self._preparation_errors, self._coalescing_errors = Unexpected(log, PREPARING), Unexpected(log, COALESCING)
        self.arrived = Bell()  # wakes the consumer when a slot has been filled, and when the pipeline is closed

    def prefetch(self, key: BatchIndex) -> None:
        with self._lock:
            if self._closed:
                self.check()
            if next(iter(self._claimed), self._cursor) != key:
                self._seek(key)
        if not self._started:
            self._start()

    def close(self) -> None:
        if self.forked:  # the workers are in another process, and so may be the thread that held the lock at the fork
            return
        with self._lock:
            self._closed = True
            self._claimed.clear()  # in whatever states the slots are: nobody uses them any more
            self.ready = 0
        self.arrived.ring()
        workers = self.workers + self._retired
        self.pool.wake(len(workers))
        all_ended(workers)
        self.pool.clear()

    def check(self) -> None:
        if self._closed or self._guard.pid != os.getpid():  # without calls: this is asked for each batch
            super().check()
        for worker in self.workers if self._started else ():
            if worker.work is None:
                worker.check()

    # -- slots and claims ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._add_slots(min(self._slots, self._most_slots))
        self._started = True
        for worker in self.workers:
            worker.start()

    def set_workers(self, count: int) -> None:
        with self._lock:
            while len(self.workers) > count:
                self._retired.append(self.workers.pop())
            while len(self.workers) < count:
                self.workers.append(ThreadWorker(len(self.workers), self._work))
                try:
                    self.workers[-1].start()
                except WorkerError:
                    self.workers.pop()
                    raise

    def _task(self, slot: int, worker: int | None) -> ReadTask:
        return ReadTask(slot, self._claim(), self.schedule, self._generation, worker, self._ids, self._around)

    def _add_slots(self, count: int) -> None:
        for _ in range(count):
            self.pool.add(self._allocate())

    # -- reading ---------------------------------------------------------------------------------------------------

    def _work(self, worker: ThreadWorker) -> bool:
        """Fill one slot; False when the pipeline is closed."""
        began, starved = time.perf_counter(), self._starved
        slot = self.pool.take()
        if slot is None:
            return False
        idle_s = CLOCK.waited(began)
        if worker in self._retired:
            self.pool.move(slot, "abandon")
            return False
        with self._lock:
            if self._closed:
                return False
            self.work = self.work.waited(idle_s, starved=self._starved != starved)
            task = self._task(slot, worker.number)
        worker.begin(task)
        self._fill(task)
        if self._ahead is not None:
            with self._lock:
                unread = next((key for key, filled in self._claimed.items() if filled is None), self._cursor)
            assert unread is not None
            with self._preparation_errors:  # an error of the source recurs, and is raised, when the batch is read
                self._ahead(task.schedule, task.keys, unread)
        worker.rest()
        return True

    def _wait(self, key: BatchIndex, seconds: float) -> None:  # noqa: ARG002
        if not self.workers:
            self._fill_here()
            return
        with self._lock:
            self._grow()
        self.arrived.wait(seconds)
        self.check()

    def _fill_here(self) -> None:
        slot = self._vacant_slot()
        with self._lock:
            task = self._task(slot, None)
        CLOCK.start()  # the thread is the consumer's
        self._fill(task)

    def _vacant_slot(self) -> int:
        """A slot for the consumer's own thread, which must not wait for one that the user keeps."""

        def vacant(seconds: float) -> int | None:
            if seconds:
                with self._lock:
                    self.check()
                    self._grow()
            # 1. Another thread drops a batch: its lease is dead, so the slot is not held, and the pool need not grow.
            # 2. This thread asks for a slot. 3. The lease's callback makes the slot vacant. So a short wait may be
            # needed; the last slot is never lent: see `must_copy`, and
            # test_a_batch_that_another_thread_is_dropping_is_waited_for.
            return self.pool.take(timeout=seconds)

        return awaited(vacant, limit_s=self.timeout_s, late=self._no_slot)

    def _no_slot(self) -> NoReturn:
        raise StalledError(
            f"no slot became free in {self.timeout_s:g} s: {self.pool.held} of {len(self.pool)} hold batches that are "
            "in use; timeout_s sets how long to wait",
            stage="read",
        )

    def _fill(self, task: ReadTask) -> None:
        # No name holds the result: the traceback of an error in it refers to this frame, and the cycle would keep
        # the objects of whoever catches that error.
        self._deliver(task, task.run(self._read, self.layout, self.pool.memories[task.slot]))

    def _deliver(self, task: ReadTask, filled: FilledSlot) -> bool:
        if not super()._deliver(task, filled):
            return False
        self.arrived.ring()
        if filled.unexplained and filled.good == len(filled.batches):
            self._coalescing_errors.log(filled.unexplained)
        return True

    def _readings(self) -> list[Activity]:
        return [reading_of(worker, self._source) for worker in self.workers]


def reading_of(worker: ThreadWorker, source: Source | None) -> Activity:
    words, (task, since) = str(worker), worker.task or (None, math.inf)
    if not isinstance(task, ReadTask):
        return Activity(words)
    where: dict[str, Any] = {"worker": worker.number}
    if source is not None and task.samples is not None:
        place, attributes = place_of(source, task.samples)
        words, where = f"{words}, the first sample is {place}", where | attributes
    return Activity(words, task.keys[0], since, where)
