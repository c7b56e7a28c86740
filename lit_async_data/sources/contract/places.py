"""Where samples are stored: `Location` of one, `Part` for consecutive ones, `Places` for all of a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices

# In the group of a part in which each sample is a group or dataset; their names are its column ``group``.
EACH = "*"

_Name = TypeVar("_Name", str, tuple[str, str, str])


class Location(NamedTuple):
    """Where a sample is stored.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        row: Row of the datasets in that group, counted from 0. If the group, or a dataset in its place, is the sample,
            its number among all of them.
    """

    file: str
    group: str
    row: int


class Part(NamedTuple):
    """Consecutive samples that belong together: those of one file, or of one group in a file.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        name: A name that does not change when files are added, or when all files move to another folder.
        samples: Number of samples.
        rows: A number that differs between different row selections of the same file; 0 for all rows.
    """

    file: str
    group: str
    name: str
    samples: int
    rows: int = 0


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

    def __repr__(self) -> str:
        return f"<Places of {len(self.rows):,} samples of {len(self.parts):,} part{'s' * (len(self.parts) > 1)}>"

    @staticmethod
    def of_parts(parts: Sequence[Part]) -> Places:
        counts = np.array([part.samples for part in parts], np.int64)
        which = np.repeat(np.arange(len(parts)), counts)
        return _distinct(tuple(parts), which, np.arange(which.size) - starts(counts)[which])

    @staticmethod
    def joined(several: Iterable[Places]) -> Places:
        listed = list(several)
        first = starts([len(places.parts) for places in listed])
        return _distinct(
            tuple(part for places in listed for part in places.parts),
            np.concatenate([places.which + begin for places, begin in zip(listed, first, strict=False)]),
            np.concatenate([places.rows for places in listed]),
        )

    def taken(self, samples: Indices) -> Places:
        return Places(self.parts, self.which[samples], self.rows[samples])

    def order(self) -> Indices:
        """The samples sorted by part and row, stable; int64, shape (n,)."""
        # One key, and a sort that is fast on sorted data, which this mostly is.
        return np.argsort(self.which * (self.rows.max() + 1) + self.rows, kind="stable")


def _distinct(parts: tuple[Part, ...], which: Indices, rows: Indices) -> Places:
    # A file that two concatenated sources share is one part: its rows are the same rows.
    codes, names = numbered(part[:3] for part in parts)
    if len(names) == len(parts):
        return Places(parts, which, rows)
    firsts = np.unique(codes, return_index=True)[1]
    for part, code in zip(parts, codes.tolist(), strict=True):
        if part.rows != parts[firsts[code]].rows:
            raise ConfigError(
                f"{part.file} occurs twice with different rows or windows, so overlaps cannot be found; split "
                "each source of this file first, then concatenate the sides",
                "source",
                file=part.file,
            )
    return Places(tuple(parts[first] for first in firsts.tolist()), codes[which], rows)


def numbered(names: Iterable[_Name]) -> tuple[Indices, list[_Name]]:
    """A number for each name, and the distinct names in the order in which they come first."""
    numbers: dict[_Name, int] = {}
    return np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64), list(numbers)


def starts(counts: npt.ArrayLike) -> Indices:
    """The start of each of several consecutive blocks, and the end of the last; int64, shape (n + 1,)."""
    return np.append(0, np.cumsum(np.asarray(counts, np.int64)))
