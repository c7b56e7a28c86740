"""`PrefetchedLoader`: somebody else's loader, read ahead and copied ahead; what `prefetched` gives."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import time
import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from lit_async_data.device import Batch, Transform
from lit_async_data.draw_watch import DrawWatch
from lit_async_data.errors import AsyncDataError, ClosedError, TransferError
from lit_async_data.options import counted
from lit_async_data.plan import Key
from lit_async_data.prefetched_pass import Pass, PassState, Taken
from lit_async_data.relay import Relay
from lit_async_data.sharding import check_sharded
from lit_async_data.stats import DeviceWait, Fill, LoaderStats, ReadStats, WaitMeter
from lit_async_data.streams import checked_device, exact_device
from lit_async_data.unexpected import Unexpected

log = logging.getLogger(__name__)


class PrefetchedLoader:
    """What `prefetched` gives. One thread may iterate at a time, and one pass goes at a time.

    Attributes that are not its own are those of the loader, also when they are set.

    After an interrupt (Ctrl-C) it can be used on, as in a notebook. Where the interrupt came while it waited for a
    batch in host memory, the pass goes on. Else what was read ahead is lost, since somebody else's loader cannot begin
    in the middle: ``next`` on that pass is a `ClosedError`, and ``iter`` begins a whole new one. A generator cannot
    begin anew; it goes on behind what is lost, and a warning says so.

    Attributes:
        loader: What it reads.
        driven: Who starts the next copy: it does, at the end of each ``next``, or a callback that calls `prefetch`.
        by_trainer: Whether a callback has made it for a Trainer, which has dealt samples to ranks; else it is looked at
            whether somebody has.
    """

    loader: Iterable[Any]
    driven = False
    by_trainer = False
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
        self._depth, self._canary = counted("device_depth", device_depth), 0
        # None for the accelerator of this process, which may not have been chosen yet: each rank has its own.
        self._device = None if device is None else checked_device(device)
        self._device_transform = device_transform
        self._reset()

    def _reset(self) -> None:
        """As new: nothing has been read."""
        self._pass, self._at = -1, PassState()
        self._fresh, self._over, self._wanted_pass = True, False, 0
        self._watch = DrawWatch(self.loader)
        self._meter, self._read = WaitMeter(), ReadStats()
        self._waited: DeviceWait | None = None
        self._relay: Relay | None = None
        self._closer: weakref.finalize[Any, Any] | None = None
        self._said = self._closed = False
        self._ahead = Unexpected(log, "starting what comes after a batch failed", AsyncDataError)
        self._lost = False  # whether an interrupt has ended the pass

    def __len__(self) -> int:
        """That of the loader; a `TypeError` if it has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.loader)

    def __iter__(self) -> Pass:
        """A new pass, which begins with its first batch. Costs nothing; Lightning calls it more often than it reads."""
        self._fresh, self._wanted_pass = True, self._wanted_pass + 1
        return Pass(functools.partial(self._next_of, self._wanted_pass), self._at)

    def __next__(self) -> Batch:
        """The next batch of the pass, waiting for it.

        Raises:
            StopIteration: The pass is over.
            ConfigError: Several ranks would read the same.
            TransformError: ``device_transform`` failed on this batch; the next call goes on with the one after it.
            TransferError: The canary has found that a batch before this one was not what was read.
            WorkerError: This process is a fork of the one that began to read.
            ClosedError: The loader is closed.
            Exception: Whatever the loader raised in place of this batch.
        """
        at, taken = self._at, self._taken()
        # From here on nothing is called, so that no interrupt comes between: see `AsyncLoader.__next__`.
        at.step, at.state, at.interrupted = taken.step + 1, taken.state, False
        return taken.batch

    def prefetch(self) -> None:
        """Start copying what will be asked for next; returns at once. A pass begins with its first batch only."""
        if self._at.interrupted:
            return  # the next batch says what is to be said
        relay = self._running()
        if not (self._fresh or self._over):
            self._at.interrupted = True  # unless this comes to an end
            try:
                relay.queue.top_up(self._wanted)
            except Exception:
                self._at.interrupted = False
                raise
            self._at.interrupted = False

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
        self._depth = counted("device_depth", depth)
        if self._relay is not None:
            self._relay.set_depth(depth)

    @property
    def canary(self) -> int:
        """Batches that are watched on their way to a device with streams; to be set before the first."""
        return self._canary

    @canary.setter
    def canary(self, batches: int) -> None:
        self._canary = counted("canary", batches)

    @property
    def begun(self) -> bool:
        """Whether the pass has had its first batch."""
        return not self._fresh

    @property
    def fill(self) -> Fill:
        """How much is ready at this moment."""
        return Fill() if self._relay is None else self._relay.fill

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
        self._fresh = True
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
        return {name: vars(self)[name] for name in ("loader", "_depth", "_canary", "_device", "_device_transform")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    # -- the machinery -----------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> Key:
        return Key(self._pass, self._at.step)

    @property
    def _threaded(self) -> bool:
        return not isinstance(self.loader, DataLoader) or self.loader.num_workers > 0

    def _next_of(self, wanted: int) -> Taken:
        if wanted != self._wanted_pass:
            raise StopIteration  # another pass has begun
        return self._taken()

    def _taken(self) -> Taken:
        """The next batch; whoever hands it out says so, with nothing called in between."""
        started = time.perf_counter()
        relay = self._begin() if self._fresh else self._running()
        if self._over:
            raise StopIteration
        fill, key = relay.ready, self._wanted
        self._at.interrupted = True  # unless this comes to an end
        try:
            batch = relay.queue.take(key)
            if not self.driven:
                # This batch is here; what is wrong with a later one is raised when that is asked for.
                with self._ahead:
                    relay.queue.top_up(relay.feed.following(key))
            self._meter.add(time.perf_counter() - started, first=key.step == 0, queue_fill=fill)
            state = relay.feed.handed_over(key)
            relay.feed.settle()
        except StopIteration:
            self._over, self._at.state = True, None
            relay.rest()
            self._at.interrupted = False
            raise
        except BaseException as error:
            if isinstance(error, Exception) or relay.feed.gave(error):
                # A batch that failed has had its turn. One that never came is asked for again, and so is one on its
                # way, where the canary has found something wrong with another.
                had_its_turn = relay.feed.given(key) and not isinstance(error, TransferError)
                relay.feed.settle()
                self._at.step, self._at.interrupted = key.step + had_its_turn, False
            raise
        return Taken(batch, key.step, state)

    def _begin(self) -> Relay:
        """A new pass; its first batch calls ``iter(loader)``. A generator goes on: it cannot begin anew."""
        if self._at.interrupted:
            self._clear_up()
        going_on = self._pass >= 0 and not self._over
        if inspect.isgenerator(self.loader) and going_on and self._lost:
            log.warning(
                "an interrupt has ended the pass over a generator, which goes on behind what was read ahead: up to %d "
                "batches are lost",
                2 * self._depth + 1,
            )
        elif inspect.isgenerator(self.loader) and going_on:
            self._fresh = False  # what has been read ahead of it would be lost
            return self._running()
        if not self.by_trainer:
            check_sharded(self.loader)
        if self._depth and not self._threaded and not self._said:
            self._said = True
            log.warning(
                "the DataLoader has num_workers=0: each batch is read when it is asked for, since Python code per "
                "sample would, in a thread, keep the training loop from running; num_workers=1 or more reads ahead"
            )
        if self._relay is not None and self._relay.device != self.device:
            self._stop()
        relay = self._running()
        self._at.interrupted = True  # until the pass before is cleared up: else a block of pinned memory may be lost
        relay.rest()
        self._at.interrupted = False
        # In this order: an interrupt between them leaves a pass that is yet to begin, and none that is over already.
        self._over = self._lost = False
        self._pass, self._at.step = self._pass + 1, 0
        self._fresh = False
        return relay

    def _clear_up(self) -> None:
        """After an interrupt: end the pass, unless it is certain that none of its batches is lost."""
        if self._relay is not None and not self._relay.untouched(self._wanted):
            self._lost = not self._over
            self._relay.rest()
            self._stop()
        self._at.interrupted = False

    def _running(self) -> Relay:
        if self._closed:
            raise ClosedError("the loader is closed; call prefetched() again")
        if self._at.interrupted:
            self._clear_up()
        if self._lost and not self._fresh:
            raise ClosedError(
                f"an interrupt has ended this pass after {self._at.step} batches: what was read ahead is lost; "
                "begin a new pass with iter(loader)"
            )
        if self._relay is not None:
            self._relay.check()
            return self._relay
        relay = Relay(
            self.loader,
            device=self.device,
            depth=self._depth,
            threaded=self._threaded,
            transform=self._device_transform,
            canary=self._canary,
            state=getattr(self.loader, "state_dict", None) if self._stateful else None,
            watch=self._watch,
        )
        closer = weakref.finalize(self, relay.close)
        self._relay, self._closer = relay, closer
        return relay

    def _read_so_far(self) -> ReadStats:
        if self._relay is None:
            return self._read
        now = self._relay.feed.stats
        return dataclasses.replace(self._read.plus(now.batches, now.bytes, now.seconds), ready=self._relay.feed.ready)

    def _stop(self) -> None:
        relay, closer = self._relay, self._closer
        if relay is None or closer is None:
            return
        seen = self.stats()
        try:
            relay.close()
        except Exception:  # it is closed all the same
            self._forget(seen, closer)
            raise
        self._forget(seen, closer)

    def _forget(self, seen: LoaderStats, closer: weakref.finalize[Any, Any]) -> None:
        closer.detach()
        read = dataclasses.replace(seen.read, ready=0)
        self._read, self._waited, self._relay, self._closer = read, seen.device, None, None
