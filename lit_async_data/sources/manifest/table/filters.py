"""`Filter`: a condition on a column that rows must meet."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.sources.manifest.table.arrow import arrow, as_single_array, booleans_of, is_text
from lit_async_data.sources.manifest.table.numeric import as_numbers, check_text
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


class Filter(NamedTuple):
    """A condition that rows must meet. A row without a value meets none.

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
        if not _is_list(given) or not all(_is_list(each) and len(each) == 3 for each in given):
            raise ConfigError(f"filters: {quoted(given)} is not a list of [column, operator, value]")
        return tuple(_checked(cls(*each)) for each in given)

    @property
    def values(self) -> list[Any]:
        """The values to compare with."""
        return [self.value] if self.operator in _COMPARE else list(self.value)

    def mask(self, column: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
        """Which rows of a ``ChunkedArray`` meet the condition; shape (len(column),).

        Raises:
            ConfigError: The column's type cannot be compared with the value; begins with ``filters:``.
            ManifestError: The value is a number, and a row of a text column is not.
        """
        library, compute, values = arrow(), arrow("compute"), self.values
        array = as_single_array(column)
        if arrow("types").is_dictionary(array.type):
            array = array.dictionary_decode()
        check_text(array, self.column, origin)
        if is_text(array.type) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
            array = as_numbers(array, self.column, origin)
        unfit = ConfigError(
            f"filters: column {quoted(self.column)} holds {array.type}, which cannot be compared by "
            f"{self.operator} {quoted(self.value)}; give a value of that type"
        )
        if any(isinstance(value, bool) != bool(arrow("types").is_boolean(array.type)) for value in values):
            raise unfit
        compare = getattr(compute, _COMPARE.get(self.operator, "equal"))
        try:
            mask = functools.reduce(compute.or_kleene, (compare(array, value) for value in values))
        except (library.ArrowException, TypeError, OverflowError) as error:
            raise unfit from error
        return booleans_of(compute.invert(mask) if self.operator == "not in" else mask)


def _checked(given: Filter) -> Filter:
    if not isinstance(given.column, str) or given.operator not in _OPERATORS:
        raise ConfigError(
            f"filters: {quoted(list(given))} is not [column, operator, value]; operators are {', '.join(_OPERATORS)}"
        )
    if given.operator not in _COMPARE and (not _is_list(given.value) or not given.value):
        raise ConfigError(f"filters: {given.operator!r} needs a list of values, not {quoted(given.value)}")
    if any(one is None or one != one or _is_list(one) or isinstance(one, dict) for one in given.values):  # noqa: PLR0124
        raise ConfigError(
            f"filters: {quoted(given.value)} cannot be compared with; rows without a value never meet a filter"
        )
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def rows_meeting(filters: Sequence[Filter], table: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    """Which rows of an Arrow table meet all filters; shape (len(table),)."""
    mask = np.ones(table.num_rows, np.bool_)
    for each in filters:
        mask &= each.mask(table.column(each.column), origin)
    return mask
