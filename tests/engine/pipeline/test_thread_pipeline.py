"""Threads that read start once, may become more or fewer, and end with their pipeline."""

import subprocess
import sys
import threading
import types

import pytest
from support.failures import raising
from support.processes import in_fork
from support.threads.number_pipelines import WHOLE, Gate, epoch, running, taken

from lit_async_data.engine import supervisor
from lit_async_data.engine.pipeline.sample_reader import Ahead
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.errors import ClosedError, WorkerError
from lit_async_data.order.plan import BatchIndex, Shares

pytestmark = pytest.mark.usefixtures("however_slow_the_machine_is")


@pytest.mark.parametrize(
    ("name", "instead", "said"),
    [
        ("_work", lambda self, worker: False, "worker 0 is dead"),
        ("_claim", raising(MemoryError("no more")), r"worker 0.*ended by MemoryError: no more; close"),
    ],
)
def test_a_dead_worker_is_an_error_that_names_it_and_of_what_it_died(name, instead, said, monkeypatch):
    monkeypatch.setattr(ThreadPipeline, name, instead)
    with running() as pipeline, pytest.raises(WorkerError, match=said) as caught:
        pipeline.get(BatchIndex(0, 0))
    assert caught.value.worker == 0


def test_a_batch_that_another_thread_is_dropping_is_waited_for(monkeypatch):
    """1. The lease is dead. 2. The consumer asks for a slot. 3. The slot becomes vacant."""
    with running(workers=0, depth=0, most_slots=1) as pipeline:
        take = pipeline.pool.take
        monkeypatch.setattr(pipeline.pool, "take", lambda timeout: take(timeout=timeout) if timeout else None)
        assert [taken(pipeline, BatchIndex(0, step)) for step in range(2)] == WHOLE[:2]


def test_what_goes_wrong_in_preparing_is_logged_once(monkeypatch, caplog):
    def decode_and_fetch(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(supervisor, "REPORTED", {})
    ahead = Ahead(types.SimpleNamespace(fetch=decode_and_fetch), 1, Shares(None))
    with running(ahead=ahead) as pipeline:
        for number in range(3):
            assert epoch(pipeline, number) == WHOLE
    for said in ("please report", "in decode_and_fetch", "ValueError: a bug"):
        assert caplog.text.count(said) == 1


def test_close_wakes_a_consumer_and_does_not_wait_for_a_read_that_hangs(monkeypatch):
    monkeypatch.setattr(supervisor, "THREADS_S", 0.0)
    gate = Gate()
    errors = []

    def consume(pipeline):
        with pytest.raises(ClosedError) as caught:
            pipeline.get(BatchIndex(0, 0))
        errors.append(caught.value)

    with running(gate) as pipeline:
        consumer = threading.Thread(target=consume, args=(pipeline,))
        consumer.start()
        gate.wait_for(1)
        pipeline.close()
        consumer.join(30)
        assert len(errors) == 1
        assert pipeline.workers[0].alive
        gate.open(0)
        pipeline.workers[0].join(30)
        assert not pipeline.workers[0].alive


def test_a_fork_is_told_that_it_cannot_use_it():
    with running() as pipeline:
        taken(pipeline, BatchIndex(0, 0))
        assert in_fork(pipeline.check) == 3
        assert in_fork(pipeline.close) == 0


def test_an_interpreter_that_forgets_to_close_ends_at_once():
    program = """
import itertools
import numpy as np
from lit_async_data import AsyncLoader, prefetched
from lit_async_data.testing import ArraySource
loader = AsyncLoader(ArraySource({"x": np.zeros((1000, 1000))}), dict(batch_size=4, shuffle=True, workers=2))
theirs = prefetched(itertools.count(), device="cpu")
batches = next(loader), next(theirs)
raise KeyError("mine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 3, done.stderr  # those of the traceback


def test_a_worker_that_is_taken_back_finishes_its_batch_and_is_not_missed():
    gate = Gate()
    with running(gate, workers=2, depth=1) as pipeline:
        pipeline.prefetch(BatchIndex(0, 0))
        gate.wait_for(2)
        workers = list(pipeline.workers)
        pipeline.set_workers(1)
        gate.open(0, 4, 8)
        number = 0
        while number < 3 or (workers[1].alive and number < 10_000):  # until it has come for another slot
            assert epoch(pipeline, number) == WHOLE
            number += 1
        assert not workers[1].alive
        assert pipeline.workers == workers[:1]
        pipeline.check()
    assert not workers[0].alive
