"""`examination`: measures a source in several settings, from memory and from the disk, and says which to use."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lit_async_data import system
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.resources.workers import cores
from lit_async_data.options import LoaderOptions, Shuffle
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.tools.call import override

# Of settings whose rates are this close, the simpler one is taken: measurements differ by as much.
CLOSE = 0.9
# Another file pays if at least this number of samples is decoded for each one used.
WASTEFUL = 2.0
# A reader that decodes for this share of its time has nothing else to save.
DECODING = 0.7
# The most files of a table that are dropped from the page cache.
MOST_FILES = 20_000
# A slow loader is measured for at most this many times the seconds that it should take.
MOST_TIMES = 4
# Groups of the chunk shuffle that a measurement spans: work comes with each new group.
GROUPS = 2
# After the page cache was dropped: files to probe, places in each, and the share that may still be in memory.
FILES, PLACES, LEFT = 64, 16, 0.1


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was measured, with all files in the page cache. docs/tools/doctor.md describes each value."""

    shuffle: str
    shuffle_chunks: int
    workers: int
    worker_kind: str
    samples_per_s: float
    amplification: float
    memory: int


@dataclasses.dataclass(frozen=True)
class Rate:
    samples_per_s: float  # of a loop that does nothing else; 0 if the one epoch is too short to measure
    read_mb_per_s: float  # of one reader while it reads
    decode_mb_per_s: float  # of one reader while it decodes
    decoding: float  # the share of the readers' time that decoding takes
    decoded_bytes: float  # for each sample


def examination(source: Source, given: LoaderOptions, seconds: float, *, cold: bool) -> dict[str, Any]:
    """Measure a source; also from the disk, if its files may leave the page cache. ``--json`` prints it as it is."""
    found = list[tuple[Trial, Rate]]()
    for options in _settings(source, given):
        # The first look brings what this order reads into the page cache.
        if not found or found[-1][0].shuffle != options.shuffle:
            measured(AsyncLoader(source, options), seconds / 2, once=True)
        loader = AsyncLoader(source, options)
        rate = measured(loader, seconds)
        found.append((_trial(loader, rate), rate))
    trials = [trial for trial, _ in found]
    chosen = best(trials)
    trial, warm = found[chosen]
    decided = {name: getattr(trial, name) for name in ("shuffle", "shuffle_chunks", "workers")}
    changed = {name: value for name, value in decided.items() if value != getattr(given, name)}
    options = dataclasses.replace(given, **changed)
    from_disk, why_not = _cold(source, options, warm, seconds) if cold else (None, "left out (--warm)")
    apart = getattr(source.locate(source.ids(np.zeros(1, np.int64)))[0], "path", None) is not None
    why = why_pack(trial, source.chunks.reading, warm.decoding, files=apart)
    return {
        "version": 3,  # raised if a key changes its meaning or goes
        "source": source.name,
        "samples": len(source),
        "batch": {key: {"dtype": str(each.dtype), "shape": each.shape} for key, each in source.spec.items()},
        "batch_size": given.batch_size,
        "reading": source.chunks.reading,
        "cores": cores(),
        "trials": trials,
        "chosen": chosen,
        "warm": warm,
        "cold": from_disk,
        "why_not_cold": why_not,
        "options": changed,
        "override": " ".join(override(f"loader.{name}", value) for name, value in changed.items()),
        "why_pack": why,
    }


def _settings(source: Source, given: LoaderOptions) -> Iterator[LoaderOptions]:
    """The settings to measure: each shuffle with all workers, and with fewer."""
    most = AsyncLoader(source, dataclasses.replace(given, shuffle="auto")).footprint.workers.most
    numbers = sorted({most, max(most // 2, 1), 1} - {0}, reverse=True) or [0]
    kinds: list[Shuffle] = ["chunk", "global", "none"] if source.chunks.rows > 1 else ["global", "none"]
    for shuffle in kinds:
        base = dataclasses.replace(given, shuffle=shuffle)
        for workers in numbers if shuffle != "none" else numbers[:1]:
            yield dataclasses.replace(base, workers=workers)


def _trial(loader: AsyncLoader, rate: Rate) -> Trial:
    plan, source, shuffle = loader.footprint, loader.source, loader.order.shuffle
    whole = source.memory().cacheable / len(source)
    return Trial(
        shuffle,
        loader.options.shuffle_chunks,
        plan.workers.threads,
        plan.workers.kind,
        rate.samples_per_s,
        rate.decoded_bytes / whole if whole and rate.decoded_bytes else plan.amplification,
        plan.budget.total,
    )


def _cold(source: Source, options: LoaderOptions, warm: Rate, seconds: float) -> tuple[Rate | None, str]:
    """The same setting with the files that it reads on the disk; or why that cannot be measured."""
    with AsyncLoader(source, options) as loader:
        wanted = min(int(2 * MOST_TIMES * seconds * warm.samples_per_s) + options.batch_size, loader.order.length)
        places = source.locate(source.ids(loader.order.samples(np.arange(wanted))))
    paths = list(dict.fromkeys(getattr(each, "path", None) or each.file for each in places))[:MOST_FILES]
    source.close()  # the pages of mapped files would stay
    if not dropped(paths):
        return None, "the system keeps the files in the page cache, or does not tell"
    rate = measured(AsyncLoader(source, options), seconds, once=True)
    too_few = "the samples are too few: most are read or decoded with the first batches"
    return (rate, "") if rate.samples_per_s else (None, too_few)


def best(trials: Sequence[Trial]) -> int:
    """The number of the fastest trial that shuffles; of trials with close rates, the one with the fewest workers."""
    shuffled = [number for number, trial in enumerate(trials) if trial.shuffle != "none"]
    most = max(trials[number].samples_per_s for number in shuffled)
    close = [number for number in shuffled if trials[number].samples_per_s >= CLOSE * most]
    return min(close, key=lambda number: (trials[number].workers, -trials[number].samples_per_s))


def why_pack(chosen: Trial, reading: str, decoding: float, *, files: bool) -> str:
    """Why one packed file would be read faster; empty if it would not. ``files``: each sample has files of its own."""
    if reading == "locked":
        return "h5py reads it under a lock, one thread at a time"
    if chosen.amplification >= WASTEFUL:
        return f"each sample that is used costs {chosen.amplification:.1f} that are decoded"
    if files and decoding >= DECODING:
        return f"readers spend {100 * decoding:.0f} % of their time decoding images, each epoch again"
    return ""


# -- one rate ---------------------------------------------------------------------------------------------------------


def measured(loader: AsyncLoader, seconds: float, *, once: bool = False) -> Rate:
    """Take batches of a new loader as fast as they come, and close it.

    The first batch of each reader does not count: with it, a reader imports what it decodes with. Nor does, of one
    epoch, what was read or decoded ahead with the first batches; and if that was more than half, nothing counts.
    """
    order = loader.order.chunk_order
    least = min(order.length, GROUPS * order.width * order.rows) if order is not None else 0
    least = loader.order.length if once else least
    first, taken, since, now, before = max(loader.footprint.workers.threads, 1), 0, 0.0, 0.0, Work()
    with loader:
        epochs = [loader] if once else itertools.repeat(loader)
        for number, batch in enumerate(itertools.chain.from_iterable(epochs), 1):
            if number > first:
                now, taken = time.perf_counter(), taken + samples_in(batch)
                if now - since >= MOST_TIMES * seconds or (now - since >= seconds and taken >= least):
                    break
            elif number == first:
                before, since = loader.stats().read, time.perf_counter()
        total, sample_bytes = loader.stats().read, max(loader.source.spec.nbytes, 1)
    work, decoded, samples = total.minus(before), total.decoded, total.bytes // sample_bytes
    if once:
        count = min(taken, work.bytes // sample_bytes)
        count = min(count, samples * work.decoded // decoded) if decoded else count
        taken = count if count > taken / 2 else 0  # otherwise the time is mostly that of handing out what was there
    return Rate(
        taken / (now - since) if taken else 0.0,
        work.read.mb_per_s,
        work.decode.mb_per_s,
        work.decode_s / work.seconds if work.seconds else 0.0,
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
