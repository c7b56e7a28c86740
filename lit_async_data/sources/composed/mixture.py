"""`MixtureSource`: several sources in exact shares."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, FieldSpec
from lit_async_data.errors import ConfigError
from lit_async_data.options import OF_SOURCE, explains_names, whole
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.composed.composed import ConcatSource
from lit_async_data.sources.contract.checks import check_source
from lit_async_data.sources.contract.source import Part, Source


@explains_names(OF_SOURCE)
class MixtureSource(ConcatSource):
    """Several sources in exact shares, for training on all of them at once.

    A loader takes less than one sample more or less than its share from each source for each batch, on every rank. The
    samples of a source that is used up come again, in another order. ``shuffle`` applies within each source;
    ``shuffle=False`` takes each source as stored. Each sample draws its random numbers by its place in the epoch. As a
    plain sequence of samples, a mixture is the `ConcatSource` of its sources. Thread-safe if all sources are.

    Args:
        sources: For each name a source or another mixture, and its share, as a pair or under ``source`` and ``share``.
            Shares are numbers above 0, in proportion to each other. All sources have the same keys, shapes, dtypes and
            classes. `close` closes the sources.
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

    has_shares = True
    names: tuple[str, ...]
    shares: tuple[float, ...]
    _alike = "the sources of a mixture need the same fields; fields={'real': {'x': 'image'}} gives them other keys"

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
        real = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not real or not 0 < pair[1] <= sys.float_info.max:
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
