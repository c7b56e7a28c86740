"""Forks, interrupts and closing while a store does not answer."""

import contextlib
import datetime as dt
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from support.files.far import ROWS, VALUES, written
from support.sources.oracle import read
from support.threads.waits import LONG
from torch.utils.data import DataLoader

from lit_async_data import ClosedError, HDF5Source, WorkerError
from lit_async_data.sources.files import files as files_module
from lit_async_data.sources.files.stores import ObjectStore
from lit_async_data.sources.files.transport import FETCHER

pytest.importorskip("obstore")
PATIENT = {"client_options": {"timeout": dt.timedelta(hours=1)}}


@pytest.fixture
def address(server, tmp_path, monkeypatch):
    written(tmp_path / "bucket" / "x.h5", monkeypatch, scaleoffset=0)
    return f"{server.url}/bucket/x.h5"


def until_asked(server, before):
    """Waits for more requests."""
    ends = time.monotonic() + LONG
    while len(server.requests) == before:
        assert time.monotonic() < ends
        os.sched_yield()


def join_fetchers():
    for thread in threading.enumerate():
        if thread.name.startswith(FETCHER):
            thread.join(LONG)


def test_a_list_that_was_closed_asks_for_no_further_page(monkeypatch):
    files, pages, told = files_module.Files(), [], threading.Event()

    def listed(_, pattern):
        for page in range(50):
            pages.append(page)
            if page == 1:
                files.close()
                told.wait(LONG)
            yield [f"{pattern}{page}"]

    monkeypatch.setattr(ObjectStore, "_listed", listed)
    with pytest.raises(ClosedError):
        files.matching("s3://bucket/*")
    told.set()
    join_fetchers()
    assert pages == [0, 1]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_at_once(address):
    with contextlib.closing(HDF5Source(address, ["x"])) as source:
        source[0]
        for each in (source, HDF5Source(address, ["x"])):
            loader = DataLoader(each, batch_size=8, num_workers=1, multiprocessing_context="fork")
            with pytest.raises(WorkerError, match=r"a store was used in process .*; start processes by spawn"):
                list(loader)
            each.close()
            gc.collect()  # the error refers to the worker, which ends then


def test_a_fork_reads_by_the_cache(tmp_path, address):
    path, cache = tmp_path / "bucket/x.h5", tmp_path / "cache"
    with contextlib.closing(HDF5Source(path, ["x"], cache=cache)) as source:
        source[0]
        loader = DataLoader(source, batch_size=ROWS, num_workers=1, multiprocessing_context="fork")
        (batch,) = loader
        assert torch.equal(batch["x"] if isinstance(batch, dict) else batch[0], torch.from_numpy(VALUES))


@pytest.mark.parametrize("field", ["x", "z"])
def test_closing_frees_who_waits_for_a_store(server, address, field):
    errors = []
    source = HDF5Source(address, [field], storage_options=PATIENT)
    server.open.clear()
    before = len(server.requests)

    def wait():
        with pytest.raises(ClosedError, match=r"x\.h5: the source was closed") as caught:
            read(source, np.arange(ROWS))
        errors.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    until_asked(server, before)
    source.close()
    thread.join(LONG)
    assert len(errors) == 1
    server.open.set()
    join_fetchers()
    assert np.array_equal(read(source, np.arange(ROWS))[field], VALUES)
    source.close()


PROGRAM = """
import datetime as dt, sys
from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.sources.files import files, mirror
files.HEAD_BYTES, files.WHOLE_BYTES = mirror.BLOCK, 0
source = HDF5Source(sys.argv[1], [sys.argv[2]], storage_options={"client_options": {"timeout": dt.timedelta(hours=1)}})
print("built", flush=True)
sys.stdin.readline()
with AsyncLoader(source, {"batch_size": 8, "workers": int(sys.argv[3])}) as loader:
    list(loader)
"""


@pytest.mark.parametrize(("field", "workers"), [("x", 0), ("z", 0), ("x", 1)])
def test_ctrl_c_comes_while_a_store_does_not_answer(server, address, field, workers):
    for building in (True, False) if field == "x" and not workers else (False,):
        command = [sys.executable, "-c", PROGRAM, address, field, str(workers)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        program = subprocess.Popen(command, text=True, **pipes)
        assert building or program.stdout.readline() == "built\n"
        server.open.clear()
        before = len(server.requests)
        if not building:
            program.stdin.write("\n")
            program.stdin.flush()
        until_asked(server, before)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=LONG)
        assert "KeyboardInterrupt" in said
        assert program.returncode in (1, -signal.SIGINT)
        server.open.set()
