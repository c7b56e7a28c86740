"""Patches of volumes and clouds of points: their places, on a grid or drawn at random."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.permutation import Indices, Permutations, Words, derived_keys
from lit_async_data.sources.hdf5.index.index import IndexKey
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import Located, OpenGroup, StoredDataset, axes
from lit_async_data.sources.hdf5.select import Select
from lit_async_data.sources.hdf5.storage.handles import identity_of

Box = tuple[slice, ...]
# The most elements of a class of a volume that are kept as middles of patches; elements that are read together for it.
CENTRES, SCANNED = 4096, 2**20
POINTS = 256  # that are drawn together where nothing is compressed: about a page of the disk
# Decoded chunks stay between batches if patches would decode at least this many times as much without.
WORTH_KEEPING = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPatches(Located):
    """The patches of a volume, which are numbered as rows are. Axes are those of a patch, without channels."""

    path: str
    name: str
    values: StoredDataset
    shape: tuple[int, ...]  # of the volume
    size: tuple[int, ...]  # of a patch
    stride: tuple[int, ...]
    drawn: int | None  # the number of patches, if their places are drawn; None if they lie on a grid
    pad: Literal["last", "zero"] | None
    channel: int | None  # the stored axis of channels
    spec: FieldSpec  # a patch as stored
    holds: Literal["values", "origin", "points", "mask"] = "values"
    scattered: bool = False  # whether the patch is a number of points
    centres: tuple[tuple[float, Indices], ...] = ()  # elements that a share of drawn patches have in their middle
    block: int = 0  # the points that are drawn together; 0 if the elements of a patch lie together

    @functools.cached_property
    def _firsts(self) -> list[Indices]:
        """The first elements of patches along each axis of the grid, whose last patch ends with the volume."""
        sizes = zip(self.shape, self.size, self.stride, strict=True)
        return [np.append(np.arange(0, n - size, step), max(n - size, 0)) for n, size, step in sizes]

    @property
    def rows(self) -> int:
        return math.prod(map(len, self._firsts)) if self.drawn is None else self.drawn

    @property
    def sets(self) -> Indices:
        """The number of a set for each patch on the grid. Patches of two sets share no elements."""
        axes = zip(self._firsts, self.size, strict=True)
        own = [np.append(0, np.cumsum(np.diff(first) >= size)) for first, size in axes]
        return np.ravel_multi_index(np.meshgrid(*own, indexing="ij"), [int(each[-1]) + 1 for each in own]).ravel()

    @functools.cached_property
    def decoding(self) -> tuple[bool, float, float]:
        """Whether decoded chunks stay between batches, the chunks that an epoch decodes then, and if none stays."""
        index, drawn, anew = self.values.index, self.drawn or 1, float(self.rows)
        assert index is not None
        places = self._firsts if self.drawn is None else map(np.arange, np.subtract(self.shape, self.extent) + 1)
        axes = zip(places, self.extent, strict=True)
        often = np.ones(())
        stored = self.stored(axes, (0, self.values.nbytes))
        for (first, n), chunk, chunks in zip(stored, index.shape, index.grid, strict=True):
            begin = np.arange(chunks)[:, None] * chunk
            near = (first < begin + chunk) & (first + n > begin)
            often = np.multiply.outer(often, near.any(axis=1) if self.drawn is None else near.mean(axis=1))
            anew *= float(near.mean(axis=1).sum())
        once = float((1 - (1 - often) ** drawn).sum())
        kept = self.drawn is None or anew >= WORTH_KEEPING * once
        return kept, once if kept else anew, anew

    def decoded(self) -> Array:
        """The bytes that an epoch decodes, as expected, by volumes and in any order: shape (2,)."""
        index, drawn = self.values.index, self.drawn or 1
        if index is None or not self.values.filtered:
            return np.zeros(2)
        if self.block:
            share = min(-(-self.size[0] // self.block) * self.block / self.shape[0], 1.0)
            return np.array([1 - (1 - share) ** drawn, share * drawn]) * self.values.nbytes
        return np.array(self.decoding[1:]) * math.prod(index.shape) * self.values.dtype.itemsize

    @property
    def described(self) -> str:
        """What must be the same for all fields of a sample."""
        if self.scattered:
            return f"{self.size[0]} of {self.shape[0]} points"
        return f"shape {self.shape}, patches {self.size} and stride {self.stride}"

    @property
    def extent(self) -> tuple[int, ...]:
        """The stored elements of each patch along each axis; fewer than its size if the volume is smaller."""
        return tuple(map(min, self.shape, self.size))

    def origins(self, rows: Indices, keys: Words | None) -> Indices:
        """The first element of patches, shape (n, axes). Keys draw places; a grid needs none."""
        if self.drawn is None:
            numbers = np.unravel_index(rows, [len(each) for each in self._firsts])
            return np.stack([each[own] for each, own in zip(self._firsts, numbers, strict=True)], axis=1)
        assert keys is not None
        places = np.subtract(self.shape, self.extent).astype(np.uint64) + np.uint64(1)
        origins = (derived_keys(keys[:, None], np.arange(len(self.size))) % places).astype(np.int64)
        share, end = derived_keys(keys, len(self.size)) / 2.0**64, 0.0
        for part, elements in self.centres:
            begin, end = end, end + part
            which = np.flatnonzero((share >= begin) & (share < end) & (len(elements) > 0))
            drawn = derived_keys(keys[which], len(self.size) + 1) % np.uint64(len(elements) or 1)
            chosen = elements[drawn.astype(np.int64)]
            first = np.stack(np.unravel_index(chosen, self.shape), axis=1) - np.floor_divide(self.extent, 2)
            origins[which] = first.clip(0, np.subtract(self.shape, self.extent))
        return origins

    @property
    def _blocks(self) -> int:
        """The most whole blocks of points that a sample takes, beside the short one at the end."""
        return min(self.size[0] // self.block + 1, self.shape[0] // self.block)

    def ranges(self, rows: Indices, keys: Words | None) -> Select:
        """The points of samples: blocks in random order, the last of which is cut at random."""
        assert keys is not None
        most, (points, size) = self._blocks, (self.shape[0], self.size[0])
        blocks, rest = divmod(points, self.block)
        which = np.repeat(np.arange(len(rows)), most)
        drawn = Permutations(np.full(len(rows), blocks), keys)(np.tile(np.arange(most), len(rows)), which)
        numbers = np.pad(drawn.reshape(-1, most), ((0, 0), (1, 0)), constant_values=blocks)
        # The short block comes first in a share of the samples, which draws its points as often as others; else last.
        least, whole = max(size - blocks * self.block, 0), min(rest, size)
        share = (size * rest / points - least) / max(whole - least, 1)
        last = derived_keys(keys, blocks + most + 1) / 2.0**64 >= share
        numbers[last] = np.roll(numbers[last], -1, axis=1)
        begins = numbers * self.block
        there = np.minimum(self.block, points - begins)
        taken = (size - np.cumsum(there, axis=1) + there).clip(0, there)
        # A block begins anywhere, and goes on at its start.
        random = derived_keys(keys[:, None], np.arange(most + 1) + blocks)
        first = (random % np.maximum(there, 1).astype(np.uint64)).astype(np.int64)
        head = np.minimum(taken, there - first)
        return Select(np.stack([begins + first, begins], 2).ravel(), np.stack([head, taken - head], 2).ravel())

    def points(self, rows: Indices, keys: Words | None) -> Indices:
        """The rows of points, shape (n, points). Padding repeats the last."""
        if self.block:
            return self.ranges(rows, keys).rows.reshape(len(rows), -1)
        consecutive: Indices = self.origins(rows, keys)[:, :1] + np.arange(self.size[0])
        return consecutive.clip(max=self.shape[0] - 1)

    def slabs(self, rows: int) -> int:
        """The largest number of slabs of ``rows`` rows that the samples of a cloud touch; 1 if they are no rows."""
        return self.rows * (self._blocks + 1) * (-(-self.block // rows) + 1) if self.block else 1

    def stored(self, places: Any, whole: Any) -> tuple[Any, ...]:
        """Something for each stored axis, given it for each axis, and for the channels."""
        listed = list(places)
        if self.channel is not None:
            listed.insert(self.channel, whole)
        return tuple(listed)

    def boxes(self, rows: Indices, keys: Words | None) -> Iterator[Box]:
        """The stored elements of each patch."""
        for origin in self.origins(rows, keys).tolist():
            spans = (slice(first, first + n) for first, n in zip(origin, self.extent, strict=True))
            yield self.stored(spans, slice(0, self.values.shape[self.channel or 0]))

    def real(self) -> Array:
        """Which elements of patches lie inside the volume, or which points are real; bool, of the shape of the mask."""
        inside = (np.arange(size) < n for size, n in zip(self.size, self.shape, strict=True))
        return functools.reduce(np.logical_and.outer, itertools.islice(inside, self.spec.masked))


def elements_of(group: OpenGroup, patches: StoredPatches, classes: Sequence[int]) -> list[Indices]:
    """Up to `CENTRES` elements of each class, from all of the volume, as numbers in its C order."""
    name, state = f"/{patches.name.strip('/')}", identity_of(group.file).state
    key = IndexKey(patches.path, f"{CENTRES} elements of {list(classes)} in {name}", state)
    if (found := group.cache.load(key)) is None:
        dataset, shape = group.whole(name, "foreground: "), patches.shape
        found = {str(each): np.zeros(0, np.int64) for each in classes}
        for box in _boxes(shape, dataset.chunks or (1,) * len(shape)):
            values, begins = dataset[box], [span.start for span in box]
            for each in classes:
                places = map(np.add, np.nonzero(values == each), begins)
                own = np.append(found[str(each)], np.ravel_multi_index(tuple(places), shape))
                if len(own) > CENTRES:  # the least by their random keys, whatever the boxes
                    own = own[np.argpartition(derived_keys(0, own), CENTRES)[:CENTRES]]
                found[str(each)] = np.sort(own)
        group.cache.store(key, found)
    return list(found.values())


def _boxes(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Box]:
    """Boxes of whole chunks, of up to `SCANNED` elements if a chunk has no more, that cover a volume."""
    size = list(chunk)
    for axis in reversed(range(len(shape))):
        size[axis] *= max(min(SCANNED // math.prod(size), -(-shape[axis] // size[axis])), 1)
    axes = zip(shape, size, strict=True)
    return itertools.product(*([slice(first, min(first + n, end)) for first in range(0, end, n)] for end, n in axes))


def inspect_patches(group: OpenGroup, field: Field, layout: str | None, where: str, drawn: int | None) -> StoredPatches:
    stored = group.inspect_dataset(group.name(field.dataset), cast=field.dtype is not None)
    size = tuple(field.patch or (field.points or 0, *stored.shape[1:]))
    if field.points and layout is not None:
        raise ConfigError(f"{layout!r} for {stored}: its points are on axis 0; leave it out", "layout")
    _, channel = axes(layout, stored.shape, str(stored), volume=True)
    shape = tuple(n for axis, n in enumerate(stored.shape) if axis != channel)
    if len(shape) != len(size):
        what = f"{size} has {len(size)} axes, but {stored} has shape {stored.shape}; layout= names an axis of channels"
        raise ConfigError(f"{what}, such as 'CDHW'", f"{where}.patch")
    if field.pad is None and any(map(int.__lt__, shape, size)):
        what = f"has shape {shape}, smaller than a sample {size}; give pad='zero' or 'last', or smaller samples"
        raise stored.error(FormatError, what)
    if drawn is not None and field.stride:
        raise ConfigError("is for a grid, but patches_per_volume draws places; give one of both", f"{where}.stride")
    moved = size if channel is None else (stored.shape[channel], *size)
    masked = 0 if field.pad is None else len(size) if field.patch else 1
    lead = len(size) if channel is None else 0
    spec = FieldSpec(moved, stored.dtype.newbyteorder("="), channel, lead=lead, masked=masked)
    of: Any = {"values": stored, "shape": shape, "size": size, "stride": field.stride or size, "spec": spec}
    of |= {"drawn": drawn, "pad": field.pad, "channel": channel, "scattered": not field.patch}
    return StoredPatches(stored.path, stored.name, **of)
