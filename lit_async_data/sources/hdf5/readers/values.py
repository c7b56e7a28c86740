"""Samples without a value of a field of categories, found when a source is built."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import SourceError
from lit_async_data.sources.hdf5.parts.part import StoredPart
from lit_async_data.sources.hdf5.parts.samples import with_samples
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.readers.part_reader import PartReaders
from lit_async_data.sources.hdf5.schema.categories import MISSING, UNLISTED

# Larger fields are read at building only to drop samples; else a missing value is an error at its batch.
MOST_BYTES, BLOCK_BYTES = 256 * 2**20, 2**22
# Whether sources look; no if each sample is to raise its own error when it is read.
LOOKS = contextvars.ContextVar("LOOKS", default=True)
Flags = npt.NDArray[np.bool_]
NewReader = Callable[[Sequence[StoredPart]], PartReaders]


def with_categories(parts: Sequence[StoredPart], new_reader: NewReader, *, drop: bool) -> list[StoredPart]:
    """The parts without samples to ``drop``; else an error where a sample has no value, or a name that is no class.

    A sample that cannot be read is left for its batch.
    """
    found = list(parts)
    for key in parts[0].fields if LOOKS.get() else ():
        fields = [part.fields[key] for part in found]
        marking = list(map(_marking, fields))
        nulls = {each.conversion.null for each in fields[0].channels or fields[:1] if each.conversion}
        pairs = list(zip(found, fields, marking, strict=True))
        shape = fields[0].spec.stored_shape
        size = sum(part.anchors.count * math.prod(shape) * each.values.dtype.itemsize for part, each, _ in pairs)
        if ("drop" in nulls) != drop or all(map(operator.is_, fields, marking)) or (size > MOST_BYTES and not drop):
            continue
        of = [dataclasses.replace(part, fields={**part.fields, key: each}) for part, _, each in pairs]
        with contextlib.closing(new_reader(of)) as reader:
            missing, unlisted = _marked(reader, key, shape)
        wrong = np.flatnonzero(unlisted if drop else unlisted | missing)
        if wrong.size:
            with contextlib.closing(new_reader(found)) as reader:
                reader.read(wrong[:1], {key: np.empty((1, *shape), fields[0].spec.dtype)})
        kept = [np.flatnonzero(~lost) for lost in np.split(missing, reader.starts[1:-1])]
        found = [
            part if len(own) == part.anchors.count else part.at(part.anchors.rows(own))
            for part, own in zip(found, kept, strict=True)
        ]
        found = with_samples(found)
    return found


def _marking(field: StoredField) -> StoredField:
    """A field that delivers marks where something may be wrong; itself if nothing can be."""
    channels = tuple(map(_marking, field.channels))
    if not all(map(operator.is_, channels, field.channels)):
        return dataclasses.replace(field, channels=channels)
    if field.conversion is None or not field.conversion.doubtful:
        return field
    return dataclasses.replace(field, conversion=dataclasses.replace(field.conversion, null="mark"))


def _marked(reader: PartReaders, key: str, shape: tuple[int, ...]) -> Flags:
    """Which samples have no value, and which a name that is no class; shape (2, samples)."""
    count = int(reader.starts[-1])
    marks, step = np.zeros((2, count), np.bool_), max(BLOCK_BYTES // (8 * math.prod(shape)), 1)
    blocks = [np.arange(first, min(first + step, count)) for first in range(0, count, step)]
    while blocks:
        samples = blocks.pop()
        values = np.zeros((len(samples), *shape), np.int64)
        try:
            reader.read(samples, {key: values})
        except SourceError:
            blocks += np.array_split(samples, 2) if len(samples) > 1 else []
            continue
        for which, mark in enumerate((MISSING, UNLISTED)):
            marks[which, samples] = (values == mark).reshape(len(samples), -1).any(axis=1)
    return marks
