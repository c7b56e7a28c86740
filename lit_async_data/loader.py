"""`AsyncLoader`: a sized, restartable iterable of batches that are read ahead."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import time
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self

import torch

from lit_async_data.device.inline_queue import Batch, Transform
from lit_async_data.device.streams import checked_device, has_streams
from lit_async_data.device.transform import check_callable, takes_rng
from lit_async_data.engine import Engine, indexed_spec
from lit_async_data.errors import AsyncDataError, ClosedError, ConfigError, ReadError, SourceError, TransformError
from lit_async_data.host.nan_check import NanCheck
from lit_async_data.host.resource_plan import ResourcePlan, slow
from lit_async_data.host.schedule import schedule_of
from lit_async_data.host.stats import LoaderStats, QueueFill, WaitMeter
from lit_async_data.options import LoaderOptions, non_negative_int
from lit_async_data.order.epoch_cursor import At, EpochCursor, StepsWanted
from lit_async_data.order.plan import EpochPlan
from lit_async_data.sources.base import Source
from lit_async_data.threads import leave_at_exit
from lit_async_data.unexpected import Unexpected

log = logging.getLogger(__name__)


class AsyncLoader:
    """Batches of a source, read ahead while you compute.

    Iterate over it once per epoch; each pass is a new epoch, in a new order if there is a shuffle. The workers live on
    from pass to pass, and the first batches of the next epoch are read before this one ends. On the CPU a batch is a
    view of the memory that it was read into. It is yours: whatever you keep of it never changes, and keeping it costs
    memory but never blocks.

    One thread may iterate at a time, and one pass goes at a time: a second ``iter`` ends the first. Nothing is started
    or allocated before the first batch.

    After an interrupt (Ctrl-C) it can be used on, as in a notebook. What was read ahead is dropped, batches that you
    have stay as they are, and the next one is the one that you did not get: none is skipped and none is another.

    Args:
        source: Where samples come from.
        options: `LoaderOptions`, or a mapping of their names.
        rank: This process, of ``world_size`` that share each step.
        world_size: Number of such processes.
        device: Where batches are handed out. On a device with streams (CUDA) they are copied there on a stream of
            the loader's own; CPU and MPS get them in host memory.
        device_depth: Batches copied ahead of the one in use. 0 reads and copies nothing ahead, for comparison.
        device_transform: Called with each batch on its device, on the copying stream, and with a ``torch.Generator`` if
            it has a second parameter, or one named ``rng``; returns the batch to hand out. The generator begins anew
            with each batch, by seed, epoch and first sample; it is None where `LoaderOptions.augment` says so.
        verify_copies: How many batches, from the first on, are verified: their checksums are compared at each stage of
            the way to the device, which reads every batch a few more times. A batch that did not arrive, or that
            changed later, is a `TransferError`.

    Raises:
        ConfigError: Options are wrong, or do not fit the source.
        MemoryBudgetError: The slots would take more than ``memory_budget``.

    Example:
        >>> import numpy as np
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
        verify_copies: int = 0,
    ) -> None:
        if not isinstance(source, Source):
            raise ConfigError(
                f"source: {source!r} is not a source; build one, as in HDF5Source('data.h5') or DatasetSource(dataset)"
            )
        self.source = source
        self.options = LoaderOptions.of(options)
        self.rank, self.world_size = operator.index(rank), operator.index(world_size)
        self._device = checked_device("cpu" if device is None else device)
        check_callable("device_transform", device_transform)
        self._device_transform = device_transform
        self._depth = non_negative_int("device_depth", device_depth)
        self._verify_copies = non_negative_int("verify_copies", verify_copies)
        #: Who starts the next copy: the loader, at the end of each ``next``, or a callback that calls `prefetch`.
        self.externally_driven = False
        #: Asked at the start of each pass: steps of it, and of those after it, that will be wanted; None for all.
        self.steps_wanted: StepsWanted = lambda: (None, None)
        self._schedule = schedule_of(
            source, self.options, rank, world_size, transform_draws=takes_rng(device_transform)
        )
        self._passes = EpochCursor(self._schedule)
        # Lightning looks for `.batch_sampler.sampler.set_epoch` and for nothing else.
        self.batch_sampler = types.SimpleNamespace(sampler=self._passes)
        self.spec = indexed_spec(source.spec) if self.options.return_indices else source.spec
        self._footprints: dict[tuple[bool, bool], ResourcePlan] = {}
        self.footprint.budget.check()
        self._nans = NanCheck(source, self._schedule)
        self._meter, self._read = WaitMeter(), LoaderStats()
        self._ahead = Unexpected(log, "starting what comes after a batch failed", AsyncDataError)
        self._engine: Engine | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        # Whether a request never came to its end: the engine may be in any state, and is replaced by a new one.
        self._interrupted = False
        self._closed = False

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, the same on every rank."""
        return self._schedule.steps

    def __repr__(self) -> str:
        shuffle = f"shuffle={self.options.shuffle}"
        return f"<AsyncLoader of {len(self):,} batches of {self.options.batch_size}, {shuffle}, from {self.source!r}>"

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
            TransferError: Copy verification has found that a batch before this one was not what was read.
            ClosedError: The loader is closed.
        """
        started = time.perf_counter()
        engine = self._running()
        fill = engine.pipeline.ready + engine.queue.ready
        key = self._passes.upcoming(self.steps_wanted)
        if key is None:
            raise StopIteration
        after = self._passes.after(key)
        self._interrupted = True  # unless this comes to an end
        try:
            batch = engine.queue.take(key)
            if not self.externally_driven:
                # This batch is here; what is wrong with a later one is raised when that is asked for.
                with self._ahead:
                    engine.queue.top_up(self._passes.following(key))
            self._meter.add(time.perf_counter() - started, first=key.step == 0, queue_fill=fill)
        except (ReadError, SourceError, TransformError):
            self._passes.at, self._interrupted = after, False  # the batch has had its turn
            leave_at_exit()
            raise
        except Exception:
            self._interrupted = False  # it never came, and is asked for again
            leave_at_exit()
            raise
        # From here on nothing is called. CPython delivers an interrupt when a call begins or ends, so that none comes
        # between this and the end of `__next__`: the batch is the caller's, or it is still the next.
        self._passes.at, self._interrupted = after, False
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
        with self._request() as engine:
            engine.queue.top_up(self._passes.wanted)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that begins the one of this epoch, counted from 0."""
        self._passes.set_epoch(epoch)

    def read_ahead(self) -> None:
        """Start reading, into host memory only, what will be asked for next: for a loader whose turn is yet to come.

        Raises:
            WorkerError, ClosedError: As `__next__`.
        """
        if self._depth:
            self._passes.expect(self.steps_wanted)
            with self._request() as engine:
                engine.queue.read_ahead(self._passes.wanted)

    @property
    def device_depth(self) -> int:
        """Batches copied ahead. Setting it drops what was read ahead; the order goes on where it was."""
        return self._depth

    @device_depth.setter
    def device_depth(self, depth: int) -> None:
        if non_negative_int("device_depth", depth) != self._depth:
            self._stop()
            self._depth = depth

    @property
    def device(self) -> torch.device:
        """Where batches are handed out. Setting it drops what was read ahead, as with `device_depth`."""
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        if (checked := checked_device(device)) != self._device:
            self._stop()
            self._device = checked

    @property
    def verify_copies(self) -> int:
        """Batches that are watched on their way. Setting it begins to count anew, and drops as `device_depth` does."""
        return self._verify_copies

    @verify_copies.setter
    def verify_copies(self, batches: int) -> None:
        if non_negative_int("verify_copies", batches) != self._verify_copies:
            self._stop()
            self._verify_copies = batches

    @property
    def started(self) -> bool:
        """Whether the pass has had its first batch."""
        return self._passes.started

    @property
    def fill(self) -> QueueFill:
        """How much is ready at this moment."""
        return QueueFill() if self._engine is None else self._engine.fill

    def stats(self) -> LoaderStats:
        """What was handed out, waited for and read so far."""
        seen = self._meter.stats()
        if self._engine is None:
            return seen.of(self._read.read, copied=self._read.copied, device=self._read.device)
        return self._engine.stats(seen)

    def close(self) -> None:
        """End the workers and give memory back; waits a few seconds at most. Twice is fine.

        Batches that were handed out stay valid. The source stays open: it is yours, and others may be reading it.

        Raises:
            TransferError: As `__next__`; the loader is closed all the same.
        """
        self._closed = True
        self._stop()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Not only where it runs: what it is asked by (`steps_wanted`) belongs to this process, too.
        raise TypeError(
            "an AsyncLoader cannot be pickled or copied: its threads, its memory and its place in the order belong to "
            "this object and this process; pickle or copy its source and its options, and build another loader of them"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if self._engine is not None or self._passes.at != At():
            self.__reduce_ex__(4)
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the machinery --------------------------------------------------------------------------------------------

    @property
    def footprint(self) -> ResourcePlan:
        """The threads and the memory that the loader takes from the first batch on."""
        ahead, streams = self._depth > 0, has_streams(self.device)
        if (ahead, streams) not in self._footprints:
            self._footprints[ahead, streams] = ResourcePlan.of(
                self.source,
                self.spec.narrowed() if streams else self.spec,
                self.options,
                self._schedule,
                ahead=ahead,
                streams=streams,
            )
        return self._footprints[ahead, streams]

    @property
    def order(self) -> EpochPlan:
        """The plan of the first epoch."""
        return self._schedule.plan(0)

    @contextlib.contextmanager
    def _request(self) -> Iterator[Engine]:
        engine = self._running()
        self._interrupted = True  # unless this comes to an end
        try:
            yield engine
        except Exception:
            self._interrupted = False
            raise
        self._interrupted = False

    def _running(self) -> Engine:
        if self._closed:
            raise ClosedError("the loader is closed; build a new one")
        if self._interrupted:
            self._stop()
        if self._engine is not None:
            self._engine.pipeline.check()
            return self._engine
        footprint = self.footprint
        # With the first batch, since a loader that is only described is not used.
        for line in slow(self.source, self.options, footprint, self.order, ahead=self._depth > 0):
            log.warning("%s", line)
        # Where this is interrupted, the next request closes what there is of it.
        self._interrupted = True
        self._engine = Engine(
            self.source,
            self.options,
            self._schedule,
            footprint,
            device=self.device,
            spec=self.spec,
            depth=self._depth,
            transform=self._device_transform,
            verify_copies=self._verify_copies,
            nans=self._nans,
        )
        self._closer = weakref.finalize(self, self._engine.close)
        self._interrupted = False
        return self._engine

    def _stop(self) -> None:
        engine, closer = self._engine, self._closer
        if engine is not None:
            self._read = self.stats()
            self._interrupted = True  # until it is closed: where that is interrupted, it is done again
            try:
                engine.close()
            except Exception:  # it is closed all the same
                self._forget(closer)
                raise
            self._forget(closer)
        self._interrupted = False

    def _forget(self, closer: weakref.finalize[Any, Any] | None) -> None:
        if closer is not None:
            closer.detach()
        self._engine = self._closer = None
