"""`measured`: the rate at which a loader hands out samples to a loop that does nothing else."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from lit_async_data.host.metrics.stages import StageTimes
from lit_async_data.host.metrics.stats import ReadStats
from lit_async_data.loader.async_loader import AsyncLoader

# A slow loader is measured for at most this many times the seconds that it should take.
MOST_TIMES = 4
# Groups of the chunk shuffle that a measurement spans: work comes with each new group.
GROUPS = 2

NOTHING_READ = ReadStats()


class Rate(NamedTuple):
    """What was measured.

    Attributes:
        samples_per_s: Samples per second; 0 if the one epoch that was allowed is too short to measure.
        seconds: How long that was measured.
        stages: What the readers did in that time, all together.
        samples: Samples that were read since the loader started, also those that were read ahead.
        decoded: Bytes that were decoded for them.
    """

    samples_per_s: float
    seconds: float
    stages: StageTimes
    samples: int
    decoded: int

    @property
    def decoding(self) -> float:
        """The share of the readers' time that decoding took."""
        return self.stages.decode.seconds / self.stages.worked_s if self.stages.worked_s else 0.0


def measured(loader: AsyncLoader, seconds: float, *, once: bool = False) -> Rate:
    """Take batches of a new loader as fast as they come, and close it.

    The first batch of each reader does not count: with it, a reader imports what it decodes with.

    Args:
        loader: The loader.
        seconds: How long, at least; longer if groups of the chunk shuffle are large, at most `MOST_TIMES` as long.
        once: Read one epoch, as far as `MOST_TIMES` allows: where what was read once is faster the next time. What was
            read or decoded ahead with the first batches does not count, either. If more than half was, nothing does.

    Raises:
        SourceError, ReadError, TransformError: As the loader raises them.
    """
    order = loader.order.chunk_order
    least = min(order.length, GROUPS * order.width * order.rows) if order is not None else 0
    least = loader.order.length if once else least
    first, batches, taken, ended = max(loader.footprint.workers.threads, 1), 0, 0, False
    since = now = 0.0
    before = NOTHING_READ
    with loader:
        while not ended:
            for batch in loader:
                batches += 1
                if batches == first:
                    before, since = loader.stats().read, time.perf_counter()
                if batches <= first:
                    continue
                now = time.perf_counter()
                taken += samples_in(batch)
                if now - since >= MOST_TIMES * seconds or (now - since >= seconds and taken >= least):
                    ended = True
                    break
            ended |= once
        stats, sample_bytes = loader.stats().read, sum(each.nbytes for each in loader.spec.fields.values())
    stages, decoded = stats.stages.since(before.stages), stats.stages.decode.bytes
    samples = stats.bytes // max(sample_bytes, 1)
    if once:
        count = min(taken, (stats.bytes - before.bytes) // max(sample_bytes, 1))
        if decoded:
            count = min(count, samples * stages.decode.bytes // decoded)
        # Otherwise the time would be mostly that of handing out what was there.
        taken = count if count > taken / 2 else 0
    return Rate(taken / (now - since) if taken else 0.0, now - since if taken else 0.0, stages, samples, decoded)


def samples_in(batch: Any) -> int:
    """Samples in a batch: a mapping, a tuple or an array."""
    while not hasattr(batch, "shape"):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return int(batch.shape[0])
