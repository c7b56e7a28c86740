"""One worker process, used by several threads: each gets its own answer, also when the process ends."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes.child import worker_process, worker_processes
from lit_async_data.host.processes.child.worker_process import NotBegunError, WorkerProcess
from lit_async_data.host.processes.child.worker_processes import WorkerProcesses
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, Report, ReportKind

READ = Command(CommandKind.READ)
ENDED = "worker process 7 was killed by SIGKILL"


class FakeChannel:
    """A pipe whose reports the test puts, one list for each `receive`; an error ends it."""

    pid = 7

    def __init__(self, _process):
        self.sent, self.broken = [], False
        self.reports = queue.SimpleQueue()
        self.waits = threading.Semaphore(0)

    def open(self, *_): ...

    def close(self): ...

    def send(self, command):
        if self.broken:
            raise WorkerError(ENDED)
        self.sent.append(command.generation)

    def wait(self, _timeout):
        self.waits.release()
        self._next = self.reports.get()

    def receive(self):
        found = self._next if hasattr(self, "_next") else []
        vars(self).pop("_next", None)
        if isinstance(found, WorkerError):
            raise found
        return found


def done(number):
    return Report(ReportKind.DONE, generation=number, stored=number), b""


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(worker_process, "Channel", FakeChannel)
    return WorkerProcess(0, 0, None, None)


def in_thread(function, *given):
    """Start a function in a thread; returns a queue of its result or error."""
    results = queue.SimpleQueue()

    def run():
        try:
            results.put(function(*given))
        except WorkerError as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    return results


def test_each_thread_gets_its_own_answer_whoever_receives_it(process):
    channel = process._channel
    first, second = process.send(READ), process.send(READ)
    later = in_thread(process.wait, second)
    assert channel.waits.acquire(timeout=60)  # it receives for both
    earlier = in_thread(process.wait, first)
    channel.reports.put([done(first)])
    assert earlier.get(timeout=60).stored == first
    channel.reports.put([done(second)])
    assert later.get(timeout=60).stored == second


def test_a_process_that_is_ready_is_so_while_another_thread_waits_for_it(process):
    channel = process._channel
    channel._next = [(Report(ReportKind.READY), b"")]
    assert process.ready(wait=False)
    answer = in_thread(process.wait, process.send(READ))
    assert channel.waits.acquire(timeout=60)
    assert process.ready(wait=True)  # without waiting for that answer
    channel.reports.put([done(1)])
    assert answer.get(timeout=60).stored == 1


def test_the_command_that_was_carried_out_at_the_end_fails_and_those_behind_it_had_not_begun(process):
    numbers = [process.send(READ) for _ in range(3)]
    process._channel.reports.put([done(numbers[0])])
    process._channel.reports.put(WorkerError(ENDED))
    assert process.wait(numbers[0]).stored == numbers[0]
    with pytest.raises(WorkerError, match=ENDED) as caught:
        process.wait(numbers[1])
    assert not isinstance(caught.value, NotBegunError)
    with pytest.raises(NotBegunError, match=ENDED):
        process.wait(numbers[2])
    with pytest.raises(WorkerError, match=ENDED):
        process.ready(wait=False)


def test_an_answer_that_came_before_the_end_is_not_lost_to_a_thread_that_finds_the_end(process):
    # 1. Thread A has sent a command. 2. The process carries it out, reports, and ends. 3. Thread B cannot send another
    # one, so it knows of the end. 4. A reads the report.
    first = process.send(READ)
    process._channel.broken = True
    process._channel.reports.put([done(first)])
    process._channel.reports.put(WorkerError(ENDED))
    with pytest.raises(NotBegunError, match=ENDED):
        process.send(READ)
    assert process.ended is not None
    assert process.wait(first).stored == first


def test_a_process_that_ends_while_it_starts_is_an_error_at_once(process):
    process._channel._next = WorkerError(ENDED)
    with pytest.raises(WorkerError, match=ENDED):
        process.ready(wait=False)


class FakeProcess:
    """A worker process that is ready at once, unless the test ends it before."""

    def __init__(self, number, **_):
        self.number, self.users, self.ended, self.closed = number, 0, None, 0
        self.was_ready = False

    def ready(self, *, wait):
        if self.ended is not None and not self.was_ready:
            raise self.ended
        self.was_ready = True
        return True

    def close(self):
        self.closed += 1


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(worker_processes, "WorkerProcess", FakeProcess)
    plan = SimpleNamespace(workers=SimpleNamespace(processes=2, threads=2), reserve=lambda source: None)
    read = SimpleNamespace(shares_chunks=False, source=None, read_raw=None)
    return WorkerProcesses(SimpleNamespace(plan=plan, read=read), 0, SimpleNamespace(notes=[]), None)


def test_a_process_that_has_ended_is_named_once_and_closed_by_the_last_thread_that_used_it(workers, caplog):
    """1. Thread A uses it. 2. So does B. 3. It ends. 4. C, which needs one, finds that. 5. A leaves it. 6. B does."""
    ended, _ = workers._taken(1), workers._taken(1)
    ended.ended = WorkerError(ENDED)
    new = workers._taken(1)
    workers._leave(ended)
    assert ended.closed == 0
    workers._leave(ended)
    workers._leave(new)
    assert caplog.messages == [f"{ENDED}; a new one starts when one is needed"]
    assert new is not ended
    assert (ended.closed, new.closed) == (1, 0)
    assert workers._taken(1) is new


def test_one_that_fails_to_start_is_named_and_leaves_room_for_another(workers, monkeypatch, caplog):
    class Failing(FakeProcess):
        def ready(self, *, wait):
            self.ended = WorkerError("worker process 8 ended")
            return super().ready(wait=wait)

    monkeypatch.setattr(workers, "_start", Failing)
    assert workers._taken(1) is None
    assert caplog.messages == [
        "worker process 8 ended, while it started; the reader process reads itself until another one has started"
    ]
    assert workers._processes == [None, None]
