"""`Pipeline`: batches in slots that workers fill ahead, handed out in order; the task of a worker.

No I/O, no torch, no threads. A slot has one owner at a time; `TRANSITIONS` lists how it passes on.

The order is a sequence of indexes (epoch, step); after the last step of an epoch comes ``(epoch + 1, 0)``, so the end
of an epoch drains nothing. If the consumer asks for the first batch that was read ahead, the pipeline drops nothing;
otherwise it drops everything and reads on from the batch that was asked for.

The failure contract:

1. The end of an epoch leaves the workers alive for the next.
2. A consumer that stops early loses nothing and leaks nothing.
3. A failed read is raised at its place in the order, once, with its samples; the next request gets the next batch.
4. A dead thread is an error that names it, within a second. A reader process that ends is named, and another one reads
   its batches, as often as ``restarts`` allows.
5. `close` is idempotent, wakes every waiter and returns in bounded time.
6. Garbage collection and the interpreter's exit do the same as `close`.
7. A fork shares nothing: in a forked child, `check` raises a `WorkerError`; loaders call it before each request.

After an interrupt (Ctrl-C) only `close` may be called, any number of times; the loader goes on with a new pipeline.
Nothing starts before the first request.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from lit_async_data.batch.spec import Array, BatchLayout, Bytes
from lit_async_data.engine.pipeline.sample_reader import AroundBadSamples, ReadAround, ReaderSetup, is_of_a_sample
from lit_async_data.engine.resources import WorkerTuner
from lit_async_data.engine.supervisor import awaited, dump_stacks
from lit_async_data.errors import ClosedError, MemoryBudgetError, StalledError, WorkerError, batch_error, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, KeyedSamples, Schedule
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.stage_clock import CLOCK, Work
from lit_async_data.system import ProcessGuard, leave_at_exit

log = logging.getLogger(__name__)


class SlotState(enum.Enum):
    """The owner of a slot, who alone may touch it."""

    FREE = "nobody; it waits to be filled"
    FILLING = "one worker writes to it"
    READY = "nobody; it holds batches whose turn will come"
    LENT = "the user, as long as any view of it lives"
    COPYING = "the device reads from it"

    __hash__ = object.__hash__  # Enum has one in Python, which each transition would call


FREE, FILLING, READY, LENT, COPYING = SlotState

# (state, event) -> state. Every other pair is a bug: it raises and changes nothing.
TRANSITIONS: dict[tuple[SlotState, str], SlotState] = {
    (FREE, "take"): FILLING,
    (FILLING, "filled"): READY,
    (FILLING, "abandon"): FREE,
    (READY, "lend"): LENT,
    (READY, "copy"): COPYING,
    (READY, "drop"): FREE,
    (LENT, "take"): FILLING,  # nobody sees it any more
    (COPYING, "copied"): FREE,
}


class Lease:
    """Every array of a lent slot refers to it; when it dies, the slot is free. See docs/design/engine.md."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class _Ended(weakref.ref[Lease]):
    """A weak reference to a lease that knows its slot."""

    __slots__ = ("slot",)
    slot: int


# A vacant slot; the lease of one, which has ended; or None, to wake a thread that waits for a slot.
Vacancy = int | _Ended | None


class SlotPool:
    """Slots, each a uint8 array, and their states. Thread-safe."""

    def __init__(self, memories: list[Bytes]) -> None:
        # Reentrant: garbage collection can close a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self.memories: list[Bytes] = []  # by slot
        self._states: list[SlotState] = []
        self._leases: dict[int, _Ended] = {}
        # Slots that nobody can see any more. Its put, reentrant and in C, is the callback of leases: see engine.md.
        self.vacant: queue.SimpleQueue[Vacancy] = queue.SimpleQueue()
        for memory in memories:
            self.add(memory)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, memory: Bytes) -> None:
        with self._lock:
            self.memories.append(memory)
            self._states.append(FREE)
            slot = len(self._states) - 1
        self.vacant.put(slot)

    def count(self, state: SlotState) -> int:
        """A slot that nobody can see any more may count as LENT until it is taken."""
        return self._states.count(state)

    @property
    def held(self) -> int:
        """Slots that the user can still see."""
        with self._lock:
            # By leases: a slot that a worker is just taking is LENT, and no longer vacant.
            return sum(state is LENT and self._leases[slot]() is not None for slot, state in enumerate(self._states))

    def take(self, timeout: float | None = None) -> int | None:
        """Take a slot to fill; None if none came. The slot that was freed last may still be in the processor's cache.

        A ``timeout`` of 0 does not wait, and None waits until a slot comes, or `wake`.
        """
        vacant = list[Vacancy]()
        with contextlib.suppress(queue.Empty):
            vacant.append(self.vacant.get(timeout=timeout))
            while True:
                vacant.append(self.vacant.get_nowait())
        *others, last = vacant or [None]
        for other in others:  # wakes other threads that wait
            self.vacant.put(other)
        if last is None:
            return None
        slot = last if isinstance(last, int) else last.slot
        self.move(slot, "take")
        return slot

    def take_all(self) -> list[int]:
        taken = []
        try:
            while True:
                if (vacant := self.vacant.get_nowait()) is not None:
                    slot = vacant if isinstance(vacant, int) else vacant.slot
                    self.move(slot, "take")
                    taken.append(slot)
        except queue.Empty:
            return taken

    def wake(self, takers: int) -> None:
        """Let this many waiting `take` return None."""
        for _ in range(takers):
            self.vacant.put(None)

    def lend(self, slot: int) -> Bytes:
        """A slot for the user, as uint8. When any thread drops the last array made from it, the slot is vacant."""
        self.move(slot, "lend")
        lease = Lease(self.memories[slot])
        ended = _Ended(lease, self.vacant.put)
        ended.slot = slot
        self._leases[slot] = ended
        return np.asarray(lease)

    def move(self, slot: int, event: str) -> None:
        """Change its state as `TRANSITIONS` says, or raise an error and leave it."""
        with self._lock:
            before = self._states[slot]
            try:
                self._states[slot] = state = TRANSITIONS[before, event]
            except KeyError:
                raise RuntimeError(f"slot {slot} is {before.name} and cannot {event}") from None
        if state is FREE:
            self.vacant.put(slot)


# Reads samples into arrays, from any thread.
Read = Callable[[KeyedSamples, Mapping[str, Array]], None]
# Reads samples into the rows of a slot from one on.
ReadAt = Callable[[int, KeyedSamples], None]


class BatchResult(NamedTuple):
    key: BatchIndex
    first: int  # the first row in the slot's arrays
    rows: int
    error: Exception | None = None  # raised in place of the batch
    around: ReadAround | None = None  # None if the batch has the samples of its plan


class FilledSlot(NamedTuple):
    slot: int  # free again if no batch could be read
    batches: Sequence[BatchResult]  # in order, at least one
    good: int  # number of batches that could be read


@dataclasses.dataclass
class ReadTask:
    """Consecutive batches of one epoch that a worker reads into one slot."""

    slot: int
    keys: Sequence[BatchIndex]
    schedule: Schedule  # the order at the time of the claim
    generation: int  # `Pipeline._generation` at that time
    worker: int | None  # None for the consumer's thread
    source: Source
    around: AroundBadSamples | None = None  # None if bad samples are errors
    row: int = 0  # the first row of the first batch in the slot's arrays
    one_by_one: bool = False  # whether each sample is tried by itself, since some are bad
    reading: Sequence[BatchResult] = ()  # the batches under way: all of them, or one by itself
    samples: Indices | None = None  # the samples under way

    def run(self, read: Read, layout: BatchLayout, memory: Bytes) -> FilledSlot:
        epoch, step = self.keys[0]
        try:
            keyed, edges = self.schedule.plan(epoch).stretch(step, len(self.keys))
        except self._caught as caught:
            # No name holds the results: see `Pipeline._fill`.
            return self._filled([self._failed(BatchResult(key, 0, 0), caught) for key in self.keys])

        def read_at(row: int, keyed: KeyedSamples) -> None:
            read(keyed, layout.views_of(memory, keyed.samples, row))

        self.samples = keyed.samples
        self.reading = batches = [
            BatchResult(key, self.row + begin, end - begin)
            for key, (begin, end) in zip(self.keys, itertools.pairwise(edges), strict=True)
        ]
        if len(batches) > 1 and not self._has_known(keyed.samples):
            try:
                read_at(self.row, keyed)
            except self._caught:  # raised below by its batch, while the others are read
                log.debug("reading several batches together failed", exc_info=True)
            else:
                return FilledSlot(self.slot, batches, len(batches))
        return self._filled([self._alone(read_at, keyed, batch) for batch in batches])

    def _filled(self, batches: list[BatchResult]) -> FilledSlot:
        return FilledSlot(self.slot, batches, sum(batch.error is None for batch in batches))

    @property
    def _caught(self) -> type[BaseException]:
        """In a worker, any exception is an error of the batch; in the consumer's thread, Ctrl-C is not."""
        return Exception if self.worker is None else BaseException

    def _alone(self, read_at: ReadAt, together: KeyedSamples, batch: BatchResult) -> BatchResult:
        first = batch.first - self.row
        keyed, self.reading = together[first : first + batch.rows], (batch,)
        self.samples = keyed.samples
        try:
            if not self._has_known(keyed.samples):
                try:
                    read_at(batch.first, keyed)
                except self._caught as caught:
                    if self.around is None or not is_of_a_sample(caught):
                        raise
                else:
                    return batch
            return self._read_around(read_at, batch)
        except self._caught as caught:
            return self._failed(batch, caught)

    def _has_known(self, samples: Indices) -> bool:
        return self.around is not None and (self.around.knows(samples) or self.one_by_one)

    def _read_around(self, read_at: ReadAt, batch: BatchResult) -> BatchResult:
        assert self.around is not None
        epoch, step = batch.key
        keyed, bad = self.around.choice(self.schedule.plan(epoch), step)
        self.samples = samples = keyed.samples
        read_at(batch.first, keyed)
        return batch._replace(rows=len(samples), around=ReadAround(tuple(samples.tolist()), tuple(bad)))

    def _failed(self, batch: BatchResult, cause: BaseException) -> BatchResult:
        ids = [] if self.samples is None else self.source.ids(self.samples).tolist()
        return batch._replace(error=batch_error(cause, *batch.key, ids, self.worker))

    def told(self) -> tuple[str, dict[str, Any]]:
        return told(self.source, self.keys[0], len(self.keys), self.samples)

    def __str__(self) -> str:
        return self.told()[0]


def told(source: Source, first: BatchIndex, count: int, samples: Indices | None) -> tuple[str, dict[str, Any]]:
    """Batches, and the place of their first sample if it is known, in words and as attributes of an error."""
    steps = f"batch {first.step}" if count == 1 else f"batches {first.step} to {first.step + count - 1}"
    if samples is None:
        return f"{steps} of epoch {first.epoch}", {}
    ids = source.ids(samples).tolist()
    place = source.locate(ids[:1])[0]
    where = f"row {place.row} of {place.file}{'' if place.group == '/' else f':{place.group}'}"
    words = f"{steps} of epoch {first.epoch}, samples {few(ids)} (the first is {where})"
    return words, {"sample_id": ids[0], "file": place.file, "row": place.row}


# The most seconds, about, that reading several batches into a slot takes: the first comes with the last.
COALESCED_S = 0.02


class Activity(NamedTuple):
    words: str
    key: BatchIndex | None = None  # the first batch that the worker reads, or will read
    since: float = math.inf  # the `time.monotonic` at which it began
    where: Mapping[str, Any] = {}  # attributes for an error


class Pipeline(abc.ABC):
    """Batches read ahead, in order. One consumer at a time; it may be another thread each time."""

    # Why a forked child cannot use the pipeline.
    _not_forked: str

    def __init__(self, setup: ReaderSetup, *, timeout_s: float) -> None:
        self.setup, self.schedule, self.timeout_s = setup, setup.schedule, timeout_s
        self.layout, budget = setup.plan.layout, setup.plan.budget
        self._slots, self._most_slots = budget.slots, budget.most_slots
        self.warn_after_s = math.inf  # seconds of waiting before a warning
        self.pool = SlotPool([])
        self._tuner = setup.plan.workers.tuner()
        self._guard = ProcessGuard()
        # Guards the state of every subclass, and `schedule`. Reentrant: garbage collection can close a loader inside
        # any allocation.
        self._lock = threading.RLock()
        self._closed = False
        self.work = Work()  # of all workers
        self.worker_count = setup.plan.workers.threads  # at present; 0 where the consumer reads
        self._starved = 0  # batches for which the consumer had to wait
        self.ready = 0  # batches that wait on the host
        # The lock guards everything below.
        self._cursor: BatchIndex | None = None  # the next batch to be claimed; None before the first request
        # By the key of the first batch in each slot, in order; None while the slot is being filled.
        self._claimed: dict[BatchIndex, FilledSlot | None] = {}
        self._generation = 0  # counts the drops; results of an older generation are dropped
        self._coalesced = 1  # batches to claim at once: few at first, so that the first one comes soon
        # By batch, until it is handed out.
        self.around: dict[BatchIndex, ReadAround] = {}

    def follow(self, schedule: Schedule) -> None:
        """Claim batches in another order; tasks under way keep theirs."""
        with self._lock:
            self.schedule = schedule

    def renew(self, setup: ReaderSetup, key: BatchIndex) -> None:
        """Drop the batches that were read ahead, and read from ``key`` on by another setup of the same layout."""
        with self._lock:
            if self._closed:
                self.check()
            self._take_setup(setup)
            self._seek(key)

    def _take_setup(self, setup: ReaderSetup) -> None:
        self.setup = setup

    @abc.abstractmethod
    def prefetch(self, key: BatchIndex) -> None:
        """Have the batches from ``key`` on read. Never waits for storage.

        Raises:
            ClosedError: The pipeline is closed.
            WorkerError: A worker could not be started, or is known to have died; only `check` looks for that.
        """

    def poll(self, key: BatchIndex) -> FilledSlot | None:
        """The slot that begins with a batch, which then belongs to the caller; None if it is not filled yet."""
        with self._lock:
            filled = self._claimed.get(key)
            if filled is not None:
                del self._claimed[key]
                self.ready -= filled.good
            return filled

    def get(self, key: BatchIndex) -> FilledSlot:
        """As `poll`, waiting for the slot.

        Raises:
            StalledError: The batch did not come in time; the error says what each worker reads.
        """
        if (filled := self.poll(key)) is not None:
            return filled
        self.check()
        began = time.monotonic()
        self._starved += 1
        self.prefetch(key)
        filled = awaited(
            functools.partial(self._come, key),
            limit_s=self.timeout_s,
            late=functools.partial(self._stalled, key),
            warn_after_s=self.warn_after_s,
            warn=functools.partial(self._warn, key),
        )
        if self._tuner is not None and not self._tuner.settled and self._all_read():
            self._tune(self._tuner, time.monotonic() - began)
        return filled

    def must_copy(self) -> bool:
        """Whether batches must be copied out of slots: the user keeps all other slots, and the budget is spent."""
        count = len(self.pool.memories)
        return count >= self._most_slots and self.pool.held >= count - 1

    @property
    def done(self) -> Work:
        return self.work._replace(starved=self._starved)

    def close(self) -> None:
        """Waits a few seconds at most. From any thread."""
        if self.forked:  # the workers are in another process, and so may be the thread that held the lock at the fork
            return
        with self._lock:
            self._closed = True
            self._claimed.clear()
            self.ready = 0
        self._end_workers()
        self.pool.memories.clear()  # lent slots live on with their views

    @property
    def forked(self) -> bool:
        return self._guard.forked

    def check(self) -> None:
        if self._guard.pid != os.getpid():  # without a call: this is asked for each batch
            raise self._guard.error("this loader was built", self._not_forked)
        if self._closed:
            leave_at_exit()
            raise ClosedError("the loader is closed; build a new one")

    # -- subclasses fill slots -----------------------------------------------------------------------------------------

    #: May raise a `MemoryBudgetError`.
    _add_slots: Callable[[int], None]
    #: They must not begin another task, since the pipeline is closed.
    _end_workers: Callable[[], None]
    #: Changes the number of workers, after the first request.
    set_workers: Callable[[int], None]
    #: Waits until a batch may have come; adds slots if the user keeps all of them. Raises as `check`.
    _wait: Callable[[BatchIndex, float], None]
    _readings: Callable[[], list[Activity]]

    def _dump_stacks(self) -> None:
        dump_stacks()

    # -- the machinery -------------------------------------------------------------------------------------------------

    def _seek(self, key: BatchIndex) -> None:
        """Drop all batches that were read ahead."""
        self._cursor = key
        self._generation += 1
        self._coalesced = 1
        for filled in self._claimed.values():
            if filled is not None and filled.good:
                self.pool.move(filled.slot, "drop")
        self._claimed.clear()
        self.around.clear()
        self.ready = 0

    def _claim(self) -> list[BatchIndex]:
        assert self._cursor is not None
        keys = [self._cursor]
        following = self.schedule.following(self._cursor)
        while len(keys) < self._coalesced and following.epoch == keys[0].epoch:
            keys.append(following)
            following = self.schedule.following(following)
        self._claimed[keys[0]] = None
        self._cursor = following
        return keys

    def _task(self, slot: int, worker: int | None) -> ReadTask:
        source, around = self.setup.read.source, self.setup.around
        return ReadTask(slot, self._claim(), self.schedule, self._generation, worker, source, around)

    def _file(self, filled: FilledSlot, generation: int, work: Work, seconds: float) -> bool:
        """File a filled slot, and the work that it took; False if its batches were dropped meanwhile."""
        # 1. A worker claims (0, 3). 2. The consumer asks for (1, 0): all claims are dropped. 3. The worker is done. Its
        # batch would stay in the new order for ever. See test_a_batch_of_an_older_generation_is_thrown_away.
        wanted = generation == self._generation
        if not wanted or not filled.good:
            self.pool.move(filled.slot, "abandon")
        if not wanted:
            return False
        if filled.good:
            if self.layout.batches > 1:
                self._coalesced = self._next_coalesced(len(filled.batches), seconds)
            self.pool.move(filled.slot, "filled")
        samples = 0
        for key, _, rows, error, around in filled.batches:
            samples += rows if error is None else 0
            if around is not None:
                self.around[key] = around
        if filled.good:
            self.work = self.work.plus(work._replace(batches=filled.good, bytes=samples * self.layout.sample_bytes))
        self._claimed[filled.batches[0].key] = filled
        self.ready += filled.good
        return True

    def _fill(self, task: ReadTask) -> bool:
        """Run a task in a thread of this process; False if its batches were dropped meanwhile."""
        # No name holds the result: the traceback of an error in it refers to this frame, and the cycle would keep the
        # objects of the frame that catches that error.
        return self._deliver(task, task.run(self.setup.read, self.layout, self.pool.memories[task.slot]))

    def _deliver(self, task: ReadTask, filled: FilledSlot) -> bool:
        work = CLOCK.take()  # with reading ahead after the previous slot
        with self._lock:
            return not self._closed and self._file(filled, task.generation, work, work.seconds)

    def _next_coalesced(self, batches: int, seconds: float) -> int:
        """The number of batches to claim at once: as many as would be read in `COALESCED_S`, at most twice as before.

        Several workers can claim before the first is done, and on slow storage a slot of many batches takes minutes.
        """
        most = int(COALESCED_S / seconds * batches) if seconds else self.layout.batches
        return max(min(most, max(2 * batches, self._coalesced), self.layout.batches), 1)

    def _grow(self) -> None:
        """Double the slots, within the budget, if the user keeps all of them."""
        if self._closed:
            self.check()
        if self.pool.held == len(self.pool):
            try:
                self._add_slots(min(len(self.pool), self._most_slots - len(self.pool)))
            except MemoryBudgetError:
                if len(self.pool) == self.pool.held:
                    raise
                self._most_slots = len(self.pool)  # batches are handed out as copies from here on

    def _tune(self, tuner: WorkerTuner, seconds: float) -> None:
        before = tuner.count
        if (count := tuner.waited(seconds, self.work.batches)) == before:
            return
        try:
            with self._lock:
                if self._closed:
                    self.check()
                if count > before and len(self.pool) <= count < self._most_slots:
                    self._add_slots(1)  # each worker fills one, and one is handed out
                self.set_workers(count)
                self.worker_count = count
        except (MemoryBudgetError, WorkerError) as error:
            log.warning("workers=auto: no more than %d, since the system refuses another one: %s", before, error)
            tuner.stay(before)
            return
        why = "the loop waited for batches" if count > before else "one more did not shorten the waiting"
        log.info("workers=auto: %d from here on, since %s; workers=%d begins so", count, why, count)

    def _all_read(self) -> bool:
        """Whether all workers have started, so that the waiting is due to them."""
        return True

    def _come(self, key: BatchIndex, seconds: float) -> FilledSlot | None:
        if seconds:
            self._wait(key, seconds)
        return self.poll(key)

    def _warn(self, key: BatchIndex, seconds: float) -> None:
        what, where = self._waited_for(key)
        log.warning(
            "the loop has waited %.0f s for batch %d of epoch %d (stage %s): %s; it warns from warn_after_s seconds on",
            *(seconds, key.step, key.epoch, where["stage"], what),
        )

    def _stalled(self, key: BatchIndex) -> NoReturn:
        what, where = self._waited_for(key)
        self._dump_stacks()
        late = f"batch {key.step} of epoch {key.epoch} did not come in {self.timeout_s:g} s"
        ways = "the stacks of all threads are on standard error; timeout_s sets how long to wait"
        raise StalledError(f"{late}: {what}; is the disk slow or gone? {ways}", **where)

    def _waited_for(self, key: BatchIndex) -> tuple[str, dict[str, Any]]:
        """The work of all workers in words, and the place of the first, which has the batch or is busy longest."""
        readings = sorted(self._readings(), key=lambda each: (each.key != key, each.since))
        return "; ".join(each.words for each in readings), {"stage": "read", **readings[0].where}
