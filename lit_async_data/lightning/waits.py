"""`EpochWaits`: what training waited for data in one epoch, with the means of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from lit_async_data.engine.stats import LoaderStats, Wait


class EpochWaits:
    """Adds up the steps of one epoch of training."""

    def __init__(self, stats: Sequence[LoaderStats] = ()) -> None:
        self.summary = Wait()
        self._before = stats
        self._fill_sum = 0

    def step(self, waited_s: float, stats: Sequence[LoaderStats], *, first: bool) -> None:
        self.summary += Wait(1, 0.0 if first else waited_s, waited_s if first else 0.0)
        self._fill_sum += sum(each.queue_fill for each in stats)

    def end(self, stats: Sequence[LoaderStats], total_s: float) -> dict[str, float]:
        """Add what the device waited, which is known late."""
        device = _device_wait(self._before, stats)
        busy_s, device_s = total_s - self.summary.waited_s, None if device is None else device.wait_s + device.gap_s
        self.summary += Wait(busy_s=busy_s, device_s=device_s)
        if not stats or not self.summary.steps:
            return {}
        wait_ms = 1e3 * self.summary.wait_s / max(self.summary.steps - 1, 1)
        return {
            "data/read_mb_s": stats[0].read.minus(self._before[0].read).mb_per_s,
            "data/wait_ms": wait_ms,
            "data/device_wait_ms": wait_ms if device is None else 1e3 * device.wait_s / max(device.steps, 1),
            "data/epoch_gap_ms": 1e3 * self.summary.gap_s,
            "data/queue_fill": self._fill_sum / self.summary.steps,
        }


def _device_wait(before: Sequence[LoaderStats], now: Sequence[LoaderStats]) -> Wait | None:
    """What the device waited between two readings of the loaders' statistics; None if no loader measured it."""
    waits = [
        after.device.since(earlier.device)
        for earlier, after in zip(before, now, strict=False)
        if after.device is not None
    ]
    if not waits:
        return None
    return Wait(waits[0].steps, sum(each.wait_s for each in waits), sum(each.gap_s for each in waits))
