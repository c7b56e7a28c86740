"""`Takeover`: the DataLoaders that a Trainer is about to iterate over, each wrapped as `prefetched` does.

Lightning gives every loader to ``strategy.process_dataloader``, in all stages, once it has given it a sampler for this
rank. That method is the one place at which anybody's loader can be wrapped without a change to their code,
and without all ranks reading the same.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_async_data.lightning.batch_hooks import transfer_of
from lit_async_data.lightning.compat import pl
from lit_async_data.prefetch.loader import PrefetchedLoader, StatefulPrefetchedLoader
from lit_async_data.prefetch.wrap import prefetched


class Takeover:
    """Wraps DataLoaders for one Trainer at a time, and ends what it has wrapped."""

    def __init__(self) -> None:
        self._strategy: Any = None
        self._processed: Any = None
        self._before: Any = None
        self._serving: weakref.WeakSet[PrefetchedLoader] = weakref.WeakSet()  # those of the Trainer's run

    def attach(self, trainer: pl.Trainer, device_depth: int, verify_copies: int = 0) -> None:
        """Wrap every DataLoader that the Trainer will iterate over from now on."""
        self.detach()
        strategy: Any = trainer.strategy
        before = strategy.process_dataloader

        def processed(loader: Any) -> Any:
            made = before(loader)
            # Somebody who has composed the method after us may keep ours for longer than we serve.
            return self._taken(made, trainer, device_depth, verify_copies) if self._processed is processed else made

        self._strategy, self._processed, self._before = strategy, processed, before
        strategy.process_dataloader = processed

    def detach(self, *, failed: bool = False) -> None:
        """Leave the strategy as it was, unless somebody else has composed it since; end what serves. Twice is fine.

        Args:
            failed: There was an error, and a checkpoint may still be written: loaders that have a state keep it.

        Raises:
            TransferError: As `PrefetchedLoader.stop`; all are ended all the same.
        """
        strategy, processed, before = self._strategy, self._processed, self._before
        self._strategy = self._processed = self._before = None
        if strategy is not None and vars(strategy).get("process_dataloader") is processed:
            del strategy.process_dataloader
            if strategy.process_dataloader != before:
                strategy.process_dataloader = before
        with contextlib.ExitStack() as ending:
            for loader in list(self._serving):
                if not (failed and isinstance(loader, StatefulPrefetchedLoader)):
                    ending.callback(_end_workers, loader.loader)
                ending.callback(loader.stop)  # first
        self._serving.clear()

    def _taken(self, loader: Any, trainer: pl.Trainer, device_depth: int, verify_copies: int) -> Any:
        if isinstance(loader, PrefetchedLoader) and loader.sharded_by_trainer:
            loader = loader.loader  # of an earlier fit: whoever gave Lightning a CombinedLoader keeps it
        if not isinstance(loader, DataLoader):
            return loader
        _warn(trainer, loader)
        # At once, and not when training begins: of a loader without length Lightning takes a batch before.
        device = torch.device("cpu") if transfer_of(trainer) is not None else trainer.strategy.root_device
        wrapped = prefetched(loader, device_depth, device)
        wrapped.sharded_by_trainer = True
        wrapped.verify_copies = verify_copies
        self._serving.add(wrapped)
        return wrapped


def _warn(trainer: pl.Trainer, loader: DataLoader[Any]) -> None:
    """Say what Lightning says of a DataLoader with few workers; it does so of what it gets back, if that is one."""
    connector = importlib.import_module(f"{pl.__name__}.trainer.connectors.data_connector")
    check = getattr(connector, "_worker_check", None)  # private, so it may be gone one day, and the warnings with it
    if check is not None and trainer.state.stage is not None:
        check(trainer, loader, f"{trainer.state.stage.dataloader_prefix}_dataloader")


def _end_workers(loader: Any) -> None:
    """End the workers that a DataLoader keeps for its next pass, as Lightning does where it knows the loader."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # noqa: SLF001  # it has no other name, and Lightning uses this one
        loader._iterator = None  # noqa: SLF001
