"""A server of ranges, and the addresses and options by which a source reads a file of it, or beside it."""

import contextlib
import os
import threading
import time

import pytest
from support.range_server import KEYS, RangeServer, patience
from support.threads.waits import LONG

from lit_async_data.sources.files.transport import FETCHER


def sockets():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


@pytest.fixture(autouse=True)
def keys_in_the_environment(monkeypatch):
    """Without any, obstore asks the metadata service of a cloud for some."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")


@pytest.fixture
def connections_end():
    """Waits for threads of obstore, which close its connections behind its back."""
    before = sockets()
    yield
    ends = time.monotonic() + LONG
    while sockets() > before and time.monotonic() < ends:
        os.sched_yield()


@pytest.fixture(autouse=True)
def fetchers_end():
    """Behind the call to a store that they are in when a source closes, which a busy machine delays."""
    yield
    for thread in threading.enumerate():
        if thread.name == FETCHER:
            thread.join(LONG)


@pytest.fixture
def server(tmp_path, connections_end):
    """It serves the folder ``bucket``."""
    (tmp_path / "bucket").mkdir()
    with RangeServer(tmp_path) as server:
        yield server


@pytest.fixture
def s3(server):
    """Options with which the server is S3."""
    return {"endpoint_url": server.url, **KEYS, **patience(20)}
