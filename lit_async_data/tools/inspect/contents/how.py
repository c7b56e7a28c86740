"""How a dataset is read, and why not faster: in words, from what the sources' own code decides."""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

from lit_async_data.errors import AsyncDataError, SourceError
from lit_async_data.sources.hdf5.readers.choice import Choice, choice
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.schema.stored_field import StoredField, inspect_field
from lit_async_data.sources.hdf5.storage.failures import as_source_errors

# Copied in these ways, nothing is decoded and nothing waits for a lock.
_READING: dict[Choice, str] = {
    "raw": "copied",
    "strided": "copied",
    "chunks": "decoded",
    "h5py chunks": "locked",
    "h5py rows": "locked",
}
# A chunk that is decoded for a sample should not be much larger than one that fits a core's cache many times over.
LARGE_CHUNK_BYTES = 16 * 2**20


class How(NamedTuple):
    """How a dataset is read.

    Attributes:
        reading: ``copied``, ``decoded``, ``locked``; None if it cannot be read.
        words: For people.
        why: Why not faster, or not at all; empty if there is nothing to say.
        field: What a source would read; None if it cannot.
    """

    reading: str | None
    words: str
    why: str = ""
    field: StoredField | None = None


def how(group: OpenGroup, name: str, layout: str | None) -> How:
    """How a field of a dataset, or of a group that stands for one, is read.

    Args:
        group: The group that is open.
        name: The dataset.
        layout: Letters of its axes, if samples are not on axis 0.
    """
    where = f"{group.path}:/{name.strip('/')}"
    try:
        with as_source_errors(where, "cannot be read", file=group.path, dataset=name):
            field = inspect_field(group, "x", Field(name), layout)["x"]
    except AsyncDataError as error:
        return How(None, "not read", _short(error, where, group.path))
    stored, ranges = field.values, isinstance(field.stored, StoredRanges)
    way = choice(stored, mapped=True)
    words = _WORDS[way] + (
        ", made dense" if ranges and field.datasets[1:] else ", padded to one length" if ranges else ""
    )
    return How(_READING[way], words, _why(stored, way, ranges=ranges), field)


_WORDS: dict[Choice, str] = {
    "raw": "copied as stored",
    "strided": "copied, gathered from all over the dataset",
    "chunks": "decoded in reader threads",
    "h5py chunks": "decoded by h5py, one chunk at a time",
    "h5py rows": "read by h5py, one thread at a time",
}


def _short(error: AsyncDataError, where: str, path: str) -> str:
    """A message without the file that the report is about."""
    text = str(error)
    for begin in (f"{where}: ", f"{path}: "):
        text = text.removeprefix(begin)
    return text.replace(f"{path}:/", "")


def _why(stored: StoredDataset, way: Choice, *, ranges: bool) -> str:
    if way == "raw":
        return ""
    reasons = []
    if stored.slow:
        reasons.append(f"{stored.slow}; pack writes it once in a way that needs no lock")
    elif way == "h5py chunks":
        reasons.append("the library that decodes its filters is missing: pip install 'lit-async-data[codecs]'")
    elif way == "strided" or stored.axis:
        reasons.append(f"samples are on axis {stored.axis}; on axis 0, each would lie in one piece")
    if way == "chunks" and stored.index is not None:
        reasons += _of_chunks(stored, stored.index.shape, ranges=ranges)
    return "; ".join(reasons)


def _of_chunks(stored: StoredDataset, chunk: tuple[int, ...], *, ranges: bool) -> list[str]:
    reasons = []
    pieces = math.prod(
        -(-n // c) for axis, (n, c) in enumerate(zip(stored.shape, chunk, strict=True)) if axis != stored.axis
    )
    if pieces > 1:
        reasons.append(f"each sample is spread over {pieces:,} chunks")
    if not stored.filtered:
        return reasons
    nbytes = functools.reduce(operator.mul, chunk, stored.dtype.itemsize) * pieces
    if stored.chunk_rows > 1 and not ranges:
        size = f", {nbytes / 2**20:.0f} MiB," if nbytes >= LARGE_CHUNK_BYTES else ""
        reasons.append(
            f"{stored.chunk_rows:,} samples share a chunk{size} and are decoded together; the chunk shuffle decodes "
            "them once per epoch"
        )
    else:
        reasons.append("compressed: each sample is decoded when it is read" if not ranges else "compressed")
    return reasons


def problem_of(error: SourceError | AsyncDataError, path: str) -> str:
    """Why a file cannot be read, without its path."""
    return " ".join(str(error).removeprefix(f"{path}: ").split())
