"""`ConcatSource`: several sources as one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, longest_of
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.composed.composed import ComposedSource, Positions
from lit_async_data.sources.contract.checks import check_same, check_source
from lit_async_data.sources.contract.places import Location, Part, Places, starts
from lit_async_data.sources.contract.source import (
    Source,
    check_range,
    grouped_by_path,
    layout_of,
    places_of,
    whole_numbers,
)
from lit_async_data.sources.contract.storage_layout import StorageLayout, slowest


class ConcatSource(ComposedSource):
    """Several sources as one: the samples of the first, then those of the second, and so on.

    Sample numbers count through all sources, also in `locate`. Thread-safe if all sources are.

    Args:
        sources: At least one; all with the same keys, shapes, dtypes and classes, but samples of variable length may
            be longer in one than in another, and text that is no class is numbered anew. `close` closes them.

    Attributes:
        sources: The sources, or those with text numbered alike, as a tuple.

    Raises:
        ConfigError: ``sources`` is empty or holds something that is not a source.
        FormatError: The fields of two sources differ; names both sources and the field.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> both = ConcatSource([ArraySource({"y": np.arange(3)}), ArraySource({"y": np.arange(5)})])
        >>> len(both), both, both.locate([4])[0].row
        (8, <ConcatSource of 8 samples from ArraySource and 1 more: y int64; read under a lock>, 1)
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = self.inside = tuple(sources)
        if not self.sources:
            raise ConfigError("empty; give at least one source", "sources")
        for source in self.sources:
            check_source("sources", source)
        self.sources = self.inside = _numbered_alike(self.sources)
        for number in range(1, len(self.sources)):
            check_same(self.sources, number)
        self._spec = longest_of([source.spec for source in self.sources])
        self._starts = starts([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    @property
    def name(self) -> str:
        first, *others = self.sources
        return first.name + (f" and {len(others)} more" if others else "")

    @property
    def chunks(self) -> StorageLayout:
        """The chunks of all sources; ``reading`` is that of the most expensive one."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._together([source.chunks for source in self.sources])

    def layout(self) -> StorageLayout:
        return self._together([layout_of(source) for source in self.sources])

    def _together(self, layouts: Sequence[StorageLayout]) -> StorageLayout:
        runs = [
            run
            for source, layout in zip(self.sources, layouts, strict=True)
            for run in layout.runs or (ChunkRun(len(source), 1),)
        ]
        return StorageLayout(
            tuple(runs) if any(layout.runs for layout in layouts) else (),
            compressed=any(layout.compressed for layout in layouts),
            reading=slowest(layout.reading for layout in layouts),
            spread=max(layout.spread for layout in layouts),
            chunks_per_run=max(layout.chunks_per_run for layout in layouts),
            largest=all(layout.largest for layout in layouts),
            order=self._order(layouts),
            overlap=max(layout.overlap for layout in layouts),
            random=any(layout.random for layout in layouts),
            ahead=any(layout.ahead for layout in layouts),
            left_out=", ".join(dict.fromkeys(layout.left_out for layout in layouts if layout.left_out)),
        )

    def _order(self, layouts: Sequence[StorageLayout]) -> Indices | None:
        if all(layout.order is None for layout in layouts):
            return None
        own = (
            np.arange(len(source)) if layout.order is None else layout.order
            for source, layout in zip(self.sources, layouts, strict=True)
        )
        return np.concatenate([order + first for order, first in zip(own, self._starts.tolist(), strict=False)])

    def _routed(self, samples: Indices) -> Iterator[tuple[int, Positions, Indices]]:
        check_range(samples, self)
        which = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(which).tolist():
            positions = np.flatnonzero(which == number)
            first, end = int(positions[0]), int(positions[-1]) + 1
            consecutive = slice(first, end) if end - first == positions.size else None
            numbers = samples[positions] - self._starts[number]
            yield number, positions if consecutive is None else consecutive, numbers

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        try:
            super()._read_of(number, numbers, out, keys)
        except AsyncDataError as error:
            if error.sample_id is not None:
                # The id counts in that source (or the source behind it); find the sample that has it there.
                matching = numbers[self.sources[number].ids(numbers) == error.sample_id]
                error.sample_id = int(matching[0] + self._starts[number]) if matching.size else None
            raise

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        changed = [source.with_classes(classes) for source in self.sources]
        same = all(new is old for new, old in zip(changed, self.sources, strict=True))
        return self if same else type(self)(changed)

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Find where samples are stored.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        samples = whole_numbers(ids, self)
        locations: dict[int, Location] = {}
        for number, positions, numbers in self._routed(samples):
            source = self.sources[number]
            locations.update(zip(samples[positions].tolist(), source.locate(source.ids(numbers)), strict=True))
        return [locations[sample] for sample in samples.tolist()]

    # -- how samples belong together ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for number, source in enumerate(self.sources) for part in _with_names(source.parts, number))

    def column(self, name: str) -> npt.NDArray[Any]:
        columns = [source.column(name) for source in self.sources]
        numeric = [column.dtype.kind in "biufc" for column in columns]
        if len(set(numeric)) > 1:
            text, number = (self.sources[numeric.index(kind)].name for kind in (False, True))
            raise FormatError(
                f"column {name!r} holds numbers in {number}, but text in {text}; store it as one type in all sources",
                dataset=name,
            )
        return np.concatenate(columns)

    def places(self) -> Places:
        several = [places_of(source) for source in self.sources]
        return Places.joined(
            dataclasses.replace(places, parts=_with_names(places.parts, number))
            for number, places in enumerate(several)
        )

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
        numbers: dict[str, int] = {}
        codes = []
        for source in self.sources:
            grouped = grouped_by_path(source, naming)
            if grouped is None:
                return None
            own = np.array([numbers.setdefault(name, len(numbers)) for name in grouped[1]], np.int64)
            codes.append(own[grouped[0]])
        return np.concatenate(codes), list(numbers)


def _numbered_alike(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources with their texts numbered alike; numbers of classes must agree already."""
    every = [source.spec.fields for source in sources]
    lists = {key: {fields[key].texts for fields in every if key in fields} for key in every[0]}
    common = {key: sorted({*itertools.chain(*texts)}) for key, texts in lists.items() if len(texts) > 1}
    return tuple(source.with_classes(common) for source in sources) if common else sources


def _with_names(parts: Iterable[Part], number: int) -> tuple[Part, ...]:
    return tuple(part if part.name else part._replace(name=f"sources[{number}]") for part in parts)
