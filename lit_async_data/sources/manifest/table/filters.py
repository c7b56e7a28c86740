"""`Filter`: a condition on a column that rows must meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.sources.manifest.table.arrow import arrow, as_single_array, booleans_of, is_text
from lit_async_data.sources.manifest.table.numeric import as_numbers
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, quoted

_COMPARE = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_OPERATORS = (*_COMPARE, "in", "not in")


@dataclasses.dataclass(frozen=True)
class Filter:
    """A condition that rows must meet.

    Attributes:
        column: Name of the column.
        operator: ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in`` or ``not in``.
        value: The value to compare with; a list for ``in`` and ``not in``. A row without a value meets no condition.

    Example:
        >>> Filter.all_of([["quality", ">", 0.5]])
        (Filter(column='quality', operator='>', value=0.5),)
    """

    column: str
    operator: str
    value: Any

    @classmethod
    def all_of(cls, given: Any) -> tuple[Filter, ...]:
        """Parse a list of ``[column, operator, value]``; rows must meet all of them.

        Raises:
            ConfigError: It is not such a list; begins with ``filters:``.
        """
        if given is None:
            return ()
        if not _is_list(given):
            raise ConfigError(f"filters: {quoted(given)} is not a list of [column, operator, value]")
        return tuple(cls._of(each) for each in given)

    @classmethod
    def _of(cls, given: Any) -> Filter:
        if isinstance(given, Filter):
            return given
        if not _is_list(given) or len(given) != 3 or not isinstance(given[0], str):
            raise ConfigError(f"filters: {quoted(given)} is not [column, operator, value]")
        column, operator, value = given
        if operator not in _OPERATORS:
            raise ConfigError(f"filters: {quoted(operator)} is not one of {', '.join(_OPERATORS)}")
        takes_list = operator not in _COMPARE
        if takes_list and (not _is_list(value) or not value):
            raise ConfigError(f"filters: {operator!r} needs a list of values, not {quoted(value)}")
        values = value if takes_list else [value]
        if any(one is None or one != one or _is_list(one) or isinstance(one, dict) for one in values):  # noqa: PLR0124
            raise ConfigError(
                f"filters: {quoted(value)} cannot be compared with; rows without a value never meet a filter"
            )
        return cls(column, operator, value)

    def mask(self, column: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
        """Which rows meet the condition.

        Args:
            column: A ``ChunkedArray`` or an ``Array``.
            origin: Origin of the rows.

        Returns:
            Shape (len(column),).

        Raises:
            ConfigError: The column's type cannot be compared with the value; begins with ``filters:``.
            ManifestError: The value is a number, and a row of a text column is not.
        """
        library, compute = arrow(), arrow("compute")
        array = as_single_array(column if isinstance(column, library.ChunkedArray) else library.chunked_array([column]))
        if arrow("types").is_dictionary(array.type):
            array = array.dictionary_decode()
        takes_list = self.operator not in _COMPARE
        values = list(self.value) if takes_list else [self.value]
        if is_text(array.type) and all(_is_number(value) for value in values):
            array = as_numbers(array, self.column, origin)
        if any(isinstance(value, bool) != bool(arrow("types").is_boolean(array.type)) for value in values):
            raise self._unfit(array)
        try:
            if takes_list:
                matches = library.array(np.zeros(len(array), np.bool_))
                for value in values:
                    matches = compute.or_kleene(matches, compute.equal(array, value))
                mask = matches if self.operator == "in" else compute.invert(matches)
            else:
                mask = getattr(compute, _COMPARE[self.operator])(array, values[0])
        except (library.ArrowException, TypeError, OverflowError) as error:
            raise self._unfit(array) from error
        return booleans_of(mask)

    def _unfit(self, array: Any) -> ConfigError:
        return ConfigError(
            f"filters: column {quoted(self.column)} holds {array.type}, which cannot be compared by "
            f"{self.operator} {quoted(self.value)}; give a value of that type"
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rows_meeting(filters: Sequence[Filter], table: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    """Which rows of an Arrow table meet all filters; shape (len(table),)."""
    mask = np.ones(table.num_rows, np.bool_)
    for each in filters:
        mask &= each.mask(table.column(each.column), origin)
    return mask
