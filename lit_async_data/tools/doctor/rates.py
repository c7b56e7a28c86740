"""`measured`: the rate at which a loader hands out samples; `dropped` lets it read from the disk."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_async_data import system
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.stats import ReadStats

# A slow loader is measured for at most this many times the seconds that it should take.
MOST_TIMES = 4
# Groups of the chunk shuffle that a measurement spans: work comes with each new group.
GROUPS = 2
# After the page cache was dropped: files to probe, places in each, and the share that may still be in memory.
FILES, PLACES, LEFT = 64, 16, 0.1


@dataclasses.dataclass(frozen=True)
class Rate:
    samples_per_s: float  # of a loop that does nothing else; 0 if the one epoch is too short to measure
    read_mb_per_s: float  # of one reader while it reads
    decode_mb_per_s: float  # of one reader while it decodes
    decoding: float  # the share of the readers' time that decoding takes
    decoded_bytes: float  # for each sample


def measured(loader: AsyncLoader, seconds: float, *, once: bool = False) -> Rate:
    """Take batches of a new loader as fast as they come, and close it.

    The first batch of each reader does not count: with it, a reader imports what it decodes with. Nor does, of one
    epoch, what was read or decoded ahead with the first batches; and if that was more than half, nothing counts.
    """
    order = loader.order.chunk_order
    least = min(order.length, GROUPS * order.width * order.rows) if order is not None else 0
    least = loader.order.length if once else least
    first, taken, since, now, before = max(loader.footprint.workers.threads, 1), 0, 0.0, 0.0, ReadStats()
    with loader:
        epochs = [loader] if once else itertools.repeat(loader)
        for number, batch in enumerate(itertools.chain.from_iterable(epochs), 1):
            if number > first:
                now, taken = time.perf_counter(), taken + samples_in(batch)
                if now - since >= MOST_TIMES * seconds or (now - since >= seconds and taken >= least):
                    break
            elif number == first:
                before, since = loader.stats().read, time.perf_counter()
        stats, sample_bytes = loader.stats().read, max(loader.source.spec.nbytes, 1)
    stages, decoded, samples = stats.stages - before.stages, stats.stages.decode.bytes, stats.bytes // sample_bytes
    if once:
        count = min(taken, (stats.bytes - before.bytes) // sample_bytes)
        count = min(count, samples * stages.decode.bytes // decoded) if decoded else count
        taken = count if count > taken / 2 else 0  # otherwise the time is mostly that of handing out what was there
    return Rate(
        taken / (now - since) if taken else 0.0,
        stages.read.mb_per_s,
        stages.decode.mb_per_s,
        stages.decode.seconds / stages.worked_s if stages.worked_s else 0.0,
        decoded / max(samples, 1),
    )


def samples_in(batch: Any) -> int:
    """Samples in a batch: a mapping, a tuple or an array."""
    while not hasattr(batch, "shape"):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return int(batch.shape[0])


def dropped(paths: Sequence[str]) -> bool:
    """Drop files, which no process has mapped, from the page cache; and return whether the system says that it did."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())  # what was written just now stays otherwise
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    left = list[bool]()
    for path in paths[:: max(len(paths) // FILES, 1)]:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            except (OSError, ValueError):  # it cannot be mapped, or is empty
                continue
            left += [bool(system.resident(mapped, at, 1)[0]) for at in range(0, size, max(size // PLACES, 2**20))]
    return bool(left) and sum(left) <= LEFT * len(left)
