"""Frozen snapshots of what a loader did; under each field stands what it means, with its unit."""

from __future__ import annotations

import dataclasses

from lit_async_data.host.metrics.stages import NO_TIMES, NOT_RUN, Stage, StageMeter, StageTimes


@dataclasses.dataclass(frozen=True)
class ReadStats:
    """What the readers did since the loader was built.

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

    batches: int = 0
    bytes: int = 0
    seconds: float = 0.0
    ready: int = 0
    slots: int = 0
    slot_bytes: int = 0
    workers: int = 0
    starved: int = 0
    stages: StageTimes = NO_TIMES

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10⁶ bytes) read per second of reading; 0 before the first."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0

    def since(self, before: ReadStats) -> ReadStats:
        """What came after an earlier snapshot."""
        return dataclasses.replace(
            self,
            batches=self.batches - before.batches,
            bytes=self.bytes - before.bytes,
            seconds=self.seconds - before.seconds,
            starved=self.starved - before.starved,
            stages=self.stages.since(before.stages),
        )

    def after(self, before: ReadStats) -> ReadStats:
        """This with the sums of an earlier engine added."""
        return dataclasses.replace(
            self,
            batches=self.batches + before.batches,
            bytes=self.bytes + before.bytes,
            seconds=self.seconds + before.seconds,
            starved=self.starved + before.starved,
            stages=self.stages.after(before.stages),
        )

    def plus(self, batches: int, read_bytes: int, seconds: float) -> ReadStats:
        """The sums with some more batches."""
        read = Stage(self.stages.read.seconds + seconds, self.stages.read.bytes + read_bytes)
        return ReadStats(
            self.batches + batches, self.bytes + read_bytes, self.seconds + seconds, stages=StageTimes(read)
        )


@dataclasses.dataclass(frozen=True)
class DeviceWait:
    """How long a device with streams had nothing to do but wait for data, as far as is known by now.

    Attributes:
        batches: Batches that are counted, but for the first of each epoch.
        wait_s: Seconds that the device waited for these.
        gap_s: Seconds that it waited for the first batches of epochs.
        last_s: Seconds that it waited for the last batch of which that is known: one or two before the last.
        copy: Copies to the device, by its clock.

    Example:
        >>> DeviceWait().plus(0.5, first=True).plus(0.25, first=False)
        DeviceWait(batches=1, wait_s=0.25, gap_s=0.5, last_s=0.25, copy=Stage(seconds=0.0, bytes=0))
    """

    batches: int = 0
    wait_s: float = 0.0
    gap_s: float = 0.0
    last_s: float = 0.0
    copy: Stage = NOT_RUN

    def plus(self, waited_s: float, *, first: bool) -> DeviceWait:
        """This with one more batch."""
        if first:
            return DeviceWait(self.batches, self.wait_s, self.gap_s + waited_s, waited_s, self.copy)
        return DeviceWait(self.batches + 1, self.wait_s + waited_s, self.gap_s, waited_s, self.copy)

    def since(self, before: DeviceWait) -> DeviceWait:
        """What came after an earlier snapshot."""
        return dataclasses.replace(
            self,
            batches=self.batches - before.batches,
            wait_s=self.wait_s - before.wait_s,
            gap_s=self.gap_s - before.gap_s,
            copy=Stage(self.copy.seconds - before.copy.seconds, self.copy.bytes - before.copy.bytes),
        )


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

    def of(self, read: ReadStats, *, copied: int, device: DeviceWait | None) -> LoaderStats:
        """This, with what the readers did, and what the device waited."""
        return dataclasses.replace(self, read=read, copied=copied, device=device)

    @property
    def stages(self) -> StageTimes:
        """Where the time of all batches went so far, stage by stage."""
        copy = NOT_RUN if self.device is None else self.device.copy
        return dataclasses.replace(self.read.stages, copy=copy)

    def metrics(self) -> dict[str, float]:
        """The last step as metrics: milliseconds, batches, and 10⁶ bytes per second."""
        return {
            "data/wait_ms": self.last_wait_s * 1e3,
            "data/device_wait_ms": (self.last_wait_s if self.device is None else self.device.last_s) * 1e3,
            "data/queue_fill": float(self.queue_fill),
            "data/epoch_gap_ms": self.epoch_gap_s * 1e3,
            "data/read_mb_s": self.read.mb_per_s,
        }


class ReadMeter:
    """Counts what workers read; a snapshot of it is made only when somebody asks. See `ReadStats`."""

    def __init__(self) -> None:
        self.batches = self.bytes = 0

    def add(self, batches: int, read_bytes: int) -> None:
        """Some more batches were read."""
        self.batches += batches
        self.bytes += read_bytes

    def stats(
        self, stages: StageMeter, *, ready: int, slots: int, slot_bytes: int, workers: int, starved: int
    ) -> ReadStats:
        """What was counted so far."""
        read = self.batches, self.bytes, stages.seconds
        return ReadStats(*read, ready, slots, slot_bytes, workers, starved, stages.times(self.bytes))


class WaitMeter:
    """Counts what one consumer waits; a snapshot of it is made only when somebody asks."""

    def __init__(self) -> None:
        self._batches = self._queue_fill = 0
        self._wait_s = self._last_wait_s = self._epoch_gap_s = self._gap_s = self._transform_s = 0.0

    def add(self, took_s: float, transform_s: float = 0.0, *, first: bool, queue_fill: int) -> None:
        """One more batch was handed out.

        Args:
            took_s: Seconds inside ``next``.
            transform_s: Of these, in ``device_transform``.
            first: Whether it is the first of an epoch.
            queue_fill: Batches that were ready when it was asked for.
        """
        waited_s = max(took_s - transform_s, 0.0)  # less where a headspace run repeats transformed batches
        self._batches += 1
        self._transform_s += transform_s
        self._last_wait_s, self._queue_fill = waited_s, queue_fill
        if first:
            self._epoch_gap_s = waited_s
            self._gap_s += waited_s
        else:
            self._wait_s += waited_s

    def stats(self) -> LoaderStats:
        """What was counted so far."""
        waits = self._wait_s, self._last_wait_s, self._epoch_gap_s
        return LoaderStats(self._batches, *waits, self._queue_fill, gap_s=self._gap_s, transform_s=self._transform_s)
