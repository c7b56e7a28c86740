"""`DevicePrefetcher`: starts the next copy while the Trainer computes, and measures how long training waited.

`Takeover` wraps the DataLoaders of a Trainer, as `prefetched` does. Lightning passes every loader of every stage to
``strategy.process_dataloader``, after it has given the loader the sampler of this rank. Wrapped earlier, a loader would
give all ranks the same samples, unless the user changed the code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_async_data.engine.device import streams
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.prefetch.loader import (
    PrefetchedLoader,
    StatefulPrefetchedLoader,
    prefetched,
    with_own_iterator,
)
from lit_async_data.engine.stats import Wait
from lit_async_data.lightning import loops, resume
from lit_async_data.lightning.display import EpochWaits, Verdicts, print_line, quiet, with_fill
from lit_async_data.lightning.loops import DrivenLoader, Replacement, drive, driven_loaders, is_only, is_overridden, pl
from lit_async_data.options import explains_names, whole

# Lightning's batch hooks that need the batch in host memory, in the order in which Lightning calls them.
HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


def overridden(trainer: pl.Trainer, hooks: Sequence[str]) -> list[str]:
    """Those of the hooks that the user overrides, as ``"Model.transfer_batch_to_device"``."""
    owners = [each for each in (getattr(trainer, "datamodule", None), trainer.lightning_module) if each is not None]
    return [f"{type(owner).__name__}.{hook}" for hook in hooks for owner in owners if is_overridden(hook, owner)]


class Takeover:
    """Wraps the DataLoaders of one Trainer at a time, and stops the wrappers when the run ends."""

    def __init__(self) -> None:
        self._attached = contextlib.ExitStack()
        self._wrappers: weakref.WeakSet[PrefetchedLoader] = weakref.WeakSet()

    def attach(self, trainer: pl.Trainer, device_depth: int | None) -> None:
        def wrapped(original: Callable[[Any], Any], loader: Any) -> Any:
            return self.wrap(original(loader), trainer, device_depth)

        self.detach()
        self._attached.callback(Replacement(trainer.strategy, "process_dataloader", wrapped).undo)

    def detach(self, *, failed: bool = False) -> None:
        """After an error, ``failed``, Lightning may still write a checkpoint, so loaders with a state keep it."""
        self._attached.close()
        with contextlib.ExitStack() as stack:
            for loader in list(self._wrappers):
                if not (failed and isinstance(loader, StatefulPrefetchedLoader)):
                    stack.callback(_end_workers, loader.loader)
                stack.callback(loader.stop)  # runs before the callback above
        self._wrappers.clear()

    def wrap(self, loader: Any, trainer: pl.Trainer, device_depth: int | None) -> Any:
        if isinstance(loader, PrefetchedLoader) and loader.sharded_by_trainer:
            loader = loader.loader  # wrapped in an earlier fit, and kept by the user's CombinedLoader
        resume.keep_seed(trainer, loader)
        if not isinstance(loader, DataLoader):
            return loader
        if any(wrapper.loader is loader for wrapper in self._wrappers):  # wrapped for another stage
            loader = with_own_iterator(loader)
        # Chosen now and not when training begins: Lightning takes a batch earlier from a loader without length.
        device = torch.device("cpu") if overridden(trainer, HOST_HOOKS) else trainer.strategy.root_device
        wrapper = prefetched(loader, 2 if device_depth is None else device_depth, device)
        wrapper.sharded_by_trainer = True
        drive(wrapper, weakref.ref(trainer))
        self._wrappers.add(wrapper)
        return wrapper


def _end_workers(loader: Any) -> None:
    """End persistent workers, as Lightning does for its own loaders."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # noqa: SLF001  # torch has no public method, and Lightning uses this one
        loader._iterator = None  # noqa: SLF001


@explains_names({"device_transform": "give it to AsyncDataModule or AsyncLoader"})
class DevicePrefetcher(pl.Callback):
    """Prefetches for every loader that the Trainer iterates over, in fit, validate, test and predict.

    It starts the copy of the next batch of an `AsyncLoader` or `PrefetchedLoader` when a step begins, and never waits
    for a reader or a copy. It wraps every ``DataLoader`` of torch as `prefetched` does; wrap other iterables yourself.
    While training runs, it reads the first batches of validation into host memory. If the LightningModule or the
    DataModule overrides ``transfer_batch_to_device`` or ``on_before_batch_transfer``, it prefetches into host memory
    only, where that hook must get the batch. Not thread-safe: Lightning calls it from one thread.

    With it, a run may resume with another batch size or number of ranks, training loaders keep places that Lightning
    forgets, and a batch whose step failed comes again (of every loader, if there are several). See
    docs/training/resume.md.

    It logs ``data/wait_ms``, ``data/device_wait_ms``, ``data/queue_fill``, ``data/epoch_gap_ms``, ``data/read_mb_s``
    and ``data/bad_samples`` every ``log_every_n_steps`` steps, and puts their means over each epoch into
    ``trainer.callback_metrics``. After an epoch of training or evaluation, rank 0 logs one sentence: how long the loop
    waited, for what, and which option can help. In fit the progress bar shows ``host 4/4 device 2/2``: ready batches,
    and the most that can be ready. A level above INFO of the logger ``lit_async_data`` turns off both. See
    docs/training/metrics.md.

    Args:
        device_depth: Batches copied ahead of the one in use, for every loader. None: the loader's own number, and 2 for
            each DataLoader. With 0 nothing is read or copied ahead, only measured, as the baseline of a comparison.

    Attributes:
        waited: How long training waited, over all training with this callback: a `Wait`.
        evaluated: How long validation, test and prediction waited, by ``"val"``, ``"test"`` and ``"predict"``.

    Raises:
        ConfigError: An argument is wrong.

    Example:
        >>> callback = DevicePrefetcher()
        >>> callback.waited.share
        0.0
    """

    def __init__(self, device_depth: int | None = None) -> None:
        self.device_depth = None if device_depth is None else whole("device_depth", device_depth, 0)
        self.waited = Wait()
        self._epoch = EpochWaits()
        # The loaders of the current stage, and all whose copies this callback starts.
        self._active: list[DrivenLoader] = []
        self._driven: weakref.WeakSet[DrivenLoader] = weakref.WeakSet()
        self._step_began = self._asked_s = 0.0
        self._logged_step = -1
        self._gauge, self._takeover, self._verdicts = contextlib.ExitStack(), Takeover(), Verdicts()
        self.evaluated: dict[str, Wait] = self._verdicts.evaluated
        self._first_batch_due = self._hook_announced = False
        self._orders: list[Any] = []  # the orders of a checkpoint, until training begins

    def __repr__(self) -> str:
        return f"DevicePrefetcher(device_depth={self.device_depth})"

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn pickle this object; loaders stay in the process that built them.
        own = ("_active", "_driven", "_gauge", "_takeover", "_verdicts", "evaluated")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(DevicePrefetcher()) | state)

    # -- loaders ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Wrap the DataLoaders of this run, and show in the progress bar how full the queues are."""
        self._takeover.attach(trainer, self.device_depth)
        self._gauge.close()
        if own := overridden(trainer, [*HOST_HOOKS, "on_after_batch_transfer"]):
            self._verdicts.hooks = " and ".join(own)
            self._gauge.callback(Replacement(trainer.strategy, "batch_to_device", self._moved).undo)
        if stage == "fit" and trainer.progress_bar_callback is not None and not quiet():
            self._gauge.callback(Replacement(trainer.progress_bar_callback, "get_metrics", with_fill).undo)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        resume.reopen_epoch(checkpoint)
        self._orders = checkpoint.get(resume.ORDERS, [])

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        resume.save_orders(trainer, driven_loaders(trainer.train_dataloader), checkpoint)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drive the training loaders; a run that resumes in mid-epoch calls no other hook before its first batch."""
        self._activate(trainer, trainer.val_dataloaders, evaluated=True)  # which refuses some, before a step is lost
        self._begin_epoch(trainer)
        resume.restore_loaders(trainer)
        loops.begin_whole_epoch(trainer)
        resume.restore_orders(trainer, self._active, self._orders)
        self._orders = []
        for loader in self._counted(trainer):
            resume.count_again(trainer, loader)
        overfit: Any = trainer  # no type checker sees its overfit_batches
        shuffled = any(isinstance(each, AsyncLoader) and each.order.decks.shuffle != "none" for each in self._active)
        if overfit.overfit_batches > 0 and shuffled:
            why = "since the options of an AsyncLoader ask for a shuffle or weights; leave them out"
            print_line(f"overfit_batches takes other batches in each epoch, {why}", logging.WARNING)
        if not self._active:
            cure = "so nothing is prefetched or measured; give the Trainer prefetched(loader)"
            print_line(
                f"DevicePrefetcher: training uses neither an AsyncLoader nor a DataLoader, {cure}", logging.WARNING
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drive the training loaders, which Lightning may have rebuilt since the last epoch."""
        resume.follow_passes(trainer, self._active)
        self._begin_epoch(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        stage = loops.evaluated(trainer)
        self._activate(trainer, getattr(trainer, f"{stage}_dataloaders"), evaluated=True)
        self._verdicts.begin(stage, self._active)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_bad_samples(pl_module, f"{loops.evaluated(trainer)}/bad_samples")

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log how long validation waited, and return to the training loaders if validation ran inside training."""
        self._epoch.pause()
        print_line(self._verdicts.end(trainer, "val"))
        self._activate(trainer, trainer.train_dataloader)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print_line(self._verdicts.end(trainer, loops.evaluated(trainer)))

    on_predict_end = on_test_end

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the loaders start their own copies again, and stop the wrappers."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As `teardown`, which Lightning does not call after an error."""
        self._release(failed=True)

    def _release(self, *, failed: bool = False) -> None:
        self._gauge.close()
        for loader in self._driven:
            loader._wiring.externally_driven = False
        self._tell_bad_samples()
        self._active = []
        self._verdicts.release()
        self._takeover.detach(failed=failed)

    def _begin_epoch(self, trainer: pl.Trainer) -> None:
        self._activate(trainer, trainer.train_dataloader)
        reference = weakref.ref(trainer)
        for loader in self._active:
            if isinstance(loader, AsyncLoader):
                loader._wiring.resuming.print_line = print_line
                loader._wiring.steps_wanted = functools.partial(resume.training_steps, reference, weakref.ref(loader))
            else:
                loader.counted = functools.partial(resume.trained, reference)
        self._epoch, self._first_batch_due = EpochWaits([loader.stats() for loader in self._active]), True
        self._verdicts.begin("train", self._active)

    def _counted(self, trainer: pl.Trainer) -> list[AsyncLoader]:
        """The `AsyncLoader` whose batches the Trainer counts; none if training uses several loaders."""
        return [each for each in self._active if isinstance(each, AsyncLoader) and is_only(trainer.train_dataloader)]

    def _activate(self, trainer: pl.Trainer, loaders: Any, *, evaluated: bool = False) -> None:
        self._active = driven_loaders(loaders)
        for loader in self._active:
            if evaluated and isinstance(loader, AsyncLoader):
                loader._check_evaluation(predicts=trainer.predicting)
            self._drive(trainer, loader)
        if around := self._read_around():
            folder = trainer.log_dir or trainer.default_root_dir  # needs every rank: Lightning broadcasts it
            path = os.path.join(folder, f"quarantine-{trainer.global_rank}.jsonl")
            for quarantine in [each._wiring.quarantine for each in around]:
                quarantine.path = quarantine.path or path

    def _read_around(self) -> list[AsyncLoader]:
        return [each for each in self._active if isinstance(each, AsyncLoader) and each.options.on_error != "raise"]

    def _log_bad_samples(self, pl_module: pl.LightningModule, name: str) -> None:
        if around := self._read_around():
            count = float(sum(each._wiring.quarantine.count for each in around))
            pl_module.log(name, count, reduce_fx="sum", sync_dist=True, batch_size=1)
            self._tell_bad_samples()

    def _tell_bad_samples(self) -> None:
        """Report bad samples now: a loader reports them with the next batch, but the Trainer's pass is over."""
        for loader in self._read_around():
            loader._wiring.quarantine.tell()

    def _drive(self, trainer: pl.Trainer, loader: DrivenLoader) -> None:
        # Set before the first batch: a change of any of these drops the batches read ahead.
        if self.device_depth is not None:
            loader.device_depth = self.device_depth
        on_device = streams.has_streams(loader.device) or streams.has_streams(trainer.strategy.root_device)
        if on_device and (own := overridden(trainer, HOST_HOOKS)):
            if not self._hook_announced:
                what = f"{own[0]} is your own hook: DevicePrefetcher prefetches into host memory only, "
                print_line(f"{what}device_transform runs there too, and your hook moves batches to the device")
            self._hook_announced = True
            loader.device = "cpu"
        drive(loader, weakref.ref(trainer))
        loader._wiring.externally_driven = True
        self._driven.add(loader)

    def _moved(self, batch_to_device: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Move a batch, and count the time of the user's hooks since the loader handed it out."""
        moved = batch_to_device(*given, **named)
        last = max((each._run for each in self._active), key=lambda run: run.asked_s, default=None)
        if last is not None and last.asked_s != self._asked_s:  # else the batch was asked for before the last step
            self._asked_s = last.asked_s
            last.stats.hooks_s += time.perf_counter() - last.asked_s
        return moved

    def _prefetch_next(self, trainer: pl.Trainer, loaders: list[DrivenLoader]) -> None:
        for loader in loaders[:1]:
            self._drive(trainer, loader)
            loader._prefetch(copy=False)

    def _prefetch(self) -> None:
        for loader in self._active:
            loader._prefetch()

    # -- batches ---------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the next copy, to run beside this step. With the first batch, start to read validation ahead."""
        if self._first_batch_due and driven_loaders(trainer.train_dataloader) != self._active:
            self._begin_epoch(trainer)  # Lightning has built the loaders again without calling a hook
            for loader in self._counted(trainer):
                resume.check_begun(trainer, loader)
        self._step_began = time.perf_counter()
        self._prefetch()
        if self._first_batch_due:
            self._first_batch_due = False
            self._prefetch_next(trainer, driven_loaders(trainer.val_dataloaders))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """Start the next copy, if the readers had no batch ready before."""
        self._prefetch()

    def on_train_batch_end(  # Any: no type checker sees log_every_n_steps of a Trainer
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the next copy, if it has not started yet, and record how long this step waited."""
        self._prefetch()
        stats = [loader.stats() for loader in self._active]
        if not stats:
            return
        now = time.perf_counter()
        self._epoch.step(stats, now, now - self._step_began, first=batch_idx == 0)
        step, every = loops.logged_step(trainer), trainer.log_every_n_steps
        if every and (step + 1) % every == 0 and step != self._logged_step:  # once per step of several batches
            self._logged_step = step
            for logger in trainer.loggers:
                logger.log_metrics(stats[0].metrics(), step=step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the means of the epoch, and how long training waited."""
        self._log_bad_samples(pl_module, "data/bad_samples")
        means = self._epoch.end([loader.stats() for loader in self._active])
        self.waited += self._epoch.summary
        if not means:
            return
        # float32, since some devices have no float64; on the module's device, for the reduction over GPUs.
        values = torch.tensor(list(means.values()), dtype=torch.float32, device=pl_module.device)
        if trainer.world_size > 1:
            values = trainer.strategy.reduce(values, reduce_op="mean")
        metrics = dict(zip(means, values.unbind(), strict=True))
        # As Lightning's LearningRateMonitor does: `log` would take milliseconds for each name while training waits, and
        # loggers already have the values of steps under these names.
        trainer.callback_metrics.update(metrics)
        who = "training" if self._epoch.summary.device_s is None else "the device"
        print_line(self._verdicts.epoch(trainer, pl_module.device, who, self._epoch.summary.total_s))

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start the next copy. With the first batch, start to read the next loader ahead."""
        for loader in self._active:
            if loader._started:  # usually one; all in a CombinedLoader that takes from each
                loader._prefetch()
        if batch_idx == 0:
            self._prefetch_next(trainer, self._active[dataloader_idx + 1 :])

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
