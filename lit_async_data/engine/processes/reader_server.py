"""The program of a reader process, `main`, and `ReaderServer`: its threads, which carry out tasks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from lit_async_data.batch.spec import Array
from lit_async_data.engine.pipeline.pipeline import ReadTask
from lit_async_data.engine.pipeline.sample_reader import ReaderSetup
from lit_async_data.engine.processes import shared_memory
from lit_async_data.engine.processes.shared_memory import Report, ReportKind, Reports, SharedSlots, Task
from lit_async_data.engine.supervisor import ThreadWorker
from lit_async_data.errors import SourceError
from lit_async_data.order.plan import BatchIndex, KeyedSamples
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.system import POLL_S

# Types of the attributes of a log record that are sent; others may not be known elsewhere.
_PLAIN = str, int, float, bool, type(None), list


class LogToParent(logging.Handler):
    def __init__(self, reports: Reports) -> None:
        super().__init__()
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        try:
            plain = {name: value for name, value in vars(record).items() if type(value) in _PLAIN}
            plain |= {"msg": record.getMessage(), "exc_text": None}
            if record.exc_info:
                plain["msg"] += "\n" + logging.Formatter().formatException(record.exc_info)
            self._reports.send(Report(ReportKind.LOG), pickle.dumps(plain))
        except Exception:  # noqa: BLE001  # as every handler: logging raises nothing
            self.handleError(record)


class ReaderServer:
    """Carries out tasks, and reports each. ``process`` is the number of the process in its loader."""

    def __init__(self, setup: ReaderSetup, slots: SharedSlots, tasks: int, reports: Reports, *, process: int) -> None:
        self._slots, self._tasks, self._reports, self._process = slots, tasks, reports, process
        self._first = process * setup.plan.workers.most_threads  # the number of the first thread in the loader
        # Guards everything below; notified when another setup has come.
        self._lock = threading.Condition()
        self._threads: list[ThreadWorker] = []
        self._readers = 0  # the processes that share the memory for decoded chunks
        self._release: Callable[[], None] = lambda: None
        self._cursor: BatchIndex | None = None  # the batch after the last task that was taken
        self._reading: dict[int, BatchIndex] = {}  # the first batch of each thread that reads
        self.renew(setup)
        reports.send(Report(ReportKind.READY))  # before a thread takes a task, which may end this process
        with self._lock:
            self._start_threads()

    def renew(self, setup: ReaderSetup) -> None:
        """Read by another setup; the training process drops the results of earlier tasks."""
        if setup.around is not None:
            setup.around.share(self._slots.deadly, self._slots.tried(self._process))
        with self._lock:
            self._setup, self._readers = setup, 0
            self._lock.notify_all()

    def check(self) -> None:
        with self._lock:  # a thread that is one too many leaves the list under it, and then ends
            for thread in self._threads:
                thread.check()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        for number in range(len(self._threads), int(self._slots.now[shared_memory.THREADS])):
            self._threads.append(ThreadWorker(self._first + number, self._work))
            self._threads[-1].start()

    def _work(self, thread: ThreadWorker) -> bool:
        """Carry out one task; False if the thread is one too many, or there will be no more."""
        began = time.perf_counter()
        # The system wakes one thread for a task, and gives it a whole record.
        data = os.read(self._tasks, shared_memory.TASK_BYTES)
        if not data:
            return False
        task, idle_s = Task.unpacked(data), CLOCK.waited(began)
        with self._lock:
            self._lock.wait_for(lambda: self._setup.number >= int(self._slots.now[shared_memory.SETUP]))
            self._reserve(task.share.readers)
            reading = self._begun(task, thread.number)
        thread.begin(reading)
        payload = b""
        wanted = task.generation == self._slots.now[shared_memory.GENERATION]
        if wanted:
            read, memory = functools.partial(self._read, task, reading), self._slots.slot(task.slot)
            # No name holds the result: see `Pipeline._fill`.
            payload = shared_memory.packed_results(reading.run(read, self._setup.plan.layout, memory).batches)
        report = Report(ReportKind.DONE, 0, task.slot, task.key.step, CLOCK.take(), idle_s)
        self._reports.send(report, payload)
        with self._lock:
            del self._reading[thread.number]
        if wanted and not task.around:
            self._decode_and_fetch(task, reading)
        thread.rest()
        with self._lock:
            if thread.number - self._first >= self._slots.now[shared_memory.THREADS]:
                self._threads.remove(thread)
                return False
            self._start_threads()
        return True

    # -- reading -----------------------------------------------------------------------------------------------------

    def _reserve(self, readers: int) -> None:
        if readers != self._readers:
            release = self._setup.plan.reserve(self._setup.read.source, readers)
            self._release()
            self._readers, self._release = readers, release

    def _begun(self, task: Task, thread: int) -> ReadTask:
        schedule, (epoch, step) = self._setup.schedule.limited(task.limits), task.key
        keys = [BatchIndex(epoch, step + number) for number in range(task.batches)]
        self._reading[thread] = task.key
        self._slots.slot(task.slot)  # maps it, which one thread at a time may do
        if not task.around:
            self._cursor = schedule.following(keys[-1])
        # Only a process with the whole slot reads around bad samples.
        source, around = self._setup.read.source, None if self._is_share(task) else self._setup.around
        return ReadTask(task.slot, keys, schedule, task.generation, thread, source, around, task.row, task.around)

    def _is_share(self, task: Task) -> bool:
        return self._setup.plan.workers.shared and task.share.readers > 1 and not task.around

    def _read(self, task: Task, reading: ReadTask, keyed: KeyedSamples, out: Mapping[str, Array]) -> None:
        setup, rows = self._setup, None
        if self._is_share(task):
            plan = reading.schedule.plan(keyed.epoch)
            first, _ = plan.bounds(reading.reading[0].key.step)
            rows = setup.plan.shares.own(plan, first, keyed.samples, task.share)
            if not len(rows):
                return
            keyed = keyed[rows]
        if reading.around is None and setup.around is not None and setup.around.knows(keyed.samples):
            raise SourceError("known to be bad")  # then one process reads the slot again, around the sample
        setup.read(keyed, out, rows)

    def _decode_and_fetch(self, task: Task, reading: ReadTask) -> None:
        """Prepare the next batches; do nothing if other processes may get their slots."""
        ahead = self._setup.ahead
        if ahead is None or (task.share.readers > 1 and not self._setup.plan.workers.shared):
            return
        with self._lock:
            unread = min(self._reading.values(), default=self._cursor)
        assert unread is not None
        ahead(reading.schedule, reading.keys, unread, task.share)


IGNORED = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
PR_SET_NAME = 15


def main() -> NoReturn:
    parent, number, control_fd, lifeline, reports_fd, tasks, setup_fd, slots = map(int, sys.argv[1:])
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"lit_data reader", 0, 0, 0)
    reports = Reports(reports_fd)
    logging.getLogger().addHandler(LogToParent(reports))
    logging.captureWarnings(capture=True)
    try:
        setup = shared_memory.loaded(setup_fd)
        memory = SharedSlots(setup.plan.layout.nbytes, slots)
        server = ReaderServer(setup, memory, tasks, reports, process=number)
        control = socket.socket(fileno=control_fd)
        control.settimeout(POLL_S)
        while os.getppid() == parent:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            except TimeoutError:
                server.check()
                continue
            if not message:
                break
            if message == shared_memory.ASKED:
                faulthandler.dump_traceback(descriptors[0])
                os.close(descriptors[0])
            else:
                server.renew(shared_memory.loaded(descriptors[0]))
    except BaseException as error:  # noqa: BLE001  # the parent raises it
        reports.send(Report(ReportKind.FAILED), shared_memory.packed({0: error}))
    # Threads may be inside a read that does not return, and shared memory needs no clean-up.
    os._exit(0)
