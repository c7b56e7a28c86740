"""`JoinedTable`: columns of a table as fields, by one row for each file, group or subject; kept in memory."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, FormatError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.parts.part import StoredPart, of_group
from lit_async_data.sources.hdf5.parts.selection import FieldLike, check_options
from lit_async_data.sources.hdf5.parts.stored_field import StoredField
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.sources.table.formats import NoColumnError, is_number, is_text_list, numpy_values, quoted
from lit_async_data.sources.table.labels import Labels
from lit_async_data.sources.table.table import Table, TableReader

#: The owners of rows of the table: ``"file"``, ``"group"``, or ids; by the column, if that has another name.
On = str | Field | Mapping[str, FieldLike]
Unmatched = Literal["error", "skip"]
# The key of the field that rows of the table are found by, while parts are inspected.
KEY = "(on)"
# Texts that a message shows.
SHOWN = 5
OPTIONS = {"name", "dtype", "classes", "kind", "null", "separator"}

_log = logging.getLogger(__name__)


class JoinedTable:
    """A table with a row for each file, group or subject."""

    def __init__(
        self, table: Any, on: On | None, unmatched: Unmatched, filters: Any, fields: Mapping[str, Field]
    ) -> None:
        if unmatched not in ("error", "skip"):
            raise ConfigError(f"{unmatched!r} is not one of error, skip", "unmatched")
        self._column, self._what = _column_and_what(on)
        self._skip, self._reader, self._lacks = unmatched == "skip", TableReader(table, filters), dict[str, str]()
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
            raise ConfigError(f"{error}; if a column has another name, write on={{COLUMN: {what!r}}}", "on") from None
        self.labels = dict[str, Labels]()  # the values of `fields`, one for each row of the table that has samples
        of = self._what
        # The field that says whose each sample is, by `KEY`; empty if its file or group does.
        self.keys = {KEY: dataclasses.replace(of, kind="text", null="error")} if isinstance(of, Field) else {}

    def _find(self, name: str) -> Table | None:
        """A column of the table; None if it has no such column, or the files have the same ids."""
        if isinstance(self._what, Field) and name == self._what.dataset:
            return None
        try:
            return self._reader.columns([name])
        except NoColumnError as error:
            self._lacks[name] = str(error)
        return None

    def missing(self, error: MissingError) -> MissingError:
        """The error of a name that is neither in a file nor in the table."""
        lacks = self._lacks.get(error.dataset or "")
        return MissingError(f"{error}; {lacks}", file=error.file, dataset=error.dataset) if lacks else error

    def join(self, parts: Sequence[StoredPart], order: Sequence[str]) -> list[StoredPart]:
        """The parts, with the fields of the table. ``order`` are the keys of fields."""
        for field in self.fields.values():
            self._refuse_both(field.dataset, parts[0])
        if isinstance(self._what, Field):
            units = {text: [text] for text in parts[0].fields[KEY].texts}
            own = self._ids(parts)
        else:
            found = [_groups(part) if self._what == "group" else [part.path] for part in parts]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(itertools.chain(*found)))}
            units = {name: ends_of(name) for name in numbers}
            own = [np.array([numbers[name] for name in each]) for each in found]
        rows = self._kept(np.append(self._rows_of(units), -1))  # the last row: for samples without an id
        return [self._joined(part, rows[np.maximum(each, -1)], order) for part, each in zip(parts, own, strict=True)]

    def _ids(self, parts: Sequence[StoredPart]) -> list[Indices]:
        """The number of the id of each row, negative if it is empty."""
        for stored in (part.fields[KEY].values for part in parts):
            if stored.kept is None:
                raise ConfigError(f"{stored} holds {stored.dtype}; name a dataset of ids: text or whole numbers", "on")
        own: list[Indices] = [part.fields[KEY].values.kept for part in parts]
        at = [(part, row) for part, each in zip(parts, own, strict=True) for row in np.flatnonzero(each < 0).tolist()]
        if at:
            (part, row), stored = at[0], at[0][0].fields[KEY].values
            skipped = self._skip and len(at) < sum(map(len, own))
            what = f"{stored.at(row)}: no id" + f", as in {len(at)} rows in all" * (len(at) > 1)
            what += "; write it" * (not skipped)
            what += ", or set unmatched='skip' to leave such samples out" * (not self._skip)
            error = of_group(FormatError(what, file=part.path, dataset=stored.name, row=row), part.names)
            if not skipped:
                raise error
            _log.warning("%s; their samples are left out", error)
        return own

    def _rows_of(self, units: Mapping[str, Sequence[str]]) -> Indices:
        """The row of each unit, which has several names; −1 without one."""
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
        own = {unit: [name for name in units[unit] if counts[name] == 1] or [unit] for unit in lost}
        what = f"{len(lost)} {of} have no row"
        what += f": {_few([own[unit][-1] for unit in lost])}" if lost else ""
        left = f"{len(unused)} of its rows have no samples: {_few(unused)}" if unused else ""
        if lost or not units:
            others = {text.lstrip("0") for text in texts if text not in counts}
            near = others & {name.lstrip("0") for unit in lost for name in units[unit]}
            zeros = " (ids are compared as text: 0012 is not 12)" if near else ""
            skip = "" if self._skip else ", or set unmatched='skip' to leave their samples out"
            cure = f"it has {_few(texts)}{zeros}; add rows{skip}"
            several = [(name, unit) for unit in lost for name in units[unit] if name in unused]
            for name, unit in several:
                cure = f"{quoted(name)} is the name of {counts[name]} of them; write {own[unit][-1]}"
            if several or not self._skip or len(lost) == len(units):
                raise origin.error(f"{what}; {cure}", column=self._column)
        if lost:
            _log.warning("%s: %s; their samples are left out%s", origin.name, what, left and f"; {left}")
        elif unused:
            _log.info("%s: %s", origin.name, left)
        return np.array([rows.get(unit, -1) for unit in units], np.int64)

    def _kept(self, rows: Indices) -> Indices:
        """Keep only these rows of the table, with their labels; their new numbers, −1 without a row or a value."""
        used, whole = np.unique(rows[rows >= 0]), self._table
        self._table = whole.taken(used)
        self._reader.select(used)
        self.labels = {key: _labels_of(field, self._table, whole) for key, field in self.fields.items()}
        dropped = np.concatenate([np.empty(0, np.int64), *(labels.dropped for labels in self.labels.values())])
        kept = np.isin(rows, np.delete(used, dropped))
        return np.where(kept, np.searchsorted(used, rows), -1)

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
        """The values of a column of the table, one for each sample; None if there is no such column."""
        table = self._find(name)
        if table is None:
            return None
        self._refuse_both(name, parts[0])
        return np.asarray(numpy_values(table.array(name))[np.concatenate([part.rows_of_table() for part in parts])])

    def _refuse_both(self, name: str, part: StoredPart) -> None:
        with as_source_errors(part.path, "cannot be read", file=part.path), open_h5py(part.path) as file:
            group = OpenGroup(file, part.path, part.group_of(0), IndexCache(None), allow_external=True)
            if group.node(group.name(name)) is not None:
                what = f"{part}: {name!r} is a dataset, and a column of {self._table.origin.name}; rename the column"
                raise ConfigError(what, file=part.path, dataset=name)


def _few(texts: Sequence[str]) -> str:
    return ", ".join(map(quoted, texts[:SHOWN])) + ", …" * (len(texts) > SHOWN)


def _column_and_what(on: Any) -> tuple[str, str | Field]:
    """The column of files, groups or ids in the table; and the field of ids in the files, ``"file"`` or ``"group"``."""
    name = on.attr or os.path.basename(on.dataset) if isinstance(on, Field) else on
    column, what = next(iter(on.items())) if isinstance(on, Mapping) and len(on) == 1 else (name, on)
    if not isinstance(column, str):
        what = f"{on!r} does not say whose rows the table has: 'file', 'group', the name of a dataset, or Field(attr=…)"
        raise ConfigError(f"{what}; if the column of the table has another name, {{COLUMN: one of these}}", "on")
    return column, what if what in ("file", "group") else Field.of(what, "on.")


def ends_of(unit: str) -> list[str]:
    """The names that a file or group may be given: its path, or the end of it, with the ending or without."""
    _, *parts = f"/{unit.strip('/')}".split("/")
    names = [f"/{unit.strip('/')}", *("/".join(parts[first:]) for first in range(len(parts)))]
    return [*(os.path.splitext(each)[0] for each in names if os.path.isabs(unit)), *names]


def _groups(part: StoredPart) -> list[str]:
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
