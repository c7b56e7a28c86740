"""`DeviceClock`: how long a device waits for data, measured on the device."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from lit_async_data.device.streams import Streams
from lit_async_data.host.stats import DeviceWait


class _Wait(NamedTuple):
    """From ``asked`` to ``came``, on the compute stream."""

    asked: Any
    came: Any
    first: bool


class DeviceClock:
    """Times each hand-over by two events on the compute stream.

    The first is recorded when a batch is asked for. The step before has been enqueued by then, so the event happens
    when the device has finished it. The second is recorded after compute has been told to wait for the batch. Between
    the two the device computes nothing, because the host waits for a reader, or because the copy takes time.

    The host waits for neither. Events that have happened are read when the next batch or the figures are asked for; so
    figures come a step or two late.

    Args:
        streams: The device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._asked: Any = None
        self._open: collections.deque[_Wait] = collections.deque()
        self._seen = DeviceWait()

    def asked(self) -> None:
        """A batch is asked for."""
        self._read()
        self._asked = self._streams.timed(self._streams.compute())

    def came(self, *, first: bool) -> None:
        """Compute has been told to wait for the batch.

        Args:
            first: Whether the batch is the first of an epoch.
        """
        self._open.append(_Wait(self._asked, self._streams.timed(self._streams.compute()), first))

    @property
    def waited(self) -> DeviceWait:
        """The sums of all hand-overs that are known by now."""
        self._read()
        return self._seen

    def _read(self) -> None:
        while self._open and self._streams.happened(self._open[0].came, block=False):
            wait = self._open.popleft()
            self._seen = self._seen.plus(self._streams.elapsed_s(wait.asked, wait.came), first=wait.first)
