"""`ConcatSource`: several sources as one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.base import (
    CachingSource,
    FetchingSource,
    Location,
    Part,
    RandomizedSource,
    Source,
    StorageLayout,
    Turn,
    ids_of,
    is_random,
    layout_of,
    shown,
    slowest,
)
from lit_async_data.sources.places import (
    Places,
    check_range,
    check_same,
    check_source,
    column_of,
    name_of,
    overlap_of,
    parts_of,
    places_of,
    starts,
    whole_numbers,
)
from lit_async_data.sources.reservations import reserved


class ConcatSource:
    """Several sources as one: the samples of the first, then those of the second, and so on.

    Sample numbers count through all sources, also in `locate`. Thread-safe if all sources are.

    Args:
        sources: At least one; all with the same keys, shapes and dtypes. `close` closes them.

    Attributes:
        sources: The sources, as a tuple.

    Raises:
        ConfigError: ``sources`` is empty or holds something that is not a source.
        FormatError: The fields of two sources differ; names both sources and the field.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> both = ConcatSource([ArraySource({"y": np.arange(3)}), ArraySource({"y": np.arange(5)})])
        >>> len(both), both, both.locate([4])[0].row
        (8, <ConcatSource of 8 samples from ArraySource and 1 more: y int64>, 1)
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        if not self.sources:
            raise ConfigError("sources: empty; give at least one source")
        for source in self.sources:
            check_source("sources", source)
        for number in range(1, len(self.sources)):
            check_same(self.sources, number)
        self._caching = [source if isinstance(source, CachingSource) else None for source in self.sources]
        self._starts = starts([len(source) for source in self.sources])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_chunks"}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return shown(self, self.name)

    @property
    def name(self) -> str:
        """The first source and the number of others, for messages."""
        first, *others = self.sources
        return name_of(first) + (f" and {len(others)} more" if others else "")

    @property
    def spec(self) -> BatchSpec:
        """The fields, which all sources share."""
        return self.sources[0].spec

    @property
    def chunks(self) -> StorageLayout:
        """The chunks of all sources; ``reading`` is that of the most expensive one."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._together([source.chunks for source in self.sources])

    def layout(self) -> StorageLayout:
        """As `chunks`, but sources may examine every sample; see `layout_of`."""
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
        )

    def _order(self, layouts: Sequence[StorageLayout]) -> Indices | None:
        if all(layout.order is None for layout in layouts):
            return None
        own = (
            np.arange(len(source)) if layout.order is None else layout.order
            for source, layout in zip(self.sources, layouts, strict=True)
        )
        return np.concatenate([order + first for order, first in zip(own, self._starts.tolist(), strict=False)])

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays; see `Source.read_into`.

        Raises:
            IndexError: A sample is not in ``range(len(self))``.
        """
        self._read(samples, out, None)

    @property
    def is_random(self) -> bool:
        """Whether any source reads a random part of each sample; see `RandomizedSource`."""
        return any(map(is_random, self.sources))

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples; the keys select the part where a source is random. See `RandomizedSource`."""
        self._read(samples, out, keys)

    def _read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        for number, where in self._by_source(samples):
            numbers = samples[where] - self._starts[number]
            # Consecutive samples are read straight into `out`; scattered ones are read first and then copied.
            consecutive = isinstance(where, slice)
            pieces = {
                key: array[where] if consecutive else np.empty((len(numbers), *array.shape[1:]), array.dtype)
                for key, array in out.items()
            }
            self._read_of(number, numbers, pieces, None if keys is None else keys[where])
            if not consecutive:
                for key, piece in pieces.items():
                    out[key][where] = piece

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        source = self.sources[number]
        try:
            if keys is not None and isinstance(source, RandomizedSource) and source.is_random:
                source.read_random(numbers, out, keys)
            else:
                source.read_into(numbers, out)
        except AsyncDataError as error:
            if error.sample_id is not None:
                # The id counts in that source (or the source behind it); find the sample that has it there.
                matching = numbers[ids_of(source, numbers) == error.sample_id]
                error.sample_id = int(matching[0] + self._starts[number]) if matching.size else None
            raise

    def _by_source(self, samples: Indices) -> Iterator[tuple[int, slice | Indices]]:
        """Each source that has some of these samples, and their positions: a slice if consecutive."""
        check_range(samples, self)
        which = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(which).tolist():
            where = np.flatnonzero(which == number)
            first, end = int(where[0]), int(where[-1]) + 1
            yield number, slice(first, end) if end - first == where.size else where

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same samples, with text labels of tables encoded by other classes; see `ManifestSource.with_classes`."""
        changes = (getattr(source, "with_classes", None) for source in self.sources)
        return type(self)(
            [
                source if change is None else change(classes)
                for source, change in zip(self.sources, changes, strict=True)
            ]
        )

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Find where samples are stored.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        samples = whole_numbers(ids, self)
        locations: dict[int, Location] = {}
        for number, where in self._by_source(samples):
            source, numbers = self.sources[number], samples[where] - self._starts[number]
            locations.update(zip(samples[where].tolist(), source.locate(ids_of(source, numbers)), strict=True))
        return [locations[sample] for sample in samples.tolist()]

    def close(self) -> None:
        """Close all sources; reading opens them again."""
        with contextlib.ExitStack() as stack:  # closes the others even if one raises
            for source in self.sources:
                stack.callback(source.close)

    # -- how samples belong together ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all sources; a source without parts is one part."""
        return tuple(
            part for number, source in enumerate(self.sources) for part in _with_names(parts_of(source), number)
        )

    @property
    def overlap(self) -> int:
        """The largest overlap of all sources."""
        return max(map(overlap_of, self.sources))

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample; see `PartedSource.column`.

        Raises:
            FormatError: It holds text in some of the sources and numbers in others.
        """
        columns = [column_of(source, name) for source in self.sources]
        numeric = [column.dtype.kind in "biufc" for column in columns]
        if len(set(numeric)) > 1:
            text, number = (name_of(self.sources[numeric.index(kind)]) for kind in (False, True))
            raise FormatError(
                f"column {name!r} holds numbers in {number}, but text in {text}; store it as one type in all sources",
                dataset=name,
            )
        return np.concatenate(columns)

    def places(self) -> Places:
        """Part and row of each sample, in the parts of all sources."""
        several = [places_of(source) for source in self.sources]
        return Places.joined(
            dataclasses.replace(places, parts=_with_names(places.parts, number))
            for number, places in enumerate(several)
        )

    # -- `CachingSource` and `FetchingSource`, for the sources that are one ------------------------------------------

    @property
    def _caching_sources(self) -> list[CachingSource]:
        return [source for source in self._caching if source is not None]

    @property
    def _fetching_sources(self) -> list[FetchingSource]:
        return [source for source in self._caching_sources if isinstance(source, FetchingSource)]

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Prepare samples that will be read soon; see `CachingSource.prepare`."""
        useful = False
        for number, where in self._by_source(samples):
            if (source := self._caching[number]) is not None:
                useful |= source.prepare(samples[where] - self._starts[number], decode=decode)
        return useful

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that stay in memory, for ``chunks`` chunks in each source."""
        return sum(source.decoded_bytes(chunks) for source in self._caching_sources)

    @property
    def decode_bytes(self) -> int:
        """Bytes that a thread needs to decode the largest chunk of any source."""
        return max((source.decode_bytes for source in self._caching_sources), default=0)

    @property
    def decodable_bytes(self) -> int:
        """Bytes of all data that must be decoded."""
        return sum(source.decodable_bytes for source in self._caching_sources)

    def file_bytes(self) -> int:
        """Bytes of the files of one sample, in the source with the largest; see `FetchingSource.file_bytes`."""
        return max((source.file_bytes() for source in self._fetching_sources), default=0)

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow reading ahead; the sources share ``nbytes`` in proportion to the bytes of their files."""
        sizes = [source.file_bytes() * len(source) for source in self._fetching_sources]
        return reserved(
            functools.partial(source.read_ahead, nbytes * size // max(sum(sizes), 1))
            for source, size in zip(self._fetching_sources, sizes, strict=True)
        )

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Reserve memory for decoded chunks; the sources share the cache in proportion to their decodable bytes."""
        total = max(self.decodable_bytes, 1)
        return reserved(
            functools.partial(source.reserve, chunks, cache_bytes * source.decodable_bytes // total)
            for source in self._caching_sources
        )


def _with_names(parts: Iterable[Part], number: int) -> tuple[Part, ...]:
    """Give unnamed parts the name of their source."""
    return tuple(part if part.name else part._replace(name=f"sources[{number}]") for part in parts)
