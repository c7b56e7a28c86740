"""Messages between a process and its reader or worker processes: commands to them, and reports from them.

Both are records of fixed size; an atomic write carries each. A report may be followed by a payload: pickled errors or a
log record.
"""

from __future__ import annotations

import collections
import enum
import os
import select
import struct
import threading
from typing import NamedTuple

from lit_async_data.order.plan import BatchIndex, Limits
from lit_async_data.sources.contract.stage_clock import Work

NO_LIMIT = -1
# Bytes of log records that wait to be read; more are dropped.
MOST_LOGGED = 2**20


class CommandKind(enum.IntEnum):
    FILL = 1  # a slot may be filled
    SEEK = 2  # read on from a batch, and forget what was read ahead
    LIMIT = 3  # the pass, and later ones, will take this part of each epoch
    WORKERS = 4  # read on with this many workers
    READ = 5  # to a worker process: read batches into a slot
    END = 6  # read no more; a fork of the parent may keep the pipe open


class Command(NamedTuple):
    kind: CommandKind
    slot: int = 0  # number of a slot, for FILL and READ; number of workers, for WORKERS
    # Counts the SEEKs; reports carry the number of the last SEEK that the reader has seen.
    generation: int = 0
    key: BatchIndex = BatchIndex(0, 0)  # where to go on, for SEEK; the first batch, for READ
    limits: Limits = Limits()  # what the consumer will take of each epoch; for SEEK, LIMIT and READ
    batches: int = 1  # for READ
    row: int = 0  # the first row in the slot, for READ

    def packed(self) -> bytes:
        limits = (NO_LIMIT if each is None else each for each in self.limits)
        numbers = self.kind, self.slot, self.generation, *self.key, *limits, self.batches, self.row
        return _COMMAND.pack(*numbers)

    @classmethod
    def unpacked(cls, data: bytes) -> Command:
        kind, slot, generation, *numbers = _COMMAND.unpack(data)
        epoch, step, first, steps, later, start, batches, row = numbers
        most, most_later = (None if each == NO_LIMIT else each for each in (steps, later))
        return cls(
            CommandKind(kind),
            slot,
            generation,
            BatchIndex(epoch, step),
            Limits(first, most, most_later, start),
            batches,
            row,
        )


class ReportKind(enum.IntEnum):
    FILLED = 1  # a slot holds batches; the payload holds errors, if any
    LOG = 2  # the payload is a log record
    FAILED = 3  # the process cannot go on; the payload is the error
    READY = 4  # a worker process takes commands from now on
    DONE = 5  # a worker process has carried out a command; the payload is its error, if any


class Report(NamedTuple):
    kind: int  # a `ReportKind`
    payload: int = 0  # bytes that follow
    generation: int = 0  # see `Command`
    slot: int = 0
    epoch: int = 0  # of the first batch in it
    step: int = 0  # of the first batch in it
    batches: int = 0
    good: int = 0  # how many of them could be read; if none, the slot stays with the reader
    samples: int = 0  # samples in these
    # See `Work`: all that a reader process has done so far, reading ahead included; or what a worker process did now.
    stored: int = 0
    decoded: int = 0
    seconds: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    cpu_s: float = 0.0
    idle_s: float = 0.0  # seconds that the workers have waited for slots so far

    @property
    def work(self) -> Work:
        return Work(self.seconds, self.decode_s, self.transform_s, self.cpu_s, self.stored, self.decoded)

    def packed(self) -> bytes:
        return _REPORT.pack(*self)

    @classmethod
    def unpacked(cls, data: bytes) -> Report:
        return cls(*_REPORT.unpack_from(data))


_COMMAND, _REPORT = struct.Struct("<11q"), struct.Struct("<11q5d")
COMMAND_BYTES, REPORT_BYTES = _COMMAND.size, _REPORT.size


class Reports:
    """Writes reports in order, and closes the pipe at the end. Thread-safe.

    `send` never waits: the main thread of a reader process serves several loaders, of which one may not be read for a
    long time. What the pipe does not take is written by a thread. Workers call `wait` before they send, since a batch
    that fails takes no slot, and there is no end to them.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closing = False
        os.set_blocking(fd, False)
        self._left: collections.deque[memoryview] = collections.deque()
        self._lock = threading.Lock()
        self._empty = threading.Event()
        self._empty.set()

    def send(self, report: Report, payload: bytes = b"", *, droppable: bool = False) -> None:
        """Write a report, or have it written. One that is ``droppable`` is dropped if too much waits to be read."""
        with self._lock:
            if self._closing or (droppable and sum(map(len, self._left)) > MOST_LOGGED):
                return
            self._left.append(memoryview(report._replace(payload=len(payload)).packed() + payload))
            if self._empty.is_set() and not self._write():
                self._empty.clear()
                threading.Thread(target=self._write_rest, name="lit_async_data reports", daemon=True).start()

    def wait(self) -> None:
        """Wait until everything is written, or nobody will read it."""
        self._empty.wait()

    def close(self) -> None:
        """Close the pipe when all that was sent is written, and send no more. Idempotent."""
        with self._lock:
            # Not while the thread still writes: another file could get the number of the descriptor.
            if not self._closing and self._empty.is_set():
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
                    self._empty.set()
                    return
