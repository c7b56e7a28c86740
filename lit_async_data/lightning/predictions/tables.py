"""`TablePart`: predictions in columns, written by one rank as a Parquet file; and the merging of such files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.lightning.predictions.locations import NUMBERS
from lit_async_data.lightning.predictions.values import PredictedField
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import arrow

# Bytes of a row group of the merged file, about, and the most rows that it has.
GROUP_BYTES = 2**26
GROUP_ROWS = 2**20
# Assumed bytes of a text.
TEXT_BYTES = 64


class TablePart:
    """One rank's rows as a Parquet file. A row group is written when its rows are there; until then they are kept.

    All ranks write row groups of equal numbers of rows, so that those with the same number can be merged.

    Args:
        path: The file.
        columns: Names of the location columns.
        fields: The predicted fields.
        ranks: Ranks whose parts will be merged.
    """

    suffix = ".parquet"

    def __init__(self, path: str, columns: Sequence[str], fields: Mapping[str, PredictedField], ranks: int = 1) -> None:
        library = arrow()
        locations = [(name, library.int64() if name in NUMBERS else library.string()) for name in columns]
        self._schema = library.schema([*locations, *((name, _type(field)) for name, field in fields.items())])
        row_bytes = TEXT_BYTES * len(columns) + sum(field.nbytes or TEXT_BYTES for field in fields.values())
        self._group_rows = max(min(GROUP_BYTES // row_bytes, GROUP_ROWS) // ranks, 1)
        self._kept: list[Any] = []
        self._kept_rows = 0
        self._writer = arrow("parquet").ParquetWriter(path, self._schema)

    def write(self, columns: Mapping[str, Any]) -> None:
        """Add rows; values are copied."""
        arrays = [_array(columns[field.name], field.type) for field in self._schema]
        self._kept.append(arrow().Table.from_arrays(arrays, schema=self._schema))
        self._kept_rows += self._kept[-1].num_rows
        while self._kept_rows >= self._group_rows:
            self._write_group()

    def _write_group(self) -> None:
        rows = arrow().concat_tables(self._kept)
        self._writer.write_table(rows.slice(0, self._group_rows), row_group_size=self._group_rows)
        self._kept = [rows.slice(self._group_rows)]
        self._kept_rows = self._kept[0].num_rows

    def close(self) -> None:
        """Write the rows that are left, and close the file. A second call does nothing."""
        if self._writer.is_open:
            try:
                if self._kept_rows:
                    self._write_group()
            finally:
                self._writer.close()

    @staticmethod
    def samples(path: str) -> Iterator[Indices]:
        """The column ``sample`` of a file, in pieces."""
        with arrow("parquet").ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, ["sample"])["sample"].to_numpy()

    @staticmethod
    def layout(path: str) -> str:
        """Names and types of the columns of a file."""
        return ", ".join(f"{field.name} {field.type}" for field in arrow("parquet").read_schema(path))

    @staticmethod
    def merge(paths: Sequence[str], target: str) -> Iterator[None]:
        """Write the rows of the parts of all ranks in dataset order: row n of part r is row ``r + n · len(paths)``.

        Holds one row group of each part at a time, and yields after each.
        """
        parquet = arrow("parquet")
        with parquet.ParquetFile(paths[0]) as first:  # no part has more rows
            schema, groups = first.schema_arrow, first.num_row_groups
        with parquet.ParquetWriter(target, schema) as writer:
            for number in range(groups):
                tables = [_row_group(path, number) for path in paths]
                places = [rank + len(paths) * np.arange(table.num_rows) for rank, table in enumerate(tables)]
                rows = arrow().concat_tables(tables).take(np.argsort(np.concatenate(places)))
                writer.write_table(rows, row_group_size=rows.num_rows)
                yield


def _row_group(path: str, number: int) -> Any:
    # Opened each time: the system may refuse to keep the files of many ranks open.
    with arrow("parquet").ParquetFile(path) as file:
        return file.read_row_group(number) if number < file.num_row_groups else file.schema_arrow.empty_table()


def _type(field: PredictedField) -> Any:
    if field.dtype is None:
        return arrow().string()
    number = arrow().from_numpy_dtype(field.dtype)
    return arrow().list_(number, field.shape[0]) if field.shape else number


def _array(values: Any, kind: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return arrow().array(values, kind)
    if values.ndim == 1:
        return arrow().array(values.copy(), kind)
    return arrow().FixedSizeListArray.from_arrays(arrow().array(values.flatten()), type=kind)
