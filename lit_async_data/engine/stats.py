"""Batches and waits of a loader, as its consumer sees them.

`Watch` says why a loop waits for data, by the stage that takes longest, and the first change that can help.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from lit_async_data.engine.resources import cores
from lit_async_data.sources.composed.composed import ComposedSource
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.stage_clock import NO_WORK, Work


@dataclasses.dataclass
class Wait:
    """How long a loop, or a device with streams, has waited for data.

    Attributes:
        steps: Batches that the loop has had; for a device, without the first of each epoch.
        wait_s: Seconds waited for batches, without the first of each epoch.
        gap_s: Seconds waited for the first batch of each epoch.
        busy_s: Seconds in which the loop did something else.
        device_s: Seconds in which the device was idle because it waited for data. None if it has no streams; it then
            waits whenever the loop does.
        last_s: Seconds that a device waited for a batch, one or two before the last one: events come late.
        copy: Copies to the device, by its clock.

    Example:
        >>> print(Wait(steps=100, wait_s=0.1, gap_s=0.1, busy_s=9.8))
        0.200 s of 10.0 s for data, 0.100 s of it for first batches: data wait 2.0 %
        >>> print(Wait(steps=100, wait_s=0.1, gap_s=0.1, busy_s=9.8, device_s=0.08))
        0.200 s of 10.0 s for data, 0.100 s of it for first batches, the device 0.080 s: data wait 0.8 %
    """

    steps: int = 0
    wait_s: float = 0.0
    gap_s: float = 0.0
    busy_s: float = 0.0
    device_s: float | None = None
    last_s: float = 0.0
    copy: Work = NO_WORK

    def __add__(self, other: Wait) -> Wait:
        known = [each.device_s for each in (self, other) if each.device_s is not None]
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("steps", "wait_s", "gap_s", "busy_s")}
        sums |= {"device_s": sum(known) if known else None, "copy": self.copy.plus(other.copy)}
        return dataclasses.replace(self, **sums)

    def since(self, before: Wait | None) -> Wait:
        """Steps and waits after an earlier record."""
        if before is None:
            return self
        return Wait(self.steps - before.steps, self.wait_s - before.wait_s, self.gap_s - before.gap_s)

    @property
    def waited_s(self) -> float:
        return self.wait_s + self.gap_s

    @property
    def total_s(self) -> float:
        """Seconds that the loop waited or did something else."""
        return self.waited_s + self.busy_s

    @property
    def share(self) -> float:
        """The fraction of the total time that the device waited for data; 0 before the first step."""
        idle_s = self.waited_s if self.device_s is None else self.device_s
        return idle_s / self.total_s if self.total_s else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "for an unknown time: no batch of training came from an AsyncLoader"
        device = "" if self.device_s is None else f", the device {self.device_s:.3f} s"
        return (
            f"{self.waited_s:.3f} s of {self.total_s:.1f} s for data, {self.gap_s:.3f} s of it for first "
            f"batches{device}: data wait {100 * self.share:.1f} %"
        )


@dataclasses.dataclass
class LoaderStats:
    """Counts and times since the loader was built; ``device_transform`` in ``next`` is no wait.

    Attributes:
        batches: Batches handed out.
        wait_s: Seconds spent inside ``next``, over all batches but the first of each epoch.
        last_wait_s: Seconds spent inside the last ``next``.
        epoch_gap_s: Seconds spent inside ``next`` for the first batch of the last epoch begun.
        queue_fill: Batches that were ready, on host and device together, when the last one was asked for.
        copied: Batches handed out as ordinary copies, because all earlier ones are in use and the memory budget is
            spent.
        read: The work of the readers: ``batches``, ``bytes``, ``seconds``, ``mb_per_s``, and how long they waited.
        device: How long the device waited; None if it has no streams, and waits whenever the consumer does.
        gap_s: Seconds spent inside ``next`` for the first batches of all epochs.
        transform_s: Seconds in which ``next`` ran ``device_transform``, as on a CPU.
        hooks_s: Seconds in which Lightning's batch transfer hooks ran, if you override one under `DevicePrefetcher`.
        workers: Workers at this moment; 0 where the consumer reads.
        slots: Slots of memory at this moment, each for one batch, or for several that are small.
    """

    batches: int = 0
    wait_s: float = 0.0
    last_wait_s: float = 0.0
    epoch_gap_s: float = 0.0
    queue_fill: int = 0
    copied: int = 0
    read: Work = NO_WORK
    device: Wait | None = None
    gap_s: float = 0.0
    transform_s: float = 0.0
    hooks_s: float = 0.0
    workers: int = 0
    slots: int = 0

    @property
    def stages(self) -> Work:
        """The work of all batches so far; ``read``, ``decode``, ``transform`` and ``copy`` are its stages."""
        return self.read if self.device is None else self.read.plus(self.device.copy)

    def waited_since(self, before: LoaderStats) -> Wait:
        """How long the device, or without streams the consumer, waited since earlier statistics."""
        if self.device is not None:
            return self.device.since(before.device)
        return Wait(self.batches, self.wait_s, self.gap_s).since(Wait(before.batches, before.wait_s, before.gap_s))

    def metrics(self) -> dict[str, float]:
        """The last step as metrics: milliseconds, batches, and 10⁶ bytes per second."""
        return {
            "data/wait_ms": self.last_wait_s * 1e3,
            "data/device_wait_ms": (self.last_wait_s if self.device is None else self.device.last_s) * 1e3,
            "data/queue_fill": float(self.queue_fill),
            "data/epoch_gap_ms": self.epoch_gap_s * 1e3,
            "data/read_mb_s": self.read.mb_per_s,
        }


# Data keep up with a loop that waits for less than this share of the time, or of its batches.
KEEPS_UP = 0.02
# Readers that take less than this share of a step per batch could keep up: only some batches are late.
IDLE = 0.85
SHORT_S = 0.02  # a longer step is not shortened by larger batches: handing over a batch costs far less
QUEUE_DEPTH, MOST_WAITING = 8, 16  # the most that is advised: batches, and workers that wait for storage
PACKED = "lit_async_data.sources.hdf5.", "lit_async_data.sources.manifest."  # modules of sources that ``pack`` reads
STAGES = "read", "decode", "transform", "copy"

CAUSES = {
    "loop": " for data: data keep up",
    "first": " for data, mostly for the first batch",
    "caller": " for data: it reads by itself, and nothing is read ahead",
    "copy": " for data, mostly for copies to the device",
    "handover": " for data: batches were ready; the remaining time is hand-over cost",
    "foreign": " for data, mostly for your own loader",
    "late": " for data: a batch is late now and then",
    "read": " for data, mostly for reading",
    "decode": " for data, mostly for decoding",
    "transform": " for data, mostly for sample_transform and batch_transform",
    "device": " in device_transform, which runs in the loop on a CPU",
    "hooks": " in {hooks}",
}
HINTS = {
    "": "",
    "workers": "; set {prefix}workers={value}",
    "auto": "; set {prefix}workers=auto, which keeps as many as help",
    "process": "; set {prefix}worker_kind=process",
    "processes": "; set {prefix}worker_kind=process and {prefix}workers=auto",
    "queue_depth": "; set {prefix}queue_depth={value}",
    "shuffle": "; set {prefix}shuffle=chunk, which decodes each chunk once",
    "pack": "; python -m lit_async_data pack writes a file that is read faster",
    "num_workers": "; set its num_workers={value}",
    "persistent": "; set its persistent_workers=True, which keeps its workers from pass to pass",
    "cache": " over the network; cache=FOLDER, an option of the source, keeps for later epochs what was fetched",
    "source": "; have HDF5Source or ManifestSource read its files",
    "bytes": "; hand over fewer bytes, such as uint8, and convert them in device_transform",
    "batch_size": "; make batch_size larger",
    "grown": "; workers=auto went up to {value} meanwhile, and the next epoch shows what is left",
    "batch_transform": "; as batch_transform, in numpy, the readers run it",
}

# Shorter loops are mostly begin and end.
LEAST_S, LEAST_STEPS = 1.0, 20
Loader = Any  # an `AsyncLoader` or a `PrefetchedLoader`, which both import this module
Hint = tuple[str, int]
NONE: Hint = ("", 0)


class Verdict(NamedTuple):
    waited: Wait
    share: float
    cause: str = "loop"  # a key of `CAUSES`
    hint: str = ""  # a key of `HINTS`
    value: int = 0
    work: Work = NO_WORK
    begins: bool = False  # whether most of the wait was for the first batch; ``cause`` then explains the rest

    def sentence(self, who: str, total: str, prefix: str = "loader.", hooks: str = "your batch transfer hooks") -> str:
        """A sentence; ``who`` waited, a share of ``total``, and ``prefix`` stands before options of the loader."""
        stages = [getattr(self.work, stage).seconds for stage in STAGES]
        parts = [f"{name} {100 * each / sum(stages):.0f} %" for name, each in zip(STAGES, stages, strict=True) if each]
        if self.work.fetched:
            parts.append(f"{self.work.requests:,} requests fetched {self.work.fetched / 1e9:,.3g} GB")
        shares = f" ({', '.join(parts)})" if self.cause in STAGES and parts else ""
        hint = HINTS[self.hint].format(prefix=prefix, value=self.value)
        waited = "spent" if self.cause in ("device", "hooks") else "waited"
        cause = CAUSES[self.cause].format(hooks=hooks)
        cause = f"{CAUSES['first']}; after it{cause.removeprefix(' for data')}" if self.begins else cause
        return f"{who} {waited} {100 * self.share:.1f} % of {total}{cause}{shares}{hint}"


class Watch:
    """Watches the loaders of one loop from now on."""

    def __init__(self, loaders: Sequence[Loader], before: Sequence[LoaderStats] = ()) -> None:
        self._before = [*zip(loaders, before or [loader.stats() for loader in loaders], strict=True)]
        self._began_s = time.perf_counter()

    def verdict(self, total_s: float | None = None) -> Verdict:
        """Why the loop waited for the loader that took longest, of all the time or of ``total_s``."""
        total_s = time.perf_counter() - self._began_s if total_s is None else total_s
        seen = [(loader, before, loader.stats()) for loader, before in self._before]
        waits = [now.waited_since(before) for _, before, now in seen]
        wait_s, gap_s = sum(each.wait_s for each in waits), sum(each.gap_s for each in waits)
        waited = Wait(0, wait_s, gap_s, total_s - wait_s - gap_s)
        if not seen:
            return Verdict(waited, 0.0)
        loader, before, now = seen[max(range(len(seen)), key=lambda at: (waits[at].wait_s, waits[at].gap_s))]
        waited.steps = now.batches - before.batches
        # A device with streams may be busy while the hooks run.
        hooks_s = sum(now.hooks_s - before.hooks_s for _, before, now in seen if now.device is None)
        in_loop = max((now.transform_s - before.transform_s, "device"), (hooks_s, "hooks"))
        found = explained(loader, waited, now.stages.minus(before.stages), now.workers, in_loop)
        slow = found.cause in (*STAGES[:3], "late") and found.hint in ("", "workers", "queue_depth")
        grown = slow and now.workers > max(before.workers, 1) and loader.options.workers == "auto"
        return found._replace(hint="grown", value=now.workers) if grown else found


def explained(
    loader: Loader, waited: Wait, work: Work, workers: int, in_loop: tuple[float, str] = (0.0, "")
) -> Verdict:
    """The verdict on a loader, by the work of its readers, and the seconds and cause of work in the loop."""
    spent_s, cause = in_loop
    if spent_s > max(waited.wait_s, KEEPS_UP * waited.total_s):
        return Verdict(waited, spent_s / waited.total_s, cause, "" if loader._foreign else "batch_transform")  # noqa: SLF001
    if waited.share < KEEPS_UP:
        return Verdict(waited, waited.share)
    begins = waited.gap_s > waited.wait_s
    cause = _cause(loader, waited, work, workers)
    only_begins = begins and (waited.wait_s < KEEPS_UP * waited.total_s or cause == "late")
    cause = "first" if only_begins else cause
    hint = _hint_of_others(cause, loader.loader) if loader._foreign else _hint(cause, loader, waited, work, workers)  # noqa: SLF001
    hint = NONE if hint[0] == "batch_size" and waited.busy_s > SHORT_S * waited.steps else hint
    return Verdict(waited, waited.share, cause, *hint, work, begins and not only_begins)


def _cause(loader: Loader, waited: Wait, work: Work, workers: int) -> str:
    readers_s = work.seconds / max(workers, 1)
    of_others = loader._foreign  # noqa: SLF001
    in_loop = not loader.device_depth if of_others else loader.footprint.workers.kind == "caller"
    first = {
        "caller": in_loop,
        "copy": work.copy_s > max(waited.busy_s, readers_s),
        "handover": work.starved < KEEPS_UP * waited.steps,
        "foreign": of_others,
        "late": readers_s < IDLE * waited.busy_s,
    }
    return next((cause for cause, holds in first.items() if holds), max(STAGES[:3], key=lambda s: getattr(work, s)[0]))


def _hint_of_others(cause: str, loader: object) -> Hint:
    if cause == "first" and getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", True):
        return "persistent", 0
    if cause != "foreign":
        return {"copy": ("bytes", 0), "handover": ("batch_size", 0)}.get(cause, NONE)
    # Only once: two workers side by side do not show whether a third would help.
    if 0 <= getattr(loader, "num_workers", -1) < (most := min(cores(), 2)):
        return "num_workers", most
    mapped = not isinstance(getattr(loader, "dataset", None), IterableDataset | None)
    return ("source", 0) if mapped else NONE


def _hint(cause: str, loader: Loader, waited: Wait, work: Work, workers: int) -> Hint:
    options, plan, layout, most = loader.options, loader.footprint, loader.source.chunks, cores(loader.local_world_size)
    python = cause == "transform" or layout.reading in ("python", "locked")
    idle = cause == "read" and work.cpu_s < work.seconds / 2  # they wait neither for a core nor for the GIL
    # Readers that wait for storage need no core each. This is advised once: a count above that of `auto` was given. A
    # second reader under a lock would wait for the first, and files that are fetched ahead are in memory.
    waits = idle and layout.reading != "locked" and not (layout.reading == "opened" and layout.ahead)
    # One process leaves the GIL to the loop; several also leave it to each other.
    few = options.workers != "auto" and options.workers < most and (cause == "transform" or layout.reading == "python")
    more = min(max(math.ceil(work.seconds / max(waited.busy_s, 1e-9)), workers + 1, 2), MOST_WAITING)
    first = {
        ("bytes", 0): cause == "copy",
        ("batch_size", 0): cause == "handover",
        ("workers", 1): cause == "caller" and options.workers == 0,
        ("queue_depth", QUEUE_DEPTH): cause == "late" and options.queue_depth < QUEUE_DEPTH,
        NONE: cause not in STAGES,
        ("cache", 0): idle and layout.remote is not None and layout.remote.folder is None,
        ("processes" if few else "process", 0): python and not idle and options.worker_kind == "thread" and most > 1,
        ("shuffle", 0): cause == "decode" and plan.amplification > 1.5 and loader.order.decks.shuffle == "global",
        ("workers", more): waits and workers < more and plan.workers.by_auto in range(workers, more),
        ("auto", 0): options.workers != "auto" and workers < plan.workers.by_auto,
        ("pack", 0): (cause == "decode" or layout.reading in ("opened", "locked")) and _packs(loader.source),
    }
    return next((hint for hint, holds in first.items() if holds), NONE)


def _packs(source: Source) -> bool:
    """Whether ``pack`` can read the files of this source: not for sources of the user's own, or random crops."""
    if isinstance(source, ComposedSource):
        return all(map(_packs, source.inside))
    return type(source).__module__.startswith(PACKED) and not source.chunks.random
