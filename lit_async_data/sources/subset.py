"""`SubsetSource`: some of the samples of a source."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import ConfigError
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
)
from lit_async_data.sources.places import (
    Places,
    check_range,
    check_source,
    column_of,
    name_of,
    overlap_of,
    parts_of,
    places_of,
    starts,
)


class SubsetSource:
    """Some of the samples of a source, in an order of your own. As safe to read from several threads as the source.

    Sample numbers count the subset's own samples; ``locate``, batches with ids and errors name samples by their numbers
    in the whole. With ``shuffle="chunk"`` samples that follow each other here and share a chunk of storage there are
    still decoded together.

    Args:
        source: The whole. `close` closes it.
        samples: Which samples: their numbers, shape (n,), n ≥ 1, repeated ones too; or a mask of ``len(source)``.
        group_codes: A number of its group for each of the samples; kept for whoever asks.

    Attributes:
        source: The whole.
        samples: int64, shape (n,): the number of each sample in the whole; a copy that nobody can write to.
        group_codes: int64, shape (n,), or None.

    Raises:
        ConfigError: ``samples`` is empty, reaches beyond the source, or is neither whole numbers nor a mask.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> whole = ArraySource({"y": np.arange(10)})
        >>> subset = SubsetSource(whole, [7, 3, 4])
        >>> len(subset), subset.ids(np.array([0, 2])).tolist(), subset
        (3, [7, 4], <SubsetSource of 3 of 10 samples of ArraySource: y int64>)
        >>> len(SubsetSource(whole, np.arange(10) % 2 == 0))
        5
    """

    def __init__(self, source: Source, samples: npt.ArrayLike, *, group_codes: npt.ArrayLike | None = None) -> None:
        check_source("source", source)
        self.source = source
        self._keeping = source if isinstance(source, CachingSource) else None
        self.samples = _chosen(samples, len(source))
        self.group_codes = None if group_codes is None else np.array(group_codes, np.int64)
        if self.group_codes is not None and self.group_codes.shape != self.samples.shape:
            raise ConfigError(f"group_codes: {self.group_codes.shape} for {len(self)} samples; give one for each")

    def __getstate__(self) -> dict[str, Any]:
        # Not what is computed from the rest.
        return {name: value for name, value in vars(self).items() if name not in ("chunks", "parts")}

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return shown(self, self.name)

    @property
    def name(self) -> str:
        """How many samples of which source, for messages."""
        return f"{len(self):,} of {len(self.source):,} samples of {name_of(self.source)}"

    @property
    def spec(self) -> BatchSpec:
        """That of the whole."""
        return self.source.spec

    @property
    def chunks(self) -> StorageLayout:
        """Samples that follow each other here and lie in the same chunk of the whole are a chunk."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._cut(self.source.chunks)

    def layout(self) -> StorageLayout:
        """As `chunks`, also where the whole must look at every sample."""
        return self._cut(layout_of(self.source)) if hasattr(self.source, "layout") else self.chunks

    def _cut(self, whole: StorageLayout) -> StorageLayout:
        if not whole.runs:
            return whole
        if whole.order is None:
            return dataclasses.replace(whole, runs=_runs(whole.runs, self.samples))
        places = np.empty_like(whole.order)
        places[whole.order] = np.arange(len(places))
        order = np.argsort(places[self.samples], kind="stable")
        return dataclasses.replace(whole, runs=_runs(whole.runs, places[self.samples[order]]), order=order)

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays; see `Source.read_into`.

        Raises:
            IndexError: A sample is not in ``range(len(self))``.
        """
        self.source.read_into(self._of_the_whole(samples), out)

    @property
    def is_random(self) -> bool:
        """Whether the whole takes parts of samples at random; see `RandomizedSource`."""
        return is_random(self.source)

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples as the keys say; see `RandomizedSource`."""
        assert isinstance(self.source, RandomizedSource)
        self.source.read_random(self._of_the_whole(samples), out, keys)

    def ids(self, samples: Indices) -> Indices:
        """The numbers of samples in the whole; in the innermost one, where subsets are made of subsets.

        Args:
            samples: int64, shape (n,): numbers in this subset.
        """
        return ids_of(self.source, self._of_the_whole(samples))

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Where samples lie, by their numbers in the whole.

        Raises:
            IndexError: The whole has no such sample.
        """
        return self.source.locate(ids)

    def close(self) -> None:
        """Close the whole, and with it every other subset; reading opens it again."""
        self.source.close()

    def _of_the_whole(self, samples: Indices) -> Indices:
        check_range(samples, self)
        return self.samples[samples]

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same samples with the numbers of other classes, where the whole found its own in a table."""
        change = getattr(self.source, "with_classes", None)
        if change is None:
            return self
        return type(self)(change(classes), self.samples, group_codes=self.group_codes)

    # -- how samples belong together ---------------------------------------------------------------------------------

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """What is left of the parts of the whole; where numbers go back, another part begins."""
        whole = parts_of(self.source)
        which = np.searchsorted(starts([part.samples for part in whole]), self.samples, side="right") - 1
        counts = _lengths((np.diff(which) != 0) | (np.diff(self.samples) < 0))
        first = which[starts(counts)[:-1]]
        return tuple(
            whole[part]._replace(samples=count) for part, count in zip(first.tolist(), counts.tolist(), strict=True)
        )

    @property
    def overlap(self) -> int:
        """That of the whole: samples may be further from each other here, never nearer."""
        return overlap_of(self.source)

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample; see `PartedSource.column`."""
        return column_of(self.source, name)[self.samples]

    def places(self) -> Places:
        """Part and row of each sample, in the parts of the whole."""
        return places_of(self.source).taken(self.samples)

    # -- what a `CachingSource` does, where the whole is one ------------------------------------------------------

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Get ready what will be read soon; see `CachingSource.prepare`."""
        return self._keeping is not None and self._keeping.prepare(self._of_the_whole(samples), decode=decode)

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that are held between batches; see `CachingSource.decoded_bytes`."""
        return 0 if self._keeping is None else self._keeping.decoded_bytes(chunks)

    @property
    def decode_bytes(self) -> int:
        """Bytes of the largest chunk of the whole, decoded."""
        return 0 if self._keeping is None else self._keeping.decode_bytes

    @property
    def decodable_bytes(self) -> int:
        """Bytes of everything in the whole that must be decoded."""
        return 0 if self._keeping is None else self._keeping.decodable_bytes

    def file_bytes(self) -> int:
        """Bytes of the files of one sample; see `FetchingSource.file_bytes`."""
        return self.source.file_bytes() if isinstance(self.source, FetchingSource) else 0

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow to read files ahead; see `FetchingSource.read_ahead`."""
        return self.source.read_ahead(nbytes) if isinstance(self.source, FetchingSource) else _nothing

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks; see `CachingSource.reserve`."""
        return _nothing if self._keeping is None else self._keeping.reserve(chunks, cache_bytes)


def _chosen(given: Any, length: int) -> Indices:
    """Sample numbers from numbers or a mask, as a copy that nobody can write to."""
    samples = np.asarray(given)
    if samples.ndim != 1:
        raise ConfigError(f"samples: an array of shape {samples.shape}; give numbers or a mask along one axis")
    if samples.dtype.kind == "b" and samples.size != length:
        raise ConfigError(f"samples: a mask of {samples.size} for {length} samples; give one of the same length")
    if samples.dtype.kind == "b":
        samples = np.flatnonzero(samples)
    if not samples.size:
        raise ConfigError("samples: there are none; a source has at least one")
    if samples.dtype.kind not in "iu":
        raise ConfigError(f"samples: {samples[:1].tolist()[0]!r} is neither a whole number nor true or false")
    wrong = (samples < 0) | (samples >= length)
    if wrong.any():
        raise ConfigError(f"samples: {samples[wrong][0]} is not a sample; they are numbered 0 to {length - 1}")
    chosen = samples.astype(np.int64)
    chosen.setflags(write=False)
    return chosen


def _lengths(changes: npt.NDArray[np.bool_]) -> Indices:
    """How long the stretches are, if a new one begins behind each change; shape (n - 1,) for n in all."""
    edges = np.flatnonzero(changes) + 1
    return np.diff(edges, prepend=0, append=changes.size + 1)


def _runs(runs: Sequence[ChunkRun], samples: Indices) -> tuple[ChunkRun, ...]:
    """How samples lie in chunks, if all of them together do so as these runs say."""
    sizes, rows = np.array([(run.samples, run.rows) for run in runs], np.int64).T
    first_samples, first_chunks = starts(sizes), starts(-(-sizes // rows))
    run = np.searchsorted(first_samples, samples, side="right") - 1
    chunks = first_chunks[run] + (samples - first_samples[run]) // rows[run]
    counts = _lengths(np.diff(chunks) != 0)
    alike = _lengths(np.diff(counts) != 0)
    of_each = counts[starts(alike)[:-1]]
    return tuple(ChunkRun(many * count, count) for many, count in zip(alike.tolist(), of_each.tolist(), strict=True))


def _nothing() -> None:
    pass
