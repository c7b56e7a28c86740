"""Threads as their owner sees them: starts, ends, stalls, waiting, and errors that nobody expected."""

import contextlib
import logging
import subprocess
import threading
from types import SimpleNamespace

import pytest
from support.failures import raising
from support.threads.interrupts import interrupted

from lit_async_data.engine import supervisor
from lit_async_data.engine.supervisor import ThreadWorker, awaited, report_once
from lit_async_data.errors import MemoryBudgetError, ReadError, SourceError, StoreError, WorkerError


def test_an_interrupt_while_the_end_of_a_thread_is_awaited_makes_nobody_wait_for_it_again():
    worker = ThreadWorker(0, lambda worker: False)
    worker.start()
    assert worker.join(60)
    for place in range(100):
        with contextlib.suppress(KeyboardInterrupt), interrupted(place):
            worker.join(60)
    assert worker.join(0)


def test_a_thread_that_cannot_be_started_is_an_error_at_once(monkeypatch):
    worker = ThreadWorker(0, lambda worker: False)
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    with pytest.raises(WorkerError, match="could not be started: can't start new thread"):
        worker.start()
    assert worker.join(0)


@pytest.mark.parametrize(
    ("comes_after", "warned"), [(0, []), (30, []), (31, [30.5]), (62, [30.5, 61.5]), (123, [30.5, 61.5]), (1e9, None)]
)
def test_a_wait_warns_whenever_it_has_doubled_and_ends_with_its_limit(comes_after, warned, monkeypatch):
    now, warnings = 0.0, []
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))

    def found(seconds):
        nonlocal now
        now += seconds  # time passes only here
        return "a batch" if now >= comes_after else None

    def late():
        raise TimeoutError(now)

    expected = contextlib.nullcontext() if warned is not None else pytest.raises(TimeoutError, match=r"200\.5")
    with expected:
        assert awaited(found, limit_s=200, late=late, warn_after_s=30, warn=warnings.append) == "a batch"
    assert warnings == ([30.5, 61.5, 123.5] if warned is None else warned)


class Stuck:
    """A process that waits for a dead disk; a wait for it takes all the time that it may."""

    def __init__(self, now):
        self.now, self.kills = now, 0

    def wait(self, timeout):
        self.now[0] += timeout
        raise subprocess.TimeoutExpired("", timeout)

    def kill(self):
        self.kills += 1


def test_any_number_of_processes_that_do_not_end_take_as_long_as_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    supervisor.end(stuck := [Stuck(now) for _ in range(4)])
    assert now == [2 * supervisor.PROCESS_S]
    assert all(process.kills for process in stuck)


def test_a_worker_that_is_given_up_before_it_begins_never_works(monkeypatch):
    """1. A thread is started. 2. An interrupt ends what waits for it; the worker is given up. 3. The thread begins."""
    worked, begun, go, start = [], [], threading.Event(), threading.Thread.start
    worker = ThreadWorker(0, worked.append)

    def late(thread):
        begun.append(thread)
        assert go.wait(30)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", late)
        patch.setattr(worker, "_launched", SimpleNamespace(wait=raising(KeyboardInterrupt), open=bool))
        with pytest.raises(KeyboardInterrupt):
            worker.start()
        assert not worker.join(0)
        go.set()
        assert worker.join(30)
    (thread,) = begun
    assert thread.ident is not None
    assert not thread.is_alive()
    assert not worked


def test_a_worker_that_is_given_up_is_so_also_where_that_was_interrupted():
    """1. `join` takes the worker's claim, and is interrupted. 2. It is called again."""
    worker = ThreadWorker(0, lambda worker: True)
    assert worker._claim.acquire(blocking=False)
    assert worker.join(30)
    worker.start()
    assert worker.join(30)


def test_whether_a_worker_lives_is_not_asked_of_its_thread(monkeypatch):
    """An interrupt inside that would make it take a living thread for a dead one, for ever (bpo-45274)."""
    begun, go = threading.Semaphore(0), threading.Semaphore(0)
    worker = ThreadWorker(0, lambda worker: begun.release() or not go.acquire())
    worker.start()
    begun.acquire()  # a thread that has not begun would never work, and `join` would ask it
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_wait_for_tstate_lock", None, raising=False)
        patch.setattr(threading.Thread, "is_alive", None)
        assert worker.alive
        assert "is waiting" in str(worker)
        assert not worker.join(0)
    go.release()
    assert worker.join(30)
    assert not worker.alive


@pytest.mark.parametrize(
    ("errors", "logged"),
    [
        ([], []),
        ([SourceError("bad data"), StoreError("503"), ReadError("bad"), MemoryBudgetError("small")], []),
        ([SourceError("bad data"), ValueError("one"), KeyError("two")], ["ValueError: one"]),
    ],
)
def test_the_first_unexpected_error_is_logged_with_its_traceback(errors, logged, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "REPORTED", {})
    for error in errors:
        report_once(logging.getLogger(__name__), "reading ahead failed", error)
    assert [line.splitlines()[-1] for line in caplog.messages] == logged
    assert all(line.startswith("reading ahead failed. This is a bug") for line in caplog.messages)
