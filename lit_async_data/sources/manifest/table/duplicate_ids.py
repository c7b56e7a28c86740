"""Finds values that occur in several rows, among many millions, without a Python object for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.manifest.table.arrow import arrow, arrow_integers, is_categorical, values_of

# Rows that are hashed together, so that temporary arrays fit the CPU cache.
_BLOCK_ROWS = 2**16
# Leading bytes of a text that enter its hash, besides its length; rows with equal hashes are compared exactly.
_HASHED_BYTES = 512
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93], np.uint64)


def duplicate_rows(array: Any) -> tuple[Indices, Indices]:
    """Find rows whose value also occurs in an earlier row.

    Args:
        array: Text, categorical text or whole numbers, without nulls.

    Returns:
        Those rows, ascending, and for each of them the first row with its value; int64, same shape.
    """
    kind = array.type
    if is_categorical(kind):
        array = array.dictionary_decode()
    words = values_of(array) if arrow("types").is_integer(kind) else hashed_texts(array)
    ordered = np.sort(words)
    equal = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not equal.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(equal, words), equal.size - 1)
    rows = np.flatnonzero(equal[places] == words)
    codes = values_of(array.take(arrow_integers(rows)).dictionary_encode().indices)
    _, first = np.unique(codes, return_index=True)
    again = np.ones(len(rows), np.bool_)
    again[first] = False
    return rows[again], rows[first[codes[again]]]


def hashed_texts(array: Any) -> Words:
    """A 64-bit hash of each text; equal texts have equal hashes. uint64, shape (len(array),).

    Args:
        array: Text, without nulls.
    """
    library = arrow()
    array = array.cast(library.large_string())
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    if len(content) < 8:
        content = np.concatenate([content, np.zeros(8, np.uint8)])
    # Overlapping 8-byte words, one from each byte offset.
    words: Words = np.ndarray((len(content) - 7,), np.dtype("<u8"), content, strides=(1,))
    hashes = np.empty(len(array), np.uint64)
    for first in range(0, len(array), _BLOCK_ROWS):
        block = edges[first : first + _BLOCK_ROWS + 1]
        hashes[first : first + _BLOCK_ROWS] = _hashed(words, block[:-1], np.diff(block))
    return hashes


def _hashed(words: Words, starts: Indices, lengths: Indices) -> Words:
    hashes: Words = lengths.astype(np.uint64) * _FACTORS[0]
    rows = np.flatnonzero(lengths > 0)
    for done in range(0, _HASHED_BYTES, 8):
        if not rows.size:
            break
        offsets = starts[rows] + done
        # The last word holds the bytes at the end of the buffer, which are shifted down.
        inside = np.minimum(offsets, len(words) - 1)
        word = words[inside] >> (np.uint64(8) * (offsets - inside).astype(np.uint64))
        length = np.minimum(lengths[rows] - done, 8).astype(np.uint64)
        word &= np.uint64(2**64 - 1) >> (np.uint64(64) - np.uint64(8) * length)
        mixed = (hashes[rows] ^ word) * _FACTORS[1]
        mixed ^= mixed >> np.uint64(29)
        hashes[rows] = mixed * _FACTORS[0]
        rows = rows[lengths[rows] > done + 8]
    return hashes
