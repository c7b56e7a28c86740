"""The columns that say which sample a prediction belongs to, and where that sample is stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source

# In the order in which they are written. Not every source has all of them.
LOCATION_COLUMNS = ("sample", "file", "group", "row", "id", "path")
# Columns of whole numbers; the others are text.
NUMBERS = ("sample", "row")


class LocationColumns:
    """The columns of one source.

    Args:
        source: It is asked for the location of one sample of each file and group.

    Attributes:
        names: ``sample``, ``file`` and ``row``; ``group`` if some samples are in groups of an HDF5 file; ``id`` and
            ``path`` if a table has them.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> columns = LocationColumns(ArraySource({"y": np.arange(10)}))
        >>> columns.of(np.array([7, 8]))
        {'sample': array([7, 8]), 'file': ['ArraySource', 'ArraySource'], 'row': array([7, 8])}
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        firsts: dict[tuple[str, str], int] = {}
        begin = 0
        for part in source.parts:
            if part.samples:
                firsts.setdefault((part.file, part.group), begin)
            begin += part.samples
        located = source.locate(source.ids(np.array(list(firsts.values()), np.int64)))
        absent = {"group": "/", "id": None, "path": None}
        self.names = tuple(
            name
            for name in LOCATION_COLUMNS
            if name not in absent or any(_value(each, name) != absent[name] for each in located)
        )

    def ids(self, positions: Indices) -> Indices:
        """The column ``sample``: the numbers that `Source.locate` takes, of samples of this source."""
        return self._source.ids(positions)

    def of(self, positions: Indices) -> dict[str, Any]:
        """The columns of samples.

        Args:
            positions: int64, shape (n,): numbers of samples in this source.

        Returns:
            int64 arrays, and lists of str or None, by name, in order.
        """
        ids = self.ids(positions)
        located = self._source.locate(ids)
        columns: dict[str, Any] = {name: [_value(each, name) for each in located] for name in self.names[1:]}
        return {"sample": ids, **columns, "row": np.array(columns["row"], np.int64)}


def _value(location: Any, name: str) -> Any:
    value = getattr(location, name, None)  # only locations in tables have an id and a path
    if not isinstance(value, str):
        return value
    # Parquet and HDF5 store text as UTF-8. The name of a file may be any bytes: others are written as \xe4.
    return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
