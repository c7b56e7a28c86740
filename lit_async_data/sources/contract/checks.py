"""Checks of sources, their fields, and values that users' code returns; the first good sample.

Reader processes import this module, so it imports no torch.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import TENSOR_TYPES, Array, BatchSpec, contradict, listed_names, longest_of
from lit_async_data.errors import ConfigError, FormatError, SourceError
from lit_async_data.sources.contract.source import Source, read_all
from lit_async_data.sources.contract.user_code import digest

T = TypeVar("T")
FIRST_SAMPLES = 16  # tried for a common property, such as the size
# Names of columns from one on, by the digest that specs hold: the latest 16, for messages.
_NAMES = dict[str, tuple[int, Sequence[str]]]()


def is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_flags(numbers: npt.NDArray[Any], count: int, where: str, option: str) -> None:
    """An error for whole numbers that are flags or codes, one for each of ``count`` rows: few values, many times."""
    head = numbers[: 2**16]
    if numbers.size == count > 4 and ((few := np.unique(head)).size <= 2 or few.size * 8 <= head.size):
        values = " or ".join(map(str, few[:3].tolist())) + " …" * (few.size > 3)
        what = f"{where} holds {values} for each of {count}, as a mask or codes do, not different numbers"
        raise ConfigError(f"{what}; give a mask of bools, such as numpy.asarray(…) == 1", option)


def columns_of(names: Sequence[str], *, first: int = 0, reordered: bool = False) -> str:
    """A key of names from column ``first`` on. With ``reordered``, only the same names in another order clash."""
    _NAMES[key := f"{digest(sorted(names))}~" * reordered + digest(names)] = (first, names)
    for old in [*_NAMES][:-16]:
        _NAMES.pop(old, None)
    return key


def column_clash(mine: str, other: str, there: object) -> str:
    """The first column that has another name ``there``, and what to do; empty if none has, or one has no names."""
    of_mine, of_other = (key.rpartition("~")[0] for key in (mine, other))
    if not (mine and other) or mine == other or of_mine != of_other:
        return ""
    (first, own), (_, others) = (_NAMES.get(key, (0, ())) for key in (mine, other))
    pairs = enumerate(zip(own, others, strict=False), first)
    found = (f"column {place} is {one!r}, but {two!r} in" for place, (one, two) in pairs if one != two)
    what = f"its {next(found, 'columns have other names than in')} {there}; write both with the same columns in one "
    return f"{what}order (AnnData: b[:, a.var_names])"


def first_good(count: int, attempt: Callable[[int], T], advice: str = "") -> T:
    """The result of ``attempt`` for the first good sample, of 16 at most; else one error about all of them."""
    errors = list[SourceError]()
    for number in range(min(count, FIRST_SAMPLES)):
        try:
            return attempt(number)
        except SourceError as error:
            errors.append(error)
    first = errors[0]
    rows = ", ".join(str(each.row) for each in errors)
    none = f"; none of the first {len(errors)} is good (rows {rows})" if errors[1:] else ""
    where: dict[str, Any] = {name: getattr(first, name) for name in ("file", "dataset", "row", "sample_id")}
    raise type(first)(f"{first}{none}{advice}", errors=errors, **where) from first.__cause__


def check_source(name: str, given: object, kinds: str = "a source") -> None:
    if isinstance(given, Source):
        for member, own in vars(Source).items():
            if {type(own), type(mine := inspect.getattr_static(given, member))} == {property, types.FunctionType}:
                ways = "a property, and is to be called; leave out @property", "a method; write @property above it"
                raise ConfigError(f"{type(given).__name__}.{member} is {ways[callable(mine)]}", name)
        return
    what = f"{given!r} is not {kinds}"
    several = list(given.values() if isinstance(given, Mapping) else given) if isinstance(given, Collection) else []
    if several and all(isinstance(each, Source) for each in several):
        what += ", but several; " + "write a list of them; " * ("list" in kinds)
        raise ConfigError(f"{what}ConcatSource([…]) makes one of them, MixtureSource mixes them", name)
    if isinstance(given, type) and issubclass(given, Source):
        raise ConfigError(f"{what}, but a class; call it: {given.__name__}(…)", name)
    raise ConfigError(f"{what}; build one, as in HDF5Source('data.h5') or DatasetSource(dataset)", name)


def check_same(before: BatchSpec, own: BatchSpec, here: str, there: str, alike: str) -> None:
    first, other = longest_of([before, own]), longest_of([own, before])
    keys, others = list(first.fields), list(other.fields)
    same = {*keys} == {*others} if first.as_mapping else keys == others  # the order of keys in dicts says nothing
    if first.as_mapping != other.as_mapping or not same:
        listed = [f"{'dicts' if spec.as_mapping else 'tuples'} of {', '.join(spec.fields)}" for spec in (other, first)]
        raise FormatError(f"{here} has {listed[0]}, but {there} has {listed[1]}; {alike}")
    for key in keys:
        names, own_names = before[key].named, own[key].named
        if contradict(names, own_names):
            what = f"{key!r} is {listed_names(own_names)} in {here}, but {listed_names(names)} in {there}"
            raise FormatError(f"{what}; give classes=[…] to the fields of both", dataset=key)
        if first[key] != other[key]:
            mine, theirs = vars(other[key]), vars(first[key])
            what = next(name for name, value in theirs.items() if mine[name] != value)
            message = f"{key!r} has {what} {mine[what]} in {here}, but {theirs[what]} in {there}"
            raise FormatError(f"{message}; {alike}{'; dtype= of a field sets it' * (what == 'dtype')}", dataset=key)
        if clash := column_clash(own[key].columns, before[key].columns, there):
            raise FormatError(f"{key!r} of {here}: {clash}", dataset=key)


def values_of(source: Source, key: str, option: str, *, several: bool = False) -> npt.NDArray[Any]:
    field = source.spec.fields.get(key)
    if field is None:
        hint = "; write Balanced(KEY), in YAML {balanced: KEY}" * (key == "balanced")
        raise ConfigError(f"{key!r} is not one of the fields {', '.join(source.spec.fields)}{hint}", option)
    several = several and len(field.shape) == 1 and field.shape != (1,)
    if math.prod(field.shape) != 1 and not several:
        raise ConfigError(f"{key} has samples of shape {field.shape}; name a field with one number per sample", option)
    values = read_all(source, key)
    return values if several else values.reshape(-1)


def fields_by_key(
    fields: Any, of: Callable[[Any, str], T], key_of: Callable[[T], str], what: str
) -> tuple[dict[str, T], bool]:
    """The field of each batch key, which ``of`` makes of the user's, and whether batches are dicts."""
    if isinstance(fields, Mapping):
        pairs = [(key, of(each, f"fields.{key}.")) for key, each in fields.items()]
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        pairs = [(key_of(one), one) for one in (of(each, f"fields.{n}.") for n, each in enumerate(fields))]
    else:
        pairs = []
    if not pairs or not all(isinstance(key, str) and key for key, _ in pairs):
        example = f"; write {{'x': {fields!r}}}" if isinstance(fields, str) and fields else ""
        message = f"{fields!r} is not a mapping from batch key to {what} name or a list of names{example}"
        raise ConfigError(message, "fields")
    if len(dict(pairs)) < len(pairs):
        names = [key for key, _ in pairs]
        raise ConfigError(f"{names} names a {what} twice; give a mapping with a key for each", "fields")
    return dict(pairs), isinstance(fields, Mapping)


class UnfitError(Exception):
    """A value cannot be a field; the message describes it and says what to return in its place."""


def as_array(value: Any) -> Array:
    """A tensor, array or number as an array, without a copy if possible. Python's numbers: bool, int64, float64."""
    array: Array
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        if not value.is_cpu:
            raise UnfitError(f"a tensor on {value.device}; return it on the CPU, the loader copies batches")
        try:
            array = value.numpy(force=True)  # also detaches the tensor and resolves conjugates
        except (TypeError, RuntimeError):
            ways = "return a dense tensor of another dtype, such as .float(), and cast it in device_transform"
            raise UnfitError(f"a tensor of {value.dtype}, {value.layout}, which numpy cannot hold; {ways}") from None
    elif isinstance(value, np.ndarray | np.generic | int | float) and not isinstance(value, np.ma.MaskedArray):
        try:
            array = np.asarray(value, np.int64 if isinstance(value, int) and not isinstance(value, bool) else None)
        except OverflowError:
            raise UnfitError(f"{value}, which does not fit into int64; return it as a float") from None
    else:
        hint = "an array or a number, or leave it out"
        if isinstance(value, Mapping | tuple | list):
            hint = "its values under keys of their own, or an array of numbers"
        elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
            hint = "numpy.asarray(…) of it"
        raise UnfitError(f"a {type(value).__name__}, which no tensor can hold; return {hint}")
    if (array.dtype.kind, array.dtype.itemsize) not in TENSOR_TYPES:
        raise UnfitError(f"an array of {array.dtype}, which no tensor can hold; return numbers, or leave it out")
    return array
