"""`Recipe`: the source, options and transforms of a loader, and the fields of its batches; all passes share it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_async_data.batch.spec import MASK, BatchSpec, FieldSpec, length_key, most_elements, offsets_key
from lit_async_data.engine.hooks import INDEX, Function, HookCalls, HostHooks, Outcome, Transformation
from lit_async_data.engine.pipeline.sample_reader import BATCH_KEYS
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.options import Balanced, LoaderOptions
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.decks import Decks, Mixture, Order
from lit_async_data.order.epoch_cursor import EpochCursor
from lit_async_data.order.permutation import Indices, derived_key
from lit_async_data.order.plan import BatchIndex, EpochPlan, LengthPlan, Schedule
from lit_async_data.order.weights import Weights, class_weights
from lit_async_data.sources.composed.composed import MixtureSource, SubsetSource, check_whole
from lit_async_data.sources.contract.checks import values_of
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.contract.user_code import Watch, put_back


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The fields that hooks return are found when they are first needed."""

    source: Source
    options: LoaderOptions
    hooks: HostHooks
    device_transform: Function | None
    ranks: tuple[int, int]  # the rank, and the number of ranks
    is_ranked: bool  # whether the user has given the number of ranks

    @functools.cached_property
    def spec(self) -> BatchSpec:
        """The fields of a batch as it leaves ``batch_transform``."""
        for key, field in {}.items() if self.hooks else self.source.spec.items():
            if not field.fits_tensor:
                raise FormatError(f"{self.source.name}: {key}: {field.dtype!r} is no dtype of tensors; change its spec")
        spec = with_own_fields(self.source.spec, self.options)  # before host hooks get the numbers under this key
        return with_own_fields(self.outcome.spec, self.options) if self.hooks else spec

    @functools.cached_property
    def outcome(self) -> Outcome:
        by_length = self.options.batch_by is not None or any(field.concat for field in self.source.spec.fields.values())
        return self.hooks.outcome(self.source, self.options, by_length=by_length)

    @functools.cached_property
    def concat(self) -> dict[str, Indices]:
        """The lengths of concatenated samples, by field."""
        keys = [key for key, field in self.spec.fields.items() if field.concat]
        return {key: values_of(self.source, length_key(key), "ragged") for key in keys}

    def seed(self, schedule: Schedule) -> int | None:
        return schedule.seed if self.options.augment else None

    def transformation(self, schedule: Schedule, batches: int = 1) -> Transformation | None:
        """Takes at most ``batches`` at once; fewer if padded samples would take more elements than these can have."""
        source, hooks, capacity = self.source, self.hooks, batches * schedule.capacity
        if not hooks:
            return None
        if hooks.batch is None and schedule.buckets is None:
            fits = [most_elements(of, capacity)[0] // source.spec[key].shape[0] for key, of in self.concat.items()]
            capacity = max(min([capacity, *fits]), 1)
        seed, indexed = self.seed(schedule), self.options.return_indices
        calls = HookCalls(source, hooks.sample, hooks.batch, seed, indexed=indexed)
        return Transformation(calls, self.outcome, capacity, schedule.buckets, hooks.lock)

    def global_draws(self) -> Sequence[str]:
        """The global random generators from which code of the user draws for the first sample; restores them."""
        if self.hooks:
            return self.outcome.drawn
        if not self.source.runs_user_code or self.source.chunks.reading != "python":
            return ()
        with put_back() as drawn, contextlib.suppress(Exception):  # an error comes again, with its batch
            read(self.source, np.zeros(1, np.int64))
        return drawn


class Changes:
    def __init__(self, recipe: Recipe) -> None:
        hooks = [hook.function for hook in (recipe.hooks.sample, recipe.hooks.batch) if hook is not None]
        self._source, self._transforms = recipe.source, (*hooks, recipe.device_transform)
        self._watch, self._seen = Watch(), 0

    def found(self) -> bool:
        """Whether the source or a transform has changed since the last call; an error if the samples are others."""
        changed, before = self._watch.look(self._transforms), self._seen
        self._seen = self._source.count_changes()
        return bool(changed) or self._seen != before


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
    """The endless order of batches. Reads the labels or weights of the source if samples are drawn by them."""
    decks = _decks(source, options, seed=seed, alike=alike)
    # A partial, not a method of the loader: nothing refers back, so a dropped loader is closed at once.
    plan = functools.partial(
        EpochPlan if decks.buckets is None else LengthPlan,
        decks=decks,
        batch_size=options.batch_size,
        rank=rank,
        world_size=world_size,
        drop_last=options.drop_last,
        repeats=options.drawn or source.repeats,
    )
    drawn = options.augment and (source.chunks.random or transform_draws)
    differs = decks.shuffle != "none" or drawn or source.runs_user_code
    return Schedule(plan, shuffled=not alike and differs)


def _decks(source: Source, options: LoaderOptions, *, seed: int, alike: bool) -> Decks:
    shuffle = _shuffle(source, options)
    if isinstance(source, MixtureSource):
        for name in ("weights", "batch_by"):
            if getattr(options, name) is not None:
                check_whole(name, source)
        mixture = Mixture(source.shares, options.batch_size)
        return Decks(
            length=_epoch_of(source, mixture),
            shuffle=shuffle,
            seed=seed,
            shuffle_chunks=options.shuffle_chunks,
            mixture=mixture,
            sources=tuple(_decks(each, options, seed=seed, alike=alike) for each in source.sources),
            alike=alike,
        )
    layout = source.layout() if shuffle == "chunk" else source.chunks
    return Decks(
        length=options.epoch_size or len(source),
        shuffle=shuffle,
        seed=seed,
        runs=layout.runs,
        order=layout.order,
        shuffle_chunks=layout.width(options.shuffle_chunks),
        weights=_weights(source, options, layout.order if shuffle == "chunk" else None),
        buckets=_buckets(source, options),
        alike=alike,
    )


def _epoch_of(source: MixtureSource, mixture: Mixture) -> int:
    """The samples of an epoch; an error if a source has none of them."""
    lengths = [mixture.length_with(number, len(source.sources[number])) for number in source.ending]
    length = source.epoch if isinstance(source.epoch, int) else max(lengths)
    least = int(np.argmin(source.shares))
    if not mixture.counts(length)[least]:
        what = f"{source.names[least]} has share {source.shares[least]:.3g}, too little for one sample in"
        raise ConfigError(f"{what} an epoch of {length:,} samples; raise the share, or epoch", "sources")
    return length


def _weights(source: Source, options: LoaderOptions, order: Indices | None) -> Weights | None:
    """The weight of each sample, in the given order; None if each comes once."""
    if not options.drawn:
        return None
    given = _given_weights(source, options.weights)
    weights = Weights(given, len(source))
    # The first `Weights` checks them in the order of the samples, which messages name.
    return weights if order is None else Weights(np.asarray(given)[order], len(source))


def _given_weights(source: Source, given: Any) -> Any:
    if isinstance(given, Balanced):
        return class_weights(values_of(source, given.field, "weights", several=True))
    if isinstance(given, str):
        return values_of(source, given, "weights")
    if isinstance(source, SubsetSource) and np.shape(given) == (len(source.source),) != (len(source),):
        what = f"there are {len(source.source)}, one for each sample before the split, and this side has {len(source)}"
        ways = "give the side's: sides = split(source, …), then weights[sides['train'].samples]"
        raise ConfigError(f"{what} samples; {ways}", "weights")
    return given


def _buckets(source: Source, options: LoaderOptions) -> Buckets | None:
    if options.batch_by is None:
        return None
    fields = source.spec.fields
    ragged = [key for key, field in fields.items() if field.ragged]
    lengths: Any = options.batch_by
    if isinstance(lengths, str):
        lengths = values_of(source, length_key(lengths) if lengths in ragged else lengths, "batch_by")
    lengths = np.asarray(lengths)
    if len(lengths) != len(source) or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        what = f"{lengths.dtype} of shape {lengths.shape} are not the lengths of the {len(source)} samples"
        ways = "give a whole number for each, or the key of a field of variable length"
        raise ConfigError(f"{what}; {ways}", "batch_by")
    for key in ragged:
        if not np.array_equal(values_of(source, length_key(key), "batch_by"), lengths):
            joined, without = fields[key].concat, "" if fields[key].concat else " and padding too, by ragged='concat'"
            ways = f"by Field(…, max_length=…){' without ragged' * joined}, or leave batch_by out{without}"
            what = f"samples of {key} have other lengths than these; pad {key} to one length, {ways}"
            raise ConfigError(what, "batch_by")
    return Buckets.of(lengths, options.batch_size, options.batch_elements, options.buckets, source.ids)


def _shuffle(source: Source, options: LoaderOptions) -> Order:
    shuffle = options.shuffle or ("auto" if options.drawn else "none")
    if shuffle == "auto":
        chunks = source.chunks
        return "chunk" if chunks.rows > 1 or (chunks.remote and chunks.runs) else "global"
    assert not isinstance(shuffle, bool)  # `LoaderOptions` has replaced it by a name
    return shuffle


def with_own_fields(spec: BatchSpec, options: LoaderOptions) -> BatchSpec:
    """A spec with the fields that the loader adds; a `ConfigError` if it has a field of such a name."""
    concat = [key for key, field in spec.fields.items() if field.concat]
    if concat and options.pad_last:
        raise ConfigError(f"with ragged='concat', batches of {concat[0]} differ in shape; leave it out", "pad_last")
    added: dict[str, tuple[str, type]] = {offsets_key(key): ("ragged", np.int64) for key in concat}
    added |= {MASK: ("pad_last", np.bool_)} if options.pad_last else {}
    added |= {INDEX: ("return_indices", np.int64)} if options.return_indices else {}
    for key, (option, dtype) in added.items():
        if key in spec.fields:
            raise ConfigError(f"the source has a field {key!r} of its own; give that field another key", option)
        spec = BatchSpec({**spec, key: FieldSpec((), np.dtype(dtype))}, as_mapping=spec.as_mapping)
    return spec


def batch_seed(source: Source, cursor: EpochCursor, seed: int, key: BatchIndex) -> int:
    """The seed of a batch by its first sample, independent of rank and step."""
    keyed, _ = cursor.schedule.plan(key.epoch).stretch(key.step, 1)
    return derived_key(seed, key.epoch, BATCH_KEYS, int(keyed[:1].keys(source.ids)[0]))
