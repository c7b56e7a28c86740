"""Times of a loader: each thread counts its own, snapshots (`Sums`) add and subtract, `WaitSummary` is of an epoch."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Self

from lit_async_data.sources.contract.stage_clock import Work


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums since a loader was built: `-` is what came after an earlier snapshot, `+` adds those of another engine."""

    # Fields that are no sums: those on the left of an operator stay.
    _now: ClassVar[tuple[str, ...]] = ()

    def __add__(self, other: Self) -> Self:
        return self._combined(other, operator.add)

    def __sub__(self, other: Self) -> Self:
        return self._combined(other, operator.sub)

    def _combined(self, other: Self, combine: Callable[[Any, Any], Any]) -> Self:
        sums = [field.name for field in dataclasses.fields(self) if field.name not in self._now]
        return dataclasses.replace(self, **{name: combine(getattr(self, name), getattr(other, name)) for name in sums})


@dataclasses.dataclass(frozen=True)
class Stage(Sums):
    """One stage on the way of batches.

    Attributes:
        seconds: Time spent in it, summed over the workers.
        bytes: Bytes that came out of it.

    Example:
        >>> (Stage(1.0, 10_000_000) - Stage(0.5, 4_000_000)).mb_per_s
        12.0
    """

    seconds: float = 0.0
    bytes: int = 0

    @property
    def mb_per_s(self) -> float:
        """10⁶ bytes per second of this stage; 0 if it took no time."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class StageTimes(Sums):
    """Where the time of batches went. Seconds are sums over the workers.

    Attributes:
        read: Bringing stored bytes into memory, and copying values to their places. Bytes as they are stored, where
            chunks or files are decoded; else those of the samples.
        decode: Decoding chunks and images; bytes of the results, also of samples that are not used. If the file is
            mapped, the wait for its pages is here.
        transform: ``sample_transform`` and ``batch_transform``; bytes of the samples.
        copy: Copies to a device with streams, by its own clock.
        cpu_s: Seconds of reading, decoding and transforming in which a core worked. The others waited for storage, for
            the GIL or for a core.
        slot_s: Seconds that workers waited for a slot while the loop waited for data, too.
        loop_s: Seconds that workers waited because all slots were full: the loop had data enough.
    """

    read: Stage = Stage()
    decode: Stage = Stage()
    transform: Stage = Stage()
    copy: Stage = Stage()
    cpu_s: float = 0.0
    slot_s: float = 0.0
    loop_s: float = 0.0

    @property
    def worked_s(self) -> float:
        """Seconds that workers spent reading, decoding and transforming."""
        return self.read.seconds + self.decode.seconds + self.transform.seconds


@dataclasses.dataclass(frozen=True)
class ReadStats(Sums):
    """What the readers did.

    Attributes:
        batches: Batches read.
        bytes: Bytes of samples written to slots.
        seconds: Seconds that workers spent reading, summed over the workers.
        ready: Batches that wait on the host at this moment.
        slots: Slots of memory at this moment, each for one batch, or for several that are small.
        slot_bytes: Bytes of one slot.
        workers: Workers at this moment; 0 where the consumer reads.
        starved: How often the loop had to wait for a batch, or for several that are read together.
        stages: Where these seconds went, and how long workers waited.

    Example:
        >>> ReadStats(batches=2, bytes=6_000_000, seconds=0.5).mb_per_s
        12.0
    """

    _now = "ready", "slots", "slot_bytes", "workers"

    batches: int = 0
    bytes: int = 0
    seconds: float = 0.0
    ready: int = 0
    slots: int = 0
    slot_bytes: int = 0
    workers: int = 0
    starved: int = 0
    stages: StageTimes = StageTimes()

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10⁶ bytes) read per second of reading; 0 before the first."""
        return Stage(self.seconds, self.bytes).mb_per_s


@dataclasses.dataclass(frozen=True)
class DeviceWait(Sums):
    """How long a device with streams had nothing to do but wait for data, as far as is known by now.

    Attributes:
        batches: Batches that are counted, but for the first of each epoch.
        wait_s: Seconds that the device waited for these.
        gap_s: Seconds that it waited for the first batches of epochs.
        last_s: Seconds that it waited for the last batch of which that is known: one or two before the last.
        copy: Copies to the device, by its clock.
    """

    _now = ("last_s",)

    batches: int = 0
    wait_s: float = 0.0
    gap_s: float = 0.0
    last_s: float = 0.0
    copy: Stage = Stage()


@dataclasses.dataclass(frozen=True)
class QueueFill:
    """How full the queues of a loader are at this moment.

    Attributes:
        host: Batches that wait in host memory.
        host_depth: How many there can be.
        device: Batches on the device, or on their way there, that are yet to be handed out.
        device_depth: How many there can be; 0 where batches are handed out in host memory.

    Example:
        >>> print(QueueFill(4, 4, 2, 2))
        host 4/4 device 2/2
        >>> print(QueueFill(3, 4))
        host 3/4
        >>> print(QueueFill())
        no queue
    """

    host: int = 0
    host_depth: int = 0
    device: int = 0
    device_depth: int = 0

    def __str__(self) -> str:
        host = [f"host {self.host}/{self.host_depth}"] if self.host_depth else []
        device = [f"device {self.device}/{self.device_depth}"] if self.device_depth else []
        return " ".join([*host, *device]) or "no queue"


@dataclasses.dataclass(frozen=True)
class LoaderStats:
    """What the consumer saw since the loader was built; ``device_transform`` in ``next`` is no wait.

    Attributes:
        batches: Batches handed out.
        wait_s: Seconds spent inside ``next``, over all batches but the first of each epoch.
        last_wait_s: Seconds spent inside the last ``next``.
        epoch_gap_s: Seconds spent inside ``next`` for the first batch of the last epoch begun.
        queue_fill: Batches that were ready, on host and device together, when the last one was asked for.
        copied: Batches handed out as ordinary copies, because everything that was handed out before is still in use
            and the memory budget is spent.
        read: What the readers did.
        device: How long the device waited; None where it has no streams, and waits whenever the consumer does.
        gap_s: Seconds spent inside ``next`` for the first batches of all epochs.
        transform_s: Seconds in which ``next`` ran ``device_transform``, as on a CPU.
    """

    batches: int = 0
    wait_s: float = 0.0
    last_wait_s: float = 0.0
    epoch_gap_s: float = 0.0
    queue_fill: int = 0
    copied: int = 0
    read: ReadStats = ReadStats()
    device: DeviceWait | None = None
    gap_s: float = 0.0
    transform_s: float = 0.0

    @property
    def stages(self) -> StageTimes:
        """Where the time of all batches went so far, stage by stage."""
        return dataclasses.replace(self.read.stages, copy=Stage() if self.device is None else self.device.copy)

    def metrics(self) -> dict[str, float]:
        """The last step as metrics: milliseconds, batches, and 10⁶ bytes per second."""
        return {
            "data/wait_ms": self.last_wait_s * 1e3,
            "data/device_wait_ms": (self.last_wait_s if self.device is None else self.device.last_s) * 1e3,
            "data/queue_fill": float(self.queue_fill),
            "data/epoch_gap_ms": self.epoch_gap_s * 1e3,
            "data/read_mb_s": self.read.mb_per_s,
        }


@dataclasses.dataclass(frozen=True)
class WaitSummary:
    """How long a loop waited for data.

    Attributes:
        steps: Batches that the loop has had.
        wait_s: Seconds inside ``next``, without the first batch of each epoch.
        gap_s: Seconds inside ``next`` for the first batch of each epoch.
        busy_s: Seconds in which it did something else.
        device_s: Seconds in which the device was idle because it waited for data. None if it has no streams; it then
            waits whenever the loop does.

    Example:
        >>> print(WaitSummary(steps=100, wait_s=0.1, gap_s=0.1, busy_s=9.8))
        0.200 s of 10.0 s for data, 0.100 s of it for first batches: data wait 2.0 %
        >>> print(WaitSummary(steps=100, wait_s=0.1, gap_s=0.1, busy_s=9.8, device_s=0.08))
        0.200 s of 10.0 s for data, 0.100 s of it for first batches, the device 0.080 s: data wait 0.8 %
    """

    steps: int = 0
    wait_s: float = 0.0
    gap_s: float = 0.0
    busy_s: float = 0.0
    device_s: float | None = None

    def __add__(self, other: WaitSummary) -> WaitSummary:
        known = [each.device_s for each in (self, other) if each.device_s is not None]
        return WaitSummary(
            self.steps + other.steps,
            self.wait_s + other.wait_s,
            self.gap_s + other.gap_s,
            self.busy_s + other.busy_s,
            sum(known) if known else None,
        )

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


class ReadMeter:
    """Counts what the workers of one pipeline do; its owner guards it.

    Attributes:
        work: What they did.
        slot_s: See `StageTimes`.
        loop_s: See `StageTimes`.
    """

    def __init__(self) -> None:
        self.batches = self.bytes = 0
        self.work = Work()
        self.slot_s = self.loop_s = 0.0

    def read(self, batches: int, nbytes: int, work: Work) -> None:
        self.batches += batches
        self.bytes += nbytes
        self.work = self.work.plus(work)

    def waited(self, seconds: float, *, starved: bool) -> None:
        """A worker waited for a slot; while the loop waited for data, or had enough."""
        if starved:
            self.slot_s += seconds
        else:
            self.loop_s += seconds

    def stats(self, **now: int) -> ReadStats:
        work, nbytes = self.work, self.bytes
        stages = StageTimes(
            Stage(max(work.seconds - work.decode_s - work.transform_s, 0.0), work.stored or nbytes),
            Stage(work.decode_s, work.decoded),
            Stage(work.transform_s, nbytes if work.transform_s else 0),
            cpu_s=work.cpu_s,
            slot_s=self.slot_s,
            loop_s=self.loop_s,
        )
        return ReadStats(self.batches, nbytes, work.seconds, stages=stages, **now)


class WaitMeter:
    """Counts what one consumer waits; a snapshot of it is made only when somebody asks."""

    def __init__(self) -> None:
        self._batches = self._queue_fill = 0
        self._wait_s = self._last_wait_s = self._epoch_gap_s = self._gap_s = self._transform_s = 0.0

    def add(self, took_s: float, transform_s: float = 0.0, *, first: bool, queue_fill: int) -> None:
        """One more batch was handed out: how long ``next`` took, and ``device_transform`` in it."""
        waited_s = took_s - transform_s
        self._batches += 1
        self._transform_s += transform_s
        self._last_wait_s, self._queue_fill = waited_s, queue_fill
        if first:
            self._epoch_gap_s = waited_s
            self._gap_s += waited_s
        else:
            self._wait_s += waited_s

    def stats(self, read: ReadStats, *, copied: int, device: DeviceWait | None) -> LoaderStats:
        waits = self._wait_s, self._last_wait_s, self._epoch_gap_s
        sums = self._gap_s, self._transform_s
        return LoaderStats(self._batches, *waits, self._queue_fill, copied, read, device, *sums)
