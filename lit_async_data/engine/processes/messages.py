"""Messages between the training process and a reader process: tasks, reports, errors.

Both are records of fixed size; an atomic write carries each. A report may be followed by a payload: pickled errors or a
log record.
"""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import select
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

# The result of a batch that could not be read as planned.
Unplanned = Exception | ReadAround


def packed_results(batches: Sequence[BatchResult]) -> bytes:
    """Pack the errors of a task's batches, and the samples of those read around bad ones; empty if there are none."""
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
    """The exceptions by number, with their causes; their tracebacks are notes."""
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
    """Whether an exception can be pickled and built again: one may need arguments that it does not keep."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301  # made here
    except Exception:  # noqa: BLE001  # whatever its own code raises
        return False


# Messages on the control of a process: a channel comes; the stacks of all threads are to be written to a socket.
OPENED, ASKED = b"+", b"?"
NO_LIMIT = -1
# Bytes of log records that wait to be read; more are dropped.
MOST_LOGGED = 2**20


class Phase(enum.IntEnum):
    """The part of the work on a slot that a task asks for."""

    ALL = 0
    READ = 1  # before any hook
    TRANSFORM = 2  # what was read
    AROUND = 3  # all of it by one process, sample by sample, around the bad ones


class Task(NamedTuple):
    """Batches, or one process's share of them, that a reader process reads into a slot."""

    slot: int
    generation: int  # counts how often all that was read ahead was dropped; older tasks are not carried out
    key: BatchIndex  # the first batch
    batches: int
    row: int  # the first row in the slot
    share: Share
    limits: Limits  # what the consumer will take of each epoch
    phase: Phase = Phase.ALL
    deaths: int = 0  # processes that have ended while they carried this out; known to the training process alone

    @property
    def is_dealt(self) -> bool:
        """Whether it reads a new slot, and does not finish one that has been read by shares."""
        return self.phase in (Phase.ALL, Phase.READ)

    def packed(self) -> bytes:
        numbers = self.slot, self.generation, *self.key, self.batches, self.row, *self.share
        first, steps, later, start = self.limits
        most = NO_LIMIT if steps is None else steps, NO_LIMIT if later is None else later
        return _TASK.pack(*numbers, first, *most, start, self.phase)

    @classmethod
    def unpacked(cls, data: bytes) -> Task:
        slot, generation, epoch, step, batches, row, reader, readers, first, *most, start, phase = _TASK.unpack(data)
        steps, later = (None if each == NO_LIMIT else each for each in most)
        key, share, limits = BatchIndex(epoch, step), Share(reader, readers), Limits(first, steps, later, start)
        return cls(slot, generation, key, batches, row, share, limits, Phase(phase))


class ReportKind(enum.IntEnum):
    READY = 1  # the process takes tasks from now on
    DONE = 2  # it has carried out a task; the payload holds errors, if any
    LOG = 3  # the payload is a log record
    FAILED = 4  # it cannot go on; the payload is the error


class Report(NamedTuple):
    kind: int  # a `ReportKind`
    payload: int = 0  # bytes that follow
    slot: int = 0  # of the task
    step: int = 0  # the first one of the task
    work: Work = NO_WORK  # seconds and bytes of the thread since its last report, reading ahead included
    idle_s: float = 0.0  # seconds that the thread has waited for the task

    def packed(self) -> bytes:
        return _REPORT.pack(*self[:4], *self.work[:6], self.idle_s)

    @classmethod
    def unpacked(cls, data: bytes) -> Report:
        kind, payload, slot, step, *work, idle_s = _REPORT.unpack_from(data)
        return cls(kind, payload, slot, step, Work(*work), idle_s)


_TASK, _REPORT = struct.Struct("<13q"), struct.Struct("<4q4d2qd")
TASK_BYTES, REPORT_BYTES = _TASK.size, _REPORT.size
_END = bytes(TASK_BYTES)  # in place of a task: the thread shall end


class TaskQueue:
    """A pipe from which threads take tasks. Safe to use from several threads.

    The training process writes a task there, and wakes only a thread that waits for one. Threads that decode, and the
    main thread of the reader process, sleep on: on a busy machine each of them could run only in place of the training
    loop. Reading from the pipe does not block.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        # Closed files raise; a closed descriptor could be that of another file by now.
        self._read, self._write = io.FileIO(read_fd, "rb"), io.FileIO(write_fd, "wb")

    def get(self) -> Task | None:
        """Take the next task, waiting for it; None if the thread shall end."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        # None if there is none, or another thread was faster. The system gives each reader whole records.
        while (data := self._read.read(TASK_BYTES)) is None:
            poll.poll()
        return None if data in (b"", _END) else Task.unpacked(data)

    def wake(self, threads: int) -> None:
        """Let this many threads end."""
        self._write.write(threads * _END)

    def close(self) -> None:
        """Close the pipe, when no thread uses it any more."""
        self._read.close()
        self._write.close()


class Reports:
    """Writes reports in order, and closes the pipe at the end. Thread-safe.

    `send` never waits: the main thread of a reader process serves several loaders, of which one may not be read for a
    long time. What the pipe does not take is written by a thread.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closing = False
        os.set_blocking(fd, False)
        self._left: collections.deque[memoryview] = collections.deque()
        self._lock = threading.Lock()
        self._empty = True

    def send(self, report: Report, payload: bytes = b"", *, droppable: bool = False) -> None:
        """Write a report, or have it written. One that is ``droppable`` is dropped if too much waits to be read."""
        with self._lock:
            if self._closing or (droppable and sum(map(len, self._left)) > MOST_LOGGED):
                return
            self._left.append(memoryview(report._replace(payload=len(payload)).packed() + payload))
            if self._empty and not self._write():
                self._empty = False
                threading.Thread(target=self._write_rest, name="lit_async_data reports", daemon=True).start()

    def close(self) -> None:
        """Close the pipe when all that was sent is written, and send no more. Idempotent."""
        with self._lock:
            # Not while the thread still writes: another file could get the number of the descriptor.
            if not self._closing and self._empty:
                os.close(self._fd)
            self._closing = True

    def _write(self) -> bool:
        """Write what the pipe takes; whether that is all."""
        try:
            while self._left:
                data = self._left[0]
                written = os.write(self._fd, data)
                if written == len(data):
                    self._left.popleft()
                else:
                    self._left[0] = data[written:]
        except BlockingIOError:
            return False
        except OSError:  # the parent has closed its end
            self._left.clear()
        return True

    def _write_rest(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                if self._write():
                    if self._closing:
                        os.close(self._fd)
                    self._empty = True
                    return
