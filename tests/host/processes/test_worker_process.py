"""One worker process: what it answers, also when it ends; and who ends it when there are too many."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from lit_async_data.errors import WorkerError
from lit_async_data.host.processes.child import worker_processes
from lit_async_data.host.processes.child.worker_processes import NotBegunError, WorkerProcess, WorkerProcesses
from lit_async_data.host.processes.ipc.messages import Command, CommandKind, Report, ReportKind

READ = Command(CommandKind.READ)
ENDED = "worker process 7 was killed by SIGKILL"


class FakeChannel:
    """A pipe whose reports the test puts, one list for each `receive`; an error ends it."""

    pid = 7

    def __init__(self, _process):
        self.broken, self.reports = False, queue.SimpleQueue()

    def open(self, *_): ...

    def close(self): ...

    def send(self, command):
        if self.broken:
            raise WorkerError(ENDED)

    def wait(self, _timeout): ...

    def receive(self):
        found = [] if self.reports.empty() else self.reports.get()
        if isinstance(found, WorkerError):
            raise found
        return found


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(worker_processes, "Channel", FakeChannel)
    return WorkerProcess(0, 0, None, None)


def test_a_command_that_is_carried_out_says_what_was_done(process):
    assert not process.ready(wait=False)
    process._channel.reports.put([(Report(ReportKind.READY), b"")])
    assert process.ready(wait=True)
    process._channel.reports.put([(Report(ReportKind.DONE, stored=3), b"")])
    assert process.carry_out(READ).stored == 3


@pytest.mark.parametrize("before", [False, True])
def test_a_process_that_has_ended_says_whether_it_had_begun(process, before):
    process._channel.broken = before
    process._channel.reports.put(WorkerError(ENDED))
    with pytest.raises(WorkerError, match=ENDED) as caught:
        process.carry_out(READ)
    assert isinstance(caught.value, NotBegunError) is before
    assert str(process.ended) == ENDED


def test_a_process_that_ends_while_it_starts_is_an_error_at_once(process):
    process._channel.reports.put(WorkerError(ENDED))
    with pytest.raises(WorkerError, match=ENDED):
        process.ready(wait=False)


class FakeProcess:
    """A worker process that is ready at once."""

    def __init__(self, number, **_):
        self.number, self.ended, self.closed = number, None, 0

    def ready(self, *, wait):
        return True

    def close(self):
        self.closed += 1


class Failing(FakeProcess):
    def ready(self, *, wait):
        raise WorkerError("worker process 8 ended")


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(worker_processes, "WorkerProcess", FakeProcess)
    plan = SimpleNamespace(workers=SimpleNamespace(processes=2, threads=2), reserve=lambda source: None)
    read = SimpleNamespace(shares_chunks=False, source=None, read_raw=None)
    return WorkerProcesses(SimpleNamespace(plan=plan, read=read), 0, SimpleNamespace(notes=[]), None)


def test_a_process_that_a_thread_uses_is_ended_by_that_thread(workers):
    """1. Thread 1 uses its process. 2. There shall be one worker. 3. Thread 1 is done."""
    processes = [workers._process(number) for number in range(2)]
    with workers._seats[1]:
        workers.set_workers(1)
        assert [process.closed for process in processes] == [1, 0]
    workers._end_unused()
    assert [process.closed for process in processes] == [1, 1]


def test_one_that_fails_to_start_is_named_and_leaves_room_for_another(workers, monkeypatch, caplog):
    monkeypatch.setattr(workers, "_start", Failing)
    assert workers._process(1) is None
    assert caplog.messages == [
        "worker process 8 ended, while it started; the reader process reads itself until another one has started"
    ]
    assert workers._processes == [None, None]
