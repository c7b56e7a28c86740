"""`ArrayPart`: predictions of two or more axes, written by one rank as an HDF5 file; and the merging of such files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.lightning.predictions.locations import NUMBERS
from lit_async_data.lightning.predictions.values import PredictedField
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.storage.stored_chunk import read_chunk, write_chunk

# Samples of whole numbers in this range of bytes are compressed, each as one chunk; HDF5 knows no larger chunks.
COMPRESSED_BYTES = range(4096, 2**32)
# Bytes that are merged between two looks at the clock, and numbers of samples that are read at a time.
MERGED_BYTES = 2**28
SAMPLES_READ = 2**20


class ArrayPart:
    """One rank's rows as an HDF5 file, with a dataset for each location column and each field.

    Args:
        path: The file.
        columns: Names of the location columns.
        fields: The predicted fields.
        rows: Rows that will be written.
    """

    suffix = ".h5"

    def __init__(self, path: str, columns: Sequence[str], fields: Mapping[str, PredictedField], rows: int) -> None:
        self._written = 0
        self._file = h5py.File(path, "w")
        for name in columns:
            self._file.create_dataset(name, (rows,), np.int64 if name in NUMBERS else h5py.string_dtype())
        for name, field in fields.items():
            options: dict[str, Any] = {}
            assert field.dtype is not None
            if field.dtype.kind in "biu" and field.nbytes in COMPRESSED_BYTES:
                options = {"chunks": (1, *field.shape), "compression": 1, "shuffle": field.dtype.itemsize > 1}
            self._file.create_dataset(name, (rows, *field.shape), field.dtype, **options)

    def write(self, columns: Mapping[str, Any]) -> None:
        """Add rows; they are written before this returns."""
        end = self._written + len(columns["sample"])
        for name, values in columns.items():
            dataset: Any = self._file[name]
            dataset[self._written : end] = _storable(values)
        self._written = end

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    @staticmethod
    def samples(path: str) -> Iterator[Indices]:
        """The dataset ``sample`` of a file, in pieces."""
        with h5py.File(path) as file:
            dataset: Any = file["sample"]  # Any: a type checker sees a group or a dataset
            for first in range(0, len(dataset), SAMPLES_READ):
                yield dataset[first : first + SAMPLES_READ]

    @staticmethod
    def layout(path: str) -> str:
        """Names, types and shapes of the datasets of a file."""
        with h5py.File(path) as file:
            kinds = {name: h5py.check_string_dtype(each.dtype) and "text" for name, each in file.items()}
            return ", ".join(f"{name} {kinds[name] or each.dtype} {each.shape[1:]}" for name, each in file.items())

    @staticmethod
    def merge(paths: Sequence[str], target: str) -> Iterator[None]:
        """Write the rows of the parts of all ranks in dataset order: row n of part r is row ``r + n · len(paths)``.

        Compressed chunks are copied as they are. Yields after some rows of each part.
        """
        ranks, rows = len(paths), 0
        for path in paths:
            with h5py.File(path) as part:
                samples: Any = part["sample"]
                rows += len(samples)
        with h5py.File(target, "w") as merged:
            with h5py.File(paths[0]) as part:
                sample_bytes = 0
                for name, dataset in part.items():
                    _create_alike(merged, name, dataset, rows)
                    sample_bytes += dataset.nbytes // len(dataset)
            step = max(MERGED_BYTES // (sample_bytes * ranks), 1)
            for first in range(0, -(-rows // ranks), step):
                for rank, path in enumerate(paths):
                    # Opened each time: the system may refuse to keep the files of many ranks open.
                    with h5py.File(path) as part:
                        for name, dataset in part.items():
                            _copy(dataset, merged[name], range(first, min(first + step, len(dataset))), rank, ranks)
                yield


def _storable(values: Any) -> npt.NDArray[Any]:
    """Values as h5py takes them; HDF5 has no text that is missing, so that is empty."""
    if isinstance(values, np.ndarray):
        return values
    return np.array(["" if value is None else value for value in values], object)


def _create_alike(file: Any, name: str, other: Any, rows: int) -> None:
    options = {"chunks": other.chunks, "compression": 1, "shuffle": other.shuffle} if other.chunks else {}
    file.create_dataset(name, (rows, *other.shape[1:]), other.dtype, **options)


def _copy(source: Any, target: Any, rows: range, rank: int, ranks: int) -> None:
    if source.chunks is None:
        if rows:
            target[rank + ranks * rows.start : rank + ranks * rows.stop : ranks] = source[rows.start : rows.stop]
        return
    rest = (0,) * (source.ndim - 1)
    for row in rows:
        write_chunk(target, (rank + ranks * row, *rest), *read_chunk(source, (row, *rest)))
