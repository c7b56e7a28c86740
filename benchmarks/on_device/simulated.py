"""Streams that are put in the place of those that loaders would use: of a device that is not there, or without a wait.

`Clocked` has real threads and takes real time. `streams_of` makes loaders use it, or whatever else keeps `Streams`.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from lit_async_data.batch.spec import Bytes
from lit_async_data.device.streams import Streams
from lit_async_data.testing import FakeEvent, FakeStream, FakeStreams, raw

# What a batch's small fields travel in is at most this long, and takes no time.
SMALL = 64 * 1024
# Seconds after which a stream that waits for another gives up.
PATIENCE = 60.0
# This module keeps what it defines: the classes that are put in its place are made from it.
HOME = ("lit_async_data.device.streams", "TorchStreams")


@contextlib.contextmanager
def streams_of(made: Callable[[torch.device], Streams], *, pretended: bool) -> Iterator[None]:
    """Loaders that start inside use these streams.

    Args:
        made: Makes them for a device.
        pretended: Every device then counts as one with streams, and nothing is pinned.
    """
    instead: dict[str, Any] = {"TorchStreams": made}
    if pretended:
        instead |= {"has_streams": lambda device: True, "allocated": _pageable}
    with contextlib.ExitStack() as stack:
        for name in [name for name in sys.modules if name.startswith("lit_async_data.")]:
            for attribute, value in instead.items():
                if attribute in vars(sys.modules[name]) and (name, attribute) != HOME:
                    stack.enter_context(mock.patch.object(sys.modules[name], attribute, value))
        yield


def _pageable(nbytes: int, *, pinned: bool) -> Bytes:
    return np.zeros(nbytes, np.uint8)


class ClockedStream(FakeStream):
    """A stream that works by itself, in a thread of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name, eager=False)
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._ended = self._busy = False
        self._thread = threading.Thread(target=self._work_off, name=f"pretended {name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._todo.append(work)
            self._changed.notify_all()

    def run(self, until: FakeEvent | None = None) -> None:
        """Wait until this stream has come so far."""

        def reached() -> bool:
            return until.done if until is not None else not (self._todo or self._busy)

        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE), f"the stream {self.name} stands still"

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(PATIENCE)

    def _work_off(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or self._ended)
                if not self._todo:
                    return
                work, self._busy = self._todo.popleft(), True
            work()
            with self._changed:
                self._busy = False
                self._changed.notify_all()


class Clocked(FakeStreams):
    """A device whose streams run beside the program and beside each other, and whose copies take a given time.

    Memory is taken and given back as in `FakeStreams`: a missing wait would show as wrong values.

    Args:
        copy_s: Seconds for the large fields of a batch.
    """

    def __init__(self, copy_s: float) -> None:
        super().__init__("side")
        self.side = ClockedStream("side")
        self._current = self._compute = ClockedStream("compute")
        self._copy_s = copy_s

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        to, of = raw(destination), raw(source)
        seconds = self._copy_s if destination.nbytes > SMALL else 0.0

        def copied() -> None:
            time.sleep(seconds)
            np.copyto(to(), of())

        self.launch("copy", copied)

    def timed(self, stream: FakeStream) -> FakeEvent:
        """As in `FakeStreams`, by the clock on the wall."""
        event = FakeEvent(stream)

        def happen() -> None:
            event.at_s, event.done = time.perf_counter(), True

        stream.enqueue(happen)
        return event

    def close(self) -> None:
        """End both streams, with all that is enqueued on them."""
        self.synchronize()
        for stream in (self._compute, self.side):
            assert isinstance(stream, ClockedStream)
            stream.close()
