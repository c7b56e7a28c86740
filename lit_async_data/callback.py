"""`DevicePrefetcher`: starts the next copy while the Trainer computes, and measures how long it waited."""

from __future__ import annotations

import dataclasses
import time
import weakref
from typing import Any

import torch

from lit_async_data.errors import ConfigError
from lit_async_data.lightning import pl
from lit_async_data.loader import AsyncLoader
from lit_async_data.stats import ReadStats


@dataclasses.dataclass(frozen=True)
class Waiting:
    """How long training waited for data.

    Attributes:
        steps: Training steps.
        wait_s: Seconds inside ``next``, but for the first batch of each epoch.
        gap_s: Seconds inside ``next`` for the first batch of each epoch.
        busy_s: Seconds from the start to the end of each batch's training.

    Example:
        >>> print(Waiting(steps=100, wait_s=0.1, gap_s=0.1, busy_s=9.8))
        0.200 s of 10.0 s for data (2.0 %), 0.100 s of it for first batches
    """

    steps: int = 0
    wait_s: float = 0.0
    gap_s: float = 0.0
    busy_s: float = 0.0

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(
            self.steps + other.steps,
            self.wait_s + other.wait_s,
            self.gap_s + other.gap_s,
            self.busy_s + other.busy_s,
        )

    @property
    def share(self) -> float:
        """Waiting as a fraction of waiting and training; 0 before the first step."""
        waited = self.wait_s + self.gap_s
        return waited / (waited + self.busy_s) if self.steps else 0.0

    def __str__(self) -> str:
        if not self.steps:
            return "for an unknown time: no batch of training came from an AsyncLoader"
        waited = self.wait_s + self.gap_s
        return (
            f"{waited:.3f} s of {waited + self.busy_s:.1f} s for data ({self.share:.1%}), "
            f"{self.gap_s:.3f} s of it for first batches"
        ).replace("%)", " %)")


class DevicePrefetcher(pl.Callback):
    """Prefetches for every `AsyncLoader` that the Trainer iterates over, in fit, validate, test and predict.

    At ``on_train_batch_start``, when the step's kernels are about to be launched, it starts the copy of the next batch
    on the loader's side stream; what could not be started then, because the readers were not done, it tries again
    before the backward pass and at the end of the batch. It never blocks.

    It logs every ``log_every_n_steps``, and puts the means over each epoch into ``trainer.callback_metrics``:

    * ``data/wait_ms``: milliseconds that the loop waited for a batch, the first of each epoch left out of the mean;
    * ``data/queue_fill``: batches that were ready when it asked;
    * ``data/epoch_gap_ms``: milliseconds that it waited for the first batch of the epoch;
    * ``data/read_mb_s``: 10⁶ bytes read per second of reading; a step's is over all that the loader has read.

    After each epoch it says on rank 0 how long training waited.

    Args:
        device_depth: Batches copied ahead of the one in use, set on every loader it takes over. 0 reads and copies
            nothing ahead but measures all the same, which is the honest "before" of a comparison.

    Raises:
        ConfigError: ``device_depth`` is not a whole number ≥ 0.

    Example:
        >>> callback = DevicePrefetcher(device_depth=2)
        >>> callback.waited.share
        0.0
    """

    def __init__(self, device_depth: int = 2) -> None:
        if not isinstance(device_depth, int) or isinstance(device_depth, bool) or device_depth < 0:
            raise ConfigError(f"device_depth: {device_depth!r} is not a whole number from 0 on")
        self.device_depth = device_depth
        #: How long training waited, over all that was trained with this callback.
        self.waited = Waiting()
        self._epoch = Waiting()
        self._active: list[AsyncLoader] = []
        self._adopted: weakref.WeakSet[AsyncLoader] = weakref.WeakSet()
        self._started = 0.0
        self._fills = 0
        self._read = ReadStats()
        self._logged = -1

    def __getstate__(self) -> dict[str, Any]:
        # For strategies that spawn: loaders stay in the process that built them.
        return {name: value for name, value in vars(self).items() if name not in ("_active", "_adopted")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _active=[], _adopted=weakref.WeakSet())

    # -- loaders ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take over the training loaders; a run that resumes in mid-epoch has no other hook before its first batch."""
        self._adopt(trainer.train_dataloader)
        if not self._active:
            pl.utilities.rank_zero_warn(
                "DevicePrefetcher prefetches and measures AsyncLoaders only, and training uses none: give "
                "the Trainer an AsyncDataModule, or an AsyncLoader"
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take over the training loaders, which may have been rebuilt since the last epoch."""
        self._adopt(trainer.train_dataloader)
        self._epoch, self._fills = Waiting(), 0
        self._read = self._active[0].stats().read if self._active else ReadStats()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take over the validation loaders."""
        self._adopt(trainer.val_dataloaders)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Go back to training, if that is where validation was called from."""
        self._adopt(trainer.train_dataloader)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take over the test loaders."""
        self._adopt(trainer.test_dataloaders)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:  # noqa: ARG002
        """Take over the prediction loaders."""
        self._adopt(trainer.predict_dataloaders)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Leave the loaders to themselves."""
        self._release()

    def on_exception(self, *_: Any) -> None:
        """The same; Lightning calls `teardown` only where nothing went wrong. Whoever built the loaders closes them."""
        self._release()

    def _release(self) -> None:
        for loader in self._adopted:
            loader.driven = False
        self._active = []

    def _adopt(self, loaders: Any) -> None:
        self._active = [leaf for leaf in _leaves(loaders) if isinstance(leaf, AsyncLoader)]
        for loader in self._active:
            loader.device_depth = self.device_depth
            loader.driven = True
            self._adopted.add(loader)

    def _top_up(self, number: int | None = None) -> None:
        for loader in self._active if number is None else self._active[number : number + 1]:
            loader.prefetch()

    # -- batches ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the next copy, so that it runs beside this step."""
        self._started = time.perf_counter()
        self._top_up()

    def on_before_backward(self, *_: Any) -> None:
        """Try again what the readers were not ready for."""
        self._top_up()

    def on_train_batch_end(
        self,
        trainer: Any,  # a Trainer, whose log_every_n_steps no type checker sees
        pl_module: pl.LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        """Try once more, and write down how long this step waited."""
        self._top_up()
        stats = [loader.stats() for loader in self._active]
        if not stats:
            return
        waited, busy = sum(s.last_wait_s for s in stats), time.perf_counter() - self._started
        first = batch_idx == 0
        self._epoch += Waiting(1, 0.0 if first else waited, waited if first else 0.0, busy)
        self._fills += sum(s.queue_fill for s in stats)
        # The step that Lightning's own monitors log at; it has no public name.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # noqa: SLF001
        every = trainer.log_every_n_steps
        if every and (step + 1) % every == 0 and step != self._logged:  # once, where several batches make a step
            self._logged = step
            for logger in trainer.loggers:
                logger.log_metrics(stats[0].metrics(), step=step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the means of the epoch, and say how long training waited."""
        self.waited += self._epoch
        if not self._active or not self._epoch.steps:
            return
        means = {
            "data/read_mb_s": self._active[0].stats().read.since(self._read).mb_per_s,
            "data/wait_ms": 1e3 * self._epoch.wait_s / max(self._epoch.steps - 1, 1),
            "data/epoch_gap_ms": 1e3 * self._epoch.gap_s,
            "data/queue_fill": self._fills / self._epoch.steps,
        }
        for name, value in means.items():
            # A float32 tensor, since a device may know no other; batch_size only to keep Lightning from guessing it.
            # On the module's device: several GPUs reduce it there, and nowhere else.
            mean = torch.tensor(value, dtype=torch.float32, device=pl_module.device)
            # Not to the logger, which has the steps under these names already.
            pl_module.log(name, mean, logger=False, batch_size=1, sync_dist=trainer.world_size > 1)
        pl.utilities.rank_zero_info(f"epoch {trainer.current_epoch}: training waited {self._epoch}")

    # Evaluation: the same without a summary, and only for the loader whose turn it is.
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,
    ) -> None:
        """Start the next copy."""
        self._top_up(dataloader_idx)

    def on_test_batch_start(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,
    ) -> None:
        """Start the next copy."""
        self._top_up(dataloader_idx)

    def on_predict_batch_start(
        self,
        trainer: pl.Trainer,  # noqa: ARG002
        pl_module: pl.LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,
    ) -> None:
        """Start the next copy."""
        self._top_up(dataloader_idx)


def _leaves(loaders: Any) -> list[Any]:
    """The loaders in whatever lists and mappings Lightning lets people nest them in."""
    if isinstance(loaders, dict):
        return [leaf for value in loaders.values() for leaf in _leaves(value)]
    if isinstance(loaders, list | tuple):
        return [leaf for value in loaders for leaf in _leaves(value)]
    return [] if loaders is None else [loaders]
