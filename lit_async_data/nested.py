"""Batches of any form: `flatten` takes out the leaves that matter, `rebuilt` puts others where they stood.

Pure; what a leaf is, is the caller's to say. Containers are mappings, sequences, named tuples and dataclasses, in one
another as deep as Python goes; one that holds no leaf is left as it is, and so are strings, numbers, arrays and
whatever else there may be.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

# Sequences that hold no objects.
OPAQUE = (str, bytes, bytearray, memoryview, range, array.array)
# Of these there may be many in a batch, and none holds anything: not even their places are named.
SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None)})

# Another object in place of one, or the same if it is not to be replaced; it also gets the place.
Change = Callable[[Any, str], Any]


class Place(NamedTuple):
    """Stands where a leaf stood.

    Attributes:
        name: Which leaf: the place at which it was met first.
    """

    name: str


def flatten(batch: Any, is_leaf: Callable[[Any], bool]) -> tuple[dict[str, Any], Any]:
    """Take the leaves out of a batch.

    Args:
        batch: Any object.
        is_leaf: Asked of every object on the way, containers too; not of strings, bytes, numbers and None.

    Returns:
        The leaves by place, in their order, each object once; and the batch with `Place` where they stood.

    Example:
        >>> leaves, skeleton = flatten({"a": [{1}, 2], "b": "text"}, is_leaf=lambda value: isinstance(value, set))
        >>> leaves
        {"batch['a'][0]": {1}}
        >>> rebuilt(skeleton, {"batch['a'][0]": {3}})
        {'a': [{3}, 2], 'b': 'text'}
    """
    leaves: dict[str, Any] = {}
    places: dict[int, Place] = {}

    def taken(value: Any, place: str) -> Any:
        if not is_leaf(value):
            return value
        if id(value) not in places:
            places[id(value)] = Place(place)
            leaves[place] = value
        return places[id(value)]

    return leaves, _changed(batch, taken, "batch")


def rebuilt(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    """Put leaves where others were taken out.

    Args:
        skeleton: Of `flatten`. It is not changed, and can serve again.
        leaves: What is to stand at each place.
    """
    return _changed(skeleton, lambda value, _: leaves[value.name] if type(value) is Place else value, "batch")


def _changed(value: Any, change: Change, place: str) -> Any:
    new = change(value, place)
    if new is not value:
        return new
    if isinstance(value, Mapping):
        return _with_items(value, dict(_changes(value.items(), change, place)))
    if isinstance(value, Sequence) and not isinstance(value, OPAQUE):
        return _with_elements(value, dict(_changes(enumerate(value), change, place)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, change, place)
    return value


def _changes(children: Iterable[tuple[Any, Any]], change: Change, place: str) -> Iterator[tuple[Any, Any]]:
    """The children that become others, by their keys."""
    for key, child in children:
        if type(child) in SCALARS:
            continue
        new = _changed(child, change, f"{place}[{key!r}]")
        if new is not child:
            yield key, new


def _with_items(mapping: Mapping[Any, Any], changes: dict[Any, Any]) -> Any:
    if not changes:
        return mapping
    if isinstance(mapping, MutableMapping):
        clone = copy.copy(mapping)  # with whatever a class of its own holds beside: a default, an order
        for key, value in changes.items():
            clone[key] = value
        return clone
    return type(mapping)({**mapping, **changes})  # type: ignore[call-arg]


def _with_elements(sequence: Sequence[Any], changes: dict[int, Any]) -> Any:
    if not changes:
        return sequence
    if isinstance(sequence, MutableSequence):
        clone = copy.copy(sequence)
        for index, value in changes.items():
            clone[index] = value
        return clone
    elements = [changes.get(index, value) for index, value in enumerate(sequence)]
    if hasattr(sequence, "_make"):  # a named tuple
        return sequence._make(elements)
    return type(sequence)(elements)  # type: ignore[call-arg]


def _with_fields(value: Any, change: Change, place: str) -> Any:
    clone = None
    for field in dataclasses.fields(value):
        child = getattr(value, field.name, None)
        new = _changed(child, change, f"{place}.{field.name}")
        if new is not child:
            clone = copy.copy(value) if clone is None else clone
            object.__setattr__(clone, field.name, new)  # frozen or not
    return value if clone is None else clone
