"""From a source and options to the order of batches."""

from __future__ import annotations

import functools

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.options import LoaderOptions
from lit_async_data.plan import EpochPlan, Order, Schedule
from lit_async_data.sources.base import Source, values_of
from lit_async_data.sources.subset import SubsetSource
from lit_async_data.weights import Weights, class_weights


def schedule_of(source: Source, options: LoaderOptions, rank: int = 0, world_size: int = 1) -> Schedule:
    """The endless order of batches.

    Args:
        source: Where samples come from. Its labels, or weights, are read now if samples are drawn by them.
        options: Of the loader.
        rank: This process, of ``world_size``.
        world_size: Processes that share each step.

    Raises:
        ConfigError: Options do not fit the source.
    """
    # A partial and not a method of the loader: a loader that is dropped is closed at once, since nothing refers back.
    plan = functools.partial(
        EpochPlan,
        length=options.epoch_size or len(source),
        weights=_weights(source, options),
        batch_size=options.batch_size,
        shuffle=_shuffle(source, options),
        runs=source.chunks.runs,
        shuffle_chunks=source.chunks.width(options.shuffle_chunks),
        seed=options.seed,
        rank=rank,
        world_size=world_size,
        drop_last=options.drop_last,
    )
    return Schedule(plan, shuffled=options.shuffle != "none")


def _weights(source: Source, options: LoaderOptions) -> Weights | None:
    """How likely each sample is drawn, read once; None where each comes once."""
    if options.balance is not None:
        return Weights(class_weights(values_of(source, options.balance, "balance")), len(source))
    if options.weights is None:
        return None
    given = options.weights
    if isinstance(given, str):
        return Weights(values_of(source, given, "weights"), len(source))
    if isinstance(source, SubsetSource) and np.shape(given) == (len(source.source),) != (len(source),):
        raise ConfigError(
            f"weights: there are {len(source.source)} for the whole of which this source has {len(source)} samples; "
            "give those of the side: sides = split(source, …), then weights[sides['train'].samples]"
        )
    return Weights(given, len(source))


def _shuffle(source: Source, options: LoaderOptions) -> Order:
    if options.shuffle == "auto":
        return "chunk" if source.chunks.rows > 1 else "global"
    assert not isinstance(options.shuffle, bool)  # `LoaderOptions` has made a name of it
    return options.shuffle
