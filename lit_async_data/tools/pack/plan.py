"""`Plan`: which datasets the packed file has, and in which pieces they are written."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.field import Field

# Bytes of samples that a thread reads and compresses at a time; and the most, where the chunks of the input need more.
PIECE_BYTES, MOST_PIECE_BYTES = 4 * 2**20, 64 * 2**20
# The group of the sections, where the parts of the input stay apart.
PARTS = "parts"


@dataclasses.dataclass(frozen=True)
class PackedField:
    """One field of the packed file."""

    key: str  # also the name of the dataset
    shape: tuple[int, ...]  # of a stored sample
    dtype: np.dtype[np.generic]
    channel: int | None  # axis of the stored sample
    classes: tuple[str, ...]
    packed: bool  # its attributes say how to unpack the values (NetCDF)
    chunk: int = 0  # samples per chunk; 0 if it is contiguous
    shuffle: bool = False

    @property
    def categorical(self) -> bool:
        """Whether it is stored as codes and categories, which `HDF5Source` takes class names from."""
        return bool(self.classes) and not self.shape

    @property
    def dataset(self) -> str:
        return f"{self.key}/codes" if self.categorical else self.key

    @property
    def layout(self) -> str | None:
        """The letters of its axes; None if `HDF5Source` needs none."""
        if self.channel is None:
            return None
        letters = "HWDTABEFGIJKLMOPQRSUVXYZ"[: len(self.shape) - 1]
        return f"N{letters[: self.channel]}C{letters[self.channel :]}"

    @property
    def source_field(self) -> Field:
        return Field(self.key, classes=None if self.categorical else self.classes or None)


class Piece(NamedTuple):
    """Samples that one thread reads and compresses."""

    group: str  # of their datasets; empty for the root
    rows: int  # of these datasets
    row: int  # of the first sample
    samples: Indices


@dataclasses.dataclass(frozen=True)
class Plan:
    fields: Sequence[PackedField]
    codec: str  # of the fields that have chunks
    sections: Sequence[tuple[str, int]]  # groups and their numbers of samples; one without a name is the root
    step: int  # samples per piece: whole chunks of the output, and of the input where these are not too large

    @classmethod
    def of(cls, source: Source, fields: Sequence[PackedField], codec: str, *, keep_parts: bool) -> Self:
        sections = [("", len(source))]
        if keep_parts:
            sections = [(f"{PARTS}/{number}", part.samples) for number, part in enumerate(source.parts)]
        own, nbytes = max(1, *(field.chunk for field in fields)), max(source.spec.nbytes, 1)
        both = math.lcm(own, source.chunks.rows)
        step = both if both * nbytes <= MOST_PIECE_BYTES else own
        return cls(fields, codec, sections, max(PIECE_BYTES // nbytes // step, 1) * step)

    @property
    def source_options(self) -> dict[str, Any]:
        layout = {field.key: field.layout for field in self.fields if field.layout is not None}
        return ({"layout": layout} if layout else {}) | ({"group": f"{PARTS}/*"} if self.sections[0][0] else {})

    def pieces(self) -> Iterator[Piece]:
        begins = itertools.accumulate((rows for _, rows in self.sections), initial=0)
        for (group, rows), begin in zip(self.sections, begins, strict=False):
            for row in range(0, rows, self.step):
                yield Piece(group, rows, row, np.arange(begin + row, begin + min(row + self.step, rows)))


def read(source: Source, samples: Indices) -> dict[str, Array]:
    """The values of samples, by batch key."""
    fields = source.spec.fields
    values = {key: np.empty((len(samples), *field.stored_shape), field.dtype) for key, field in fields.items()}
    source.read_into(samples, values)
    return values
