"""Groups that stand for one dataset: sparse matrices, samples of variable length, columns with categories or a mask.

AnnData's on-disk format 0.1.0 to 0.2.0 defines all but those of variable length.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.index.index import check_unindexed
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.storage.external_files import ExternalFiles
from lit_async_data.sources.hdf5.storage.failures import NoSamplesError
from lit_async_data.sources.hdf5.storage.plugins import check_filters

if TYPE_CHECKING:
    import h5py

#: Inspects a dataset by name.
InspectDataset = Callable[[str], StoredDataset]
# The datasets of each kind of group.
SPARSE = ("data", "indices", "indptr")
VARIABLE = ("values", "offsets")


@dataclasses.dataclass(frozen=True, eq=False)
class StoredRanges:
    """A field whose samples are ranges of stored elements, in the order of the samples."""

    path: str
    name: str
    offsets: Indices  # the first element of each sample, and the end of the last, as stored; int64, shape (rows + 1,)
    lost: Indices  # the samples of which an offset is wrong; another stands for them
    values: StoredDataset
    columns: StoredDataset | None  # the column of each element of a sparse matrix; None for samples of variable length
    spec: FieldSpec  # the field as delivered, padded or filled with zeros

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Indices:
        return self.places(np.arange(self.rows))[1]

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        """The first element of each row, and its number of elements."""
        if len(self.lost):
            good = (np.append(self.lost, -1) != np.arange(len(self.lost) + 1)).argmax()
            rows = np.where(np.isin(rows, self.lost), good, rows)
        begins = self.offsets[rows]
        return begins, self.offsets[rows + 1] - begins

    def lack(self, row: int) -> CorruptError:
        name = VARIABLE[1] if self.columns is None else SPARSE[2]
        context = {"file": self.path, "dataset": self.name, "place": f"{self}/{name}"}
        return _wrong(self.offsets, row, self.values.rows, context)

    @property
    def external(self) -> ExternalFiles:
        """Other files that hold values."""
        return self.values.external + (() if self.columns is None else self.columns.external)

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


def encoding(group: h5py.Group) -> str:
    """The kind of a group: ``csr``, ``csc``, ``variable``, ``categorical``, ``nullable``; empty if it is no dataset."""
    kind = group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", ""))
    kind = str(kind.decode() if isinstance(kind, bytes) else kind).removesuffix("_matrix")
    if kind in ("csr", "csc", "categorical"):
        return kind
    if kind in ("nullable-integer", "nullable-boolean", "nullable-string-array"):
        return "nullable"
    return "variable" if all(group.get(name, getlink=True) for name in VARIABLE) else ""  # follows no link


def inspect_sparse(group: h5py.Group, path: str, name: str, inspect_dataset: InspectDataset) -> StoredRanges:
    """Inspect a sparse matrix stored by rows (``data``, ``indices``, ``indptr``), which are delivered dense."""
    context: dict[str, Any] = {"file": path, "dataset": name, "place": f"{path}:/{name.strip('/')}"}
    shape = [int(n) for n in np.asarray(group.attrs.get("shape", group.attrs.get("h5sparse_shape", ()))).ravel()]
    if len(shape) != 2 or min(shape) < 1:
        kind = NoSamplesError if shape[:1] == [0] else FormatError
        raise kind(f"is a sparse matrix of shape {tuple(shape)}, which holds no samples; leave it out", **context)
    with _some_values(shape[0], context):
        values, columns = (inspect_dataset(f"{name.rstrip('/')}/{part}") for part in SPARSE[:2])
    inspect_dataset(f"{name.rstrip('/')}/{SPARSE[2]}")  # checks that it can be read
    places = _offsets(group, SPARSE[2], shape[0], values.rows, context)
    if len(values.shape) != 1 or columns.shape != values.shape or columns.dtype.kind not in "iu":
        raise FormatError(
            f"has data of shape {values.shape} and indices of shape {columns.shape}, {columns.dtype}; a "
            "sparse matrix must have one integer index for each value",
            **context,
        )
    return StoredRanges(path, name, *places, values, columns, FieldSpec((shape[1],), values.dtype.newbyteorder("=")))


def inspect_variable(
    group: h5py.Group, path: str, name: str, inspect_dataset: InspectDataset, *, most: int | None
) -> StoredRanges:
    """Inspect samples of variable length, which are delivered padded to ``most`` rows, or to the longest."""
    context: dict[str, Any] = {"file": path, "dataset": name, "place": f"{path}:/{name.strip('/')}"}
    ends = inspect_dataset(f"{name.rstrip('/')}/offsets")
    with _some_values(ends.rows - 1, context):
        values = inspect_dataset(f"{name.rstrip('/')}/values")
    places = _offsets(group, "offsets", None, values.rows, context)
    row = FieldSpec(values.spec.stored_shape, values.dtype.newbyteorder("="))
    found = StoredRanges(path, name, *places, values, None, row)
    return dataclasses.replace(found, spec=padded_spec(found.lengths, most, row, found))


def padded_spec(lengths: Indices, most: int | None, row: FieldSpec, stored: StoredDataset | StoredRanges) -> FieldSpec:
    """The field of samples of these lengths, padded to ``most`` rows, or to the longest."""
    longest = int(lengths.argmax())
    if most is not None and lengths[longest] > most:
        place = int((lengths > most).argmax())
        where = f"{stored}, row {place}" if isinstance(stored, StoredRanges) else stored.at(place)
        raise FormatError(
            f"{where}: has {lengths[place]} values, more than max_length {most}; the longest has {lengths[longest]}: "
            "raise max_length to that",
            file=stored.path,
            dataset=stored.name,
            row=place,
        )
    width = int(lengths[longest]) if most is None else most
    return FieldSpec((max(width, 1), *row.shape), row.dtype, ragged=most is None)


@contextlib.contextmanager
def _some_values(rows: int, context: dict[str, Any]) -> Iterator[None]:
    """Raise another error where the values are empty, but there are samples: these could be zeros, or of length 0."""
    try:
        yield
    except NoSamplesError as error:
        if rows <= 0:
            raise
        raise FormatError(f"has {rows} rows without a single value; leave it out", **context) from error


def _offsets(
    group: h5py.Group, name: str, rows: int | None, elements: int, context: dict[str, Any]
) -> tuple[Indices, Indices]:
    """The begin and end of each sample, checked, since nothing else would notice wrong ones; and the lost samples."""
    import h5py

    own = dict(context, dataset=f"{context['dataset'].rstrip('/')}/{name}", place=f"{context['place']}/{name}")
    dataset = group.get(name)
    if not isinstance(dataset, h5py.Dataset) or dataset.ndim != 1 or dataset.dtype.kind not in "iu":
        raise FormatError(f"has no {name} of one axis of integers; add them", **context)
    if dataset.shape[0] < 2 or (rows is not None and dataset.shape[0] != rows + 1):
        needed = f"one more than its {rows} rows" if rows is not None else "one more than there are samples"
        raise FormatError(f"has {dataset.shape[0]} values; it must have {needed}", **own)
    check_filters(dataset, context["file"], f"{context['dataset']}/{name}")
    check_unindexed(dataset)
    offsets: Indices = dataset[...].astype(np.int64)
    falling = offsets[1:] < offsets[:-1]
    if not falling.any() and offsets[0] == 0 and offsets[-1] == elements:
        return offsets, np.empty(0, np.int64)
    good = np.zeros(len(falling), bool)
    if not offsets[0]:
        right = _right(offsets, elements)
        good = right[:-1] & right[1:]
    # What begins elsewhere, ends too early, or is beyond the end for the most part was counted otherwise, as in bytes.
    beyond = offsets[-1] > elements and 2 * good.sum() < len(good)
    if beyond or (offsets[-1] < elements and not falling.any()) or not good.any():
        row = int(falling.argmax()) if falling.any() else 0 if offsets[0] else len(offsets) - 2
        raise _wrong(offsets, row, elements, own)
    return offsets, np.flatnonzero(~good)


def _wrong(offsets: Indices, row: int, elements: int, context: dict[str, Any]) -> CorruptError:
    what = f"{offsets[row]} to {offsets[row + 1]} of {elements} elements"
    rule = f"it must begin with 0, never fall and end with {elements}"
    return CorruptError(f"{what}; {rule}", row=row, **dict(context, place=f"{context['place']}, row {row}"))


def _right(offsets: Indices, elements: int) -> npt.NDArray[np.bool_]:
    """Which offsets are surely right: those in every longest sequence of them that does not fall."""
    right = (offsets >= 0) & (offsets <= elements)
    right[-1] = offsets[-1] == elements
    places = np.flatnonzero(right)
    first = np.append(True, np.diff(offsets[places]) != 0)  # repeats count once: zeros that were never overwritten
    values = offsets[places[first]]
    before, after = _lengths(values), _lengths(-values[::-1])[::-1]
    longest = before + after == before.max() + 1
    right[places] = (longest & (np.bincount(before[longest])[before] == 1))[np.cumsum(first) - 1]
    return right


def _lengths(values: Indices) -> Indices:
    """The most values that end with each, one after the other, and do not fall."""
    ends, found = list[int](), list[int]()
    for value in values.tolist():
        found.append(bisect.bisect_right(ends, value))
        ends[found[-1] : found[-1] + 1] = [value]
    return np.array(found) + 1
