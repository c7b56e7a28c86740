"""`SubsetSource`: selected samples of a source."""

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
    """Selected samples of a source, in any order. Thread-safe if the source is.

    Sample numbers count the samples of the subset. `locate`, batches with indices, and errors use the numbers of the
    whole source. With ``shuffle="chunk"``, consecutive samples of the subset that share a storage chunk are decoded
    together.

    Args:
        source: The whole source. `close` closes it.
        samples: Sample numbers, shape (n,), n ≥ 1, also repeated; or a boolean mask of shape (len(source),).
        group_codes: The group number of each selected sample; only stored.

    Attributes:
        source: The whole source.
        samples: int64, shape (n,), read-only: the number of each sample in the whole source.
        group_codes: int64, shape (n,), or None.

    Raises:
        ConfigError: ``samples`` is empty, out of range, or neither whole numbers nor a mask.

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
        self._caching = source if isinstance(source, CachingSource) else None
        self.samples = _selected(samples, len(source))
        self.group_codes = None if group_codes is None else np.array(group_codes, np.int64)
        if self.group_codes is not None and self.group_codes.shape != self.samples.shape:
            raise ConfigError(
                f"group_codes: shape {self.group_codes.shape} for {len(self)} samples; give one number per sample"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are computed again.
        return {name: value for name, value in vars(self).items() if name not in ("chunks", "parts")}

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return shown(self, self.name)

    @property
    def name(self) -> str:
        """Number of samples and name of the whole source, for messages."""
        return f"{len(self):,} of {len(self.source):,} samples of {name_of(self.source)}"

    @property
    def spec(self) -> BatchSpec:
        """The fields of the whole source."""
        return self.source.spec

    @property
    def chunks(self) -> StorageLayout:
        """The chunks: consecutive samples of the subset that share a chunk of the whole source form one."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._selected_layout(self.source.chunks)

    def layout(self) -> StorageLayout:
        """As `chunks`, but the whole source may examine every sample; see `layout_of`."""
        return self._selected_layout(layout_of(self.source)) if hasattr(self.source, "layout") else self.chunks

    def _selected_layout(self, whole: StorageLayout) -> StorageLayout:
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
        self.source.read_into(self._source_numbers(samples), out)

    @property
    def is_random(self) -> bool:
        """Whether the whole source reads a random part of each sample; see `RandomizedSource`."""
        return is_random(self.source)

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read the parts of samples that the keys select; see `RandomizedSource`."""
        assert isinstance(self.source, RandomizedSource)
        self.source.read_random(self._source_numbers(samples), out, keys)

    def ids(self, samples: Indices) -> Indices:
        """The numbers of samples in the whole source; in the innermost one, if this is a subset of a subset.

        Args:
            samples: int64, shape (n,): numbers in this subset.
        """
        return ids_of(self.source, self._source_numbers(samples))

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Find where samples are stored, by their numbers in the whole source.

        Raises:
            IndexError: The whole source has no such sample.
        """
        return self.source.locate(ids)

    def close(self) -> None:
        """Close the whole source, and so every other subset of it; reading opens it again."""
        self.source.close()

    def _source_numbers(self, samples: Indices) -> Indices:
        check_range(samples, self)
        return self.samples[samples]

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same samples, with text labels of tables encoded by other classes; see `ManifestSource.with_classes`."""
        change = getattr(self.source, "with_classes", None)
        if change is None:
            return self
        return type(self)(change(classes), self.samples, group_codes=self.group_codes)

    # -- how samples belong together ---------------------------------------------------------------------------------

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the whole source that have samples here; a new part begins where sample numbers decrease."""
        whole = parts_of(self.source)
        which = np.searchsorted(starts([part.samples for part in whole]), self.samples, side="right") - 1
        counts = _lengths((np.diff(which) != 0) | (np.diff(self.samples) < 0))
        first = which[starts(counts)[:-1]]
        return tuple(
            whole[part]._replace(samples=count) for part, count in zip(first.tolist(), counts.tolist(), strict=True)
        )

    @property
    def overlap(self) -> int:
        """The overlap of the whole source: samples are never closer to each other here than there."""
        return overlap_of(self.source)

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample; see `PartedSource.column`."""
        return column_of(self.source, name)[self.samples]

    def places(self) -> Places:
        """Part and row of each sample, in the parts of the whole source."""
        return places_of(self.source).taken(self.samples)

    # -- `CachingSource` and `FetchingSource`, if the whole is one ---------------------------------------------------

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Prepare samples that will be read soon; see `CachingSource.prepare`."""
        return self._caching is not None and self._caching.prepare(self._source_numbers(samples), decode=decode)

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that stay in memory between batches; see `CachingSource.decoded_bytes`."""
        return 0 if self._caching is None else self._caching.decoded_bytes(chunks)

    @property
    def decode_bytes(self) -> int:
        """Bytes that a thread needs to decode a chunk; see `CachingSource.decode_bytes`."""
        return 0 if self._caching is None else self._caching.decode_bytes

    @property
    def decodable_bytes(self) -> int:
        """Bytes of all data in the whole source that must be decoded."""
        return 0 if self._caching is None else self._caching.decodable_bytes

    def file_bytes(self) -> int:
        """Bytes of the files of one sample; see `FetchingSource.file_bytes`."""
        return self.source.file_bytes() if isinstance(self.source, FetchingSource) else 0

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow reading ahead; see `FetchingSource.read_ahead`."""
        return self.source.read_ahead(nbytes) if isinstance(self.source, FetchingSource) else _do_nothing

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Reserve memory for decoded chunks; see `CachingSource.reserve`."""
        return _do_nothing if self._caching is None else self._caching.reserve(chunks, cache_bytes)


def _selected(given: Any, length: int) -> Indices:
    """Sample numbers from numbers or a mask, as a read-only copy."""
    samples = np.asarray(given)
    if samples.ndim != 1:
        raise ConfigError(
            f"samples: shape {samples.shape} does not have one axis; give numbers or a mask of shape (n,)"
        )
    if samples.dtype.kind == "b" and samples.size != length:
        raise ConfigError(f"samples: a mask of {samples.size} values for {length} samples; give one value per sample")
    if samples.dtype.kind == "b":
        samples = np.flatnonzero(samples)
    if not samples.size:
        raise ConfigError("samples: empty; select at least one sample")
    if samples.dtype.kind not in "iu":
        raise ConfigError(
            f"samples: {samples[:1].tolist()[0]!r} is neither a whole number nor a bool; give sample numbers or a mask"
        )
    wrong = (samples < 0) | (samples >= length)
    if wrong.any():
        raise ConfigError(f"samples: {samples[wrong][0]} is not a sample number; the source has 0 to {length - 1}")
    selected = samples.astype(np.int64)
    selected.setflags(write=False)
    return selected


def _lengths(changes: npt.NDArray[np.bool_]) -> Indices:
    """Lengths of the runs of n values, given where a value differs from the next; ``changes`` has shape (n - 1,)."""
    edges = np.flatnonzero(changes) + 1
    return np.diff(edges, prepend=0, append=changes.size + 1)


def _runs(runs: Sequence[ChunkRun], samples: Indices) -> tuple[ChunkRun, ...]:
    """How selected samples lie in chunks, given the runs of the whole source."""
    sizes, rows = np.array([(run.samples, run.rows) for run in runs], np.int64).T
    first_samples, first_chunks = starts(sizes), starts(-(-sizes // rows))
    run = np.searchsorted(first_samples, samples, side="right") - 1
    chunks = first_chunks[run] + (samples - first_samples[run]) // rows[run]
    counts = _lengths(np.diff(chunks) != 0)
    repeats = _lengths(np.diff(counts) != 0)
    sizes_of_runs = counts[starts(repeats)[:-1]]
    return tuple(
        ChunkRun(chunks * size, size) for chunks, size in zip(repeats.tolist(), sizes_of_runs.tolist(), strict=True)
    )


def _do_nothing() -> None:
    pass
