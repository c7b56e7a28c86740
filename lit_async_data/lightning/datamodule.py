"""`AsyncDataModule`: the sources of each stage, as loaders that Lightning's Trainer iterates over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.batch.transforms import Normalize
from lit_async_data.engine.hooks import HostHooks
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.resources import readable
from lit_async_data.errors import ConfigError, TransformError
from lit_async_data.lightning import loops
from lit_async_data.lightning.display import print_line, summary_lines
from lit_async_data.lightning.loops import pl
from lit_async_data.lightning.resume import reopen_epoch
from lit_async_data.lightning.stages import (
    STAGES,
    ByStage,
    Stage,
    check_statistics,
    checked_sources,
    class_names,
    count_classes,
    evaluation_options,
    loader_of,
    normalizing,
    shared_data,
    split_sources,
    stage_transforms,
    with_saved_classes,
    with_training_classes,
)
from lit_async_data.options import OF_LOADER, ArrayLike, LoaderOptions, explains_names, lightning_seed, whole
from lit_async_data.sources.contract.source import Location, Source

log = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """A batch of training, made again.

    Attributes:
        epoch: Its epoch, counted from 0.
        batch_idx: Its number in the epoch, as ``training_step`` gets it.
        batch: The batch as the loader hands it out, with all transforms and the same random numbers.
        ids: The samples, int64, shape (n,); as in ``return_indices``, but without the samples that fill up the batch.
        places: The location of each sample.
    """

    epoch: int
    batch_idx: int
    batch: Any
    ids: npt.NDArray[np.int64]
    places: list[Location]


@explains_names(OF_LOADER)
class AsyncDataModule(pl.LightningDataModule):
    """Sources for training, validation, test and prediction, each read ahead by an `AsyncLoader`.

    Each loader reads the share of its rank. Batches go to the Trainer's device. Loaders close when the Trainer is done,
    also after an error. Not thread-safe: Lightning calls it from one thread.

    Args:
        source: One source, which ``split`` cuts into stages, in place of ``train``, ``val``, ``test`` and ``predict``;
            without ``split``, the source for training.
        split: The share of each stage, as in ``{"train": 0.7, "val": 0.15, "test": 0.15}``, or the list of its groups
            or of its values of ``by``; see `split`.
        groups: The groups that a split keeps together: ``"file"``, ``"group"``, a dataset of subjects, …; see `split`.
        by: The column with the stage or the fold of each sample; see `split`.
        balance: The classes to distribute over the stages in proportion; see `split`.
        fold: The fold for validation, by its number from 0 on or, with ``by``, by its value; the other folds are for
            training. With ``split``, the samples of its train and val together are cut into folds.
        folds: Number of folds, without ``by``; see `folds`.
        train: Source for training.
        val: Source for validation, or a list of sources.
        test: As ``val``.
        predict: As ``val``.
        loader: `LoaderOptions`, or a mapping of their names to values. Training shuffles unless the options say
            otherwise; evaluation does not shuffle and drops no batch.
        val_loader: Options that differ in validation; a value of None inherits.
        test_loader: Options that differ in test.
        predict_loader: Options that differ in prediction.
        sample_transform: Called with each sample on the host; random numbers as in `AsyncLoader` in training, None in
            evaluation. One callable for all stages, or a mapping over ``train``, ``val``, ``test``, ``predict`` and
            ``eval`` (the last three).
        batch_transform: Called with each batch on the host, after ``sample_transform``; for stages as above.
        device_transform: Called with each batch on its device, on the stream that copies; for stages as above.
        statistics: ``"train"`` normalises fields in all stages by their mean and std in training: the fields of a
            `Normalize` given as ``device_transform``, which keeps its ``axis`` and ``dtype`` but not its numbers; else
            the first field that holds no labels. Rank 0 computes them when the first loader is built, from the source's
            values; so host transforms must not scale or shift them.
        cache_dir: Folder that keeps the statistics, as in `statistics`.
        force_resume: Resume at the same position of an epoch although its order has changed: other data, seed, shuffle
            or weights.

    Attributes:
        sources: The sources of each stage, by the stage's name: ``dm.sources["val"][0].locate(ids)``.
        normalize: The `Normalize` of ``statistics``, once computed: ``dm.normalize.inverse(predictions)``.

    Raises:
        ConfigError: An option is wrong, or the classes of a field differ between stages.

    Example:
        >>> import numpy as np
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.zeros((10, 3)), "y": np.arange(10) % 4})
        >>> dm = AsyncDataModule(train=source, loader={"batch_size": 4, "shuffle": "global"})
        >>> len(dm.train_dataloader()), dm.val_dataloader(), dm.num_classes
        (3, [], {'y': 4})
    """

    trainer: Any  # no type checker sees where Lightning sets its attributes

    def __init__(
        self,
        *,
        source: Source | None = None,
        split: Mapping[str, float | Sequence[int | str]] | None = None,
        groups: str | ArrayLike | None = None,
        by: str | ArrayLike | None = None,
        balance: str | ArrayLike | None = None,
        fold: int | str | None = None,
        folds: int = 5,
        train: Source | None = None,
        val: Source | Sequence[Source] | None = None,
        test: Source | Sequence[Source] | None = None,
        predict: Source | Sequence[Source] | None = None,
        loader: LoaderOptions | Mapping[str, Any] | None = None,
        val_loader: Mapping[str, Any] | None = None,
        test_loader: Mapping[str, Any] | None = None,
        predict_loader: Mapping[str, Any] | None = None,
        sample_transform: ByStage = None,
        batch_transform: ByStage = None,
        device_transform: ByStage = None,
        statistics: Literal["train"] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        force_resume: bool = False,
    ) -> None:
        super().__init__()
        by_stage: dict[str, Any] = {"train": train, "val": val, "test": test, "predict": predict}
        cut = {"groups": groups, "by": by, "balance": balance}
        self._split_line = ""
        if any(each is not None for each in (source, split, fold, *cut.values())):
            by_stage, self._split_line = split_sources(source, by_stage, split, fold, folds, **cut)
        self.sources = with_training_classes(checked_sources(by_stage))
        self._lists = {stage for stage, given in by_stage.items() if not isinstance(given, Source)}
        if not self.sources["val"]:
            # A DataModule has all four hooks, so Lightning expects a validation loader.
            warnings.filterwarnings("ignore", "You passed in a `val_dataloader` but have no `validation_step`")
        self._options = LoaderOptions.of(loader, "loader.")
        self._overrides = {"val": val_loader, "test": test_loader, "predict": predict_loader}
        for stage in STAGES:
            self._options_of(stage)  # raises errors now, not at the first validation
        transforms = {"sample_transform": sample_transform, "batch_transform": batch_transform}
        transforms["device_transform"] = device_transform
        self._transforms = {name: stage_transforms(name, each) for name, each in transforms.items()}
        check_statistics(statistics, self.sources["train"], device_transform)
        self.normalize: Normalize | None = None
        self._statistics = statistics and (device_transform, cache_dir)
        self.force_resume = force_resume
        self._logged = set[str]()
        # The seed of the last training, the same on all ranks, for loaders whose options have none; None before a run.
        self._seed: int | None = None
        self._saved: dict[str, Any] | None = None  # the place of a checkpoint, until training begins there
        self._forget_loaders()

    def _forget_loaders(self) -> None:
        self._loaders: weakref.WeakSet[AsyncLoader] = weakref.WeakSet()
        # Loaders that `describe` built and that no stage has taken yet, and what they were built for.
        self._described: dict[Stage, tuple[object, list[AsyncLoader]]] = {}
        self._training: Callable[[], AsyncLoader | None] = lambda: None

    # -- called by Lightning ---------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Agree with the other ranks on the seed, and log what `describe` says about the stages of this run."""
        if self.trainer is not None and self.trainer.state.status == "running":
            # Lightning calls this hook on every rank. A user may call methods that build loaders on a single rank.
            seed = self.trainer.strategy.broadcast(lightning_seed())
            self._seed = seed if stage == "fit" or self._seed is None else self._seed
        # Lightning warns about every stage without data, which is no mistake here.
        warnings.filterwarnings("ignore", "Total length of `(list|CombinedLoader)` across ranks is zero")
        stages = {"fit": STAGES[:2], "validate": ("val",), "test": ("test",), "predict": ("predict",)}[stage]
        print_line(self.describe(stages))
        if stage in ("fit", "test") and not self._split_line:  # a split says it by itself
            print_line(shared_data(self.sources, stages[-1]) or "", logging.WARNING)

    def train_dataloader(self) -> AsyncLoader | list[AsyncLoader]:
        """The loader of the training source; ``[]`` if there is none."""
        if self.trainer is not None:
            loops.begin_whole_epoch(self.trainer)
        loaders, before = self._loaders_of("train"), self._training()
        if before is not None and before._wiring.resuming.saved is None:
            self._saved = None  # training has begun there
        for loader in loaders:
            self._training = weakref.ref(loader)
            self._resume(loader)
        return loaders[0] if loaders else []

    def val_dataloader(self) -> AsyncLoader | list[AsyncLoader]:
        """The loader of the source; for a list of sources a list of loaders, for none ``[]``."""
        return self._evaluating("val")

    def test_dataloader(self) -> AsyncLoader | list[AsyncLoader]:
        return self._evaluating("test")

    def predict_dataloader(self) -> AsyncLoader | list[AsyncLoader]:
        return self._evaluating("predict")

    def _evaluating(self, stage: Stage) -> AsyncLoader | list[AsyncLoader]:
        loaders = self._loaders_of(stage)
        return loaders if stage in self._lists else loaders[0]

    def teardown(self, stage: str) -> None:  # noqa: ARG002  # Lightning passes it by name
        """Close the loaders and the files of the sources; both open again when needed."""
        self.close()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002  # the signature is Lightning's
        """Close everything: Lightning does not call `teardown` after an error."""
        self.close()

    def close(self) -> None:
        """Close every loader and every source. A second call does nothing."""
        self._described.clear()
        self._saved = None
        with contextlib.ExitStack() as closing:
            for source in (source for sources in self.sources.values() for source in sources):
                closing.callback(source.close)
            for loader in list(self._loaders):
                closing.callback(loader.close)

    # -- called by users -------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples per batch and device, at most the size of the training set.

        Lightning's batch-size finder sets it. Loaders built after that use it.
        """
        return self._options.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        # The finder doubles the size until memory is full or the data end, but does not know the number of samples.
        most = max(map(len, self.sources["train"]), default=size)
        self._options = dataclasses.replace(self._options, batch_size=min(size, most))

    @functools.cached_property
    def spec(self) -> BatchSpec:
        """The fields of a batch of the first source, as host hooks return them; the first access calls the hooks.

        Raises:
            TransformError: A host hook failed on the first samples.
            SourceError: The first samples cannot be read.
        """
        stage: Stage = next(stage for stage in STAGES if self.sources[stage])
        hooks = HostHooks.of(*(self._transforms[name][stage] for name in ("sample_transform", "batch_transform")))
        return hooks.outcome(self._first, self._options_of(stage)).spec if hooks else self._first.spec

    @property
    def _first(self) -> Source:
        return next(source for sources in self.sources.values() for source in sources)

    @functools.cached_property
    def num_classes(self) -> dict[str, int]:
        """The number of classes of each field with one whole number per sample.

        It counts the names in `classes`; without names it is one more than the largest label of all stages, which are
        read once. Fields with negative values are left out.
        """
        counts: dict[str, int] = {}
        for each in (count_classes(source) for sources in self.sources.values() for source in sources):
            counts |= {key: max(count, counts.get(key, 0)) for key, count in each.items()}
        return counts

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the values 0, 1, 2, … of each field that has class names; saved in checkpoints."""
        return class_names(self._first)

    def state_dict(self) -> dict[str, Any]:
        """The classes and the place of training, for a checkpoint; equal on all ranks, except for bad samples."""
        loader = self._training()
        place = self._saved if loader is None else loader.state_dict()
        return {"classes": {key: list(names) for key, names in self.classes.items()}, "order": place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the place of a checkpoint, and its numbers of classes that a source found in a table.

        Training goes on there, also in the middle of an epoch, with any number of ranks; see
        `AsyncLoader.load_state_dict`.

        Raises:
            ResumeError: The classes differ, or training cannot go on at the place.
        """
        self.sources = with_saved_classes(self.sources, state_dict.get("classes", {}))
        for found in ("num_classes", "spec"):
            vars(self).pop(found, None)
        if self.trainer is None or self.trainer.state.fn == "fit":
            reopen_epoch(loops.loaded_checkpoint(self.trainer))
            self._saved = state_dict.get("order")
            # If an optimizer asked for the number of steps, Lightning has built the loader before restoring its place.
            if (loader := self._training()) is not None:
                self._resume(loader)

    def _resume(self, loader: AsyncLoader) -> None:
        loader._wiring.resuming.force = self.force_resume
        if self._saved is not None:
            loader.load_state_dict(self._saved)
            self._seed = loader._wiring.schedule.seed

    def replay(
        self,
        step: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        accumulate_grad_batches: int = 1,
        limit_train_batches: float | None = None,
        device: torch.device | str | None = None,
    ) -> list[Replayed]:
        """Make the batches of a training step again, as the loader handed them out, transforms included.

        Reads only these batches. Repeat the arguments of the run; no Trainer is asked. Without a seed in the options,
        the seed is that of the last run or of the checkpoint given to `load_state_dict`, else of ``seed_everything``.

        Args:
            step: The step as loggers write it: counted from 0 over all epochs.
            rank: The rank whose batches are made.
            world_size: Number of ranks.
            accumulate_grad_batches: Batches per step.
            limit_train_batches: As in the Trainer; None for all.
            device: Device of ``device_transform``; random numbers are the same on devices of the same kind.

        Returns:
            The batches of the step in order: one, unless gradients were accumulated.

        Raises:
            ConfigError: There is no training source, or a number is out of range.
            ReadError, SourceError, TransformError: See `AsyncLoader`.

        Example:
            >>> import numpy as np
            >>> from lit_async_data.testing import ArraySource
            >>> dm = AsyncDataModule(train=ArraySource({"y": np.arange(10)}), loader={"batch_size": 4, "shuffle": True})
            >>> loader = dm.train_dataloader()
            >>> made = [batch["y"].tolist() for epoch in range(2) for batch in loader]
            >>> (again,) = dm.replay(step=4)
            >>> again.epoch, again.batch_idx, again.batch["y"].tolist() == made[4], again.ids.tolist() == made[4]
            (1, 1, True, True)
        """
        if not self.sources["train"]:
            raise ConfigError("there is no source for training, so there is no step to replay", "train")
        step = whole("step", step, 0)
        accumulate_grad_batches = whole("accumulate_grad_batches", accumulate_grad_batches, 1)
        source, options = self.sources["train"][0], dataclasses.replace(self._options_of("train"), workers=0)
        ranks = {"rank": rank, "world_size": world_size}
        with self._build_loader(source, options, "train", 0, device=device, **ranks) as loader:
            known = lightning_seed() if self._seed is None else self._seed
            loader._take_seed(known if self._saved is None else self._saved["seed"])
            batches, limit = len(loader), limit_train_batches
            if limit is not None:
                batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
            if batches < 1:
                raise ConfigError(f"{limit} leaves no batch of the {len(loader)} of an epoch", "limit_train_batches")
            epoch, number = divmod(step, -(-batches // accumulate_grad_batches))
            first = number * accumulate_grad_batches
            wiring = loader._wiring
            plan, wiring.resuming.print_line = wiring.schedule.plan(epoch), lambda *_: None
            loader.load_state_dict(loader.state_dict() | {"epoch": epoch, "position": plan.position(first)})
            loader.set_epoch(epoch)
            found = []
            for batch_idx in range(first, min(first + accumulate_grad_batches, batches)):
                batch, read = next(loader), wiring.quarantine.samples(batch_idx - first)
                ids = source.ids(plan.batch(batch_idx) if read is None else np.array(read))
                found.append(Replayed(epoch, batch_idx, batch, ids, source.locate(ids)))
            return found

    def describe(self, stages: Sequence[str] = STAGES) -> str:
        """A few lines about each stage: its samples, its order, its workers and its memory."""
        lines, memory = [], 0
        for stage in filter(stages.__contains__, STAGES):
            for loader in self._loaders_of(stage, described=True):
                loader.footprint.budget.check()
                memory += loader.footprint.budget.total
                lines += [f"{stage if n == 0 else '':<8}{line}" for n, line in enumerate(summary_lines(loader))]
        if not lines:
            return f"no data for {', '.join(stages)}; give {stages[0]}=SOURCE"
        if self._split_line and "train" in stages:
            lines.insert(0, f"{'split':<8}{self._split_line}")
        return "\n".join([*lines, f"{'memory':<8}{readable(memory)} in all"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{stage} {sum(map(len, each)):,}" for stage, each in self.sources.items() if each)
        return f"<AsyncDataModule of {sizes} samples: {self._first.spec}>"

    def __str__(self) -> str:
        try:  # Lightning's own __str__ builds every loader and reads it to the end
            return self.describe()
        except (ConfigError, TransformError) as error:
            return f"{type(self).__name__}: {error}"

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn pickle this object. Loaders stay in the process that built them, and so does the
        # Trainer, which has loaders, too; it sets itself again where it uses this object.
        left = ("_loaders", "_described", "_training")
        return {name: value for name, value in vars(self).items() if name not in left} | {"trainer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_loaders()

    # -- loaders ---------------------------------------------------------------------------------------------------

    def _options_of(self, stage: Stage) -> LoaderOptions:
        if stage == "train":
            # For overfit_batches Lightning makes its own loaders sequential, but not ours.
            if self.trainer is not None and self.trainer.overfit_batches > 0:
                return self._options.as_stored()
            unset = self._options.shuffle is None
            return dataclasses.replace(self._options, shuffle="auto") if unset else self._options
        return evaluation_options(stage, self._options, self._overrides[stage])

    def _loaders_of(self, stage: Stage, *, described: bool = False) -> list[AsyncLoader]:
        """New loaders; or those of `describe`, if they fit, since building a loader may read all labels."""
        options, sources, trainer = self._options_of(stage), tuple(self.sources[stage]), self.trainer
        rank = trainer and (trainer.global_rank, trainer.world_size, trainer.num_devices, trainer.strategy.root_device)
        wanted = trainer, rank, options, sources  # a strategy that forks gives the same Trainer another rank
        known, loaders = self._described.pop(stage, (None, []))
        if known != wanted:
            build = functools.partial(self._build_loader, trainer=trainer)
            loaders = [build(source, options, stage, number) for number, source in enumerate(sources)]
        for loader in loaders:
            if self._seed is not None:
                loader._take_seed(self._seed)
        if described:
            self._described[stage] = wanted, loaders
        return loaders

    def _build_loader(
        self, source: Source, options: LoaderOptions, stage: Stage, number: int, **where: Any
    ) -> AsyncLoader:
        if self._statistics and self.normalize is None:
            self.normalize = normalizing(self.sources["train"][0], self.spec, *self._statistics, self.trainer)
            self._transforms["device_transform"] = stage_transforms("device_transform", self.normalize)
        transforms: Any = {name: each[stage] for name, each in self._transforms.items()}
        loader = loader_of(source, options, stage, number, **where, **transforms)
        loader._wiring.resuming.print_line, loader._wiring.logged = print_line, self._logged
        self._loaders.add(loader)
        return loader
