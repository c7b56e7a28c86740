"""`Watch`: measures loaders and free cores from one moment on, as `Facts`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from torch.utils.data import IterableDataset

from lit_async_data.engine.device.slot_feed import SlotFeed
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.prefetch.loader import PrefetchedLoader
from lit_async_data.engine.resources.workers import cores
from lit_async_data.engine.stats import LoaderStats, Wait
from lit_async_data.sources.contract.stage_clock import NO_WORK, Work
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.system import core_seconds, usable_cores

Loader = AsyncLoader | PrefetchedLoader


@dataclasses.dataclass(frozen=True)
class Readers:
    """Who reads the batches of a loader."""

    kind: Literal["caller", "thread", "process", "foreign"] = "thread"
    count: int = 1  # now; of a foreign loader its num_workers, -1 if it has none
    chosen: bool = False  # by the user; else `auto` knows why the kind is no other
    reading: Reading = "copied"
    # Whether `auto` may add one, or has found that another one does not help, or that there is no room for it.
    auto: Literal["", "tries", "tried"] = ""
    by_auto: int = 1  # the count that `auto` may reach
    queue_depth: int = 4
    in_vain: bool = False  # a global shuffle decodes chunks for samples that it does not use
    replaceable: bool = True  # by a packed file; or a foreign loader by a source of ours

    @classmethod
    def of(cls, loader: Loader, stats: LoaderStats) -> Readers:
        if isinstance(loader, PrefetchedLoader):
            count, dataset = getattr(loader.loader, "num_workers", -1), getattr(loader.loader, "dataset", None)
            mapped = not isinstance(dataset, IterableDataset | None)
            return cls("foreign" if loader.device_depth else "caller", count, replaceable=mapped)
        plan, options, engine = loader.footprint, loader.options, loader._machinery.engine
        feed, workers, now = engine and engine.feed, plan.workers, stats.workers
        auto: Literal["", "tries", "tried"] = ""
        if options.workers == "auto" and isinstance(feed, SlotFeed):
            auto = "tries" if not feed.pipeline.tuned else "tried" if now < workers.by_auto else ""
        return cls(
            workers.kind,
            now,
            options.worker_kind != "auto" or options.workers == 0,
            "python" if workers.apart else loader.source.chunks.reading,
            auto,
            workers.by_auto,
            options.queue_depth,
            plan.amplification > 1.5 and loader.order.shuffle == "global",
            not loader.source.chunks.random,
        )


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was measured over some steps of a loop."""

    waited: Wait  # by the device, or by the loop where it has no streams
    transform_s: float = 0.0  # in `device_transform`, which the loop ran; not waited
    cores: int = 1
    free: float = 1.0  # cores that did nothing, on average
    starved: int = 0  # how often the loop had to wait, at least
    stages: Work = NO_WORK
    readers: Readers = Readers()


class Watch:
    """What happens to the loaders that one loop takes its batches from, after this was made."""

    def __init__(self, loaders: Sequence[Loader]) -> None:
        self.loaders = list(loaders)
        self._before = [loader.stats() for loader in loaders]
        self._began_s, self._idle_s = time.perf_counter(), core_seconds()[0]

    def facts(self, total_s: float | None = None) -> Facts:
        """What was measured of the loader that the loop waited for longest."""
        wall_s, (idle_s, known_s) = time.perf_counter() - self._began_s, core_seconds()
        waits = [_waited(before, loader.stats()) for loader, before in zip(self.loaders, self._before, strict=True)]
        total_s = wall_s if total_s is None else total_s
        if not waits:
            return Facts(Wait(busy_s=total_s))
        slowest = waits.index(max(waits))
        loader, before, now = self.loaders[slowest], self._before[slowest], self.loaders[slowest].stats()
        own = cores(loader.local_world_size)
        wait_s, gap_s = map(sum, zip(*waits, strict=True))
        return Facts(
            Wait(now.batches - before.batches, wait_s, gap_s, total_s - wait_s - gap_s),
            now.transform_s - before.transform_s,
            own,
            (idle_s - self._idle_s) / max(wall_s, 1e-9) * own / usable_cores() if known_s else own,
            now.read.starved - before.read.starved,
            now.stages.minus(before.stages),
            Readers.of(loader, now),
        )


def _waited(before: LoaderStats, now: LoaderStats) -> tuple[float, float]:
    """Seconds that were waited for batches but the first, and for the first; by the device's clock if it has one."""
    waited = now.waited.since(before.waited)
    return waited.wait_s, waited.gap_s
