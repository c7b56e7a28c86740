"""Chooses how each field is stored, by a trial on samples from all over the input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.source import Source
from lit_async_data.tools.pack.planning.codec import Codec
from lit_async_data.tools.pack.planning.plan import PackedField

# Samples of this size or more have a chunk each: any order decodes exactly what it needs.
ALONE_BYTES = 4096
# Bytes of a chunk of smaller samples.
CHUNK_BYTES = 64 * 1024
# Smaller samples, such as labels, are never compressed.
LEAST_BYTES = 64
# The largest chunk that is read without libhdf5.
MOST_CHUNK_BYTES = 2**30
# ``auto`` compresses a field if that saves this share of its bytes; the shuffle filter must save another share.
LEAST_SAVED, SHUFFLE_SAVED = 1 / 3, 0.02
# Bytes and samples of the trial, in this many places of the input.
TRIAL_BYTES, TRIAL_SAMPLES, TRIAL_PLACES = 4 * 2**20, 1024, 8


class Choice(NamedTuple):
    """How fields are stored.

    Attributes:
        fields: The fields.
        codec: Of those that have chunks.
        nbytes: Bytes that all of them will take, estimated.
    """

    fields: tuple[PackedField, ...]
    codec: Codec
    nbytes: int


def choose(source: Source, codec: str, level: int | None, chunk: int | None, dtypes: Mapping[str, Any]) -> Choice:
    """Choose chunks and filters.

    Args:
        source: The input.
        codec: A codec, or ``auto``: deflate where the input must be decoded too, and deflate saves enough.
        level: Of the codec; None for the usual one.
        chunk: Samples per chunk; None to choose by the size of a sample.
        dtypes: Stored element types by batch key.

    Raises:
        ConfigError: ``codec``, ``level`` and ``chunk`` do not fit each other.
        SourceError: A sample cannot be read.
    """
    auto = codec == "auto"
    # As the input is, which is fastest.
    plainly = auto and chunk is None and source.chunks.reading in ("copied", "opened")
    chosen = Codec("none") if plainly else Codec.of("deflate" if auto else codec, level)
    if chunk is not None and (chunk < 1 or chosen.name == "none"):
        what = "is not a number of samples from 1 on" if chunk < 1 else "but without a codec, values are contiguous"
        raise ConfigError(f"chunk: {chunk} {what}; leave it out")
    spec = source.spec
    plain = {
        key: PackedField(
            key, field.stored_shape, np.dtype(dtypes[key]).str, channel=field.channel, classes=field.classes
        )
        for key, field in spec.fields.items()
    }
    samples = _trial_samples(len(source), spec.nbytes)
    values = {key: np.empty((len(samples), *field.stored_shape), field.dtype) for key, field in spec.fields.items()}
    if any(_rows(field, chosen, chunk, auto=auto) for field in plain.values()):
        source.read_into(samples, values)
    fields, total = [], 0.0
    for key, field in plain.items():
        rows = _rows(field, chosen, chunk, auto=auto)
        stored, share = _tried(field, rows, values[key], chosen, auto=auto) if rows else (field, 1.0)
        fields.append(stored)
        total += share * field.sample_bytes * len(source)
    return Choice(tuple(fields), chosen if any(field.chunk for field in fields) else Codec("none"), int(total))


def _rows(field: PackedField, codec: Codec, chunk: int | None, *, auto: bool) -> int:
    """Samples per chunk; 0 for none."""
    nbytes = field.sample_bytes
    if codec.name == "none" or nbytes < LEAST_BYTES or nbytes * (chunk or 1) > MOST_CHUNK_BYTES:
        return 0
    if chunk is not None:
        return chunk
    if nbytes >= ALONE_BYTES:
        return 1
    return 0 if auto else 2 ** (CHUNK_BYTES // nbytes).bit_length() // 2


def _tried(field: PackedField, rows: int, values: Array, codec: Codec, *, auto: bool) -> tuple[PackedField, float]:
    """The field as it is stored, and the share of its bytes that remains."""
    chunks = [values[first : first + rows].astype(field.dtype) for first in range(0, len(values), rows)]
    nbytes = sum(chunk.nbytes for chunk in chunks)
    plain = _encoded_bytes(chunks, codec, shuffle=False)
    shuffled = _encoded_bytes(chunks, codec, shuffle=True) if np.dtype(field.dtype).itemsize > 1 else plain
    shuffle = shuffled < (1 - SHUFFLE_SAVED) * plain
    share = (shuffled if shuffle else plain) / nbytes
    if auto and share > 1 - LEAST_SAVED:
        return field, 1.0
    return dataclasses.replace(field, chunk=rows, shuffle=shuffle), share


def _encoded_bytes(chunks: Sequence[Array], codec: Codec, *, shuffle: bool) -> int:
    return sum(len(codec.encode(chunk, shuffle=shuffle)) for chunk in chunks)


def _trial_samples(count: int, nbytes: int) -> Array:
    """Runs of consecutive samples, evenly spaced, in order."""
    wanted = min(max(TRIAL_BYTES // max(nbytes, 1), 1), TRIAL_SAMPLES, count)
    places = min(TRIAL_PLACES, wanted)
    starts = np.linspace(0, count - wanted // places, places).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(wanted // places))
