"""The samples of a source over all of its parts: at a stride, or at chosen rows; and the names of their text."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, FormatError, SourceError
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.parts.joined import ends_of
from lit_async_data.sources.hdf5.parts.part import StoredPart, of_group, row_numbers
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.categories import named, unknown_text
from lit_async_data.sources.hdf5.storage.external_files import FileIdentity
from lit_async_data.sources.local_files import Exclude, StoredSamples, kept_samples
from lit_async_data.sources.table.labels import Labels, in_order, no_classes, note_names, trim

log = logging.getLogger(__name__)

# Parts that a message lists.
NAMED = 20
# Rows that a message names.
NAMED_ROWS = 5


def check_distinct(files: Mapping[str, FileIdentity]) -> None:
    seen: dict[tuple[int, int], str] = {}
    for path, identity in files.items():
        other = seen.setdefault((identity.device, identity.inode), path)
        if other != path:
            raise ConfigError(
                f"{other} and {path} are the same file, whose samples would count twice; give one of them", "path"
            )


def checked_stride(stride: Any, rows: object) -> int:
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
        lacking = [(part, row) for part in parts for row in part.lacks(key, part.own_rows).tolist()]
        if lacking:
            (part, row), total = lacking[0], sum(part.anchors.count for part in parts)
            error = of_group(part.lack(key, row), part.names)
            if len(lacking) == total:
                raise error
            cure = "list such samples in exclude=, or set on_error"
            log.warning("%s: %d of %d samples cannot be read: %s, %s", name, len(lacking), total, error, cure)


def without(parts: Sequence[StoredPart], exclude: Exclude, name: str) -> list[StoredPart]:
    """The parts without the samples to exclude."""
    rows = [part.own_rows for part in parts]
    stored = [
        StoredSamples(part.path, part.group, part.rows, own, part.names) for part, own in zip(parts, rows, strict=True)
    ]
    kept = np.split(kept_samples(exclude, stored, name), np.cumsum([len(own) for own in rows])[:-1])
    masked = [each for each in zip(parts, rows, kept, strict=True) if each[2].any()]
    return [part if mask.all() else part.at(own[mask]) for part, own, mask in masked]


def found_names(part: StoredPart) -> dict[str, tuple[str, ...]]:
    """The texts of fields of text, where the user gave no classes."""
    fields = part.fields.items()
    return {key: field.texts for key, field in fields if field.text and not field.text.classes}


def named_alike(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts, in which a number stands for the same text."""
    found = [found_names(part) for part in parts]
    common = {key: in_order(name for each in found for name in each.get(key, ())) for key in found[0]}
    for key, names in common.items():
        field, kind = parts[0].fields[key], getattr(parts[0].fields[key].text, "kind", None)
        if kind is None and (what := no_classes(names)):
            what = f"{field.stored}: {what}, or write kind='class' if these are the names of classes"
            raise FormatError(what, file=parts[0].path, dataset=field.values.name)
        if kind != "text":
            note_names(str(field.stored), names)
            common[key] = in_order(map(trim, names))
    return [renamed(part, common) for part in parts]


def renamed(part: StoredPart, names: Mapping[str, Sequence[str]], cure: str = "") -> StoredPart:
    """A part with text numbered by other names. Those of the user stay."""
    others = {key: tuple(names[key]) for key, own in found_names(part).items() if tuple(names.get(key, own)) != own}
    fields = {key: _renamed(part, part.fields[key], wanted, cure) for key, wanted in others.items()}
    return dataclasses.replace(part, fields={**part.fields, **fields})


def _renamed(part: StoredPart, field: StoredField, names: tuple[str, ...], cure: str) -> StoredField:
    def unknown(row: int, text: str) -> SourceError:
        return of_group(unknown_text(field.values, row, text, names, cure), part.names)

    kept = Labels(field.values.kept, field.spec.classes, texts=field.spec.texts).of_classes(names, unknown).values
    stored = dataclasses.replace(field.values, kept=kept)
    return dataclasses.replace(field, spec=named(field.spec, field.text, names), stored=stored)


def with_values(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts without the samples that lack a text or a row of the table; an error where text must not be empty."""
    return with_samples(list(map(_with_values, parts)))


def with_samples(parts: Sequence[StoredPart]) -> list[StoredPart]:
    left = [part for part in parts if part.anchors.count]
    if not left:
        raise FormatError(f"{parts[0]}: no sample is left that has a value of each field, and a row of the table")
    return left


def _with_values(part: StoredPart) -> StoredPart:
    if part.table_rows is not None and (part.table_rows < 0).any():
        part = part.at(part.anchors.rows(np.flatnonzero(part.rows_of_table() >= 0)))
    fields = [(key, each) for key, each in part.fields.items() if each.text and each.text.null != "ignore"]
    for key, field in fields:
        missing = field.values.kept == IGNORED
        missing[part.lacking[key].rows if key in part.lacking else []] = False
        if not missing.any():
            continue
        rows = part.own_rows
        own = field.window_rows(field.own(rows))
        lacks = missing[own if len(missing) > 1 else np.zeros_like(own)]
        if lacks.any() and field.text and field.text.null == "error":
            every = np.unique(own[lacks]).tolist()
            which = "row" if len(every) == 1 else "rows"
            listed = ", ".join(map(str, every[:NAMED_ROWS])) + (
                f", … ({len(every)} in all)" if len(every) > NAMED_ROWS else ""
            )
            what = f"no text in {which} {listed}; write it, or set null='ignore' (−100) or null='drop'"
            where = {"file": part.path, "dataset": field.values.name, "row": every[0]}
            place = field.stored if part.names is None else field.values.at(every[0])
            raise of_group(FormatError(f"{place}: {what}", **where), part.names)
        part = part.at(rows[~lacks.any(axis=1)])
    return part
