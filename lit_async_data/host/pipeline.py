"""The `Pipeline`: owner of ring and workers; keeps the next batches of an endless order ready.

The order is a sequence of keys (epoch, step); after the last step of an epoch comes ``(epoch + 1, 0)``, so its end
drains nothing. Workers take a free slot, claim the next keys, and fill. The consumer asks for a key: if it is the head
of what is being read, nothing is dropped, else everything is and reading begins there.

The failure contract:

1. An epoch that ends leaves the workers alive for the next.
2. A consumer that stops early loses nothing and leaks nothing.
3. A read that fails is raised at its place in the order, once, with its samples; the next request gets the next batch.
4. A dead worker is an error that names it, within a second.
5. `close` is idempotent, wakes every waiter and returns in bounded time.
6. Garbage collection and the interpreter's exit do the same as `close`.
7. A fork shares nothing: used in a forked child, the pipeline says so.
8. An interrupt (Ctrl-C) can arrive between any two steps of a request. Then nothing but `close` may be called any more;
   that works whatever state the request has left, also if it was interrupted itself. The order is pure, so whoever goes
   on does so with a new pipeline.

No wait is without a time-out and a look at whether the other side is alive. Nothing starts before the first request.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from lit_async_data.batch.spec import BatchLayout, Bytes
from lit_async_data.errors import ClosedError, StalledError, WorkerError
from lit_async_data.host.job import FilledSlot, Read, ReadTask
from lit_async_data.host.slots import SlotPool
from lit_async_data.host.stats import ReadStats
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule
from lit_async_data.threads import Bell, ProcessGuard, ThreadWorker, leave_at_exit
from lit_async_data.unexpected import Unexpected

log = logging.getLogger(__name__)

# Seconds between two looks at whether the workers live.
POLL_S = 0.5
# Seconds that `close` waits for a worker that is in the middle of a read.
CLOSE_S = 5.0


class Pipeline:
    """Batches read ahead, in order. One consumer at a time; it may be another thread each time.

    Args:
        read: Reads samples of an epoch into arrays, from any thread (`Source.read_into`).
        prepare: Called by a worker with the batches that it has read, to make ready what will be wanted later.
        schedule: The endless order of batches.
        layout: Where fields lie in a slot, and how many batches it is for.
        allocate: Memory for one slot.
        workers: Reader threads; 0 reads in the caller's thread when it asks.
        slots: Slots to begin with: those being filled or ready, and one for what is handed out.
        most_slots: Slots that the memory budget allows.
        timeout_s: Seconds to wait for a batch.
        ids: The numbers that errors call samples by.
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
        prepare: Callable[[Sequence[BatchIndex], BatchIndex | None, BatchIndex | None], None] | None = None,
        ids: Callable[[Indices], Indices] = np.asarray,
    ) -> None:
        self.layout = layout
        self.ring = SlotPool([])
        self._read = read
        self._prepare, self._ids = prepare, ids
        self.schedule = schedule
        self._allocate = allocate
        self._workers = [ThreadWorker(number, self._work) for number in range(workers)]
        self._slots = slots
        self._most_slots = most_slots
        self._timeout_s = timeout_s
        self._process = ProcessGuard()
        self._started = False
        self._unprepared = Unexpected(log, "preparing batches that come later failed; they are read all the same")
        self._unread = Unexpected(log, "reading several batches together failed, and each of them alone did not")
        # Wakes the consumer. Not a Condition: an interrupt inside one of its methods can leave the lock locked.
        self._arrived = Bell()
        # Everything below is guarded by this.
        self._lock = threading.RLock()
        self._cursor: BatchIndex | None = None  # the key to be claimed next; None before the first request
        # By the first key of each slot, in order; None while it is being filled.
        self._claimed: dict[BatchIndex, FilledSlot | None] = {}
        self._generation = 0  # of what is wanted; what belongs to an older one is thrown away
        self._coalesced = 1  # batches to be claimed at once
        self._closed = False
        self._stats = ReadStats()

    def prefetch(self, key: BatchIndex) -> None:
        """See to it that the batches from ``key`` on are being read. Never blocks on storage.

        Raises:
            ClosedError: The pipeline is closed.
            WorkerError: It belongs to another process, or a worker died.
        """
        self.check()
        with self._lock:
            head = next(iter(self._claimed), self._cursor)
            if head != key:
                self._forget()
                self._cursor = key
        if not self._started:
            self._start()

    def poll(self, key: BatchIndex) -> FilledSlot | None:
        """What is ready from a key on, else None; it is then the caller's, slot and all."""
        with self._lock:
            if self._claimed.get(key) is None:
                return None
            return self._claimed.pop(key)

    def get(self, key: BatchIndex) -> FilledSlot:
        """What begins with the batch of a key, waiting for it; as `poll`.

        Raises:
            StalledError: It did not come in time; says what every worker is at.
            ClosedError, WorkerError: As `prefetch`.
        """
        self.prefetch(key)
        if not self._workers and self._claimed.get(key) is None:
            self._fill_here()
        deadline = time.monotonic() + self._timeout_s
        while (filled := self.poll(key)) is None:
            with self._lock:
                self.check()
                if time.monotonic() > deadline:
                    raise self._stalled(key)
                self._grow()
            self._arrived.wait(POLL_S)
        return filled

    def must_copy(self) -> bool:
        """Whether a slot must be handed out as a copy: the user keeps all others, and the budget is spent."""
        return len(self.ring) >= self._most_slots and self.ring.held >= len(self.ring) - 1

    @property
    def ready(self) -> int:
        """Batches that wait on the host."""
        return sum(filled.good for filled in list(self._claimed.values()) if filled is not None)

    def stats(self) -> ReadStats:
        """What has been read so far."""
        with self._lock:
            return dataclasses.replace(
                self._stats, ready=self.ready, slots=len(self.ring), slot_bytes=self.layout.nbytes
            )

    def close(self) -> None:
        """End the workers and give back the slots; waits a few seconds at most.

        From any thread, and as often as one likes: where it was interrupted, it is to be called again.
        """
        if self.forked:  # the workers are in another process, and so may be whoever held the lock at the fork
            return
        with self._lock:
            self._closed = True
            self._claimed.clear()  # whatever states the slots are in: nobody uses them any more
        self._arrived.ring()
        self.ring.wake(len(self._workers))
        deadline = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0))
        self.ring.clear()

    def _forget(self) -> None:
        self._generation += 1
        self._coalesced = 1
        for filled in self._claimed.values():
            if filled is not None and filled.good:
                self.ring.drop(filled.slot)
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
        return ReadTask(slot, keys, self._generation, worker, self._ids)

    def _grow(self) -> None:
        """More slots, if the user keeps all there are: as many again, within the budget."""
        if self.ring.held == len(self.ring):
            for _ in range(min(len(self.ring), self._most_slots - len(self.ring))):
                self.ring.add(self._allocate())

    def _start(self) -> None:
        for memory in [self._allocate() for _ in range(min(self._slots, self._most_slots))]:
            self.ring.add(memory)
        self._started = True
        for worker in self._workers:
            worker.start()

    def _work(self, worker: ThreadWorker) -> bool:
        """Fill one slot; False when the pipeline is closed."""
        slot = self.ring.take()
        if slot is None:
            return False
        with self._lock:
            if self._closed:
                return False
            job = self._claim(slot, worker.number)
        worker.begin(job)
        self._fill(job)
        if self._prepare is not None:
            # An error of the source recurs, and is raised, when the batch is read.
            started = time.perf_counter()
            with self._lock:
                being_read = next((key for key, filled in self._claimed.items() if filled is None), None)
            with self._unprepared:
                self._prepare(job.keys, self._cursor, being_read)
            with self._lock:
                self._stats = self._stats.plus(0, 0, time.perf_counter() - started)
        worker.rest()
        return True

    def _fill_here(self) -> None:
        slot = self._vacant_slot()
        with self._lock:
            job = self._claim(slot, None)
        self._fill(job)

    def _vacant_slot(self) -> int:
        """A slot for the caller's own thread, which must not wait for one that the user keeps."""
        deadline = time.monotonic() + self._timeout_s
        slot = self.ring.take(timeout=0)
        while slot is None:
            with self._lock:
                self.check()
                self._grow()
            # 1. Another thread drops a batch: its lease is dead, so it is not held, and the ring need not grow. 2. We
            # ask for a slot. 3. The callback of the lease makes its slot vacant. So a moment's wait may be needed; the
            # last slot is never lent: see `must_copy`, and test_a_batch_that_another_thread_is_dropping_is_waited_for.
            slot = self.ring.take(timeout=POLL_S)
            if slot is None and time.monotonic() > deadline:
                raise StalledError(
                    f"no slot became free in {self._timeout_s:g} s, of {len(self.ring)}, of which {self.ring.held} "
                    "hold batches that are in use; timeout_s sets how long to wait",
                    stage="read",
                )
        return slot

    def _fill(self, job: ReadTask) -> None:
        started = time.perf_counter()
        # Not named here: the traceback of an error among them refers to this frame, and a cycle would keep whoever
        # catches that error.
        self._deliver(job, job.done(self._read, self.schedule, self.layout, self.ring.memory(job.slot)), started)

    def _deliver(self, job: ReadTask, filled: FilledSlot, started: float) -> None:
        seconds = time.perf_counter() - started
        with self._lock:
            if self._closed:
                return
            # 1. A worker claims (0, 3) and begins to read. 2. The consumer wants (1, 0): everything claimed is
            # forgotten. 3. The worker is done. Were its batch filed now, (0, 3) would lie in the new order for
            # ever, and its slot with it. See test_a_batch_of_an_older_generation_is_thrown_away.
            wanted = job.generation == self._generation
            if not wanted or not filled.good:
                self.ring.abandon(job.slot)
            if not wanted:
                return
            if filled.good:
                self.ring.filled(job.slot)
                self._stats = self._stats.plus(filled.good, filled.samples * self.layout.spec.nbytes, seconds)
            self._claimed[job.keys[0]] = filled
        self._arrived.ring()
        if filled.unexplained and filled.good == len(filled.batches):
            self._unread.log(filled.unexplained)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that built the pipeline."""
        return self._process.forked

    def check(self) -> None:
        """Raise what stands in the way of the next batch: `ClosedError` or `WorkerError`."""
        if self._process.forked:
            raise self._process.error("this loader was built", "its threads do not exist there; build it in the child")
        if self._closed:
            leave_at_exit()
            raise ClosedError("the loader is closed; build a new one")
        for worker in self._workers if self._started else ():
            if not worker.alive:
                raise WorkerError(
                    f"{worker}: its thread has ended{worker.reason}; close the loader", worker=worker.number
                ) from worker.error

    def _stalled(self, key: BatchIndex) -> StalledError:
        return StalledError(
            f"batch {key.step} of epoch {key.epoch} did not come in {self._timeout_s:g} s: "
            f"{'; '.join(map(str, self._workers))}; is the disk slow or gone? timeout_s sets how long to wait",
            stage="read",
        )
