"""`ProcessPipeline`: a `Pipeline` whose workers run in a reader process.

The trainer's process owns the slots: it lends them to the user, and tells the reader which may be filled. Per slot it
reads one report from a pipe. All else, from the order of samples to their decoding, happens in the reader process,
which takes nothing of this process's GIL.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import MemoryBudgetError, WorkerError
from lit_async_data.host.pipeline.pipeline import Pipeline
from lit_async_data.host.pipeline.read_task import BatchResult, FilledSlot
from lit_async_data.host.pipeline.slots import LENT
from lit_async_data.host.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.host.processes.channel import Channel
from lit_async_data.host.processes.ipc.given_slots import MOST_SLOTS
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, Report
from lit_async_data.host.processes.ipc.remote_errors import unpacked_errors
from lit_async_data.host.processes.ipc.shared_slots import SharedSlots
from lit_async_data.host.processes.reader_process import ReaderProcess
from lit_async_data.host.processes.setup import ReaderSetup
from lit_async_data.host.resources import memory
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, Schedule

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Seconds between two checks whether a slot was freed by another thread.
FREED_S = 0.02


class ProcessPipeline(Pipeline):
    """Batches that a reader process reads ahead, in order. One consumer at a time.

    Args:
        setup: What the reader process needs.
        stored: The same, in a file; closed when the process has it.
        process: Reads; other pipelines may share it.
        pin: Called with the memory of each slot, so that a GPU can copy from it by itself; undone when it is freed.
    """

    _not_forked = "its reader process does not serve it; build it in the child"

    def __init__(
        self,
        setup: ReaderSetup,
        stored: io.FileIO,
        process: ReaderProcess,
        *,
        pin: Callable[[Bytes], None] | None = None,
        timeout_s: float,
    ) -> None:
        budget = setup.plan.budget
        super().__init__(
            setup.schedule,
            setup.layout,
            slots=budget.slots,
            most_slots=min(budget.most_slots, MOST_SLOTS),
            timeout_s=timeout_s,
            tuner=setup.plan.workers.tuner(),
        )
        self.worker_count = setup.plan.workers.threads
        self._source = setup.read.source
        self._stored, self._process, self._pin = stored, process, pin
        self._shared: SharedSlots | None = None
        self._channel: Channel | None = None
        # The lock guards everything below.
        self._generation = 0
        self._known = 0  # slots that the reader process has mapped
        # Slots that have been reported, in order; and the batch after them, or the first one asked for.
        self._ready: dict[BatchIndex, FilledSlot] = {}
        self._next: BatchIndex | None = None
        # What workers had waited for slots by the last report, and how often the loop had waited by then.
        self._idle_s, self._was_starved = 0.0, 0

    def follow(self, schedule: Schedule) -> None:
        with self._lock:
            changed = schedule.limits != self.schedule.limits
            super().follow(schedule)
            if changed and self._channel is not None and self._channel.opened:
                self._command(Command(CommandKind.LIMIT, limits=schedule.limits))

    def reserve(self) -> None:
        """Take the memory of the first slots, unless that is done."""
        with self._lock:
            if self._shared is None:
                self._shared = SharedSlots(self.layout.nbytes)
            if not len(self.pool):
                self._add_slots(min(self._slots, self._most_slots))

    def prefetch(self, key: BatchIndex) -> None:
        with self._lock:
            if self._closed:
                self.check()
            if self._channel is None or not self._channel.opened:
                self._start()
            moves = next(iter(self._ready), self._next) != key
            if moves:
                self._forget(key)
            self._give_slots(later=moves)

    def poll(self, key: BatchIndex) -> FilledSlot | None:
        with self._lock:
            if self._channel is not None and self._channel.opened:
                self._receive(self._channel)
            filled = self._ready.pop(key, None)
            if filled is not None:
                self.ready -= filled.good
                if not self._ready:
                    self._next = self.schedule.following(filled.batches[-1].key)
            return filled

    def _wait(self, key: BatchIndex, seconds: float) -> None:
        with self._lock:
            self._grow()
            channel, all_given = self._channel, not self.pool.count(LENT)
        if channel is not None and channel.opened:
            # A slot that the user frees in another thread is given to the reader soon.
            channel.wait(seconds if all_given else FREED_S)
        # Slots may have been freed, and the reader may have gone on under an older limit.
        self.prefetch(key)

    def close(self) -> None:
        if self.forked:
            return
        with self._lock:
            self._closed = True
            self._ready.clear()
            self.ready = 0
            self._stored.close()
            try:
                if self._channel is not None:
                    self._channel.close()
            finally:
                if self._shared is not None:
                    self._shared.close()
                self.pool.clear()

    @property
    def process_id(self) -> int | None:
        """The id of the reader process; None before the first request."""
        return None if self._channel is None else self._channel.pid

    # -- slots -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.reserve()
        assert self._shared is not None
        if self._channel is not None:  # it could not be opened
            self._channel.close()
        self._channel = Channel(self._process)
        self._channel.open(self._stored.fileno(), self._shared)
        self._stored.close()

    def set_workers(self, count: int) -> None:
        with self._lock:
            self._command(Command(CommandKind.WORKERS, slot=count))

    def _add_slots(self, count: int) -> None:
        assert self._shared is not None
        for slot in self._shared.add(count):
            if self._pin is not None:
                self._pin(slot)
            self.pool.add(slot)

    def _give_slots(self, *, later: bool) -> None:
        """Let the reader fill the slots that are vacant; ``later`` only when it has obeyed the commands before."""
        vacant = self.pool.take_all()
        if not vacant:
            return
        assert self._channel is not None
        if later or max(vacant) >= self._known:
            for slot in sorted(vacant):  # it maps new ones in the order of their numbers
                self._command(Command(CommandKind.FILL, slot=slot))
            self._known = len(self.pool)
            return
        try:
            self._channel.give(vacant)
        except WorkerError as error:
            raise self._explained(error) from error.__cause__

    def _forget(self, key: BatchIndex) -> None:
        """Drop what was read ahead, and have the reader go on with another batch."""
        for filled in self._ready.values():
            if filled.good:
                self.pool.drop(filled.slot)
        self._ready.clear()
        self.ready = 0
        self._generation += 1
        self._next = key
        command = Command(CommandKind.SEEK, generation=self._generation, key=key, limits=self.schedule.limits)
        self._command(command)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        assert self._channel is not None
        try:
            self._channel.send(command)
        except WorkerError as error:
            raise self._explained(error) from error.__cause__

    def _receive(self, channel: Channel) -> None:
        if self._closed:  # by another thread, since the consumer's last check
            return
        try:
            reports = channel.receive()
        except WorkerError as error:
            raise self._explained(error) from error.__cause__
        for report, payload in reports:
            if report.good:
                self.pool.filled(report.slot)
            self.meter.work = report.work
            self.meter.waited(report.idle_s - self._idle_s, starved=self._starved != self._was_starved)
            self._idle_s, self._was_starved = report.idle_s, self._starved
            if report.generation == self._generation:
                filled = self._slot_of(report, unpacked_errors(payload, channel.pid) if payload else {})
                self.meter.read(report.good, report.samples * self.layout.spec.nbytes)
                self._ready[filled.batches[0].key] = filled
                self.ready += filled.good
            elif report.good:
                self.pool.drop(report.slot)

    def _slot_of(self, report: Report, errors: dict[int, Exception]) -> FilledSlot:
        if report.batches == report.good == 1:
            batch = BatchResult(BatchIndex(report.epoch, report.step), 0, report.samples)
            return FilledSlot(report.slot, (batch,), 1)
        plan = self.schedule.plan(report.epoch)
        batches, first = [], 0
        for number in range(report.batches):
            key = BatchIndex(report.epoch, report.step + number)
            rows = plan.count(key.step)
            batches.append(BatchResult(key, first, rows, errors.get(number)))
            first += rows
        return FilledSlot(report.slot, batches, report.good)

    def _reading(self) -> str:
        found = []
        for epoch, count, samples in self._being_read():
            place = self._source.locate(samples[:1])[0]
            numbers = ", ".join(map(str, samples[:3])) + (f", … ({count} in all)" if count > 3 else "")
            found.append(
                f"sample{'s' * (count > 1)} {numbers} of epoch {epoch} (the first is row {place.row} of {place.file})"
            )
        return "the reader process reads " + (", ".join(found) or "nothing")

    def _being_read(self) -> list[tuple[int, int, Indices]]:
        """See `SharedSlots.being_read`; with the numbers by which errors name samples."""
        noted = [] if self._shared is None else self._shared.being_read()
        return [(epoch, count, self._source.ids(samples)) for epoch, count, samples in noted]

    def _explained(self, error: WorkerError) -> WorkerError:
        """The error with what was being read: any of these samples may be the cause."""
        noted = self._being_read()
        explained = WorkerError(f"{error}. When it ended, {self._reading()}", stage="read")
        if len(noted) == 1:
            explained.sample_id = int(noted[0][2][0])
            place = self._source.locate(noted[0][2][:1])[0]
            explained.file, explained.row = place.file, place.row
        for epoch, count, samples in noted:
            if count > 3:
                first = f"the first {len(samples)} " if count > len(samples) else ""
                explained.add_note(f"samples of epoch {epoch} that were being read: {first}{samples.tolist()}")
        explained.__cause__ = error.__cause__
        return explained


def pipeline_of(setup: ReaderSetup, process: ReaderProcess, *, pin: torch.device | None, timeout_s: float) -> Pipeline:
    """The pipeline of a plan, from which the device ``pin`` copies. Nothing starts before the first request."""
    if setup.plan.workers.kind == "process":
        return _process_pipeline(setup, process, pin=pin, timeout_s=timeout_s)
    plan = setup.plan
    return ThreadPipeline(
        setup.read,
        setup.schedule,
        plan.layout,
        functools.partial(memory.allocated, plan.layout.nbytes, pinned=pin is not None),
        workers=plan.workers.threads,
        slots=plan.budget.slots,
        most_slots=plan.budget.most_slots,
        timeout_s=timeout_s,
        ahead=setup.ahead,
        ids=setup.read.source.ids,
        tuner=plan.workers.tuner(),
    )


def _process_pipeline(
    setup: ReaderSetup, process: ReaderProcess, *, pin: torch.device | None, timeout_s: float
) -> ProcessPipeline:
    register = None
    if pin is not None and pin.type == "cuda":
        register = functools.partial(memory.register, device=pin)
    elif pin is not None:
        _say_pageable(pin.type)
    pipeline = ProcessPipeline(setup, setup.stored(), process, pin=register, timeout_s=timeout_s)
    try:
        pipeline.reserve()
    except MemoryBudgetError:
        pipeline.close()
        raise
    return pipeline


@functools.cache  # once
def _say_pageable(kind: str) -> None:
    log.warning(
        "the memory that a reader process fills can be pinned for CUDA only: copies to %s come from pageable memory "
        "and may hold the program up; worker_kind=thread reads into pinned memory",
        kind,
    )
