"""`replay`: makes the batches of a training step again, from the order alone."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.sources.contract.places import Location

log = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """A batch of training, made again.

    Attributes:
        epoch: Its epoch, counted from 0.
        batch_idx: Its number in the epoch, as ``training_step`` gets it.
        batch: What the loader hands out: every transform is applied, with the same random numbers.
        ids: The samples, int64, shape (n,); as in ``return_indices``.
        places: Where each of them is stored.
    """

    epoch: int
    batch_idx: int
    batch: Any
    ids: npt.NDArray[np.int64]
    places: list[Location]


def limited(steps: int, limit: float | None) -> int:
    """The batches of an epoch that Lightning takes under ``limit_train_batches``.

    Args:
        steps: Batches of the whole epoch.
        limit: A number of batches, or a share of them; None for all.
    """
    if limit is None:
        return steps
    return min(steps, limit) if isinstance(limit, int) else int(steps * limit)


def replayed(loader: AsyncLoader, step: int, accumulated: int, limit: float | None) -> list[Replayed]:
    """Make the batches of an optimizer step again. Reads only these.

    Args:
        loader: A new loader like that of the run.
        step: The step as loggers write it: counted from 0 over all epochs.
        accumulated: Batches for which the run accumulated gradients.
        limit: ``limit_train_batches`` of the run; None for all.

    Raises:
        ConfigError: A number is out of range.
    """
    for name, value, least in (("step", step, 0), ("accumulate_grad_batches", accumulated, 1)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}: {value!r} is not a whole number from {least} on")
    batches = limited(len(loader), limit)
    if batches < 1:
        raise ConfigError(f"limit_train_batches: {limit} leaves no batch of the {len(loader)} of an epoch")
    epoch, number = divmod(step, -(-batches // accumulated))
    first = number * accumulated
    plan, source = loader.schedule.plan(epoch), loader.source
    loader.resuming.print_line = log.debug
    loader.load_state_dict(loader.state_dict() | {"epoch": epoch, "position": plan.position(first)})
    loader.set_epoch(epoch)
    found = []
    for batch_idx in range(first, min(first + accumulated, batches)):
        ids = source.ids(plan.batch(batch_idx).samples)
        found.append(Replayed(epoch, batch_idx, next(loader), ids, source.locate(ids)))
    return found
