"""`Places`: the part and row of each sample, also through subsets and concatenations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, FormatError, MissingError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Part, PartedSource, Source

# Samples per read when a field is read for all samples.
BLOCK_SAMPLES = 2**20


@dataclasses.dataclass(frozen=True)
class Places:
    """Part and row of each sample.

    Attributes:
        parts: Parts with distinct file, group and name; their ``samples`` mean nothing here.
        which: Index of each sample's part in ``parts``; int64, shape (n,).
        rows: Row of each sample in the complete part, from 0; int64, shape (n,). It stays the same in a subset, and
            when other parts are added.
    """

    parts: tuple[Part, ...]
    which: Indices
    rows: Indices

    @staticmethod
    def of_parts(parts: Sequence[Part]) -> Places:
        """The places of all samples of these parts."""
        counts = np.array([part.samples for part in parts], np.int64)
        which = np.repeat(np.arange(len(parts)), counts)
        return _distinct(tuple(parts), which, np.arange(which.size) - starts(counts)[which])

    @staticmethod
    def joined(several: Iterable[Places]) -> Places:
        """Concatenate places."""
        listed = list(several)
        first = starts([len(places.parts) for places in listed])
        return _distinct(
            tuple(part for places in listed for part in places.parts),
            np.concatenate([places.which + begin for places, begin in zip(listed, first, strict=False)]),
            np.concatenate([places.rows for places in listed]),
        )

    def taken(self, samples: Indices) -> Places:
        """The places of selected samples."""
        return Places(self.parts, self.which[samples], self.rows[samples])

    def order(self) -> Indices:
        """The samples sorted by part and row, stable; int64, shape (n,)."""
        # One key, and a sort that is fast on sorted data, which this mostly is.
        return np.argsort(self.which * (self.rows.max() + 1) + self.rows, kind="stable")


def _distinct(parts: tuple[Part, ...], which: Indices, rows: Indices) -> Places:
    # A file that two concatenated sources share is one part: its rows are the same rows.
    numbers: dict[tuple[str, str, str], int] = {}
    codes = np.array([numbers.setdefault(part[:3], len(numbers)) for part in parts], np.int64)
    if len(numbers) == len(parts):
        return Places(parts, which, rows)
    firsts = np.unique(codes, return_index=True)[1]
    for part, code in zip(parts, codes.tolist(), strict=True):
        if part.rows != parts[firsts[code]].rows:
            raise ConfigError(
                f"source: {part.file} occurs twice with different rows or windows, so overlaps cannot be found; split "
                "each source of this file first, then concatenate the sides",
                file=part.file,
            )
    return Places(tuple(parts[first] for first in firsts.tolist()), codes[which], rows)


def places_of(source: Source) -> Places:
    """The places of all samples of a source; of a composed source, those of the sources inside."""
    placed = getattr(source, "places", None)
    return Places.of_parts(parts_of(source)) if placed is None else placed()


def parts_of(source: Source) -> Sequence[Part]:
    """The parts of a source; a source without parts is one part without a name."""
    if isinstance(source, PartedSource):
        return source.parts
    return (Part(name_of(source), "/", "", len(source)),)


def overlap_of(source: Source) -> int:
    """Number of following samples that share values with a sample; 0 for a source without parts."""
    return source.overlap if isinstance(source, PartedSource) else 0


def column_of(source: Source, name: str) -> npt.NDArray[Any]:
    """One value for each sample.

    Args:
        source: Any source. Without a `column` method, it is read for a key of ``spec`` with one value per sample.
        name: As for `PartedSource.column`.

    Raises:
        MissingError: The source has no such column.
    """
    if isinstance(source, PartedSource):
        return source.column(name)
    fields = source.spec.fields
    if name not in fields or fields[name].shape:
        flat = [key for key, field in fields.items() if not field.shape]
        raise MissingError(
            f"{name_of(source)}: no field {name!r} with one value per sample; fields with one value per sample: "
            f"{', '.join(flat) or 'none'}",
            dataset=name,
        )
    values = np.empty(len(source), fields[name].dtype)
    for first in range(0, len(values), BLOCK_SAMPLES):
        block = values[first : first + BLOCK_SAMPLES]
        source.read_into(first + np.arange(len(block)), {name: block})
    return values


def values_of(source: Source, key: str, option: str) -> npt.NDArray[Any]:
    """The values of a field with one number per sample, for all samples.

    Args:
        source: The source to read.
        key: Key of the field.
        option: The option that needs the values, for messages.

    Returns:
        Shape (len(source),).

    Raises:
        ConfigError: There is no such field, or its samples hold more than one number.
    """
    field = source.spec.fields.get(key)
    if field is None:
        raise ConfigError(f"{option}: {key!r} is not one of the fields {', '.join(source.spec.fields)}")
    if math.prod(field.shape) != 1:
        raise ConfigError(
            f"{option}: {key} has samples of shape {field.shape}; name a field with one number per sample"
        )
    values = np.empty((len(source), *field.stored_shape), field.dtype)
    for first in range(0, len(source), BLOCK_SAMPLES):
        samples = np.arange(first, min(first + BLOCK_SAMPLES, len(source)))
        source.read_into(samples, {key: values[first : first + len(samples)]})
    return values.reshape(-1)


def name_of(source: Source) -> str:
    """The name of a source in messages: its attribute ``name``, else its ``str`` or its class."""
    name = getattr(source, "name", None)
    if isinstance(name, str):
        return name
    return type(source).__name__ if type(source).__str__ is object.__str__ else str(source)


def starts(counts: npt.ArrayLike) -> Indices:
    """The start of each of several consecutive blocks, and the end of the last; int64, shape (n + 1,)."""
    return np.append(0, np.cumsum(np.asarray(counts, np.int64)))


def check_source(name: str, given: object) -> None:
    """Check that an argument is a source.

    Raises:
        ConfigError: It is not; the message begins with ``name``.
    """
    if not isinstance(given, Source):
        raise ConfigError(f"{name}: {given!r} is not a source; build one, as in HDF5Source('data.h5')")


def whole_numbers(given: Any, source: Source) -> Indices:
    """Sample numbers from what a user gives; int64, shape (n,).

    Raises:
        IndexError: They are not whole numbers.
    """
    numbers = np.asarray(given).reshape(-1)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise IndexError(f"sample numbers are whole numbers below {len(source)}, not {numbers[:1].tolist()[0]!r}")
    return numbers.astype(np.int64)


def check_range(samples: Indices, source: Source) -> None:
    """Check that a source has these samples.

    Raises:
        IndexError: A number is not in ``range(len(source))``.
    """
    wrong = (samples < 0) | (samples >= len(source))
    if wrong.any():
        raise IndexError(f"sample {samples[wrong][0]} of {len(source)} in {name_of(source)}")


def check_same(sources: Sequence[Source], number: int) -> None:
    """Check that a source has the fields of the first source.

    Raises:
        FormatError: It has not; names both sources and the field.
    """
    first, other = sources[0].spec, sources[number].spec
    if first == other:
        return
    here, there = (f"sources[{n}] ({name_of(sources[n])})" for n in (number, 0))
    if first.as_mapping != other.as_mapping or list(first.fields) != list(other.fields):
        listed = [f"{'dicts' if spec.as_mapping else 'tuples'} of {', '.join(spec.fields)}" for spec in (other, first)]
        raise FormatError(
            f"{here} has {listed[0]}, but {there} has {listed[1]}; concatenated sources need the same fields"
        )
    key = next(key for key, field in first.fields.items() if other[key] != field)
    mine, theirs = (vars(spec[key]) for spec in (other, first))
    what = next(name for name, value in theirs.items() if mine[name] != value)
    raise FormatError(
        f"{key!r} has {what} {mine[what]} in {here}, but {theirs[what]} in {there}; concatenated sources need the "
        "same fields",
        dataset=key,
    )
