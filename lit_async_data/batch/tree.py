"""Batches of any form: `flatten` takes out the leaves that matter, `rebuilt` puts others where they stood.

Pure; what a leaf is, is the caller's to say. Containers are mappings, sequences, named tuples and dataclasses, in one
another as deep as Python goes; one that holds no leaf is left as it is, and so are strings, numbers, arrays and
whatever else there may be.

A container is never changed: another of its class, with the same content but for the leaves, takes its place. A class
that cannot be built again from its elements is an error: another value must not come out in silence.
"""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

from lit_async_data.errors import FormatError

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

    Raises:
        FormatError: A container of a class of its own cannot be built again.

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


def leaves_in(batch: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """The leaves of a batch in their order, each object once. Nothing is built.

    Args:
        batch: Any object.
        is_leaf: As for `flatten`.

    Example:
        >>> leaves_in({"a": [{1}, 2], "b": "text"}, is_leaf=lambda value: isinstance(value, set))
        [{1}]
    """
    found: dict[int, Any] = {}

    def noted(value: Any, place: str) -> Any:  # noqa: ARG001
        if is_leaf(value):
            found[id(value)] = value
        return value

    _changed(batch, noted, "batch")
    return list(found.values())


def rebuilt(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    """Put leaves where others were taken out.

    Args:
        skeleton: Of `flatten`. It is not changed, and can serve again.
        leaves: What is to stand at each place.

    Raises:
        FormatError: As `flatten`.
    """
    return _changed(skeleton, lambda value, _: leaves[value.name] if type(value) is Place else value, "batch")


def _changed(value: Any, change: Change, place: str) -> Any:
    new = change(value, place)
    if new is not value:
        return new
    if isinstance(value, Mapping):
        changes = dict(_changes(value.items(), change, place))
        return _with_items(value, changes, place) if changes else value
    if isinstance(value, Sequence) and not isinstance(value, OPAQUE):
        changes = dict(_changes(enumerate(value), change, place))
        return _with_elements(value, changes, place) if changes else value
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


def _with_items(mapping: Mapping[Any, Any], changes: dict[Any, Any], place: str) -> Any:
    if isinstance(mapping, MutableMapping):
        return _with_others(mapping, mapping.values(), changes, place)
    items = {**mapping, **changes}
    with _rebuilding(mapping, place):
        made = type(mapping)(items)  # type: ignore[call-arg]
        _compare(made, list(made), list(items))
        _compare(made, list(made.values()), list(items.values()))
    return made


def _with_elements(sequence: Sequence[Any], changes: dict[int, Any], place: str) -> Any:
    if isinstance(sequence, MutableSequence):
        return _with_others(sequence, sequence, changes, place)
    elements = [changes.get(index, value) for index, value in enumerate(sequence)]
    with _rebuilding(sequence, place):
        if isinstance(sequence, tuple):
            return _tuple_of(sequence, elements)
        made = type(sequence)(elements)  # type: ignore[call-arg]
        _compare(made, list(made), elements)
    return made


def _tuple_of(sequence: tuple[Any, ...], elements: list[Any]) -> Any:
    """A tuple of the same class; its own ``__new__`` may take its elements in another way, and is not asked."""
    kind = type(sequence)
    try:
        made = tuple.__new__(kind, elements)
    except TypeError:  # a class written in C, such as what torch.max returns
        made = kind(elements)
        _compare(made, list(made), elements)
    else:
        if kind is not tuple and hasattr(sequence, "__dict__"):
            vars(made).update(vars(sequence))
    return made


def _with_others(container: Any, children: Iterable[Any], changes: dict[Any, Any], place: str) -> Any:
    """A copy of a mutable container, with whatever its class holds beside (a default, an order), and with changes."""
    with _rebuilding(container, place):
        clone = copy.copy(container)
        for key, value in changes.items():
            before = container[key]
            clone[key] = value
            if container[key] is value:  # the copy shares what it holds, and the loader may keep its batch
                container[key] = before
                clone = copy.deepcopy(container, {id(child): child for child in children})
                break
        for key, value in changes.items():
            clone[key] = value
    return clone


def _with_fields(value: Any, change: Change, place: str) -> Any:
    changes = {}
    for field in dataclasses.fields(value):
        child = getattr(value, field.name, None)
        new = _changed(child, change, f"{place}.{field.name}")
        if new is not child:
            changes[field.name] = new
    if not changes:
        return value
    with _rebuilding(value, place):
        clone = copy.copy(value)
        for name, new in changes.items():
            object.__setattr__(clone, name, new)  # frozen or not
        for name in [name for name in getattr(clone, "__dict__", ()) if _is_cached(type(value), name)]:
            del vars(clone)[name]  # it was computed from what has been replaced
    return clone


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)


@contextlib.contextmanager
def _rebuilding(container: Any, place: str) -> Iterator[None]:
    """Report errors of the block as errors of the container.

    Raises:
        FormatError: Names class and place.
    """
    try:
        yield
    except Exception as error:
        kind = type(container).__name__
        raise FormatError(
            f"{place} is a {kind}, which cannot be built again around its tensors once they are on the device: "
            f"{type(error).__name__}: {error}. Give {kind} a method to(device) that returns it moved, or have "
            "collate_fn return a tuple or dict instead"
        ) from error


def _compare(made: Any, found: list[Any], wanted: list[Any]) -> None:
    if len(found) != len(wanted) or not all(map(operator.is_, found, wanted)):
        raise ValueError(f"{type(made).__name__}(elements) holds something else")
