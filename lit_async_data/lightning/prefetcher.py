"""`DevicePrefetcher`: starts the next copy while the Trainer computes, and measures how long it waited."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch

from lit_async_data.device import streams
from lit_async_data.errors import TransferError
from lit_async_data.host.stats import DeviceWait, LoaderStats
from lit_async_data.lightning.batch_hooks import transfer_of
from lit_async_data.lightning.compat import pl, rank_zero_info, rank_zero_warn
from lit_async_data.lightning.progress import QueueGauge
from lit_async_data.lightning.resume import check_position
from lit_async_data.lightning.stages import Driven, loaders_in
from lit_async_data.lightning.takeover import Takeover
from lit_async_data.lightning.waiting import WaitSummary
from lit_async_data.loader import AsyncLoader
from lit_async_data.options import non_negative_int

log = logging.getLogger(__name__)


class DevicePrefetcher(pl.Callback):
    """Prefetches for every loader that the Trainer iterates over, in fit, validate, test and predict.

    An `AsyncLoader` it drives; a DataLoader of torch, whoever's, is read as `prefetched` does, once Lightning has given
    it the sampler of this rank. Neither the LightningModule nor the DataModule has to change. Other iterables are left
    as they are: `prefetched` takes them.

    At ``on_train_batch_start``, when the step's kernels are about to be launched, it starts the copy of the next batch
    on the loader's side stream; what could not be started then, because the readers were not done, it tries again
    before the backward pass and at the end of the batch. It waits for no reader and no copy. The first batches of
    validation are read into host memory while training goes on.

    Where the LightningModule or DataModule has a ``transfer_batch_to_device`` or ``on_before_batch_transfer`` of its
    own, batches are prefetched into host memory only, since that hook is to see them there.

    It logs every ``log_every_n_steps``, and puts the means over each epoch into ``trainer.callback_metrics``:

    * ``data/wait_ms``: milliseconds that the loop waited for a batch, the first of each epoch left out of the mean;
    * ``data/device_wait_ms``: milliseconds in which the device had nothing to do but wait for a batch, measured on the
      device, and so known a step or two late; the first of each epoch left out of the mean. Where the device has no
      streams, it waits whenever the loop does;
    * ``data/queue_fill``: batches that were ready when it asked;
    * ``data/epoch_gap_ms``: milliseconds that it waited for the first batch of the epoch;
    * ``data/read_mb_s``: 10⁶ bytes read per second of reading; a step's is over all that the loader has read.

    After each epoch it says on rank 0 how long training waited. In fit the progress bar shows ``host 4/4 device 2/2``:
    batches that are ready, of how many there can be.

    Args:
        device_depth: Batches copied ahead of the one in use, set on every loader it takes over. 0 reads and copies
            nothing ahead but measures all the same, which is the honest "before" of a comparison.
        verify_copies: If above 0, set on every loader, too: see `AsyncLoader`.

    Raises:
        ConfigError: One of them is not a whole number ≥ 0.

    Example:
        >>> callback = DevicePrefetcher(device_depth=2)
        >>> callback.waited.share
        0.0
    """

    def __init__(self, device_depth: int = 2, verify_copies: int = 0) -> None:
        self.device_depth = non_negative_int("device_depth", device_depth)
        self.verify_copies = non_negative_int("verify_copies", verify_copies)
        #: How long training waited, over all that was trained with this callback.
        self.waited = WaitSummary()
        self._epoch = WaitSummary()
        self._active: list[Driven] = []
        self._adopted: weakref.WeakSet[Driven] = weakref.WeakSet()
        self._started = 0.0
        self._fills = 0
        self._before: list[LoaderStats] = []
        self._logged = -1
        self._gauge, self._takeover = QueueGauge(), Takeover()
        # Whether validation is yet to be read ahead of; whether it has been said who copies batches.
        self._due = self._said = False

    def __repr__(self) -> str:
        return f"DevicePrefetcher(device_depth={self.device_depth}, verify_copies={self.verify_copies})"

    def __getstate__(self) -> dict[str, Any]:
        # For strategies that spawn: loaders stay in the process that built them.
        own = ("_active", "_adopted", "_gauge", "_takeover")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _active=[], _adopted=weakref.WeakSet(), _gauge=QueueGauge(), _takeover=Takeover())

    # -- loaders ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wrap the DataLoaders to come, and have the progress bar show how full the queues are."""
        self._takeover.attach(trainer, self.device_depth, self.verify_copies)
        if stage == "fit":
            self._gauge.attach(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the training loaders; a run that resumes in mid-epoch has no other hook before its first batch."""
        self._begin(trainer)
        if not self._active:
            rank_zero_warn(
                "DevicePrefetcher prefetches and measures AsyncLoaders and torch's DataLoaders, and training uses "
                "neither: give the Trainer prefetched(loader)"
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the training loaders, which may have been rebuilt since the last epoch."""
        self._begin(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the validation loaders."""
        self._adopt(trainer, trainer.val_dataloaders)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go back to training, if that is where validation was called from."""
        self._adopt(trainer, trainer.train_dataloader)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the test loaders."""
        self._adopt(trainer, trainer.test_dataloaders)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over the prediction loaders."""
        self._adopt(trainer, trainer.predict_dataloaders)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the loaders to themselves, and close what was wrapped."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same; Lightning calls `teardown` only where nothing went wrong."""
        try:
            self._release(failed=True)
        except TransferError as error:  # raised here, it would keep checkpoints from being written
            log.error("%s", error)  # noqa: TRY400  # where it was found says nothing

    def _release(self, *, failed: bool = False) -> None:
        self._gauge.detach()
        for loader in self._adopted:
            loader.externally_driven = False
        self._active = []
        self._takeover.detach(failed=failed)

    def _begin(self, trainer: pl.Trainer) -> None:
        self._adopt(trainer, trainer.train_dataloader)
        self._epoch, self._fills, self._due = WaitSummary(), 0, True
        self._before = [loader.stats() for loader in self._active]

    def _adopt(self, trainer: pl.Trainer, loaders: Any) -> None:
        self._active = loaders_in(loaders)
        for loader in self._active:
            self._take_over(trainer, loader)

    def _take_over(self, trainer: pl.Trainer, loader: Driven) -> None:
        # Before the first batch: each of these drops what was read ahead, unless it changes nothing.
        loader.device_depth = self.device_depth
        if self.verify_copies:
            loader.verify_copies = self.verify_copies
        on_device = streams.has_streams(loader.device) or streams.has_streams(trainer.strategy.root_device)
        if on_device and (hook := transfer_of(trainer)) is not None:
            if not self._said:
                rank_zero_info(
                    f"{hook} is yours: batches are prefetched into host memory only, where device_transform runs too, "
                    "and come to the device by your hook"
                )
            self._said = True
            loader.device = "cpu"
        loader.externally_driven = True
        self._adopted.add(loader)

    def _read_ahead(self, trainer: pl.Trainer, loaders: list[Driven]) -> None:
        for loader in loaders[:1]:
            self._take_over(trainer, loader)
            loader.read_ahead()

    def _top_up(self) -> None:
        for loader in self._active:
            loader.prefetch()

    # -- batches ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the next copy, so that it runs beside this step; and, once, to read what validation begins with."""
        if self._due and any(isinstance(loader, AsyncLoader) for loader in self._active):
            # A loader that no AsyncDataModule has built does not know of the Trainer; no step has been made yet.
            check_position(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)
        self._started = time.perf_counter()
        self._top_up()
        if self._due:
            self._due = False
            self._read_ahead(trainer, loaders_in(trainer.val_dataloaders))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """Try again what the readers were not ready for."""
        self._top_up()

    def on_train_batch_end(
        self,
        trainer: Any,  # a Trainer, whose log_every_n_steps no type checker sees
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Try once more, and write down how long this step waited."""
        self._top_up()
        stats = [loader.stats() for loader in self._active]
        if not stats:
            return
        waited, busy = sum(s.last_wait_s for s in stats), time.perf_counter() - self._started
        first = batch_idx == 0
        self._epoch += WaitSummary(1, 0.0 if first else waited, waited if first else 0.0, busy)
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
        stats = [loader.stats() for loader in self._active]
        device = _device_wait(self._before, stats)
        if device is not None:
            self._epoch += WaitSummary(device_s=device.wait_s + device.gap_s)
        self.waited += self._epoch
        if not stats or not self._epoch.steps:
            return
        wait_ms = 1e3 * self._epoch.wait_s / max(self._epoch.steps - 1, 1)
        means = {
            "data/read_mb_s": stats[0].read.since(self._before[0].read).mb_per_s,
            "data/wait_ms": wait_ms,
            "data/device_wait_ms": wait_ms if device is None else 1e3 * device.wait_s / max(device.batches, 1),
            "data/epoch_gap_ms": 1e3 * self._epoch.gap_s,
            "data/queue_fill": self._fills / self._epoch.steps,
        }
        for name, value in means.items():
            # A float32 tensor, since a device may know no other; batch_size only to keep Lightning from guessing it.
            # On the module's device: several GPUs reduce it there, and nowhere else.
            mean = torch.tensor(value, dtype=torch.float32, device=pl_module.device)
            # Not to the logger, which has the steps under these names already.
            pl_module.log(name, mean, logger=False, batch_size=1, sync_dist=trainer.world_size > 1)
        rank_zero_info(f"epoch {trainer.current_epoch}: training waited {self._epoch}")

    # Evaluation: the same without a summary, and only for loaders whose turn has come.
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start the next copy, and, with the first batch, to read for the next loader."""
        self._evaluates(trainer, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The same."""
        self._evaluates(trainer, batch_idx, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The same."""
        self._evaluates(trainer, batch_idx, dataloader_idx)

    def _evaluates(self, trainer: pl.Trainer, batch_idx: int, number: int) -> None:
        for loader in self._active:
            if loader.started:  # one after the other, or, in a CombinedLoader of another mode, all of them
                loader.prefetch()
        if batch_idx == 0:
            self._read_ahead(trainer, self._active[number + 1 :])


def _device_wait(before: list[LoaderStats], now: list[LoaderStats]) -> DeviceWait | None:
    """What the device waited between two looks at the loaders of training, for a batch of each; None if unknown."""
    found = [
        after.device.since(DeviceWait() if earlier.device is None else earlier.device)
        for earlier, after in zip(before, now, strict=False)
        if after.device is not None
    ]
    if not found:
        return None
    return DeviceWait(found[0].batches, sum(each.wait_s for each in found), sum(each.gap_s for each in found))
