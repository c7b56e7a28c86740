"""Which loaders and iterators are those of Lightning's loops: the one place that looks for them there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from lit_async_data.lightning.trainer.compat import pl
from lit_async_data.lightning.trainer.stages import DrivenLoader, driven_loaders
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.loader.base_loader import BaseLoader
from lit_async_data.loader.passes import Pass

USERS, EVALUATION, TRAINING = 0, 1, 2


def drive(loader: BaseLoader, reference: weakref.ref[pl.Trainer]) -> None:
    """Have a loader give its engine to the Trainer's own iterators, whoever else iterates over it meanwhile."""
    itself = weakref.ref(loader)
    loader.priority = lambda one: _priority(reference(), itself(), one)


def evaluate(trainer: pl.Trainer) -> None:
    """Have loaders that were given to the Trainer for evaluation take no random order, before it looks at them."""
    given = {priority: _given(loop) for priority, loop in _loops(trainer)}
    for loader in given[EVALUATION]:
        if isinstance(loader, AsyncLoader) and loader not in given.get(TRAINING, []):
            loader.evaluation = True


def _given(loop: Any) -> list[DrivenLoader]:
    source = getattr(loop, "_data_source", None)  # private: a later version may lack it
    return driven_loaders(getattr(source, "instance", None))


def _priority(trainer: pl.Trainer | None, loader: BaseLoader | None, one: Pass) -> int | None:
    """How much a pass needs the engine; None if no loop of the Trainer iterates over the loader itself."""
    if trainer is None or loader is None or trainer.state.status != "running":
        return None
    found = None
    for priority, loop in _loops(trainer):
        combined = getattr(loop, "_combined_loader", None)  # private: a later version may lack it
        if combined is None or not any(each is loader for each in combined.flattened):
            continue
        found = USERS
        running = getattr(combined, "_iterator", None)
        if any(each is one for each in getattr(running, "iterators", ())):
            return priority
    return found


def _loops(trainer: Any) -> Iterator[tuple[int, Any]]:
    """The loops of a run, with the priority of their iterators."""
    if trainer.state.fn == "fit":
        yield TRAINING, trainer.fit_loop
        yield EVALUATION, trainer.fit_loop.epoch_loop.val_loop
    else:
        yield (
            EVALUATION,
            {"validate": trainer.validate_loop, "test": trainer.test_loop}.get(trainer.state.fn, trainer.predict_loop),
        )
