"""`SubsetSource`: selected samples of a source."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.options import ArrayLike
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.composed.composed import ComposedSource
from lit_async_data.sources.contract.checks import check_source
from lit_async_data.sources.contract.fingerprints import digest
from lit_async_data.sources.contract.places import Location, Part, Places, starts
from lit_async_data.sources.contract.source import (
    Source,
    check_range,
    grouped_by_path,
    layout_of,
    places_of,
    whole_numbers,
)
from lit_async_data.sources.contract.storage_layout import StorageLayout


class SubsetSource(ComposedSource):
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
        (3, [7, 4], <SubsetSource of 3 of 10 samples of ArraySource: y int64; read under a lock>)
        >>> len(SubsetSource(whole, np.arange(10) % 2 == 0))
        5
    """

    def __init__(self, source: Source, samples: ArrayLike, *, group_codes: ArrayLike | None = None) -> None:
        check_source("source", source)
        self.source = source
        self.inside = (source,)
        self.samples = _selected(samples, len(source))
        self.group_codes = None if group_codes is None else np.array(group_codes, np.int64)
        if self.group_codes is not None and self.group_codes.shape != self.samples.shape:
            raise ConfigError(
                f"shape {self.group_codes.shape} for {len(self)} samples; give one number per sample", "group_codes"
            )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def name(self) -> str:
        return f"{len(self):,} of {len(self.source):,} samples of {self.source.name}"

    @property
    def chunks(self) -> StorageLayout:
        """The chunks: consecutive samples of the subset that share a chunk of the whole source form one."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._selected_layout(self.source.chunks)

    def fingerprint(self) -> dict[str, int | str]:
        return super().fingerprint() | {"selected samples": digest(self.samples)}

    def layout(self) -> StorageLayout:
        return self._selected_layout(layout_of(self.source))

    def _selected_layout(self, whole: StorageLayout) -> StorageLayout:
        if not whole.runs:
            return whole
        if whole.order is None:
            return dataclasses.replace(whole, runs=_runs(whole.runs, self.samples))
        places = np.empty_like(whole.order)
        places[whole.order] = np.arange(len(places))
        order = np.argsort(places[self.samples], kind="stable")
        return dataclasses.replace(whole, runs=_runs(whole.runs, places[self.samples[order]]), order=order)

    def _routed(self, samples: Indices) -> Iterator[tuple[int, slice, Indices]]:
        yield 0, slice(None), self._source_numbers(samples)

    def ids(self, samples: Sequence[int] | Indices) -> Indices:
        """The numbers of samples in the whole source; in the innermost one, if this is a subset of a subset.

        Args:
            samples: Whole numbers, shape (n,): numbers in this subset.
        """
        return self.source.ids(self._source_numbers(whole_numbers(samples, self)))

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Find where samples are stored, by their numbers in the whole source.

        Raises:
            IndexError: A number is not that of a sample of this subset.
        """
        numbers = whole_numbers(ids, self.source)
        lost = self._sorted_ids[np.searchsorted(self._sorted_ids[:-1], numbers)] != numbers
        if lost.any():
            raise IndexError(
                f"sample {numbers[lost][0]} is not one of the {self.name}; locate takes their numbers in the whole "
                "source, as errors and return_indices give them: side.locate(side.ids(np.arange(len(side))))"
            )
        return self.source.locate(numbers)

    @functools.cached_property
    def _sorted_ids(self) -> Indices:
        ids = self.source.ids(self.samples)
        return ids if (ids[1:] >= ids[:-1]).all() else np.sort(ids)

    def _source_numbers(self, samples: Indices) -> Indices:
        check_range(samples, self)
        return self.samples[samples]

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        changed = self.source.with_classes(classes)
        return self if changed is self.source else type(self)(changed, self.samples, group_codes=self.group_codes)

    # -- how samples belong together ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the whole source that have samples here; a new part begins where sample numbers decrease."""
        return self._parts

    @functools.cached_property
    def _parts(self) -> tuple[Part, ...]:
        whole = self.source.parts
        which = np.searchsorted(starts([part.samples for part in whole]), self.samples, side="right") - 1
        counts = _lengths((np.diff(which) != 0) | (np.diff(self.samples) < 0))
        first = which[starts(counts)[:-1]]
        return tuple(
            whole[part]._replace(samples=count) for part, count in zip(first.tolist(), counts.tolist(), strict=True)
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        return self.source.column(name)[self.samples]

    def places(self) -> Places:
        return places_of(self.source).taken(self.samples)

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
        whole = grouped_by_path(self.source, naming)
        return None if whole is None else (whole[0][self.samples], whole[1])


def _selected(given: Any, length: int) -> Indices:
    samples = np.asarray(given)
    if samples.ndim != 1:
        raise ConfigError(
            f"shape {samples.shape} does not have one axis; give numbers or a mask of shape (n,)", "samples"
        )
    if samples.dtype.kind == "b" and samples.size != length:
        raise ConfigError(f"a mask of {samples.size} values for {length} samples; give one value per sample", "samples")
    if samples.dtype.kind == "b":
        samples = np.flatnonzero(samples)
    if not samples.size:
        raise ConfigError("empty; select at least one sample", "samples")
    if samples.dtype.kind not in "iu":
        raise ConfigError(
            f"{samples[:1].tolist()[0]!r} is neither a whole number nor a bool; give sample numbers or a mask",
            "samples",
        )
    wrong = (samples < 0) | (samples >= length)
    if wrong.any():
        raise ConfigError(f"{samples[wrong][0]} is not a sample number; the source has 0 to {length - 1}", "samples")
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
