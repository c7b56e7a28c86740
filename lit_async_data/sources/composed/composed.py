"""`ComposedSource`: a source that reads from other sources."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.order.due import ChunkGroup
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.source import DerivedSource, MemoryNeeds, Source

# The positions of samples in a batch. Consecutive ones, a slice, are read in place; scattered ones are copied there.
Positions = slice | Indices


class ComposedSource(DerivedSource):
    """Forwards reading, and reading ahead, to the sources inside.

    Attributes:
        inside: The sources inside; all with the same fields.
    """

    inside: Sequence[Source]

    @abc.abstractmethod
    def _routed(self, samples: Indices) -> Iterator[tuple[int, Positions, Indices]]:
        """Number of each source that has some of these samples, their positions in ``samples``, their numbers there."""

    def __getstate__(self) -> dict[str, Any]:
        # Cached properties are computed again.
        cached = {name for kind in type(self).__mro__ for name, value in vars(kind).items() if _is_cached(value)}
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
        """Close all sources inside, which other compositions may share; reading opens them again."""
        with contextlib.ExitStack() as stack:  # closes the others even if one raises
            for source in self.inside:
                stack.callback(source.close)

    # -- code of the user --------------------------------------------------------------------------------------------

    @property
    def runs_user_code(self) -> bool:
        return super().runs_user_code or any(source.runs_user_code for source in self.inside)

    def count_changes(self) -> int:
        return sum((source.count_changes() for source in self.inside), super().count_changes())

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        self._read(samples, out, None)

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        self._read(samples, out, keys)

    def _read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        for number, positions, numbers in self._routed(samples):
            if isinstance(positions, slice):
                pieces = {key: array[positions] for key, array in out.items()}
            else:
                pieces = {key: np.empty((len(numbers), *array.shape[1:]), array.dtype) for key, array in out.items()}
            self._read_of(number, numbers, pieces, None if keys is None else keys[positions])
            if not isinstance(positions, slice):
                for key, piece in pieces.items():
                    out[key][positions] = piece

    def _read_of(self, number: int, numbers: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        if keys is None:
            self.inside[number].read_into(numbers, out)
        else:
            self.inside[number].read_random(numbers, out, keys)

    # -- reading ahead -----------------------------------------------------------------------------------------------

    def fetch(self, samples: Indices) -> bool:
        cold = [self.inside[number].fetch(numbers) for number, _, numbers in self._routed(samples)]
        return any(cold)

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        for number, _, numbers in self._routed(samples):
            self.inside[number].decode(numbers, chunk_group)

    def memory(self, chunks: int = 0) -> MemoryNeeds:
        return MemoryNeeds.together([source.memory(chunks) for source in self.inside])

    def reserve(self, chunks: int, cache_bytes: int, fetched_bytes: int) -> Callable[[], None]:
        """Reserve memory, which the sources share in proportion to the bytes that they decode, and those they fetch."""
        needs = [source.memory() for source in self.inside]
        caches = _shares(cache_bytes, [each.cacheable for each in needs])
        files = _shares(fetched_bytes, [each.files * len(at) for each, at in zip(needs, self.inside, strict=True)])
        with contextlib.ExitStack() as stack:  # releases the others if one raises
            for source, cache, fetched in zip(self.inside, caches, files, strict=True):
                stack.callback(source.reserve(chunks, cache, fetched))
            return stack.pop_all().close


def _shares(nbytes: int, sizes: Sequence[int]) -> list[int]:
    return [nbytes * size // max(sum(sizes), 1) for size in sizes]


def _is_cached(value: object) -> bool:
    return isinstance(value, functools.cached_property)
