"""Fixtures of all tests: a check for leaks after each test, and small HDF5 files."""

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import settings
from support.threads.leaks import SharedMemory, alive
from support.threads.waits import LONG

# Each worker of xdist is busy on a core of its own: a team of torch's threads in each would wait for cores. torch reads
# this when it is imported, and programs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of processes. Without bytecode each of them would compile the package, for 0.2 s or more;
# each worker of xdist would compile all tests, for 5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell that runs commands in the background makes them ignore SIGINT. Tests of Ctrl-C need Python's own handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

# They hold no doctests, and as modules to be collected they would all have one name. `outside` runs suites of others.
collect_ignore_glob = ["*conftest.py", "outside/*"]

# The same examples every time, so that a failure in CI can be reproduced (with the same modules imported: Hypothesis
# takes constants from them).
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("gpu") for item in session.items):
        open_gpu()
    with contextlib.suppress(ImportError):
        from pyarrow import csv

        csv.read_csv(io.BytesIO(b"a\n1\n"))  # with the first file that it reads, it opens a pipe, and keeps it
    gc.collect()
    gc.freeze()
    if multiprocessing.get_start_method() == "forkserver":  # as Python 3.14 does; it keeps its pipes
        forkserver.ensure_running()


def open_gpu() -> None:
    """Makes what stays open from the first use of a GPU and of the profiler on."""
    import torch

    if torch.cuda.is_available():
        with torch.profiler.profile():
            torch.zeros(1, device="cuda")


shared_memory = SharedMemory()


@pytest.fixture(autouse=True, scope="module")
def no_shared_memory_left_behind() -> Iterator[None]:
    """Looks once per module, as it takes 2 ms: only tests of processes map any, and those look by themselves."""
    yield
    assert not (mapped := shared_memory.new()), f"a test of this module left behind: {mapped}"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = alive()
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # which multiprocessing leaves to itself when workers have ended
            thread.join(LONG)
    gc.collect()
    gc.freeze()  # what lives on after a test is never garbage; the next collection need not look through it
    leaks = {kind: now - before[kind] for kind, now in alive().items() if now - before[kind]}
    if request.node.get_closest_marker("processes") and (mapped := shared_memory.new()):
        leaks["shared memory"] = mapped
    assert not leaks, f"left behind: {leaks}"


@pytest.fixture
def process_as_before() -> Iterator[None]:
    """Restores what a run changes for good: loggers, which Hydra may disable, and the handlers of signals."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    before = [(logger, logger.disabled, logger.level, logger.handlers[:]) for logger in loggers]
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for logger, disabled, level, handlers_before in before:
        logger.disabled, logger.handlers[:] = disabled, handlers_before
        logger.setLevel(level)
    for kind, handler in handlers.items():
        signal.signal(kind, handler)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that were decoded, as they are stored."""
    from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline

    count: list[bytes] = []
    once = FilterPipeline.decode
    monkeypatch.setattr(FilterPipeline, "decode", lambda *args: count.append(bytes(args[1])) or once(*args))
    return count


@pytest.fixture
def one_batch_per_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has workers read batches one at a time. How far ahead they read depends on their pace if they read several."""
    monkeypatch.setattr("lit_async_data.engine.resources.coalesced_batches", lambda nbytes, most: 1)


@pytest.fixture
def however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many batches are read together depends on the time that they take."""
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 1e9)


# Test modules in which several threads share objects; with their folder if another one has the same name.
CONCURRENT = {
    *("test_async_loader", "test_base_loader", "test_chunk_cache", "test_feeds", "test_interrupts"),
    *("test_iterator_feed", "test_loader", "prefetch/test_packing", "test_pipeline", "manifest/test_prefetcher"),
    *("test_sample_reader", "hdf5/test_source", "test_thread_pipeline"),
}


@pytest.fixture(autouse=True)
def threads_take_turns_often(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets threads hand over the GIL every microsecond instead of every 5 ms, so that rare races show."""
    path = request.node.path
    if not {path.stem, f"{path.parent.name}/{path.stem}"} & CONCURRENT:
        yield
        return
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def h5(tmp_path: Path) -> Callable[..., str]:
    """Writes a file: ``h5("x.h5", data=array, labels=array)`` returns its path."""

    def written(name: str = "x.h5", **datasets: Any) -> str:
        path = str(tmp_path / name)
        with h5py.File(path, "w", libver=("earliest", "v110")) as file:
            for key, value in datasets.items():
                if isinstance(value, dict):
                    file.create_dataset(key, **value)
                else:
                    file[key] = value
        return path

    return written


@pytest.fixture
def images(h5: Callable[..., str]) -> str:
    """100 images of one channel, whose first pixel is the number of the image, and labels."""
    data = np.random.default_rng(0).integers(0, 255, (100, 1, 8, 8), dtype=np.uint8)
    data[:, 0, 0, 0] = np.arange(100)
    return h5("images.h5", data=data, labels=np.arange(100) % 10)
