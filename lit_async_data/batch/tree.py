"""Nested batches: `flatten` takes out the leaves, `rebuilt` puts other leaves in their places.

Containers are mappings, sequences, named tuples and dataclasses, nested as deep as Python's recursion limit allows.
Other objects and containers without leaves are passed on unchanged. A container is never changed in place: a new one of
the same class, with other leaves and otherwise equal content, replaces it. A container of a class that cannot be built
again from its elements raises an error, so that no batch silently changes.
"""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

from lit_async_data.errors import FormatError

# Sequences that hold no objects.
OPAQUE = (str, bytes, bytearray, memoryview, range, array.array)
# Types of neither containers nor leaves, skipped without a call, since a batch may hold many.
SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None)})

# Takes an object and its path; returns its replacement, or the same object to keep it.
Replace = Callable[[Any, str], Any]


class Placeholder(NamedTuple):
    path: str  # the first path of the leaf, such as ``batch['x'][0]``


def flatten(batch: Any, is_leaf: Callable[[Any], bool]) -> tuple[dict[str, Any], Any]:
    """The leaves by path, in order, each object once; and the skeleton: the batch with a `Placeholder` for each leaf.

    ``is_leaf`` is called for every object and container, except strings, bytes, numbers and None. A FormatError names
    class and path of a container that cannot be built again.
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
    """The leaves by path, in order, each object once. Builds no containers."""
    leaves: dict[int, tuple[str, Any]] = {}

    def collect(value: Any, path: str) -> Any:
        if is_leaf(value):
            leaves.setdefault(id(value), (path, value))
        return value

    _replaced(batch, collect, "batch")
    return dict(leaves.values())


def rebuilt(skeleton: Any, leaves: Mapping[str, Any]) -> Any:
    kind = type(skeleton)
    if kind not in (dict, list, tuple):
        return _replaced(
            skeleton, lambda value, _: leaves[value.path] if type(value) is Placeholder else value, "batch"
        )
    changes: dict[Any, Any] = {}  # found without a call per leaf, since this runs in the training loop's thread
    for key, child in skeleton.items() if kind is dict else enumerate(skeleton):
        if type(child) is Placeholder:
            changes[key] = leaves[child.path]
        elif type(child) not in SCALARS and (new := rebuilt(child, leaves)) is not child:
            changes[key] = new
    if not changes:
        return skeleton
    batch = dict(skeleton) if kind is dict else list(skeleton)
    for key, new in changes.items():
        batch[key] = new
    return tuple(batch) if kind is tuple else batch


def _replaced(value: Any, replace: Replace, path: str) -> Any:
    new = replace(value, path)
    if new is not value:
        return new
    children: Iterable[tuple[Any, Any]]
    changed: Callable[[Any, dict[Any, Any]], Any]
    if isinstance(value, Mapping):
        children, changed, name = value.items(), _with_items, "[{!r}]"
    elif isinstance(value, Sequence) and not isinstance(value, OPAQUE):
        children, changed, name = enumerate(value), _with_elements, "[{!r}]"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        children, changed, name = [(each, getattr(value, each, None)) for each in names], _with_fields, ".{}"
    else:
        return value
    changes: dict[Any, Any] = {}
    for key, child in children:
        if type(child) not in SCALARS and (new := _replaced(child, replace, path + name.format(key))) is not child:
            changes[key] = new
    try:
        return changed(value, changes) if changes else value
    except Exception as error:
        kind = type(value).__name__
        what = f"{path} is a {kind}, which cannot be built again around its tensors once they are on the device"
        cure = f"Give {kind} a method to(device) that returns it moved, or have collate_fn return a tuple or dict"
        raise FormatError(f"{what}: {type(error).__name__}: {error}. {cure} instead") from error


def _with_items(mapping: Any, changes: dict[Any, Any]) -> Any:
    if isinstance(mapping, MutableMapping):
        return _changed_copy(mapping, mapping.values(), changes)
    items = {**mapping, **changes}
    new = type(mapping)(items)
    _check_same(new, [*new, *new.values()], [*items, *items.values()])
    return new


def _with_elements(sequence: Any, changes: dict[int, Any]) -> Any:
    if isinstance(sequence, MutableSequence):
        return _changed_copy(sequence, sequence, changes)
    elements = [changes.get(index, value) for index, value in enumerate(sequence)]
    kind = type(sequence)
    if isinstance(sequence, tuple):
        with contextlib.suppress(TypeError):  # a class written in C, such as the result of torch.max
            # Bypasses ``__new__`` of the class, whose arguments may not be the elements.
            plain = tuple.__new__(kind, elements)
            if kind is not tuple and hasattr(sequence, "__dict__"):
                vars(plain).update(vars(sequence))
            return plain
    new = kind(elements)
    _check_same(new, list(new), elements)
    return new


def _changed_copy(container: Any, children: Iterable[Any], changes: dict[Any, Any]) -> Any:
    """A copy that keeps the other attributes of a mutable container, such as a default factory."""
    clone, (key, value) = copy.copy(container), next(iter(changes.items()))
    before, clone[key] = container[key], value
    if container[key] is value:  # the copy shares its storage with the container, which must not change
        container[key] = before
        clone = copy.deepcopy(container, {id(child): child for child in children})
    for key, value in changes.items():
        clone[key] = value
    return clone


def _with_fields(value: Any, changes: dict[str, Any]) -> Any:
    clone = copy.copy(value)
    for name, new in changes.items():
        object.__setattr__(clone, name, new)  # the dataclass may be frozen
    for name in [*getattr(clone, "__dict__", ())]:
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del vars(clone)[name]  # computed from the old fields
    return clone


def _check_same(new: Any, actual: list[Any], expected: list[Any]) -> None:
    if len(actual) != len(expected) or not all(map(operator.is_, actual, expected)):
        raise ValueError(f"{type(new).__name__}(elements) does not hold these elements")
