"""`ProcessPipeline`: a `Pipeline` whose workers run in a reader process.

The trainer's process owns the slots: it lends them to the user, and tells the reader which may be filled. Per batch it
reads one report from a pipe. All else, from the order of samples to their decoding, happens in the reader process,
which takes nothing of this process's GIL.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import threading
import time
from collections.abc import Callable

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import ClosedError, MemoryBudgetError, StalledError, WorkerError
from lit_async_data.host.pipeline import POLL_S
from lit_async_data.host.processes.messages import Command, CommandKind, Report
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.processes.remote_errors import unpacked_errors
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.processes.shared_slots import SharedSlots
from lit_async_data.host.read_task import BatchResult, FilledSlot
from lit_async_data.host.slots import LENT, SlotPool
from lit_async_data.host.stats import ReadStats
from lit_async_data.order.plan import BatchIndex, Schedule
from lit_async_data.threads import ProcessGuard, leave_at_exit

# Seconds between two checks whether a slot was freed by another thread.
FREED_S = 0.02


class ProcessPipeline:
    """Batches that a reader process reads ahead, in order. Has the interface of `Pipeline`. One consumer at a time.

    Args:
        setup: What the reader process needs.
        stored: The same, in a file; closed when the process has started.
        pin: Called with the memory of each slot, so that a GPU can copy from it by itself; undone when it is freed.
        timeout_s: Seconds to wait for a batch.

    Attributes:
        timeout_s: The same.
    """

    def __init__(
        self, setup: ReaderSetup, stored: io.FileIO, *, pin: Callable[[Bytes], None] | None = None, timeout_s: float
    ) -> None:
        self.layout = setup.layout
        self.pool = SlotPool([])
        self.schedule = setup.schedule
        self._setup, self._stored, self._pin = setup, stored, pin
        self.timeout_s = timeout_s
        self._most_slots = setup.plan.budget.most_slots
        self._guard = ProcessGuard()
        self._shared: SharedSlots | None = None
        self._process: ReaderProcess | None = None
        # Guards everything below. Reentrant: garbage collection can close a loader inside any allocation.
        self._lock = threading.RLock()
        self._generation = 0
        # Slots that have been reported, in order; and the batch after them, or the first one asked for.
        self._ready: collections.OrderedDict[BatchIndex, FilledSlot] = collections.OrderedDict()
        self._next: BatchIndex | None = None
        self._closed = False
        self._stats = ReadStats()

    def follow(self, schedule: Schedule) -> None:
        """Read in this order from now on."""
        with self._lock:
            changed = schedule.limits != self.schedule.limits
            self.schedule = schedule
            if changed and self._process is not None and self._process.started:
                self._command(Command(CommandKind.LIMIT, limits=schedule.limits))

    @property
    def head(self) -> BatchIndex | None:
        """The next batch to be handed out, unless another is asked for."""
        return next(iter(self._ready), self._next)

    def reserve(self) -> None:
        """Take the memory of the first slots, unless that is done.

        Raises:
            MemoryBudgetError: The system refuses it.
        """
        with self._lock:
            if self._shared is None:
                self._shared = SharedSlots(self.layout.nbytes)
            if not len(self.pool):
                self._add(min(self._setup.plan.budget.slots, self._most_slots))

    def prefetch(self, key: BatchIndex) -> None:
        """Have the batches from ``key`` on read. Waits only for the reader process to start.

        Raises:
            ClosedError: The pipeline is closed.
            WorkerError: It belongs to another process, or the reader process has ended.
        """
        self.check()
        with self._lock:
            if self._process is None or not self._process.started:
                self._start()
            if self.head != key:
                self._forget(key)
            self._give_slots()

    def poll(self, key: BatchIndex) -> FilledSlot | None:
        """The slot that begins with a batch if it has been filled, else None; it then belongs to the caller."""
        with self._lock:
            if self._process is not None:
                self._receive(self._process)
            filled = self._ready.pop(key, None)
            if filled is not None and not self._ready:
                self._next = self.schedule.following(filled.batches[-1].key)
            return filled

    def get(self, key: BatchIndex) -> FilledSlot:
        """The slot that begins with a batch, waiting for it; it then belongs to the caller.

        Raises:
            StalledError: It did not come in time; says what each worker reads.
            ClosedError, WorkerError: See `prefetch`.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            # Again each time: slots may have been freed, and the reader may have gone on under an older limit.
            self.prefetch(key)
            if (filled := self.poll(key)) is not None:
                return filled
            if time.monotonic() > deadline:
                raise self._stalled(key)
            with self._lock:
                self._grow()
                process, all_given = self._process, not self.pool.count(LENT)
            if process is not None:
                # A slot that the user frees in another thread is given to the reader soon.
                process.wait(POLL_S if all_given else FREED_S)

    def must_copy(self) -> bool:
        """Whether a slot must be handed out as a copy: the user keeps all others, and the budget is spent."""
        return len(self.pool) >= self._most_slots and self.pool.held >= len(self.pool) - 1

    @property
    def ready(self) -> int:
        """Batches that wait on the host."""
        return sum(filled.good for filled in list(self._ready.values()))

    def stats(self) -> ReadStats:
        """What has been read so far."""
        with self._lock:
            return dataclasses.replace(
                self._stats, ready=self.ready, slots=len(self.pool), slot_bytes=self.layout.nbytes
            )

    def close(self) -> None:
        """End the reader process and free the slots; waits two seconds at most. From any thread, and repeatable."""
        if self.forked:
            return
        with self._lock:
            self._closed = True
            self._ready.clear()
            self._stored.close()
            try:
                if self._process is not None:
                    self._process.close()
            finally:
                if self._shared is not None:
                    self._shared.close()
                self.pool.clear()

    @property
    def process_id(self) -> int | None:
        """The id of the reader process; None before the first request."""
        return None if self._process is None else self._process.pid

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that built the pipeline."""
        return self._guard.forked

    def check(self) -> None:
        """Raise the error that prevents the next batch."""
        if self._guard.forked:
            raise self._guard.error(
                "this loader was built", "its reader process does not serve it; build it in the child"
            )
        if self._closed:
            leave_at_exit()
            raise ClosedError("the loader is closed; build a new one")

    # -- slots -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.reserve()
        assert self._shared is not None
        if self._process is not None:  # it could not be started
            self._process.close()
        self._process = ReaderProcess()
        self._process.start(self._stored.fileno(), self._shared)
        self._stored.close()

    def _add(self, count: int) -> None:
        assert self._shared is not None
        for memory in self._shared.add(count):
            if self._pin is not None:
                self._pin(memory)
            self.pool.add(memory)

    def _grow(self) -> None:
        """Add slots if the user keeps all there are: double them, within the budget."""
        if self.pool.held == len(self.pool):
            try:
                self._add(min(len(self.pool), self._most_slots - len(self.pool)))
            except MemoryBudgetError:
                self._most_slots = len(self.pool)  # batches are handed out as copies from here on
            self._give_slots()

    def _give_slots(self) -> None:
        """Tell the reader which slots it may fill. New ones in the order of their numbers."""
        vacant = []
        while (slot := self.pool.take(timeout=0)) is not None:
            vacant.append(slot)
        for slot in sorted(vacant):
            self._command(Command(CommandKind.FILL, slot=slot))

    def _forget(self, key: BatchIndex) -> None:
        """Drop what was read ahead, and have the reader go on with another batch."""
        for filled in self._ready.values():
            if filled.good:
                self.pool.drop(filled.slot)
        self._ready.clear()
        self._generation += 1
        self._next = key
        command = Command(CommandKind.SEEK, generation=self._generation, key=key, limits=self.schedule.limits)
        self._command(command)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        assert self._process is not None
        try:
            self._process.send(command)
        except WorkerError as error:
            raise self._explained(error) from error.__cause__

    def _receive(self, process: ReaderProcess) -> None:
        try:
            reports = process.receive()
        except WorkerError as error:
            raise self._explained(error) from error.__cause__
        for report, payload in reports:
            if report.good:
                self.pool.filled(report.slot)
            self._stats = dataclasses.replace(self._stats, seconds=report.seconds)
            if report.generation == self._generation:
                filled = self._filled(report, unpacked_errors(payload, process.pid) if payload else {})
                self._stats = self._stats.plus(filled.good, filled.samples * self.layout.spec.nbytes, 0)
                self._ready[report.key] = filled
            elif report.good:
                self.pool.drop(report.slot)

    def _filled(self, report: Report, errors: dict[int, Exception]) -> FilledSlot:
        plan = self.schedule.plan(report.key.epoch)
        batches, first = [], 0
        for number in range(report.batches):
            key = report.key._replace(step=report.key.step + number)
            rows = plan.count(key.step)
            batches.append(BatchResult(key, first, rows, errors.get(number)))
            first += rows
        return FilledSlot(report.slot, batches, report.good)

    def _reading(self) -> str:
        """What each worker of the reader process is reading."""
        if self._shared is None:
            return "nothing"
        notes = [(int(epoch), int(first), int(count)) for epoch, first, count in self._shared.notes if count]
        source = self._setup.read.source
        found = []
        for epoch, first, count in notes:
            place = source.locate(source.ids(np.array([first])))[0]
            more = f" and {count - 1} more" if count > 1 else ""
            found.append(f"sample {first}{more} of epoch {epoch} (row {place.row} of {place.file})")
        return ", ".join(found) or "nothing"

    def _explained(self, error: WorkerError) -> WorkerError:
        explained = WorkerError(f"{error}. It was reading {self._reading()}")
        explained.__cause__ = error.__cause__
        return explained

    def _stalled(self, key: BatchIndex) -> StalledError:
        return StalledError(
            f"batch {key.step} of epoch {key.epoch} did not come in {self.timeout_s:g} s: the reader process is "
            f"reading {self._reading()}; is the disk slow or gone? timeout_s sets how long to wait",
            stage="read",
        )
