"""Parquet files: only the wanted columns are read, and only the rows that meet the filters are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.table.arrow import arrow
from lit_async_data.sources.manifest.table.filters import Filter, all_met
from lit_async_data.sources.manifest.table.header import check_columns
from lit_async_data.sources.manifest.table.row_origin import RowOrigin, named, shown


def read_parquet(path: str, wanted: Sequence[str], filters: Sequence[Filter]) -> tuple[Any, int, Indices | None]:
    """Read columns of a Parquet file.

    Args:
        path: Of the file.
        wanted: Names of columns.
        filters: That rows must meet. They are asked row group by row group, so that no more is held than is kept.

    Returns:
        A ``pyarrow.Table``; how many rows the file has; and which of them the table has, None if all.

    Raises:
        ManifestError: It is no Parquet file, or a column is missing.
        CorruptError: A page does not decode, or its checksum is wrong.
    """
    library, parquet = arrow(), arrow("parquet")
    origin = RowOrigin([path], np.zeros(2, np.int64))
    try:
        file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (library.ArrowException, OSError) as error:
        raise origin.error(f"is no Parquet file that can be read: {shown(str(error))}") from error
    with file:
        check_columns(file.schema_arrow.names, [*wanted, *(each.column for each in filters)], origin)
        try:
            if not filters:
                return _whole(file, list(wanted)), file.metadata.num_rows, None
            return _filtered(file, wanted, filters, path)
        except (library.ArrowException, OSError) as error:
            raise CorruptError(f"{named(path)}: does not decode: {shown(str(error))}", file=path) from error


def _whole(file: Any, wanted: list[str]) -> Any:
    try:
        return file.read(columns=wanted)
    except arrow().ArrowNotImplementedError:  # lists of categories, which it can read from one group of rows only
        groups = [file.read_row_group(group, columns=wanted) for group in range(file.num_row_groups)]
        return arrow().concat_tables(groups)


def _filtered(
    file: Any, wanted: Sequence[str], filters: Sequence[Filter], path: str
) -> tuple[Any, int, Indices | None]:
    asked = list(dict.fromkeys(each.column for each in filters))
    tables, kept, start = [], [], 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        origin = RowOrigin([path], np.array([0, start + rows]), np.arange(start, start + rows))
        met = all_met(filters, file.read_row_group(group, columns=asked), origin)
        if met.any():
            tables.append(file.read_row_group(group, columns=list(wanted)).filter(arrow().array(met)))
            kept.append(np.flatnonzero(met) + start)
        start += rows
    if not tables:
        return file.schema_arrow.empty_table().select(list(wanted)), start, np.empty(0, np.int64)
    return arrow().concat_tables(tables), start, np.concatenate(kept)
