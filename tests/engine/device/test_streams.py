"""The operations of a device: its one side stream, and what it is called."""

import contextlib
import dataclasses
import os
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.device.training_loop import STEPS, pretend, queue_on
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.engine.device import streams as device_streams
from lit_async_data.engine.device.streams import moved
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.stats import Wait
from lit_async_data.errors import ConfigError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.stage_clock import Work
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


@pytest.mark.parametrize(
    ("device", "current", "captures"),
    [("xpu:0", 0, True), ("cpu", 0, False), ("cuda:3", 0, True), ("cuda:1", 2, True), ("cuda:3", 2, False)],
)
def test_a_capture_is_seen_on_the_current_device_and_on_that_of_the_loader(monkeypatch, device, current, captures):
    """torch tells it of the current device only; devices 0 and 1 are captured."""
    devices = [current]

    @contextlib.contextmanager
    def index(number):
        devices.append(number)
        yield
        devices.pop()

    monkeypatch.setattr(torch.accelerator, "device_index", index)
    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(kind, "is_current_stream_capturing", lambda: devices[-1] in (0, 1), raising=False)
    assert device_streams.Streams(torch.device(device)).capturing is captures
    assert devices == [current]


def test_objects_are_moved_in_their_own_way():
    cpu, given, tensor = torch.device("cpu"), [], torch.zeros(3)
    assert moved(SimpleNamespace(to=lambda device: device), cpu) == cpu  # it knows nothing of ``non_blocking``
    in_place = SimpleNamespace(to=lambda device, **options: given.append((device, options)))
    assert moved(in_place, cpu) is in_place
    assert given == [(cpu, {"non_blocking": True})]
    assert moved(tensor, cpu) is tensor


COPY_S, STEP_S = 0.03, 0.05
ARRIVES_S = 2 * COPY_S  # a batch travels in two copies
TAKES_S = {"copy": COPY_S, "step": STEP_S}


def epoch(queue, streams, number=0, batches=STEPS):
    for step in range(batches):
        queue.take(BatchIndex(number, step))
        queue.prefetch(queue.feed.following(BatchIndex(number, step)))
        streams.launch("step", lambda: None)


@pytest.mark.parametrize(("slow", "waits"), [("side", STEPS), ("compute", 1)])
def test_only_a_copy_that_compute_has_to_wait_for_is_the_devices_waiting(slow, waits):
    streams = FakeStreams(slow, TAKES_S)
    with queue_on(streams) as queue:
        epoch(queue, streams)
        streams.synchronize()
        waited = queue.waited
    assert (waited.steps, waited.gap_s) == (STEPS - 1, pytest.approx(ARRIVES_S))  # nothing hides the first
    assert waited.wait_s == pytest.approx(ARRIVES_S * (waits - 1))
    assert waited.last_s == pytest.approx(ARRIVES_S * (waits > 1))
    assert streams.now_s > STEPS * STEP_S


def test_nobody_waits_for_an_event_to_be_read():
    streams = FakeStreams("compute")
    blocked = []
    happened = streams.happened

    def watched(event, *, block):
        blocked.append(block and event.stream is streams.compute())
        return happened(event, block=block)

    streams.happened = watched
    with queue_on(streams) as queue:
        queue.take(BatchIndex(0, 0))
        # The device has not come so far, and nobody makes it.
        assert dataclasses.replace(queue.waited, copy=Work()) == Wait()
        streams.synchronize()
        assert dataclasses.replace(queue.waited, copy=Work()) == Wait()
        epoch(queue, streams, 1)
        assert queue.waited.steps > 0
    assert not any(blocked)


def test_the_first_copy_is_not_timed_as_it_tells_what_a_device_does_once():
    streams = FakeStreams("side", TAKES_S | {"copy": 1.0})
    with queue_on(streams) as queue:
        for number in range(4):
            queue.take(BatchIndex(0, number))
            streams.synchronize()
            streams._takes_s["copy"] = COPY_S
            copied = queue.waited.copy
            assert copied.copy_s == pytest.approx(ARRIVES_S * (number + 1) if number else 0)


def test_no_event_is_asked_for_while_a_graph_is_recorded():
    streams = FakeStreams("side", TAKES_S)
    with queue_on(streams) as queue:
        queue.take(BatchIndex(0, 0))
        streams.synchronize()
        streams.capturing = True
        assert queue.waited.gap_s == 0
        streams.capturing = False
        assert queue.waited.gap_s == pytest.approx(ARRIVES_S)


class RemembersTimes(FakeStreams):
    def __init__(self, slow):
        super().__init__(slow)
        self.times = weakref.WeakSet()

    def timed(self, stream):
        event = super().timed(stream)
        self.times.add(event)
        return event


def test_events_that_have_happened_are_not_kept_though_nobody_asks():
    streams = RemembersTimes("side")
    with queue_on(streams) as queue:
        for number in range(3):
            epoch(queue, streams, number)
            assert len(streams.times) <= 4  # of the last hand-over, and of a copy


def test_torchs_profiler_shows_our_ranges():
    assert not device_streams.profiled()
    source = ArraySource({"x": np.zeros(8)})
    with AsyncLoader(source, {"batch_size": 4, "workers": 0}) as loader, torch.profiler.profile() as profile:
        assert device_streams.profiled()
        assert len(list(loader)) == 2
    assert [event.name for event in profile.events()].count(device_streams.NEXT) == 2
