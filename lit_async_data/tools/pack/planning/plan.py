"""`Plan`: which datasets the packed file has, and in which steps they are written."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.tools.pack.planning.codec import Codec

# Bytes of samples that a thread reads and compresses at a time; and the most, where the chunks of the input need more.
PIECE_BYTES, MOST_PIECE_BYTES = 4 * 2**20, 64 * 2**20
# Bytes of samples between two commits. An interrupt loses at most this work.
COMMIT_BYTES = 64 * 2**20
# The group of the sections, where the parts of the input stay apart.
PARTS = "parts"


@dataclasses.dataclass(frozen=True)
class PackedField:
    """One field of the packed file.

    Attributes:
        key: Batch key, which is also the name of the dataset.
        shape: Of a stored sample.
        dtype: Stored element type, as numpy spells it.
        chunk: Samples per chunk; 0 if it is contiguous.
        shuffle: Whether chunks are shuffled before they are compressed.
        channel: Axis of the stored sample that holds the channels; None if there is none.
        classes: Names of the values 0, 1, 2, …
        packed: Whether its attributes say how to unpack the values (NetCDF).
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunk: int = 0
    shuffle: bool = False
    channel: int | None = None
    classes: tuple[str, ...] = ()
    packed: bool = False

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """From plain values."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)

    @property
    def sample_bytes(self) -> int:
        """Bytes of a stored sample."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def categorical(self) -> bool:
        """Whether it is stored as codes and categories, which `HDF5Source` takes class names from."""
        return bool(self.classes) and not self.shape

    @property
    def dataset(self) -> str:
        """The dataset of its values."""
        return f"{self.key}/codes" if self.categorical else self.key

    @property
    def layout(self) -> str | None:
        """The letters of its axes; None if `HDF5Source` needs none."""
        if self.channel is None:
            return None
        letters = list(itertools.islice("HWDTABEFGIJKLMOPQRSUVXYZ", len(self.shape) - 1))
        letters.insert(self.channel, "C")
        return "N" + "".join(letters)

    @property
    def field(self) -> Field:
        """How `HDF5Source` reads it."""
        return Field(self.key, classes=self.classes if self.classes and not self.categorical else None)

    def __str__(self) -> str:
        names = f", {len(self.classes)} classes" if self.classes else ""
        return f"{np.dtype(self.dtype)} {self.shape}{names}" if self.shape else f"{np.dtype(self.dtype)}{names}"


@dataclasses.dataclass(frozen=True)
class Section:
    """Consecutive samples whose datasets are in one group.

    Attributes:
        group: The group; empty for the root.
        first: The first sample.
        count: Number of samples.
    """

    group: str
    first: int
    count: int

    def name(self, dataset: str) -> str:
        """Full name of a dataset."""
        return f"{self.group}/{dataset}" if self.group else dataset


@dataclasses.dataclass(frozen=True)
class Piece:
    """Samples that one thread reads and compresses.

    Attributes:
        section: Where they go.
        first: The first sample.
        count: Number of samples.
    """

    section: Section
    first: int
    count: int

    @property
    def row(self) -> int:
        """Row of the first sample in its section."""
        return self.first - self.section.first


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is packed, and how.

    Attributes:
        fields: In the order of the input.
        sections: All samples, in order.
        codec: Of the fields that have chunks.
        piece: Samples per piece: whole chunks of the output, and of the input where these are not too large.
    """

    fields: tuple[PackedField, ...]
    sections: tuple[Section, ...]
    codec: Codec
    piece: int

    @classmethod
    def of(cls, source: Source, fields: Sequence[PackedField], codec: Codec, *, parts: bool) -> Self:
        """The plan for a source.

        Args:
            source: The input.
            fields: How each field is stored.
            codec: Of the fields that have chunks.
            parts: Whether the parts of the source stay apart.
        """
        sections = [Section("", 0, len(source))]
        if parts:
            firsts = itertools.accumulate((part.samples for part in source.parts), initial=0)
            sections = [
                Section(f"{PARTS}/{number}", first, part.samples)
                for number, (part, first) in enumerate(zip(source.parts, firsts, strict=False))
            ]
        own = max((field.chunk for field in fields), default=1) or 1
        nbytes = max(source.spec.nbytes, 1)
        theirs = math.lcm(own, source.chunks.rows)
        step = theirs if theirs * nbytes <= MOST_PIECE_BYTES else own
        return cls(tuple(fields), tuple(sections), codec, max(PIECE_BYTES // nbytes // step, 1) * step)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(section.count for section in self.sections)

    def pieces(self, done: int = 0) -> Iterator[Piece]:
        """The pieces from a sample on, which begins one."""
        for section in self.sections:
            for first in range(section.first, section.first + section.count, self.piece):
                if first >= done:
                    yield Piece(section, first, min(self.piece, section.first + section.count - first))
