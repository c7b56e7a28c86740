"""The samples of a source over all of its parts: at a stride, or at chosen rows."""

from __future__ import annotations

import itertools
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.sources.hdf5.parts.part import StoredPart, of_group, row_numbers
from lit_async_data.sources.hdf5.storage.identity import FileIdentity
from lit_async_data.sources.local_files.bad_lists import Exclude, StoredSamples, kept_samples

log = logging.getLogger(__name__)

# Parts that a message lists.
NAMED = 20


def check_distinct(files: Mapping[str, FileIdentity]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for path, identity in files.items():
        other = seen.setdefault((identity.device, identity.inode), path)
        if other != path:
            raise ConfigError(
                f"{other} and {path} are the same file, whose samples would count twice; give one of them", "path"
            )


def checked_stride(stride: Any, rows: object) -> int:
    """The stride, by default 1."""
    if stride is None:
        return 1
    whole = isinstance(stride, numbers.Integral) and not isinstance(stride, bool)
    if not whole or stride < 1:
        raise ConfigError(f"{stride!r} is not a whole number from 1 on", "stride")
    if rows is not None:
        raise ConfigError(
            "cannot be combined with rows, which already place the samples; give one of the two", "stride"
        )
    return int(stride)


def select_rows(parts: Sequence[StoredPart], rows: npt.ArrayLike | None) -> list[StoredPart]:
    """The parts, with samples at chosen rows: numbers or a mask, over the rows of all parts."""
    starts = np.cumsum([0, *(part.rows for part in parts)])
    chosen = row_numbers(np.asarray(rows), int(starts[-1]))
    wrong = (chosen < 0) | (chosen >= starts[-1])
    if wrong.any():
        raise ConfigError(f"{chosen[wrong.argmax()]} is not one of the {starts[-1]} rows of all parts", "rows")
    which = np.searchsorted(starts, chosen, side="right") - 1
    if (np.diff(which) < 0).any():
        raise ConfigError(
            "they go back to an earlier part; sort them, or choose samples of the whole source in any order: "
            "SubsetSource(source, samples)",
            "rows",
        )
    edges = np.searchsorted(which, np.arange(len(parts) + 1)).tolist()
    return [
        part.at(chosen[begin:end] - start)
        for part, start, (begin, end) in zip(parts, starts[:-1], itertools.pairwise(edges), strict=True)
    ]


def with_rows(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts that have rows; one line of the log names the others."""
    empty = [part for part in parts if part.empty]
    if len(parts) == 1 and parts[0].empty:
        raise parts[0].empty
    if empty:
        listed = _named([str(part) for part in empty])
        if len(empty) == len(parts):
            raise FormatError(f"{listed}: none of them holds samples; check path= and group=", file=empty[0].path)
        log.warning("%d of %d parts hold no samples and are left out: %s", len(empty), len(parts), listed)
    return [part for part in parts if not part.empty]


def _named(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return ", ".join(parts[:NAMED]) + more


def rows_left_out(parts: Sequence[StoredPart]) -> str:
    """How many rows begin no window, since it would reach beyond their part; empty if there are none."""
    ranges = [(part.rows, *part.anchor_range) for part in parts]
    lost = sum(rows - max(last - first + 1, 0) for rows, first, last in ranges)
    if not lost:
        return ""
    ends = ["start"] * any(first > 0 for _, first, _ in ranges) + ["end"] * any(last < n - 1 for n, _, last in ranges)
    total = sum(rows for rows, _, _ in ranges)
    return f"{lost:,} of {total:,} rows begin no window (the {' and the '.join(ends)} of each part)"


def drop_empty(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts that have samples. Warns of the others, since the user may have meant a shorter window."""
    short = [part for part in parts if not part.anchors.count and part.anchors.chosen is None]
    if short:
        spans = [field.inside for field in short[0].fields.values()]
        window = max(end for _, end in spans) - min(begin for begin, _ in spans)
        named = _named([f"{part} ({part.rows} rows)" for part in short])
        listed = f"{named}: shorter than the windows of a sample, {window} rows"
        if len(short) == len(parts):
            raise FormatError(f"{listed}; make window shorter, or write Field(pad='last')", file=short[0].path)
        log.warning("%d of %d parts have no sample: %s", len(short), len(parts), listed)
    return [part for part in parts if part.anchors.count]


def warn_of_lacking(parts: Sequence[StoredPart], name: str) -> None:
    """Log, for each field, how many samples are known to lack it, and the first of them."""
    for key in dict.fromkeys(key for part in parts for key in part.lacking if key in part.fields):
        rows = [part.lacks(key, part.anchors.rows(np.arange(part.anchors.count))) for part in parts]
        lacking = [(part, row) for part, own in zip(parts, rows, strict=True) for row in own[own >= 0].tolist()]
        if lacking:
            (part, row), total = lacking[0], sum(map(len, rows))
            error = of_group(part.lack(key, row), part.names)
            if len(lacking) == total:
                raise error
            cure = "list such samples in exclude=, or set on_error"
            log.warning("%s: %d of %d samples cannot be read: %s, %s", name, len(lacking), total, error, cure)


def without(parts: Sequence[StoredPart], exclude: Exclude, name: str) -> list[StoredPart]:
    """The parts without the samples to exclude."""
    rows = [part.anchors.rows(np.arange(part.anchors.count)) for part in parts]
    stored = [
        StoredSamples(part.path, part.group, part.rows, own, part.names) for part, own in zip(parts, rows, strict=True)
    ]
    kept = np.split(kept_samples(exclude, stored, name), np.cumsum([len(own) for own in rows])[:-1])
    return [
        part if mask.all() else part.at(own[mask])
        for part, own, mask in zip(parts, rows, kept, strict=True)
        if mask.any()
    ]
