"""Where batches are handed out: on the CPU, or on a simulated device."""

import pytest
from support.device.training_loop import pretend
from waiting.on_device.fake_streams import FakeStreams


@pytest.fixture
def streamed(monkeypatch):
    """Has what is prefetched take this pretended device for its own."""

    def on(streams):
        pretend(monkeypatch, lambda device: streams)
        return streams

    return on


@pytest.fixture(params=["the CPU", "a device"])
def anywhere(request, streamed):
    """On the CPU, and on a simulated device whose copies run late."""
    if request.param == "a device":
        streamed(FakeStreams("side"))
