"""Batches of any form: `flatten` takes out the leaves, `rebuilt` puts other leaves in their places.

Pure functions; the caller decides what a leaf is. Containers are mappings, sequences, named tuples and dataclasses,
nested as deep as Python's recursion limit allows. Everything else, and containers without leaves, are passed on as the
same object.

Containers are never changed: a new one of the same class, with other leaves and otherwise equal content, replaces them.
A container of a class that cannot be built again from its elements raises an error, so that no batch silently changes.
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
# Skipped without a call: a batch may hold many of these, and none is a container or a leaf.
SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None)})

# Takes an object and its path; returns its replacement, or the same object to keep it.
Replace = Callable[[Any, str], Any]


class Placeholder(NamedTuple):
    """Takes the place of a leaf in a skeleton."""

    path: str  # where the leaf was found first, such as ``batch['x'][0]``


def flatten(batch: Any, is_leaf: Callable[[Any], bool]) -> tuple[dict[str, Any], Any]:
    """Takes the leaves out of a batch.

    Args:
        batch: Any object.
        is_leaf: Called for every object, containers too, except strings, bytes, numbers and None.

    Returns:
        The leaves by path, in order, each object once; and the skeleton: the batch with a `Placeholder` for each leaf.

    Raises:
        FormatError: A container of some class cannot be built again; the message names class and path.

    Example:
        >>> leaves, skeleton = flatten({"a": [{1}, 2], "b": "text"}, is_leaf=lambda value: isinstance(value, set))
        >>> leaves
        {"batch['a'][0]": {1}}
        >>> rebuilt(skeleton, {"batch['a'][0]": {3}})
        {'a': [{3}, 2], 'b': 'text'}
    """
    leaves: dict[str, Any] = {}
    placeholders: dict[int, Placeholder] = {}

    def take(value: Any, path: str) -> Any:
        if not is_leaf(value):
            return value
        if id(value) not in placeholders:
            placeholders[id(value)] = Placeholder(path)
            leaves[path] = value
        return placeholders[id(value)]

    return leaves, _replaced(batch, take, "batch")


def leaves_in(batch: Any, is_leaf: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns the leaves of a batch by path, in order, each object once. Builds no containers."""
    leaves: dict[int, tuple[str, Any]] = {}

    def collect(value: Any, path: str) -> Any:
        if is_leaf(value):
            leaves.setdefault(id(value), (path, value))
        return value

    _replaced(batch, collect, "batch")
    return dict(leaves.values())


def rebuilt(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    """Puts leaves in place of the placeholders of a skeleton."""
    return _replaced(skeleton, lambda value, _: leaves[value.path] if type(value) is Placeholder else value, "batch")


def _replaced(value: Any, replace: Replace, path: str) -> Any:
    new = replace(value, path)
    if new is not value:
        return new
    if isinstance(value, Mapping):
        changes = dict(_changed_children(value.items(), replace, path))
        return _with_items(value, changes, path) if changes else value
    if isinstance(value, Sequence) and not isinstance(value, OPAQUE):
        changes = dict(_changed_children(enumerate(value), replace, path))
        return _with_elements(value, changes, path) if changes else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, replace, path)
    return value


def _changed_children(children: Iterable[tuple[Any, Any]], replace: Replace, path: str) -> Iterator[tuple[Any, Any]]:
    for key, child in children:
        if type(child) in SCALARS:
            continue
        new = _replaced(child, replace, f"{path}[{key!r}]")
        if new is not child:
            yield key, new


def _with_items(mapping: Mapping[Any, Any], changes: dict[Any, Any], path: str) -> Any:
    if isinstance(mapping, MutableMapping):
        return _changed_copy(mapping, mapping.values(), changes, path)
    items = {**mapping, **changes}
    with _rebuilding(mapping, path):
        new = type(mapping)(items)  # type: ignore[call-arg]
        _check_same(new, list(new), list(items))
        _check_same(new, list(new.values()), list(items.values()))
    return new


def _with_elements(sequence: Sequence[Any], changes: dict[int, Any], path: str) -> Any:
    if isinstance(sequence, MutableSequence):
        return _changed_copy(sequence, sequence, changes, path)
    elements = [changes.get(index, value) for index, value in enumerate(sequence)]
    with _rebuilding(sequence, path):
        if isinstance(sequence, tuple):
            return _tuple_like(sequence, elements)
        new = type(sequence)(elements)  # type: ignore[call-arg]
        _check_same(new, list(new), elements)
    return new


def _tuple_like(sequence: tuple[Any, ...], elements: list[Any]) -> Any:
    """A tuple of the same class. Bypasses the class's own ``__new__``, whose arguments may not be the elements."""
    kind = type(sequence)
    try:
        new = tuple.__new__(kind, elements)
    except TypeError:  # a class written in C, such as the result of torch.max
        new = kind(elements)
        _check_same(new, list(new), elements)
    else:
        if kind is not tuple and hasattr(sequence, "__dict__"):
            vars(new).update(vars(sequence))
    return new


def _changed_copy(container: Any, children: Iterable[Any], changes: dict[Any, Any], path: str) -> Any:
    """A copy of a mutable container with changes. It keeps what else its class holds, such as a default factory."""
    with _rebuilding(container, path):
        clone = copy.copy(container)
        for key, value in changes.items():
            before = container[key]
            clone[key] = value
            if container[key] is value:  # the copy shares its storage with the container, which must not change
                container[key] = before
                clone = copy.deepcopy(container, {id(child): child for child in children})
                break
        for key, value in changes.items():
            clone[key] = value
    return clone


def _with_fields(value: Any, replace: Replace, path: str) -> Any:
    changes = {}
    for field in dataclasses.fields(value):
        child = getattr(value, field.name, None)
        if type(child) in SCALARS:
            continue
        new = _replaced(child, replace, f"{path}.{field.name}")
        if new is not child:
            changes[field.name] = new
    if not changes:
        return value
    with _rebuilding(value, path):
        clone = copy.copy(value)
        for name, new in changes.items():
            object.__setattr__(clone, name, new)  # the dataclass may be frozen
        for name in [name for name in getattr(clone, "__dict__", ()) if _is_cached(type(value), name)]:
            del vars(clone)[name]  # computed from the old fields
    return clone


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)


@contextlib.contextmanager
def _rebuilding(container: Any, path: str) -> Iterator[None]:
    """Raises errors of the block as a `FormatError` that names the container."""
    try:
        yield
    except Exception as error:
        kind = type(container).__name__
        raise FormatError(
            f"{path} is a {kind}, which cannot be built again around its tensors once they are on the device: "
            f"{type(error).__name__}: {error}. Give {kind} a method to(device) that returns it moved, or have "
            "collate_fn return a tuple or dict instead"
        ) from error


def _check_same(new: Any, actual: list[Any], expected: list[Any]) -> None:
    if len(actual) != len(expected) or not all(map(operator.is_, actual, expected)):
        raise ValueError(f"{type(new).__name__}(elements) does not hold these elements")
