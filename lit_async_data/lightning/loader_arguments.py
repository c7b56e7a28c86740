"""`LoaderArguments`: what a loader of a stage is built from."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch

from lit_async_data.host.resources.memory import ranks_here
from lit_async_data.lightning.trainer.compat import pl
from lit_async_data.lightning.trainer.priority import drive
from lit_async_data.lightning.trainer.resume import training_steps
from lit_async_data.lightning.trainer.stages import Stage, steps_wanted
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.source import Source


@dataclasses.dataclass(frozen=True)
class LoaderArguments:
    """What a loader is built from. Equal arguments give equal loaders."""

    trainer: weakref.ref[pl.Trainer] | None
    source: Source
    options: LoaderOptions
    rank: int = 0
    world_size: int = 1
    local_world_size: int | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, trainer: pl.Trainer | None, source: Source, options: LoaderOptions) -> Self:
        """The arguments under a Trainer, if there is one."""
        if trainer is None:
            return cls(None, source, options)
        # Where Ray or torchrun starts the ranks, the Trainer may know of one device only.
        here = max(trainer.num_devices, ranks_here())
        ranks = trainer.global_rank, trainer.world_size, here
        return cls(weakref.ref(trainer), source, options, *ranks, trainer.strategy.root_device)

    def loader(self, stage: Stage, number: int, transforms: Mapping[str, Any]) -> AsyncLoader:
        """Build the loader.

        Args:
            stage: The loader's stage.
            number: Its place among those of the stage.
            transforms: The transforms of the stage, by argument of `AsyncLoader`.
        """
        loader = AsyncLoader(
            self.source,
            self.options,
            rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            device=self.device,
            **transforms,
        )
        loader.evaluation = stage != "train"
        if self.trainer is not None:
            drive(loader, self.trainer)
        loader.label = f"{stage}[{number}]" if number else stage
        if self.trainer is not None and stage == "train":
            loader.steps_wanted = functools.partial(training_steps, self.trainer, weakref.ref(loader))
        elif self.trainer is not None:
            loader.steps_wanted = functools.partial(steps_wanted, self.trainer, stage, number)
        return loader
