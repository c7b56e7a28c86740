"""`LoaderStats`: batches and waits of a loader, as its consumer sees them; `Wait`: how long a loop waited for data."""

from __future__ import annotations

import dataclasses

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
        return Wait(
            self.steps + other.steps,
            self.wait_s + other.wait_s,
            self.gap_s + other.gap_s,
            self.busy_s + other.busy_s,
            sum(known) if known else None,
            self.last_s,
            self.copy.plus(other.copy),
        )

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
    workers: int = 0
    slots: int = 0

    def add(self, took_s: float, transform_s: float = 0.0, *, first: bool, queue_fill: int) -> None:
        """Count a batch, with the time of ``next``, and of ``device_transform`` in it."""
        waited_s = took_s - transform_s
        self.batches += 1
        self.transform_s += transform_s
        self.last_wait_s, self.queue_fill = waited_s, queue_fill
        if first:
            self.epoch_gap_s = waited_s
            self.gap_s += waited_s
        else:
            self.wait_s += waited_s

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
