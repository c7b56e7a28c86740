"""`PrefetchedLoader`: somebody else's loader, read ahead and copied ahead; what `prefetched` gives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from lit_async_data.device.inline_queue import Batch, Transform
from lit_async_data.device.streams import checked_device, exact_device
from lit_async_data.errors import AsyncDataError, ClosedError, TransferError
from lit_async_data.host.stats import DeviceWait, LoaderStats, QueueFill, ReadStats, WaitMeter
from lit_async_data.options import non_negative_int
from lit_async_data.order.plan import BatchIndex
from lit_async_data.prefetch.draw_watch import DrawWatch
from lit_async_data.prefetch.engine import Relay
from lit_async_data.prefetch.loader_iterator import LoaderIterator, PassState, Taken
from lit_async_data.prefetch.sharding import check_sharded
from lit_async_data.unexpected import Unexpected

log = logging.getLogger(__name__)


class PrefetchedLoader:
    """What `prefetched` gives. One thread may iterate at a time, and one pass goes at a time.

    Attributes that are not its own are those of the loader, also when they are set.

    After an interrupt (Ctrl-C) it can be used on, as in a notebook. An interrupt between two batches changes nothing.
    One inside ``next`` ends the pass, since somebody else's loader cannot begin in the middle: ``next`` on that pass is
    a `ClosedError` from then on, and ``iter`` begins a whole new one. A generator cannot begin anew; it goes on behind
    what had been read ahead, and a warning says so.

    Attributes:
        loader: What it reads.
        driven: Who starts the next copy: it does, at the end of each ``next``, or a callback that calls `prefetch`.
        by_trainer: Whether a callback has made it for a Trainer, which has dealt samples to ranks; else it is looked at
            whether somebody has.
    """

    loader: Iterable[Any]
    externally_driven = False
    sharded_by_trainer = False
    _stateful = False

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        device_depth: int,
        device: torch.device | str | None,
        device_transform: Transform | None,
    ) -> None:
        self.loader = loader
        self._depth, self._verify_copies = non_negative_int("device_depth", device_depth), 0
        # None for the accelerator of this process, which may not have been chosen yet: each rank has its own.
        self._device = None if device is None else checked_device(device)
        self._device_transform = device_transform
        self._reset()

    def _reset(self) -> None:
        """As new: nothing has been read."""
        self._at = PassState()
        self._watch = DrawWatch(self.loader)
        self._meter, self._read = WaitMeter(), ReadStats()
        self._waited: DeviceWait | None = None
        self._relay: Relay | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._said = self._closed = False
        self._ahead = Unexpected(log, "starting what comes after a batch failed", AsyncDataError)

    def __len__(self) -> int:
        """That of the loader; a `TypeError` if it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __iter__(self) -> LoaderIterator:
        """A new pass, which begins with its first batch. Costs nothing; Lightning calls it more often than it reads."""
        at = self._at
        at.asked, at.fresh = at.asked + 1, True
        return LoaderIterator(functools.partial(self._next_of, at.asked), at)

    def __next__(self) -> Batch:
        """The next batch of the pass, waiting for it.

        Raises:
            StopIteration: The pass is over.
            ConfigError: Several ranks would read the same.
            TransformError: ``device_transform`` failed on this batch; the next call goes on with the one after it.
            TransferError: Copy verification has found that a batch before this one was not what was read.
            WorkerError: This process is a fork of the one that began to read.
            ClosedError: The loader is closed, or an interrupt has ended the pass.
            Exception: Whatever the loader raised in place of this batch.
        """
        at, taken = self._at, self._taken()
        # From here on nothing is called, so that no interrupt comes between: see `AsyncLoader.__next__`.
        at.step, at.state, at.interrupted = taken.step + 1, taken.state, False
        return taken.batch

    def prefetch(self) -> None:
        """Start copying what will be asked for next; returns at once. A pass begins with its first batch only."""
        at = self._at
        if at.interrupted:
            return  # the next batch reports it
        relay = self._running()
        if not (at.fresh or at.over or at.lost):
            with self._request():
                relay.queue.top_up(self._wanted)

    def read_ahead(self) -> None:
        """Nothing: who calls ``iter(loader)`` before its turn does so before its epoch has been named."""

    @property
    def device(self) -> torch.device:
        """Where batches are handed out. When it is set, a pass that has begun stays where it is."""
        return exact_device(self._device)

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self._device = checked_device(device)

    @property
    def device_depth(self) -> int:
        """Batches read and copied ahead. It can be set at any time; nothing that has been read is lost."""
        return self._depth

    @device_depth.setter
    def device_depth(self, depth: int) -> None:
        self._depth = non_negative_int("device_depth", depth)
        if self._relay is not None and not self._at.interrupted:
            with self._request():
                self._relay.set_depth(depth)

    @property
    def verify_copies(self) -> int:
        """Batches that are watched on their way to a device with streams; to be set before the first."""
        return self._verify_copies

    @verify_copies.setter
    def verify_copies(self, batches: int) -> None:
        self._verify_copies = non_negative_int("verify_copies", batches)

    @property
    def started(self) -> bool:
        """Whether the pass has had its first batch."""
        return not self._at.fresh

    @property
    def fill(self) -> QueueFill:
        """How much is ready at this moment."""
        return QueueFill() if self._relay is None else self._relay.fill

    def stats(self) -> LoaderStats:
        """What was handed out, waited for and read so far."""
        waited = self._waited if self._relay is None else self._relay.queue.waited
        return self._meter.stats().of(self._read_so_far(), copied=0, device=waited)

    def close(self) -> None:
        """End the thread and give memory back; waits a few seconds at most. Twice is fine.

        Batches that were handed out stay valid. The loader stays as it is: it is yours.
        """
        self._closed = True
        self._stop()

    def stop(self) -> None:
        """As `close`, but the next batch begins a new pass."""
        self._at.fresh = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loader's own --------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Not what begins with _: Lightning would take the loader's iterator from it, and end its workers.
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
        return f"prefetched({self.loader!r}, device_depth={self._depth}, device={str(self.device)!r})"

    def __getstate__(self) -> dict[str, Any]:
        # What runs stays in the process that started it.
        return {
            name: vars(self)[name] for name in ("loader", "_depth", "_verify_copies", "_device", "_device_transform")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    # -- the machinery -----------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> BatchIndex:
        return BatchIndex(self._at.started - 1, self._at.step)

    @property
    def _threaded(self) -> bool:
        return not isinstance(self.loader, DataLoader) or self.loader.num_workers > 0

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        """What runs is asked to do something; it is thrown away later, unless this comes to an end."""
        self._at.interrupted = True
        try:
            yield
        except Exception:
            self._at.interrupted = False
            raise
        self._at.interrupted = False

    def _next_of(self, asked: int) -> Taken:
        if asked != self._at.asked:
            raise StopIteration  # another pass has begun
        return self._taken()

    def _taken(self) -> Taken:
        """The next batch. Whoever hands it out clears ``interrupted``, with nothing called in between."""
        started, at = time.perf_counter(), self._at
        relay = self._begin() if at.fresh else self._running()
        if at.lost:
            raise ClosedError(
                f"an interrupt has ended this pass after {at.step} batches: what was read ahead is lost; "
                "begin a new pass with iter(loader)"
            )
        if at.over:
            raise StopIteration
        fill, key = relay.ready, self._wanted
        at.interrupted = True  # unless this comes to an end
        try:
            batch = relay.queue.take(key)
            if not self.externally_driven:
                # This batch is here; what is wrong with a later one is raised when that is asked for.
                with self._ahead:
                    relay.queue.top_up(relay.feed.following(key))
            self._meter.add(time.perf_counter() - started, first=key.step == 0, queue_fill=fill)
            state = relay.feed.handed_over(key)
        except StopIteration:
            at.over, at.state = True, None
            relay.rest()
            at.interrupted = False
            raise
        except BaseException as error:
            if relay.feed.gave(error) or isinstance(error, Exception):
                # A batch that failed has had its turn. One that never came is asked for again, and so is one on its
                # way, where copy verification has found something wrong with another.
                had_its_turn = relay.feed.given(key) and not isinstance(error, TransferError)
                at.step, at.interrupted = key.step + had_its_turn, False
            raise
        return Taken(batch, key.step, state)

    def _begin(self) -> Relay:
        """A new pass; its first batch calls ``iter(loader)``. A generator goes on: it cannot begin anew."""
        at, relay = self._at, self._running()
        if inspect.isgenerator(self.loader) and at.started and not at.over:
            if not at.lost:
                at.fresh = False  # what has been read ahead of it would be lost
                return relay
            log.warning(
                "an interrupt has ended the pass over a generator, which goes on behind what was read ahead: up to %d "
                "batches are lost",
                2 * self._depth + 1,
            )
        if not self.sharded_by_trainer:
            check_sharded(self.loader)
        if self._depth and not self._threaded and not self._said:
            self._said = True
            log.warning(
                "the DataLoader has num_workers=0: each batch is read when it is asked for, since Python code per "
                "sample would, in a thread, keep the training loop from running; num_workers=1 or more reads ahead"
            )
        if relay.device != self.device:
            self._stop()
            relay = self._running()
        self._rest()
        # Nothing is called here: an interrupt leaves the pass before, or one that has begun.
        at.started, at.step, at.fresh, at.over, at.lost = at.started + 1, 0, False, False, False
        return relay

    def _rest(self) -> None:
        """End the pass that goes, if any; what runs serves on."""
        self._clear_up()
        if self._relay is not None:
            with self._request():
                self._relay.rest()

    def _clear_up(self) -> None:
        """After an interrupt inside a request: end the pass, and throw away what runs."""
        if self._at.interrupted:
            self._at.lost = not self._at.over
            self._stop(wait=True)  # if that is interrupted, it is done again
            self._at.interrupted = False

    def _running(self) -> Relay:
        if self._closed:
            raise ClosedError("the loader is closed; call prefetched() again")
        if self._relay is not None:
            self._relay.check()
        self._clear_up()
        if self._relay is not None:
            return self._relay
        relay = Relay(
            self.loader,
            device=self.device,
            depth=self._depth,
            threaded=self._threaded,
            transform=self._device_transform,
            verify_copies=self._verify_copies,
            state=getattr(self.loader, "state_dict", None) if self._stateful else None,
            watch=self._watch,
        )
        self._become(_relay=relay, _closer=weakref.finalize(self, relay.close))
        return relay

    def _become(self, **attributes: Any) -> None:
        """Set several attributes of this object at once: an interrupt comes before or after all of them."""
        vars(self).update(attributes)

    def _read_so_far(self) -> ReadStats:
        if self._relay is None:
            return self._read
        now = self._relay.feed.stats
        return dataclasses.replace(self._read.plus(now.batches, now.bytes, now.seconds), ready=self._relay.feed.ready)

    def _stop(self, *, wait: bool = False) -> None:
        relay, closer = self._relay, self._closer
        if relay is None or closer is None:
            return
        seen = self.stats()
        self._at.interrupted = True  # until it is closed: where that is interrupted, it is done again
        try:
            relay.close(wait=wait)
        except Exception:  # it is closed all the same
            self._forget(seen, closer)
            raise
        self._forget(seen, closer)

    def _forget(self, seen: LoaderStats, closer: weakref.finalize[Any, Any]) -> None:
        closer.detach()
        read = dataclasses.replace(seen.read, ready=0)
        self._become(_read=read, _waited=seen.device, _relay=None, _closer=None)
        self._at.interrupted = False
