"""`Takeover`: wraps the DataLoaders that a Trainer is about to iterate over, as `prefetched` does.

Lightning passes every loader of every stage to ``strategy.process_dataloader``, after it has given the loader the
sampler of this rank. Only there can a user's loader be wrapped without a change to the user's code and without every
rank reading the same samples.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_async_data.engine.prefetch.loader import (
    PrefetchedLoader,
    StatefulPrefetchedLoader,
    prefetched,
    with_own_iterator,
)
from lit_async_data.lightning import counters
from lit_async_data.lightning.compat import Replacement, pl
from lit_async_data.lightning.loops import drive

# Lightning's batch hooks that need the batch in host memory, in the order in which Lightning calls them.
HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


def overridden_host_hook(trainer: pl.Trainer) -> str | None:
    """The user's hook that gets batches in host memory, as ``"Model.transfer_batch_to_device"``; else None."""
    is_overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
    owners: list[Any] = [getattr(trainer, "datamodule", None), trainer.lightning_module]
    overridden = (
        f"{type(owner).__name__}.{hook}"
        for hook in HOST_HOOKS
        for owner in owners
        if owner is not None and is_overridden(hook, owner)
    )
    return next(overridden, None)


class Takeover:
    """Wraps the DataLoaders of one Trainer at a time, and stops the wrappers when the run ends."""

    def __init__(self) -> None:
        self._replacement: Replacement | None = None
        self._wrappers: weakref.WeakSet[PrefetchedLoader] = weakref.WeakSet()

    def attach(self, trainer: pl.Trainer, device_depth: int | None) -> None:
        """Wrap every DataLoader that the Trainer will iterate over from now on."""

        def wrapped(original: Callable[[Any], Any], loader: Any) -> Any:
            return self.wrap(original(loader), trainer, device_depth)

        self.detach()
        self._replacement = Replacement(trainer.strategy, "process_dataloader", wrapped)

    def detach(self, *, failed: bool = False) -> None:
        """Restore the strategy, as by `Replacement.undo`, and stop the wrappers. Idempotent.

        Args:
            failed: After an error Lightning may still write a checkpoint, so loaders with a state keep it.
        """
        if self._replacement is not None:
            self._replacement.undo()
        self._replacement = None
        with contextlib.ExitStack() as stack:
            for loader in list(self._wrappers):
                if not (failed and isinstance(loader, StatefulPrefetchedLoader)):
                    stack.callback(_end_workers, loader.loader)
                stack.callback(loader.stop)  # runs before the callback above
        self._wrappers.clear()

    def wrap(self, loader: Any, trainer: pl.Trainer, device_depth: int | None) -> Any:
        """Wrap a DataLoader; return anything else unchanged."""
        if isinstance(loader, PrefetchedLoader) and loader.sharded_by_trainer:
            loader = loader.loader  # wrapped in an earlier fit, and kept by the user's CombinedLoader
        if not isinstance(loader, DataLoader):
            return loader
        _check_workers(trainer, loader)
        if any(wrapper.loader is loader for wrapper in self._wrappers):  # of another stage
            loader = with_own_iterator(loader)
        # Chosen now and not when training begins: from a loader without length Lightning takes a batch before that.
        device = torch.device("cpu") if overridden_host_hook(trainer) is not None else trainer.strategy.root_device
        wrapper = prefetched(loader, 2 if device_depth is None else device_depth, device)
        wrapper.sharded_by_trainer = True
        drive(wrapper, weakref.ref(trainer))
        self._wrappers.add(wrapper)
        return wrapper


def _check_workers(trainer: pl.Trainer, loader: DataLoader[Any]) -> None:
    """Run Lightning's check of workers, which it skips for a wrapped loader; how many there should be is measured."""
    if loader.num_workers:
        many = copy.copy(loader)
        many.num_workers = max(loader.num_workers, 2)  # of one it says that they are few
        counters.check_workers(trainer, many)


def _end_workers(loader: Any) -> None:
    """End the persistent workers of a DataLoader, as Lightning does for loaders that it knows."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # noqa: SLF001  # torch has no public method, and Lightning uses this one
        loader._iterator = None  # noqa: SLF001
