"""`TablePart` and `ArrayPart`: what one rank predicts, as a Parquet and an HDF5 file; and how such files are merged.

Row n of the part of rank r is row ``r + n · ranks`` of the merged file. The parts of many ranks are not open at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.sources.hdf5.storage.stored_chunk import read_chunk, write_chunk
from lit_async_data.sources.table.arrow import arrow

# Bytes that are held until they are written or merged, about, and the assumed bytes of a text.
HELD_BYTES, TEXT_BYTES = 2**26, 64
# Samples of whole numbers that have as many bytes are compressed, each as one chunk.
COMPRESSED_BYTES = 4096


# Numbers with the samples on axis 0, or a text for each sample.
Values = npt.NDArray[Any] | list[Any]


class Field(NamedTuple):
    """What is written for each sample under one name."""

    dtype: np.dtype[Any] | None  # None for text
    shape: tuple[int, ...]  # of one sample

    @property
    def is_array(self) -> bool:
        return len(self.shape) > 1  # as a mask; others fit into a column of a table

    def __str__(self) -> str:
        return "text" if self.dtype is None else f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)


def _piece_rows(fields: Mapping[str, Field], ranks: int) -> int:
    row = sum(math.prod(each.shape) * each.dtype.itemsize if each.dtype else TEXT_BYTES for each in fields.values())
    return max(HELD_BYTES // (row * ranks), 1)


class TablePart:
    """A Parquet file. Its row groups have equal numbers of rows on all ranks: those with the same number are merged."""

    suffix = ".parquet"

    def __init__(self, path: str, fields: Mapping[str, Field], ranks: int) -> None:
        self._schema = arrow().schema([(name, _arrow_type(field)) for name, field in fields.items()])
        self._group_rows, self._kept, self._rows = _piece_rows(fields, ranks), list[Any](), 0
        self._writer = arrow("parquet").ParquetWriter(path, self._schema)

    def write(self, columns: Mapping[str, Values]) -> None:
        """Add rows; values are copied."""
        arrays = [_arrow_array(columns[field.name], field.type) for field in self._schema]
        self._kept.append(arrow().Table.from_arrays(arrays, schema=self._schema))
        self._rows += self._kept[-1].num_rows
        while self._rows >= self._group_rows:
            self._write_group()

    def _write_group(self) -> None:
        rows = arrow().concat_tables(self._kept)
        self._writer.write_table(rows.slice(0, self._group_rows), row_group_size=self._group_rows)
        self._kept = [rows.slice(self._group_rows)]
        self._rows = self._kept[0].num_rows

    def close(self) -> None:
        if self._rows:
            self._write_group()
        self._writer.close()

    def merge(self, paths: Sequence[str], target: str, total: int) -> None:
        """Write the rows of the parts of all ranks, ``total`` in all, in the order of the dataset."""
        with arrow("parquet").ParquetWriter(target, self._schema) as writer:
            for number in range(-(-total // len(paths) // self._group_rows)):
                tables = [_row_group(path, number) for path in paths]
                places = [rank + len(paths) * np.arange(table.num_rows) for rank, table in enumerate(tables)]
                rows = arrow().concat_tables(tables).take(np.argsort(np.concatenate(places)))
                writer.write_table(rows, row_group_size=rows.num_rows)


def _row_group(path: str, number: int) -> Any:
    with arrow("parquet").ParquetFile(path) as file:
        return file.read_row_group(number) if number < file.num_row_groups else file.schema_arrow.empty_table()


def _arrow_type(field: Field) -> Any:
    number = arrow().string() if field.dtype is None else arrow().from_numpy_dtype(field.dtype)
    return arrow().list_(number, field.shape[0]) if field.shape else number


def _arrow_array(values: Any, kind: Any) -> Any:
    if isinstance(values, list) or values.ndim == 1:
        return arrow().array(values if isinstance(values, list) else values.copy(), kind)
    return arrow().FixedSizeListArray.from_arrays(arrow().array(values.flatten()), type=kind)


class ArrayPart:
    """An HDF5 file with a dataset for each field, of this many rows. Methods as of `TablePart`."""

    suffix = ".h5"

    def __init__(self, path: str, fields: Mapping[str, Field], rows: int) -> None:
        self._fields, self._file, self._written = fields, h5py.File(path, "w"), 0
        for name, (dtype, shape) in fields.items():
            kind, packed = h5py.string_dtype() if dtype is None else dtype, dict[str, Any]()
            if kind.kind in "biu" and math.prod(shape) * kind.itemsize >= COMPRESSED_BYTES:
                packed = {"chunks": (1, *shape), "compression": 1, "shuffle": True}
            self._file.create_dataset(name, (rows, *shape), kind, **packed)

    def write(self, columns: Mapping[str, Values]) -> None:
        first, self._written = self._written, self._written + len(columns["sample"])
        for name, dataset in self._file.items():
            values = columns[name]
            if isinstance(values, list):  # HDF5 has no text that is missing
                values = np.array(["" if each is None else each for each in values], object)
            dataset[first : self._written] = values

    def close(self) -> None:
        self._file.close()

    def merge(self, paths: Sequence[str], target: str, total: int) -> None:
        ranks, merged, step = len(paths), ArrayPart(target, self._fields, total), _piece_rows(self._fields, len(paths))
        for first in range(0, -(-total // ranks), step):
            for rank, path in enumerate(paths):
                with h5py.File(path) as part:
                    for name, dataset in part.items():
                        _copy(dataset, merged._file[name], range(len(dataset))[first : first + step], rank, ranks)
        merged.close()


def _copy(source: Any, target: Any, rows: range, rank: int, ranks: int) -> None:
    if source.chunks is None:
        target[rank + ranks * rows.start : rank + ranks * rows.stop : ranks] = source[rows.start : rows.stop]
        return
    for row in rows:  # compressed chunks are copied as they are
        rest = (0,) * (source.ndim - 1)
        write_chunk(target, (rank + ranks * row, *rest), *read_chunk(source, (row, *rest)))
