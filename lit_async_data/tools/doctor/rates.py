"""`measured`: the rate at which a loader hands out samples to a loop that does nothing else."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from lit_async_data.host.stages import StageTimes
from lit_async_data.loader.async_loader import AsyncLoader

# A slow loader is measured for at most this many times the seconds that it should take.
MOST_TIMES = 4
# Groups of the chunk shuffle that a measurement spans: work comes with each new group.
GROUPS = 2


class Rate(NamedTuple):
    """What was measured.

    Attributes:
        samples_per_s: Samples per second, after the first batch; with it, if there was no other.
        first_s: Seconds to the first batch.
        stages: Of the readers, all together.
        samples: Samples that were read for it, also those that were read ahead.
    """

    samples_per_s: float
    first_s: float
    stages: StageTimes
    samples: int

    @property
    def decoding(self) -> float:
        """The share of the readers' time that decoding took."""
        return self.stages.decode.seconds / self.stages.worked_s if self.stages.worked_s else 0.0


def measured(loader: AsyncLoader, seconds: float, *, once: bool = False) -> Rate:
    """Take batches of a new loader as fast as they come, and close it.

    Args:
        loader: The loader.
        seconds: How long, at least; longer if groups of the chunk shuffle are large, at most `MOST_TIMES` as long.
        once: Read one epoch, as far as `MOST_TIMES` allows: where what was read once is faster the next time.

    Raises:
        SourceError, ReadError, TransformError: As the loader raises them.
    """
    order = loader.order.chunk_order
    least = min(order.length, GROUPS * order.width * order.rows) if order is not None else 0
    least = loader.order.length if once else least
    taken, first, ended = 0, 0, False
    with loader:
        began = time.perf_counter()
        first_s, since, now = 0.0, began, began
        while not ended:
            for batch in loader:
                now, size = time.perf_counter(), samples_in(batch)
                if first_s:
                    taken += size
                else:
                    first_s, since, first = now - began, now, size
                passed = now - since
                if passed >= MOST_TIMES * seconds or (passed >= seconds and taken >= least):
                    ended = True
                    break
            ended |= once
        stats, sample_bytes = loader.stats(), sum(each.nbytes for each in loader.spec.fields.values())
    rate = taken / (now - since) if taken else first / first_s
    return Rate(rate, first_s, stats.stages, stats.read.bytes // max(sample_bytes, 1))


def samples_in(batch: Any) -> int:
    """Samples in a batch: a mapping, a tuple or an array."""
    while not hasattr(batch, "shape"):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return int(batch.shape[0])
