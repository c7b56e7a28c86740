"""Messages between a process and its reader or worker processes: commands to them, and reports from them.

Both are records of fixed size; an atomic write carries each. A report may be followed by a payload: pickled errors or a
log record.
"""

from __future__ import annotations

import enum
import os
import struct
import threading
from typing import NamedTuple

from lit_async_data.order.plan import BatchIndex, Limits

NO_LIMIT = -1


class CommandKind(enum.IntEnum):
    """What is asked for."""

    FILL = 1  # a slot may be filled
    SEEK = 2  # read on from a batch, and forget what was read ahead
    LIMIT = 3  # the pass, and later ones, will take this many steps
    PAUSE = 4  # begin nothing more, for this many nanoseconds at most
    RESUME = 5  # end the pause
    WORKERS = 6  # read on with this many workers
    READ = 7  # to a worker process: read a batch into a slot


class Command(NamedTuple):
    """A command.

    Attributes:
        kind: What to do.
        slot: Number of a slot, for FILL and READ; number of workers, for WORKERS.
        generation: Counts the SEEKs; reports carry the number of the last SEEK that the reader has seen. For PAUSE it
            counts these, and QUIET carries it.
        key: Where to go on, for SEEK; the batch, for READ.
        limits: Steps that the consumer will take.
        nanoseconds: The longest that a PAUSE lasts.
    """

    kind: CommandKind
    slot: int = 0
    generation: int = 0
    key: BatchIndex = BatchIndex(0, 0)
    limits: Limits = Limits()
    nanoseconds: int = 0

    def packed(self) -> bytes:
        epoch, steps, later = self.limits
        return _COMMAND.pack(
            *(self.kind, self.slot, self.generation, *self.key),
            *(epoch, NO_LIMIT if steps is None else steps, NO_LIMIT if later is None else later),
            self.nanoseconds,
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Command:
        kind, slot, generation, epoch, step, *limits, nanoseconds = _COMMAND.unpack(data)
        return cls(
            CommandKind(kind),
            slot,
            generation,
            BatchIndex(epoch, step),
            Limits(limits[0], *(None if limit == NO_LIMIT else limit for limit in limits[1:])),
            nanoseconds,
        )


class ReportKind(enum.IntEnum):
    """What a reader or worker process tells."""

    FILLED = 1  # a slot holds batches; the payload holds errors, if any
    LOG = 2  # the payload is a log record
    FAILED = 3  # the process cannot go on; the payload is the error
    QUIET = 4  # in a pause: the workers have finished what they had begun
    READY = 5  # a worker process takes commands from now on


class Report(NamedTuple):
    """A report.

    Attributes:
        kind: What happened.
        payload: Bytes that follow.
        generation: See `Command`.
        slot: The slot that was filled.
        key: The first batch in it.
        batches: Number of batches.
        good: How many of them could be read; if none, the slot stays with the reader.
        seconds: Seconds that workers have spent reading so far, and reading ahead.
    """

    kind: ReportKind
    payload: int = 0
    generation: int = 0
    slot: int = 0
    key: BatchIndex = BatchIndex(0, 0)
    batches: int = 0
    good: int = 0
    seconds: float = 0.0

    def packed(self) -> bytes:
        return _REPORT.pack(*self[:4], *self.key, *self[5:])

    @classmethod
    def unpacked(cls, data: bytes) -> Report:
        kind, payload, generation, slot, epoch, step, *rest = _REPORT.unpack(data)
        return cls(ReportKind(kind), payload, generation, slot, BatchIndex(epoch, step), *rest)


_COMMAND, _REPORT = struct.Struct("<9q"), struct.Struct("<8qd")
COMMAND_BYTES, REPORT_BYTES = _COMMAND.size, _REPORT.size


class Reports:
    """Writes reports. Thread-safe.

    Args:
        fd: The pipe.

    Attributes:
        fd: The same.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def send(self, report: Report, payload: bytes = b"") -> None:
        """Write a report; waits while the pipe is full."""
        data = memoryview(report._replace(payload=len(payload)).packed() + payload)
        with self._lock:
            while data:
                data = data[os.write(self.fd, data) :]
