"""Filters: conditions on columns that rows must meet."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.sources.table.arrow import arrow, as_single_array, booleans_of, is_text
from lit_async_data.sources.table.row_origin import RowOrigin, quoted
from lit_async_data.sources.table.text import as_numbers, check_text

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
    """A condition that rows must meet. A row without a value meets none."""

    column: str
    operator: str
    value: Any

    @property
    def values(self) -> list[Any]:
        return [self.value] if self.operator in _COMPARE else list(self.value)


def filters_of(given: Any) -> tuple[Filter, ...]:
    """The filters in a list of ``[column, operator, value]``; rows must meet all of them."""
    if given is None:
        return ()
    if not _is_list(given) or not all(_is_list(each) and len(each) == 3 for each in given):
        raise ConfigError(f"{quoted(given)} is not a list of [column, operator, value]", "filters")
    return tuple(_checked(Filter(*each)) for each in given)


def _checked(given: Filter) -> Filter:
    if not isinstance(given.column, str) or given.operator not in _OPERATORS:
        raise ConfigError(
            f"{quoted(list(given))} is not [column, operator, value]; operators are {', '.join(_OPERATORS)}", "filters"
        )
    if given.operator not in _COMPARE and (not _is_list(given.value) or not given.value):
        raise ConfigError(f"{given.operator!r} needs a list of values, not {quoted(given.value)}", "filters")
    if any(one is None or one != one or _is_list(one) or isinstance(one, dict) for one in given.values):  # noqa: PLR0124
        raise ConfigError(
            f"{quoted(given.value)} cannot be compared with; rows without a value never meet a filter", "filters"
        )
    return given


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def rows_meeting(filters: Sequence[Filter], table: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    mask = np.ones(table.num_rows, np.bool_)
    for each in filters:
        mask &= _met(each, as_single_array(table.column(each.column)), origin)
    return mask


def _met(given: Filter, array: Any, origin: RowOrigin) -> npt.NDArray[np.bool_]:
    library, compute, values = arrow(), arrow("compute"), given.values
    if arrow("types").is_dictionary(array.type):
        array = array.dictionary_decode()
    check_text(array, given.column, origin)
    if is_text(array.type) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        array = as_numbers(array, given.column, origin)
    unfit = ConfigError(
        f"column {quoted(given.column)} holds {array.type}, which cannot be compared by "
        f"{given.operator} {quoted(given.value)}; give a value of that type",
        "filters",
    )
    if any(isinstance(value, bool) != bool(arrow("types").is_boolean(array.type)) for value in values):
        raise unfit
    compare = getattr(compute, _COMPARE.get(given.operator, "equal"))
    try:
        mask = functools.reduce(compute.or_kleene, (compare(array, value) for value in values))
    except (library.ArrowException, TypeError, OverflowError) as error:
        raise unfit from error
    return booleans_of(compute.invert(mask) if given.operator == "not in" else mask)
