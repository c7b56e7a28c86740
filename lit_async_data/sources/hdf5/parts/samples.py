"""The samples of a source over all of its parts: at a stride, or at chosen rows."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.parts.joined import ends_of
from lit_async_data.sources.hdf5.parts.part import PartRequest, StoredPart, of_group, row_numbers
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
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


def select_rows(parts: Sequence[StoredPart], rows: Any, every: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts, with samples at chosen rows: numbers or a mask, over the rows of all parts or by part.

    ``every`` part counts in a list, also one without rows, which ``parts`` lack.
    """
    names = _names_of(every)
    by_part = _by_part(rows, names)
    if by_part is not None:
        own = [by_part.pop(str(part), ()) for part in parts]
        if wrong := next((name for name, of in by_part.items() if np.size(of)), ""):
            raise ConfigError(f"{wrong} has no rows to choose; leave it out", "rows")
        chosen = [row_numbers(of, part.rows, f"for {part}: it", none=True) for of, part in zip(own, parts, strict=True)]
        if not any(map(len, chosen)):
            raise ConfigError("they choose no row of any part; choose some", "rows")
        return [part.at(each) for part, each in zip(parts, chosen, strict=True)]
    try:
        return _selected(parts, rows)
    except ConfigError as error:
        if len(parts) == 1:
            raise
        name = next(name for name, part in names.items() if part == str(parts[0]))
        what = f"an array counts over the rows of all {len(parts)} parts, put end to end (if yours count from 0 in each"
        cure = f"part, give a mapping, rows={{{name!r}: […], …}}, or a list with an array for each part)"
        raise ConfigError(f"{what} {cure}: {error.message}", "rows") from None


def _selected(parts: Sequence[StoredPart], rows: Any) -> list[StoredPart]:
    """The parts, with samples at rows that are counted over all of them."""
    starts = np.cumsum([0, *(part.rows for part in parts)])
    given = row_numbers(rows, int(starts[-1]))
    which = np.searchsorted(starts, given, side="right") - 1
    if (wrong := (which < 0) | (which == len(parts))).any():
        raise ConfigError(f"{given[wrong.argmax()]} is not one of the {starts[-1]} rows of all parts", "rows")
    if (back := np.flatnonzero(np.diff(which) < 0)).size:
        before, after = (f"row {given[at]}, in {parts[int(which[at])]}" for at in (back[0], back[0] + 1))
        other = "For samples of the whole source in any order: SubsetSource(source, samples)"
        raise ConfigError(f"{after}, comes after {before}. {other}", "rows")
    of_part = np.split(given, np.searchsorted(which, np.arange(1, len(parts))))
    return [part.at(each - start) for part, start, each in zip(parts, starts[:-1], of_part, strict=True)]


def _names_of(parts: Sequence[StoredPart]) -> dict[str, str]:
    """The parts by each name that only one has: ends of the path of its file, or of this and its group."""
    ends = {str(p): ends_of(p.path if p.group == "/" or p.names is not None else str(p).lstrip("/")) for p in parts}
    times = collections.Counter(itertools.chain(*ends.values()))
    pairs = [(end, part) for part, listed in ends.items() for end in (*reversed(listed), part)]
    return {end: part for end, part in pairs if times[end] == 1 or end == part}


def _by_part(rows: Any, names: Mapping[str, str]) -> dict[str, Any] | None:
    """Rows by their part, or None if they are not given so."""
    every = list(dict.fromkeys(names.values()))
    if isinstance(rows, Mapping):
        found = [names.get(str(key), names.get(str(key).strip("/"), "")) for key in rows]
        for number, (key, part) in enumerate(zip(rows, found, strict=True)):
            if not part or part in found[:number]:
                what = "is the end of no part, or of several" if not part else "names a part that another key names"
                raise ConfigError(f"{key!r} {what}; parts are {_named(every)}", "rows")
    elif isinstance(rows, Sequence) and any(hasattr(each, "__len__") and np.ndim(each) for each in rows):
        if len(rows) != (count := len(every)):
            what = f"a list for {len(rows)} parts, but there are {count}; give an array for each, empty for none"
            raise ConfigError(f"{what}: {_named(every)}", "rows")
        found = every
    else:
        return None
    given = rows.values() if isinstance(rows, Mapping) else rows
    return {part: () if of is None else of for part, of in zip(found, given, strict=True)}


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


def parts_left_out(parts: Sequence[StoredPart]) -> str:
    """How many parts have none of the chosen rows; empty if all have some."""
    lost = [part for part in parts if not part.anchors.count]
    return f"no row is chosen of {len(lost)} of {len(parts)} parts, such as {lost[0]}" if lost else ""


def rows_left_out(parts: Sequence[StoredPart]) -> str:
    """How many rows begin no window, since it would reach beyond their part; empty if there are none."""
    ranges = [(part.rows, *part.anchor_range) for part in parts]
    lost = sum(rows - max(last - first + 1, 0) for rows, first, last in ranges)
    if not lost:
        return ""
    ends = ["start"] * any(first > 0 for _, first, _ in ranges) + ["end"] * any(last < n - 1 for n, _, last in ranges)
    total = sum(rows for rows, _, _ in ranges)
    return f"{lost:,} of {total:,} rows begin no window (the {' and the '.join(ends)} of each part)"


def with_absent(parts: list[StoredPart], request: PartRequest) -> list[StoredPart]:
    """The parts, in which a field that no sample of a file has is as in another file; nothing reads it."""
    of_key = {key: field for part in reversed(parts) for key, field in part.fields.items()}
    for key, error in (each for part in parts for each in part.absent.items()):
        if key not in of_key:
            raise error
    filled = list[StoredPart]()
    for part in parts:
        fields = dict(part.fields) | {key: _absent(of_key[key], part) for key in part.absent}
        fields = {key: fields[key] for key in (request.fields if part.absent else fields)}
        filled.append(dataclasses.replace(part, fields=fields, absent={}))
    return filled


def _absent(of: StoredField, part: StoredPart) -> StoredField:
    """A field of a part that is as in another one."""
    stored, sequences, names = of.values, of.sequences, part.names
    assert names is not None
    count = len(names)
    kept = None if stored.kept is None else np.full(count, IGNORED if of.text else 0, stored.dtype)
    shape = (count, *stored.shape[1:])
    rows = dataclasses.replace(stored, path=part.path, shape=shape, index=None, names=part.names, kept=kept)
    if sequences:
        first: Any = sequences
        places, chunks = (np.repeat(each[:1], count, axis=0) for each in (first.references, first.chunks))
        sequences = dataclasses.replace(sequences, rows=rows, references=places, chunks=chunks)
    images = of.images and dataclasses.replace(of.images, rows=rows)
    return dataclasses.replace(of, stored=rows, images=images, sequences=sequences)


def drop_empty(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts that have samples. Warns of the others, since the user may have meant a shorter window."""
    short = [part for part in parts if not part.anchors.count and part.anchors.chosen is None]
    if short:
        fields = short[0].fields.values()
        spans = [field.inside for field in fields]
        window = max(end for _, end in spans) - min(begin for begin, _ in spans)
        named = _named([f"{part} ({part.rows} rows)" for part in short])
        listed = f"{named}: shorter than the windows of a sample, {window} rows"
        if len(short) == len(parts):
            of, cure = (
                max(fields, key=lambda field: field.inside[1]).values,
                "make window shorter, or write Field(pad='last')",
            )
            if any(size >= window for axis, size in enumerate(of.shape) if axis != of.axis):
                cure = "if they are to lie along another axis, call that N in layout=; else make window shorter"
            what = f"{listed}; windows lie along N, axis {of.axis} of {of.name}, of shape {of.shape}: {cure}"
            raise FormatError(what, file=short[0].path)
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
