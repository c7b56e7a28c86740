"""`AsyncLoader`: a sized, restartable iterable of batches that are read ahead."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch

from lit_async_data.device import Batch, Transform
from lit_async_data.engine import IDS, Engine
from lit_async_data.errors import ClosedError, ConfigError, ReadError, SourceError, TransformError
from lit_async_data.footprint import Footprint, amplified
from lit_async_data.options import LoaderOptions
from lit_async_data.ordering import schedule_of
from lit_async_data.passes import Passes
from lit_async_data.plan import EpochPlan
from lit_async_data.sources.base import Source
from lit_async_data.spec import BatchSpec, FieldSpec
from lit_async_data.stats import LoaderStats, WaitMeter
from lit_async_data.streams import checked_device, has_streams

log = logging.getLogger(__name__)

# Samples decoded for each one used.
WORTH_A_WARNING = 1.5


class AsyncLoader:
    """Batches of a source, read ahead while you compute.

    Iterate over it once per epoch; each pass is a new epoch, in a new order if there is a shuffle. The workers live on
    from pass to pass, and the first batches of the next epoch are read before this one ends. On the CPU a batch is a
    view of the memory that it was read into. It is yours: whatever you keep of it never changes, and keeping it costs
    memory but never blocks.

    One thread may iterate at a time, and one pass goes at a time: a second ``iter`` ends the first. Nothing is started
    or allocated before the first batch.

    Args:
        source: Where samples come from.
        options: `LoaderOptions`, or a mapping of their names.
        rank: This process, of ``world_size`` that share each step.
        world_size: Number of such processes.
        device: Where batches are handed out. On a device with streams (CUDA) they are copied there on a stream of
            the loader's own; CPU and MPS get them in host memory.
        device_depth: Batches copied ahead of the one in use. 0 reads and copies nothing ahead, for comparison.
        device_transform: Called with each batch on its device, on the copying stream; returns the batch to hand out.

    Raises:
        ConfigError: Options are wrong, or do not fit the source.
        MemoryBudgetError: The slots would take more than ``memory_budget``.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.arange(10.0), "y": np.arange(10)})
        >>> with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False)) as loader:
        ...     [batch["y"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        source: Source,
        options: LoaderOptions | Mapping[str, Any] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        device_depth: int = 2,
        device_transform: Transform | None = None,
    ) -> None:
        if not isinstance(source, Source):
            raise ConfigError(
                f"source: {source!r} is not a source; build one, as in HDF5Source('data.h5') or DatasetSource(dataset)"
            )
        self.source = source
        self.options = LoaderOptions.of(options)
        self.rank, self.world_size = operator.index(rank), operator.index(world_size)
        self.device = checked_device("cpu" if device is None else device)
        self._device_transform = device_transform
        self._depth = checked_depth(device_depth)
        #: Who starts the next copy: the loader, at the end of each ``next``, or a callback that calls `prefetch`.
        self.driven = False
        #: Asked at the start of each pass: steps of it that will be wanted, None for all.
        self.steps_wanted: Callable[[], int | None] = lambda: None
        self._schedule = schedule_of(source, self.options, rank, world_size)
        self._passes = Passes(self._schedule)
        # Lightning looks for `.batch_sampler.sampler.set_epoch` and for nothing else.
        self.batch_sampler = types.SimpleNamespace(sampler=self._passes)
        self.spec = _with_ids(source.spec) if self.options.with_ids else source.spec
        self.footprint.budget.check()
        self._meter, self._read = WaitMeter(), LoaderStats()
        self._engine: Engine | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, the same on every rank."""
        return self._schedule.steps

    def __iter__(self) -> Self:
        """Begin a new pass with the next batch. Costs nothing; Lightning calls it more often than it reads."""
        self._passes.restart()
        return self

    def __next__(self) -> Batch:
        """The next batch of the pass, waiting for it.

        Raises:
            StopIteration: The pass is over.
            ReadError, SourceError: This batch could not be read; the next call goes on with the one after it.
            TransformError: ``device_transform`` failed on this batch; as above.
            StalledError: Nothing came within ``timeout_s``.
            WorkerError: A worker died, or this process is a fork of the one that built the loader.
            ClosedError: The loader is closed.
        """
        started = time.perf_counter()
        engine = self._running()
        fill = engine.pipeline.ready + engine.queue.ready
        key = self._passes.advance(self.steps_wanted)
        if key is None:
            raise StopIteration
        try:
            batch = engine.queue.take(key)
        except BaseException as error:
            # A batch that failed has had its turn. One that never came is asked for again.
            if not isinstance(error, ReadError | SourceError | TransformError):
                self._passes.step_back()
            raise
        if not self.driven:
            # This batch is here; what is wrong with a later one is said when that is asked for.
            with contextlib.suppress(Exception):
                engine.queue.top_up(self._passes.wanted)
        self._meter.add(time.perf_counter() - started, first=key.step == 0, queue_fill=fill)
        return batch

    def next(self) -> Batch:
        """The next batch, waiting for it; after the last of an epoch comes the first of the next.

        Raises:
            ReadError, SourceError, TransformError, StalledError, WorkerError, ClosedError: As `__next__`.
        """
        if self._passes.over:
            self._passes.restart()
        return self.__next__()

    def prefetch(self) -> None:
        """Start reading, and copying, what will be asked for next; returns at once.

        Raises:
            WorkerError, ClosedError: As `__next__`.
        """
        self._running().queue.top_up(self._passes.wanted)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that begins the one of this epoch.

        Args:
            epoch: Counted from 0.
        """
        self._passes.set_epoch(epoch)

    @property
    def device_depth(self) -> int:
        """Batches copied ahead. Setting it drops what was read ahead; the order goes on where it was."""
        return self._depth

    @device_depth.setter
    def device_depth(self, depth: int) -> None:
        if checked_depth(depth) != self._depth:
            self._stop()
            self._depth = depth

    def stats(self) -> LoaderStats:
        """What was handed out, waited for and read so far."""
        seen = self._meter.stats()
        if self._engine is None:
            return seen.of(self._read.read, copied=self._read.copied)
        return self._engine.stats(seen)

    def close(self) -> None:
        """End the workers and give memory back; waits a few seconds at most. Twice is fine.

        Batches that were handed out stay valid. The source stays open: it is yours, and others may be reading it.
        """
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the machinery --------------------------------------------------------------------------------------------

    @property
    def footprint(self) -> Footprint:
        """The threads and the memory that the loader takes from the first batch on."""
        return Footprint.of(
            self.source,
            self.spec.narrowed() if has_streams(self.device) else self.spec,
            self.options,
            self._schedule,
            ahead=self._depth > 0,
            streams=has_streams(self.device),
        )

    @property
    def order(self) -> EpochPlan:
        """The plan of the first epoch."""
        return self._schedule.plan(0)

    def _running(self) -> Engine:
        if self._closed:
            raise ClosedError("the loader is closed; build a new one")
        if self._engine is not None:
            self._engine.pipeline.check()
        else:
            footprint = self.footprint
            self._warn(footprint)
            self._engine = Engine(
                self.source,
                self.options,
                self._schedule,
                footprint,
                device=self.device,
                spec=self.spec,
                depth=self._depth,
                transform=self._device_transform,
            )
            self._closer = weakref.finalize(self, self._engine.close)
        return self._engine

    def _warn(self, footprint: Footprint) -> None:
        """Say what will be slow; with the first batch, since a loader that is only described is not used."""
        source = self.source
        if source.chunks.reading == "python" and self.options.workers == "auto" and self._depth:
            log.warning(
                "workers=auto reads each batch of %s when it is asked for, since Python code per sample would, in a "
                "thread, keep the training loop from running; workers=1 reads ahead in a thread, for code that lets go "
                "of Python's lock, and prefetched(loader) takes a DataLoader with processes",
                source,
            )
        if footprint.amplification > WORTH_A_WARNING:
            log.warning("%s", amplified(self.order.shuffle, footprint.amplification, source.chunks.rows))

    def _stop(self) -> None:
        if self._closer is not None:
            self._read = self.stats()
            self._closer()
        self._engine = self._closer = None


def _with_ids(spec: BatchSpec) -> BatchSpec:
    if IDS in spec.fields:
        raise ConfigError(f"with_ids: the source has a field {IDS!r} of its own; give that field another key")
    return spec.with_field(IDS, FieldSpec((), np.dtype(np.int64)))


def checked_depth(depth: int) -> int:
    """A number of batches to copy ahead, or a `ConfigError`."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
        raise ConfigError(f"device_depth: {depth!r} is not a whole number from 0 on")
    return depth
