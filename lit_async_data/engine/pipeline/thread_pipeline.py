"""`ThreadPipeline`: slots that threads of this process fill.

A worker takes a free slot, claims the next batches under the lock, and reads them without it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine.pipeline.pipeline import Activity, Pipeline, ReadTask
from lit_async_data.engine.pipeline.sample_reader import ReaderSetup
from lit_async_data.engine.supervisor import FREED_S, Bell, ThreadWorker, all_ended
from lit_async_data.errors import WorkerError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.stage_clock import CLOCK


class ThreadPipeline(Pipeline):
    """Without workers, the consumer's thread reads each batch when it asks for it."""

    _not_forked = "its threads do not exist there; build it in the child"

    def __init__(self, setup: ReaderSetup, allocate: Callable[[], Bytes], *, timeout_s: float) -> None:
        super().__init__(setup, timeout_s=timeout_s)
        self._allocate = allocate
        self.workers = [ThreadWorker(number, self._work) for number in range(self.worker_count)]
        self._retired: list[ThreadWorker] = []  # workers that end after their task
        self._started = False
        self.arrived = Bell()  # wakes the consumer when a slot has been filled, and when the pipeline is closed

    def prefetch(self, key: BatchIndex) -> None:
        with self._lock:
            if self._closed:
                self.check()
            if next(iter(self._claimed), self._cursor) != key:
                self._seek(key)
        if not self._started:
            self._add_slots(min(self._slots, self._most_slots))
            self._started = True
            for worker in self.workers:
                worker.start()

    def _end_workers(self) -> None:
        self.arrived.ring()
        workers = self.workers + self._retired
        self.pool.wake(len(workers))
        all_ended(workers)

    def check(self) -> None:
        if self._closed or self._guard.pid != os.getpid():  # without calls: this is asked for each batch
            super().check()
        for worker in self.workers if self._started else ():
            if worker.work is None:
                super().check()  # it may have been closed meanwhile
                worker.check()

    # -- slots and claims ------------------------------------------------------------------------------------------

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
        if self._fill(task):
            self.arrived.ring()
        if (ahead := self.setup.ahead) is not None:
            with self._lock:
                unread = next((key for key, filled in self._claimed.items() if filled is None), self._cursor)
            assert unread is not None
            ahead(task.schedule, task.keys, unread)
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
        slot = self.pool.take(timeout=0)
        while slot is None:
            with self._lock:
                self._grow()
            # 1. Another thread drops a batch: its lease is dead, so the pool need not grow. 2. This thread asks for a
            # slot. 3. The lease's callback makes the slot vacant. (The last slot is never lent: see `must_copy`.)
            slot = self.pool.take(timeout=FREED_S)
        with self._lock:
            task = self._task(slot, None)
        CLOCK.start()  # the thread is the consumer's
        self._fill(task)

    def _readings(self) -> list[Activity]:
        return [reading_of(worker) for worker in self.workers]


def reading_of(worker: ThreadWorker) -> Activity:
    words, (task, since) = str(worker), worker.task or (None, math.inf)
    if not isinstance(task, ReadTask):
        return Activity(words)
    return Activity(words, task.keys[0], since, {**task.told()[1], "worker": worker.number})
