"""`schedule_of`: the order of batches that a source and options make."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from lit_async_data.batch.spec import length_key
from lit_async_data.errors import ConfigError
from lit_async_data.options import Balanced, LoaderOptions
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.by_length import LengthPlan
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import EpochPlan, Order, Schedule
from lit_async_data.order.weights import Weights, class_weights
from lit_async_data.sources.composed.subset import SubsetSource
from lit_async_data.sources.contract.checks import values_of
from lit_async_data.sources.contract.source import Source, layout_of


def schedule_of(
    source: Source,
    options: LoaderOptions,
    rank: int = 0,
    world_size: int = 1,
    *,
    seed: int = 0,
    transform_draws: bool = False,
    alike: bool = False,
) -> Schedule:
    """The endless order of batches. The source's labels, or weights, are read now if samples are drawn by them."""
    shuffle = _shuffle(source, options)
    layout = layout_of(source) if shuffle == "chunk" else source.chunks
    # A partial, not a method of the loader: nothing refers back, so a dropped loader is closed at once.
    kind: type[EpochPlan] = EpochPlan if options.batch_by is None else LengthPlan
    plan = functools.partial(
        kind,
        length=options.epoch_size or len(source),
        weights=_weights(source, options, layout.order if shuffle == "chunk" else None),
        buckets=_buckets(source, options),
        batch_size=options.batch_size,
        shuffle=shuffle,
        runs=layout.runs,
        order=layout.order,
        shuffle_chunks=layout.width(options.shuffle_chunks),
        seed=seed,
        rank=rank,
        world_size=world_size,
        drop_last=options.drop_last,
        alike=alike,
    )
    drawn = options.augment and (layout.random or transform_draws)
    differs = shuffle != "none" or drawn or source.runs_user_code
    return Schedule(plan, shuffled=not alike and differs)


def _weights(source: Source, options: LoaderOptions, order: Indices | None) -> Weights | None:
    """How likely each sample is drawn, in the order given; None where each comes once."""
    if not options.drawn:
        return None
    given = _given_weights(source, options.weights)
    weights = Weights(given, len(source))
    # Checked above in the order of the samples, so that messages name them.
    return weights if order is None else Weights(np.asarray(given)[order], len(source))


def _given_weights(source: Source, given: Any) -> Any:
    if isinstance(given, Balanced):
        return class_weights(values_of(source, given.field, "weights", several=True))
    if isinstance(given, str):
        return values_of(source, given, "weights")
    if isinstance(source, SubsetSource) and np.shape(given) == (len(source.source),) != (len(source),):
        raise ConfigError(
            f"there are {len(source.source)}, one for each sample before the split, and this side has "
            f"{len(source)} samples; give the side's: sides = split(source, …), then weights[sides['train'].samples]",
            "weights",
        )
    return given


def _buckets(source: Source, options: LoaderOptions) -> Buckets | None:
    """Which samples may share a batch; None if any may."""
    if options.batch_by is None:
        return None
    fields = source.spec.fields
    ragged = [key for key, field in fields.items() if field.ragged]
    lengths: Any = options.batch_by
    if isinstance(lengths, str):
        lengths = values_of(source, length_key(lengths) if lengths in ragged else lengths, "batch_by")
    lengths = np.asarray(lengths)
    if len(lengths) != len(source) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise ConfigError(
            f"{lengths.dtype} of shape {lengths.shape} are not the lengths of the {len(source)} samples; "
            "give a whole number for each, or the key of a field of variable length",
            "batch_by",
        )
    for key in ragged:
        if not np.array_equal(values_of(source, length_key(key), "batch_by"), lengths):
            joined, without = fields[key].concat, "" if fields[key].concat else " and padding too, by ragged='concat'"
            raise ConfigError(
                f"samples of {key} have other lengths than these; pad {key} to one length, by Field(…, "
                f"max_length=…){' without ragged' * joined}, or leave batch_by out{without}",
                "batch_by",
            )
    return Buckets.of(lengths, options.batch_size, options.batch_elements, options.buckets, source.ids)


def _shuffle(source: Source, options: LoaderOptions) -> Order:
    shuffle = options.shuffle or ("auto" if options.drawn else "none")
    if shuffle == "auto":
        return "chunk" if source.chunks.rows > 1 else "global"
    assert not isinstance(shuffle, bool)  # `LoaderOptions` has replaced it by a name
    return shuffle
