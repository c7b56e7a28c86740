"""`LabelField`: a field whose values are in the table itself."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import ManifestError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.fields.column import Column
from lit_async_data.sources.manifest.table.arrow import is_number
from lit_async_data.sources.manifest.table.label_values import Labels
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, quoted
from lit_async_data.sources.manifest.table.table import Table

# From this number of rows on, a distinct class in every row is suspicious.
_SUSPICIOUS_ROWS = 10

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelField:
    """Labels as numbers. Immutable.

    Attributes:
        column: The options of the field.
        labels: One value per row of the table.
        origin: Origin of the rows.
    """

    column: Column
    labels: Labels
    origin: RowOrigin

    @staticmethod
    def of(column: Column, labels: Labels, table: Table) -> LabelField:
        """The field of labels that have been read."""
        values = cast(labels.values, column.element)
        if isinstance(values, int):
            message = f"{labels.values[values].tolist()} does not fit into {column.element}; choose another dtype"
            raise table.origin.error(message, row=values, column=", ".join(column.names))
        all_distinct = len(labels.classes or ()) == len(values) >= _SUSPICIOUS_ROWS and values.ndim == 1
        if all_distinct and column.kind is None and column.classes is None:
            _log.warning(
                "column %s: each of its %d rows is another class; if these are paths of files, set kind: image or "
                "kind: npy, and check root",
                quoted(column.names[0]),
                len(values),
            )
        return LabelField(column, labels._replace(values=values), table.origin)

    @property
    def spec(self) -> FieldSpec:
        """Shape, type and classes."""
        values = self.labels.values
        return FieldSpec(values.shape[1:], values.dtype, classes=self.labels.classes)

    def read(self, rows: Indices, out: Array) -> None:
        """Write the values of rows to ``out``."""
        np.take(self.labels.values, rows, axis=0, out=out, mode="clip")  # other modes copy `out` first

    def with_classes(self, classes: Sequence[str], table: Table) -> LabelField:
        """The field encoded by other classes, such as those of the training set.

        Args:
            classes: Names of the classes. Nothing changes if the user gave classes, or numbers as the kind.
            table: The table with the column; text that was read as numbers is read as classes.
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
        listed = ", ".join(map(quoted, classes[:10])) + (", …" if len(classes) > 10 else "")
        column = self.column.names[0]
        message = (
            f"{quoted(name)} is not one of the {len(classes)} classes ({listed}) of training. If this column is a "
            f'label, name all its classes: {{"name": {json.dumps(column)}, "classes": [...]}}. If it only says whose '
            "samples these are, such as a patient, leave it out of fields: return_indices=true adds sample numbers "
            f"to each batch, and source.column({column!r})[batch['index']] looks up its text"
        )
        return self.origin.error(message, row=row, column=column)


def labels_of_column(column: Column, table: Table) -> Labels:
    """The labels of a column; see `Table.labels`."""
    kind = column.kind
    if kind is None and column.classes is None and table.untyped and all(_numeric(column, table)):
        kind = "number"
    return table.labels(
        list(column.names) if column.several else column.names[0],
        classes=column.classes,
        null=column.null,
        kind="number" if kind == "number" else "class" if kind == "class" else None,
        separator=column.separator,
    )


def _numeric(column: Column, table: Table) -> list[bool]:
    return [is_number(table.first(name, column.separator)) for name in column.names]


def _renumbered(values: npt.NDArray[Any], new: npt.NDArray[np.int64], classes: int) -> npt.NDArray[Any]:
    if values.ndim == 1:
        known = values >= 0  # ignored rows keep their value
        renumbered = values.astype(np.int64)
        renumbered[known] = new[renumbered[known]]
        return renumbered
    kept = new >= 0
    renumbered = np.zeros((len(values), classes), values.dtype)
    renumbered[:, new[kept]] = values[:, kept]
    renumbered[np.isnan(values).any(axis=1)] = np.nan if values.dtype.kind == "f" else 0
    return renumbered


def cast(values: npt.NDArray[Any], dtype: np.dtype[Any] | None) -> npt.NDArray[Any] | int:
    """Values as another dtype, which may round fractions; or the first row with a value that does not fit."""
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
