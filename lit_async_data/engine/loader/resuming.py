"""`Resuming` saves and restores the place of a loader in the order; `Quarantine` knows its bad samples."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.engine.loader.base_loader import Wiring
from lit_async_data.engine.pipeline.sample_reader import BadSample, ReadAround
from lit_async_data.errors import ConfigError, ResumeError, SourceError, few
from lit_async_data.order.epoch_cursor import EpochCursor, OrderState, Place, StepsWanted
from lit_async_data.order.plan import EpochPlan, Schedule
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.user_code import digest
from lit_async_data.sources.local_files import bad_sample, expanded, not_local

log = logging.getLogger(__name__)


class Quarantine:
    """The bad samples of a loader. One thread at a time."""

    def __init__(self, source: Source, most: float, path: str | os.PathLike[str] | None) -> None:
        self._source, self._most = source, most
        # The file that gets each bad sample once, as a line of JSON; None for no file.
        self.path = None if path is None else expanded(os.fspath(path))
        if self.path is not None and (why := not_local(self.path)):
            raise ConfigError(f"{self.path}: {why}", "quarantine")
        self.known: set[int] = set()  # the numbers of the samples that are bad in all epochs
        self._listed: set[int] = set()
        self._writes = True
        # Of the current pass: the epoch, bad samples by number, and batches that were read around them by step.
        self._epoch = -1
        self._bad: dict[int, BadSample] = {}
        self._around: dict[int, ReadAround] = {}

    def remember(self, samples: Iterable[int]) -> None:
        """Know the bad samples of an earlier run, which has listed them."""
        self.known.update(samples)
        self._listed.update(samples)

    def begin(self, epoch: int) -> None:
        self.tell()
        self._epoch, self._bad, self._around = epoch, {}, {}

    @property
    def count(self) -> int:
        """Bad samples of the current pass so far, on this rank."""
        return len(self._bad)

    def samples(self, step: int) -> tuple[int, ...] | None:
        """The samples of a batch of the current pass; None if it had the samples of its plan."""
        return None if step not in self._around else self._around[step].samples

    def handed_out(self, step: int, plan: EpochPlan, around: ReadAround) -> None:
        """Note a batch; a `SourceError` if the pass has had more bad samples than ``max_bad`` allows."""
        self._around[step] = around
        self._bad.update((bad.sample, bad) for bad in around.bad)
        self._list(around.bad)
        of_rank = -(-plan.length // plan.world_size)
        most = self._most if isinstance(self._most, int) else max(int(self._most * of_rank), 1)
        if len(self._bad) > most:
            raise SourceError(
                f"max_bad: {self._described()} in epoch {self._epoch}, and at most {most} are allowed; the last: "
                f"{around.bad[-1].error}; mend the data, leave these samples out (exclude), or raise max_bad",
                errors=[bad.error for bad in self._bad.values() if isinstance(bad.error, SourceError)],
            )

    def tell(self) -> None:
        """Warn of the bad samples of a pass, once, when it ends or is given up."""
        if self._bad and self._epoch >= 0:
            bad = self._described()
            bad += "" if self.path is None or not self._writes else f"; {self.path} lists them"
            log.warning("epoch %d of %s was read around %s", self._epoch, self._source.name, bad)
            self._epoch = -1

    def _described(self) -> str:
        numbers = self._source.ids(np.array(list(self._bad), np.int64)).tolist()
        return f"{len(numbers)} bad sample{'s' * (len(numbers) > 1)} ({few(numbers)})"

    def _list(self, bad: Iterable[BadSample]) -> None:
        self.known.update(each.sample for each in bad if each.lasting)
        new = {each.sample: each for each in bad if each.sample not in self._listed}
        self._listed.update(new)
        if not new or self.path is None or not self._writes:
            return
        numbers = self._source.ids(np.array(list(new), np.int64)).tolist()
        rows = [bad_sample(self._source, at, each.error) for at, each in zip(numbers, new.values(), strict=True)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            there = set[str]()
            if os.path.isfile(self.path):  # other loaders may have listed samples
                with open(self.path, encoding="utf-8", errors="backslashreplace") as file:
                    there.update(file)
            with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(line for line in lines if line not in there)
        except OSError as error:
            log.warning("quarantine: %s cannot be written: %s; bad samples are only counted", self.path, error.strerror)
            self._writes = False


class Done(NamedTuple):
    steps: int  # number of steps that are done
    over: bool  # whether the epoch is over with them, as where a limit ends it


class Resuming:
    """Saves and restores the place of a loader. Refers to no loader. Thread-safe.

    Attributes:
        force: Whether to go on at the same position, even if the order is another one now.
        done: Returns the part of the pass that is done; None for the steps that were handed out. Under a Trainer, a
            batch is done after its training step.
        why_over: Why the resumed epoch has no batches left, although the checkpoint had some; else empty.
    """

    def __init__(self, source: Source, cursor: EpochCursor) -> None:
        self._source, self.cursor = source, cursor
        self._unreported = self._named_by_framework = False
        self._last_line = self.why_over = ""
        self.print_line: Callable[[str, int], object] = lambda line, level: log.log(level, "%s", line)
        self.force = False
        self.done: Callable[[], Done | None] | None = None

    @functools.cached_property
    def _now(self) -> OrderState:
        """All inputs of the order, at the beginning of the first epoch."""
        schedule = self.cursor.schedule
        decks, fingerprint = schedule.plan(0).decks, dict(self._source.fingerprint())
        for number, each in enumerate(decks.sources or (decks,)):
            if each.shuffle == "chunk":
                name = f"chunks of source {number}" if decks.sources else "chunks"
                runs = np.array([(run.samples, run.rows) for run in each.runs], np.int64).reshape(-1, 2)
                fingerprint[name] = digest(runs, np.empty(0) if each.order is None else each.order)
        if decks.buckets is not None:
            fingerprint["batches by length"] = digest(decks.buckets.lengths, decks.buckets.bounds, decks.buckets.sizes)
        if decks.mixture is not None:
            fingerprint["batch_size, of a mixture"] = decks.mixture.batch_size
        return OrderState(
            epoch=0,
            position=0,
            samples=decks.length,
            seed=schedule.seed,
            shuffle=decks.shuffle,
            shuffle_chunks=decks.shuffle_chunks,
            drawn=None if decks.weights is None else digest(decks.weights.edges),
            source=fingerprint,
        )

    def order_changed(self) -> None:
        vars(self).pop("_now", None)

    @property
    def saved(self) -> Place | None:
        """The place at which the next pass begins, if that is a pass over the same epoch."""
        return self.cursor.state.saved

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch; frameworks call this, by ``loader.batch_sampler.sampler``."""
        self._named_by_framework = True
        self.cursor.name_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """The place behind the last batch that is done, as plain values."""
        done = None if self.done is None else self.done()
        place, state = self.cursor.place(None if done is None else done.steps), self.cursor.state
        if done is None and self._named_by_framework and not state.fresh and sys.exception() is not None:
            log.warning(
                "the state is saved while %s is handled: the batch that was handed out last counts as done, though its "
                "step may have failed; under a Trainer, DevicePrefetcher() among the callbacks has it come again",
                type(sys.exception()).__name__,
            )
        if done is not None and done.over and not state.between and done.steps >= state.step:
            place = self._ended(place)
        return self._now.at(place).to_dict()

    def _ended(self, place: Place) -> Place:
        return place._replace(position=self._now.samples, over=True)

    def checked(self, given: object, *, force: bool = False, any_seed: bool = False) -> Place:
        """The place of a saved state; ``any_seed``: its seed will be taken. See `AsyncLoader.load_state_dict`."""
        state = OrderState.from_dict(given)
        now = dataclasses.replace(self._now, seed=state.seed) if any_seed else self._now
        changed = state.differences(now)
        if changed and not 0 < state.position < state.samples:
            self.report(f"the order is another one than in the checkpoint ({'; '.join(changed)}), from this epoch on")
        elif changed and not (force or self.force):
            bad = "; on_error leaves out bad samples in the middle of an epoch, exclude does not"
            bad = bad if any(each.startswith("samples:") for each in changed) else ""
            if {state.shuffle, now.shuffle} == {"chunk", "global"}:
                bad += "; if the files have moved: those that were local keep their order with shuffle='global', those "
                bad += "behind a network with cache=FOLDER of the source"
            raise ResumeError(
                f"the checkpoint is from sample {state.position} of {state.samples} in epoch {state.epoch}, and the "
                f"rest of that epoch would be of another order: {'; '.join(changed)}; undo the changes, or go "
                "on at the same position of the new order: load_state_dict(state, force=True), or with Lightning "
                f"AsyncDataModule(force_resume=True){bad}"
            )
        elif changed and state.position < self._now.samples:
            self.report(f"going on at the same position of another order: {'; '.join(changed)}")
        self._unreported, self.why_over = True, ""
        return self._fitting(state.place)

    def announce(self) -> None:
        """Log where the epoch goes on, with the first request for a batch after `checked`."""
        saved, coming, by_framework = self.saved, self.cursor.coming, self._named_by_framework
        if not self._unreported or saved is None:
            return
        samples, level, whole = self._now.samples, logging.INFO, saved.over or not saved.position
        if by_framework and whole and coming.epoch > saved.epoch + saved.over:
            level = logging.WARNING
            line = (
                f"epoch {saved.epoch + saved.over} is left out: the checkpoint was written when it had only begun, and "
                "Lightning takes it for done; with DevicePrefetcher() among the Trainer's callbacks it is whole"
            )
        elif whole:
            line = f"resumed at epoch {coming.epoch}, sample 0 of {samples}"
        elif coming is saved:
            if by_framework and self.done is None and (changed := self.changed_steps(saved)):
                raise ResumeError(changed)
            line = f"resumed at epoch {saved.epoch}, sample {saved.position} of {samples}"
        else:
            line = (
                f"the saved place, sample {saved.position} of {samples} in epoch {saved.epoch}, is not used: epoch "
                f"{coming.epoch} begins"
            )
            if by_framework:
                level = logging.WARNING
                line += (
                    ", as Lightning counts the epoch before as done: limit_train_batches, max_steps or a shorter "
                    "loader has ended it. With DevicePrefetcher() among the Trainer's callbacks, max_steps loses no "
                    "sample"
                )
        self._unreported = False
        self.print_line(line, level)

    def changed_steps(self, place: Place, *, alone: bool = True) -> str:
        """The remedy in words if steps had another size before a place; else empty."""
        plan = self.cursor.schedule.plan(0)
        before = place.history[-1] if place.history else None
        if before is None or before.step == plan.batch_size * plan.world_size:
            return ""
        remedy = "add DevicePrefetcher() to the Trainer's callbacks, which counts them again, or " if alone else ""
        return (
            f"batch_size × ranks was {before.batch_size} × {before.world_size}, is {plan.batch_size} × "
            f"{plan.world_size}, and Lightning counts batches{'' if alone else ' of several loaders at once'}: {remedy}"
            f"go back to {before.batch_size} × {before.world_size}"
        )

    def report(self, line: str) -> None:
        """Print a line once: Lightning restores both a DataModule and its loader."""
        if line != self._last_line:
            self._last_line = line
            self.print_line(line, logging.INFO)

    def _fitting(self, place: Place) -> Place:
        """The place, if the ranks can share the rest of the epoch; its end, if ``drop_last`` drops the rest."""
        plan, rest = self.cursor.schedule.plan(place.epoch), self._now.samples - place.position
        if place.over or not place.position:
            return place
        world = plan.world_size
        if rest <= 0:  # with ``force``
            self.why_over = f"it has {self._now.samples} samples now, and the saved place is sample {place.position}"
        elif plan.drops_all(place.position):
            what = f"drop_last drops the {rest} samples that remain of it"
            self.why_over = f"{what}, which do not fill a step of {plan.batch_size} × {world}"
        if self.why_over:
            self.report(f"epoch {place.epoch} is over: {self.why_over}")
            return self._ended(place)  # also in later states
        if rest < world and plan.decks.mixture is None:  # a mixture goes on until the last step is complete
            what = f"{rest} samples remain of epoch {place.epoch}, fewer than the {world} ranks, which each need at "
            ranks = "1 rank" if rest == 1 else f"1 to {rest} ranks"
            raise ResumeError(f"{what}least one; resume on {ranks}, or from another checkpoint")
        return place


@dataclasses.dataclass(kw_only=True)
class AsyncWiring(Wiring):
    schedule: Schedule  # the order of all epochs
    resuming: Resuming
    quarantine: Quarantine
    # Called at the start of each pass.
    steps_wanted: StepsWanted = lambda: (None, None)
