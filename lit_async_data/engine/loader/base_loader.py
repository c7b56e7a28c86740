"""`BaseLoader`: passes over batches. One has the engine, which reads ahead, and moves the place of the loader.

Other passes read in the caller's thread, and change nothing of the loader: see docs/design/lightning.md.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

import torch

from lit_async_data.engine.device import streams
from lit_async_data.engine.device.feeds import Batch, Feed
from lit_async_data.engine.device.queues import InlineQueue, StreamQueue, Transform
from lit_async_data.engine.device.streams import NEXT, profiled
from lit_async_data.engine.stats import LEAST_S, LEAST_STEPS, LoaderStats, Watch
from lit_async_data.engine.supervisor import report_once
from lit_async_data.errors import ClosedError, WorkerError
from lit_async_data.options import whole
from lit_async_data.order.plan import BatchIndex


class Engine:
    """A feed, which reads batches ahead, and a device queue, which copies them ahead.

    It refers to no loader, so that a dropped loader is closed at once.

    Args:
        depth: Batches that are copied ahead, to a device with streams; 0 to read and copy nothing ahead.
        inline: Whether to copy nothing, so that ``transform`` gets each batch in host memory.
        asks: Whether the feed must be asked after each batch, since it has no threads that read on.
    """

    def __init__(
        self,
        feed: Feed,
        device: torch.device,
        *,
        depth: int,
        inline: bool = False,
        transform: Transform | None = None,
        asks: bool = True,
    ) -> None:
        self.feed, self.device = feed, device
        self.side = side = None if inline else streams.streams_of(device)
        self.copies = side is not None
        self.asks = asks or self.copies
        self.queue = InlineQueue(feed, depth, transform) if side is None else StreamQueue(feed, side, depth, transform)

    @property
    def fill(self) -> str:
        feed, queue = self.feed, self.queue
        # There is one slot more than the depth, for the batch that the user has.
        host = f"host {min(feed.ready, feed.depth)}/{feed.depth}{feed.how}" if feed.depth else ""
        device = f"device {queue.ready}/{queue.depth}" if self.copies and queue.depth else ""
        return f"{host} {device}".strip() or "no queue"

    def stats(self, before: LoaderStats) -> LoaderStats:
        """Earlier statistics with the ones of this engine."""
        found, waited = self.feed.stats(), self.queue.waited
        return dataclasses.replace(
            before,
            read=before.read.plus(found.read),
            copied=before.copied + found.copied,
            device=waited + before.device if waited and before.device else waited,
            workers=found.workers,
            slots=found.slots,
        )

    def rest(self) -> None:
        """End the pass and free its device memory. If this was interrupted, only `close` may follow."""
        try:
            self.queue.close()
        finally:
            self.feed.rest(wait=True)

    def close(self, *, wait: bool = False) -> None:
        """Idempotent, also after an interrupt."""
        if self.feed.forked:
            return  # threads and device belong to another process, and so may the thread that held a lock at the fork
        try:
            self.queue.close()
        finally:
            self.feed.close(wait=wait)


@dataclasses.dataclass
class Run:
    engine: Engine | None = None  # None before the first request, and after the loader was stopped
    closer: weakref.finalize[Any, Any] | None = None  # closes the engine when the loader is dropped
    # Whether a request did not come to its end: then the engine may be in any state, and must be replaced.
    interrupted: bool = False
    ended_by: str = "an interrupt"  # the reason, for people
    unanswered: bool = False  # whether the last request for a batch goes on, or ended in an error
    closed: bool = False  # whether the loader is closed for good
    stats: LoaderStats = dataclasses.field(default_factory=LoaderStats)  # without the counts of the engine
    before: LoaderStats = dataclasses.field(default_factory=LoaderStats)  # all counts when the last pass began
    began_s: float = 0.0  # the moment of that
    asked_s: float = 0.0  # the moment at which the last request for a batch ended
    # The thread that is inside ``next``, by the key ``"thread"``; empty if none is.
    inside: dict[str, int] = dataclasses.field(default_factory=dict)


# A batch that is about to be handed out, and the place behind it.
Taken = tuple[Batch, Any]


class BatchIterator(abc.ABC):
    """Hands out each batch once, whenever an interrupt (Ctrl-C) comes."""

    _cursor: Any  # one assignment replaces its ``state``, the place
    _run: Run

    @abc.abstractmethod
    def _taken(self) -> Taken: ...

    def __next__(self) -> Batch:
        """The next batch, waiting for it.

        Raises:
            StopIteration: The pass is over.
            ReadError, SourceError: This batch could not be read. The next call goes on behind it.
            TransformError: A transform failed on this batch. The next call goes on behind it.
            StalledError: The batch did not come within ``timeout_s``.
            WorkerError: A worker died, this process is a fork of the process that began to read, or another thread is
                inside ``next``. If reader processes died of this batch, the next call goes on behind it.
            ClosedError: The loader is closed; or an interrupt, an exit or a stop ended a pass over a foreign loader.
            Exception: Any error of a foreign loader in place of this batch.
        """
        batch, after = self._taken()
        cursor, run = self._cursor, self._run
        # No calls from here on: CPython delivers an interrupt when a call begins or ends, so none comes before the end
        # of `__next__`.
        cursor.state, run.interrupted, run.unanswered, run.inside = after, False, False, {}
        return batch


class Pass(BatchIterator):
    """One iteration over a loader. One thread may advance it at a time."""

    def __init__(self, loader: BaseLoader) -> None:
        self._loader = loader
        self._cursor, self._run = loader._cursor, loader._run  # noqa: SLF001
        self._beside: Iterator[Batch] | None = None
        self.left: Any = None  # the place of the pass when another one took the engine from it; else None

    def __iter__(self) -> Self:
        return self

    def _taken(self) -> Taken:
        loader = self._loader
        if self._beside is None and not loader._claim(self):  # noqa: SLF001
            # The loader keeps its place; a pass that reads for this one has a place of its own.
            beside = loader._beside(self.left)  # noqa: SLF001
            if isinstance(beside, Pass):
                self._beside, self._cursor, self._run = beside, beside._cursor, beside._run  # noqa: SLF001
            else:
                self._beside, self._cursor, self._run = beside, types.SimpleNamespace(), Run()
        if self._beside is None:
            try:
                return loader._taken()  # noqa: SLF001
            except StopIteration:
                self.close()
                raise
        if loader._run.closed:
            loader._taken()  # noqa: SLF001  # raises
        if isinstance(self._beside, Pass):
            return self._beside._taken()  # noqa: SLF001  # one barrier for both
        return next(self._beside), None

    def close(self) -> None:
        """Let another pass have the engine. Idempotent."""
        self._beside = iter(())

    @property
    def closed(self) -> bool:
        return self._beside is not None

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning's CombinedLoader holds iterators, and programs copy and pickle Trainers.
        return _Copied, ()


class _Copied(Iterator[Batch]):
    def __next__(self) -> NoReturn:
        what = "this is a copy of a pass, and only the original has its place in the data"
        raise ClosedError(f"{what}; write iter(loader)")


log = logging.getLogger(__name__)


@dataclasses.dataclass
class Wiring:
    """The connections of a DataModule, a callback or a test to a loader. Refers to no loader."""

    externally_driven: bool = False  # whether a callback starts the next copy, not the end of each ``next``
    # Under a Trainer, the priority of a pass for the engine: 0 for a pass of the user, None if the Trainer does not
    # iterate over this loader itself.
    priority: Callable[[Pass], int | None] | None = None
    label: str = ""  # the name of the loader in log lines, such as its stage; empty for none
    logged: set[str] = dataclasses.field(default_factory=set)  # lines that loaders which share it have logged


class BaseLoader(BatchIterator):
    """A loader whose engine starts with the first batch, is replaced after an interrupt, and ends with the loader.

    Attributes:
        local_world_size: Processes of this job on this machine, which share its memory and cores; None for the number
            that torchrun sets, or 1. It can be set before the first batch.
    """

    local_world_size: int | None
    _wiring: Any  # a `Wiring`
    _foreign = False  # whether it reads a foreign loader
    _new_engine: Callable[[], Engine]
    #: The next batch, and the place behind it, to which the caller moves.
    _take: Callable[[], Taken]
    #: The place at which a pass that loses the engine goes on.
    _left: Callable[[], Any]
    #: Begins to read without the engine: from a place on, or a whole pass.
    _beside: Callable[[Any], Iterator[Batch]]
    #: Starts to read the next batches, and with ``copy=True``, the default, to copy them. Returns at once.
    #: A pass over a foreign loader begins only with its first batch. May raise `WorkerError` and `ClosedError`.
    _prefetch: Callable[..., None]

    def _reset(self, device: torch.device | str | None, device_depth: int) -> None:
        self._device = None if device is None else streams.checked_device(device)
        self._depth = whole("device_depth", device_depth, 0)
        self._run = Run()
        self._owner: weakref.ref[Pass] | None = None  # the pass that has the engine
        self.local_world_size = None

    def _reconfigure(self) -> None:
        """The device or the depth has changed."""
        self._stop()

    def _restart(self) -> None:
        """Have the next batch of the engine begin a pass."""
        self._cursor.state = self._cursor.state._replace(fresh=True)

    @property
    def _epoch_is_named(self) -> bool:
        return False

    @property
    def _started(self) -> bool:
        """Whether the pass has had its first batch."""
        return not self._cursor.state.fresh

    # -- passes ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Pass:
        """A pass with its own place, which costs nothing before its first batch."""
        return Pass(self)

    def _taken(self) -> Taken:
        """`_take`, for one thread at a time. `__next__` clears the marks in `Run`."""
        # In one step of C, so that only one of two threads finds no other inside.
        thread = threading.get_ident()
        if self._run.inside.setdefault("thread", thread) != thread:
            what = "two threads called next of this loader at once, but one thread may iterate at a time; give each "
            raise WorkerError(f"{what}its own loader, or take batches in one thread and hand them to the others")
        self._run.unanswered = True
        try:
            return self._take()
        except BaseException as error:
            self._run.inside = {}
            if isinstance(error, Exception):
                self._run.interrupted = False  # the request has come to an end
            else:
                self._run.ended_by = type(error).__name__
            raise

    def _claim(self, one: Pass) -> bool:
        """Give the engine to a pass that begins, unless another one needs it more; returns whether the pass has it."""
        owner = self._engine_pass()
        if owner is one:
            return True
        if one.left is not None:
            return False
        needs = self._wiring.priority
        priority = None if needs is None else needs(one)
        if priority is None:
            # The traceback of an error may keep a pass that the program has left, as in a notebook.
            alone = self._run.inside.get("thread", thread := threading.get_ident()) == thread
            takes = owner is None or self._epoch_is_named or (self._run.unanswered and alone)
        else:
            assert needs is not None
            takes = priority > (0 if owner is None else needs(owner) or 0)
        if takes:
            self._release()
            self._restart()
            self._run.unanswered = True
            self._owner = weakref.ref(one)
        return takes

    def _engine_pass(self) -> Pass | None:
        owner = None if self._owner is None else self._owner()
        return None if owner is None or owner.closed else owner

    def _release(self) -> None:
        """Take the engine from the pass that has it."""
        owner = self._engine_pass()
        if owner is not None:
            owner.left = self._left()
        self._owner = None

    # -- options ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the batches. Setting it drops batches that were read ahead; the order goes on."""
        assert self._device is not None
        return self._device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        if (checked := streams.checked_device(device)) != self._device:
            self._device = checked
            self._reconfigure()

    @property
    def device_depth(self) -> int:
        """Batches copied ahead. Setting it drops batches that were read ahead; the order goes on."""
        return self._depth

    @device_depth.setter
    def device_depth(self, depth: int) -> None:
        if whole("device_depth", depth, 0) != self._depth:
            self._depth = depth
            self._reconfigure()

    @property
    def fill(self) -> str:
        """How full the queues are at this moment, as ``"host 60/80 (4 × 20) device 2/2"``, if 4 slots hold 20 each."""
        engine = self._run.engine  # read once: another thread may close the loader
        return "no queue" if engine is None else engine.fill

    def stats(self) -> LoaderStats:
        """Counts and times of the batches that the loader has handed out and read so far."""
        engine, stats = self._run.engine, self._run.stats
        return dataclasses.replace(stats) if engine is None or engine.feed.forked else engine.stats(stats)

    def verdict(self) -> str:
        """Why the loop waited for data in its last or current pass: a sentence as `DevicePrefetcher` logs.

        It counts from the first request for a batch to the last one so far, of the pass that reads ahead; of less than
        20 batches or 1 s it says that this is too little. docs/training/metrics.md explains each sentence. Any thread
        may call it; a batch that is taken meanwhile may or may not count.

        Example:
            >>> import numpy as np
            >>> from lit_async_data import AsyncLoader
            >>> from lit_async_data.testing import ArraySource
            >>> with AsyncLoader(ArraySource({"x": np.zeros(8)}), {"batch_size": 4, "shuffle": False}) as loader:
            ...     batches = list(loader)
            ...     loader.verdict().partition(" in ")[0]
            'too little to say of 2 batches'
        """
        run, stats = self._run, self.stats()
        steps, total_s = stats.batches - run.before.batches, max(run.asked_s - run.began_s, 0.0)
        if steps < LEAST_STEPS or total_s < LEAST_S:
            least = f"a verdict takes {LEAST_STEPS} batches and {LEAST_S:.0f} s of one pass"
            return f"too little to say of {steps} batches in {total_s:.1f} s: {least}"
        who = "the loop" if stats.device is None else "the device"
        return Watch([self], [run.before]).verdict(total_s).sentence(who, f"{total_s:.1f} s", prefix="")

    def close(self) -> None:
        """End the threads and give memory back; waits a few seconds at most. Calling it twice is fine.

        Batches that were handed out stay valid. The data stay open: they are yours, and others may be reading them.
        """
        self._run.closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the machinery ---------------------------------------------------------------------------------------------

    def _say(self, level: int, line: str) -> None:
        """Log a line, unless a loader that shares `logged` has logged the same."""
        wiring = self._wiring
        if line not in wiring.logged:
            wiring.logged.add(line)
            log.log(level, "%s%s", wiring.label and f"{wiring.label}: ", line)

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """Mark a request: if an interrupt ends it, the engine is replaced."""
        run = self._run
        run.interrupted = True
        try:
            yield
        except Exception:
            run.interrupted = False
            raise
        run.interrupted = False

    def _batch(self, engine: Engine, key: BatchIndex, began_s: float, fill: int) -> Batch:
        """Take a batch, start to copy the next ones, and count the wait."""
        run, queue, stats = self._run, engine.queue, self._run.stats
        if profiled():
            with torch.profiler.record_function(NEXT):
                batch = queue.take(key)
        else:
            batch = queue.take(key)
        if engine.asks and not self._wiring.externally_driven:
            try:
                queue.prefetch(engine.feed.following(key))
            except Exception as error:  # noqa: BLE001  # the request for a later batch raises it
                if not run.closed:
                    report_once(log, "starting the copies after a batch failed", error)
        run.asked_s = time.perf_counter()
        waited_s = run.asked_s - began_s - queue.transform_s
        stats.batches, stats.transform_s = stats.batches + 1, stats.transform_s + queue.transform_s
        stats.last_wait_s, stats.queue_fill = waited_s, fill
        if key.step:
            stats.wait_s += waited_s
        else:
            stats.epoch_gap_s, stats.gap_s = waited_s, stats.gap_s + waited_s
        return batch

    def _running(self) -> Engine:
        """The engine, started if necessary; a `ClosedError` or `WorkerError` if it cannot be used."""
        run, engine = self._run, self._run.engine  # read once, here and below: another thread may close the loader
        if engine is not None and (not (run.interrupted or run.closed) or engine.feed.forked):
            engine.feed.check()
            return engine
        if run.closed:
            raise ClosedError("the loader is closed; build a new one")
        self._discard()
        if (engine := run.engine) is None:
            with self._request():  # if this is interrupted, the next request closes the engine
                run.engine = engine = self._new_engine()
                run.closer = weakref.finalize(self, engine.close)
            if self._run.closed:  # another thread found no engine to close
                self._stop()
                return self._running()  # raises
        return engine

    def _discard(self) -> None:
        if self._run.interrupted:
            self._stop(wait=True)  # if that is interrupted, it is done again
            self._run.interrupted = False

    def _stop(self, *, wait: bool = False) -> None:
        run = self._run
        if (engine := run.engine) is None:
            return
        seen = self.stats()
        run.interrupted = True  # until it is closed: if that is interrupted, it is done again
        try:
            engine.close(wait=wait)
        except Exception:  # the engine is closed all the same
            self._forget(engine, seen)
            raise
        self._forget(engine, seen)

    def _forget(self, engine: Engine, seen: LoaderStats) -> None:
        run = self._run
        if run.engine is not engine:  # two threads have stopped it, and the loop may have started the next one
            return
        if (closer := run.closer) is not None:
            closer.detach()
        for name in ("read", "copied", "device", "workers", "slots"):
            setattr(run.stats, name, getattr(seen, name))
        run.engine = run.closer = None
        run.interrupted, run.ended_by = False, Run.ended_by
