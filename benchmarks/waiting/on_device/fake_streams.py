"""`FakeStreams`: a device without an accelerator, one of whose streams is as fast and the other as slow as possible."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from lit_async_data.batch.spec import Bytes
from lit_async_data.engine.device.streams import moved
from lit_async_data.engine.pipeline.pipeline import Lease
from waiting.on_device.checksums import checksum


class FakeEvent:
    """An event of a `FakeStream`; ``done`` once the stream has reached it, at ``at_s`` by the clock if it is timed."""

    def __init__(self, stream: FakeStream, *, timed: bool = False) -> None:
        self.stream = stream
        self.timed = timed
        self.done = False
        self.at_s = 0.0


class FakeStream:
    """A queue of work. An eager stream runs work when it is enqueued, a lazy one only when somebody waits for it."""

    def __init__(self, name: str, *, eager: bool) -> None:
        self.name = name
        self.eager = eager
        self._work: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def pending(self) -> int:
        return len(self._work)

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if self.eager:
            self.run()

    def run(self, until: FakeEvent | None = None) -> None:
        """Runs the work in order, up to an event or to the end."""
        while self._work and not (until is not None and until.done):
            self._work.popleft()()


class FakeStreams:
    """`Streams` without an accelerator. It needs only a clone: tests and the benchmarks beside it use it.

    It allocates memory like torch's caching allocator: a block that Python no longer refers to can be handed out again
    at once, even if work enqueued earlier still reads it; but not to work of another stream that `record_stream` has
    noted. So a missing wait always gives wrong values, not by chance.

    Its clock advances only while a kernel runs.

    Args:
        slow: ``"side"`` (copies run late) or ``"compute"`` (kernels run late).
        takes_s: Seconds that kernels take, by name; 0 for all others.

    Attributes:
        calls: Name and stream of every record, wait, copy and launch, in program order.
        capturing: Whether the program records a graph.
        now_s: Seconds that kernels have taken so far.
    """

    POISON = 0xAB
    capturing = False

    def __init__(self, slow: Literal["side", "compute"], takes_s: Mapping[str, float] | None = None) -> None:
        self.now_s = 0.0
        self._takes_s = dict(takes_s or {})
        self.side = FakeStream("side", eager=slow != "side")
        self._compute = FakeStream("compute", eager=slow != "compute")
        self._current = self._compute
        self._pools: dict[tuple[str, int], list[Bytes]] = {}
        # By address: the stream of a block, and those that use it beside its own. And the blocks that were freed before
        # these were done, with the events that tell.
        self._users: dict[int, tuple[FakeStream, list[FakeStream]]] = {}
        self._freed: list[tuple[list[Bytes], Bytes, list[FakeEvent]]] = []
        self.calls: list[tuple[str, str]] = []

    def compute(self) -> FakeStream:
        return self._compute

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        self._current = self.side
        try:
            yield
        finally:
            self._current = self._compute

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised tensor from the pool of the current stream."""
        nbytes = math.prod(shape) * dtype.itemsize
        self._reclaim()
        pool = self._pools.setdefault((self._current.name, nbytes), [])
        block = pool.pop() if pool else np.full(nbytes, self.POISON, np.uint8)
        lease = Lease(block)
        weakref.finalize(lease, self._free, pool, block).atexit = False
        self._users[block.ctypes.data] = self._current, []
        return torch.from_numpy(np.asarray(lease)).view(dtype).reshape(shape)

    def _free(self, pool: list[Bytes], block: Bytes) -> None:
        events = [self.record(stream) for stream in self._users.pop(block.ctypes.data)[1]]
        self._freed.append((pool, block, events))

    def _reclaim(self) -> None:
        freed, self._freed = self._freed, []
        for pool, block, events in freed:
            if all(self.happened(event, block=False) for event in events):
                pool.append(block)
            else:
                self._freed.append((pool, block, events))

    def record_stream(self, value: Any, stream: FakeStream) -> bool:
        """Keeps the block of a tensor from being handed out again before ``stream`` has used it."""
        try:
            if not isinstance(value, torch.Tensor):
                value.record_stream(stream)
            elif (block := value.untyped_storage().data_ptr()) in self._users and self._users[block][0] is not stream:
                self._users[block][1].append(stream)
        except (AttributeError, RuntimeError, TypeError):
            return False
        return True

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues a copy. It reads its source when it runs; like a device, it knows addresses, not tensors."""
        target, content = raw(destination), raw(source)
        self.launch("copy", lambda: np.copyto(target(), content()))

    def moved(self, value: Any) -> Any:
        """Calls the object's own ``to``, which may enqueue work."""
        self.calls.append(("move", self._current.name))
        return moved(value, torch.device("cpu"))

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        self.calls.append((name, self._current.name))

        def run() -> None:
            kernel()
            self.now_s += self._takes_s.get(name, 0.0)

        self._current.enqueue(run)

    def record(self, stream: FakeStream) -> FakeEvent:
        return self._event("record", stream)

    def timed(self, stream: FakeStream) -> FakeEvent:
        return self._event("timed", stream)

    def _event(self, name: str, stream: FakeStream) -> FakeEvent:
        self.calls.append((name, stream.name))
        event = FakeEvent(stream, timed=name == "timed")

        def complete() -> None:
            event.done, event.at_s = True, self.now_s

        stream.enqueue(complete)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Enqueues a wait. When ``stream`` reaches it, the event's stream runs up to the event."""
        self.calls.append(("wait", stream.name))
        stream.enqueue(functools.partial(event.stream.run, event))

    def happened(self, event: FakeEvent, *, block: bool) -> bool:
        """Whether the event's stream has reached it; with ``block``, runs the stream up to it first."""
        if block:
            event.stream.run(event)
        return event.done

    def elapsed_s(self, begin: FakeEvent, end: FakeEvent) -> float:
        """Seconds between two events, which must have happened, as torch demands."""
        if not (begin.done and end.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_s - begin.at_s

    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueues a kernel that computes the checksum of the tensor's memory at that time."""
        with torch.inference_mode(False):
            total, content = torch.zeros((), dtype=torch.int64), raw(tensor)
        self.launch("checksum", lambda: setattr(total, "data", checksum(torch.from_numpy(content()))))
        return total

    def synchronize(self) -> None:
        self._compute.run()
        self.side.run()


def raw(tensor: torch.Tensor) -> Callable[[], Bytes]:
    """Returns a function that views the bytes of a tensor by address, as a kernel would; it keeps nothing alive.

    Only for tensors whose memory somebody else keeps alive: a slot, or a pool of `FakeStreams`.
    """
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return lambda: np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
