"""A pretended device for a Trainer, and bars that leave no thread behind."""

import pytest
import torch
from support.device.training_loop import pretend
from tqdm import tqdm
from waiting.on_device.fake_streams import FakeStreams


@pytest.fixture
def streams(monkeypatch):
    """Makes the CPU look like a device with streams that do all work at once."""
    pretended = FakeStreams("side")
    pretended.side.eager = True
    pretend(monkeypatch, lambda device: pretended, lambda device: device.type == "cuda")
    monkeypatch.setattr("lit_async_data.engine.device.streams.checked_device", torch.device)
    return pretended


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else a bar leaves a thread behind
