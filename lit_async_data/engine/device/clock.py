"""`DeviceClock`: how long a device waits for data, and copies take; `ranged`: our work in torch's profiler."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lit_async_data.engine.device.streams import Streams
from lit_async_data.engine.stats import Wait
from lit_async_data.sources.contract.stage_clock import Work

T = TypeVar("T")
# Ranges that a trace shows.
NEXT, COPY = "lit_async_data.next", "lit_async_data.copy"


# One copy in `TIMED` is timed, from the second on: an event costs the host some microseconds. The first copy would also
# tell what the device does once.
TIMED = 8


class DeviceClock:
    """Times each hand-over by two events on the compute stream.

    The first is recorded when a batch is asked for. The step before has been enqueued by then, so the event happens
    when the device has finished it. The second is recorded after compute has been told to wait for the batch. Between
    the two the device computes nothing, because the host waits for a reader, or because the copy takes time.

    The host waits for neither. Events that have happened are read when the next batch or the figures are asked for; so
    figures come a step or two late.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._asked: Any = None
        # Hand-overs: the events of `asked` and `came`, and whether the batch is the first of its epoch.
        self._open: collections.deque[tuple[Any, Any, bool]] = collections.deque()
        self._waited = Wait()  # for the hand-overs that are known
        self._copies = 0
        # Copies that are timed: the events of their begin and end on the side stream, and their bytes.
        self._copying: collections.deque[tuple[Any, Any, int]] = collections.deque()
        # Of the copies that were timed; and the bytes of all.
        self._timed, self._copied_bytes = Work(), 0

    def copying(self, nbytes: int) -> Any:
        """The copies of a batch are about to be enqueued; returns an event for `copied`, or None if it is not timed."""
        self._copies += 1
        self._copied_bytes += nbytes
        return self._streams.timed(self._streams.side) if self._copies % TIMED == 2 else None

    def copied(self, began: Any, nbytes: int) -> None:
        self._copying.append((began, self._streams.timed(self._streams.side), nbytes))

    def asked(self) -> None:
        self._read()
        self._asked = self._streams.timed(self._streams.compute())

    def came(self, *, first: bool) -> None:
        """Compute has been told to wait for the batch."""
        self._open.append((self._asked, self._streams.timed(self._streams.compute()), first))

    @property
    def waited(self) -> Wait:
        """The sums of all hand-overs that are known by now."""
        self._read()
        timed, copied = self._timed, self._copied_bytes
        seconds = timed.copy_s * copied / timed.copied if timed.copied else 0.0
        return dataclasses.replace(self._waited, copy=Work(copy_s=seconds, copied=copied))

    def _read(self) -> None:
        if self._streams.capturing:
            return  # a query of an event would break the capture
        while self._open and self._streams.happened(self._open[0][1], block=False):
            asked, came, first = self._open.popleft()
            waited = self._waited
            waited.last_s = self._streams.elapsed_s(asked, came)
            if first:
                waited.gap_s += waited.last_s
            else:
                waited.steps, waited.wait_s = waited.steps + 1, waited.wait_s + waited.last_s
        while self._copying and self._streams.happened(self._copying[0][1], block=False):
            began, done, nbytes = self._copying.popleft()
            self._timed = self._timed.plus(Work(copy_s=self._streams.elapsed_s(began, done), copied=nbytes))


#: Whether torch's profiler is active; a function in C, since every batch asks. A private name, which torch may drop.
profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)


def ranged(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """Make a call inside a range of the profiler."""
    with torch.profiler.record_function(name):
        return call(*arguments)
