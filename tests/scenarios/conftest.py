"""What programs of other people run on: a simulated device, and threads that nobody but their library ends."""

from __future__ import annotations

import threading

import pytest
from support.device import pretend
from support.runs import Loader

from lit_async_data.testing import FakeStreams


@pytest.fixture(autouse=True)
def threads_of_others(monkeypatch):
    """Those that tqdm would keep, and those that multiprocessing leaves to themselves when workers have ended."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    Loader.end()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(20)


@pytest.fixture(name="pretended")
def pretended_device(monkeypatch):
    """The CPU looks like a device with streams: each loader gets one whose copies come as late as they may."""
    made = []

    def streams(device):
        made.append(FakeStreams("side"))
        return made[-1]

    pretend(monkeypatch, streams)
    return made
