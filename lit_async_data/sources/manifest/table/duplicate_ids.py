"""Values that stand in more than one row, found among many millions without an object for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.manifest.table.arrow import arrow, is_coded, numbered, values_of

# Rows that are hashed together, so that what is needed beside the hashes stays in the cache.
_AT_ONCE = 2**16
# Bytes of a text that its hash sees, besides its length; rows with equal hashes are compared as they are.
_SEEN = 512
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93], np.uint64)


def repeats(array: Any) -> tuple[Indices, Indices]:
    """Rows whose value stands in an earlier row too.

    Args:
        array: Of text, text in a dictionary or whole numbers; without nulls.

    Returns:
        Those rows, ascending, and for each of them the first row of its value; int64, of one shape.
    """
    kind = array.type
    if is_coded(kind):
        array = array.dictionary_decode()
    words = values_of(array) if arrow("types").is_integer(kind) else hashes(array)
    ordered = np.sort(words)
    equal = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    if not equal.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(equal, words), equal.size - 1)
    rows = np.flatnonzero(equal[places] == words)
    codes = values_of(array.take(numbered(rows)).dictionary_encode().indices)
    _, first = np.unique(codes, return_index=True)
    again = np.ones(len(rows), np.bool_)
    again[first] = False
    return rows[again], rows[first[codes[again]]]


def hashes(array: Any) -> Words:
    """64 bits for each text; equal texts have equal ones. uint64, shape (len(array),).

    Args:
        array: Of text, without nulls.
    """
    library = arrow()
    array = array.cast(library.large_string())
    _, offsets, data = array.buffers()
    edges = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    if len(content) < 8:
        content = np.concatenate([content, np.zeros(8, np.uint8)])
    # Eight bytes from anywhere.
    words: Words = np.ndarray((len(content) - 7,), np.dtype("<u8"), content, strides=(1,))
    found = np.empty(len(array), np.uint64)
    for first in range(0, len(array), _AT_ONCE):
        some = edges[first : first + _AT_ONCE + 1]
        found[first : first + _AT_ONCE] = _hashed(words, some[:-1], np.diff(some))
    return found


def _hashed(words: Words, starts: Indices, lengths: Indices) -> Words:
    found: Words = lengths.astype(np.uint64) * _FACTORS[0]
    rows = np.flatnonzero(lengths > 0)
    for seen in range(0, _SEEN, 8):
        if not rows.size:
            break
        at = starts[rows] + seen
        # The last eight bytes of all hold what is wanted behind others.
        inside = np.minimum(at, len(words) - 1)
        word = words[inside] >> (np.uint64(8) * (at - inside).astype(np.uint64))
        left = np.minimum(lengths[rows] - seen, 8).astype(np.uint64)
        word &= np.uint64(2**64 - 1) >> (np.uint64(64) - np.uint64(8) * left)
        mixed = (found[rows] ^ word) * _FACTORS[1]
        mixed ^= mixed >> np.uint64(29)
        found[rows] = mixed * _FACTORS[0]
        rows = rows[lengths[rows] > seen + 8]
    return found
