"""`Verdicts`: one sentence on what a loop of the Trainer waited for; `EpochWaits`: the means of an epoch's steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lit_async_data.engine.stats import LoaderStats, Wait
from lit_async_data.engine.verdict import Loader, Verdict, Watch
from lit_async_data.lightning.compat import pl

# What people call the stages.
STAGES = {"val": "validation", "test": "test", "predict": "prediction"}

# Shorter loops mostly begin and end, and show nothing of their readers.
LEAST_S, LEAST_STEPS = 1.0, 20
# A sentence is repeated only if its share has changed by at least this since the last time.
NOTICEABLE = 0.1


class EpochWaits:
    """Adds up the steps of one epoch of training."""

    def __init__(self, stats: Sequence[LoaderStats] = ()) -> None:
        self.summary = Wait()
        self.wall_s = self._ended_s = 0.0  # of the steps so far, and when the last one ended
        self._before, self._fill_sum = stats, 0

    def step(self, stats: Sequence[LoaderStats], now_s: float, busy_s: float, *, first: bool) -> None:
        waited_s = sum(each.last_wait_s for each in stats)
        self.wall_s += now_s - self._ended_s if self._ended_s else waited_s + busy_s
        self._ended_s = now_s
        self.summary += Wait(1, 0.0 if first else waited_s, waited_s if first else 0.0)
        self._fill_sum += sum(each.queue_fill for each in stats)

    def pause(self) -> None:
        """Other loops run before the next step."""
        self._ended_s = 0.0

    def end(self, stats: Sequence[LoaderStats]) -> dict[str, float]:
        """The means; adds to the summary what the device waited, which is known late."""
        pairs = zip(self._before, stats, strict=False)
        waits = [now.device.since(before.device) for before, now in pairs if now.device is not None]
        waited, summary = sum(waits, Wait()), self.summary
        busy_s, device_s = self.wall_s - summary.waited_s, waited.waited_s if waits else None
        self.summary = summary = summary + Wait(busy_s=busy_s, device_s=device_s)
        if not stats or not summary.steps:
            return {}
        wait_ms = 1e3 * summary.wait_s / max(summary.steps - 1, 1)
        return {
            "data/read_mb_s": stats[0].read.minus(self._before[0].read).mb_per_s,
            "data/wait_ms": wait_ms,
            "data/device_wait_ms": 1e3 * waited.wait_s / max(waits[0].steps, 1) if waits else wait_ms,
            "data/epoch_gap_ms": 1e3 * summary.gap_s,
            "data/queue_fill": self._fill_sum / summary.steps,
        }


class Verdicts:
    """Watches the loops of one Trainer.

    Attributes:
        evaluated: How long each evaluation loop waited, over all its runs, by stage.
    """

    def __init__(self) -> None:
        self.evaluated: dict[str, Wait] = {}
        self._watches: dict[str, Watch] = {}
        self._said: dict[tuple[str, str, str], float] = {}  # the last share of each stage, cause and hint

    def begin(self, stage: str, loaders: Sequence[Loader]) -> None:
        self._watches[stage] = Watch(loaders)

    def release(self) -> None:
        """Let the loaders go: the run is over."""
        self._watches.clear()

    def epoch(self, trainer: pl.Trainer, device: torch.device, who: str, wall_s: float) -> str:
        """The line of an epoch of training; empty if there is nothing new to say.

        With several ranks, all call this, and the line names the slowest.
        """
        found = self._watches["train"].verdict(wall_s)
        if trainer.world_size > 1:
            # Every rank is here: Lightning's own reductions at the end of an epoch need that as well. A sum of zeros:
            # Lightning's own gathering warns of what it uses of torch.
            shares = torch.zeros(trainer.world_size, device=device)
            shares[trainer.global_rank] = found.share
            shares = trainer.strategy.reduce(shares, reduce_op="sum")
            slowest = int(shares.argmax())
            found = trainer.strategy.broadcast(found, slowest)
            who += f" on rank {slowest}, the slowest of {len(shares)},"
        line = self._new("train", found, who)
        return f"epoch {trainer.current_epoch}: {line}" if line else ""

    def end(self, trainer: Any, stage: str) -> str:
        """A loop of evaluation has ended: its line, empty if there is nothing new to say."""
        if (watch := self._watches.pop(stage, None)) is None:
            return ""
        found = watch.verdict()
        if not found.waited.steps or trainer.sanity_checking:
            return ""
        self.evaluated[stage] = self.evaluated.get(stage, Wait()) + found.waited
        if trainer.state.fn == "fit" and found.cause == "loop":
            return ""
        return self._new(stage, found, STAGES[stage])

    def _new(self, stage: str, found: Verdict, who: str) -> str:
        """A sentence; empty for a short loop, and for what was said of this stage before."""
        sentence, waited = (stage, found.cause, found.hint), found.waited
        known = abs(found.share - self._said.get(sentence, math.inf)) < NOTICEABLE
        if waited.total_s < LEAST_S or waited.steps < LEAST_STEPS or known:
            return ""
        self._said[sentence] = found.share
        prefix = "loader." if stage == "train" else f"data.{stage}_loader."
        return found.sentence(who, f"{waited.total_s:.1f} s", prefix)
