"""`Recipe`: what a loader makes batches of, and the fields that come out. All passes over the loader share it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lit_async_data.batch.spec import BatchSpec, length_key
from lit_async_data.engine.hooks.calls import Function
from lit_async_data.engine.hooks.transformation import HostHooks, Outcome, Transformation
from lit_async_data.engine.pipeline.sample_reader import with_own_fields
from lit_async_data.options import LoaderOptions
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import Schedule
from lit_async_data.sources.contract.checks import values_of
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.contract.user_code import Watch, put_back


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The source, options and hooks of a loader. What the hooks return is found when it is first needed."""

    source: Source
    options: LoaderOptions
    hooks: HostHooks
    device_transform: Function | None
    ranks: tuple[int, int]  # the rank, and how many there are
    is_ranked: bool  # whether the user has said how many there are

    @functools.cached_property
    def spec(self) -> BatchSpec:
        """The fields of a batch as it leaves ``batch_transform``."""
        spec = with_own_fields(self.source.spec, self.options)  # before host hooks get the numbers under this key
        return with_own_fields(self.outcome.spec, self.options) if self.hooks else spec

    @functools.cached_property
    def outcome(self) -> Outcome:
        fields = self.source.spec.fields.values()
        by_length = self.options.batch_by is not None or any(field.concat for field in fields)
        return self.hooks.outcome(self.source, self.options, by_length=by_length)

    @functools.cached_property
    def concat(self) -> dict[str, Indices]:
        """The lengths of the samples of each field in which they come one after the other."""
        keys = [key for key, field in self.spec.fields.items() if field.concat]
        return {key: values_of(self.source, length_key(key), "ragged") for key in keys}

    def seed(self, schedule: Schedule) -> int | None:
        """The seed of random numbers; None if none are drawn."""
        return schedule.seed if self.options.augment else None

    def transformation(self, schedule: Schedule, batches: int = 1) -> Transformation | None:
        if not self.hooks:
            return None
        return self.hooks.transformation(
            self.source,
            self.seed(schedule),
            self.outcome,
            batches * schedule.capacity,
            indexed=self.options.return_indices,
            buckets=schedule.buckets,
            concat=self.concat,
        )

    def global_draws(self) -> Sequence[str]:
        """The global random generators that code of the user draws from for the first sample; they are put back."""
        if self.hooks:
            return self.outcome.drawn
        if not self.source.runs_user_code or self.source.chunks.reading != "python":
            return ()
        with put_back() as drawn, contextlib.suppress(Exception):  # an error comes again, with its batch
            read(self.source, np.zeros(1, np.int64))
        return drawn


class Changes:
    """Counts how often attributes of a source, or of transforms, were found changed."""

    def __init__(self, recipe: Recipe) -> None:
        hooks = [hook.function for hook in (recipe.hooks.sample, recipe.hooks.batch) if hook is not None]
        self._source, self._transforms = recipe.source, (*hooks, recipe.device_transform)
        self._watch, self._found = Watch(), 0

    def count(self) -> int:
        """How many there were so far; an error if the samples are others."""
        self._found += bool(self._watch.look(self._transforms))
        return self._source.count_changes() + self._found
