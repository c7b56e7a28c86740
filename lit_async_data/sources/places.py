"""`Places`: from which part and row each sample of a source comes, whatever stands between it and its files."""

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

# Samples read in one go where a field of all of them is wanted.
AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True)
class Places:
    """Part and row of each sample.

    Attributes:
        parts: No two of the same file, group and name; how many samples each has says nothing here.
        which: Number of each sample's part; int64, shape (n,).
        rows: Its number in the part, counted from 0 when all of the part is there; int64, shape (n,). It stays the same
            in a subset, and when other parts are added.
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
        """Places one after the other."""
        listed = list(several)
        first = starts([len(places.parts) for places in listed])
        return _distinct(
            tuple(part for places in listed for part in places.parts),
            np.concatenate([places.which + begin for places, begin in zip(listed, first, strict=False)]),
            np.concatenate([places.rows for places in listed]),
        )

    def taken(self, samples: Indices) -> Places:
        """The places of some of the samples."""
        return Places(self.parts, self.which[samples], self.rows[samples])

    def order(self) -> Indices:
        """The samples in the order of parts and rows, stable; int64, shape (n,)."""
        # One key and a sort that makes use of what is in order already: mostly all of it.
        return np.argsort(self.which * (self.rows.max() + 1) + self.rows, kind="stable")


def _distinct(parts: tuple[Part, ...], which: Indices, rows: Indices) -> Places:
    # A file that is in two of the sources that were put together is one part: its rows are the same rows.
    numbers: dict[tuple[str, str, str], int] = {}
    codes = np.array([numbers.setdefault(part[:3], len(numbers)) for part in parts], np.int64)
    if len(numbers) == len(parts):
        return Places(parts, which, rows)
    firsts = np.unique(codes, return_index=True)[1]
    for part, code in zip(parts, codes.tolist(), strict=True):
        if part.rows != parts[firsts[code]].rows:
            raise ConfigError(
                f"source: {part.file} is in it twice, with different rows or windows; which samples share values is "
                "then not known: split the file first, and put the sides together",
                file=part.file,
            )
    return Places(tuple(parts[first] for first in firsts.tolist()), codes[which], rows)


def places_of(source: Source) -> Places:
    """The places of all samples of a source; one made of others says from where they come."""
    placed = getattr(source, "places", None)
    return Places.of_parts(parts_of(source)) if placed is None else placed()


def parts_of(source: Source) -> Sequence[Part]:
    """The parts of a source; one that knows of none is one part, without a name."""
    if isinstance(source, PartedSource):
        return source.parts
    return (Part(name_of(source), "/", "", len(source)),)


def overlap_of(source: Source) -> int:
    """How many of the samples after it share values with a sample; 0 where the source knows nothing of it."""
    return source.overlap if isinstance(source, PartedSource) else 0


def column_of(source: Source, name: str) -> npt.NDArray[Any]:
    """One value for each sample.

    Args:
        source: Any; of one without columns, a key of ``spec`` that holds one value per sample is read.
        name: As `PartedSource.column` takes it.

    Raises:
        MissingError: There is none of this name.
    """
    if isinstance(source, PartedSource):
        return source.column(name)
    fields = source.spec.fields
    if name not in fields or fields[name].shape:
        flat = [key for key, field in fields.items() if not field.shape]
        raise MissingError(
            f"{name_of(source)}: there is no {name!r} of one value per sample; those that there are: "
            f"{', '.join(flat) or 'none'}",
            dataset=name,
        )
    values = np.empty(len(source), fields[name].dtype)
    for first in range(0, len(values), AT_ONCE):
        some = values[first : first + AT_ONCE]
        source.read_into(first + np.arange(len(some)), {name: some})
    return values


def values_of(source: Source, key: str, option: str) -> npt.NDArray[Any]:
    """The values of a field of one number per sample, over all samples.

    Args:
        source: Where they come from.
        key: Of the field.
        option: Who wants them, for messages.

    Returns:
        Shape (len(source),).

    Raises:
        ConfigError: There is no such field, or its samples are more than a number.
    """
    field = source.spec.fields.get(key)
    if field is None:
        raise ConfigError(f"{option}: {key!r} is not one of the fields {', '.join(source.spec.fields)}")
    if math.prod(field.shape) != 1:
        raise ConfigError(f"{option}: {key} has samples of shape {field.shape}; it must be one number per sample")
    values = np.empty((len(source), *field.stored_shape), field.dtype)
    for first in range(0, len(source), AT_ONCE):
        samples = np.arange(first, min(first + AT_ONCE, len(source)))
        source.read_into(samples, {key: values[first : first + len(samples)]})
    return values.reshape(-1)


def name_of(source: Source) -> str:
    """A source as messages name it: by where its samples come from, as it says, or by its class."""
    name = getattr(source, "name", None)
    if isinstance(name, str):
        return name
    return type(source).__name__ if type(source).__str__ is object.__str__ else str(source)


def starts(counts: npt.ArrayLike) -> Indices:
    """Where each of several stretches begins, and at last the end; int64, shape (n + 1,)."""
    return np.append(0, np.cumsum(np.asarray(counts, np.int64)))


def check_source(name: str, given: object) -> None:
    """Make sure that an argument is a source.

    Raises:
        ConfigError: It is not; the message begins with the name.
    """
    if not isinstance(given, Source):
        raise ConfigError(f"{name}: {given!r} is not a source; build one, as in HDF5Source('data.h5')")


def whole_numbers(given: Any, source: Source) -> Indices:
    """Sample numbers as they may be given; int64, shape (n,).

    Raises:
        IndexError: They are no whole numbers.
    """
    numbers = np.asarray(given).reshape(-1)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise IndexError(f"sample numbers are whole numbers below {len(source)}, not {numbers[:1].tolist()[0]!r}")
    return numbers.astype(np.int64)


def check_range(samples: Indices, source: Source) -> None:
    """Make sure that a source has these samples.

    Raises:
        IndexError: A number is not in ``range(len(source))``.
    """
    wrong = (samples < 0) | (samples >= len(source))
    if wrong.any():
        raise IndexError(f"sample {samples[wrong][0]} of {len(source)} in {name_of(source)}")


def check_same(sources: Sequence[Source], number: int) -> None:
    """Make sure that the samples of a source are like those of the first.

    Raises:
        FormatError: They are not; names both sources and the field.
    """
    first, other = sources[0].spec, sources[number].spec
    if first == other:
        return
    here, there = (f"sources[{n}] ({name_of(sources[n])})" for n in (number, 0))
    if first.as_mapping != other.as_mapping or list(first.fields) != list(other.fields):
        said = [f"{'dicts' if spec.as_mapping else 'tuples'} of {', '.join(spec.fields)}" for spec in (other, first)]
        raise FormatError(f"{here} has {said[0]}, but {there} has {said[1]}; sources of one must agree")
    key = next(key for key, field in first.fields.items() if other[key] != field)
    mine, theirs = (vars(spec[key]) for spec in (other, first))
    what = next(name for name, value in theirs.items() if mine[name] != value)
    raise FormatError(
        f"{key!r} has {what} {mine[what]} in {here}, but {theirs[what]} in {there}; sources of one must agree",
        dataset=key,
    )
