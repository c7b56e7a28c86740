"""Groups that stand for one dataset: sparse rows, rows of variable length, categories.

Sparse rows and categories as AnnData writes them (anndata's on-disk format specification 0.1.0 to 0.2.0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.storage.external_files import ExternalFiles

#: Looks at a dataset by its name.
InspectDataset = Callable[[str], StoredDataset]
# The datasets of each kind of group.
SPARSE = ("data", "indices", "indptr")
VARIABLE = ("values", "offsets")


@dataclasses.dataclass(frozen=True, eq=False)
class StoredRanges:
    """A field whose samples take different numbers of stored elements, which lie one sample after the other.

    Attributes:
        path: The file.
        name: The group in it.
        offsets: The first element of each sample, and the end of the last; int64, shape (rows + 1,).
        values: The elements.
        columns: Where in a sample each element goes, for sparse rows; None where they follow each other.
        spec: The field as it is delivered: with zeros where there is no element.
    """

    path: str
    name: str
    offsets: Indices
    values: StoredDataset
    columns: StoredDataset | None
    spec: FieldSpec

    @property
    def rows(self) -> int:
        """Samples in it."""
        return len(self.offsets) - 1

    @property
    def external(self) -> ExternalFiles:
        """Other files that values lie in."""
        return self.values.external + (() if self.columns is None else self.columns.external)

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


def encoding(group: h5py.Group) -> str:
    """What a group stands for: ``csr``, ``csc``, ``variable``, ``categorical``, or nothing: an empty text."""
    said = group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", ""))
    said = str(said.decode() if isinstance(said, bytes) else said).removesuffix("_matrix")
    if said in ("csr", "csc", "categorical"):
        return said
    return "variable" if all(name in group for name in VARIABLE) else ""


def inspect_sparse(group: h5py.Group, path: str, name: str, inspect_dataset: InspectDataset) -> StoredRanges:
    """Look at a sparse matrix, stored row by row, whose rows are delivered dense.

    Args:
        group: With ``data``, ``indices`` and ``indptr``.
        path: Its file.
        name: Its name.
        inspect_dataset: Describes a dataset of that file.

    Raises:
        FormatError: It is not one; says what is wrong.
    """
    context: dict[str, Any] = {"file": path, "dataset": name}
    where = f"{path}:/{name.strip('/')}"
    shape = [int(n) for n in np.asarray(group.attrs.get("shape", group.attrs.get("h5sparse_shape", ()))).ravel()]
    if len(shape) != 2 or min(shape) < 1:
        raise FormatError(f"{where} is a sparse matrix of the shape {tuple(shape)}, which holds no samples", **context)
    values, columns = (inspect_dataset(f"{name.rstrip('/')}/{part}") for part in SPARSE[:2])
    inspect_dataset(f"{name.rstrip('/')}/{SPARSE[2]}")  # that it may be read
    offsets = _offsets(group, SPARSE[2], shape[0], values.rows, context)
    if len(values.shape) != 1 or columns.shape != values.shape or columns.dtype.kind not in "iu":
        raise FormatError(
            f"{where} has data of shape {values.shape} and indices of shape {columns.shape}, {columns.dtype}: a sparse "
            "matrix has one whole-number index for each value",
            **context,
        )
    return StoredRanges(path, name, offsets, values, columns, FieldSpec((shape[1],), values.dtype.newbyteorder("=")))


def inspect_variable(
    group: h5py.Group, path: str, name: str, inspect_dataset: InspectDataset, *, most: int | None
) -> StoredRanges:
    """Look at samples of variable length, which are delivered padded.

    Args:
        group: With ``values`` and ``offsets``.
        path: Its file.
        name: Its name.
        inspect_dataset: Describes a dataset of that file.
        most: Rows that each is padded to; None for those of the longest.

    Raises:
        FormatError: One is longer than that, or the group is not what it seems.
    """
    context: dict[str, Any] = {"file": path, "dataset": name}
    where = f"{path}:/{name.strip('/')}"
    values = inspect_dataset(f"{name.rstrip('/')}/values")
    inspect_dataset(f"{name.rstrip('/')}/offsets")  # that it may be read
    offsets = _offsets(group, "offsets", None, values.rows, context)
    lengths = np.diff(offsets)
    longest = int(lengths.argmax())
    if most is not None and lengths[longest] > most:
        row = int((lengths > most).argmax())
        raise FormatError(
            f"{where}, row {row}: {lengths[row]} values, more than max_length {most}; the longest has "
            f"{lengths[longest]}",
            row=row,
            **context,
        )
    width = int(lengths[longest]) if most is None else most
    spec = FieldSpec((max(width, 1), *values.spec.stored_shape), values.dtype.newbyteorder("="))
    return StoredRanges(path, name, offsets, values, None, spec)


def names_of(categories: h5py.Dataset) -> tuple[str, ...]:
    """The names of classes, from the categories that codes stand for."""
    text = h5py.check_string_dtype(categories.dtype) is not None
    names = np.asarray(categories.asstr()[...] if text else categories[...])
    return tuple(str(each) for each in names.tolist())


def _offsets(group: h5py.Group, name: str, rows: int | None, elements: int, context: dict[str, Any]) -> Indices:
    """Where samples begin and end, checked: nothing else would notice if it were wrong."""
    where = f"{context['file']}:/{context['dataset'].strip('/')}"
    dataset = group.get(name)
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1 or dataset.dtype.kind not in "iu":
        raise FormatError(f"{where} has no {name} of one axis of whole numbers", **context)
    if dataset.shape[0] < 2 or (rows is not None and dataset.shape[0] != rows + 1):
        wanted = f"one more than its {rows} rows" if rows is not None else "one more than there are samples"
        raise FormatError(f"{where}/{name} has {dataset.shape[0]} values; it must have {wanted}", **context)
    offsets: Indices = dataset[...].astype(np.int64)
    falling = np.diff(offsets) < 0
    if falling.any() or offsets[0] != 0 or offsets[-1] != elements:
        row = int(falling.argmax()) if falling.any() else 0 if offsets[0] else len(offsets) - 2
        raise CorruptError(
            f"{where}/{name}, row {row}: {offsets[row]} to {offsets[row + 1]} of {elements} elements; it must begin "
            f"with 0, never fall and end with {elements}",
            row=row,
            **context,
        )
    return offsets
