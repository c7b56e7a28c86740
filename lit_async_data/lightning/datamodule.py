"""`AsyncDataModule`: the sources of each stage, as loaders that Lightning's Trainer iterates over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.device.transform import BatchFunction
from lit_async_data.errors import ConfigError, ManifestError, ResumeError, TransferError
from lit_async_data.host.memory import default_budget, readable
from lit_async_data.lightning.classes import adopted, check_alike, count_classes, named, of_training
from lit_async_data.lightning.compat import pl, rank_zero_info
from lit_async_data.lightning.stages import STAGES, Stage, options_of, sides_of, sources_of, steps_wanted, transforms_of
from lit_async_data.lightning.summary import lines
from lit_async_data.loader import AsyncLoader
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.base import Source

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a loader is built from: the same arguments give the same loader."""

    trainer: weakref.ref[pl.Trainer] | None
    source: Source
    options: LoaderOptions
    rank: int = 0
    world_size: int = 1
    device: torch.device | None = None


class AsyncDataModule(pl.LightningDataModule):
    """Sources for training, validation, test and prediction, each read ahead by an `AsyncLoader`.

    Under several ranks each loader reads its own share; the Trainer's device decides where batches go. Loaders are
    closed when the Trainer is done, also after an error. A stage without a source has no loader.

    Args:
        source: One source for several stages, which ``split`` cuts; without it, for training. Not together with
            ``train``, ``val``, ``test`` and ``predict``.
        split: The share of each stage, as in ``{"train": 0.7, "val": 0.15, "test": 0.15}``; see `split`.
        groups: What a split keeps together: ``"file"``, ``"group"``, a dataset of subjects, …; see `split`.
        train: Source for training.
        val: Source for validation, or a list of several.
        test: The same for test.
        predict: The same for prediction.
        loader: `LoaderOptions`, or a mapping of their names. Evaluation uses them without shuffle, and drops nothing.
        val_loader: Options that differ in validation; a value of None inherits.
        test_loader: The same for test.
        predict_loader: The same for prediction.
        device_transform: Called with each batch on its device, on the copying stream; with random numbers if it takes
            them, as in `AsyncLoader`, but with None in evaluation. One callable for all stages, or a mapping over
            ``train``, ``val``, ``test``, ``predict`` and ``eval`` (the last three).

    Attributes:
        sources: The sources of each stage, by its name: ``dm.sources["val"][0].locate(ids)``.

    Raises:
        ConfigError: An option is wrong; the message names it, with the argument it came in. Or the classes of a field
            are not the same in every stage.

    Example:
        >>> import numpy as np
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.zeros((10, 3)), "y": np.arange(10) % 4})
        >>> dm = AsyncDataModule(train=source, loader={"batch_size": 4, "shuffle": "global"})
        >>> len(dm.train_dataloader()), dm.val_dataloader(), dm.num_classes
        (3, [], {'y': 4})
    """

    def __init__(
        self,
        *,
        source: Source | None = None,
        split: Mapping[str, float] | None = None,
        groups: str | npt.ArrayLike | None = None,
        train: Source | None = None,
        val: Source | Sequence[Source] | None = None,
        test: Source | Sequence[Source] | None = None,
        predict: Source | Sequence[Source] | None = None,
        loader: LoaderOptions | Mapping[str, Any] | None = None,
        val_loader: Mapping[str, Any] | None = None,
        test_loader: Mapping[str, Any] | None = None,
        predict_loader: Mapping[str, Any] | None = None,
        device_transform: BatchFunction | Mapping[str, BatchFunction | None] | None = None,
    ) -> None:
        super().__init__()
        #: What each side of a split holds, in one line; empty where there is none.
        self._split = ""
        given: dict[str, Any] = {"train": train, "val": val, "test": test, "predict": predict}
        if source is not None or split is not None or groups is not None:
            given, self._split = sides_of(source, split, groups, given)
        self.sources = of_training({stage: sources_of(stage, given[stage]) for stage in STAGES})
        if not any(self.sources.values()):
            raise ConfigError("train: no source was given for any of train, val, test, predict; or source, and a split")
        check_alike(self.sources)
        if not self.sources["val"]:
            # A DataModule has all four hooks, and Lightning takes this one for a loader that somebody gave.
            warnings.filterwarnings("ignore", "You passed in a `val_dataloader` but have no `validation_step`")
        self._options = LoaderOptions.of(loader, "loader.")
        self._overrides = {"val": val_loader, "test": test_loader, "predict": predict_loader}
        for stage in STAGES:
            self._options_of(stage)  # wrong ones are an error now, not at the first validation
        self._transforms = transforms_of(device_transform)
        self._loaders: weakref.WeakSet[AsyncLoader] = weakref.WeakSet()
        # Those that were described and not handed out yet, with what they were built of.
        self._described: dict[Stage, list[tuple[Arguments, AsyncLoader]]] = {}

    # -- what Lightning asks ---------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Say what will happen, on rank 0."""
        # Lightning warns of every stage without data, which is no mistake here.
        warnings.filterwarnings("ignore", "Total length of `(list|CombinedLoader)` across ranks is zero")
        stages = {"fit": STAGES[:2], "validate": ("val",), "test": ("test",), "predict": ("predict",)}[stage]
        rank_zero_info(self.describe(stages))

    def train_dataloader(self) -> AsyncLoader | list[AsyncLoader]:
        """The loader of the training source; ``[]`` without one. The same for the other stages."""
        loaders = self._handed_out("train")
        return loaders[0] if loaders else []

    def val_dataloader(self) -> list[AsyncLoader]:
        """One loader for each source."""
        return self._handed_out("val")

    def test_dataloader(self) -> list[AsyncLoader]:
        """One loader for each source."""
        return self._handed_out("test")

    def predict_dataloader(self) -> list[AsyncLoader]:
        """One loader for each source."""
        return self._handed_out("predict")

    def teardown(self, stage: str) -> None:  # noqa: ARG002  # Lightning passes it by name
        """Close the loaders and the sources' files; both open again when they are needed."""
        self.close()

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002  # the signature is Lightning's
        """Close; Lightning calls `teardown` only where nothing went wrong."""
        try:
            self.close()
        except TransferError as error:  # raised here, it would hide the other one
            log.error("%s", error)  # noqa: TRY400  # where it was found says nothing

    def close(self) -> None:
        """Close every loader and every source. Twice is fine.

        Raises:
            TransferError: As `AsyncLoader.close`; all are closed all the same.
        """
        self._described.clear()
        with contextlib.ExitStack() as closing:
            for source in (source for sources in self.sources.values() for source in sources):
                closing.callback(source.close)
            for loader in list(self._loaders):
                closing.callback(loader.close)

    # -- what people ask -------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples per batch and device, at most all.

        Lightning's batch-size finder sets it, and loaders built later use it.
        """
        return self._options.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        # The finder doubles until memory is full or the data are; it cannot see how many there are here.
        most = max(map(len, self.sources["train"]), default=size)
        self._options = dataclasses.replace(self._options, batch_size=min(size, most))

    @property
    def spec(self) -> BatchSpec:
        """The fields of a batch: those of the first source there is."""
        return self._first.spec

    @property
    def _first(self) -> Source:
        return next(source for sources in self.sources.values() for source in sources)

    @functools.cached_property
    def num_classes(self) -> dict[str, int]:
        """How many classes each field of one whole number per sample has.

        Those that `classes` names; else, if no value is negative, one more than the largest, which is read once, over
        all stages: a rare class may be in validation only.
        """
        found: dict[str, int] = {}
        for each in (count_classes(source) for sources in self.sources.values() for source in sources):
            found |= {key: max(count, found.get(key, 0)) for key, count in each.items()}
        return found

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the values 0, 1, 2, … of each field that has any; saved in checkpoints."""
        return named(self._first)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the classes."""
        return {"classes": {key: list(names) for key, names in self.classes.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make sure that classes are those of the checkpoint: with others, the model's outputs mean other things.

        Classes that were found in a table get the numbers that they have in the checkpoint.

        Raises:
            ResumeError: They are not; names both, or the row with an unknown class.
        """
        try:
            saved = state_dict.get("classes", {})
            self.sources = {
                stage: [adopted(source, saved) for source in sources] for stage, sources in self.sources.items()
            }
            vars(self).pop("num_classes", None)
        except ManifestError as error:
            raise ResumeError(f"the classes are not those of the checkpoint: {error}", file=error.file) from error
        for key, names in state_dict.get("classes", {}).items():
            now = self.classes.get(key)
            if now is not None and list(now) != names:
                raise ResumeError(
                    f"the classes of {key} are {', '.join(now)}, but were {', '.join(names)} in the checkpoint; give "
                    f"the same files, or the same names in the same order: Field(classes={names})"
                )

    def describe(self, stages: Sequence[str] = STAGES) -> str:
        """What will be read and how, in lines for people."""
        said, total = [], 0
        for stage in STAGES:
            if stage not in stages:
                continue
            self._described[stage] = self._built(stage)
            for _, loader in self._described[stage]:
                total += loader.footprint.budget.total
                said += [f"{stage if line == 0 else '':<8}{text}" for line, text in enumerate(lines(loader))]
        if not said:
            return f"no data for {', '.join(stages)}"
        said_of = self._split.removeprefix("split ")
        split = [f"{'split':<8}{said_of}"] if said_of and "train" in stages else []
        return "\n".join([*split, *said, f"{'memory':<8}{readable(total)} in all"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{stage} {sum(map(len, given)):,}" for stage, given in self.sources.items() if given)
        return f"<AsyncDataModule of {sizes} samples: {self.spec}>"

    def __str__(self) -> str:
        # Lightning's own builds every loader and reads it to the end.
        try:
            return self.describe()
        except ConfigError as error:
            return f"{type(self).__name__}: {error}"

    def __getstate__(self) -> dict[str, Any]:
        # For strategies that spawn: loaders stay in the process that built them.
        return {name: value for name, value in vars(self).items() if name not in ("_loaders", "_described")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _loaders=weakref.WeakSet(), _described={})

    # -- loaders ---------------------------------------------------------------------------------------------------

    def _options_of(self, stage: Stage) -> LoaderOptions:
        if stage == "train":
            # Lightning makes the order of its own loaders fixed here, and knows nothing of ours.
            trainer: Any = self.trainer  # Any, since Lightning sets the attribute where no type checker sees it
            overfit = trainer is not None and trainer.overfit_batches > 0
            return self._options.as_stored() if overfit else self._options
        return options_of(stage, self._options, self._overrides[stage])

    def _handed_out(self, stage: Stage) -> list[AsyncLoader]:
        """The loaders of a stage: those that were described, once, or new ones."""
        loaders = self._built(stage)
        self._described.pop(stage, None)
        return [loader for _, loader in loaders]

    def _built(self, stage: Stage) -> list[tuple[Arguments, AsyncLoader]]:
        # Building a loader may read all labels, where samples are drawn by them: those that were described serve.
        wanted = [self._arguments(stage, source) for source in self.sources[stage]]
        known = self._described.get(stage, [])
        if [arguments for arguments, _ in known] == wanted:
            return known
        return [(arguments, self._loader(stage, arguments, number)) for number, arguments in enumerate(wanted)]

    def _arguments(self, stage: Stage, source: Source) -> Arguments:
        trainer, options = self.trainer, self._options_of(stage)
        if trainer is None:
            return Arguments(None, source, options)
        if options.memory_budget is None:
            options = dataclasses.replace(options, memory_budget=default_budget(trainer.num_devices))
        device = trainer.strategy.root_device
        return Arguments(weakref.ref(trainer), source, options, trainer.global_rank, trainer.world_size, device)

    def _loader(self, stage: Stage, given: Arguments, number: int) -> AsyncLoader:
        loader = AsyncLoader(
            given.source,
            given.options,
            rank=given.rank,
            world_size=given.world_size,
            device=given.device,
            device_transform=self._transforms.get(stage),
        )
        if given.trainer is not None:
            loader.steps_wanted = functools.partial(steps_wanted, given.trainer, stage, number)
        self._loaders.add(loader)
        return loader
