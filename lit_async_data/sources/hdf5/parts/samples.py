"""The samples of a source over all of its parts: at a stride, or at chosen rows; their rows in a table."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import ConfigError, FormatError, MissingError, SourceError, few
from lit_async_data.options import one_of
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.parts.part import PartRequest, StoredPart, row_numbers
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.categories import named, unknown_text
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges
from lit_async_data.sources.hdf5.schema.field import Field, FieldLike, check_options
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset
from lit_async_data.sources.hdf5.select import TimedWindow, Window
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.handles import open_h5py
from lit_async_data.sources.local_files import Exclude, StoredSamples, ends_of, kept_samples
from lit_async_data.sources.table.embedded import EmbeddedFiles
from lit_async_data.sources.table.formats import NoColumnError, is_number, is_text_list, numpy_values, quoted
from lit_async_data.sources.table.labels import Labels, in_order, no_classes, note_names, trim
from lit_async_data.sources.table.table import Table, TableReader

#: Whose rows the table has: ``"file"``, ``"group"``, or ids; or a mapping from the name of the column to one of these.
On = str | Field | Mapping[str, FieldLike]
Unmatched = Literal["error", "skip"]
# The key of the field of ids, by which rows of the table are found, while parts are inspected.
KEY = "(on)"
OPTIONS = {"name", "dtype", "classes", "kind", "null", "separator"}
NAMED = 20  # parts that a message lists

_log = logging.getLogger(__name__)


class JoinedTable:
    def __init__(
        self, table: Any, on: Any, unmatched: Unmatched, filters: Any, fields: Mapping[str, Field], *, files: Files
    ) -> None:
        if on is None:
            raise ConfigError("goes with on, which says whose rows they are: 'file', 'group', …; give both", "table")
        self._files = files
        one_of("unmatched", unmatched, get_args(Unmatched))
        self._column, self._what = _column_and_what(on)
        self._skip, self._reader = unmatched == "skip", TableReader(files.copied(table), filters)
        # The fields that are columns of the table.
        self.fields = {key: field for key, field in fields.items() if not field.attr and self._find(field.dataset)}
        check_options(self.fields, OPTIONS, "to a column of the table")
        try:
            self._table = self._reader.columns([self._column, *(field.dataset for field in self.fields.values())])
        except NoColumnError as error:
            if error.dataset != self._column:
                raise ConfigError(f"{error}", "filters") from None
            what = next(iter(on.values())) if isinstance(on, Mapping) else on
            if isinstance(on, Mapping) and self._column in ("file", "group"):
                what = self._column  # and not the other way round
            raise ConfigError(f"{error}; write the name of the column first: on={{COLUMN: {what!r}}}", "on") from None
        self.labels = dict[str, Labels]()  # the values of `fields`, one for each row of the table that has samples
        of = self._what
        # The field of ids, by `KEY`; empty if the file or the group of a sample determines its row.
        self.keys = {KEY: dataclasses.replace(of, kind="text", null="error")} if isinstance(of, Field) else {}

    def _find(self, name: str) -> Table | None:
        if isinstance(self._what, Field) and self._what.dataset == name:
            return None
        with contextlib.suppress(NoColumnError):
            return self._reader.columns([name])
        return None

    def join(self, parts: Sequence[StoredPart], order: Sequence[str]) -> list[StoredPart]:
        for field in self.fields.values():
            self._refuse_both(field.dataset, parts[0])
        if isinstance(self._what, Field):
            units = {text: [text] for text in parts[0].fields[KEY].texts}
            own = self._ids(parts)
        else:
            found = [groups_of(part) if self._what == "group" else [part.path] for part in parts]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(itertools.chain(*found)))}
            units = {name: ends_of(name) for name in numbers}
            own = [np.array([numbers[name] for name in each]) for each in found]
        rows = self._kept(np.append(self._rows_of(units), -1))  # the last row: for samples without an id
        return [self._joined(part, rows[np.maximum(each, -1)], order) for part, each in zip(parts, own, strict=True)]

    def _ids(self, parts: Sequence[StoredPart]) -> list[Indices]:
        """The number of the id of each row, negative if it is empty."""
        every = [part.fields[KEY].values for part in parts]
        for stored in every:
            if stored.kept is None:
                raise ConfigError(f"{stored} holds {stored.dtype}; name a dataset of ids: text or whole numbers", "on")
        at = [(each, row) for each in every for row in np.flatnonzero(each.kept < 0).tolist()]
        if at:
            stored, row = at[0]
            skipped = self._skip and len(at) < sum(len(each.kept) for each in every)
            what = "no id" + f", as in {len(at)} rows in all" * (len(at) > 1)
            what += "; write it" * (not skipped)
            what += ", or set unmatched='skip' to leave such samples out" * (not self._skip)
            error = stored.error(FormatError, what, row)
            if not skipped:
                raise error
            _log.warning("%s; their samples are left out", error)
        return [each.kept for each in every]

    def _rows_of(self, units: Mapping[str, Sequence[str]]) -> Indices:
        """The row of the table for each unit, a file, group or id, by any of its names; −1 if there is none."""
        codes, texts = self._table.encoded(self._column)
        counts = collections.Counter(itertools.chain(*units.values()))
        unit_of = {name: unit for unit, names in units.items() for name in names if counts[name] == 1}
        rows, origin = dict[str, int](), self._table.origin
        for row, text in enumerate(map(texts.__getitem__, codes.tolist())):
            unit = unit_of.get(text, text)
            if rows.setdefault(unit, row) != row:
                what = f"{quoted(text)} is in {origin.where(rows[unit])} too; keep one of them"
                raise origin.error(what, row=row, column=self._column)
        lost, unused = [unit for unit in units if unit not in rows], [each for each in rows if each not in units]
        of = f"of {len(units)} {self._what if isinstance(self._what, str) else 'id'}s"
        whole = self._reader.unfiltered(self._column) if lost else []
        if filtered := {unit_of.get(text, text) for text in whole}.intersection(lost):
            away = f"the filters leave out the rows of {len(filtered)} {of}"
            if len(lost) == len(units):
                raise origin.error(f"{away}, and no other has one; change filters", column=self._column)
            _log.info("%s: %s", origin.name, away)
            lost = [unit for unit in lost if unit not in filtered]
        left = f"{len(unused)} of its rows have no samples: {few(list(map(quoted, unused)))}" if unused else ""
        if lost:
            own = {unit: [name for name in units[unit] if counts[name] == 1] or [unit] for unit in lost}
            what = f"{len(lost)} {of} have no row: {few([quoted(own[unit][-1]) for unit in lost])}"
            others = {text.strip().lstrip("0") for text in texts if text not in counts}
            near = others & {name.strip().lstrip("0") for unit in lost for name in units[unit]}
            zeros = " (ids are compared as text: 0012 is not 12, and '12 ' is not '12')" if near else ""
            skip = "" if self._skip else ", or set unmatched='skip' to leave their samples out"
            cure = f"it has {few(list(map(quoted, texts)))}{zeros}; add rows{skip}"
            several = [(name, unit) for unit in lost for name in units[unit] if name in unused]
            for name, unit in several:
                cure = f"{quoted(name)} is the name of {counts[name]} of them; write {own[unit][-1]}"
            if several or not self._skip or len(lost) == len(units):
                raise origin.error(f"{what}; {cure}", column=self._column)
            _log.warning("%s: %s; their samples are left out%s", origin.name, what, left and f"; {left}")
        elif left:
            _log.info("%s: %s", origin.name, left)
        return np.array([rows.get(unit, -1) for unit in units], np.int64)

    def _kept(self, rows: Indices) -> Indices:
        """Keep only these rows of the table. Returns their new numbers: −1 where a row is −1, or a value is dropped."""
        used, whole = np.unique(rows[rows >= 0]), self._table
        self._table = whole.taken(used)
        self._reader.select(used)
        self.labels = {key: _labels_of(field, self._table, whole) for key, field in self.fields.items()}
        dropped = np.concatenate([np.empty(0, np.int64), *(labels.dropped for labels in self.labels.values())])
        return np.where(np.isin(rows, np.delete(used, dropped)), np.searchsorted(used, rows), -1)

    def _joined(self, part: StoredPart, rows: Indices, order: Sequence[str]) -> StoredPart:
        fields = {key: field for key, field in part.fields.items() if key != KEY}
        for key, labels in self.labels.items():
            field, spec, kept = self.fields[key], labels.spec, labels.values[rows]
            name, shape = f"{field.dataset} of {self._table.origin.name}", (part.rows, *spec.shape)
            stored = StoredDataset(part.path, name, shape, kept.dtype, 0, spec, kept=kept)
            text = kept.ndim == 1 and (labels.classes or labels.texts)
            fields[key] = StoredField(stored, spec, text=dataclasses.replace(field, null="ignore") if text else None)
        return dataclasses.replace(part, fields={key: fields[key] for key in [*order, *fields]}, table_rows=rows)

    def column(self, name: str, parts: Sequence[StoredPart]) -> npt.NDArray[Any] | None:
        if (table := self._find(name)) is None:
            return None
        self._refuse_both(name, parts[0])
        if isinstance(table.array(name), EmbeddedFiles):
            what = f"{self._table.origin.name}: column {quoted(name)} holds the bytes of files; name another"
            raise MissingError(what, dataset=name)
        return np.asarray(numpy_values(table.array(name))[np.concatenate([part.rows_of_table() for part in parts])])

    def _refuse_both(self, name: str, part: StoredPart) -> None:
        with as_source_errors(part.path, "cannot be read", file=part.path), open_h5py(part.path, self._files) as file:
            group = OpenGroup(file, part.path, part.group_of(0), IndexCache(None), allow_external=True)
            if group.node(group.name(name)) is not None:
                what = f"{part}: {name!r} is a dataset, and a column of {self._table.origin.name}; rename the column"
                raise ConfigError(what, file=part.path, dataset=name)


def _column_and_what(on: Any) -> tuple[str, str | Field]:
    """The column of the table that ``on`` names, and whose rows it has: ``"file"``, ``"group"``, or a field of ids."""
    name = on.attr or os.path.basename(on.dataset) if isinstance(on, Field) else on
    column, what = next(iter(on.items())) if isinstance(on, Mapping) and len(on) == 1 else (name, on)
    if not isinstance(column, str):
        what = f"{on!r} does not say whose rows the table has: 'file', 'group', the name of a dataset, or Field(attr=…)"
        raise ConfigError(f"{what}; if the column of the table has another name, {{COLUMN: one of these}}", "on")
    return column, what if what in ("file", "group") else Field.of(what, "on.")


def groups_of(part: StoredPart) -> list[str]:
    return [part.group_of(row).strip("/") for row in range(1 if part.names is None else part.rows)]


def _labels_of(field: Field, table: Table, whole: Table) -> Labels:
    untyped, classes = table.origin.untyped and field.classes is None, field.classes
    name, split = field.dataset, field.separator
    kind = field.kind or ("number" if untyped and is_number(table.first(name, split)) else None)
    text = whole.is_text(name) or is_text_list(whole.array(name).type)
    if classes is None and (kind == "class" or (kind is None and text)):
        classes = whole.labels(name, null="ignore", kind=kind, separator=split).classes
    labels = table.labels(name, classes=classes, null=field.null, kind=kind, separator=split)
    dtype = None if field.dtype is None else np.dtype(field.dtype)
    return labels.cast(dtype, lambda row, what: table.origin.error(what, row=row, column=field.dataset))


def select_rows(parts: Sequence[StoredPart], rows: Any, every: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts with samples at chosen rows. In a list by part, ``every`` part has an entry, also an empty one."""
    names = _names_of(every)
    by_part = _by_part(rows, names)
    if by_part is not None:
        own = [(part, by_part.pop(str(part), ())) for part in parts]
        if wrong := next((name for name, of in by_part.items() if np.size(of)), ""):
            raise ConfigError(f"{wrong} has no rows to choose; leave it out", "rows")
        found = [(part, row_numbers(of, part.rows, f"for {part}: it", none=True, clock=part.clock)) for part, of in own]
        if not any(len(each) for _, each in found):
            raise ConfigError("they choose no row of any part; choose some", "rows")
        return [part.at(each) for part, each in found]
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
    if parts[0].clock and len(parts) > 1:
        raise ConfigError("with rate= or time=, seconds count from the beginning of each part", "rows")
    given = row_numbers(rows, int(starts[-1]), clock=parts[0].clock)
    which = np.searchsorted(starts, given, side="right") - 1
    if (wrong := (which < 0) | (which == len(parts))).any():
        named = parts[0].named(int(given[wrong.argmax()]))
        raise ConfigError(f"{named} is not one of the {starts[-1]} rows of all parts", "rows")
    if (back := np.flatnonzero(np.diff(which) < 0)).size:
        before, after = (f"row {given[at]}, in {parts[int(which[at])]}" for at in (back[0], back[0] + 1))
        other = "For samples of the whole source in any order: SubsetSource(source, samples)"
        raise ConfigError(f"{after}, comes after {before}. {other}", "rows")
    of_part = np.split(given, np.searchsorted(which, np.arange(1, len(parts))))
    return [part.at(each - start) for part, start, each in zip(parts, starts[:-1], of_part, strict=True)]


def _names_of(parts: Sequence[StoredPart]) -> dict[str, str]:
    """The parts by each name that only one part has: an end of the path of its file, or of the path and the group."""
    ends = {str(p): ends_of(p.path if p.group == "/" or p.names is not None else str(p).lstrip("/")) for p in parts}
    times = collections.Counter(itertools.chain(*ends.values()))
    pairs = [(end, part) for part, listed in ends.items() for end in (*reversed(listed), part)]
    return {end: part for end, part in pairs if times[end] == 1 or end == part}


def _by_part(rows: Any, names: Mapping[str, str]) -> dict[str, Any] | None:
    """The rows of each part, or None if they are not given by part."""
    every = list(dict.fromkeys(names.values()))
    if isinstance(rows, Mapping):
        found, given = [names.get(str(key), names.get(str(key).strip("/"), "")) for key in rows], list(rows.values())
        for number, (key, part) in enumerate(zip(rows, found, strict=True)):
            if not part or part in found[:number]:
                what = "is the end of no part, or of several" if not part else "names a part that another key names"
                raise ConfigError(f"{key!r} {what}; parts are {few(every, NAMED)}", "rows")
    elif isinstance(rows, Sequence) and any(hasattr(each, "__len__") and np.ndim(each) for each in rows):
        if len(rows) != (count := len(every)):
            what = f"a list for {len(rows)} parts, but there are {count}; give an array for each, empty for none"
            raise ConfigError(f"{what}: {few(every, NAMED)}", "rows")
        found, given = every, list(rows)
    else:
        return None
    return {part: () if of is None else of for part, of in zip(found, given, strict=True)}


def log_warnings(parts: Sequence[StoredPart], spec: BatchSpec, request: PartRequest) -> None:
    part, right = parts[0], "NHWC" if request.sample == "row" else "HWC"
    for key, each in spec.items():
        images = each.dtype == np.uint8 and len(each.shape) == 3 and each.shape[2] in (3, 4)
        if images and min(each.shape[:2]) > 4 and "C" in request.layouts.get(key, "C"):
            layout = f"layout={{{key!r}: {right!r}}} puts channels first, and letters without a C leave the axes so"
            _log.warning("%s: samples of shape %s look like images with the channels last; %s", key, each.shape, layout)
    key, first = next(iter(part.fields.items()))
    if (n := first.window.span[0]) > 1 and not first.window.axis:  # an input, rarely ahead of the target
        _log.warning("%s: window=%d is a single row, %d rows ahead; window=(0, %d) is %d rows", key, n, n, n, n)
    fields = [each for field in part.fields.values() for each in field.channels or (field,)]
    for name, reason in {str(field.values): field.values.slow for field in fields if field.values.slow}.items():
        _log.warning("%s: is read by h5py, one thread at a time: %s", name, reason)
    windows = ((f"{part}: {key}", field.window) for part in parts for key, field in part.fields.items())
    doubts = (f"{of}: {each.doubt}" for of, each in windows if isinstance(each, TimedWindow) and each.doubt)
    if doubt := next(doubts, ""):
        _log.warning("%s", doubt)
    rates = {each.clock.rate: each for each in parts if each.clock and np.isfinite(each.clock.rate)}
    if rates and max(rates) > 1.01 * min(rates) and any(of.window.axis and type(of.window) is Window for of in fields):
        pair = ", ".join(f"{rates[rate]} has {rate:.6g} rows per second" for rate in (min(rates), max(rates)))
        _log.warning("%s: windows of rows differ in seconds; give offsets= in seconds with time=, or resample", pair)
    stored = [each.stored for part in parts for each in part.fields.values()]
    ends: list[Any] = [(each, each.offsets[-1], each.values.rows) for each in stored if isinstance(each, StoredRanges)]
    ends += [(each, each.episodes.ends[-1], each.rows) for each in parts if each.given_episodes and not each.steps]
    for left in [each for each in ends if each[1] + 1 == each[2]][:1]:
        _log.warning("%s: the last end is at %d of %d rows; if ends are last rows, write each plus 1", *left)
    every = ((each for of in own.fields.values() for each in of.channels or (of,)) for own in parts)
    found = ({str(each.values): each for each in own if each.packed or each.raw} for own in every)
    for name, field in next(filter(None, found), {}).items():
        cure = "Field(mask_and_scale=True) applies it" if field.packed else "unpack them in a transform"
        _log.warning("%s: has %s, but values come as stored; %s", name, ", ".join(field.packed or field.raw), cure)


def with_longest(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts, with samples of variable length padded to the longest sample of all parts."""
    lengths = [(key, field.spec.shape[0]) for part in parts for key, field in part.fields.items() if field.spec.ragged]
    longest, padded = dict(sorted(lengths)), list(parts)  # of each key, the last counts
    for number, part in enumerate(parts if longest else ()):
        fields = dict(part.fields)
        for key, field in fields.items():
            if field.spec.ragged:
                spec = dataclasses.replace(field.spec, shape=(longest[key], *field.spec.shape[1:]))
                fields[key] = dataclasses.replace(field, spec=spec)
        padded[number] = dataclasses.replace(part, fields=fields)
    return padded


def with_rows(parts: Sequence[StoredPart]) -> list[StoredPart]:
    empty = [part for part in parts if part.empty]
    if len(parts) == 1 and parts[0].empty:
        raise parts[0].empty
    if empty:
        listed = few([str(part) for part in empty], NAMED)
        if len(empty) == len(parts):
            raise FormatError(f"{listed}: no part holds samples; check path=, group= and rows=", file=empty[0].path)
        _log.warning("%d of %d parts hold no samples and are left out: %s", len(empty), len(parts), listed)
    return [part for part in parts if not part.empty]


def parts_left_out(parts: Sequence[StoredPart]) -> str:
    if dropped := sum(part.dropped for part in parts):
        total = dropped + sum(part.anchors.count for part in parts)
        return f"{dropped:,} of {total:,} chosen rows begin no window"
    lost = [part for part in parts if not part.anchors.count]
    return f"no row is chosen of {len(lost)} of {len(parts)} parts, such as {lost[0]}" if lost else ""


def rows_left_out(parts: Sequence[StoredPart]) -> str:
    """A message that counts the rows whose windows would reach beyond their part; empty if there are none."""
    (begin, end), total, found = parts[0].inside, sum(part.rows for part in parts), 0
    for part in parts:
        firsts, lasts = part.episodes.anchors(part.inside)
        rows = part.complete(np.arange(part.rows)) if part.timed else np.maximum(lasts - firsts + 1, 0)
        found += int(rows.sum())
    if found == total:
        return ""
    ends = " and the ".join(["start"] * (begin < 0) + ["end"] * (end > 1))
    of = "part" if parts[0].given_episodes is None else "episode"
    return f"{total - found:,} of {total:,} rows begin no window" + f" (the {ends} of each {of})" * bool(ends)


def drop_empty(parts: Sequence[StoredPart]) -> list[StoredPart]:
    """The parts that have samples. Warns of parts that are shorter than a window."""
    short = [part for part in parts if not part.anchors.count and part.anchors.chosen is None]
    if short:
        begin, end = short[0].inside
        lengths = [int((part.episodes.ends - part.episodes.begins).max()) for part in short]
        of = "episodes of at most " * bool(short[0].given_episodes)
        named = few([f"{part} ({of}{n} rows)" for part, n in zip(short, lengths, strict=True)], NAMED)
        what = f"{named}: shorter than the windows of a sample, {end - begin} rows"
        cure = "give window or offsets less reach, write Field(pad='last'), or name another axis N in layout="
        if short[0].timed and max(lengths) >= end - begin:
            what = f"{named}: no row has {short[0].timed[0]}"
            cure = "change offsets or tolerance, or write Field(pad='last')"
        if len(short) == len(parts):
            raise FormatError(f"{what}; {cure}", file=short[0].path)
        _log.warning("%d of %d parts have no sample: %s", len(short), len(parts), what)
    return [part for part in parts if part.anchors.count]


def warn_of_lacking(parts: Sequence[StoredPart], name: str) -> None:
    for key in dict.fromkeys(key for part in parts for key in part.lacking if key in part.fields):
        lacking = [(part, row) for part in parts for row in part.lacks(key, part.own_rows).tolist()]
        if lacking:
            (part, row), total = lacking[0], sum(part.anchors.count for part in parts)
            error = part.lack(key, row)
            if len(lacking) == total:
                raise error
            cure = "list such samples in exclude=, or set on_error"
            _log.warning("%s: %d of %d samples cannot be read: %s, %s", name, len(lacking), total, error, cure)


def without(parts: Sequence[StoredPart], exclude: Exclude, name: str) -> list[StoredPart]:
    stored = [StoredSamples(each.path, each.group, each.rows, each.own_rows, each.names) for each in parts]
    kept = np.split(kept_samples(exclude, stored, name), np.cumsum([len(each.row_of) for each in stored])[:-1])
    masked = [each for each in zip(parts, stored, kept, strict=True) if each[2].any()]
    return [part if mask.all() else part.at(own.row_of[mask]) for part, own, mask in masked]


def check_centres(parts: Sequence[StoredPart], foreground: Mapping[str, Mapping[int, float]]) -> None:
    for key, number, each in [(key, *pair) for key, shares in foreground.items() for pair in enumerate(shares)]:
        lacking = [str(part) for part in parts if (own := part.fields[key].patches) and not own.centres[number][1].size]
        if len(lacking) == len(parts):
            what = f"no element of {len(parts)} volumes is {each}; correct the class, or leave it out"
            raise ConfigError(what, f"foreground.{key}")
        if lacking:
            _log.warning("%d of %d volumes have no class %d: %s", len(lacking), len(parts), each, few(lacking))


def check_null(parts: Sequence[StoredPart], fields: Mapping[str, Field]) -> None:
    """Refuse ``null`` for a field that has neither text, nor names of numbers, nor a mask in any part."""
    for key in (key for key, field in fields.items() if field.null != "error" and key != KEY):
        found = [each for part in parts for each in (part.fields[key], *part.fields[key].channels)]
        named = any(each.text or each.spec.classes or each.spec.meanings for each in found)
        if not named and not any(each.conversion and each.conversion.mask is not None for each in found):
            what = f"{found[0].located} holds no text, and no names of its values; leave it out"
            raise ConfigError(what, f"fields.{key}.null")


def found_names(part: StoredPart) -> dict[str, tuple[str, ...]]:
    return {key: field.texts for key, field in part.fields.items() if field.text and not field.text.classes}


def named_alike(parts: Sequence[StoredPart]) -> list[StoredPart]:
    found = [found_names(part) for part in parts]
    common = {key: in_order(name for each in found for name in each.get(key, ())) for key in found[0]}
    for key, names in common.items():
        field, kind = parts[0].fields[key], getattr(parts[0].fields[key].text, "kind", None)
        if kind is None and (what := no_classes(names)):
            what = f"{field.located}: {what}, or write kind='class' if these are the names of classes"
            raise FormatError(what, file=parts[0].path, dataset=field.values.name)
        if kind != "text":
            note_names(str(field.located), names)
            common[key] = in_order(map(trim, names))
    return [renamed(part, common) for part in parts] if common else list(parts)


def renamed(part: StoredPart, names: Mapping[str, Sequence[str]], cure: str = "") -> StoredPart:
    """A part whose text is numbered by other names, except where the user gave names."""
    others = {key: tuple(names[key]) for key, own in found_names(part).items() if tuple(names.get(key, own)) != own}
    fields = {key: _renamed(part.fields[key], wanted, cure) for key, wanted in others.items()}
    return dataclasses.replace(part, fields={**part.fields, **fields})


def _renamed(field: StoredField, names: tuple[str, ...], cure: str) -> StoredField:
    def unknown(row: int, text: str) -> SourceError:
        return unknown_text(field.values, row, text, names, cure)

    kept = Labels(field.values.kept, field.spec.classes, texts=field.spec.texts).of_classes(names, unknown).values
    stored = dataclasses.replace(field.values, kept=kept)
    return dataclasses.replace(field, spec=named(field.spec, field.text, names), stored=stored)


def with_samples(parts: Sequence[StoredPart]) -> list[StoredPart]:
    left = [part for part in parts if part.anchors.count]
    if not left:
        raise FormatError(f"{parts[0]}: no sample is left that has a value of each field, and a row of the table")
    return left


def with_values(part: StoredPart) -> StoredPart:
    """The part, without samples that lack a row of the table or a text."""
    if part.table_rows is not None and (part.table_rows < 0).any():
        part = part.at(part.anchors.rows(np.flatnonzero(part.rows_of_table() >= 0)))
    fields = [(key, each) for key, each in part.fields.items() if each.text and each.text.null != "ignore"]
    for key, field in fields:
        missing = field.values.kept == IGNORED
        missing[part.lacking[key].rows if key in part.lacking else []] = False
        if not missing.any():
            continue
        rows = part.own_rows
        own = field.window.rows(field.window.own(rows))
        lacks = missing[own if len(missing) > 1 else np.zeros_like(own)]
        if lacks.any() and field.text and field.text.null == "error":
            every = np.unique(own[lacks]).tolist()
            what = f"no text in row{'s' * (len(every) > 1)} {few(every)}; "
            what += "write it, or set null='ignore' (−100) or 'drop'"
            place = str(field.located) if part.names is None else field.values.at(every[0])
            where = {"file": part.path, "dataset": field.values.dataset(every[0]), "row": every[0]}
            raise FormatError(what, place=place, **where)
        part = part.at(rows[~lacks.any(axis=1)])
    return part
