"""What tests, examples and benchmarks need.

`ArraySource` and `PartedArrays`, data in memory, and `FakeStreams`, a pretended device.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lit_async_data.batch.spec import BatchSpec, Bytes, FieldSpec
from lit_async_data.device.checksum import checksum
from lit_async_data.device.streams import moved
from lit_async_data.errors import MissingError
from lit_async_data.host.slots import Lease
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Location, Part, StorageLayout, shown


class ArraySource:
    """Samples that lie in memory. Safe to read from several threads.

    Args:
        arrays: One array per batch key, samples on axis 0.

    Example:
        >>> source = ArraySource({"x": np.zeros((10, 3, 8, 8), "u1")})
        >>> len(source), source.spec["x"].shape
        (10, (3, 8, 8))
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays = dict(arrays)
        self._spec = BatchSpec(
            {key: FieldSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}, as_mapping=True
        )

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __repr__(self) -> str:
        return shown(self, "memory")

    @property
    def spec(self) -> BatchSpec:
        """Shapes and dtypes of the arrays."""
        return self._spec

    @property
    def chunks(self) -> StorageLayout:
        """Each sample lies alone."""
        return StorageLayout()

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copy samples."""
        for key, array in out.items():
            np.take(self._arrays[key], samples, axis=0, out=array, mode="clip")

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Samples are their own rows."""
        return [Location("memory", "/", int(sample)) for sample in ids]

    def close(self) -> None:
        """Nothing to close."""


class PartedArrays(ArraySource):
    """Samples in memory that say how they belong together, as those of files do.

    Args:
        arrays: As for `ArraySource`.
        parts: Names of parts and how many samples each has, in their order: ``{"a.h5:/left": 10}``.
        overlap: Samples after it with which a sample pretends to share values.
        columns: Values that stand in no batch, one per sample.
        chunks: How samples pretend to lie together.

    Example:
        >>> source = PartedArrays({"y": np.arange(5)}, parts={"a.h5": 2, "b.h5:/left": 3})
        >>> source.parts[1].name, source.parts[1].samples
        ('b.h5:/left', 3)
        >>> source.locate([3])
        [Location(file='files/b.h5', group='/left', row=1)]
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        parts: Mapping[str, int],
        overlap: int = 0,
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        chunks: StorageLayout | None = None,
    ) -> None:
        super().__init__(arrays)
        named = [(name, *name.partition(":")[::2], samples) for name, samples in parts.items()]
        self.parts = tuple(Part(f"files/{file}", group or "/", name, samples) for name, file, group, samples in named)
        self.overlap = overlap
        self._columns = {**arrays, **(columns or {})}
        self._chunks = chunks or StorageLayout()

    @property
    def chunks(self) -> StorageLayout:
        """As given."""
        return self._chunks

    def column(self, name: str) -> npt.NDArray[Any]:
        """One of the columns or arrays."""
        if name not in self._columns:
            raise MissingError(f"there is no column {name!r}", dataset=name)
        return self._columns[name]

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Rows of the parts."""
        ends = np.cumsum([part.samples for part in self.parts])
        which = np.searchsorted(ends, np.asarray(ids, np.int64), side="right").tolist()
        parts = [self.parts[part] for part in which]
        return [
            Location(part.file, part.group, int(sample) - int(ends[number]) + part.samples)
            for part, number, sample in zip(parts, which, ids, strict=True)
        ]


class FakeEvent:
    """Happens when its stream comes to it."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.done = False
        self.at_s = 0.0


class FakeStream:
    """A queue of work that an eager stream does at once and a lazy one only when somebody waits for it.

    Args:
        name: For `FakeStreams.calls`.
        eager: Whether it is the fast one.
    """

    def __init__(self, name: str, *, eager: bool) -> None:
        self.name = name
        self.eager = eager
        self._work: collections.deque[Callable[[], None]] = collections.deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        """Add work to the end."""
        self._work.append(work)
        if self.eager:
            self.run()

    def run(self, until: FakeEvent | None = None) -> None:
        """Do the work in order, up to an event or to the end."""
        while self._work and not (until is not None and until.done):
            self._work.popleft()()


class FakeStreams:
    """An accelerator without an accelerator: `Streams` in which one stream is as fast as it may be, the other as slow.

    Its memory is taken and given back as by torch's caching allocator: what Python no longer refers to can be given
    out again at once, while work that was enqueued before still reads it. So a missing wait always shows, as wrong
    values, and never by chance.

    Its time passes while a kernel runs, and only then.

    Args:
        slow: ``"side"`` (copies come late) or ``"compute"`` (kernels read late).
        takes_s: Seconds that kernels take, by name; 0 for all others.

    Attributes:
        calls: Every record, wait, copy and launch, in the order in which the program made them.
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
        self.calls: list[tuple[str, str]] = []

    def compute(self) -> FakeStream:
        """The stream of the training step."""
        return self._compute

    @contextlib.contextmanager
    def on_side(self) -> Iterator[None]:
        """Work inside is enqueued on side."""
        self._current = self.side
        try:
            yield
        finally:
            self._current = self._compute

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor from the pool of the current stream, with whatever it held before."""
        nbytes = math.prod(shape) * dtype.itemsize
        pool = self._pools.setdefault((self._current.name, nbytes), [])
        block = pool.pop() if pool else np.full(nbytes, self.POISON, np.uint8)
        lease = Lease(block)
        weakref.finalize(lease, pool.append, block).atexit = False
        return torch.from_numpy(np.asarray(lease)).view(dtype).reshape(shape)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy; it reads its source when it runs. It holds memory and not tensors, as a device does."""
        to, of = raw(destination), raw(source)
        self.launch("copy", lambda: np.copyto(to(), of()))

    def moved(self, value: Any) -> Any:
        """What the object's own ``to`` makes of it; it enqueues by itself, if anything."""
        self.calls.append(("move", self._current.name))
        return moved(value, torch.device("cpu"))

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        """Enqueue a kernel on the current stream."""
        self.calls.append((name, self._current.name))

        def run() -> None:
            kernel()
            self.now_s += self._takes_s.get(name, 0.0)

        self._current.enqueue(run)

    def record(self, stream: FakeStream) -> FakeEvent:
        """An event at the end of what is enqueued."""
        self.calls.append(("record", stream.name))
        event = FakeEvent(stream)
        stream.enqueue(functools.partial(setattr, event, "done", True))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Enqueue a wait: whoever comes to it lets the other stream run up to the event."""
        self.calls.append(("wait", stream.name))
        stream.enqueue(functools.partial(event.stream.run, event))

    def happened(self, event: FakeEvent, *, block: bool) -> bool:
        """Whether the event has happened."""
        if block:
            event.stream.run(event)
        return event.done

    def timed(self, stream: FakeStream) -> FakeEvent:
        """An event at the end of what is enqueued, which keeps the time at which it happens."""
        self.calls.append(("timed", stream.name))
        event = FakeEvent(stream)

        def happen() -> None:
            event.done, event.at_s = True, self.now_s

        stream.enqueue(happen)
        return event

    def elapsed_s(self, begin: FakeEvent, end: FakeEvent) -> float:
        """Seconds between two events."""
        return end.at_s - begin.at_s

    def checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueue a kernel that sums what lies in a tensor's memory when its turn comes."""
        with torch.inference_mode(False):
            total, content = torch.zeros((), dtype=torch.int64), raw(tensor)
        self.launch("checksum", lambda: setattr(total, "data", checksum(torch.from_numpy(content()))))
        return total

    def synchronize(self) -> None:
        """Let everything run to its end."""
        self._compute.run()
        self.side.run()


def raw(tensor: torch.Tensor) -> Callable[[], Bytes]:
    """The bytes of a tensor by address, as a kernel knows them: it keeps nothing alive.

    Only for tensors whose memory somebody else keeps: a slot, or a pool of `FakeStreams`.
    """
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    return lambda: np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
