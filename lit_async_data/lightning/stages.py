"""What each stage of training gets: its source, its transform, and how much of it is wanted."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_async_data.device.transform import BatchFunction, EvaluatedAlike, check_callable
from lit_async_data.errors import ConfigError
from lit_async_data.lightning.compat import pl
from lit_async_data.lightning.resume import check_position
from lit_async_data.loader import AsyncLoader
from lit_async_data.options import LoaderOptions
from lit_async_data.prefetch.loader import PrefetchedLoader
from lit_async_data.sources.base import Source
from lit_async_data.sources.places import check_source
from lit_async_data.sources.split import split as split_source

Stage = Literal["train", "val", "test", "predict"]
STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")
# Loaders for which a callback starts the copies.
Driven = AsyncLoader | PrefetchedLoader


def sides_of(
    source: Source | None, fractions: Mapping[str, float] | None, groups: Any, given: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The source of each stage from one for all, and what they hold in one line."""
    both = [stage for stage, each in given.items() if each is not None]
    if both:
        raise ConfigError(f"{both[0]}: not together with source, split or groups, which say what each stage gets")
    if source is None:
        raise ConfigError("source: missing; split and groups say how to cut it")
    check_source("source", source)
    if fractions is None:
        if groups is not None:
            raise ConfigError("groups: only with split, as in split={'train': 0.8, 'val': 0.2}")
        return {**given, "train": source}, ""
    for name in fractions if isinstance(fractions, Mapping) else ():
        if name not in STAGES:
            raise ConfigError(f"split: {name!r} is not one of {', '.join(STAGES)}")
    sides = split_source(source, fractions, groups=groups)
    return {**given, **sides}, sides.described


def sources_of(stage: str, given: Any) -> list[Source]:
    """The sources of a stage; several only in evaluation.

    Raises:
        ConfigError: Something else was given.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str) and stage != "train"
    several = given if listed else [] if given is None else [given]
    for source in several:
        if not isinstance(source, Source):
            raise ConfigError(
                f"{stage}: {source!r} is not a source{'' if stage == 'train' else ' or a list of sources'}; "
                "build one, as in HDF5Source('data.h5') or DatasetSource(dataset)"
            )
    return list(several)


def options_of(stage: Stage, options: LoaderOptions, overrides: Any) -> LoaderOptions:
    """The options of a stage of evaluation: those of training without shuffle, and what differs.

    Raises:
        ConfigError: What differs is no mapping, or wrong, or would have samples drawn.
    """
    where = f"{stage}_loader"
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(f"{where}: {overrides!r} is not a mapping of what differs, as in {{'batch_size': 512}}")
    for name in ("balance", "weights", "epoch_size"):
        if overrides and overrides.get(name) is not None:
            raise ConfigError(f"{where}.{name}: in training only; evaluation takes each sample once")
    return options.for_evaluation().merged(overrides, f"{where}.")


def transforms_of(given: BatchFunction | Mapping[str, BatchFunction | None] | None) -> dict[str, BatchFunction | None]:
    """The transform of each stage; one that is given for all is marked where it serves evaluation.

    Raises:
        ConfigError: One is for a stage that there is not, or cannot be called.
    """
    if not isinstance(given, Mapping):
        check_callable("device_transform", given)
        evaluating = None if given is None else EvaluatedAlike(given)
        return {stage: given if stage == "train" else evaluating for stage in STAGES}
    for stage in given:
        if stage not in (*STAGES, "eval"):
            raise ConfigError(f"device_transform: {stage!r} is not one of {', '.join(STAGES)}, eval")
        check_callable(f"device_transform.{stage}", given[stage])
    return {stage: given.get(stage, given.get("eval") if stage != "train" else None) for stage in STAGES}


def loaders_in(nested: Any) -> list[Driven]:
    """The loaders of this package in whatever lists and mappings Lightning lets people nest loaders in."""
    if isinstance(nested, Mapping | list | tuple):
        inside = nested.values() if isinstance(nested, Mapping) else nested
        return [loader for each in inside for loader in loaders_in(each)]
    return [nested] if isinstance(nested, AsyncLoader | PrefetchedLoader) else []


def steps_wanted(trainer: weakref.ref[pl.Trainer], stage: Stage, number: int) -> tuple[int | None, int | None]:
    """Batches that the Trainer will take of a pass, and of those after it; it knows only when the pass begins.

    Raises:
        ResumeError: It has resumed in the middle of an epoch.
    """
    found = trainer()
    if found is None or found.state.status != "running":
        return None, None
    if stage == "train":
        check_position(found, found.fit_loop.epoch_loop.batch_progress.current.ready)
    limits: Any = {
        "train": lambda: found.num_training_batches,
        "val": lambda: found.num_val_batches[number],
        "test": lambda: found.num_test_batches[number],
        "predict": lambda: found.num_predict_batches[number],
    }
    with contextlib.suppress(IndexError):  # iterated over by hand, with another Trainer attached
        later = _steps(limits[stage]())
        return _steps(found.num_sanity_val_batches[number]) if found.sanity_checking else later, later
    return None, None


def _steps(limit: float) -> int | None:
    return int(limit) if 0 < limit < math.inf else None
