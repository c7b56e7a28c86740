"""Lightning's counters of epochs and batches, and its private attributes, which no other module uses.

Checked with Lightning 2.5.5 and 2.6.6. If a later version lacks a private attribute, its default here holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_data.lightning.compat import pl

# The counters of batches, in the order in which Lightning raises them.
COUNTERS = ("ready", "started", "processed", "completed")


def batches(trainer: pl.Trainer) -> Any:
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress  # Any: its annotations name another class of counters
    return progress.current


def trained(trainer: pl.Trainer) -> int:
    """The batches of this epoch that were trained on; right in every hook, and after an error."""
    return int(batches(trainer).processed)


def epoch(trainer: pl.Trainer) -> int:
    """The epoch that Lightning names to samplers."""
    progress: Any = trainer.fit_loop.epoch_progress
    return int(progress.current.processed)


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
    for name in COUNTERS:
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


def loops_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the fit loop in a checkpoint; empty if it has none."""
    found: Mapping[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    return found if found.get("epoch_progress") and found.get("epoch_loop.batch_progress") else {}


def loaded_checkpoint(trainer: Any) -> Mapping[str, Any]:
    """The whole checkpoint; Lightning passes a DataModule only its own part."""
    return getattr(getattr(trainer, "_checkpoint_connector", None), "_loaded_checkpoint", None) or {}


def unread_states(trainer: pl.Trainer) -> Sequence[Any]:
    """The states of the checkpoint's training loaders that Lightning has not passed on."""
    return getattr(trainer.fit_loop, "_combined_loader_states_to_load", ())


def pass_states_on(trainer: pl.Trainer) -> None:
    getattr(trainer.fit_loop, "_load_combined_loader_states", int)()


def loaders_of(loop: Any) -> Sequence[Any]:
    return getattr(getattr(loop, "_combined_loader", None), "flattened", ())


def iterators_of(loop: Any) -> Sequence[Any]:
    """The iterators of a loop's loaders; empty until they have begun."""
    return getattr(getattr(getattr(loop, "_combined_loader", None), "_iterator", None), "iterators", ())


def loops_that_run(trainer: Any) -> Iterator[tuple[Any, bool]]:
    """The loops of a run that take batches, each with whether it trains."""
    if trainer.state.fn == "fit":
        yield trainer.fit_loop, True
        yield trainer.fit_loop.epoch_loop.val_loop, False
    else:
        yield getattr(trainer, f"{trainer.state.fn.value}_loop"), False
