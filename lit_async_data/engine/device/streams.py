"""Streams of an accelerator, and the ranges and times that profilers show."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

from lit_async_data.engine.resources import pinned
from lit_async_data.engine.stats import Wait
from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.stage_clock import Work


def has_streams(device: torch.device) -> bool:
    return _overlaps(device)  # tests replace this one, for all devices


def checked_device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{given!r} is not a device of torch, such as 'cuda' or 'cpu'", "device") from error
    # As Lightning sets it: torch asks NVML, and leaves the driver, which no fork of this process could use any more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = torch.accelerator.current_accelerator(check_available=True)
    # An XLA device is found by its own package; batches come there in host memory.
    if device.type not in ("cpu", "mps", "xla") and (found is None or found.type != device.type):
        raise ConfigError(f"there is no {device.type} here, only {found.type if found else 'cpu'}", "device")
    if device.index is None or not _overlaps(device):
        return device
    if device.index >= (count := torch.get_device_module(device).device_count()):
        raise ConfigError(f"there is no {device} here; {device.type} devices here: {count}, numbered from 0", "device")
    return device


def exact_device(device: torch.device | None) -> torch.device:
    """A device with its index, so that equal devices compare equal; None for this machine's current accelerator."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if ":" in str(device) or not _overlaps(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def moved(value: Any, device: torch.device) -> Any:
    """Move a value by its own ``to``, without waiting for the copy if that takes ``non_blocking``."""
    try:
        takes = inspect.signature(value.to).parameters.values()
        waits = all(each.name != "non_blocking" and each.kind is not each.VAR_KEYWORD for each in takes)
    except ValueError:  # a built-in method of torch has no signature
        waits = False
    there = value.to(device) if waits else value.to(device, non_blocking=True)
    return value if there is None else there  # it was moved in place


NOTHING = contextlib.nullcontext()


def no_inference() -> contextlib.AbstractContextManager[Any]:
    """Leave inference mode to make tensors, which may outlive validation."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING


class Streams:
    """The operations of an accelerator that torch knows; tests run others in its place."""

    def __init__(self, device: torch.device) -> None:
        self._device = exact_device(device)
        # As far as torch offers it: bool() is False.
        module = torch.get_device_module(device)
        self._capturing: Callable[[], bool] = getattr(module, "is_current_stream_capturing", bool)

    @functools.cached_property
    def side(self) -> torch.Stream:
        """The stream of copies and transforms, in an object of its own, which can be entered once at a time."""
        side = _side_of(self._device)
        return torch.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)

    def compute(self) -> Any:  # the stream that the training step runs on now
        return torch.accelerator.current_stream(self._device)

    @property
    def capturing(self) -> bool:
        """Whether compute records a graph, so that nobody else may use the device."""
        if self._capturing():
            return True
        with torch.accelerator.device_index(self._device.index):  # it asks for the stream of the current device
            return self._capturing()

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        return self.side

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate in the memory of the current stream."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def moved(self, value: Any) -> Any:
        return moved(pinned(value), self._device)

    def record_stream(self, value: Any, stream: Any) -> bool:
        """Have the allocator wait for a stream before it gives the memory out again; returns whether it can."""
        if isinstance(value, torch.Tensor) and value.device != self._device:
            return True
        try:
            value.record_stream(stream)
        except (AttributeError, RuntimeError, TypeError):  # torch raises a RuntimeError for sparse tensors
            return False
        return True

    def record(self, stream: Any) -> Any:
        return stream.record_event(torch.Event(device=self._device))

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def happened(self, event: Any, *, block: bool) -> bool:
        if block:
            event.synchronize()
        return block or bool(event.query())

    def timed(self, stream: Any) -> Any:
        return stream.record_event(torch.Event(device=self._device, enable_timing=True))

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3  # torch counts milliseconds


@functools.cache
def _side_of(device: torch.device) -> torch.Stream:
    """One side stream for each device and process: see docs/design/device.md."""
    return torch.Stream(device=device)


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where copies to it cannot overlap with its work."""
    return Streams(device) if has_streams(device) else None


def _overlaps(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps", "meta", "xla")


# Ranges that a trace shows.
NEXT, COPY = "lit_async_data.next", "lit_async_data.copy"

# One copy in `TIMED` is timed, from the second on: an event costs the host microseconds, and the first copy is slow.
TIMED = 8


class DeviceClock:
    """Times each hand-over by two events on the compute stream, at the request and behind the wait for the batch.

    The host does not wait for them: times are known a step or two later.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._asked: Any = None
        # Hand-overs: the events of asking and `came`, and whether the batch is the first of its epoch.
        self._open: collections.deque[tuple[Any, Any, bool]] = collections.deque()
        self._waited = Wait()  # over hand-overs whose events have happened
        self.copies = self.copied_bytes = 0  # of all batches
        # Copies that are timed: the events of their begin and end on the side stream, and their bytes.
        self._copying: collections.deque[tuple[Any, Any, int]] = collections.deque()
        self._timed = Work()

    def copied(self, began: Any, nbytes: int) -> None:
        self._copying.append((began, self._streams.timed(self._streams.side), nbytes))

    def came(self, *, first: bool) -> None:
        self._open.append((self._asked, self._streams.timed(self._streams.compute()), first))

    @property
    def waited(self) -> Wait:
        self.read()
        timed, copied = self._timed, self.copied_bytes
        seconds = timed.copy_s * copied / timed.copied if timed.copied else 0.0
        return dataclasses.replace(self._waited, copy=Work(copy_s=seconds, copied=copied))

    def read(self, *, asked: bool = False) -> None:
        """Read the events that have happened; with ``asked``, record the event of a request."""
        streams = self._streams
        queries = not streams.capturing  # a query of an event would break the capture
        while queries and self._open and streams.happened(self._open[0][1], block=False):
            began, came, first = self._open.popleft()
            waited = self._waited
            waited.last_s = streams.elapsed_s(began, came)
            if first:
                waited.gap_s += waited.last_s
            else:
                waited.steps, waited.wait_s = waited.steps + 1, waited.wait_s + waited.last_s
        while queries and self._copying and streams.happened(self._copying[0][1], block=False):
            began, done, nbytes = self._copying.popleft()
            self._timed = self._timed.plus(Work(copy_s=streams.elapsed_s(began, done), copied=nbytes))
        if asked:
            self._asked = streams.timed(streams.compute())


#: Whether torch's profiler is active: a function in C, called for every batch. torch may drop its private name.
profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
