from __future__ import annotations

import contextlib
import threading

import pytest
from support.threads.interrupts import interrupted

from lit_async_data.engine.supervisor import ThreadWorker
from lit_async_data.errors import WorkerError


def test_an_interrupt_while_the_end_of_a_thread_is_awaited_makes_nobody_wait_for_it_again():
    worker = ThreadWorker(0, lambda worker: False)
    worker.start()
    assert worker.join(60)
    for place in range(100):
        with contextlib.suppress(KeyboardInterrupt), interrupted(place):
            worker.join(60)
    assert worker.join(0)


def test_a_thread_that_cannot_be_started_is_an_error_at_once(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    worker = ThreadWorker(0, lambda worker: False)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(WorkerError, match="could not be started: can't start new thread"):
        worker.start()
    assert worker.join(0)
