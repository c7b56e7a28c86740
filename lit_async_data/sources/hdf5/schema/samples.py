"""Which samples a source has, over all of its parts: those at every so many rows, or those that were chosen."""

from __future__ import annotations

import itertools
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.sources.hdf5.schema.part import StoredPart, row_numbers
from lit_async_data.sources.hdf5.storage.identity import FileIdentity

log = logging.getLogger(__name__)

# Parts that are named in a message.
NAMED = 5


def check_distinct(files: Mapping[str, FileIdentity]) -> None:
    """Make sure that no two paths lead to one file.

    Raises:
        ConfigError: Two do, through a link; names both.
    """
    seen: dict[tuple[int, int], str] = {}
    for path, identity in files.items():
        other = seen.setdefault((identity.device, identity.inode), path)
        if other != path:
            raise ConfigError(f"path: {other} and {path} are the same file; its samples would count double")


def checked_stride(stride: Any, rows: object) -> int:
    """The stride that was given, or 1.

    Raises:
        ConfigError: It is no whole number from 1 on, or rows were chosen too.
    """
    if stride is None:
        return 1
    whole = isinstance(stride, numbers.Integral) and not isinstance(stride, bool)
    if not whole or stride < 1:
        raise ConfigError(f"stride: {stride!r} is not a whole number from 1 on")
    if rows is not None:
        raise ConfigError("stride: not together with rows, which say where samples lie; give one of the two")
    return int(stride)


def select_rows(parts: Sequence[StoredPart], rows: npt.ArrayLike | None) -> list[StoredPart]:
    """Parts with the samples at chosen rows.

    Args:
        parts: All of them.
        rows: Numbers or a mask, over the rows of all parts.

    Raises:
        ConfigError: A number is not one of a row, or they do not go through the parts in their order.
    """
    starts = np.cumsum([0, *(part.rows for part in parts)])
    chosen = row_numbers(np.asarray(rows), int(starts[-1]))
    wrong = (chosen < 0) | (chosen >= starts[-1])
    if wrong.any():
        raise ConfigError(f"rows: {chosen[wrong.argmax()]} is none of the {starts[-1]} rows there are")
    which = np.searchsorted(starts, chosen, side="right") - 1
    if (np.diff(which) < 0).any():
        raise ConfigError(
            "rows: they go back to a part that others came after; sort them, or choose samples of the whole source in "
            "any order: SubsetSource(source, samples)"
        )
    edges = np.searchsorted(which, np.arange(len(parts) + 1)).tolist()
    return [
        part.at(chosen[begin:end] - start)
        for part, start, (begin, end) in zip(parts, starts[:-1], itertools.pairwise(edges), strict=True)
    ]


def drop_empty(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """Those parts that have samples; the others are named, since a window may be meant to be shorter.

    Raises:
        FormatError: None has any.
    """
    short = [part for part in parts if not part.anchors.count and part.anchors.chosen is None]
    if short:
        spans = [field.span for field in short[0].fields.values()]
        window = max(end for _, end in spans) - min(begin for begin, _ in spans)
        named = ", ".join(f"{part} ({part.rows} rows)" for part in short[:NAMED])
        said = f"{named}{', …' if len(short) > NAMED else ''}: shorter than the windows of a sample, {window} rows"
        if len(short) == len(parts):
            raise FormatError(f"{said}; make window shorter", file=short[0].path)
        log.warning("%d of %d parts have no sample: %s", len(short), len(parts), said)
    return [part for part in parts if part.anchors.count]
