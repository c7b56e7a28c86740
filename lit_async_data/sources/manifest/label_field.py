"""`LabelField`: a field whose values stand in the table itself."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ConfigError, ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.column import Column
from lit_async_data.sources.manifest.table.arrow import is_number
from lit_async_data.sources.manifest.table.labels import Labels
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, shown
from lit_async_data.sources.manifest.table.table import Table

# Rows from which on nobody means a class for each.
_SUSPICIOUS = 10

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelField:
    """Values that stand in a table, as numbers. Nothing in it changes.

    Attributes:
        column: What was wanted.
        labels: One value per row of the table.
        origin: Of these rows.
    """

    column: Column
    labels: Labels
    origin: RowOrigin

    @staticmethod
    def of(column: Column, labels: Labels, table: Table) -> LabelField:
        """The field of a column whose values have been read.

        Raises:
            ConfigError: There is a ``dtype``, and values are numbers of classes that it does not hold.
            ManifestError: A row has a value that ``dtype`` does not hold; names it.
        """
        values = cast(labels.values, column.element)
        if isinstance(values, int):
            message = f"{labels.values[values].tolist()} is nothing that {column.element} holds"
            raise table.origin.error(message, row=values, column=", ".join(column.names))
        own = len(labels.classes or ()) == len(values) >= _SUSPICIOUS and values.ndim == 1
        if own and column.kind is None and column.classes is None:
            _log.warning(
                "column %s: each of its %d rows is a class of its own; if these are paths of files, say kind: image or "
                "kind: npy, and look at root",
                shown(column.names[0]),
                len(values),
            )
        return LabelField(column, labels._replace(values=values), table.origin)

    @property
    def spec(self) -> FieldSpec:
        """Shape, type and classes."""
        values = self.labels.values
        return FieldSpec(values.shape[1:], values.dtype, classes=self.labels.classes)

    def read(self, rows: Indices, out: Array) -> None:
        """Write the values of some rows."""
        np.take(self.labels.values, rows, axis=0, out=out, mode="clip")  # which does not copy `out` first

    def with_classes(self, classes: Sequence[str], table: Table) -> LabelField:
        """The same with the numbers of other classes, such as those of the training set.

        Args:
            classes: Their names. Where the user gave some, or has said that these are numbers, nothing changes.
            table: With the column: text that was taken for numbers is read as classes.

        Raises:
            ManifestError: A row has a class that is none of them; names it.
        """
        column = self.column
        if column.classes is not None or column.kind == "number" or column.several:
            return self
        values, own, dropped = self.labels
        if not own:
            if not (table.untyped and table.is_text(column.names[0])):
                return self
            given = dataclasses.replace(column, classes=tuple(classes))
            return dataclasses.replace(LabelField.of(given, labels_of_column(given, table), table), column=column)
        numbers = {name: number for number, name in enumerate(classes)}
        new = np.array([numbers.get(name, -1) for name in own], np.int64)
        for lost in np.flatnonzero(new < 0).tolist():
            has = values[:, lost] == 1 if values.ndim > 1 else values == lost
            if has.any():
                raise self._unknown(int(has.argmax()), own[lost], classes)
        labels = Labels(_renumbered(values, new, len(classes)), tuple(classes), dropped)
        return LabelField.of(column, labels, table)

    def _unknown(self, row: int, name: str, classes: Sequence[str]) -> ManifestError:
        listed = ", ".join(map(shown, classes[:10])) + (", …" if len(classes) > 10 else "")
        column = self.column.names[0]
        message = (
            f"{shown(name)} is not one of the {len(classes)} classes ({listed}) of training. If this column is a "
            f'label, name all its classes: {{"name": {json.dumps(column)}, "classes": [...]}}. If it only says whose '
            "samples these are, such as a patient, leave it out of fields: return_indices=true adds sample numbers "
            f"to each batch, and source.column({column!r})[batch['index']] looks up its text"
        )
        return self.origin.error(message, row=row, column=column)


def labels_of_column(column: Column, table: Table) -> Labels:
    """The values of a column; see `Table.labels`."""
    numbers = column.kind == "number" or (
        column.kind is None and column.classes is None and table.untyped and all(_numeric(column, table))
    )
    name: Any = list(column.names) if column.several else column.name
    multi = column.kind != "number" and not column.several and not numbers and table.lists_text(name, column.separator)
    if column.kind == "class" and not multi and not table.is_text(name):
        raise ConfigError(f"kind: column {shown(name)} holds no text: its numbers are the labels; leave out kind")
    return table.labels(
        name,
        vocabulary=column.classes,
        null=column.null,
        multi=multi,
        numbers=numbers,
        separator=column.separator,
    )


def _numeric(column: Column, table: Table) -> list[bool]:
    return [is_number(table.first(name, column.separator)) for name in column.names]


def _renumbered(values: npt.NDArray[Any], new: npt.NDArray[np.int64], classes: int) -> npt.NDArray[Any]:
    if values.ndim == 1:
        known = values >= 0  # what is ignored stays so
        found = values.astype(np.int64)
        found[known] = new[found[known]]
        return found
    there = new >= 0
    several = np.zeros((len(values), classes), values.dtype)
    several[:, new[there]] = values[:, there]
    several[np.isnan(values).any(axis=1)] = np.nan if values.dtype.kind == "f" else 0
    return several


def cast(values: npt.NDArray[Any], dtype: np.dtype[Any] | None) -> npt.NDArray[Any] | int:
    """Values as another type, in which fractions may be rounded; or the first row of which one does not fit."""
    if dtype is None or values.dtype == dtype:
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        cast = values.astype(dtype)
        if dtype.kind in "fc" and values.dtype.kind in "fc":
            fits = np.isfinite(cast) == np.isfinite(values)
        else:
            fits = cast.astype(values.dtype) == values
    wrong = np.flatnonzero(~fits.reshape(len(values), -1).all(axis=1))
    return int(wrong[0]) if wrong.size else cast
