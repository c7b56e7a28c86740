"""What training shows of its waits and queues: `WaitSummary` after each epoch, `QueueGauge` in the progress bar."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lit_async_data.lightning.trainer.compat import pl
from lit_async_data.lightning.trainer.stages import driven_loaders

# The key of the gauge in the progress bar: `data=host 4/4 device 2/2`.
NAME = "data"


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
        """Seconds that the loop waited."""
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


class QueueGauge:
    """Shows in Lightning's progress bar, of whatever class, how full the queues of training are. No logger sees it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._replacement: Any = None

    def attach(self, trainer: pl.Trainer) -> None:
        """Wrap the ``get_metrics`` of the Trainer's progress bar, if it has one."""
        self.detach()
        bar: Any = trainer.progress_bar_callback
        if bar is not None:
            self._bar, self._replacement = bar, functools.partial(_with_fill, bar.get_metrics)
            bar.get_metrics = self._replacement

    def detach(self) -> None:
        """Restore the bar, unless other code has wrapped it since. A second call does nothing."""
        bar, replacement, self._bar, self._replacement = self._bar, self._replacement, None, None
        if bar is not None and vars(bar).get("get_metrics") is replacement:
            original = replacement.args[0]
            del bar.get_metrics
            if original != bar.get_metrics:
                bar.get_metrics = original


def _with_fill(get_metrics: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    metrics: dict[str, Any] = get_metrics(trainer, pl_module)
    loaders = driven_loaders(trainer.train_dataloader) if trainer.state.fn == "fit" else []
    return metrics | {NAME: ", ".join(str(loader.fill) for loader in loaders)} if loaders else metrics
