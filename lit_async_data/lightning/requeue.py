"""`RequeueBetweenBatches`: a job of SLURM is saved and requeued where it can continue exactly."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lit_async_data.lightning.trainer.compat import pl

# What `sbatch --signal` sends before the time limit, and what Lightning listens to; 0 on Windows, which has none.
SIGNAL: int = getattr(signal, "SIGUSR1", 0)


class RequeueBetweenBatches(pl.Callback):
    """Saves and requeues a job of SLURM between two steps of the optimizer, the same two on all ranks.

    Lightning saves the checkpoint inside its handler of the signal, in whatever line the loop is: in the middle of a
    step, whose batch then counts as not trained on, or in another step on each rank, which wait for each other for
    ever. With this callback the signal is only noted, and Lightning's handler runs before the next batch is trained on,
    after any validation that is due.

    It does nothing where Lightning does not requeue. With several ranks it exchanges one number per step, as Lightning
    itself does.

    Example:
        >>> trainer = pl.Trainer(callbacks=[RequeueBetweenBatches()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._noted = False
        self._requeue: Callable[..., Any] | None = None
        self._steps = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take the place of Lightning's handler. When training has ended, Lightning restores what was before both."""
        self._noted, self._requeue, self._steps = False, None, -1
        handler = signal.getsignal(SIGNAL) if SIGNAL else None
        if callable(handler) and type(handler).__module__.startswith(pl.__name__):
            self._requeue = handler
            signal.signal(SIGNAL, self._note)

    def _note(self, *_: Any) -> None:
        self._noted = True

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Requeue if a rank has got the signal, unless gradients are accumulated."""
        # Not at the end of the batch before: a run that is resumed from there leaves out the validation that is due.
        stepped, self._steps = trainer.global_step != self._steps, trainer.global_step
        if stepped:
            self._obey(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Requeue a job that got the signal in its last step or later: there may be a test to come."""
        self._obey(trainer)

    def _obey(self, trainer: pl.Trainer) -> None:
        if self._requeue is None:
            return
        if trainer.strategy.reduce_boolean_decision(self._noted, all=False):
            self._noted = False
            self._requeue(SIGNAL, None)
