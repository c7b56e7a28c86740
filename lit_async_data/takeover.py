"""`Takeover`: the DataLoaders that a Trainer is about to iterate over, each wrapped as `prefetched` does.

Lightning gives every loader to ``strategy.process_dataloader``, in all stages, once it has given it a sampler for this
rank. That method is the one place at which anybody's loader can be wrapped without a change to their code,
and without all ranks reading the same.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader

from lit_async_data.lightning import pl
from lit_async_data.prefetched_loader import PrefetchedLoader
from lit_async_data.wrap import prefetched


class Takeover:
    """Wraps DataLoaders for one Trainer at a time, and closes what it has wrapped."""

    def __init__(self) -> None:
        self._strategy: Any = None
        self._processed: Any = None
        self._before: Any = None
        self._wrapped: weakref.WeakSet[PrefetchedLoader] = weakref.WeakSet()

    def attach(self, trainer: pl.Trainer, device_depth: int) -> None:
        """Wrap every DataLoader that the Trainer will iterate over from now on."""
        self.detach()
        strategy: Any = trainer.strategy
        before = strategy.process_dataloader

        def processed(loader: Any) -> Any:
            return self._taken(before(loader), device_depth, strategy)

        self._strategy, self._processed, self._before = strategy, processed, before
        strategy.process_dataloader = processed

    def detach(self) -> None:
        """Leave the strategy as it was, unless somebody else has composed it since; and close. Twice is fine."""
        strategy, processed, before = self._strategy, self._processed, self._before
        self._strategy = self._processed = self._before = None
        if strategy is not None and vars(strategy).get("process_dataloader") is processed:
            del strategy.process_dataloader
            if strategy.process_dataloader != before:
                strategy.process_dataloader = before
        for loader in list(self._wrapped):
            loader.close()

    def _taken(self, loader: Any, device_depth: int, strategy: Any) -> Any:
        if isinstance(loader, PrefetchedLoader) and loader.by_trainer:
            loader = loader.loader  # of an earlier fit, and closed: whoever gave Lightning a CombinedLoader keeps it
        if not isinstance(loader, DataLoader):
            return loader
        wrapped = prefetched(loader, device_depth, strategy.root_device)
        wrapped.by_trainer = True
        self._wrapped.add(wrapped)
        return wrapped
