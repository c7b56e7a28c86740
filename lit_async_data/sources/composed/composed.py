"""Sources made of sources: `ConcatSource`, `SubsetSource`, and `MixtureSource`, several sources in exact shares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, FieldSpec, longest_of
from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.options import OF_SOURCE, ArrayLike, explains_names, whole
from lit_async_data.order.chunk_order import ChunkRun, runs_of
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources.contract import source as contract
from lit_async_data.sources.contract.checks import check_same, check_source, is_real, refuse_flags
from lit_async_data.sources.contract.source import Part, Source
from lit_async_data.sources.contract.user_code import READING, digest

# Positions in a batch. A slice of the batch is read in place; samples at scattered positions are copied.
Positions = slice | Indices


class ComposedSource(Source):
    """Forwards reading, and reading ahead, to the sources inside, which all have the same fields."""

    inside: Sequence[Source]
    #: For each source that has some of the samples: its number, their positions, and their numbers in it.
    _routed: Callable[[Indices], Iterator[tuple[int, Positions, Indices]]]
    _composed: Callable[[Sequence[contract.StorageLayout]], contract.StorageLayout]

    def __getstate__(self) -> dict[str, Any]:
        cached = {name for name in vars(self) if isinstance(getattr(type(self), name, 0), functools.cached_property)}
        return {name: value for name, value in vars(self).items() if name not in cached}

    @property
    def spec(self) -> BatchSpec:
        return self.inside[0].spec

    def fingerprint(self) -> dict[str, int | str]:
        fingerprint = super().fingerprint()
        for number, source in enumerate(self.inside):
            which = "source" if len(self.inside) == 1 else f"source {number}"
            named = source.fingerprint().items()
            fingerprint |= {f"{name} of {which}": value for name, value in named if name != "fields"}
        return fingerprint

    def close(self) -> None:
        """Close all sources inside, which other compositions may share."""
        with contextlib.ExitStack() as stack:  # closes the others even if one raises
            for source in self.inside:
                stack.callback(source.close)

    @functools.cached_property
    def chunks(self) -> contract.StorageLayout:  # pyright: ignore[reportIncompatibleMethodOverride]  # read once, as a property
        return self._composed([source.chunks for source in self.inside])

    def layout(self) -> contract.StorageLayout:
        return self._composed([source.layout() for source in self.inside])

    @property
    def runs_user_code(self) -> bool:
        return super().runs_user_code or any(source.runs_user_code for source in self.inside)

    def count_changes(self) -> int:
        return sum((source.count_changes() for source in self.inside), super().count_changes())

    @property
    def repeats(self) -> bool:
        return any(source.repeats for source in self.inside)

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        self.read_random(samples, out, None)

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        drawn = READING.numbers(samples)
        for number, positions, numbers in self._routed(samples):
            READING.drawing = numbers, drawn[positions]
            if isinstance(positions, slice):
                pieces = {key: array[positions] for key, array in out.items()}
            else:
                pieces = {key: np.empty((len(numbers), *array.shape[1:]), array.dtype) for key, array in out.items()}
            self._read_of(number, numbers, pieces, None if keys is None else keys[positions])
            if not isinstance(positions, slice):
                for key, piece in pieces.items():
                    out[key][positions] = piece

    def ranges_read(self, samples: Indices) -> Iterator[Any]:
        for number, where, numbers in self._routed(samples):
            for own, *ranges in self.inside[number].ranges_read(numbers):
                yield np.arange(len(samples))[where][own], *ranges

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        contract.fill(self.inside[number], numbers, out, keys)

    def fetch(self, samples: Indices) -> bool:
        cold = [self.inside[number].fetch(numbers) for number, _, numbers in self._routed(samples)]
        return any(cold)

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        for number, _, numbers in self._routed(samples):
            self.inside[number].decode(numbers, chunk_group)

    def memory(self, chunks: int = 0) -> contract.MemoryNeeds:
        return contract.MemoryNeeds.together([source.memory(chunks) for source in self.inside])

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        return contract.reserve_shares(self.inside, chunks, cache_bytes).close


def check_whole(name: str, source: Source) -> None:
    check_source(name, source)
    if isinstance(source, MixtureSource):
        raise ConfigError(f"{source.name} is a mixture, which would lose its shares; use its sources one by one", name)


@explains_names(OF_SOURCE)
class ConcatSource(ComposedSource):
    """Several sources as one: the samples of the first, then those of the second, and so on.

    Sample numbers count through all sources, also in `locate`. Thread-safe if all sources are.

    Args:
        sources: At least one source; all have the same keys, shapes, dtypes and classes. Greatest lengths may differ,
            and text that is no class is numbered anew. The attribute is a tuple. `close` closes the sources.

    Raises:
        ConfigError: ``sources`` is empty or holds something that is not a source.
        FormatError: The fields of two sources differ; names both sources and the field.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> both = ConcatSource([ArraySource({"y": np.arange(3)}), ArraySource({"y": np.arange(5)})])
        >>> len(both), both, both.locate([4])[0].row
        (8, <ConcatSource of 8 samples from ArraySource and 1 more: y int64; read under a lock>, 1)
    """

    _alike = "concatenated sources need the same fields"

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = self.inside = tuple(sources)
        if not self.sources:
            raise ConfigError("empty; give at least one source", "sources")
        for source in self.sources:
            check_whole("sources", source)
        self.sources = self.inside = _numbered_alike(self.sources)
        self._spec = self.sources[0].spec
        for number, source in enumerate(self.sources[1:], 1):
            check_same(self._spec, source.spec, self._named(number), self._named(0), self._alike)
            self._spec = longest_of([self._spec, source.spec])
        self._starts = contract.starts([len(source) for source in self.sources])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    @property
    def name(self) -> str:
        first, *others = self.sources
        return first.name + (f" and {len(others)} more" if others else "")

    def _named(self, number: int) -> str:
        return f"sources[{number}] ({self.sources[number].name})"

    def _composed(self, layouts: Sequence[contract.StorageLayout]) -> contract.StorageLayout:
        one_by_one = ((ChunkRun(len(source), 1),) for source in self.sources)
        runs = itertools.chain(*(layout.runs or each for layout, each in zip(layouts, one_by_one, strict=True)))
        names = ["spread", "chunks_per_run", "amplification", "alone", "chunks_per_sample", "overlap"]
        names += ["compressed", "random", "drawn", "ahead"]  # true if one is
        most = {name: max(getattr(layout, name) for layout in layouts) for name in names}
        return contract.StorageLayout(
            tuple(runs) if any(layout.runs for layout in layouts) else (),
            reading=contract.slowest(layout.reading for layout in layouts),
            largest=all(layout.largest for layout in layouts),
            order=self._order(layouts),
            remote=contract.Remote.joined(layout.remote for layout in layouts),
            left_out=", ".join(dict.fromkeys(layout.left_out for layout in layouts if layout.left_out)),
            **most,
        )

    def _order(self, layouts: Sequence[contract.StorageLayout]) -> Indices | None:
        if all(layout.order is None for layout in layouts):
            return None
        blocks = zip(layouts, itertools.pairwise(self._starts.tolist()), strict=True)
        orders = (np.arange(*each) if layout.order is None else layout.order + each[0] for layout, each in blocks)
        return np.concatenate(list(orders))

    def _routed(self, samples: Indices) -> Iterator[tuple[int, Positions, Indices]]:
        contract.check_range(samples, self)
        which = np.searchsorted(self._starts, samples, side="right") - 1
        for number in np.unique(which).tolist():
            positions = np.flatnonzero(which == number)
            first, end = int(positions[0]), int(positions[-1]) + 1
            where = slice(first, end) if end - first == positions.size else positions
            yield number, where, samples[positions] - self._starts[number]

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        try:
            super()._read_of(number, numbers, out, keys)
        except AsyncDataError as error:
            if error.sample_id is not None:
                # The id belongs to that source, or a source behind it; find its sample.
                matching = numbers[self.sources[number].ids(numbers) == error.sample_id]
                error.sample_id = int(matching[0] + self._starts[number]) if matching.size else None
            raise

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        changed = [source.with_classes(classes) for source in self.sources]
        return self if all(map(operator.is_, changed, self.sources)) else self._remade(changed)

    def _remade(self, sources: Sequence[Source]) -> Self:
        return type(self)(sources)

    def locate(self, ids: Sequence[int] | Indices) -> list[contract.Location]:
        samples = contract.whole_numbers(ids, self)
        locations: dict[int, contract.Location] = {}
        for number, positions, numbers in self._routed(samples):
            source = self.sources[number]
            locations.update(zip(samples[positions].tolist(), source.locate(source.ids(numbers)), strict=True))
        return [locations[sample] for sample in samples.tolist()]

    @property
    def parts(self) -> tuple[contract.Part, ...]:
        return tuple(part for number, source in enumerate(self.sources) for part in _with_names(source.parts, number))

    def column(self, name: str) -> npt.NDArray[Any]:
        if name == "episode" and (places := self.places()).episodes is not None:
            return places.named_episodes()
        columns = [source.column(name) for source in self.sources]
        return contract.end_to_end(name, columns, [source.name for source in self.sources])

    def places(self) -> contract.Places:
        every = (source.places() for source in self.sources)
        named = (dataclasses.replace(each, parts=_with_names(each.parts, number)) for number, each in enumerate(every))
        return contract.Places.joined(named)

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
        grouped = list(filter(None, (source.grouped_by_path(naming) for source in self.sources)))
        if len(grouped) < len(self.sources):
            return None
        first = contract.starts([len(names) for _, names in grouped]).tolist()
        numbers, distinct = contract.numbered(itertools.chain(*(names for _, names in grouped)))
        return np.concatenate([numbers[own + n] for n, (own, _) in zip(first, grouped, strict=False)]), distinct


def _numbered_alike(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources with one numbering of texts; classes must agree already."""
    every = [source.spec.fields for source in sources]
    lists = {key: {fields[key].texts for fields in every if key in fields} for key in every[0]}
    common = {key: sorted({*itertools.chain(*texts)}) for key, texts in lists.items() if len(texts) > 1}
    return tuple(source.with_classes(common) for source in sources) if common else sources


def _with_names(parts: Iterable[contract.Part], number: int) -> tuple[contract.Part, ...]:
    return tuple(part if part.name else part._replace(name=f"sources[{number}]") for part in parts)


@explains_names({"indices": "write samples="}, OF_SOURCE)
class SubsetSource(ComposedSource):
    """Selected samples of a source, in any order. Thread-safe if the source is.

    `locate`, batches with indices, and errors use the numbers of the whole source. With ``shuffle="chunk"``,
    consecutive samples of the subset that share a storage chunk are decoded together.

    Args:
        source: The whole source. `close` closes it.
        samples: Sample numbers, shape (n,), n ≥ 1, also repeated; or a boolean mask of shape (len(source),). The
            attribute is read-only int64 numbers, shape (n,).
        group_codes: The group number of each selected sample, int64, shape (n,), or None; only stored.

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
        self._check(source)
        self.source = source
        self.inside = (source,)
        self.samples = _selected(samples, len(source))
        self._repeats = len(np.unique(self.samples)) < len(self.samples)
        self.group_codes = None if group_codes is None else np.array(group_codes, np.int64)
        if self.group_codes is not None and self.group_codes.shape != self.samples.shape:
            what = f"shape {self.group_codes.shape} for {len(self)} samples; give one number per sample"
            raise ConfigError(what, "group_codes")

    def _check(self, source: Source) -> None:
        check_whole("source", source)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def name(self) -> str:
        whole = self.source
        while isinstance(whole, SubsetSource):
            whole = whole.source
        return f"{len(self):,} of {len(whole):,} samples of {whole.name}"

    def fingerprint(self) -> dict[str, int | str]:
        return super().fingerprint() | {"selected samples": digest(self.samples)}

    @property
    def repeats(self) -> bool:
        return self._repeats or super().repeats

    def _composed(self, layouts: Sequence[contract.StorageLayout]) -> contract.StorageLayout:
        """Consecutive samples of the subset that share a chunk of the whole source form one."""
        (whole,) = layouts
        samples, order = self.samples, None
        if whole.order is not None:
            places = np.empty_like(whole.order)
            places[whole.order] = np.arange(len(places))
            order = np.argsort(places[samples], kind="stable")
            samples = places[samples[order]]
        runs = _runs(whole.runs, samples) if whole.runs else ()
        if remote := whole.remote:
            share = len(self) / len(self.source)
            if runs:  # the chunks that have samples here
                touched = _runs(whole.runs, np.sort(samples)), whole.runs
                here, everywhere = (sum(-(-run.samples // run.rows) for run in each) for each in touched)
                share = here / everywhere
            nbytes, requests = (math.ceil(min(share, 1) * each) for each in remote[:2])
            remote = remote._replace(nbytes=nbytes, requests=requests)
        return dataclasses.replace(whole, runs=runs, order=order, remote=remote)

    def _routed(self, samples: Indices) -> Iterator[tuple[int, slice, Indices]]:
        yield 0, slice(None), self._source_numbers(samples)

    def ids(self, samples: Sequence[int] | Indices) -> Indices:
        """The numbers of samples in the whole source; in the innermost one, if this is a subset of a subset."""
        return self.source.ids(self._source_numbers(contract.whole_numbers(samples, self)))

    def locate(self, ids: Sequence[int] | Indices) -> list[contract.Location]:
        """Find where samples are stored, by their numbers in the whole source.

        Raises:
            IndexError: A number is not that of a sample of this subset.
        """
        numbers = contract.whole_numbers(ids, self.source)
        lost = self._sorted_ids[np.searchsorted(self._sorted_ids[:-1], numbers)] != numbers
        if lost.any():
            what = f"sample {numbers[lost][0]} is not one of the {self.name}; locate takes numbers in the whole source"
            ways = "as errors and return_indices give them: side.locate(side.ids(np.arange(len(side))))"
            raise IndexError(f"{what}, {ways}")
        return self.source.locate(numbers)

    @functools.cached_property
    def _sorted_ids(self) -> Indices:
        ids = self.source.ids(self.samples)
        return ids if (ids[1:] >= ids[:-1]).all() else np.sort(ids)

    def _source_numbers(self, samples: Indices) -> Indices:
        contract.check_range(samples, self)
        return self.samples[samples]

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        changed = self.source.with_classes(classes)
        return self if changed is self.source else type(self)(changed, self.samples, group_codes=self.group_codes)

    @functools.cached_property
    def parts(self) -> tuple[contract.Part, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # read once, as a property
        """The parts of the whole source that have samples here; a new part begins where sample numbers decrease."""
        whole = self.source.parts
        which = np.searchsorted(contract.starts([part.samples for part in whole]), self.samples, side="right") - 1
        counts = _lengths((np.diff(which) != 0) | (np.diff(self.samples) < 0))
        pairs = zip(which[contract.starts(counts)[:-1]].tolist(), counts.tolist(), strict=True)
        return tuple(whole[part]._replace(samples=count) for part, count in pairs)

    def column(self, name: str) -> npt.NDArray[Any]:
        return self.source.column(name)[self.samples]

    def places(self) -> contract.Places:
        return self.source.places().taken(self.samples)

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
        whole = self.source.grouped_by_path(naming)
        return None if whole is None else (whole[0][self.samples], whole[1])


def _selected(given: Any, length: int) -> Indices:
    samples = np.asarray(given)
    if samples.ndim != 1:
        raise ConfigError(f"shape {samples.shape} is not (n,); give numbers or a mask of one axis", "samples")
    if samples.dtype.kind == "b":
        if samples.size != length:
            what = f"a mask of {samples.size} values for {length} samples; give one value per sample"
            raise ConfigError(what, "samples")
        samples = np.flatnonzero(samples)
    elif samples.size and samples.dtype.kind not in "iu":
        what = "is neither a whole number nor a bool; give sample numbers or a mask"
        raise ConfigError(f"{samples[:1].tolist()[0]!r} {what}", "samples")
    else:
        refuse_flags(samples, length, "it", "samples")
    if not samples.size:
        raise ConfigError("empty; select at least one sample", "samples")
    wrong = (samples < 0) | (samples >= length)
    if wrong.any():
        raise ConfigError(f"{samples[wrong][0]} is not a sample number; the source has 0 to {length - 1}", "samples")
    selected = samples.astype(np.int64)
    selected.setflags(write=False)
    return selected


def _lengths(changes: npt.NDArray[np.bool_]) -> Indices:
    """Lengths of the runs of n equal values; ``changes``, shape (n - 1,), says where a value differs from the next."""
    edges = np.flatnonzero(changes) + 1
    return np.diff(edges, prepend=0, append=changes.size + 1)


def _runs(runs: Sequence[ChunkRun], samples: Indices) -> tuple[ChunkRun, ...]:
    sizes, rows = np.array([(run.samples, run.rows) for run in runs], np.int64).T
    first_samples, first_chunks = contract.starts(sizes), contract.starts(-(-sizes // rows))
    run = np.searchsorted(first_samples, samples, side="right") - 1
    chunks = first_chunks[run] + (samples - first_samples[run]) // rows[run]
    return runs_of(_lengths(np.diff(chunks) != 0))


@explains_names(dict.fromkeys(("shares", "probabilities"), 'give pairs: {"sim": (source, 0.7), …}'), OF_SOURCE)
class MixtureSource(ConcatSource):
    """Several sources in exact shares, for training on all of them at once.

    A loader takes its share from each source for each batch on every rank, to within one sample. The samples of a
    source that is used up come again, in another order. ``shuffle`` applies within each source; ``shuffle=False`` takes
    each as stored. Each sample draws its random numbers by its place in the epoch. As a plain sequence of samples, a
    mixture is the `ConcatSource` of its sources. Thread-safe if all sources are.

    Args:
        sources: For each name a source or another mixture, and its share, as a pair or under ``source`` and ``share``.
            Shares are numbers above 0, in proportion to each other. Sources have the same fields, as in `ConcatSource`.
        epoch: The name of a source: an epoch ends when all of its samples have come. A number of samples per epoch.
            None: when all samples of all sources have come. The last step is completed.
        fields: The fields of a source for each key of the batch: ``{"real": {"x": "image", "y": "label"}}``.
        source_key: The field with the number of each sample's source, int64, whose name ``spec.names`` gives; or None.

    Attributes:
        sources: The sources as a tuple; those of a mixture inside in its place.
        names: Their names; ``"OUTER/INNER"`` for those of a mixture inside.
        shares: Their shares, which add up to 1.

    Raises:
        ConfigError: There are no sources, or a share, ``epoch`` or a name in ``fields`` is wrong.
        FormatError: The fields of two sources differ; names both sources and the field.

    Example:
        >>> from lit_async_data import AsyncLoader
        >>> from lit_async_data.testing import ArraySource
        >>> sim, real = ArraySource({"y": np.arange(100)}), ArraySource({"y": np.arange(6)})
        >>> mixture = MixtureSource({"sim": (sim, 0.75), "real": (real, 0.25)}, epoch="real")
        >>> with AsyncLoader(mixture, {"batch_size": 8, "shuffle": True}) as loader:
        ...     [mixture.spec.names("source", batch["source"]).tolist().count("real") for batch in loader]
        [2, 2, 2]
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    _alike = "its sources need the same fields; fields={NAME: {KEY: FIELD}} renames them, and leaves the others out"

    def __init__(
        self,
        sources: Mapping[str, tuple[Source, float] | Sequence[Any] | Mapping[str, Any]],
        *,
        epoch: str | int | None = None,
        fields: Mapping[str, Mapping[str, str]] | None = None,
        source_key: str | None = "source",
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ConfigError(f"{sources!r} names no sources; give a source and a share for each name", "sources")
        fields, named = fields or {}, ", ".join(map(str, sources))
        if unknown := [name for name in fields if name not in sources]:
            raise ConfigError(f"{unknown[0]!r} is not one of the sources {named}", "fields")
        self.names, inside, shares = zip(*_flat(sources, fields, source_key), strict=True)
        for name in sources:
            if outer := [other for other in sources if name.startswith(f"{other}/")]:
                raise ConfigError(f"{name!r} seems to be a source of {outer[0]!r}; rename one of them", "sources")
        scaled = [share / max(shares) for share in shares]  # whose sum is finite
        self.shares = tuple(share / sum(scaled) for share in scaled)
        self.source_key, self.epoch = source_key, epoch
        if epoch is not None and not (isinstance(epoch, str) and self.ending):
            self.epoch = whole("epoch", epoch, 1, also=f"one of the sources {named}")
        super().__init__(inside)
        if source_key in self._spec:
            raise ConfigError(f"the sources have a field {source_key!r} of their own; give another key", "source_key")
        if source_key is not None:
            added = {source_key: FieldSpec((), np.dtype(np.int64), texts=self.names)}
            self._spec = BatchSpec({**self._spec, **added}, as_mapping=self._spec.as_mapping)

    @property
    def ending(self) -> list[int]:
        """The numbers of the sources whose samples end an epoch."""
        every, epoch = enumerate(self.names), self.epoch
        return [n for n, name in every if epoch is None or name == epoch or name.startswith(f"{epoch}/")]

    @property
    def name(self) -> str:
        return " and ".join(f"{name} ({share:.4g})" for name, share in zip(self.names, self.shares, strict=True))

    @property
    def repeats(self) -> bool:
        return True

    def fingerprint(self) -> dict[str, int | str]:
        shares = ", ".join(f"{name} {share!r}" for name, share in zip(self.names, self.shares, strict=True))
        return super().fingerprint() | {"shares": shares, "end of an epoch": str(self.epoch)}

    def described(self, counts: Sequence[int]) -> str:
        """The samples of each source in an epoch."""
        each = zip(self.names, counts, map(len, self.sources), strict=True)
        return ", ".join(f"{count:,} of {name} ({count / size:.3g} × its {size:,})" for name, count, size in each)

    def _named(self, number: int) -> str:
        return f"{self.names[number]!r} ({self.sources[number].name})"

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        own = {key: array for key, array in out.items() if key != self.source_key}
        if len(own) < len(out):
            out[str(self.source_key)][...] = number
        if own:
            super()._read_of(number, numbers, own, keys)

    def column(self, name: str) -> npt.NDArray[Any]:
        if name == self.source_key:
            return np.repeat(np.arange(len(self.sources)), [len(source) for source in self.sources])
        return super().column(name)

    def _remade(self, sources: Sequence[Source]) -> Self:
        pairs = zip(sources, self.shares, strict=True)
        return type(self)(dict(zip(self.names, pairs, strict=True)), epoch=self.epoch, source_key=self.source_key)


def _flat(
    sources: Mapping[str, Any], fields: Mapping[str, Mapping[str, str]], source_key: str | None
) -> Iterator[tuple[str, Source, float]]:
    """Name, source and share, for each source that is no mixture."""
    for name, given in sources.items():
        pair: Any = [given[key] for key in ("source", "share") if key in given] if isinstance(given, Mapping) else given
        if not isinstance(name, str) or not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(f"{name} is {given!r}; give a source and its share: '{name}': (source, 0.7)", "sources")
        source, share = pair
        check_source(f"sources.{name}", source)
        if not is_real(share) or not 0 < share <= sys.float_info.max:
            raise ConfigError(f"{name} has share {share!r}; give a number above 0, or leave the source out", "sources")
        if not len(source):
            raise ConfigError(f"{name} has no samples ({source.name}); leave it out", "sources")
        inside: Iterable[tuple[str, Source, float]] = [("", source, 1.0)]
        if isinstance(source, MixtureSource):
            if source.epoch is not None or source.source_key not in ("source", None, source_key):
                what = f"epoch={source.epoch!r}, source_key={source.source_key!r}"
                raise ConfigError(f"{name} is a mixture with {what}; only the outermost mixture has these", "sources")
            inside = zip((f"/{inner}" for inner in source.names), source.sources, source.shares, strict=True)
        for inner, part, own in inside:
            yield name + inner, _Renamed(part, fields[name], name) if name in fields else part, float(share) * own


class _Renamed(ConcatSource):
    """Some fields of a source, under other keys."""

    def __init__(self, source: Source, keys: Mapping[str, str], name: str) -> None:
        super().__init__([source])
        self._keys, spec = dict(keys), source.spec
        if missing := [key for key in self._keys.values() if key not in spec]:
            raise ConfigError(f"{name} has no field {missing[0]!r}; it has {', '.join(spec)}", "fields")
        if len({*self._keys.values()}) < len(self._keys):
            raise ConfigError(f"{name} has a field twice in {self._keys}; give it one key", "fields")
        self._spec = BatchSpec({key: spec[own] for key, own in self._keys.items()}, as_mapping=spec.as_mapping)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self.sources[0].parts)

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        super()._read_of(number, numbers, {self._keys[key]: array for key, array in out.items()}, keys)

    def column(self, name: str) -> npt.NDArray[Any]:
        return super().column(self._keys.get(name, name))

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        changed = self.sources[0].with_classes({own: classes[key] for key, own in self._keys.items() if key in classes})
        return self if changed is self.sources[0] else type(self)(changed, self._keys, self.name)
