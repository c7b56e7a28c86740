"""`ReaderProcess`: its start and end, and the stacks of its threads; `Channel`: a loader's way to it."""

from __future__ import annotations

import array
import contextlib
import io
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

from lit_async_data.engine import supervisor
from lit_async_data.engine.processes.messages import (
    ASKED,
    OPENED,
    REPORT_BYTES,
    Report,
    ReportKind,
    Task,
    unpacked_errors,
)
from lit_async_data.engine.processes.setup import environment
from lit_async_data.engine.processes.shared_slots import SharedSlots
from lit_async_data.engine.resources.memory import out_of_memory_kills
from lit_async_data.engine.supervisor import hindered, how_it_ended
from lit_async_data.errors import WorkerError
from lit_async_data.sources.local_files import advice_on
from lit_async_data.system import ProcessGuard

# Libraries that would start threads of their own for each batch.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
# Seconds in which a process is to say the stacks of its threads.
STACKS_S = 1.0


class ReaderProcess:
    """A reader process, which loaders share, by its number among those of a loader.

    It starts with the first `Channel` that is opened, and ends with the last that is closed. If it died, it starts anew
    with the next one. Safe to use from several threads. A forked child begins with no process.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._guard = ProcessGuard()
        # Reentrant: garbage collection can close a loader inside any allocation.
        self._lock = threading.RLock()
        self._users: list[object] = []
        # Our ends of the control, and of a lifeline, at whose end the system kills the process.
        self._control: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, user: object, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """Pass descriptors to the process, started if need be, for a user who calls `leave` in the end."""
        if self._guard.forked:
            ReaderProcess.__init__(self, self._number)  # the lock may have been held when the fork was made
        with self._lock:
            if user not in self._users:
                self._users.append(user)
            if self._process is None or self._process.poll() is not None:
                self._end()
                try:
                    self._process = self._started()
                except OSError as error:
                    advice = advice_on(error) or f"{error}; raise the system's limit on processes"
                    what = f"a reader process could not be started: {advice}, or set worker_kind=thread"
                    raise WorkerError(what) from error
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the user finds that it has ended
                self._control[0].sendmsg([OPENED], rights)
            return self._process

    def keep(self, user: object) -> None:
        """Note a user, if the process has one."""
        if not self._guard.forked:
            with self._lock:
                self._users += [user] if self._users else []

    def leave(self, user: object) -> None:
        """Note that a user needs the process no more; the last one ends it, which takes two seconds at most."""
        if self._guard.forked:
            return
        with self._lock:
            if self._users in ([user], []):
                self._end()
            if user in self._users:
                self._users.remove(user)

    def stacks(self) -> str:
        """The stacks of its threads, as it says them; or that it does not answer in time."""
        ours, its = socket.socketpair()
        with ours, its, contextlib.suppress(OSError, IndexError):  # it takes too long, or has ended
            with self._lock:
                socket.send_fds(self._control[0], [ASKED], [its.fileno()])
            its.close()
            ours.settimeout(STACKS_S)
            return b"".join(iter(lambda: ours.recv(2**16), b"")).decode(errors="replace")
        return "no answer: it is stopped, has not started yet, or C code in it holds the GIL\n"

    def _started(self) -> subprocess.Popen[bytes]:
        pairs = [socket.socketpair() for _ in range(2)]
        self._control = [ours for ours, _ in pairs]
        control, lifeline = (its.fileno() for _, its in pairs)
        # The child finds modules where this process does. Without -P it would look in the working directory first.
        variables = {
            **environment(),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        variables |= dict.fromkeys(ONE_THREAD, "1")
        # Several arenas of malloc hold more than is in use: 16 MiB of 138, where two threads decode gzip.
        variables.setdefault("MALLOC_ARENA_MAX", "1")
        program = [sys.executable, "-P", "-m", "lit_async_data.engine.processes"]
        program += map(str, (control, lifeline, os.getpid(), self._number))
        try:
            # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
            return subprocess.Popen(  # noqa: S603  # our own program
                program, pass_fds=[control, lifeline], env=variables, stdin=subprocess.DEVNULL, process_group=0
            )
        finally:
            for _, its in pairs:
                its.close()

    def _end(self) -> None:
        for ours in self._control[:1]:
            ours.close()  # the process ends when its control does
        if self._process is not None:
            supervisor.end(self._process)
        for ours in self._control:
            ours.close()  # the lifeline, too
        self._process, self._control = None, []


class ReaderProcesses(dict[int, ReaderProcess]):
    """The reader processes that loaders share, by their numbers. A copy begins with none."""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Those that run do not end, though nobody uses them for a while."""
        user = object()
        with contextlib.ExitStack() as stack:
            for process in self.values():
                stack.callback(process.leave, user)
                process.keep(user)
            yield

    def __missing__(self, number: int) -> ReaderProcess:
        return self.setdefault(number, ReaderProcess(number))

    def __reduce__(self) -> tuple[type[ReaderProcesses], tuple[()]]:
        return type(self), ()


# Bytes that are read at a time.
READ_BYTES = 2**16

log = logging.getLogger(__name__)


class Channel:
    """A channel to a process for one loader, which it starts if need be. One thread at a time."""

    def __init__(self, process: ReaderProcess) -> None:
        self._process = process
        # Both ends of each pipe.
        self._end: Sequence[io.FileIO] = ()
        self._reports: Sequence[io.FileIO] = ()
        self._tasks: Sequence[io.FileIO] = ()
        self._running: subprocess.Popen[bytes] | None = None
        self._kills = out_of_memory_kills()  # before it starts
        # Allocated once: a new buffer for each batch took up to 0.7 ms.
        self._buffer = bytearray(READ_BYTES)
        self._data = b""
        # The error with which the process has ended: another one would raise it, too.
        self.failure: BaseException | None = None
        self.ready = False  # whether the process takes tasks

    def open(self, setup: int, slots: SharedSlots) -> None:
        """Have the process read what a `ReaderSetup` says, given by its descriptor."""
        try:
            self._end, self._reports, self._tasks = _pipe(), _pipe(), _pipe()
        except OSError as error:
            raise WorkerError(
                f"no pipe to a reader process: {error}; raise the limit on open files (ulimit -n), or "
                "set worker_kind=thread"
            ) from error
        os.set_blocking(self._reports[0].fileno(), False)
        os.set_blocking(self._tasks[0].fileno(), False)
        passed = (self._end[0], self._reports[1], *self._tasks)
        self._running = self._process.open(self, [setup, slots.fd, *(end.fileno() for end in passed)])
        for unused in (self._end[0], self._reports[1], self._tasks[0]):
            unused.close()

    @property
    def descriptor(self) -> int:
        """Readable when reports have arrived."""
        return self._reports[0].fileno()

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def send(self, task: Task) -> None:
        """Send a task. If the process has ended, `receive` says so."""
        with contextlib.suppress(BrokenPipeError):
            self._tasks[1].write(task.packed())

    def receive(self) -> list[tuple[Report, bytes]]:
        """The reports that have arrived, and their payloads; a `WorkerError` if the process has ended.

        Log records are logged here.
        """
        count = self._reports[0].readinto(self._buffer)
        if count is None:  # nothing has arrived
            return []
        found = []
        self._data += self._buffer[:count]
        while len(self._data) >= REPORT_BYTES:
            report = Report.unpacked(self._data)
            end = REPORT_BYTES + report.payload
            if end > len(self._data):
                break
            payload, self._data = self._data[REPORT_BYTES:end], self._data[end:]
            if report.kind == ReportKind.READY:
                self.ready = True
            elif report.kind == ReportKind.LOG:
                _log(payload)
            elif report.kind == ReportKind.FAILED:
                self.failure = unpacked_errors(payload, self.pid)[0]
            else:
                found.append((report, payload))
        if not count and not found:
            raise self._ended()
        return found

    def stacks(self) -> str:
        return f"the threads of reader process {self.pid}{hindered(self.pid)}:\n{self._process.stacks()}"

    def close(self) -> None:
        """Have the process read no more; it ends if nobody else uses it. Idempotent."""
        for end in self._end[1:]:
            with contextlib.suppress(OSError, ValueError):  # it has ended; or this is the second call
                end.write(b".")  # a fork of this process may keep the pipe open
        for end in (*self._end, *self._reports, *self._tasks):
            end.close()
        self._process.leave(self)

    def _ended(self) -> WorkerError:
        if (failure := self.failure) is not None:
            error = WorkerError(f"reader process {self.pid} failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        assert self._running is not None
        out_of_memory = out_of_memory_kills() > self._kills
        return WorkerError(f"reader process {self.pid} {how_it_ended(self._running, out_of_memory=out_of_memory)}")


def wait_for_reports(channels: Iterable[Channel], timeout: float) -> None:
    """Wait until a report arrives by one of these channels, or a process ends."""
    poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
    for channel in channels:
        poll.register(channel.descriptor, select.POLLIN)
    poll.poll(1e3 * timeout)


def _log(payload: bytes) -> None:
    try:
        record = pickle.loads(payload)  # noqa: S301  # from the reader process
    except Exception as error:  # noqa: BLE001  # objects in it may need arguments that they do not keep
        log.warning("a log record of another process could not be read: %s: %s", type(error).__name__, error)
    else:
        logging.getLogger(record.name).handle(record)


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    read, write = os.pipe()
    return io.FileIO(read, "rb"), io.FileIO(write, "wb")
