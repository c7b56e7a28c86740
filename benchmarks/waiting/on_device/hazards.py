"""The hazards of copies that run beside kernels: each forced on a device, with its guard and without it.

A loader that lacks a wait is right most of the time. Each hazard therefore holds one of the two streams back, so that
the race happens every time; its docstring numbers the steps. All kernels and memory of a step were used before, because
loading a kernel or allocating memory may itself wait for the device.

`HAZARDS` run on any `Rig`: `Gpu`, or a simulated device in the tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from lit_async_data import AsyncLoader, LoaderOptions
from lit_async_data.engine.device.queues import StreamQueue
from lit_async_data.engine.device.streams import Streams
from lit_async_data.engine.loader import base_loader
from lit_async_data.engine.pipeline.pipeline import COPYING
from lit_async_data.testing import ArraySource
from waiting.on_device.simulated import replaced_streams

BATCH = 4
STEPS = 8
# One slot that is filling or ready, and one more.
SLOTS = 2
# Batches before the hazard holds a stream back.
WARM_UP = 3
# Overwrites memory: no sample has this number.
OTHER = -7
# Seconds to wait for a batch on the host.
PATIENCE = 30.0

Which = Literal["side", "compute"]
# The smallest and largest value of each row of a tensor when the device read it: shape (2, rows).
Extremes = Callable[[], npt.NDArray[Any]]
Batch = dict[str, torch.Tensor]
# Each run uses new sample numbers: memory of an earlier run is never right by chance.
_numbers = itertools.count(1, BATCH * STEPS)


class Rig(Protocol):
    """A device on which one stream can be held back."""

    #: Values of a sample: enough that each batch gets its own memory block.
    width: int
    simulated: bool

    def streams(self, device: torch.device) -> Streams:
        """The streams for a loader, with the mutation `lacking` mixed in."""
        ...

    lacking: type | None

    def hold(self) -> None:
        """Hold the slow stream back: work enqueued from now on runs after all that the program does next."""
        ...

    def read(self, tensor: torch.Tensor) -> Extremes:
        """Enqueue a read of a tensor on compute."""
        ...

    def overwritten(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate a tensor of the same size on the current stream, and enqueue overwriting it there."""
        ...

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Side is the current stream inside."""
        ...

    def set_factor(self, factor: float) -> None:
        """Enqueue a change of what `transform` multiplies with, 1 at first, on compute."""
        ...

    def transform(self, batch: Batch) -> Batch:
        """Multiply the values into new tensors, with a kernel on the current stream."""
        ...

    def finish(self) -> None:
        """Wait for everything."""
        ...


@dataclasses.dataclass
class Scene:
    """A loader on a rig, and the reads of its batches.

    Attributes:
        first: The number of the first sample.
        behind: How many batches before its own the transform makes a batch of.
    """

    rig: Rig
    loader: AsyncLoader
    first: int
    behind: int = 0
    _read: list[tuple[Extremes, npt.NDArray[Any] | int]] = dataclasses.field(default_factory=list)
    _step: int = 0

    def next(self) -> torch.Tensor:
        """The large field of the next batch."""
        self._step += 1
        batch: torch.Tensor = self.loader.next()["x"]
        return batch

    def read(self, tensor: torch.Tensor) -> None:
        """Enqueue a read of the last batch."""
        begin = self.first + BATCH * max(self._step - 1 - self.behind, 0)
        self._read.append((self.rig.read(tensor), np.arange(begin, begin + BATCH)))

    def read_other(self, tensor: torch.Tensor) -> None:
        """Enqueue a read of memory that belongs to the step and to no batch."""
        self._read.append((self.rig.read(tensor), OTHER))

    def submit(self, batches: int = 1) -> None:
        """Enqueue the copies of batches: this many, or as many as there are slots."""
        queue, pool = self._engine.queue, self._engine.feed.pipeline.pool
        deadline = time.monotonic() + PATIENCE
        while (ready := queue.ready) < batches:
            assert time.monotonic() < deadline, "no batch came on the host"
            self.loader._prefetch()
            if queue.ready == ready and pool.count(COPYING) == len(pool):
                return  # nothing more can be read before the device goes on

    def drop(self) -> None:
        """Drop the enqueued batches, as `set_epoch` does, without starting others."""
        queue: Any = self._engine.queue
        queue._forget()

    @property
    def raw(self) -> torch.Tensor:
        """As large as the large field of a batch as it is copied; without memory."""
        return torch.empty((BATCH, self.rig.width), dtype=torch.int32, device="meta")

    @property
    def _engine(self) -> Any:
        assert self.loader._run.engine is not None
        return self.loader._run.engine

    def warm_up(self, *, ahead: bool) -> None:
        """Take some batches; with ``ahead``, each while the previous one is still in use."""
        for _ in range(WARM_UP):
            batch = self.next()
            if ahead:
                self.submit()
            self.read(batch)
            del batch
            self.loader._prefetch()
        self.rig.finish()

    def wrong(self) -> bool:
        """Whether any read saw a wrong value."""
        self.rig.finish()
        return any((extremes() != wanted).any() for extremes, wanted in self._read)


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A race that happens without its guard.

    Attributes:
        name: In words.
        slow: The stream to hold back.
        steps: Force the race.
        mutant: The name of a class of the package, and its replacement without the guard.
        workers: Reader threads; with 0 the loader reads a batch and enqueues its copy when asked for it.
        transforms: Whether there is a transform on the device.
        keeps: Whether it makes each batch of the one before, which it has kept.
        depth: Batches copied ahead.
    """

    name: str
    slow: Which
    steps: Callable[[Scene], None]
    mutant: tuple[str, type]
    workers: int = 0
    transforms: bool = False
    keeps: bool = False
    depth: int = 1

    def shows(self, rig: Rig, *, guarded: bool) -> bool:
        """Whether values are wrong.

        Args:
            rig: A device that can hold the ``slow`` stream back.
            guarded: Run the package as it is; otherwise without the guard.
        """
        first = next(_numbers)
        numbers = np.arange(first, first + BATCH * STEPS, dtype=np.int32)
        # Stored, and not broadcast: batches must be read in far less time than a stream is held back.
        source = ArraySource({"x": np.repeat(numbers[:, None], rig.width, axis=1), "y": numbers})
        options = LoaderOptions(
            batch_size=BATCH, shuffle=False, workers=self.workers, worker_kind="thread", queue_depth=SLOTS - 1
        )
        target, replaced = self.mutant
        with contextlib.ExitStack() as stack:
            rig.lacking = replaced if target == "Streams" and not guarded else None
            stack.enter_context(replaced_streams(rig.streams, simulated=rig.simulated))
            if target != "Streams" and not guarded:
                stack.enter_context(mock.patch.object(base_loader, target, replaced))
            transform = (Keeping(rig.transform) if self.keeps else rig.transform) if self.transforms else None
            device = "cpu" if rig.simulated else "cuda"
            loader = AsyncLoader(source, options, device=device, device_depth=self.depth, device_transform=transform)
            loader._wiring.externally_driven = True
            stack.callback(rig.finish)
            with loader:
                scene = Scene(rig, loader, first, int(self.keeps))
                self.steps(scene)
                return scene.wrong()


# -- missing guards ----------------------------------------------------------------------------------------------------


class Lacking:
    """Mixed into `Streams`: skips some waits while a stream is held back.

    Attributes:
        held: Whether a stream is held back.
    """

    held = False

    def lacks(self, on: Which, number: int) -> bool:
        """Whether to skip a wait.

        Args:
            on: The stream that should wait.
            number: Number of the wait on this stream since it was held back, from 0.
        """
        raise NotImplementedError

    def wait(self, stream: Any, event: Any) -> None:
        on: Which = "side" if stream is self.side else "compute"  # type: ignore[attr-defined]
        if self.held and self.lacks(on, self._count(on)):
            return
        super().wait(stream, event)  # type: ignore[misc]

    def _count(self, on: Which) -> int:
        counts = vars(self).setdefault("_counts", {"side": 0, "compute": 0})
        counts[on] += 1
        return int(counts[on] - 1)


class ComputeNeverWaits(Lacking):
    """Compute waits neither for a handed-out batch nor for a dropped one."""

    def lacks(self, on: Which, number: int) -> bool:
        return on == "compute"


class SideNeverWaits(Lacking):
    """The copy starts at once."""

    def lacks(self, on: Which, number: int) -> bool:
        return on == "side"


class NobodyNotesWhoReads:
    """The allocator does not know that compute reads what a transform has made, nor that side reads raw tensors."""

    held = False

    def record_stream(self, value: Any, stream: Any) -> bool:
        return True


class CopiesCountAsDoneAtOnce(StreamQueue):
    """A slot is free as soon as its copy is enqueued."""

    def reclaim(self, *, block: bool) -> None:
        while self.copying:
            self.copying.popleft().release()


class Keeping:
    """A transform that makes each batch of the one before, which it has kept, as one that mixes both does."""

    def __init__(self, transform: Callable[[Batch], Batch]) -> None:
        self._transform = transform
        self._before: Batch | None = None

    def __call__(self, batch: Batch) -> Batch:
        made = self._transform(self._before or batch)
        self._before = batch
        return made


Class = TypeVar("Class", bound=type)


def mixed(lacking: type | None, cls: Class) -> Class:
    """The class with a mutation mixed in, or the class itself."""
    return cls if lacking is None else type(lacking.__name__, (lacking, cls), {})  # type: ignore[return-value]


# -- the hazards -------------------------------------------------------------------------------------------------------


def read_before_write(scene: Scene) -> None:
    """1. Side is held back. 2. A batch is asked for: its copy is enqueued behind that. 3. Compute reads the batch.

    Where compute does not wait for the copy, it reads what lay there before.
    """
    scene.warm_up(ahead=False)
    scene.rig.hold()
    scene.read(scene.next())


def write_after_read(scene: Scene) -> None:
    """1. Compute is held back. 2. It is to read a batch, which Python then forgets. 3. The next batch gets that memory.

    Where side does not wait for what compute had to do when the memory was taken, the copy writes over a batch that has
    not been read. Again for each batch that there is.
    """
    scene.warm_up(ahead=False)
    for _ in range(WARM_UP, STEPS):
        batch = scene.next()
        scene.rig.hold()
        scene.read(batch)
        del batch
        scene.loader._prefetch()


def slot_rewritten(scene: Scene) -> None:
    """1. Side is held back. 2. The copies of more batches are wanted than there are slots.

    Where a slot counts as free before its copy has happened, the device gets what was read into it later. Else the
    program blocks until side goes on.
    """
    scene.warm_up(ahead=False)
    scene.rig.hold()
    for _ in range(WARM_UP, STEPS):
        scene.submit(SLOTS + 1)
        scene.read(scene.next())


def transformed_over(scene: Scene) -> None:
    """1. Compute is held back. 2. It is to read a batch, which Python then forgets: memory of side. 3. Somebody takes
    memory as large on side, and writes to it: the next transform, or whoever shares the stream.

    Where the allocator does not know who reads the batch, it is overwritten before.
    """
    scene.warm_up(ahead=False)
    batch = scene.next()
    scene.rig.hold()
    scene.read(batch)
    like = torch.empty_like(batch, device="meta")
    del batch
    with scene.rig.on_side():
        scene.rig.overwritten(like)


def transformed_early(scene: Scene) -> None:
    """1. Compute is held back. 2. It is to change a tensor that the transform reads. 3. A batch is asked for, of which
    nothing is on its way.

    Where side waits for nothing that compute had to do before the copy, the transform reads what was there before.
    """
    scene.warm_up(ahead=False)
    scene.drop()
    scene.rig.set_factor(0)
    scene.rig.finish()
    scene.rig.hold()
    scene.rig.set_factor(1)
    scene.read(scene.next())


def raw_reused(scene: Scene) -> None:
    """1. Side is held back. 2. Copy and transform of a batch are enqueued behind that. 3. The step takes memory as
    large as what is copied, and writes to it.

    The copy's destination died with step 2: where the allocator does not know that side uses it, step and copy write
    to the same memory.
    """
    scene.warm_up(ahead=True)
    batch = scene.next()
    scene.rig.hold()
    scene.submit()
    own = scene.rig.overwritten(batch)
    scene.read(batch)
    del batch
    scene.read(scene.next())
    scene.rig.finish()
    scene.read_other(own)


def kept_by_transform(scene: Scene) -> None:
    """1. Side is held back. 2. A transform is to read the raw tensors of the batch before behind that, and forgets
    them. 3. The step takes memory as large, and writes to it.

    Where the allocator does not know that side uses them, the transform reads what the step has written.
    """
    scene.warm_up(ahead=True)
    batch = scene.next()
    del batch
    for held in (False, True):
        if held:
            scene.rig.finish()
            scene.rig.hold()
        scene.submit()
        taken = [scene.rig.overwritten(scene.raw) for _ in range(SLOTS + 1)]  # all that is free
        scene.read(scene.next())
        scene.rig.finish()
        for tensor in taken:
            scene.read_other(tensor)
        scene.rig.finish()
        del taken, tensor


def dropped(scene: Scene) -> None:
    """1. Side is held back. 2. The copy of a batch is enqueued behind that. 3. The batch is dropped, as another epoch
    is wanted. 4. The step takes memory as large, and writes to it.

    Where compute does not wait for the copy of what is dropped, that writes into memory of the step.
    """
    scene.warm_up(ahead=True)
    batch = scene.next()
    scene.rig.hold()
    scene.submit()
    scene.drop()
    own = scene.rig.overwritten(batch)
    scene.rig.finish()
    scene.read_other(own)


STREAMS = "Streams"
HAZARDS = (
    Hazard("batch read before it is written", "side", read_before_write, (STREAMS, ComputeNeverWaits)),
    Hazard("memory written before it is read", "compute", write_after_read, (STREAMS, SideNeverWaits)),
    Hazard(
        "slot filled before it is copied",
        "side",
        slot_rewritten,
        ("StreamQueue", CopiesCountAsDoneAtOnce),
        workers=1,
        depth=SLOTS + 1,
    ),
    Hazard(
        "memory of a transform given away",
        "compute",
        transformed_over,
        (STREAMS, NobodyNotesWhoReads),
        transforms=True,
    ),
    Hazard(
        "transform reads what compute has to write",
        "compute",
        transformed_early,
        (STREAMS, SideNeverWaits),
        transforms=True,
    ),
    Hazard(
        "raw tensors die before the transform",
        "side",
        raw_reused,
        (STREAMS, NobodyNotesWhoReads),
        workers=1,
        transforms=True,
    ),
    Hazard(
        "batch kept by a transform given away",
        "side",
        kept_by_transform,
        (STREAMS, NobodyNotesWhoReads),
        workers=1,
        transforms=True,
        keeps=True,
    ),
    Hazard("dropped batch still being copied", "side", dropped, (STREAMS, ComputeNeverWaits), workers=1),
)
