"""`ProcessPipeline`: slots in shared memory that reader processes fill; `pipeline_of`: threads or processes.

The training process owns the slots and the order. It gives tasks to processes, which report each by their `Channel`.
See docs/design/engine.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine import resources, supervisor
from lit_async_data.engine.pipeline.pipeline import LENT, Activity, BatchResult, FilledSlot, Pipeline, ReadTask, told
from lit_async_data.engine.pipeline.sample_reader import ReadAround, ReaderSetup, is_of_a_sample
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline, reading_of
from lit_async_data.engine.processes import shared_memory
from lit_async_data.engine.processes.shared_memory import Report, ReportKind, SharedSlots, Task, Unplanned
from lit_async_data.engine.supervisor import FREED_S, ThreadWorker, all_ended
from lit_async_data.errors import SourceError, WorkerError
from lit_async_data.options import LoaderOptions
from lit_async_data.order.plan import BatchIndex, Share
from lit_async_data.sources.contract.stage_clock import CLOCK, NO_WORK, Work
from lit_async_data.sources.local_files import advice_on
from lit_async_data.system import OURS

if TYPE_CHECKING:
    import torch


# Variables that keep libraries from starting threads for each batch.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
# Seconds that a process has to send the stacks of its threads.
STACKS_S = 1.0
# Bytes of reports that are read at a time.
READ_BYTES = 2**16

log = logging.getLogger(__name__)

E = TypeVar("E", socket.socket, io.FileIO)


class Channel:
    """Starts a reader process, which reads by the `ReaderSetup` in a file, and ends it. One thread at a time."""

    def __init__(self, number: int, setup: int, slots: SharedSlots) -> None:
        # Allocated once: a new buffer for each batch took up to 0.7 ms.
        self._buffer = bytearray(READ_BYTES)
        self._data = b""
        # The error with which the process has ended, and another one would end.
        self.failure: BaseException | None = None
        self.ready = False  # whether the process takes tasks
        try:
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as its:

                def ends(one: E, other: E) -> tuple[E, int]:
                    return ours.enter_context(one), its.enter_context(other).fileno()

                self.control, control = ends(*socket.socketpair())
                # At its end the system kills the process.
                self.lifeline, lifeline = ends(*socket.socketpair())
                self.reports, reports = ends(*_pipe())
                self.tasks, tasks = ends(*reversed(_pipe()))
                os.set_blocking(self.reports.fileno(), False)
                descriptors = control, lifeline, reports, tasks, setup, slots.fd
                self.process = _started(descriptors, number)
                ours.pop_all()
        except OSError as error:
            advice = advice_on(error) or f"{error}; raise the system's limit on processes"
            raise WorkerError(f"a reader process could not be started: {advice}, or set worker_kind=thread") from error

    @property
    def pid(self) -> int:
        return self.process.pid

    def renew(self, setup: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` finds that it has ended
            socket.send_fds(self.control, [shared_memory.RENEWED], [setup])

    def receive(self) -> list[tuple[Report, bytes]]:
        """The reports that have arrived, with payloads; logs log records. A WorkerError if the process has ended."""
        count = self.reports.readinto(self._buffer)
        if count is None:  # nothing has arrived
            return []
        found = []
        self._data += self._buffer[:count]
        while len(self._data) >= shared_memory.REPORT_BYTES:
            kind, length, slot, step, *work, idle_s = shared_memory.REPORT.unpack_from(self._data)
            if (end := shared_memory.REPORT_BYTES + length) > len(self._data):
                break
            payload, self._data = self._data[shared_memory.REPORT_BYTES : end], self._data[end:]
            if kind == ReportKind.READY:
                self.ready = True
            elif kind == ReportKind.LOG:
                record = logging.makeLogRecord(pickle.loads(payload))  # noqa: S301  # from the reader process
                logging.getLogger(record.name).handle(record)
            elif kind == ReportKind.FAILED:
                self.failure = shared_memory.unpacked(payload, self.pid)[0]
            else:
                found.append((Report(kind, length, slot, step, Work(*work), idle_s), payload))
        if not count and not found:
            raise self._ended()
        return found

    def stacks(self) -> str:
        found = "no answer: it is stopped, has not started yet, or C code in it holds the GIL\n"
        ours, its = socket.socketpair()
        with ours, its, contextlib.suppress(OSError):  # the process takes too long, or has ended
            socket.send_fds(self.control, [shared_memory.ASKED], [its.fileno()])
            its.close()
            ours.settimeout(STACKS_S)
            found = b"".join(iter(lambda: ours.recv(2**16), b"")).decode(errors="replace")
        return f"the threads of reader process {self.pid}:\n{found}"

    def _ended(self) -> WorkerError:
        if (failure := self.failure) is not None:
            error = WorkerError(f"reader process {self.pid} failed: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
            return error
        return WorkerError(f"reader process {self.pid} {supervisor.how_it_ended(self.process)}")


def close(channels: Sequence[Channel]) -> None:
    """End processes, within two seconds. Idempotent."""
    for channel in channels:
        with contextlib.suppress(OSError):  # the process has ended, or this is the second call
            channel.control.shutdown(socket.SHUT_RDWR)  # a fork of this process may keep it open
        for end in (channel.control, channel.reports, channel.tasks):
            end.close()
    supervisor.end([channel.process for channel in channels])
    for channel in channels:
        channel.lifeline.close()


def _started(descriptors: Iterable[int], number: int) -> subprocess.Popen[bytes]:
    # The child finds modules where this process does. Without -P it would look in the working directory first.
    variables = shared_memory.environment() | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    variables |= dict.fromkeys(ONE_THREAD, "1")
    # Several arenas of malloc hold more than is in use: 16 MiB of 138, where two threads decode gzip.
    variables.setdefault("MALLOC_ARENA_MAX", "1")
    code = "from lit_async_data.engine.processes.reader_server import main; main()"  # -m would make two modules of it
    program = [sys.executable, "-P", "-c", code, *map(str, (os.getpid(), number, *descriptors))]
    # A process group of its own: Ctrl-C in a terminal does not reach it, even while it starts.
    return subprocess.Popen(  # noqa: S603  # our own program
        program, pass_fds=tuple(descriptors), env=variables, stdin=subprocess.DEVNULL, process_group=0
    )


def wait_for_reports(pipes: Iterable[int], timeout: float) -> None:
    """Wait until a report arrives by one of these descriptors, or a process ends."""
    poll = select.poll()  # not `select`, which takes no descriptors from 1024 on
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    poll.poll(1e3 * timeout)


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    read, write = os.pipe()
    return io.FileIO(read, "rb"), io.FileIO(write, "wb")


# The most tasks in the pipe to a process: one page, the smallest pipe of Linux, holds them. A write to a full pipe
# would wait until the process has read all of it.
MOST_TASKS = 32


@dataclasses.dataclass
class _Reader:
    number: int
    channel: Channel
    # Tasks without a report, in order, by slot and first step: the threads of the process work on the first ones, and
    # only the first `MOST_TASKS` are in the pipe.
    tasks: dict[tuple[int, int], Task] = dataclasses.field(default_factory=dict)
    since: float = 0.0  # the `time.monotonic` of the last report, or of the first task
    ended: int = 0  # processes of this number that have ended since the last report, before a task


@dataclasses.dataclass
class _Filling:
    keys: Sequence[BatchIndex]
    edges: Sequence[int]  # the first row of each batch, and the end of the last
    generation: int
    left: int  # tasks without a report
    unplanned: dict[int, Unplanned] = dataclasses.field(default_factory=dict)  # by number of the batch in the slot
    work: Work = NO_WORK
    seconds: float = 0.0  # of the longest task
    deaths: int = 0  # processes that have ended while they read a share


class ProcessPipeline(Pipeline):
    """Batches that reader processes read ahead, in order. One consumer at a time.

    With `AroundBadSamples`, a sample that ends more processes than ``restarts`` is bad.

    Args:
        pin: Pins the memory of a slot until it is freed.
        restarts: Times that a batch which ended a process is read again, or a process without a task is replaced.
    """

    _not_forked = "its reader process does not serve it; build it in the child"

    def __init__(
        self, setup: ReaderSetup, *, pin: Callable[[Bytes], None] | None = None, timeout_s: float, restarts: int = 1
    ) -> None:
        super().__init__(setup, timeout_s=timeout_s)
        self._workers, self._pin, self._restarts = setup.plan.workers, pin, restarts
        self._source = setup.read.source
        # The lock guards everything below.
        self._started = False
        self._readers: list[_Reader] = []
        # The number of processes to have, and the number of processes that get slots.
        self._wanted = self._dealing = self._workers.threads if self._workers.apart else 1
        self._threads = 1 if self._workers.apart else self._workers.threads  # of each process
        self._vacant: list[int] = []  # slots taken from the pool, for which no process has room
        self._filling: dict[int, _Filling] = {}
        self._was_starved = 0  # `_starved` when the last report came
        self._first = ThreadWorker(0, self._read_here)
        self._first_task: ReadTask | None = None
        with contextlib.ExitStack() as opened:
            self._stored = opened.enter_context(shared_memory.stored(setup))
            self._memory = SharedSlots(self.layout.nbytes)
            opened.callback(self._memory.close)
            self._memory.now[shared_memory.THREADS] = self._threads
            self._add_slots(min(self._slots, self._most_slots))
            opened.pop_all()

    def _take_setup(self, setup: ReaderSetup) -> None:
        setup = dataclasses.replace(setup, number=self.setup.number + 1)
        self._stored, before = shared_memory.stored(setup), self._stored
        before.close()
        for reader in self._readers:
            reader.channel.renew(self._stored.fileno())
        self._memory.now[shared_memory.SETUP] = setup.number  # threads wait for this setup before they take a task
        super()._take_setup(setup)

    def prefetch(self, key: BatchIndex) -> None:
        with self._lock:
            if self._closed:
                self.check()
            if not self._started:
                self._add_readers()
                self._started = True
                self._seek(key)
                if self._reads_first:
                    self._begin_here()
            if next(iter(self._claimed), self._cursor) != key:
                self._seek(key)
            self._give_tasks()

    def poll(self, key: BatchIndex) -> FilledSlot | None:
        with self._lock:
            for reader in () if self._closed else tuple(self._readers):  # it may have been closed by another thread
                try:
                    reports = reader.channel.receive()
                except WorkerError as error:
                    self._replace(reader, error)
                    break  # there may be fewer now
                for report, payload in reports:
                    reader.ended, reader.since = 0, time.monotonic()
                    starved, self._was_starved = self._starved != self._was_starved, self._starved
                    idle_s = (report.idle_s, 0.0) if starved else (0.0, report.idle_s)
                    work = report.work._replace(slot_s=idle_s[0], loop_s=idle_s[1])
                    results = shared_memory.unpacked(payload, reader.channel.pid) if payload else None
                    task = reader.tasks.pop((report.slot, report.step))
                    if len(reader.tasks) >= MOST_TASKS:
                        self._send(reader, [*reader.tasks.values()][MOST_TASKS - 1])
                    self._done(task, work, results)
                    if task.deaths:
                        self._set_threads()
            if len(self._readers) > self._dealing:
                self._close_unused()
            return super().poll(key)

    def _wait(self, key: BatchIndex, seconds: float) -> None:
        with self._lock:
            self._grow()
            pipes = [reader.channel.reports.fileno() for reader in self._readers]  # another thread may close them
            all_given = not self.pool.count(LENT)
        # A slot that the user frees in another thread is given to a reader soon, and the first one is no report.
        wait_for_reports(pipes, seconds if all_given and not self._first.alive else FREED_S)
        self.prefetch(key)

    def _end_workers(self) -> None:
        with self._lock:
            self._stored.close()
            try:
                close([reader.channel for reader in self._readers])
            finally:
                self._memory.close()
        all_ended([self._first])

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def _reads_first(self) -> bool:
        """Whether a thread of this process reads the first slot, while processes start.

        Not if that runs Python code of the user, takes a lock, or decodes a chunk that a process would decode again.
        """
        chunks, first = self._source.chunks, self._cursor
        if self._workers.apart or chunks.reading == "locked" or first is None:
            return False
        return chunks.rows == 1 or (chunks.spread == 1 and self.setup.plan.shares.end_with(self.schedule, first))

    def _begin_here(self) -> None:
        try:
            self._first.start()
        except WorkerError:  # the system refuses another thread
            return
        slot, *self._vacant = self.pool.take_all()
        self._first_task = self._task(slot, 0)

    def _read_here(self, worker: ThreadWorker) -> bool:
        with self._lock:  # `prefetch` holds it until there is a task
            task, self._first_task = self._first_task, None
        if task is not None:
            worker.begin(task)
            CLOCK.start()
            self._fill(task)
        return False

    def _add_readers(self) -> None:
        for number in range(len(self._readers), self._wanted):
            self._readers.append(_Reader(number, Channel(number, self._stored.fileno(), self._memory)))

    def set_workers(self, count: int) -> None:
        with self._lock:
            if not self._workers.apart:
                self._threads = count
                self._set_threads()
                return
            self._wanted = count
            self._add_readers()  # they get no tasks before they have started

    def _close_unused(self) -> None:
        unused = []
        while len(self._readers) > max(self._wanted, self._dealing) and not self._readers[-1].tasks:
            unused.append(self._readers.pop().channel)
        close(unused)

    def _set_threads(self) -> None:
        """Have one thread in each process while a task is read again, to know which task ends a process."""
        suspects = any(task.deaths for reader in self._readers for task in reader.tasks.values())
        self._memory.now[shared_memory.THREADS] = 1 if suspects else self._threads

    def _begun(self, reader: _Reader) -> list[Task]:
        """The tasks that threads of a process may have begun: they take tasks in order."""
        tasks = list(reader.tasks.values())
        alone = tasks and tasks[0].deaths
        most = 1 if alone else min(self._workers.most_threads, MOST_TASKS)
        return tasks[:most] if reader.channel.ready else []

    def _all_read(self) -> bool:
        return self._dealing == self._wanted  # a process may take many seconds to import the modules of its source

    def _replace(self, reader: _Reader, error: WorkerError) -> None:
        """Give the tasks of a process that has ended to a new one, unless that would end, too."""
        begun = self._begun(reader)
        named = self._named(error, reader, begun)
        reader.ended = 0 if begun else reader.ended + 1
        if reader.channel.failure is not None or reader.ended > self._restarts:
            if reader.tasks or reader.number < self._dealing:
                raise named
            log.warning("%s; reading goes on with %d", named, self._dealing)
            self._wanted = self.worker_count = self._dealing
            if self._tuner is not None:
                self._tuner.stay(self._dealing)
            self._close_unused()
            return
        # Whether a sample that was read by itself ended the process, and is bad from now on.
        alone = [task.around and task.deaths >= self._restarts > 0 for task in begun]
        bad = [each and self._memory.condemn(reader.number) for each in alone]
        self._memory.tried(reader.number)[0] = 0
        if begun:
            self._memory.now[shared_memory.THREADS] = 1
        channel = Channel(reader.number, self._stored.fileno(), self._memory)
        log.warning("%s; a new one takes its place", named)
        close([reader.channel])
        reader.channel, tasks, reader.tasks = channel, list(reader.tasks.values()), {}
        for place, task in enumerate(tasks):
            if task.generation != self._generation:
                self._done(task)
            elif place >= len(begun):
                self._send(reader, task)
            elif bad[place]:
                self._send(reader, task._replace(deaths=0))
            else:
                self._read_again(reader, task._replace(deaths=task.deaths + 1), named)
        self._set_threads()

    def _read_again(self, reader: _Reader, task: Task, error: WorkerError) -> None:
        filling = self._filling[task.slot]
        if task.deaths > self._restarts:
            error.in_its_place = True
            self._done(task, results=dict.fromkeys(range(task.batches), error))
        elif self._is_read_around(task):
            filling.deaths = task.deaths  # all shares are read again by one process
            self._done(task, results=dict.fromkeys(range(task.batches), SourceError(str(error))))
        elif self.setup.around is not None:
            self._send(reader, task._replace(around=True))
        else:
            first = task.key.step - filling.keys[0].step
            filling.left += task.batches - 1
            for number in range(first, first + task.batches):
                key, row = filling.keys[number], filling.edges[number]
                self._send(reader, task._replace(key=key, row=row, batches=1))

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _seek(self, key: BatchIndex) -> None:
        super()._seek(key)
        self._memory.now[shared_memory.GENERATION] = self._generation

    def _add_slots(self, count: int) -> None:
        for slot in self._memory.add(count):
            if self._pin is not None:
                self._pin(slot)  # this array, which `HostBatch.memory` keeps: views refer to another
            self.pool.add(slot)

    def _give_tasks(self) -> None:
        self._vacant += self.pool.take_all()
        while self._vacant:
            readers = self._readers if self._dealing == self._wanted == len(self._readers) else self._dealt_to()
            if len(readers) > 1 and not self._workers.shared:
                readers = [min(readers, key=lambda reader: len(reader.tasks))]
            for reader in readers:
                if len(reader.tasks) >= MOST_TASKS:
                    return
            slot, keys = self._vacant.pop(), self._claim()
            plan, edges = self.schedule.plan(keys[0].epoch), [0]
            for key in keys:
                edges.append(edges[-1] + (plan.batch_size if key.step < plan.whole_steps else plan.count(key.step)))
            self._filling[slot] = _Filling(keys, edges, self._generation, len(readers))
            for reader in readers:
                share = Share(reader.number, self._dealing)
                self._send(reader, Task(slot, self._generation, keys[0], len(keys), 0, share, self.schedule.limits))

    def _dealt_to(self) -> list[_Reader]:
        started = self._dealing
        while started < len(self._readers) and self._readers[started].channel.ready:
            started += 1
        count = min(started, self._wanted)
        if count != self._dealing:
            self._dealing = count
            self._close_unused()
        return self._readers[: self._dealing]

    @staticmethod
    def _send(reader: _Reader, task: Task) -> None:
        at = task.slot, task.key.step
        fits = len(reader.tasks) < MOST_TASKS or at in reader.tasks  # else it is sent when there is room in the pipe
        reader.since = reader.since if reader.tasks else time.monotonic()
        reader.tasks[at] = task
        if fits:
            with contextlib.suppress(BrokenPipeError):  # `receive` finds that the process has ended
                reader.channel.tasks.write(task.packed())

    def _next_coalesced(self, batches: int, seconds: float) -> int:
        # Shares of as many batches as processes take as long as one whole batch.
        least = min(self._dealing, self.layout.batches) if self._workers.shared else 1
        return max(super()._next_coalesced(batches, seconds), least)

    def _done(self, task: Task, work: Work = NO_WORK, results: Mapping[int, Unplanned] | None = None) -> None:
        filling = self._filling[task.slot]
        filling.left -= 1
        filling.work = work if filling.work is NO_WORK else filling.work.plus(work)
        filling.seconds = max(filling.seconds, work.seconds)
        for number, result in (results or {}).items():
            filling.unplanned.setdefault(task.key.step - filling.keys[0].step + number, result)
        if filling.left:
            return
        unplanned = filling.unplanned
        errors = [each for each in unplanned.values() if isinstance(each, Exception)] if unplanned else []
        if errors and self._is_read_around(task) and all(map(is_of_a_sample, errors)):
            self._read_around(task)
            return
        del self._filling[task.slot]
        batches = []
        for number, (key, (begin, end)) in enumerate(zip(filling.keys, itertools.pairwise(filling.edges), strict=True)):
            came = unplanned.get(number)
            if isinstance(came, ReadAround):
                batches.append(BatchResult(key, begin, len(came.samples), around=came))
            else:
                batches.append(BatchResult(key, begin, end - begin, came))
        filled = FilledSlot(task.slot, batches, len(batches) - len(errors))
        self._file(filled, filling.generation, filling.work, filling.seconds)

    def _is_read_around(self, task: Task) -> bool:
        """Whether one process reads the slot again, around bad samples, if this share of it fails."""
        is_share = self._workers.shared and task.share.readers > 1 and not task.around
        return is_share and self.setup.around is not None and task.generation == self._generation

    def _read_around(self, task: Task) -> None:
        # There may be fewer processes by now: processes without tasks are closed.
        readers = self._readers[: task.share.readers]
        filling, reader = self._filling[task.slot], readers[task.slot % len(readers)]
        filling.left = 1
        filling.unplanned.clear()
        share = task.share._replace(reader=reader.number)
        self._send(reader, task._replace(share=share, around=True, deaths=filling.deaths))

    # -- activities --------------------------------------------------------------------------------------------------

    def _readings(self) -> list[Activity]:
        found = [reading_of(self._first)] if self._first.alive else []
        for reader in self._readers:
            who, worker = f"reader process {reader.channel.pid}", {"worker": reader.number}
            if not (begun := self._begun(reader)):
                tasks = list(reader.tasks.values())[:1]
                words = f"{who} reads nothing, and has {len(reader.tasks)} tasks"
                if not reader.channel.ready:
                    words = f"{who} is starting: it imports the modules of the source and of transforms"
                found.append(Activity(words, tasks[0].key if tasks else None, where=worker))
            for task in begun:
                said, where = self._told(task)
                words = f"{who} reads {said}, for {time.monotonic() - reader.since:.1f} s"
                found.append(Activity(words, task.key, reader.since, where | worker))
        return found

    def _told(self, task: Task) -> tuple[str, dict[str, Any]]:
        """The batches of a task and its first sample, in words and as attributes of an error."""
        plan = self.schedule.limited(task.limits).plan(task.key.epoch)
        samples = plan.stretch(task.key.step, task.batches)[0].samples
        return told(self._source, task.key, task.batches, samples)

    def _named(self, error: WorkerError, reader: _Reader, begun: Sequence[Task]) -> WorkerError:
        read = [self._told(task) for task in begun]
        reading = f", while it read {' or '.join(said for said, _ in read)}" if read else ""
        file = read[0][1]["file"] if read else None
        named = WorkerError(f"{error}{reading}", stage="read", worker=reader.number, file=file)
        named.__cause__ = error.__cause__
        return named

    def _dump_stacks(self) -> None:
        super()._dump_stacks()
        for reader in self._readers:
            with contextlib.suppress(OSError):  # no more descriptors, or standard error is closed
                os.write(2, f"{OURS}: {reader.channel.stacks()}".encode())


def pipeline_of(setup: ReaderSetup, *, pin: torch.device | None, options: LoaderOptions) -> Pipeline:
    """A pipeline of threads or processes, for whose slots ``pin`` is the device that copies from them."""
    pipeline: Pipeline
    if setup.plan.workers.kind == "process":
        # torch pins memory that it did not allocate for CUDA only.
        register = functools.partial(resources.register, device=pin) if pin is not None and pin.type == "cuda" else None
        pipeline = ProcessPipeline(setup, pin=register, timeout_s=options.timeout_s, restarts=options.restarts)
    else:
        allocate = functools.partial(resources.allocated, setup.plan.layout.nbytes, pinned=pin is not None)
        pipeline = ThreadPipeline(setup, allocate, timeout_s=options.timeout_s)
    pipeline.warn_after_s = options.warn_after_s
    return pipeline
