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
from lit_async_data.sources.room import reserved


class ConcatSource:
    """Several sources as one: the samples of the first, then those of the second, and so on.

    Sample numbers run through, in `locate` too. Safe to read from several threads if all of the sources are.

    Args:
        sources: At least one; all with the same keys, shapes and dtypes. `close` closes them.

    Attributes:
        sources: As given.

    Raises:
        ConfigError: There is no source, or something that is none.
        FormatError: Two sources differ in their fields; names both, and the field.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> both = ConcatSource([ArraySource({"y": np.arange(3)}), ArraySource({"y": np.arange(5)})])
        >>> len(both), both, both.locate([4])[0].row
        (8, <ConcatSource of 8 samples from ArraySource and 1 more: y int64>, 1)
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)
        if not self.sources:
            raise ConfigError("sources: there are none; give at least one")
        for source in self.sources:
            check_source("sources", source)
        for number in range(1, len(self.sources)):
            check_same(self.sources, number)
        self._keeping = [source if isinstance(source, CachingSource) else None for source in self.sources]
        self._starts = starts([len(source) for source in self.sources])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_chunks"}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return shown(self, self.name)

    @property
    def name(self) -> str:
        """The first source, and how many more, for messages."""
        first, *others = self.sources
        return name_of(first) + (f" and {len(others)} more" if others else "")

    @property
    def spec(self) -> BatchSpec:
        """That of each of them."""
        return self.sources[0].spec

    @property
    def chunks(self) -> StorageLayout:
        """The chunks of all, read as the slowest is."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._together([source.chunks for source in self.sources])

    def layout(self) -> StorageLayout:
        """As `chunks`, also of sources that must look at every sample."""
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
        """Whether any of them takes parts of samples at random; see `RandomizedSource`."""
        return any(map(is_random, self.sources))

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples as the keys say, where a source draws; see `RandomizedSource`."""
        self._read(samples, out, keys)

    def _read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        for number, where in self._dealt(samples):
            numbers = samples[where] - self._starts[number]
            # A stretch is read where it belongs; what lies scattered is read first and then put there.
            stretch = isinstance(where, slice)
            pieces = {
                key: array[where] if stretch else np.empty((len(numbers), *array.shape[1:]), array.dtype)
                for key, array in out.items()
            }
            self._read_of(number, numbers, pieces, None if keys is None else keys[where])
            if not stretch:
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
                # It is a number as that source bears it; ours is found by looking which of those asked for bears it.
                found = numbers[ids_of(source, numbers) == error.sample_id]
                error.sample_id = int(found[0] + self._starts[number]) if found.size else None
            raise

    def _dealt(self, samples: Indices) -> Iterator[tuple[int, slice | Indices]]:
        """Each source that has some of these samples, and which: a slice where they follow each other."""
        check_range(samples, self)
        which = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(which).tolist():
            where = np.flatnonzero(which == number)
            first, end = int(where[0]), int(where[-1]) + 1
            yield number, slice(first, end) if end - first == where.size else where

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same with the numbers of other classes, in sources that found their own in a table."""
        changes = (getattr(source, "with_classes", None) for source in self.sources)
        return type(self)(
            [
                source if change is None else change(classes)
                for source, change in zip(self.sources, changes, strict=True)
            ]
        )

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Where samples lie.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        samples = whole_numbers(ids, self)
        found: dict[int, Location] = {}
        for number, where in self._dealt(samples):
            source, numbers = self.sources[number], samples[where] - self._starts[number]
            found.update(zip(samples[where].tolist(), source.locate(ids_of(source, numbers)), strict=True))
        return [found[sample] for sample in samples.tolist()]

    def close(self) -> None:
        """Close all of them; reading opens them again."""
        with contextlib.ExitStack() as stack:  # the others too, if one fails
            for source in self.sources:
                stack.callback(source.close)

    # -- how samples belong together ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all; a source that knows of none is one."""
        return tuple(part for number, source in enumerate(self.sources) for part in _named(parts_of(source), number))

    @property
    def overlap(self) -> int:
        """The largest of theirs."""
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
            raise FormatError(f"{name!r} holds numbers in {number}, but in {text} it does not", dataset=name)
        return np.concatenate(columns)

    def places(self) -> Places:
        """Part and row of each sample, in the parts of each source."""
        several = [places_of(source) for source in self.sources]
        return Places.joined(
            dataclasses.replace(places, parts=_named(places.parts, number)) for number, places in enumerate(several)
        )

    # -- what a `CachingSource` does, for those that are ------------------------------------------------------------

    @property
    def _keepers(self) -> list[CachingSource]:
        return [source for source in self._keeping if source is not None]

    @property
    def _fetchers(self) -> list[FetchingSource]:
        return [source for source in self._keepers if isinstance(source, FetchingSource)]

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Get ready what will be read soon; see `CachingSource.prepare`."""
        useful = False
        for number, where in self._dealt(samples):
            if (source := self._keeping[number]) is not None:
                useful |= source.prepare(samples[where] - self._starts[number], decode=decode)
        return useful

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that are held between batches: each of the sources may hold so many."""
        return sum(source.decoded_bytes(chunks) for source in self._keepers)

    @property
    def decode_bytes(self) -> int:
        """Bytes of the largest chunk of all, decoded."""
        return max((source.decode_bytes for source in self._keepers), default=0)

    @property
    def decodable_bytes(self) -> int:
        """Bytes of everything that must be decoded."""
        return sum(source.decodable_bytes for source in self._keepers)

    def file_bytes(self) -> int:
        """Bytes of the files of one sample, of the source with the largest; see `FetchingSource.file_bytes`."""
        return max((source.file_bytes() for source in self._fetchers), default=0)

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow to read files ahead; the room is shared in proportion to the bytes of their files."""
        sizes = [source.file_bytes() * len(source) for source in self._fetchers]
        return reserved(
            functools.partial(source.read_ahead, nbytes * size // max(sum(sizes), 1))
            for source, size in zip(self._fetchers, sizes, strict=True)
        )

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks; the cache is shared in proportion to what must be decoded."""
        whole = max(self.decodable_bytes, 1)
        return reserved(
            functools.partial(source.reserve, chunks, cache_bytes * source.decodable_bytes // whole)
            for source in self._keepers
        )


def _named(parts: Iterable[Part], number: int) -> tuple[Part, ...]:
    """Parts of the source of this number, of which none is without a name."""
    return tuple(part if part.name else part._replace(name=f"sources[{number}]") for part in parts)
