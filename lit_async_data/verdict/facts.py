"""`Facts`: what was measured while a loop ran, per stage and per core; and `Readers`, who read beside it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lit_async_data.device.slot_feed import SlotFeed
from lit_async_data.host.metrics.stages import NO_TIMES, StageTimes
from lit_async_data.host.metrics.stats import LoaderStats
from lit_async_data.host.resources.cores import cores
from lit_async_data.host.resources.gil import has_gil
from lit_async_data.host.schedule import schedule_of
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.order.mixing import mixing
from lit_async_data.prefetch.loader import PrefetchedLoader
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.verdict.finding import PACKING

# `foreign`: somebody else's loader, read by its own workers.
Kind = Literal["caller", "thread", "process", "foreign"]
# Python code that has the GIL for this share of the time holds up a loop that needs it as often.
HELD = 0.25


@dataclasses.dataclass(frozen=True)
class Readers:
    """Who reads the batches of a loader.

    Attributes:
        kind: As in `Workers`; ``"foreign"`` for a loader that is not ours.
        count: How many there are now; of a foreign loader its ``num_workers``.
        reading: What reading takes; see `StorageLayout`.
        gil: Whether they share the loop's GIL.
        apart: Whether several of them work side by side, in worker processes.
        tried: Whether ``workers=auto`` has found that another one does not help.
        queue_depth: Slots that can be ready.
        shuffle: Of the order.
        amplification: Samples that are decoded for each one used.
        compressed: Whether samples are stored in compressed chunks.
        mixing: Where chunks are decoded in vain: how well a shuffle by chunks would mix; see `mixing`.
        packing: The command that packs the samples; empty where a packed file would hold something else.
        stuck: Why nobody but the loop can read; empty if somebody can.
        in_loop: Whether the loop itself runs ``device_transform``, since its device has no streams.
    """

    kind: Kind = "thread"
    count: int = 1
    reading: Reading = "copied"
    gil: bool = True
    apart: bool = False
    tried: bool = False
    queue_depth: int = 4
    shuffle: str = "none"
    amplification: float = 1.0
    compressed: bool = False
    mixing: float = 1.0
    packing: str = PACKING
    stuck: str = ""
    in_loop: bool = False

    @classmethod
    def of(cls, loader: AsyncLoader | PrefetchedLoader, stats: LoaderStats) -> Readers:
        """The readers of a loader, which has had a batch."""
        if isinstance(loader, PrefetchedLoader):
            count = getattr(loader.loader, "num_workers", None)
            return cls("foreign", -1 if count is None else int(count), "python", gil=not count, apart=True, packing="")
        plan, options, engine = loader.footprint, loader.options, loader.machinery.engine
        workers, now = plan.workers, stats.read.workers
        auto = options.workers == "auto"
        return cls(
            workers.kind,
            now,
            "python" if workers.apart and not workers.shared else loader.source.chunks.reading,
            gil=workers.kind == "thread" and has_gil(),
            apart=workers.apart,
            tried=auto and _tuned(loader) and now < workers.most,
            queue_depth=options.queue_depth,
            shuffle=loader.order.shuffle,
            amplification=plan.amplification,
            compressed=loader.source.chunks.compressed,
            mixing=_mixing(loader) if plan.amplification > 1 and loader.order.shuffle == "global" else 1.0,
            packing="" if loader.source.is_random else PACKING,
            stuck=workers.why if workers.kind == "caller" and auto else "",
            in_loop=engine is not None and engine.transforms and not engine.copies,
        )


def _mixing(loader: AsyncLoader) -> float:
    """How well a shuffle by chunks would mix, with the other options as they are."""
    options = dataclasses.replace(loader.options, shuffle="chunk")
    plan = schedule_of(loader.source, options, loader.rank, loader.world_size).plan(0)
    return 0.0 if plan.chunk_order is None else mixing(plan.chunk_order, plan.batch_size, plan.world_size)


def _tuned(loader: AsyncLoader) -> bool:
    """Whether ``workers=auto`` has come to its final number."""
    engine = loader.machinery.engine
    return engine is not None and isinstance(engine.feed, SlotFeed) and engine.feed.pipeline.tuned


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was measured over some steps of a loop.

    Attributes:
        batches: Batches that the loop took.
        total_s: Seconds of the loop, waiting included.
        waited_s: Of these, seconds in which the device (or the loop, where it has no streams) waited for data, without
            those for the first batch.
        gap_s: Seconds that it waited for the first batch.
        loop_cpu_s: Seconds in which the loop's thread had a core.
        process_cpu_s: Seconds of cores that the loop's process took, all threads together, also of readers.
        cores: Cores that this process may use.
        loop_queued_s: Seconds in which the loop's thread wanted a core and had none, as far as the system counts them.
        readers_queued_s: The same for reader threads, together; 0 for those of other processes.
        own_s: Seconds in which Python threads of the program's own had a core, or wanted one; 0 if they leave the GIL
            to the loop.
        elsewhere: How many of them other programs kept busy, on average.
        starved: How often the loop had to wait, at least; a little time passes in each ``next`` all the same.
        stages: Of the readers.
        readers: Who they are.

    Example:
        >>> facts = Facts(batches=10, total_s=10.0, waited_s=4.0, gap_s=1.0)
        >>> facts.share, facts.step_s
        (0.5, 0.5)
    """

    batches: int = 0
    total_s: float = 0.0
    waited_s: float = 0.0
    gap_s: float = 0.0
    loop_cpu_s: float = 0.0
    process_cpu_s: float = 0.0
    cores: int = dataclasses.field(default_factory=cores)
    loop_queued_s: float = 0.0
    readers_queued_s: float = 0.0
    own_s: float = 0.0
    elsewhere: float = 0.0
    starved: int = 0
    stages: StageTimes = NO_TIMES
    readers: Readers = Readers()

    @property
    def share(self) -> float:
        """The share of the time that was waited."""
        return (self.waited_s + self.gap_s) / self.total_s if self.total_s else 0.0

    @property
    def batch_s(self) -> float:
        """Seconds per batch, but for the wait for the first."""
        return (self.total_s - self.gap_s) / max(self.batches, 1)

    @property
    def step_s(self) -> float:
        """Seconds per batch without waiting."""
        return max(self.total_s - self.waited_s - self.gap_s, 0.0) / max(self.batches, 1)

    @property
    def others_cpu_s(self) -> float:
        """Seconds of cores per batch that everything but the readers took in the loop's process."""
        readers_s = self.stages.cpu_s if self.readers.kind in ("thread", "caller") else 0.0
        return max(self.process_cpu_s - readers_s, 0.0) / max(self.batches, 1)
