"""The Lightning package in use, the counters and loaders of its loops, and its private attributes.

``pytorch_lightning`` and ``lightning.pytorch`` are the same code, but the Trainer of one refuses DataModules and
callbacks of the other. This module uses the package that is imported already, or ``pytorch_lightning`` if neither or
both are. No other module uses private attributes of Lightning. Checked with Lightning 2.5.5 and 2.6.6; where a later
version lacks a private attribute, its default here holds.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.loader.base_loader import BaseLoader, Pass
from lit_async_data.engine.prefetch.loader import PrefetchedLoader
from lit_async_data.errors import AsyncDataError

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_only
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    _name = "pytorch_lightning"
    if "lightning.pytorch" in sys.modules and _name not in sys.modules:
        _name = "lightning.pytorch"
    pl = importlib.import_module(_name)
    rank_zero_only = importlib.import_module(f"{_name}.utilities.rank_zero").rank_zero_only
    is_overridden = importlib.import_module(f"{_name}.utilities.model_helpers").is_overridden

__all__ = ["is_overridden", "pl", "rank_zero_only"]


class Replacement:
    """Replaces a method of an object by ``call``, which gets the original method and the arguments.

    A copy or pickle of the object has the original method again.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._original = owner, name, getattr(owner, name)
        self._call: Callable[..., Any] | None = call  # None after `undo`; other code may still call this object
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._call is None:
            return self._original(*arguments, **named)
        return self._call(self._original, *arguments, **named)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()  # a bound method is pickled as its object and its name

    def undo(self) -> None:
        """Restore the object, unless other code has replaced the method since. Idempotent."""
        self._call = None
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
            if getattr(self._owner, self._name) != self._original:
                setattr(self._owner, self._name, self._original)


def batches(trainer: Any) -> Any:  # Any, here and below: annotations of Lightning name another class of counters
    return trainer.fit_loop.epoch_loop.batch_progress.current


def trained(trainer: pl.Trainer) -> int:
    """The batches of this epoch that were trained on; right in every hook, and after an error."""
    return int(batches(trainer).processed)


def epoch(trainer: Any) -> int:
    """The epoch that Lightning names to samplers."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def evaluated(trainer: Any) -> str:
    """The stage of an evaluation loop: val, also in the sanity check, test or predict."""
    return str(trainer.state.stage.dataloader_prefix)


def is_last(trainer: pl.Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def is_over(trainer: pl.Trainer) -> bool:
    """Whether the last batch of the epoch was trained on; after an error it is ready, but not processed."""
    return is_last(trainer) and batches(trainer).processed == batches(trainer).ready


def set_left(trainer: pl.Trainer, left: int, *, is_last: bool) -> None:
    """Make Lightning count ``left`` batches as still to be trained on.

    All counters move by the same number, because their differences say in which hook the checkpoint was written.
    """
    counters = batches(trainer)
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = is_last
    shift = int(trainer.num_training_batches) - left - counters.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(counters, name, getattr(counters, name) + shift)


def reopen_epoch(loops: Mapping[str, Any]) -> None:  # the state of the fit loop in a checkpoint
    """Make a resumed run train the rest of an epoch that the run before has ended in the middle.

    If ``max_steps``, ``max_time`` or ``trainer.should_stop`` ended the epoch, Lightning counts it as done and would
    begin the next. If a limit or the user's -1 ended it, the batch before was its last. A second call does nothing.
    """
    epochs, taken = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    cut = taken["current"]["processed"] and not taken["is_last_batch"]
    if cut and epochs["current"]["processed"] == epochs["current"]["ready"]:
        for counters in (epochs["current"], epochs["total"]):
            counters["completed"] -= counters["completed"] == counters["processed"]
            counters["processed"] -= 1


def begin_whole_epoch(trainer: pl.Trainer) -> None:
    """Make a run that resumes between epochs train the next epoch.

    A checkpoint of ``on_train_epoch_start`` has the counters of the epoch before, and Lightning would take the new
    epoch for done; with ``max_steps`` alone, also from any checkpoint of an epoch's end. Lightning sets the counters to
    0 when its inner loop begins anew.
    """
    loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress
    ended = loop.restarting and is_over(trainer) and epoch(trainer) == epochs.current.ready
    if ended and epochs.current.completed < epochs.current.ready:  # a checkpoint of ``on_train_epoch_end``
        epochs.increment_completed()
        loop.reset_restart_stage()
    if ended or getattr(loop, "restarted_on_epoch_start", False):
        loop.epoch_loop.restarting = False


def logged_step(trainer: Any) -> int:
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)  # noqa: SLF001


def loaded_checkpoint(trainer: Any) -> Mapping[str, Any]:
    """The whole checkpoint; Lightning passes a DataModule only its own part."""
    return getattr(getattr(trainer, "_checkpoint_connector", None), "_loaded_checkpoint", None) or {}


def unread_states(trainer: pl.Trainer) -> Sequence[Any]:
    """The states of the checkpoint's training loaders that Lightning has not passed on."""
    return getattr(trainer.fit_loop, "_combined_loader_states_to_load", ())


def forget_states(trainer: pl.Trainer) -> None:
    """Lightning would keep them for the next run of the same Trainer."""
    getattr(trainer.fit_loop, "_combined_loader_states_to_load", []).clear()


def pass_states_on(trainer: pl.Trainer) -> None:
    getattr(trainer.fit_loop, "_load_combined_loader_states", int)()


def loaders_of(loop: Any) -> Sequence[Any]:
    return getattr(getattr(loop, "_combined_loader", None), "flattened", ())


def iterators_of(loop: Any) -> Sequence[Any]:
    """The iterators of a loop's loaders; empty until they have begun."""
    return getattr(getattr(getattr(loop, "_combined_loader", None), "_iterator", None), "iterators", ())


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


def _priority(trainer: Any, loader: BaseLoader | None, one: Pass) -> int | None:
    """The priority of a pass for the engine; None if no loop of the Trainer iterates over the loader itself."""
    if trainer is None or loader is None or trainer.state.status != "running":
        return None
    loops = {EVALUATION: getattr(trainer, f"{trainer.state.fn.value}_loop")}
    if trainer.state.fn == "fit":
        loops = {TRAINING: trainer.fit_loop, EVALUATION: trainer.fit_loop.epoch_loop.val_loop}
    taking = {priority: loop for priority, loop in loops.items() if any(each is loader for each in loaders_of(loop))}
    passes = [priority for priority, loop in taking.items() if any(each is one for each in iterators_of(loop))]
    return next(iter(passes), USERS if taking else None)


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
