"""A simulated device, and `replaced_streams`, which makes loaders use it or any other `Streams`.

The streams of `SimulatedDevice` are threads, and its copies take real time.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine import resources
from lit_async_data.engine.device import streams
from lit_async_data.engine.device.streams import Streams
from waiting.on_device.fake_streams import FakeEvent, FakeStream, FakeStreams, raw

# Fields up to this many bytes are copied in no time.
SMALL = 64 * 1024
# Seconds that a wait for a stream may take.
PATIENCE = 60.0


@contextlib.contextmanager
def replaced_streams(factory: Callable[[torch.device], Any], *, simulated: bool) -> Iterator[None]:
    """Make loaders that start inside the context use other streams.

    Args:
        factory: Makes the streams of a device.
        simulated: Treat every device as one with streams, and pin no memory.
    """

    def given(device: torch.device) -> Streams | None:
        return factory(device) if streams.has_streams(device) else None

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(streams, "streams_of", given))
        if simulated:
            # A function, as a mock would take longer than what it stands for.
            stack.enter_context(mock.patch.object(streams, "has_streams", _always))
            stack.enter_context(mock.patch.object(resources, "allocated", _pageable))
            stack.enter_context(mock.patch.object(resources, "register"))
        yield


def _always(device: torch.device) -> bool:
    return True


def _pageable(nbytes: int, *, pinned: bool, allocated: Callable[..., Bytes] = resources.allocated) -> Bytes:
    return allocated(nbytes, pinned=False)


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
        event = FakeEvent(stream, timed=True)

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
