"""`normalizing`: makes a `Normalize` of the statistics of the training source, the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.batch.transforms import Normalize
from lit_async_data.engine.loader.statistics import chosen_fields, found_together
from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.source import Source


def check_statistics(statistics: Any, train: Sequence[Source], device_transform: Any) -> None:
    """Make sure that there is something to normalise by, and no transform in its place."""
    if statistics not in ("train", None):
        raise ConfigError(
            f"statistics: {statistics!r} is not train, the only stage to normalise by", option="statistics"
        )
    if statistics and not train:
        raise ConfigError("statistics: there is no source for training (train, or source)", option="statistics")
    if statistics and not isinstance(device_transform, Normalize | None):
        raise ConfigError(
            "statistics: it makes a Normalize, and device_transform is another transform; leave one out, or put "
            "Normalize.of(lit_async_data.statistics(source)) into yours",
            option="statistics",
        )


def normalizing(
    source: Source, spec: BatchSpec, given: Any, cache_dir: str | os.PathLike[str] | None, *, trained: bool
) -> Normalize:
    """A `Normalize` of the fields that the given one names, or of the first; ``trained`` if all ranks call this."""
    fields = (given and given.fields) or (next(iter(source.spec)) if source.spec.as_mapping else 0,)
    for name in chosen_fields(source.spec, fields).values():
        if name in spec and spec[name].dtype != source.spec[name].dtype:
            raise ConfigError(
                f"statistics: {name!r} is stored as {source.spec[name].dtype}, but a host transform makes "
                f"{spec[name].dtype} of it, of other mean and std; convert it in device_transform, without statistics",
                option="statistics",
            )
    ranks: dict[str, Any] = {}
    if trained and torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = {"rank": torch.distributed.get_rank(), "ranks": torch.distributed.get_world_size(), "gather": _gathered}
    found = found_together(source, fields, cache_dir=cache_dir, **ranks)
    return Normalize.of(found, fields, dtype="float32" if given is None else given.dtype)


def _gathered(mine: Any) -> list[Any]:
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return every
