"""`PrefetchedLoader`: somebody else's loader, read ahead and copied ahead; `prefetched` makes one."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_async_data.device import streams
from lit_async_data.device.feed import Batch
from lit_async_data.device.profiling import NEXT, profiled, ranged
from lit_async_data.device.transform import DeviceTransform
from lit_async_data.errors import ClosedError, TransferError
from lit_async_data.hooks.callables import Function
from lit_async_data.host.resources import memory
from lit_async_data.loader.base_loader import BaseLoader
from lit_async_data.loader.engine import Engine
from lit_async_data.order.permutation import derived_key
from lit_async_data.order.plan import BatchIndex
from lit_async_data.prefetch.draw_watch import DrawWatch
from lit_async_data.prefetch.iterator_feed import IteratorFeed, uncopied
from lit_async_data.prefetch.loader_iterator import LoaderIterator, PassState, Taken
from lit_async_data.prefetch.packing import Packer
from lit_async_data.prefetch.pinned_buffers import PinnedBufferPool
from lit_async_data.prefetch.sharding import check_sharded
from lit_async_data.prefetch.state_snapshot import Snapshot

log = logging.getLogger(__name__)

# Attributes of instances that are never those of the loader inside.
OWN = frozenset({"loader", "externally_driven", "label", "logged"})


class PrefetchedLoader(BaseLoader):
    """What `prefetched` returns. One thread may iterate at a time, and one pass goes at a time.

    It hands all other attributes on to the loader, also when they are set.

    After an interrupt (Ctrl-C) you can go on, as in a notebook. An interrupt between two batches changes nothing. One
    inside ``next`` ends the pass, since somebody else's loader cannot begin in the middle: ``next`` on that pass is a
    `ClosedError` from then on, and ``iter`` begins a whole new one. A generator cannot begin anew; it goes on behind
    the batches that had been read ahead, with a warning.

    Attributes:
        loader: The loader that it reads.
        counted: Returns how many batches the consumer counts as done, by any count; None if it counts none.
        sharded_by_trainer: Whether a Trainer has dealt the samples to ranks; else each pass checks that somebody has.
    """

    loader: Iterable[Any]
    sharded_by_trainer = False
    counted: Callable[[], int | None] | None = None
    _stateful = False

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        device_depth: int,
        device: torch.device | str | None,
        device_transform: Function | None,
    ) -> None:
        self.loader = loader
        self._device_transform = device_transform
        # Without a device: the accelerator of this process, which may not have been chosen yet. Each rank has its own.
        self._reset(device, device_depth, 0)

    def _reset(self, device: torch.device | str | None, device_depth: int, verify_copies: int) -> None:
        super()._reset(device, device_depth, verify_copies)
        self._at = PassState()
        self._watch = DrawWatch(self.loader)
        self._warned = False

    def __len__(self) -> int:
        """The length of the loader; a `TypeError` if it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __iter__(self) -> LoaderIterator:
        """A new pass, which begins with its first batch. Costs nothing; Lightning calls it more often than it reads."""
        at = self._at
        at.asked, at.fresh = at.asked + 1, True
        return LoaderIterator(functools.partial(self._next_of, at.asked), at, self._run)

    def __next__(self) -> Batch:
        """The next batch of the pass, waiting for it.

        Raises:
            StopIteration: The pass is over.
            ConfigError: Several ranks would read the same samples.
            TransformError: ``device_transform`` failed on this batch; the next call goes on with the one after it.
            TransferError: Copy verification has found that a batch before this one was not what was read.
            WorkerError: This process is a fork of the one that began to read, or another thread is inside ``next``.
            ClosedError: The loader is closed, or an interrupt has ended the pass.
            Exception: Whatever the loader raised in place of this batch.
        """
        at, run, taken = self._at, self._run, self._taken()
        # From here on nothing is called, so no interrupt comes between: see `AsyncLoader.__next__`.
        at.step, at.before, at.state, run.interrupted, run.inside = taken.step + 1, at.state, taken.state, False, {}
        return taken.batch

    def _prefetch(self) -> None:
        at = self._at
        if self._run.interrupted:
            return  # the next batch reports it
        engine = self._running()
        if not (at.fresh or at.over or at.lost):
            with self._request():
                engine.queue.top_up(self._wanted)

    def _read_ahead(self) -> None:
        """Do nothing: a pass that began before its turn would begin before its epoch has been named."""

    @property
    def device(self) -> torch.device:
        """Where batches are handed out. When it is set, a pass that has begun stays where it is."""
        return streams.exact_device(self._device)

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = streams.checked_device(device)

    @property
    def _started(self) -> bool:
        return not self._at.fresh

    def stop(self) -> None:
        """End the thread and give memory back; the next batch begins a new pass."""
        self._at.fresh = True
        self._stop()

    # -- attributes of the loader ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Not names that begin with _: Lightning would take the loader's iterator from it, and end its workers.
        if name.startswith("_") or "loader" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in OWN or hasattr(type(self), name)
        if own or not hasattr(self.loader, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __repr__(self) -> str:
        # The loader's own repr may show all its batches, and the search for an accelerator starts its driver.
        name, closed = type(self.loader).__name__, "closed " if self._run.closed else ""
        try:
            size = f"{len(self):,} batches"
        except TypeError:
            size = "batches"
        if isinstance(self.loader, DataLoader):
            name += f" of {type(self.loader.dataset).__name__}"
        device = "the accelerator" if self._device is None else str(self._device)
        how = f"device={device}, device_depth={self._depth}"
        return f"<{closed}{type(self).__name__} of {size} from {name}, {how}>"

    def __getstate__(self) -> tuple[Any, ...]:
        # The running part stays in the process that started it.
        return self.loader, self._device_transform, self._device, self._depth, self._verify_copies

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.loader, self._device_transform, *options = state
        self._reset(*options)

    # -- the machinery -----------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> BatchIndex:
        return BatchIndex(self._at.started - 1, self._at.step)

    @property
    def _threaded(self) -> bool:
        return not isinstance(self.loader, DataLoader) or self.loader.num_workers > 0

    def _next_of(self, asked: int) -> Taken:
        if asked != self._at.asked:
            raise StopIteration  # another pass has begun
        return self._taken()

    def _taken(self) -> Taken:
        """The next batch. The caller hands it out and clears what is set in `Run`, with nothing called in between."""
        self._enter()
        try:
            return self._take()
        except BaseException:
            self._run.inside = {}
            raise

    def _take(self) -> Taken:
        started, at, run = time.perf_counter(), self._at, self._run
        engine = self._begin() if at.fresh else self._running()
        if at.lost:
            raise ClosedError(
                f"an interrupt has ended this pass after {at.step} batches: the batches that were read ahead are lost; "
                "begin a new pass with iter(loader)"
            )
        if at.over:
            raise StopIteration
        fill, key, feed = engine.ready, self._wanted, _feed_of(engine)
        self._note_state()
        run.interrupted = True  # unless this comes to an end
        try:
            take = engine.queue.take
            batch = ranged(NEXT, take, key) if profiled() else take(key)
            if not self.externally_driven:
                # This batch is here; an error of a later one is raised when that is asked for.
                with self._copy_errors:
                    engine.queue.top_up(feed.following(key))
            run.meter.add(time.perf_counter() - started, first=key.step == 0, queue_fill=fill)
            state = feed.handed_over(key)
            if not key.step:
                at.state = feed.begun
        except StopIteration:
            at.over, at.state = True, None
            engine.rest()
            run.interrupted = False
            raise
        except BaseException as error:
            if feed.raised_by_loader(error) or isinstance(error, Exception):
                # A batch that failed has had its turn. A batch that never came is asked for again; so is one on its
                # way, where copy verification has found something wrong with another.
                had_its_turn = feed.was_handed_out(key) and not isinstance(error, TransferError)
                at.step, run.interrupted = key.step + had_its_turn, False
            raise
        return Taken(batch, key.step, state)

    def _begin(self) -> Engine:
        """Begin a new pass; its first batch calls ``iter(loader)``. A generator goes on: it cannot begin anew."""
        at, engine = self._at, self._running()
        if inspect.isgenerator(self.loader) and at.started and not at.over:
            if not at.lost:
                at.fresh = False  # a new pass would lose the batches that were read ahead
                return engine
            log.warning(
                "an interrupt has ended the pass over a generator, which goes on behind the batches that were read "
                "ahead: up to %d batches are lost",
                2 * self._depth + 1,
            )
        if not self.sharded_by_trainer:
            check_sharded(self.loader)
        if self._depth and not self._threaded and not self._warned:
            self._warned = True
            log.warning(
                "the DataLoader has num_workers=0: each batch is read when it is asked for, since Python code per "
                "sample would, in a thread, keep the training loop from running; num_workers=1 or more reads ahead"
            )
        if engine.device != self.device:
            self._stop()
            engine = self._running()
        self._rest()
        counted = None if self.counted is None else self.counted()
        # Nothing is called here: an interrupt leaves the pass before, or one that has begun.
        at.started, at.step, at.fresh, at.over, at.lost = at.started + 1, 0, False, False, False
        at.counted, at.before, at.state = counted, None, None
        return engine

    def _note_state(self) -> None:
        """Called before a batch is taken."""

    def _rest(self) -> None:
        """End the current pass, if any; the engine serves on."""
        self._discard()
        if self._run.engine is not None:
            with self._request():
                self._run.engine.rest()

    def _discard(self) -> None:
        if self._run.interrupted:
            self._at.lost = not self._at.over
            self._stop(wait=True)  # if that is interrupted, it is done again
            self._run.interrupted = False

    def _reconfigure(self) -> None:
        """Change the depth of what runs; no batch that has been read is lost. Verification begins with a new engine."""
        engine = self._run.engine
        if engine is not None and not self._run.interrupted:
            with self._request():
                self._set_depth(engine)

    def _set_depth(self, engine: Engine) -> None:
        feed, threaded = _feed_of(engine), self._threaded
        feed.depth = self._depth if threaded else 0
        # Without a thread the next batch is read when it is asked for: memory for more than that one would lie idle.
        engine.queue.depth = self._depth if threaded else min(self._depth, 1)
        # Blocks for the batches that are being copied, for those that are ready, and for one that is being packed.
        self._blocks.most = engine.queue.depth + feed.depth + 1

    def _new_engine(self) -> Engine:
        device, function = self.device, self._device_transform
        on_device = streams.has_streams(device)
        self._blocks = PinnedBufferPool(functools.partial(memory.allocated, pinned=True), most=0)
        state = getattr(self.loader, "state_dict", None) if self._stateful else None
        feed = IteratorFeed(self.loader, Packer(self._blocks) if on_device else uncopied, 0, state, self._watch)
        engine = Engine(
            feed,
            device,
            depth=0,
            transform=None if function is None else DeviceTransform(function, device, number=_batch_seed),
            verify_copies=self._verify_copies if on_device else 0,
        )
        self._set_depth(engine)
        return engine


class StatefulPrefetchedLoader(PrefetchedLoader):
    """A prefetched loader whose loader has a state.

    Its state is that after the batch which was handed out last, however many have been read ahead; or the one before
    that batch, if the consumer counts what is done and has not counted it, as a Trainer after an error in its step.
    """

    _stateful = True

    def state_dict(self) -> Any:
        """The loader's state after the last batch that was handed out and counted as done.

        Raises:
            Exception: Whatever the loader's own ``state_dict`` raised.
        """
        at = self._at
        if at.before is not None and at.counted is not None and self.counted is not None and not at.over:
            done = self.counted()
            if done is not None and done - at.counted < at.step:
                return at.before.get()
        return self.loader.state_dict() if self._at.state is None else self._at.state.get()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from a state, with the next pass."""
        self._rest()
        self._at.state, self._at.before, self._at.fresh = None, None, True
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _note_state(self) -> None:
        # Where nothing has been read ahead. The state before the first batch is `IteratorFeed.begun`.
        if self._at.counted is not None and self._at.state is None and self._at.step:
            self._at.state = Snapshot.of(self.loader.state_dict)  # type: ignore[attr-defined]


def _feed_of(engine: Engine) -> IteratorFeed:
    assert isinstance(engine.feed, IteratorFeed)
    return engine.feed


def _batch_seed(key: BatchIndex) -> int:
    """The seed of a batch's generator: by rank, pass and batch."""
    distributed = torch.distributed
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return derived_key(0, rank, key.epoch, key.step)
