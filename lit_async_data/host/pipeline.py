"""The `Pipeline`: reads the batches of an endless order ahead, with its own workers, into its own slots.

The order is a sequence of indexes (epoch, step); after the last step of an epoch comes ``(epoch + 1, 0)``, so the end
of an epoch drains nothing. A worker takes a free slot, claims the next batches under the lock, and reads them without
it. If the consumer asks for the first batch that is claimed, the pipeline drops nothing; otherwise it drops everything
and reads on from the batch that was asked for.

The failure contract:

1. The end of an epoch leaves the workers alive for the next.
2. A consumer that stops early loses nothing and leaks nothing.
3. A failed read is raised at its place in the order, once, with its samples; the next request gets the next batch.
4. A dead worker is an error that names it, within a second.
5. `close` is idempotent, wakes every waiter and returns in bounded time.
6. Garbage collection and the interpreter's exit do the same as `close`.
7. A fork shares nothing: in a forked child, the pipeline raises a `WorkerError`.
8. An interrupt (Ctrl-C) can come between any two steps of a request. After it only `close` may be called, which works
   in any state, also if it was interrupted itself. The order is pure, so the loader goes on with a new pipeline.

Every wait has a time-out, and then checks whether the other side is alive. Nothing starts before the first request.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lit_async_data.batch.spec import BatchLayout, Bytes
from lit_async_data.errors import ClosedError, MemoryBudgetError, StalledError, WorkerError
from lit_async_data.host.read_task import FilledSlot, Read, ReadTask
from lit_async_data.host.slots import SlotPool
from lit_async_data.host.stats import ReadStats
from lit_async_data.host.unexpected import Unexpected
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Limits, Schedule
from lit_async_data.threads import Bell, ProcessGuard, ThreadWorker, leave_at_exit

log = logging.getLogger(__name__)

# Seconds between two checks whether the workers are alive.
POLL_S = 0.5
# Seconds that `close` waits for a worker in the middle of a read.
CLOSE_S = 5.0

# Called by a worker after a read: the batches just read, the next to be claimed, the oldest being read, and the limits.
AfterRead = Callable[[Sequence[BatchIndex], BatchIndex | None, BatchIndex | None, Limits], None]


class Pipeline:
    """Batches read ahead, in order. One consumer at a time; it may be another thread each time.

    Args:
        read: Reads samples of an epoch into arrays.
        schedule: The endless order of batches.
        layout: Where fields lie in a slot, and how many batches a slot holds.
        allocate: Returns memory for one slot.
        workers: Reader threads; 0 reads in the consumer's thread when it asks.
        slots: Slots to begin with: those being filled or ready, and one for the batch that is handed out.
        most_slots: Slots that the memory budget allows.
        timeout_s: Seconds to wait for a batch.
        after_read: Called by a worker after each read, to fetch or decode what comes later.
        ids: The numbers by which errors name samples.
        on_filled: Called by a worker that has filled a slot.

    Attributes:
        arrived: Wakes the consumer when a slot has been filled, and when the pipeline is closed.
        workers: The reader threads.
    """

    def __init__(
        self,
        read: Read,
        schedule: Schedule,
        layout: BatchLayout,
        allocate: Callable[[], Bytes],
        *,
        workers: int,
        slots: int,
        most_slots: int,
        timeout_s: float,
        after_read: AfterRead | None = None,
        ids: Callable[[Indices], Indices] = np.asarray,
        on_filled: Callable[[], None] | None = None,
    ) -> None:
        self.layout = layout
        self.pool = SlotPool([])
        self.schedule = schedule
        self._read, self._after_read, self._ids, self._on_filled = read, after_read, ids, on_filled
        self._allocate = allocate
        self.workers = [ThreadWorker(number, self._work) for number in range(workers)]
        self._slots, self._most_slots = slots, most_slots
        self._timeout_s = timeout_s
        self._process = ProcessGuard()
        self._started = False
        self._preparation_errors = Unexpected(
            log, "preparing batches that come later failed; they are read all the same"
        )
        self._coalescing_errors = Unexpected(
            log, "reading several batches together failed, and each of them alone did not"
        )
        # Not a Condition: an interrupt inside one of its methods can leave the lock locked.
        self.arrived = Bell()
        # Guards everything below, and `schedule`.
        self._lock = threading.RLock()
        self._cursor: BatchIndex | None = None  # the next batch to be claimed; None before the first request
        # By the first index in each slot, in order; None while the slot is being filled.
        self._claimed: dict[BatchIndex, FilledSlot | None] = {}
        self._generation = 0  # counts the drops; results of an older generation are thrown away
        self._coalesced = 1  # batches to be claimed at once
        self._closed = False
        self._stats = ReadStats()

    def follow(self, schedule: Schedule) -> None:
        """Claim batches in this order from now on. Tasks that are claimed keep theirs."""
        with self._lock:
            self.schedule = schedule

    def prefetch(self, key: BatchIndex) -> None:
        """Have the batches from ``key`` on read. Never blocks on storage.

        Raises:
            ClosedError: The pipeline is closed.
            WorkerError: It belongs to another process, or a worker died.
        """
        self.check()
        with self._lock:
            if self.head != key:
                self._forget()
                self._cursor = key
        if not self._started:
            self._start()

    @property
    def head(self) -> BatchIndex | None:
        """The next batch to be handed out, unless another is asked for; None before the first request."""
        return next(iter(self._claimed), self._cursor)

    def poll(self, key: BatchIndex) -> FilledSlot | None:
        """The slot that begins with a batch if it has been filled, else None; it then belongs to the caller."""
        with self._lock:
            if self._claimed.get(key) is None:
                return None
            return self._claimed.pop(key)

    def get(self, key: BatchIndex) -> FilledSlot:
        """The slot that begins with a batch, waiting for it; it then belongs to the caller.

        Raises:
            StalledError: It did not come in time; names the task of every worker.
            ClosedError, WorkerError: See `prefetch`.
        """
        self.prefetch(key)
        if not self.workers and self._claimed.get(key) is None:
            self._fill_here()
        deadline = time.monotonic() + self._timeout_s
        while (filled := self.poll(key)) is None:
            with self._lock:
                self.check()
                if time.monotonic() > deadline:
                    raise self._stalled(key)
                self._grow()
            self.arrived.wait(POLL_S)
        return filled

    def must_copy(self) -> bool:
        """Whether a slot must be handed out as a copy: the user keeps all others, and the budget is spent."""
        return len(self.pool) >= self._most_slots and self.pool.held >= len(self.pool) - 1

    @property
    def ready(self) -> int:
        """Batches that wait on the host."""
        return sum(filled.good for filled in list(self._claimed.values()) if filled is not None)

    def stats(self) -> ReadStats:
        """What has been read so far."""
        with self._lock:
            return dataclasses.replace(
                self._stats, ready=self.ready, slots=len(self.pool), slot_bytes=self.layout.nbytes
            )

    def close(self) -> None:
        """End the workers and free the slots; waits a few seconds at most.

        From any thread, any number of times. If it was interrupted, call it again.
        """
        if self.forked:  # the workers are in another process, and so may be the thread that held the lock at the fork
            return
        with self._lock:
            self._closed = True
            self._claimed.clear()  # in whatever states the slots are: nobody uses them any more
        self.arrived.ring()
        self.pool.wake(len(self.workers))
        deadline = time.monotonic() + CLOSE_S
        for worker in self.workers:
            worker.join(max(deadline - time.monotonic(), 0))
        self.pool.clear()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that built the pipeline."""
        return self._process.forked

    def check(self) -> None:
        """Raise the error that prevents the next batch: `ClosedError` or `WorkerError`."""
        if self._process.forked:
            raise self._process.error("this loader was built", "its threads do not exist there; build it in the child")
        if self._closed:
            leave_at_exit()
            raise ClosedError("the loader is closed; build a new one")
        for worker in self.workers if self._started else ():
            if not worker.alive:
                raise WorkerError(
                    f"{worker}: its thread has ended{worker.reason}; close the loader", worker=worker.number
                ) from worker.error

    # -- slots and claims ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for memory in [self._allocate() for _ in range(min(self._slots, self._most_slots))]:
            self.pool.add(memory)
        self._started = True
        for worker in self.workers:
            worker.start()

    def _grow(self) -> None:
        """Add slots if the user keeps all there are: double them, within the budget."""
        if self.pool.held == len(self.pool):
            try:
                for _ in range(min(len(self.pool), self._most_slots - len(self.pool))):
                    self.pool.add(self._allocate())
            except MemoryBudgetError:
                if len(self.pool) == self.pool.held:
                    raise
                self._most_slots = len(self.pool)  # batches are handed out as copies from here on

    def _forget(self) -> None:
        self._generation += 1
        self._coalesced = 1
        for filled in self._claimed.values():
            if filled is not None and filled.good:
                self.pool.drop(filled.slot)
        self._claimed.clear()

    def _claim(self, slot: int, worker: int | None) -> ReadTask:
        """The next batches for a slot; few at first, so that the first one comes soon."""
        assert self._cursor is not None
        keys, most = [self._cursor], min(self._coalesced, self.layout.batches)
        following = self.schedule.following(self._cursor)
        while len(keys) < most and following.epoch == keys[0].epoch:
            keys.append(following)
            following = self.schedule.following(following)
        self._claimed[keys[0]] = None
        self._cursor = following
        self._coalesced = min(2 * self._coalesced, self.layout.batches)
        return ReadTask(slot, keys, self.schedule, self._generation, worker, self._ids)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _work(self, worker: ThreadWorker) -> bool:
        """Fill one slot; False when the pipeline is closed."""
        slot = self.pool.take()
        if slot is None:
            return False
        with self._lock:
            if self._closed:
                return False
            task = self._claim(slot, worker.number)
        worker.begin(task)
        self._fill(task)
        if self._after_read is not None:
            started = time.perf_counter()
            with self._lock:
                being_read = next((key for key, filled in self._claimed.items() if filled is None), None)
                cursor = self._cursor
            with self._preparation_errors:  # an error of the source recurs, and is raised, when the batch is read
                self._after_read(task.keys, cursor, being_read, task.schedule.limits)
            with self._lock:
                self._stats = self._stats.plus(0, 0, time.perf_counter() - started)
        worker.rest()
        return True

    def _fill_here(self) -> None:
        slot = self._vacant_slot()
        with self._lock:
            task = self._claim(slot, None)
        self._fill(task)

    def _vacant_slot(self) -> int:
        """A slot for the consumer's own thread, which must not wait for one that the user keeps."""
        deadline = time.monotonic() + self._timeout_s
        slot = self.pool.take(timeout=0)
        while slot is None:
            with self._lock:
                self.check()
                self._grow()
            # 1. Another thread drops a batch: its lease is dead, so the slot is not held, and the pool need not grow.
            # 2. This thread asks for a slot. 3. The lease's callback makes the slot vacant. So a short wait may be
            # needed; the last slot is never lent: see `must_copy`, and
            # test_a_batch_that_another_thread_is_dropping_is_waited_for.
            slot = self.pool.take(timeout=POLL_S)
            if slot is None and time.monotonic() > deadline:
                raise StalledError(
                    f"no slot became free in {self._timeout_s:g} s: {self.pool.held} of {len(self.pool)} hold batches "
                    "that are in use; timeout_s sets how long to wait",
                    stage="read",
                )
        return slot

    def _fill(self, task: ReadTask) -> None:
        started = time.perf_counter()
        # No name holds the result: the traceback of an error in it refers to this frame, and the cycle would keep
        # the objects of whoever catches that error.
        self._deliver(task, task.run(self._read, self.layout, self.pool.memory(task.slot)), started)

    def _deliver(self, task: ReadTask, filled: FilledSlot, started: float) -> None:
        seconds = time.perf_counter() - started
        with self._lock:
            if self._closed:
                return
            # 1. A worker claims (0, 3) and begins to read. 2. The consumer asks for (1, 0): everything claimed is
            # dropped. 3. The worker is done. If its batch were filed now, (0, 3) would stay in the new order for ever,
            # and its slot with it. See test_a_batch_of_an_older_generation_is_thrown_away.
            wanted = task.generation == self._generation
            if not wanted or not filled.good:
                self.pool.abandon(task.slot)
            if not wanted:
                return
            if filled.good:
                self.pool.filled(task.slot)
                self._stats = self._stats.plus(filled.good, filled.samples * self.layout.spec.nbytes, seconds)
            self._claimed[task.keys[0]] = filled
        self.arrived.ring()
        if self._on_filled is not None:
            self._on_filled()
        if filled.unexplained and filled.good == len(filled.batches):
            self._coalescing_errors.log(filled.unexplained)

    def _stalled(self, key: BatchIndex) -> StalledError:
        return StalledError(
            f"batch {key.step} of epoch {key.epoch} did not come in {self._timeout_s:g} s: "
            f"{'; '.join(map(str, self.workers))}; is the disk slow or gone? timeout_s sets how long to wait",
            stage="read",
        )
