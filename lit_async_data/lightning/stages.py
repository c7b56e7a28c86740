"""The sources of the stages, with the same classes in all of them; their options, transforms and loaders."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from lit_async_data.batch.spec import BatchSpec, contradict, listed_names
from lit_async_data.batch.transforms import Normalize, first_measured
from lit_async_data.engine.hooks import Function, StageTransform, check_callable
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.loader.statistics import Axis, chosen_fields, statistics
from lit_async_data.errors import ConfigError, FormatError, ManifestError, ResumeError
from lit_async_data.lightning.loops import drive, on_rank_zero, pl, rank_zero_only, steps_wanted
from lit_async_data.lightning.resume import training_steps
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.composed.composed import SubsetSource
from lit_async_data.sources.composed.split import draw_folds, fold_of
from lit_async_data.sources.composed.split import split as split_source
from lit_async_data.sources.contract.checks import check_source, column_clash
from lit_async_data.sources.contract.source import Source, read_all
from lit_async_data.system import ranks_here


def class_names(source: Source) -> dict[str, tuple[str, ...]]:
    return {key: field.classes for key, field in source.spec.fields.items() if field.classes}


def with_classes(source: Source, classes: Mapping[str, Sequence[str]]) -> Source:
    """A copy of a source with the class numbers of these names, if the source found its own classes in text."""
    own, known = class_names(source), source.spec.fields
    changed = {key: names for key, names in classes.items() if key in known and own.get(key) != tuple(names)}
    return source.with_classes(changed) if changed else source


def with_training_classes(stages: Mapping[Any, Sequence[Source]]) -> dict[Any, list[Source]]:
    """The sources of each stage, with the class numbers of the first source: the training source, if there is one."""
    first = next(source for sources in stages.values() for source in sources)
    names = class_names(first)
    renumbered = {stage: [with_classes(source, names) for source in sources] for stage, sources in stages.items()}
    for stage, sources in renumbered.items():
        for source in sources:
            _check_columns(source, first, stage)
    _check_same_classes(renumbered)
    return renumbered


def with_saved_classes(
    stages: Mapping[Any, Sequence[Source]], saved: Mapping[str, list[str]]
) -> dict[Any, list[Source]]:
    try:
        renumbered = {stage: [with_classes(source, saved) for source in sources] for stage, sources in stages.items()}
    except (FormatError, ManifestError) as error:
        raise ResumeError(f"the classes are not those of the checkpoint: {error}", file=error.file) from error
    found = class_names(next(source for sources in renumbered.values() for source in sources))
    for key, names in saved.items():
        if (now := found.get(key)) is not None and list(now) != names:
            what = f"the classes of {key} are {', '.join(now)}, but were {', '.join(names)} in the checkpoint; use the "
            raise ResumeError(f"{what}same files, or give the field classes={names}, in the order of the checkpoint")
    return renumbered


def _check_columns(source: Source, first: Source, stage: Any) -> None:
    """Refuse other columns, and columns that hold classes in one stage's table and numbers in another's."""
    of_text = source.with_classes({}) is not source  # else its class numbers are stored
    own, others = class_names(source), class_names(first)
    for key in source.spec.keys() & first.spec.keys():
        if clash := column_clash(source.spec[key].columns, first.spec[key].columns, first.name):
            raise ConfigError(f"{key!r} of {source.name}: {clash}", stage)
        if of_text and (key in own) != (key in others):
            here, there = ("classes", "numbers") if key in own else ("numbers", "classes")
            what = f"{key} holds {here}, but {there} in the first stage"
            raise ConfigError(f"{what}; set kind: class or kind: number in both", stage)


def _check_same_classes(stages: Mapping[Any, Sequence[Source]]) -> None:
    """Refuse class numbers with different names in two stages. A source may lack names that another source has."""
    known: dict[str, tuple[str, dict[int, str]]] = {}
    for stage, sources in stages.items():
        for source in sources:
            for key, names in ((key, field.named) for key, field in source.spec.fields.items()):
                first, others = known.setdefault(key, (stage, names))
                if contradict(names, others):
                    own, theirs = map(listed_names, (names, others))
                    every = list(dict.fromkeys([*others.values(), *names.values()]))
                    what = f"the classes of {key} are {own}, but those of {first} are {theirs}"
                    cure = f"the same number would mean different classes; give the field of each stage classes={every}"
                    raise ConfigError(f"{what}: {cure}", stage)
                known[key] = max((first, others), (stage, names), key=lambda each: len(each[1]))


def count_classes(source: Source) -> dict[str, int]:
    """The number of class names, or one more than the largest label, of each field with one whole number per sample."""
    counts = {key: len(names) for key, names in class_names(source).items()}
    for key, field in source.spec.fields.items():
        if key not in counts and field.dtype.kind in "iu" and not field.texts and math.prod(field.shape) == 1:
            labels = read_all(source, key)
            if labels.min() >= 0:
                counts[key] = int(labels.max()) + 1
    return counts


Stage = Literal["train", "val", "test", "predict"]
STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")


def split_sources(
    source: Source | None, by_stage: Mapping[str, Any], split: Any, fold: Any, folds: int, **options: Any
) -> tuple[dict[str, Any], str]:
    """The source of each stage, and a line that describes the split, empty without one."""
    conflicting = [stage for stage, each in by_stage.items() if each is not None]
    if conflicting:
        raise ConfigError("cannot be combined with source, split or groups, which set all stages", conflicting[0])
    if source is None:
        raise ConfigError("missing; split and groups only say how to cut it", "source")
    check_source("source", source)
    whole, parts, lines = source, {"train": source}, []
    if split is not None or (options["by"] is not None and fold is None):
        sides = split_source(source, split, **options)
        if unknown := [name for name in sides if name not in STAGES]:
            raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(STAGES)}", "split")
        parts, lines = dict(sides), [sides.described]
        if fold is not None:
            rest = [sides[stage].samples for stage in ("train", "val") if stage in sides]
            whole = SubsetSource(source, np.sort(np.concatenate([np.empty(0, np.int64), *rest])))
    if fold is not None:
        sides = fold_of(whole, draw_folds(whole, folds, "folds", **options), fold)
        parts, lines = parts | sides, [*lines, sides.described]
    unused = [name for name, each in options.items() if each is not None]
    if unused and not lines:
        raise ConfigError("only with split, as in split={'train': 0.8, 'val': 0.2}, or with fold", unused[0])
    return {**by_stage, **parts}, "; of train and val, ".join(line.removeprefix("split ") for line in lines)


def checked_sources(by_stage: Mapping[str, Any]) -> dict[Stage, list[Source]]:
    """The sources of each stage; only evaluation may have several."""
    sources: dict[Stage, list[Source]] = {}
    for stage in STAGES:
        given, several = by_stage[stage], stage != "train"
        is_list = several and isinstance(given, Sequence) and not isinstance(given, str)
        found: list[Any] = list(given) if is_list else [] if given is None else [given]
        sources[stage] = found
        for source in found:
            check_source(stage, source, "a source or a list of sources" if several else "a source")
    if not any(sources.values()):
        raise ConfigError("there is no source; give one of train, val, test, predict, or source with split", "train")
    return sources


# Comparing more samples would take longer than a second.
_MOST_COMPARED = 2**22


@rank_zero_only
def shared_data(sources: Mapping[Any, Sequence[Source]], stage: Stage) -> str:
    """A warning about samples of a stage that read what training reads, too; empty if none does."""
    if sum(map(len, [*sources["train"], *sources[stage]])) > _MOST_COMPARED or not sources[stage]:
        return ""
    read: dict[Any, list[Any]] = {}
    for source in sources["train"]:
        for _, names, *ranges in source.ranges_read(np.arange(len(source))):
            ordered = [*map(np.sort, ranges)]
            for name in names:
                read.setdefault(name, []).append(ordered)
    for source in sources[stage]:
        shared = np.zeros(len(source), bool)
        for own, names, first, end in source.ranges_read(np.arange(len(source))):
            for firsts, ends in {id(each): each for name in names for each in read.get(name, ())}.values():
                shared[own] |= np.searchsorted(firsts, end) > np.searchsorted(ends, first, side="right")
        if shared.any():
            ids = source.ids(np.flatnonzero(shared)[:1])
            place = source.name
            with contextlib.suppress(Exception):  # of a source of the user's own
                place = "{0.file}:{0.group}, row {0.row}".format(source.locate(ids)[0]).replace(":/,", ",")
            what = f"{shared.sum():,} of {len(source):,} samples of {stage} share data with train, such as sample "
            cure = f"split one source, and a second of its files by split(other, {{'train': [...], '{stage}': [...]}}"
            return f"{what}{ids[0]} ({place}); {cure}, by='file')"
    return ""


def evaluation_options(stage: Stage, options: LoaderOptions, overrides: Any) -> LoaderOptions:
    """The options of training without shuffle, with the stage's overrides."""
    where = f"{stage}_loader"
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(f"{overrides!r} is not a mapping of options, as in {{'batch_size': 512}}", where)
    for name in ("weights", "epoch_size", "augment"):
        given = overrides.get(name) if overrides else None
        if given is not None and given is not False:
            raise ConfigError("in training only; evaluation takes each sample once, as it is", f"{where}.{name}")
    evaluated = options.for_evaluation()
    if stage == "predict":  # predictions come in the order of the dataset
        evaluated = dataclasses.replace(evaluated, batch_by=None, batch_elements=None, buckets=LoaderOptions.buckets)
    return evaluated.merged(overrides, f"{where}.")


class StageFunctions(TypedDict, total=False):
    train: Function | None
    val: Function | None
    test: Function | None
    predict: Function | None
    eval: Function | None


# One function for all stages, or a function for each. LightningCLI takes the first type that fits a value: the names of
# stages come first, so that it can tell a mapping of stages from a class with its arguments, and save both.
ByStage = StageFunctions | Function | Mapping[str, Function | None] | None


def stage_transforms(name: str, argument: ByStage) -> dict[str, Function | None]:
    if isinstance(argument, Mapping):
        functions, place, seen = dict[str, Any](argument), name + ".{}", None
    else:
        functions, place, seen = {"train": argument, "eval": argument}, name, list[Any]()
    for key, each in functions.items():
        if key not in (*STAGES, "eval"):
            raise ConfigError(f"{key!r} is not one of {', '.join(STAGES)}, eval", name)
        check_callable(place.format(key), each)
    transforms: dict[str, Function | None] = {}
    for stage in STAGES:
        key = "eval" if stage != "train" and stage not in functions else stage
        function, where = functions.get(key), f"{place.format(key)}, stage {stage}"
        shown = None if stage == "train" else seen
        transforms[stage] = None if function is None else StageTransform(function, where, shown)
    return transforms


def loader_of(
    source: Source, options: LoaderOptions, stage: Stage, number: int, trainer: pl.Trainer | None = None, **given: Any
) -> AsyncLoader:
    """The loader of a stage's source of this number; a Trainer gives it rank and device."""
    given = {"rank": 0, "world_size": 1, **given}
    if trainer is not None:
        given |= {"rank": trainer.global_rank, "world_size": trainer.world_size, "device": trainer.strategy.root_device}
    loader = AsyncLoader(source, options, **given)
    wiring = loader._wiring
    wiring.label = f"{stage}[{number}]" if number else stage
    loader.evaluation = stage != "train"
    if trainer is not None:
        # Where Ray or torchrun starts the ranks, the Trainer may know of one device only.
        loader.local_world_size = max(trainer.num_devices, ranks_here())
        reference = weakref.ref(trainer)
        drive(loader, reference)
        training = functools.partial(training_steps, reference, weakref.ref(loader))
        evaluation = functools.partial(steps_wanted, reference, stage, number)
        wiring.steps_wanted = training if stage == "train" else evaluation
    return loader


def check_statistics(statistics: Any, train: Sequence[Source], device_transform: Any) -> None:
    if statistics not in ("train", None):
        raise ConfigError(f"{statistics!r} is not train, the only stage to normalise by", "statistics")
    if statistics and not train:
        raise ConfigError("there is no source for training (train, or source)", "statistics")
    if statistics and not isinstance(device_transform, Normalize | None):
        what = "it makes a Normalize, and device_transform is another transform; leave one out, or put "
        raise ConfigError(f"{what}Normalize.of(lit_async_data.statistics(source)) into yours", "statistics")


def normalizing(
    source: Source, spec: BatchSpec, given: Any, cache_dir: str | os.PathLike[str] | None, trainer: pl.Trainer | None
) -> Normalize:
    """A `Normalize` of the fields that ``given`` names, or of one field. With a Trainer, all ranks call this."""
    known = {key: source.spec[name] for key, name in chosen_fields(source.spec, None).items()}
    wanted: Normalize = Normalize() if given is None else given
    fields = wanted.fields or first_measured(known)
    names = chosen_fields(source.spec, fields)
    for name in names.values():
        if name in spec and spec[name].dtype != source.spec[name].dtype:
            kinds = f"stored as {source.spec[name].dtype}, but a host transform converts it to {spec[name].dtype}"
            raise ConfigError(f"{name!r} is {kinds}; convert it in device_transform, without statistics", "statistics")
    axis: dict[str, Axis] = {name: wanted.kept(key, source.spec[name]) for key, name in names.items()}
    find = functools.partial(statistics, source, fields, axis=axis, cache_dir=cache_dir)
    # A rank that is not connected to rank 0 yet gets no result from it, and computes its own.
    found = (trainer and on_rank_zero(trainer, find, "statistics")) or find()
    made = copy.copy(wanted)  # of the user's class
    vars(made).update(vars(Normalize.of(found, fields, dtype=wanted.dtype)))
    return made
