"""`prefetched`: a DataLoader, or any iterable, whose batches are read and copied ahead."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lit_async_data.engine import resources
from lit_async_data.engine.device import streams
from lit_async_data.engine.device.feeds import Batch, moved
from lit_async_data.engine.device.queues import DeviceTransform
from lit_async_data.engine.hooks import Function, check_callable
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.loader.base_loader import BaseLoader, Engine, Pass, Taken, Wiring
from lit_async_data.engine.prefetch import iterator_feed
from lit_async_data.engine.prefetch.iterator_feed import IteratorFeed, Packer, PassState, begins_nothing
from lit_async_data.errors import ClosedError, ConfigError
from lit_async_data.options import INSTEAD, explains_names, lightning_seed
from lit_async_data.order.permutation import derived_key
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.source import Source

# Packages whose samplers draw only from their generator.
KNOWN = ("torch", "torchdata")


class DealtOrder(NamedTuple):
    # The state of the sampler's generator before the pass, uint8; None if it draws nothing.
    generator: torch.Tensor | None
    begun: int  # the consumer's count of done batches when the pass began


def samplers_of(loader: Any) -> list[Any]:
    """The samplers of a DataLoader over a map-style dataset; none of any other loader."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return []
    batches = loader.batch_sampler
    return [loader.sampler] if batches is None else [batches, getattr(batches, "sampler", None)]


class SampledOrder:
    """The order of a DataLoader over a map-style dataset; for any other loader, `unknown` says why it has none."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.generator: torch.Generator | None = None  # of the sampler; None if it draws nothing
        self.is_global = False  # whether each batch may draw from torch's global generator
        if not (samplers := samplers_of(loader)):
            self.unknown = f"{type(loader).__name__} keeps no place in its data"
            return
        foreign = [type(each).__name__ for each in samplers if type(each).__module__.partition(".")[0] not in KNOWN]
        # Why the order cannot be dealt again; empty if it can.
        self.unknown = f"{foreign[0]} is not one of torch's samplers" if foreign else ""
        sampler = samplers[-1]
        if not (foreign or isinstance(sampler, SequentialSampler | DistributedSampler)):
            given = getattr(sampler, "generator", None)
            self.generator = torch.default_generator if given is None else given
            self.is_global = given is torch.default_generator

    def now(self) -> torch.Tensor | None:
        """The state of the generator when the sampler begins the next pass."""
        if self.generator is None:
            return None
        state = self.generator.get_state()
        seeds = self._loader.generator or torch.default_generator
        if self.generator is seeds and self._loader._iterator is None:  # noqa: SLF001  # only iterators that persist
            # A new iterator of torch draws the seed of its workers before its sampler draws.
            own = torch.Generator()
            own.set_state(state)
            torch.empty((), dtype=torch.int64).random_(generator=own)
            state = own.get_state()
        return state

    def continued(self, state: torch.Tensor | None, skip: int) -> Callable[[], Iterator[Any]]:
        """Returns a function that begins a pass in the order of a state of `now`, behind its first ``skip`` batches."""
        loader = copy.copy(self._loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Past `__setattr__`, which forbids a change.
        vars(loader).update({"_iterator": None, name: _Behind(getattr(loader, name), skip, self.generator, state)})
        return functools.partial(iter, loader)


class _Behind:
    def __init__(self, sampler: Any, skip: int, generator: torch.Generator | None, state: torch.Tensor | None) -> None:
        self._sampler, self._skip, self._generator, self._state = sampler, skip, generator, state

    def __iter__(self) -> Iterator[Any]:
        dealt = iter(self._sampler)
        # A sampler without a generator draws from the global one, which is then restored for the loop.
        with torch.random.fork_rng(devices=[]):
            if self._generator is not None and self._state is not None:
                self._generator.set_state(self._state)
            for _ in range(self._skip):
                next(dealt, None)
        yield from dealt

    def __len__(self) -> int:
        return len(self._sampler) - self._skip


# Names that samplers give their rank and their world size; Accelerate says process_index.
SIGNS = ("rank", "process_index", "num_replicas", "world_size", "_rank", "_num_replicas", "_world_size")


def check_sharded(loader: Any) -> None:
    """Refuse a DataLoader over a map-style dataset whose sampler has no rank under one of the usual names."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ranks, samplers = torch.distributed.get_world_size(), samplers_of(loader)
    known = any(isinstance(getattr(sampler, name, None), int) for sampler in samplers for name in SIGNS)
    if ranks > 1 and samplers and not known:
        raise ConfigError(
            f"prefetched(loader): {ranks} ranks would all read the same samples; build the loader with "
            "DataLoader(dataset, sampler=DistributedSampler(dataset), ...) and call loader.sampler.set_epoch(epoch) "
            "before each epoch. If each rank has its own dataset, write "
            "sampler=DistributedSampler(dataset, num_replicas=1, rank=0)"
        )


log = logging.getLogger(__name__)

SIDE_PASSES = 1  # separates the keys of passes beside the engine from keys of passes with it


class PrefetchedLoader(BaseLoader):
    """The result of `prefetched`. One thread may iterate at a time. All other attributes are those of the loader.

    Each ``iter`` is a pass of its own, as with the loader; one at a time reads ahead, and another one meanwhile reads a
    copy of the loader in its loop. All iterators of a generator are one pass, as without this class.

    You can keep using it after Ctrl-C, for example in a notebook. An interrupt between two batches changes nothing. One
    inside ``next`` ends the pass, since a foreign loader cannot begin in the middle: ``next`` on that pass is a
    `ClosedError` from then on, and ``iter`` begins a whole new one. A generator cannot begin anew; it goes on behind
    the batches that had been read ahead, with a warning.

    Attributes:
        loader: The loader that is read.
        counted: Returns the consumer's count of done batches, from any start; None if it counts nothing.
        dealt_order: The order of the current pass; None before the first.
        resumed_order: The order that the next pass continues, behind the batches that the consumer counts as done since
            it began; None to begin anew.
        sharded_by_trainer: Whether a Trainer has dealt the samples to ranks; else each pass checks the sampler.
    """

    loader: Iterable[Any]
    dealt_order: DealtOrder | None = None
    resumed_order: DealtOrder | None = None
    sharded_by_trainer = False
    counted: Callable[[], int | None] | None = None
    _foreign = True
    _cursor: Any  # its ``state`` is a `PassState`
    _stateful = False

    def __init__(
        self, loader: Iterable[Any], device_depth: int, device: torch.device | str | None, transform: Function | None
    ) -> None:
        self.loader = loader
        self._device_transform = transform
        # None stands for the accelerator of this process, which may not have been chosen yet.
        self._reset(device, device_depth)

    def _reset(self, device: torch.device | str | None, device_depth: int) -> None:
        super()._reset(device, device_depth)
        self._cursor, self._wiring = types.SimpleNamespace(state=PassState()), Wiring()
        self._side_passes = 0
        self.dealt_order = self.resumed_order = None

    def __len__(self) -> int:
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except Exception as error:
            # As from an object without a length, so that `list` and tqdm go on: a CombinedLoader has one after `iter`.
            raise TypeError(str(error)) from error

    def __bool__(self) -> bool:
        return bool(self.loader)

    def _prefetch(self, *, copy: bool = True) -> None:
        at = self._cursor.state
        # After an interrupt, the next request goes on. A pass must not begin before its epoch is named.
        if self._run.interrupted or not copy:
            return
        engine = self._running()
        if not (at.fresh or at.over or at.lost):
            with self._request():
                engine.queue.prefetch(BatchIndex(at.started - 1, at.step))

    @property
    def device(self) -> torch.device:
        """The device of the batches. A pass that has begun stays on its device if another one is set."""
        return streams.exact_device(self._device)

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = streams.checked_device(device)

    def stop(self) -> None:
        """End the thread and free memory. The next batch begins a new pass; a pass that has begun is over."""
        self._restart()
        self._stop()

    # -- attributes of the loader ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Not names that begin with _: Lightning would take the loader's iterator from it, and end its workers.
        if name.startswith("_") or "loader" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name == "loader" or hasattr(type(self), name)
        if own or not hasattr(self.loader, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __repr__(self) -> str:
        # The loader's repr may show all batches, and `device` may start the driver of an accelerator.
        closed = "closed " if self._run.closed else ""
        how = f"device={self._device or 'the accelerator'}, device_depth={self._depth}"
        return f"<{closed}{type(self).__name__} of {type(self.loader).__name__}, {how}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.loader, self._depth, self._device, self._device_transform)

    # -- the machinery -----------------------------------------------------------------------------------------------

    @property
    def _threaded(self) -> bool:
        if not isinstance(self.loader, DataLoader):
            return True
        return self.loader.num_workers > 0 and not SampledOrder(self.loader).is_global

    def _claim(self, one: Pass) -> bool:
        if not isinstance(self.loader, Iterator):
            return super()._claim(one)
        if one.left is None:  # all iterators are one pass, and each begins with iter(loader), as without this class
            self._restart()
            one.left = 0
        return True

    def _goes_on(self, engine: Engine) -> bool:
        """Whether the last pass goes on, since ``iter`` begins nothing anew."""
        reader = _feed_of(engine).reader
        if begins_nothing(self.loader) or reader is None or isinstance(self.loader, DataLoader):
            return begins_nothing(self.loader)
        if not begins_nothing(reader.iterator):
            return False
        reader.pause()  # ``iter`` may change what its ``next`` uses
        iterator = iter(self.loader)
        same = iterator is reader.iterator
        _feed_of(engine).continued = None if same else lambda: iterator
        self._set_depth(engine)
        return same

    def _stop(self, *, wait: bool = False) -> None:
        self._tell_lost()
        super()._stop(wait=wait)

    def _tell_lost(self) -> None:
        """Warn of batches that were read ahead of an iterator and are dropped."""
        engine, at = self._run.engine, self._cursor.state
        if not isinstance(self.loader, Iterator) or engine is None or self._run.interrupted or at.over or at.lost:
            return
        if engine.feed.forked or (reader := _feed_of(engine).reader) is None:
            return
        if ready := engine.queue.ready + sum(each.host.error is None for each in tuple(reader.pulled)):
            log.warning(
                "%d batches that were read ahead of %s are dropped: an iterator goes on behind them; device_depth=0 "
                "reads none ahead",
                *(ready, type(self.loader).__name__),
            )

    def _left(self) -> Any:
        return self._cursor.state.step

    def _beside(self, left: int | None) -> Iterator[Batch]:
        if left is not None:
            what = f"this iterator of {type(self.loader).__name__} was ended after {left} batches, when another one, of"
            raise ClosedError(f"{what} the Trainer's, began; begin a new pass with iter(loader)")
        ways = "without reading ahead; a loader of its own reads ahead: prefetched(another_loader)"
        self._say(logging.WARNING, f"another iterator of this {type(self.loader).__name__} is read in the loop, {ways}")
        loader, number = with_own_iterator(self.loader), self._side_passes
        self._side_passes += 1
        on_device = streams.has_streams(self.device)
        cast = functools.partial(moved, self.device, None) if on_device else None
        seed = functools.partial(_batch_seed, lightning_seed(), SIDE_PASSES)
        transform = DeviceTransform(self._device_transform, self.device, number=seed, cast=cast)
        # A map, unlike a generator, goes on behind a batch that failed.
        return map(transform, loader, map(BatchIndex, itertools.repeat(number), itertools.count()))

    def _take(self) -> Taken:
        started, run = time.perf_counter(), self._run
        engine = self._begin(started) if self._cursor.state.fresh else self._running()
        at, feed = self._cursor.state, _feed_of(engine)
        if at.over:
            raise StopIteration
        fill, key = feed.ready + engine.queue.ready, BatchIndex(at.started - 1, at.step)
        if at.step and key.epoch != feed.expected.epoch and not begins_nothing(self.loader):
            at = at._replace(lost=at.lost or "a stop in another thread")  # it replaced the engine during `next`
        if at.lost:
            what = f"{at.lost} has ended this pass after {at.step} batches: the batches that were read ahead are lost"
            raise ClosedError(f"{what}; begin a new pass with iter(loader)")
        # If nothing was read ahead, the loader's state is the one before this batch. `IteratorFeed.begun` is the first.
        if self._stateful and at.counted is not None and at.state is None and at.step:
            self._cursor.state = at = at._replace(state=iterator_feed.state_of(self.loader.state_dict))  # type: ignore[attr-defined]
        run.interrupted = True  # until the request ends
        try:
            batch = self._batch(engine, key, started, fill)
            state = feed.states.pop(key, None)
        except StopIteration:
            run.asked_s = time.perf_counter()
            self._cursor.state, self.resumed_order = at._replace(over=True, state=None), None
            engine.rest()
            raise
        except Exception as error:
            # A batch that failed counts as handed out. A batch that never came is asked for again; without any, so is
            # the pass, also in the middle of the order.
            step = key.step + (key < feed.expected)
            self._cursor.state, run.interrupted = at._replace(step=step, fresh=not step), False
            if isinstance(error, IndexError):  # another thread may have emptied the queue
                feed.check()
            raise
        finally:
            if key < feed.expected:
                self.resumed_order = None
        before = at.state if key.step else feed.begun
        return batch, at._replace(step=key.step + 1, before=before, state=state)

    def _begin(self, now_s: float) -> Engine:
        engine, at = self._running(), self._cursor.state
        if at.started and not at.over and self._goes_on(engine):
            if not at.lost:
                self._cursor.state = at._replace(fresh=False)  # a new pass would drop the batches that were read ahead
                return engine
            log.warning(
                "%s has ended the pass over a generator, which goes on behind the batches that were read ahead: up to "
                "%d batches are lost",
                *(at.lost, 2 * self._depth + 1),
            )
        if not self.sharded_by_trainer:
            check_sharded(self.loader)
        if self._depth and not self._threaded:
            why = "since Python code per sample would, in a thread, keep the training loop from running"
            why += "; num_workers=1 or more reads ahead"
            self._say(logging.WARNING, f"the DataLoader has num_workers=0: each batch is read when asked for, {why}")
        if engine.device != self.device:
            self._stop()
            engine = self._running()
        self._rest()
        counted = None if self.counted is None else self.counted()
        order, dealt = SampledOrder(self.loader), self.resumed_order
        if dealt is None:
            dealt = DealtOrder(order.now(), counted or 0)
        elif (done := (counted or 0) - dealt.begun) > 0:
            _feed_of(engine).continued = order.continued(dealt.generator, done)
        self.dealt_order = dealt
        self._cursor.state = PassState(at.started + 1, fresh=False, counted=counted)
        self._run.before, self._run.began_s = self.stats(), now_s
        return engine

    def _rest(self) -> None:
        self._discard()
        if (engine := self._run.engine) is not None:
            self._tell_lost()
            with self._request():
                engine.rest()

    def _discard(self) -> None:
        if self._run.interrupted:
            at = self._cursor.state
            self._cursor.state = at._replace(lost="" if at.over else at.lost or self._run.ended_by)
        super()._discard()

    def _reconfigure(self) -> None:
        engine = self._run.engine
        if engine is not None and not self._run.interrupted:
            with self._request():
                self._set_depth(engine)

    def _set_depth(self, engine: Engine) -> None:
        feed, threaded = _feed_of(engine), self._threaded
        feed.depth = self._depth if threaded else 0
        # Without a thread, each batch is read on request: memory for more than one would lie idle.
        engine.queue.depth = self._depth if threaded else min(self._depth, 1)
        # Blocks for the batches that are being copied, or are ready, and for one that is being packed.
        self._blocks.most = engine.queue.depth + feed.depth + 1

    def _new_engine(self) -> Engine:
        device, function = self.device, self._device_transform
        on_device = streams.has_streams(device)
        self._blocks = iterator_feed.PinnedBufferPool(functools.partial(resources.allocated, pinned=True), most=0)
        state = getattr(self.loader, "state_dict", None) if self._stateful else None
        feed = IteratorFeed(self.loader, Packer(self._blocks) if on_device else iterator_feed.uncopied, 0, state)
        number = functools.partial(_batch_seed, lightning_seed(), 0)
        transform = None if function is None else DeviceTransform(function, device, number=number)
        engine = Engine(feed, device, depth=0, transform=transform)
        self._set_depth(engine)
        return engine


class StatefulPrefetchedLoader(PrefetchedLoader):
    """A prefetched loader whose loader has a state.

    Its state is the one after the batch that was handed out last, however many have been read ahead; or the one before
    that batch, if the consumer counts batches as done and has not counted it, as a Trainer after an error in its step.
    """

    _stateful = True

    def state_dict(self) -> Any:
        """The loader's state after the last batch that was handed out and counted as done.

        Raises:
            Exception: Any error of the loader's own ``state_dict``.
        """
        at = self._cursor.state
        if at.before is not None and at.counted is not None and self.counted is not None and not at.over:
            done = self.counted()
            if done is not None and done - at.counted < at.step:
                return at.before()
        return self.loader.state_dict() if at.state is None else at.state()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from a state, with the next pass."""
        self._rest()
        self._cursor.state = self._cursor.state._replace(state=None, before=None, fresh=True)
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]


def with_own_iterator(loader: Any) -> Any:
    """A copy of a DataLoader: the original, and batch samplers of Lightning, keep one iterator each."""
    if not hasattr(loader, "_iterator"):
        return loader
    copied = copy.copy(loader)
    vars(copied).update(_iterator=None, batch_sampler=copy.copy(getattr(loader, "batch_sampler", None)))
    return copied


def _feed_of(engine: Engine) -> IteratorFeed:
    assert isinstance(engine.feed, IteratorFeed)
    return engine.feed


def _batch_seed(seed: int, kind: int, key: BatchIndex) -> int:
    distributed = torch.distributed
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return derived_key(seed, kind, rank, key.epoch, key.step)


@explains_names(dict.fromkeys(INSTEAD, "give it to the loader that is wrapped"))
def prefetched(
    loader: Iterable[Any],
    device_depth: int = 2,
    device: torch.device | str | None = None,
    device_transform: Function | None = None,
) -> PrefetchedLoader:
    """Read any loader ahead in a thread, and have its batches on the device when they are wanted.

    The loader is anything that can be iterated over: a DataLoader, sized or not, a list, a generator. A batch is
    anything: nested mappings, sequences, named tuples and dataclasses of tensors. Objects with a method ``to`` move
    themselves; everything else is handed on unchanged. Tensors are packed into pinned memory that is allocated once,
    unless they are pinned already, copied on a side stream while the step before is computed, and handed out on the
    device. On CPU and MPS batches are read ahead and handed out unchanged.

    Iterate over the result as over the loader. ``iter(loader)`` is called in your thread, with the first batch of a
    pass, and ``next`` in a reader thread; an error is raised unchanged in place of its batch. A DataLoader with
    ``num_workers=0`` is read in your thread when a batch is asked for, since its Python code would keep the training
    loop from running; its copies overlap all the same. A loader that fills the same memory again for each batch must
    hand out copies, or be read with ``device_depth=0``.

    Args:
        loader: The loader to read.
        device_depth: Batches read ahead on the host, and as many copied ahead. 0 does neither, for comparison.
        device: Where batches are handed out; None for the accelerator of this machine, or the CPU if there is none.
        device_transform: Called with each batch on its device, on the side stream; returns the batch to hand out.
            If it takes random numbers, as in `AsyncLoader`, they are seeded by Lightning's ``seed_everything``, rank,
            pass and batch.

    Returns:
        The loader, read ahead. All its other attributes are the loader's.

    Raises:
        ConfigError: The loader cannot be iterated over, or prefetches by itself; an option is wrong.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(5), batch_size=2, num_workers=1)
        >>> with prefetched(loader, device="cpu") as batches:
        ...     len(batches), [batch.tolist() for batch in batches]
        (3, [[0, 1], [2, 3], [4]])
        >>> batches
        <closed PrefetchedLoader of DataLoader, device=cpu, device_depth=2>
    """
    if isinstance(loader, AsyncLoader | PrefetchedLoader):
        what = f"{type(loader).__name__} prefetches by itself; set its device and device_depth"
        raise ConfigError(f"prefetched(loader): {what}")
    given: object = loader  # its declared type excludes a source
    if isinstance(given, Source):
        ways = "write AsyncLoader(source, LoaderOptions(batch_size=64)), which reads batches of its samples ahead"
        raise ConfigError(f"prefetched(loader): {loader!r} is a source, not a loader; {ways}")
    kind, of_samples = type(loader), isinstance(given, Dataset)
    if not hasattr(kind, "__iter__") and (of_samples or not hasattr(kind, "__getitem__")):
        what = "gives samples, not batches" if of_samples else "cannot be iterated over"
        ways = "give it a DataLoader (of batches, with batch_size=None)"
        raise ConfigError(f"prefetched(loader): {loader!r} {what}; {ways}")
    check_callable("device_transform", device_transform)
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    made = StatefulPrefetchedLoader if stateful else PrefetchedLoader
    return made(loader, device_depth, device, device_transform)
