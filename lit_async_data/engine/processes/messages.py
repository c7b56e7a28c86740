"""Messages between the training process and a reader process: tasks, reports, errors.

Tasks and reports have fixed sizes, and are written atomically. Pickled errors or a log record may follow a report.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import struct
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

from lit_async_data.engine.pipeline.pipeline import BatchResult
from lit_async_data.engine.pipeline.sample_reader import BadSample, ReadAround
from lit_async_data.errors import AsyncDataError, ReadError
from lit_async_data.order.plan import BatchIndex, Limits, Share
from lit_async_data.sources.contract.stage_clock import NO_WORK, Work

# The result of a batch that was not read as planned.
Unplanned = Exception | ReadAround


def packed_results(batches: Sequence[BatchResult]) -> bytes:
    """The errors of a task's batches, and their samples if bad ones were read around; empty if all went as planned."""
    errors = [(number, batch.error) for number, batch in enumerate(batches) if batch.error is not None]
    around = [
        (number, batch.around.samples, [(*bad[:2], _portable(bad.error)[0]) for bad in batch.around.bad])
        for number, batch in enumerate(batches)
        if batch.around is not None
    ]
    return pickle.dumps((packed_errors(errors), around)) if errors or around else b""


def unpacked_results(payload: bytes, process: int) -> dict[int, Unplanned]:
    errors, around = pickle.loads(payload)  # noqa: S301  # from the reader process
    found: dict[int, Unplanned] = {**unpacked_errors(errors, process)}
    return found | {
        number: ReadAround(samples, tuple(BadSample(*each) for each in bad)) for number, samples, bad in around
    }


def packed_errors(errors: Sequence[tuple[int, BaseException]]) -> bytes:
    return pickle.dumps([(number, *_portable(error)) for number, error in errors])


def unpacked_errors(payload: bytes, process: int) -> dict[int, Exception]:
    """The exceptions by number, with tracebacks as notes."""
    found = {}
    for number, error, cause, text in pickle.loads(payload):  # noqa: S301  # from the reader process
        error.__cause__ = cause
        error.add_note(f"In reader process {process}:\n{text}")
        found[number] = error
    return found


def _portable(error: BaseException) -> tuple[BaseException, BaseException | None, str]:
    """An exception that can be pickled, its cause, and the text of both with tracebacks."""
    text = "".join(traceback.format_exception(error)).rstrip()
    cause = error.__cause__ if error.__cause__ is not None and _travels(error.__cause__) else None
    if not (isinstance(error, Exception) and _travels(error)):
        known = ("file", "dataset", "row", "sample_id", "stage", "worker")
        place: dict[str, Any] = {name: getattr(error, name, None) for name in known}
        kind = type(error) if type(error) in (AsyncDataError, ReadError) else ReadError
        error = kind(f"{type(error).__name__}: {error}", **place)
    return error, cause, text


def _travels(error: BaseException) -> bool:
    """Whether pickle restores an error: it may need arguments that it does not keep."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301  # made here
    except Exception:  # noqa: BLE001  # its code may raise anything
        return False


# Messages on the control socket: use another setup; write the stacks of all threads to a socket.
RENEWED, ASKED = b"+", b"?"
NO_LIMIT = -1


class Task(NamedTuple):
    """Batches, or one process's share of them, that a reader process reads into a slot."""

    slot: int
    generation: int  # see `Pipeline`; processes skip tasks of an older generation
    key: BatchIndex  # the first batch
    batches: int
    row: int  # the first row in the slot
    share: Share
    limits: Limits  # the part of each epoch that the consumer will take
    around: bool = False  # whether one process reads the whole slot, sample by sample, around bad ones
    deaths: int = 0  # processes that the task has ended; known to the training process alone

    def packed(self) -> bytes:
        numbers = self.slot, self.generation, *self.key, self.batches, self.row, *self.share
        first, steps, later, start = self.limits
        most = NO_LIMIT if steps is None else steps, NO_LIMIT if later is None else later
        return _TASK.pack(*numbers, first, *most, start, self.around)

    @classmethod
    def unpacked(cls, data: bytes) -> Task:
        slot, generation, epoch, step, batches, row, reader, readers, first, *most, start, around = _TASK.unpack(data)
        steps, later = (None if each == NO_LIMIT else each for each in most)
        key, share, limits = BatchIndex(epoch, step), Share(reader, readers), Limits(first, steps, later, start)
        return cls(slot, generation, key, batches, row, share, limits, bool(around))


class ReportKind(enum.IntEnum):
    READY = 1  # the process takes tasks from now on
    DONE = 2  # a task is done; the payload has its errors, if any
    LOG = 3  # the payload is a log record
    FAILED = 4  # the process cannot go on; the payload is the error


class Report(NamedTuple):
    kind: int  # a `ReportKind`
    payload: int = 0  # bytes that follow
    slot: int = 0  # of the task
    step: int = 0  # the first one of the task
    work: Work = NO_WORK  # seconds and bytes of the thread since its last report, reading ahead included
    idle_s: float = 0.0  # seconds that the thread has waited for the task

    def packed(self) -> bytes:
        return REPORT.pack(*self[:4], *self.work[:8], self.idle_s)


_TASK, REPORT = struct.Struct("<13q"), struct.Struct("<4q4d4qd")
TASK_BYTES, REPORT_BYTES = _TASK.size, REPORT.size


class Reports:
    """Sends reports, waiting while the pipe is full; drops them if its other end is closed. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._pipe = open(fd, "wb", buffering=0)  # noqa: SIM115
        self._lock = threading.RLock()  # garbage collection inside it may log

    def send(self, report: Report, payload: bytes = b"") -> None:
        data = memoryview(report._replace(payload=len(payload)).packed() + payload)
        with self._lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[self._pipe.write(data) :]
