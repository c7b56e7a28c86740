"""`Verdicts`: what the Trainer's loops waited for, in at most one sentence per epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lit_async_data.engine.stats import Wait
from lit_async_data.engine.verdict.diagnosis import Bound, Cure, Verdict, verdict
from lit_async_data.engine.verdict.watch import Loader, Watch
from lit_async_data.lightning.compat import pl

# What people call the stages.
STAGES = {"val": "validation", "test": "test", "predict": "prediction"}

# Shorter loops mostly begin and end, and show nothing of their readers.
LEAST_S, LEAST_STEPS = 1.0, 20
# The verdict repeats a sentence only if its share has changed by at least this since the last time.
NOTICEABLE = 0.1


class Verdicts:
    """Watches the loops of one Trainer.

    Attributes:
        wall_s: Seconds of the steps of this epoch of training.
        evaluated: How long each evaluation loop waited, over all its runs, by stage.
    """

    def __init__(self) -> None:
        self.evaluated: dict[str, Wait] = {}
        self._training = Watch([])
        self._evaluation: Watch | None = None
        self.wall_s, self._ended_s = 0.0, 0.0
        self._said: dict[tuple[str, Bound, Cure], float] = {}  # the share that each stage's sentences were said of last

    # -- training --------------------------------------------------------------------------------------------------

    def begin_epoch(self, loaders: Sequence[Loader]) -> None:
        self._training = Watch(loaders)
        self.wall_s = self._ended_s = 0.0

    def step(self, now_s: float, waited_s: float, busy_s: float) -> None:
        self.wall_s += now_s - self._ended_s if self._ended_s else waited_s + busy_s
        self._ended_s = now_s

    def release(self) -> None:
        """Let the loaders go: the run is over."""
        self._training, self._evaluation = Watch([]), None

    def epoch(self, trainer: pl.Trainer, device: torch.device, who: str) -> str:
        """The line of an epoch of training; empty if there is nothing new to say.

        With several ranks, all call this, and the line names the slowest.
        """
        facts = self._training.facts(self.wall_s)
        found = verdict(facts)
        if trainer.world_size > 1:
            bounds, cures = list(Bound), list(Cure)
            mine = [found.share, bounds.index(found.bound), cures.index(found.cure), found.value]
            # Every rank is here: Lightning's own reductions at the end of an epoch need that as well.
            # A sum of rows of zeros: Lightning's own gathering warns of what it uses of torch.
            table = torch.zeros(trainer.world_size, len(mine), device=device)
            table[trainer.global_rank] = torch.tensor(mine, dtype=torch.float32, device=device)
            ranks = trainer.strategy.reduce(table, reduce_op="sum").tolist()
            slowest = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
            share, *numbers = ranks[slowest]
            bound, cure, value = map(round, numbers)
            found = Verdict(share, bounds[bound], cures[cure], value)
            who += f" on rank {slowest}, the slowest of {len(ranks)}," if len(ranks) > 1 else ""
        line = self._new("train", facts.waited, found, who)
        return f"epoch {trainer.current_epoch}: {line}" if line else ""

    # -- evaluation ------------------------------------------------------------------------------------------------

    def begin(self, loaders: Sequence[Loader]) -> None:
        self._evaluation = Watch(loaders)

    def end(self, trainer: Any, stage: str) -> str:
        """A loop of evaluation has ended: its line, empty if there is nothing new to say."""
        watch, self._evaluation = self._evaluation, None
        if watch is None:
            return ""
        facts = watch.facts()
        self._ended_s = 0.0
        if not facts.waited.steps or trainer.sanity_checking:
            return ""
        self.evaluated[stage] = self.evaluated.get(stage, Wait()) + facts.waited
        found = verdict(facts)
        if trainer.state.fn == "fit" and found.bound is Bound.LOOP:
            return ""
        return self._new(stage, facts.waited, found, STAGES[stage])

    def _new(self, stage: str, waited: Wait, found: Verdict, who: str) -> str:
        """A sentence; empty for a short loop, and for what was said of this stage before."""
        sentence = stage, found.bound, found.cure
        known = abs(found.share - self._said.get(sentence, math.inf)) < NOTICEABLE
        if waited.total_s < LEAST_S or waited.steps < LEAST_STEPS or known:
            return ""
        self._said[sentence] = found.share
        prefix = "loader." if stage == "train" else f"data.{stage}_loader."
        return found.sentence(who, f"{waited.total_s:.1f} s", prefix)
