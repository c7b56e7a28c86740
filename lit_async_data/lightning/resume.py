"""Exact resume under a Trainer: reconciles Lightning's counters with the place of the training loader.

If batch size or ranks change, `count_again` moves the counters. That needs a single training loader: several loaders
each have their own place, but Lightning counts the same number of batches as done for all.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.loader.resuming import Done, Resuming
from lit_async_data.engine.prefetch.loader import DealtOrder, PrefetchedLoader, SampledOrder, StatefulPrefetchedLoader
from lit_async_data.errors import ResumeError
from lit_async_data.lightning import loops
from lit_async_data.lightning.display import print_line
from lit_async_data.lightning.loops import DrivenLoader, driven_loaders, is_only, loaders_in, pl
from lit_async_data.order.epoch_cursor import OrderState, Place
from lit_async_data.order.plan import Limits

ORDERS = "lit_async_data.dealt_orders"  # the key in a checkpoint
ANOTHER = "resume from another checkpoint"


def training_steps(
    reference: weakref.ref[pl.Trainer], loader_reference: weakref.ref[AsyncLoader]
) -> tuple[int | None, int | None]:
    """The batches that the Trainer will take of a training pass that begins, and of each later pass; None for all.

    From here on the loader counts this pass as Lightning does: a batch is done after training on it.
    """
    trainer, loader = reference(), loader_reference()
    if trainer is None or loader is None:
        return None, None
    if trainer.state.status != "running":  # the user iterates, outside of a run
        _resuming(loader).done = None
        return None, None
    if not is_only(trainer.train_dataloader):
        return _steps_of_one_among_several(reference, trainer, loader)
    done, total = int(loops.batches(trainer).ready), trainer.num_training_batches
    if total == math.inf or total <= 0:
        return None, None
    if trainer.fit_loop.restarting:
        _check_counters(trainer, loader, done, int(total))
    placed = _resuming(loader).saved is not None or loops.unread_states(trainer)
    if trainer.ckpt_path and trainer.fit_loop.is_resuming and not placed:
        begins = f"epoch {loops.epoch(trainer)} begins at its first sample"
        _resuming(loader).report(f"{trainer.ckpt_path} holds no place in the data: {begins}")
    _resuming(loader).done = functools.partial(_done, reference, done)
    return (int(total) - done if done < total else None), int(total)


def _steps_of_one_among_several(
    reference: weakref.ref[pl.Trainer], trainer: pl.Trainer, loader: AsyncLoader
) -> tuple[None, None]:
    """No limit: a short loader begins again in the middle of Lightning's epoch, and each of its passes is an epoch."""
    done, saved = int(loops.batches(trainer).ready), _resuming(loader).saved
    if saved is not None and trainer.fit_loop.restarting:
        if not done:  # all loaders begin the epoch
            _resuming(loader).cursor.resume(None)
        elif saved.position and not saved.over and (changed := _resuming(loader).changed_steps(saved, alone=False)):
            raise _refusal(trainer, changed)
        elif (cursor := _resuming(loader).cursor).coming is not saved:
            cursor.set_epoch(saved.epoch)
    _resuming(loader).done = functools.partial(_done, reference, done)
    return None, None


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Make a resumed run train the rest of a cut epoch, if the checkpoint has a place in the data."""
    state = checkpoint.get("loops", {}).get("fit_loop", {})
    if not (state.get("epoch_progress") and state.get("epoch_loop.batch_progress")):
        return  # of another program
    if state.get("state_dict", {}).get("combined_loader") or any(checkpoint.get(ORDERS, ())):
        loops.reopen_epoch(state)


def count_again(trainer: pl.Trainer, loader: AsyncLoader) -> None:
    """Move Lightning's counters so that as many batches of the epoch remain as the loader has."""
    saved, total = _resuming(loader).saved, trainer.num_training_batches
    if not trainer.fit_loop.epoch_loop.restarting:
        return  # see `begin_whole_epoch`
    if saved is None or not saved.position or not trainer.fit_loop.restarting or total == math.inf:
        return
    place = _resumed_place(trainer, loader)
    left = 0 if place is None else steps_left(loader, place, int(total))
    if left:  # also if the last batch was taken and failed before its step
        loops.set_left(trainer, left, is_last=False)
    elif loops.is_over(trainer):  # for any number of batches that the epoch would have now
        loops.set_left(trainer, 0, is_last=True)
    elif saved.over:  # drop_last drops the rest; Lightning would begin an epoch without remaining batches again
        loops.set_left(trainer, 1, is_last=True)
    elif place is not None:
        what = f"limit_train_batches: with {trainer.limit_train_batches}, the epoch ends before the saved place, "
        raise _refusal(trainer, f"{what}sample {place.position} of {loader.order.length}; raise it, or {ANOTHER}")


def check_begun(trainer: pl.Trainer, loader: AsyncLoader) -> None:
    """Refuse a loader that Lightning has built again after restoring the place, so that it began an epoch anew."""
    done = int(loops.batches(trainer).ready) - 1
    if trainer.fit_loop.restarting and done and not _resuming(loader).cursor.state.origin.position:
        raise _without_place(trainer, done)


def restore_loaders(trainer: pl.Trainer) -> None:
    """Give the training loaders the states that Lightning has read for them and not passed on.

    Lightning does not pass states on if it built the loaders before it restored its loops, for example because an
    optimizer asked for the number of steps. Nor does it between epochs, where loaders need seed and last pass.
    """
    if trainer.fit_loop.restarting:
        loops.pass_states_on(trainer)
        return
    loaders, alone = loops.loaders_of(trainer.fit_loop), is_only(trainer.train_dataloader)
    stateful = [each for each in loaders if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
    for loader, state in zip(stateful, loops.unread_states(trainer), strict=False):
        own = isinstance(state, Mapping) and "seed" in state  # not of another kind of loader
        if isinstance(loader, AsyncLoader) and own and _resuming(loader).saved is None:
            loader.load_state_dict(state, force=True)
            if not alone and (place := OrderState.from_dict(state).place) > Place(0, 0):
                _resuming(loader).cursor.resume(None)
                _resuming(loader).cursor.follow(place)
    loops.forget_states(trainer)


def keep_seed(trainer: pl.Trainer, loader: Any) -> None:
    """Give a training loader that is built again the seed of those before, which may come from a checkpoint."""
    before = driven_loaders(trainer.train_dataloader) if trainer.training and isinstance(loader, AsyncLoader) else ()
    for last in [each for each in before if isinstance(each, AsyncLoader) and each.options.seed is None][:1]:
        loader._take_seed(last._wiring.schedule.seed)


def follow_passes(trainer: pl.Trainer, before: Sequence[DrivenLoader]) -> None:
    """Make each of several rebuilt loaders continue after the last pass of the loader that it replaces."""
    loaders = driven_loaders(trainer.train_dataloader)
    if len(loaders) == len(before) and not is_only(trainer.train_dataloader):
        for loader, last in zip(loaders, before, strict=True):
            if isinstance(loader, AsyncLoader) and isinstance(last, AsyncLoader) and loader is not last:
                _resuming(loader).cursor.follow(_resuming(last).cursor.state.origin)


def save_orders(trainer: pl.Trainer, loaders: Sequence[DrivenLoader], checkpoint: dict[str, Any]) -> None:
    orders = [
        {"generator": loader.dealt_order.generator, "begun": loader.dealt_order.begun, **_dealing(trainer, loader)}
        if isinstance(loader, PrefetchedLoader) and loader.dealt_order is not None
        else None
        for loader in loaders
    ]
    if any(order is not None for order in orders):
        checkpoint[ORDERS] = orders


def _dealing(trainer: pl.Trainer, loader: PrefetchedLoader) -> dict[str, Any]:
    """Facts that must not change for a DataLoader to go on in the middle of an epoch; unknown ones are None."""
    dataset: Any = getattr(loader, "dataset", None)
    samples = len(dataset) if hasattr(dataset, "__len__") else None
    return {"batch_size": getattr(loader, "batch_size", None), "ranks": trainer.world_size, "samples": samples}


def restore_orders(trainer: pl.Trainer, loaders: Sequence[DrivenLoader], orders: Sequence[Any]) -> None:
    """Make each DataLoader of training go on at the place of the checkpoint, or warn that it cannot."""
    done, total, epoch = loops.trained(trainer), trainer.num_training_batches, loops.epoch(trainer)
    going_on = [each for each in loaders if isinstance(each, PrefetchedLoader) or _resuming(each).saved is None]
    restarting = trainer.fit_loop.restarting and trainer.fit_loop.epoch_loop.restarting
    if restarting and done and not loops.is_over(trainer):
        if len(loaders) == len(loaders_in(trainer.train_dataloader)):  # each of them says what it does
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended and")
        for number, loader in enumerate(loaders):
            if isinstance(loader, PrefetchedLoader) and not isinstance(loader, StatefulPrefetchedLoader):
                saved: Any = orders[number] if number < len(orders) else None
                if why := _why_order_is_lost(trainer, loader, saved):
                    at, kind = f"at batch {done} of {total} of epoch {epoch}", type(loader.loader).__name__
                    lost = f"{kind} begins its order anew: {why}, so some samples come twice and others never"
                    cure = "give it one of torch's samplers, or use a loader with a state_dict or AsyncDataModule"
                    print_line(f"training goes on {at}, but its {lost}; {cure}", logging.WARNING)
                    going_on.remove(loader)
                else:
                    _check_dealing(trainer, loader, saved)
                    loader.resumed_order = DealtOrder(saved["generator"], saved["begun"])
    else:
        done = 0
        if loops.is_over(trainer):  # a checkpoint of validation counts the epoch that it ended as ready only
            epoch = trainer.fit_loop.epoch_progress.current.ready
    if going_on and (done or trainer.ckpt_path):
        print_line(f"resumed at epoch {epoch}, batch {done} of {total}")


def _why_order_is_lost(trainer: pl.Trainer, loader: PrefetchedLoader, saved: Any) -> str:
    """The reason why a DataLoader cannot go on in the order of a checkpoint; empty if it can."""
    order = SampledOrder(loader.loader)
    if order.unknown or not saved:
        return order.unknown or "the checkpoint holds no place in its data"
    draws = order.generator is not None and trainer.world_size > 1
    return "each rank draws its own order" if draws else ""


def _check_dealing(trainer: pl.Trainer, loader: PrefetchedLoader, saved: Mapping[str, Any]) -> None:
    now = _dealing(trainer, loader)
    if changed := [f"{key}: {saved[key]} in the checkpoint, {now[key]} now" for key in now if saved[key] != now[key]]:
        what = "a DataLoader goes on in the middle of an epoch only with the same values; AsyncDataModule with any"
        raise _refusal(trainer, f"{'; '.join(changed)}: {what} batch_size and ranks")


def steps_left(loader: AsyncLoader, place: Place, total: int) -> int:
    schedule = loader._wiring.schedule
    plan = schedule.plan(place.epoch)
    end = plan.position(min(total, len(plan)))
    if place.over or place.position >= end:
        return 0
    return schedule.limited(Limits(place.epoch, start=place.position)).plan(place.epoch).steps_to(end)


def _resuming(loader: AsyncLoader) -> Resuming:
    return loader._wiring.resuming


def trained(reference: weakref.ref[pl.Trainer]) -> int | None:
    trainer = reference()
    return None if trainer is None else loops.trained(trainer)


def _done(reference: weakref.ref[pl.Trainer], before: int) -> Done | None:
    """The batches that were trained on since ``before``."""
    trainer = reference()
    return None if trainer is None else Done(loops.trained(trainer) - before, loops.is_over(trainer))


def _resumed_place(trainer: pl.Trainer, loader: AsyncLoader) -> Place | None:
    """The saved place at which the first pass of a resumed run begins; None if that is the start of an epoch."""
    saved = _resuming(loader).saved
    if saved is None or not saved.position or not trainer.fit_loop.restarting:
        return None
    return saved if saved.epoch == loops.epoch(trainer) else None


def _check_counters(trainer: pl.Trainer, loader: AsyncLoader, done: int, total: int) -> None:
    place, saved = _resumed_place(trainer, loader), _resuming(loader).saved
    if place is None and not done:
        return
    if saved is None:
        raise _without_place(trainer, done)
    if place is not None:
        ended = place.over and loops.is_last(trainer)  # see `count_again`
        if ended or steps_left(loader, place, total) == total - done:
            return
    cure = f"add DevicePrefetcher() to the Trainer's callbacks, or {ANOTHER}"
    if why := _resuming(loader).why_over:
        what = f"epoch {saved.epoch} is over: {why}; but Lightning counts batches, and would not end it: {cure}"
    elif not (what := _resuming(loader).changed_steps(saved)):
        what = f"the Trainer counts {done} of {total} batches of epoch {loops.epoch(trainer)} as done, which does not "
        what += f"fit the saved place, sample {saved.position} of {loader.order.length} in epoch {saved.epoch}; if "
        what += f"limit_train_batches or drop_last has changed, restore it, or {cure}"
    raise _refusal(trainer, what)


def _without_place(trainer: pl.Trainer, done: int) -> ResumeError:
    """A run cannot resume from a checkpoint in the middle of an epoch that has no place in the data."""
    steps = f"{done} of {trainer.num_training_batches} batches of epoch {trainer.current_epoch}"
    what = f"ckpt_path: {trainer.ckpt_path or 'the checkpoint'} was written after {steps}, and holds no place in the "
    what += "data, as of another loader or an older lit_async_data: training would see some batches twice and others "
    what += "never; resume from a checkpoint of an epoch's end, or load the weights alone with load_from_checkpoint"
    return _refusal(trainer, what)


def _refusal(trainer: pl.Trainer, what: str) -> ResumeError:
    return ResumeError(what, file=None if trainer.ckpt_path is None else str(trainer.ckpt_path))
