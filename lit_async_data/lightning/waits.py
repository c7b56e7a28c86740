"""What training waited for data: `WaitSummary`, in all; `EpochWaits`, in one epoch, with the means of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lit_async_data.engine.stats import DeviceWait, LoaderStats


@dataclasses.dataclass(frozen=True)
class WaitSummary:
    """How long training waited for data.

    Attributes:
        steps: Training steps.
        wait_s: Seconds inside ``next``, without the first batch of each epoch.
        gap_s: Seconds inside ``next`` for the first batch of each epoch.
        busy_s: Seconds of training.
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
        """Seconds that the loop waited or trained."""
        return self.waited_s + self.busy_s

    @property
    def share(self) -> float:
        """The fraction of the total time that the device waited for data; 0 before the first step."""
        idle_s = self.waited_s if self.device_s is None else self.device_s
        return idle_s / self.total_s if self.steps else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "for an unknown time: no batch of training came from an AsyncLoader"
        device = "" if self.device_s is None else f", the device {self.device_s:.3f} s"
        return (
            f"{self.waited_s:.3f} s of {self.total_s:.1f} s for data, {self.gap_s:.3f} s of it for first "
            f"batches{device}: data wait {100 * self.share:.1f} %"
        )


class EpochWaits:
    """Adds up the steps of one epoch of training."""

    def __init__(self, stats: Sequence[LoaderStats] = ()) -> None:
        self.summary = WaitSummary()
        self._before = stats
        self._fill_sum = 0

    def step(self, waited_s: float, stats: Sequence[LoaderStats], *, first: bool) -> None:
        self.summary += WaitSummary(1, 0.0 if first else waited_s, waited_s if first else 0.0)
        self._fill_sum += sum(each.queue_fill for each in stats)

    def end(self, stats: Sequence[LoaderStats], total_s: float) -> dict[str, float]:
        """Add what the device waited, which is known late."""
        device = _device_wait(self._before, stats)
        busy_s, device_s = total_s - self.summary.waited_s, None if device is None else device.wait_s + device.gap_s
        self.summary += WaitSummary(busy_s=busy_s, device_s=device_s)
        if not stats or not self.summary.steps:
            return {}
        wait_ms = 1e3 * self.summary.wait_s / max(self.summary.steps - 1, 1)
        return {
            "data/read_mb_s": (stats[0].read - self._before[0].read).mb_per_s,
            "data/wait_ms": wait_ms,
            "data/device_wait_ms": wait_ms if device is None else 1e3 * device.wait_s / max(device.batches, 1),
            "data/epoch_gap_ms": 1e3 * self.summary.gap_s,
            "data/queue_fill": self._fill_sum / self.summary.steps,
        }


def _device_wait(before: Sequence[LoaderStats], now: Sequence[LoaderStats]) -> DeviceWait | None:
    """What the device waited between two readings of the loaders' statistics; None if no loader measured it."""
    waits = [
        after.device - (earlier.device or DeviceWait())
        for earlier, after in zip(before, now, strict=False)
        if after.device is not None
    ]
    if not waits:
        return None
    return DeviceWait(waits[0].batches, sum(each.wait_s for each in waits), sum(each.gap_s for each in waits))
