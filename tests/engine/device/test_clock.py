"""How long the device waits for data: by its own clock, without stopping for it."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from support.device.training_loop import STEPS, pretend, queue_on, write_numbers
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data.engine.device import streams as clock
from lit_async_data.engine.device.queues import StreamQueue
from lit_async_data.engine.device.streams import DeviceClock
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.prefetch.iterator_feed import IteratorFeed
from lit_async_data.engine.prefetch.packing import Packer, PinnedBufferPool
from lit_async_data.engine.stats import Wait
from lit_async_data.errors import ReadError
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.testing import ArraySource

COPY_S, STEP_S = 0.03, 0.05
# A batch travels in two copies.
ARRIVES_S = 2 * COPY_S


def streams_that_take_time(slow, step_s=STEP_S):
    return FakeStreams(slow, {"copy": COPY_S, "step": step_s})


def epoch(queue, streams, number=0, batches=STEPS):
    for step in range(batches):
        queue.take(BatchIndex(number, step))
        queue.prefetch(queue.feed.following(BatchIndex(number, step)))
        streams.launch("step", lambda: None)


@pytest.mark.parametrize(("slow", "waits"), [("side", STEPS), ("compute", 1)])
def test_only_a_copy_that_compute_has_to_wait_for_is_the_devices_waiting(slow, waits):
    streams = streams_that_take_time(slow)
    with queue_on(streams) as queue:
        epoch(queue, streams)
        streams.synchronize()
        waited = queue.waited
    assert (waited.steps, waited.gap_s) == (STEPS - 1, pytest.approx(ARRIVES_S))  # nothing hides the first
    assert waited.wait_s == pytest.approx(ARRIVES_S * (waits - 1))
    assert waited.last_s == pytest.approx(ARRIVES_S * (waits > 1))
    assert streams.now_s > STEPS * STEP_S


def test_time_that_the_host_waits_for_a_reader_while_the_device_is_idle_counts():
    streams = FakeStreams("side")

    def read(epoch, samples, out):
        streams.now_s += 0.25
        write_numbers(epoch, samples, out)

    with queue_on(streams, read=read, workers=0, depth=0) as queue:
        epoch(queue, streams)
        waited = dataclasses.replace(queue.waited, copy=Work())
        assert waited == Wait(STEPS - 1, 0.25 * (STEPS - 1), 0.25, last_s=0.25)


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


class Timeline:
    """Host and device beside each other: what is enqueued begins when the device is free, and not before."""

    capturing = False

    def __init__(self):
        self.host_s = self.device_s = 0.0

    def compute(self):
        return None

    def launch(self, takes_s):
        self.device_s = max(self.device_s, self.host_s) + takes_s

    def timed(self, stream):
        self.launch(0)
        return self.device_s

    def happened(self, at_s, *, block):
        assert not block
        return at_s <= self.host_s

    def elapsed_s(self, begin_s, end_s):
        return end_s - begin_s


@pytest.mark.parametrize(
    ("read_s", "copy_s", "waited_s"),
    [
        (0.0, 0.0, 0.0),
        (0.5, 0.0, 0.0),  # the host waits while the device computes
        (1.5, 0.0, 0.5),  # and goes on to wait when the device is through
        (0.0, 0.25, 0.25),
        (1.5, 0.25, 0.75),
    ],
)
def test_the_device_waits_from_the_end_of_its_step_until_the_batch_is_there(read_s, copy_s, waited_s):
    """1. A step of 1 s is enqueued. 2. A batch is asked for; the host waits for a reader. 3. What is left of the copy
    when the device comes to it holds it up."""
    device = Timeline()
    clock = DeviceClock(device)
    device.launch(1.0)
    clock.asked()
    device.host_s += read_s
    device.launch(copy_s)
    clock.came(first=False)
    if read_s < 1:
        assert clock.waited == Wait()  # it is too early to know
    device.host_s = 10
    assert clock.waited == Wait(1, waited_s, last_s=waited_s)


def test_the_first_copy_is_not_timed_as_it_tells_what_a_device_does_once():
    streams = streams_that_take_time("side")
    streams._takes_s["copy"] = 1.0
    with queue_on(streams) as queue:
        for number in range(4):
            queue.take(BatchIndex(0, number))
            streams.synchronize()
            streams._takes_s["copy"] = COPY_S
            copied = queue.waited.copy
            assert copied.copy_s == pytest.approx(ARRIVES_S * (number + 1) if number else 0)


class Moving:
    """Moves itself, by a kernel of a second."""

    def __init__(self, streams):
        self.streams = streams

    def to(self, device, **options):
        self.streams.launch("move", lambda: None)
        return self


def test_objects_that_move_themselves_are_not_part_of_the_time_of_copies():
    """1. They hide their memory, so side waits for the steps before it moves one. 2. These take long."""
    streams = FakeStreams("compute", {"copy": COPY_S, "step": STEP_S, "move": 1.0})
    batches = [{"x": torch.zeros(100_000), "graph": Moving(streams)} for _ in range(STEPS)]
    feed = IteratorFeed(batches, Packer(PinnedBufferPool(lambda nbytes: np.zeros(nbytes, np.uint8), 3)), 0)
    queue = StreamQueue(feed, streams, 0, None)
    epoch(queue, streams)
    queue.close()
    assert streams.now_s > STEPS
    assert queue.waited.copy == Work(copy_s=pytest.approx(STEPS * COPY_S), copied=STEPS * 400_000)
    feed.close()


def test_no_event_is_asked_for_while_a_graph_is_recorded():
    streams = streams_that_take_time("side")
    with queue_on(streams) as queue:
        queue.take(BatchIndex(0, 0))
        streams.synchronize()
        streams.capturing = True
        assert queue.waited.gap_s == 0
        streams.capturing = False
        assert queue.waited.gap_s == pytest.approx(ARRIVES_S)


class RemembersTimes(FakeStreams):
    """A device that knows which of its timed events somebody keeps."""

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


def test_a_batch_that_failed_is_no_waiting():
    streams = FakeStreams("side")
    calls = []

    def read(epoch, samples, out):
        calls.append(samples)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    with queue_on(streams, read=read, workers=0, depth=0) as queue:
        queue.take(BatchIndex(0, 0))
        with pytest.raises(ReadError):
            queue.take(BatchIndex(0, 1))
        queue.take(BatchIndex(0, 2))
        assert queue.waited.steps == 1


def test_a_loader_tells_what_its_device_waited_and_keeps_it_when_it_is_closed(monkeypatch):
    streams = streams_that_take_time("side", step_s=0.0)
    pretend(monkeypatch, lambda device: streams)
    source = ArraySource({"x": np.zeros((20, 5000), np.float32)})  # one large field, which travels in one copy
    with AsyncLoader(source, {"batch_size": 4}) as loader:
        assert loader.stats().device is None
        list(loader)
        stats = loader.stats()
        assert stats.device.wait_s == pytest.approx(4 * COPY_S)
        assert stats.metrics()["data/device_wait_ms"] == pytest.approx(1e3 * COPY_S)
    assert loader.stats().device == stats.device


def test_torchs_profiler_shows_our_ranges():
    assert not clock.profiled()
    source = ArraySource({"x": np.zeros(8)})
    with AsyncLoader(source, {"batch_size": 4, "workers": 0}) as loader, torch.profiler.profile() as profile:
        assert clock.profiled()
        assert len(list(loader)) == 2
    assert [event.name for event in profile.events()].count(clock.NEXT) == 2
