"""The loaders of Lightning's loops, the priority of their iterators, and how many batches a Trainer takes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.loader.base_loader import BaseLoader, Pass
from lit_async_data.engine.prefetch.loader import PrefetchedLoader
from lit_async_data.errors import AsyncDataError
from lit_async_data.lightning import counters
from lit_async_data.lightning.compat import pl

# Loaders whose copies a callback can start.
DrivenLoader = AsyncLoader | PrefetchedLoader
USERS, EVALUATION, TRAINING = 0, 1, 2


def loaders_in(nested: Any) -> list[Any]:
    """The loaders in the lists and mappings that Lightning accepts as a loader, in its order."""
    if isinstance(nested, Mapping | list | tuple):
        inside = nested.values() if isinstance(nested, Mapping) else nested
        return [loader for each in inside for loader in loaders_in(each)]
    return [nested]


def driven_loaders(nested: Any) -> list[DrivenLoader]:
    return [loader for loader in loaders_in(nested) if isinstance(loader, AsyncLoader | PrefetchedLoader)]


def is_only(nested: Any) -> bool:
    return len(loaders_in(nested)) == 1


def drive(loader: BaseLoader, reference: weakref.ref[pl.Trainer]) -> None:
    """Make a loader give its engine to the Trainer's own iterators rather than to other iterators of the user."""
    itself = weakref.ref(loader)
    loader._wiring.priority = lambda one: _priority(reference(), itself(), one)


def _priority(trainer: pl.Trainer | None, loader: BaseLoader | None, one: Pass) -> int | None:
    """The priority of a pass for the engine; None if no loop of the Trainer iterates over the loader itself."""
    if trainer is None or loader is None or trainer.state.status != "running":
        return None
    found = None
    for loop, trains in counters.loops_that_run(trainer):
        if any(each is loader for each in counters.loaders_of(loop)):
            found = USERS
            if any(each is one for each in counters.iterators_of(loop)):
                return TRAINING if trains else EVALUATION
    return found


def steps_wanted(reference: weakref.ref[pl.Trainer], stage: str, number: int) -> tuple[int | None, int | None]:
    """The batches that the Trainer will take of an evaluation pass, and of each later pass; None for all.

    The Trainer knows them only when the pass begins. `number` is the index of the loader in its stage.
    """
    trainer = reference()
    if trainer is None or trainer.state.status != "running":
        return None, None
    with contextlib.suppress(IndexError):  # the user iterates while the Trainer runs other loaders
        later = _finite(getattr(trainer, f"num_{stage}_batches")[number])
        return _finite(trainer.num_sanity_val_batches[number]) if trainer.sanity_checking else later, later
    return None, None


def on_rank_zero(trainer: pl.Trainer, work: Callable[[], Any], what: str) -> Any:
    """Does the work on rank 0 and returns the result on every rank. If the work fails, all ranks raise an error."""
    found = failed = None
    try:
        found = work() if trainer.is_global_zero else None
    except Exception as error:  # noqa: BLE001  # raised below, after the other ranks know of it
        failed = error
    found, heard = trainer.strategy.broadcast((found, failed and f"{type(failed).__name__}: {failed}"))
    if failed is not None:
        raise failed
    if heard is not None:
        raise AsyncDataError(f"{what}: rank 0 failed: {heard}")
    return found


def _finite(limit: float) -> int | None:
    return int(limit) if 0 < limit < math.inf else None
