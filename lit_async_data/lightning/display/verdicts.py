"""`Verdicts`: what the Trainer's loops waited for, as one line per epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lit_async_data.errors import ConfigError
from lit_async_data.lightning.display.progress import WaitSummary
from lit_async_data.lightning.trainer.compat import pl, rank_zero_warn
from lit_async_data.verdict.diagnosis import verdict
from lit_async_data.verdict.finding import Bound, Verdict
from lit_async_data.verdict.headspace import Headspace
from lit_async_data.verdict.watch import Loader, Watch

# What people call the stages, and what the options of their loaders begin with, as typed.
STAGES = {
    "val": ("validation", "data.val_loader."),
    "test": ("test", "data.test_loader."),
    "predict": ("prediction", "data.predict_loader."),
}

# Shorter evaluations mostly begin and end, and show nothing of their readers.
SHORT_S = 0.5


class Verdicts:
    """Watches the loops of one Trainer.

    Args:
        headspace: Has training repeat batches; None for a training.

    Attributes:
        evaluated: How long each evaluation loop waited, over all its runs, by stage.
    """

    def __init__(self, headspace: Headspace | None = None) -> None:
        self._headspace = headspace
        self.evaluated: dict[str, WaitSummary] = {}
        self._training = Watch([])
        self._evaluation: Watch | None = None
        self._wall_s, self._ended_s = 0.0, 0.0
        self._beside = ""  # what the validations of this epoch waited for

    # -- training --------------------------------------------------------------------------------------------------

    def warn(self) -> None:
        """Say before training that it is none, if batches repeat."""
        if self._headspace is not None:
            rank_zero_warn(
                "DevicePrefetcher(headspace=True): this is no training. In the second half of each epoch the same "
                "batches come again and again, so losses, metrics and checkpoints mean nothing; the metric "
                "data/headspace marks them"
            )

    def check_resumed(self, trainer: Any) -> None:
        """A checkpoint is about to be restored.

        Raises:
            ConfigError: Training would go on, with batches that repeat.
        """
        if self._headspace is not None and trainer.state.fn == "fit":
            raise ConfigError(
                "headspace: this run resumes from a checkpoint, but with headspace=True it is no training; leave out "
                "ckpt_path, or headspace"
            )

    def begin_epoch(self, trainer: Any, loaders: Sequence[Loader]) -> None:
        """An epoch of training begins."""
        self._training = Watch(loaders)
        self._wall_s = self._ended_s = 0.0
        self._beside = ""
        if self._headspace is not None:
            steps = trainer.num_training_batches
            self._headspace.begin(int(steps) if math.isfinite(steps) else None)

    def begin_step(self, loaders: Sequence[Loader]) -> None:
        """The loaders run."""
        if self._headspace is not None:
            for loader in loaders:
                self._headspace.attach(loader)

    def step(self, number: int, now_s: float, waited_s: float, busy_s: float) -> None:
        """A batch of training has ended.

        Args:
            number: Of the batch in the epoch.
            now_s: When.
            waited_s: Seconds that the loop waited for it.
            busy_s: Seconds that it took beside that, at least; more may have passed between the Trainer's hooks.
        """
        self._wall_s += now_s - self._ended_s if self._ended_s else waited_s + busy_s
        self._ended_s = now_s
        if self._headspace is not None:
            self._headspace.step(number, now_s)

    @property
    def marks(self) -> dict[str, float]:
        """Metrics that mark a run that is no training."""
        if self._headspace is None:
            return {}
        gain = self._headspace.gain
        return {"data/headspace": math.nan if gain is None else 100 * gain}

    def release(self) -> None:
        """Let the loaders go: the run is over."""
        self._training, self._evaluation = Watch([]), None

    def epoch(self, trainer: pl.Trainer, summary: WaitSummary, device: torch.device) -> str:
        """The line of an epoch of training. With several ranks, all call this, and the line names the slowest.

        Args:
            trainer: Whose epoch has ended.
            summary: How long this rank waited.
            device: Where ranks exchange numbers.
        """
        if self._headspace is not None:
            return f"epoch {trainer.current_epoch}: headspace: {self._headspace}"
        found = verdict(self._training.facts(self._wall_s))
        share, of_rank, strategy = summary.share, "", trainer.strategy
        if trainer.world_size > 1:
            mine = torch.tensor([share, *found.numbers()], dtype=torch.float32, device=device)
            # Every rank is here: Lightning's own reductions at the end of an epoch need that as well.
            # A sum of rows of zeros: Lightning's own gathering warns of what it uses of torch.
            table = torch.zeros(trainer.world_size, len(mine), device=device)
            table[trainer.global_rank] = mine
            ranks = strategy.reduce(table, reduce_op="sum").tolist()
            slowest = max(range(len(ranks)), key=lambda rank: ranks[rank][0])
            share, *numbers = ranks[slowest]
            found = Verdict.of_numbers(numbers, found.packing)
            of_rank = f" on rank {slowest}, the slowest of {len(ranks)}," if len(ranks) > 1 else ""
        who = "training" if summary.device_s is None else "the device"
        waited = f"{who}{of_rank} waited {100 * share:.1f} % of {_duration(summary.total_s)} for data"
        gap = f" ({summary.gap_s:.3f} s for the first batch)" if summary.gap_s > 0.005 * summary.total_s else ""
        return f"epoch {trainer.current_epoch}: {waited}{gap}: {found}{self._beside}"

    # -- evaluation ------------------------------------------------------------------------------------------------

    def begin(self, loaders: Sequence[Loader]) -> None:
        """A loop of evaluation begins."""
        self._evaluation = Watch(loaders)

    def end(self, trainer: Any, stage: str) -> str:
        """A loop of evaluation has ended.

        Args:
            trainer: Whose.
            stage: ``"val"``, ``"test"`` or ``"predict"``.

        Returns:
            A line; empty inside training, whose line will hold it.
        """
        watch, self._evaluation = self._evaluation, None
        if watch is None:
            return ""
        facts = watch.facts()
        self._training.leave_out(watch)
        self._ended_s = 0.0
        if self._headspace is not None:
            self._headspace.interrupt()
        if not facts.batches:
            return ""
        device = any(loader.stats().device is not None for loader in watch.loaders)
        waited = WaitSummary(facts.batches, facts.waited_s, facts.gap_s, facts.total_s - facts.waited_s - facts.gap_s)
        if trainer.sanity_checking:
            return ""
        self.evaluated[stage] = self.evaluated.get(stage, WaitSummary()) + waited
        name, prefix = STAGES[stage]
        found = verdict(facts)
        text = f"{100 * facts.share:.1f} % of {_duration(facts.total_s)}"
        why = f": {found.text(prefix)}" if facts.total_s >= SHORT_S else ""
        if trainer.state.fn == "fit":
            self._beside = f"; {name} waited {text}{'' if found.bound is Bound.LOOP else why}"
            return ""
        return f"{name}: {'the device' if device else 'the loop'} waited {text} for data{why}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"  # else 0.0 s
