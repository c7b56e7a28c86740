"""`WaitSummary`: how long training waited for data, as a share and in words."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WaitSummary:
    """How long training waited for data.

    Attributes:
        steps: Training steps.
        wait_s: Seconds inside ``next``, but for the first batch of each epoch.
        gap_s: Seconds inside ``next`` for the first batch of each epoch.
        busy_s: Seconds from the start to the end of each batch's training.
        device_s: Seconds in which the device had nothing to do but wait for data; None where it has no streams, and
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
        """Seconds that the loop waited."""
        return self.wait_s + self.gap_s

    @property
    def total_s(self) -> float:
        """Seconds that the loop waited or trained."""
        return self.waited_s + self.busy_s

    @property
    def share(self) -> float:
        """The device's waiting as a fraction of all; 0 before the first step."""
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
