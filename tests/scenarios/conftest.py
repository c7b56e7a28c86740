"""Fixtures of users' programs: a simulated device, and threads that libraries leave behind."""

import pytest
from support.device.training_loop import pretend
from support.lightning.runs import Loader
from waiting.on_device.fake_streams import FakeStreams


@pytest.fixture(autouse=True)
def threads_of_others(monkeypatch):
    """Ends the threads that tqdm keeps, and those that multiprocessing leaves when workers have ended."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    Loader.end()


@pytest.fixture(name="pretended")
def pretended_device(monkeypatch):
    """Makes the CPU look like a device with streams, whose copies run as late as possible."""
    made = []

    def streams(device):
        made.append(FakeStreams("side"))
        return made[-1]

    pretend(monkeypatch, streams)
    return made
