"""A simulated device, and `replaced_streams`, which makes loaders use it or any other `Streams`.

The streams of `SimulatedDevice` are threads, and its copies take real time.
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

# Fields up to this many bytes are copied in no time.
SMALL = 64 * 1024
# Seconds that a wait for a stream may take.
PATIENCE = 60.0
# Not replaced in the module that defines it, since replacements derive from it.
HOME = ("lit_async_data.device.streams", "TorchStreams")


@contextlib.contextmanager
def replaced_streams(factory: Callable[[torch.device], Streams], *, simulated: bool) -> Iterator[None]:
    """Make loaders that start inside the context use other streams.

    Args:
        factory: Makes the streams of a device.
        simulated: Treat every device as one with streams, and pin no memory.
    """
    instead: dict[str, Any] = {"TorchStreams": factory}
    if simulated:
        instead |= {"has_streams": lambda device: True, "allocated": _pageable}
    with contextlib.ExitStack() as stack:
        for name in [name for name in sys.modules if name.startswith("lit_async_data.")]:
            for attribute, value in instead.items():
                if attribute in vars(sys.modules[name]) and (name, attribute) != HOME:
                    stack.enter_context(mock.patch.object(sys.modules[name], attribute, value))
        yield


def _pageable(nbytes: int, *, pinned: bool) -> Bytes:
    return np.zeros(nbytes, np.uint8)


class ThreadStream(FakeStream):
    """A stream that runs in a thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name, eager=False)
        self._todo: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._ended = self._busy = False
        self._thread = threading.Thread(target=self._work_off, name=f"simulated {name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._todo.append(work)
            self._changed.notify_all()

    def run(self, until: FakeEvent | None = None) -> None:
        """Wait until this stream has done the event, or all its work."""

        def reached() -> bool:
            return until.done if until is not None else not (self._todo or self._busy)

        with self._changed:
            assert self._changed.wait_for(reached, PATIENCE), (
                f"the stream {self.name} made no progress in {PATIENCE:g} s"
            )

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


class SimulatedDevice(FakeStreams):
    """A device whose streams run concurrently with the program, and whose copies take a given time.

    It allocates and frees memory as `FakeStreams` does: a missing wait gives wrong values.

    Args:
        copy_s: Seconds for the large fields of a batch.
    """

    def __init__(self, copy_s: float) -> None:
        super().__init__("side")
        self.side = ThreadStream("side")
        self._current = self._compute = ThreadStream("compute")
        self._copy_s = copy_s

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        to, of = raw(destination), raw(source)
        seconds = self._copy_s if destination.nbytes > SMALL else 0.0

        def copied() -> None:
            time.sleep(seconds)
            np.copyto(to(), of())

        self.launch("copy", copied)

    def timed(self, stream: FakeStream) -> FakeEvent:
        """As in `FakeStreams`, with wall-clock time."""
        event = FakeEvent(stream)

        def happen() -> None:
            event.at_s, event.done = time.perf_counter(), True

        stream.enqueue(happen)
        return event

    def close(self) -> None:
        """Finish all work, and end both streams."""
        self.synchronize()
        for stream in (self._compute, self.side):
            assert isinstance(stream, ThreadStream)
            stream.close()
