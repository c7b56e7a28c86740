"""The operations of a device: its one side stream, and what it is called."""

import contextlib
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.engine.device import streams as device_streams
from lit_async_data.engine.device.streams import moved
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import ConfigError
from lit_async_data.testing import ArraySource


def test_all_engines_of_a_process_have_one_side_stream_for_a_device(monkeypatch):
    """torch hands out 32 in turn: the user's own would be among those of many engines."""
    taken = []

    class Stream:
        def __init__(self, device=None, *, stream_id=0, device_index=0, device_type=1):
            if device is not None:
                taken.append(device)
                stream_id, device_index = len(taken), device.index
            self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type

    monkeypatch.setattr(torch, "Stream", Stream)
    device_streams._side_of.cache_clear()
    one, other = torch.device("cuda:0"), torch.device("cuda:1")
    device_streams.Streams(one)
    assert not taken  # predictions, which are copied back to the host, need none
    sides = [device_streams.Streams(one).side for _ in range(40)]
    assert {side.stream_id for side in sides} == {1}
    assert len(set(map(id, sides))) == 40  # an object cannot be entered twice at a time
    assert device_streams.Streams(other).side.stream_id == 2
    assert taken == [one, other]
    device_streams._side_of.cache_clear()


@pytest.mark.parametrize(
    ("value", "noted"),
    [
        (torch.zeros(3, device="meta"), True),  # of another device
        (SimpleNamespace(record_stream=lambda stream: None), True),
        (SimpleNamespace(x=torch.zeros(3)), False),
        (torch.eye(3).to_sparse(), False),  # for which torch has no such method
    ],
)
def test_what_cannot_note_who_uses_its_memory_is_known(value, noted):
    streams = device_streams.Streams(torch.device("cpu"))
    assert streams.record_stream(value, torch.Stream(stream_id=0, device_index=0, device_type=0)) is noted


def test_a_device_without_a_number_is_the_one_that_was_current_at_the_first_batch(monkeypatch):
    current, asked = [3], []
    monkeypatch.setattr(device_streams, "checked_device", torch.device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[-1])
    pretend(monkeypatch, lambda device: asked.append(device) or FakeStreams("side"))
    source = ArraySource({"x": np.arange(40.0)})
    with AsyncLoader(source, {"batch_size": 4, "workers": 0}, device="cuda") as loader:
        assert loader.device == torch.device("cuda")
        next(loader)
        current.append(0)
        loader.device_depth = 1  # begins with a new engine
        next(loader)
        assert asked == [torch.device("cuda:3")] * 2
        loader.device = "cuda"
        next(loader)
        assert asked[-1] == loader.device == torch.device("cuda:0")


@pytest.mark.parametrize(("device", "there"), [("cuda", True), ("cuda:1", True), ("cuda:2", False), ("xpu:0", False)])
def test_a_device_that_does_not_exist_is_an_error_when_the_loader_is_built(monkeypatch, device, there):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # which asks NVML; torch.accelerator opens the driver
    message = r"^device: there is no (cuda:2 here; cuda devices here: 2|xpu here)"
    with contextlib.nullcontext() if there else pytest.raises(ConfigError, match=message):
        AsyncLoader(ArraySource({"x": np.arange(8.0)}), {"batch_size": 4}, device=device).close()


def test_a_device_is_looked_for_without_the_driver_which_a_fork_could_not_use(monkeypatch):
    asked = []
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

    def current(check_available):
        asked.append(os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"])
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    device_streams.checked_device("cuda")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")  # the user's own
    device_streams.checked_device("cuda")
    assert asked == ["1", "0"]


def test_inline_devices_are_cpu_and_mps():
    assert [name for name in ("cpu", "mps", "cuda") if device_streams.has_streams(torch.device(name))] == ["cuda"]


def test_a_capture_is_seen_on_every_device_for_which_torch_tells_it(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True, raising=False)
    assert device_streams.Streams(torch.device("xpu:0")).capturing
    assert not device_streams.Streams(torch.device("cpu")).capturing


@pytest.mark.parametrize(("current", "captures"), [(0, True), (1, True), (2, False)])
def test_a_capture_is_seen_on_the_current_device_and_on_that_of_the_loader(monkeypatch, current, captures):
    """torch tells it of the current device only; devices 0 and 1 are captured."""
    devices = [current]

    @contextlib.contextmanager
    def index(number):
        devices.append(number)
        yield
        devices.pop()

    monkeypatch.setattr(torch.accelerator, "device_index", index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: devices[-1] in (0, 1))
    assert device_streams.Streams(torch.device("cuda:3")).capturing is captures
    assert device_streams.Streams(torch.device("cuda:1")).capturing
    assert devices == [current]


def test_objects_are_moved_in_their_own_way():
    cpu, given, tensor = torch.device("cpu"), [], torch.zeros(3)
    assert moved(SimpleNamespace(to=lambda device: device), cpu) == cpu  # it knows nothing of ``non_blocking``
    in_place = SimpleNamespace(to=lambda device, **options: given.append((device, options)))
    assert moved(in_place, cpu) is in_place
    assert given == [(cpu, {"non_blocking": True})]
    assert moved(tensor, cpu) is tensor
