"""`StoredSequences`: samples of variable length, in the global heap of a file, or each a dataset in a group."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.batch.spec import TENSOR_TYPES, Bytes, FieldSpec
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.index.columns import IndexKey
from lit_async_data.sources.hdf5.schema.encoded import padded_spec
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS
from lit_async_data.sources.hdf5.storage.global_heap import GlobalHeap

if TYPE_CHECKING:
    import h5py

TEXT = np.dtype(np.uint8)  # text is delivered as its bytes


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSequences:
    """Sequences of one axis, each in the global heap; or datasets of groups, whose first axes differ."""

    # The references to sequences; or the datasets as one, as long as the longest, whose index has the chunks of all.
    rows: StoredDataset
    heap: GlobalHeap | None  # none for datasets of groups
    # As `GlobalHeap.references` gives them; of a dataset, its bytes, the first of its chunks, and their end; int64,
    # shape (rows, 3).
    references: Indices
    dtype: np.dtype[Any]  # of the elements, as stored
    spec: FieldSpec  # the field, padded
    chunks: npt.NDArray[Any] | None = None  # the shape of the chunks of each dataset; shape (rows, axes)
    # Rows whose reference leads out of the file; with the length of another row, so batches by length mix both.
    lost: Indices = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    @functools.cached_property
    def lengths(self) -> Indices:
        return np.asarray(self.references[:, 0] // (self.dtype.itemsize * math.prod(self.spec.shape[1:])))


def element_type(dataset: h5py.Dataset, field: Field) -> np.dtype[Any] | None:
    """The type of the elements of sequences; None if a dataset holds none. Text is one if its bytes are asked for."""
    import h5py

    try:
        dtype = dataset.dtype
    except LIBRARY_ERRORS:  # a type that numpy lacks, which `inspect_dataset` names
        return None
    if dtype.kind == "O" and h5py.check_string_dtype(dtype) is not None:
        return TEXT if field.dtype == TEXT and not (field.classes or field.kind) else None
    within = h5py.check_vlen_dtype(dtype)
    return within if within is not None and (within.kind, within.itemsize) in TENSOR_TYPES else None


def inspect_sequences(group: OpenGroup, name: str, dtype: np.dtype[Any], most: int | None) -> StoredSequences:
    """Inspect sequences, and read where each lies; they are padded to ``most`` elements, or to the longest."""
    stored = group.inspect_dataset(name, in_heap=True)
    dataset: Any = group.file[name]
    context: dict[str, Any] = {"file": group.path, "dataset": name}
    if stored.offset is None and stored.index is None:
        why = stored.slow if stored.external or dataset.chunks else "none was ever written"
        raise FormatError(
            f"holds values of variable length that cannot be read, since {why}; write them into another file, or as a "
            "group of values and offsets",
            place=str(stored),
            **context,
        )
    stored = dataclasses.replace(stored, chunk_rows=1, filtered=False)  # references are small
    heap = GlobalHeap.of(dataset.file)
    references = _references(group, stored, dataset, heap)
    references[:, 0] *= dtype.itemsize
    there = (references[:, 0] == 0) | ((references[:, 1] >= 0) & (references[:, :2].sum(axis=1) <= heap.end))
    lost = np.flatnonzero(~there)
    references[lost] = references[there.argmax()] * there.any()
    spec = padded_spec(references[:, 0] // dtype.itemsize, most, FieldSpec((), dtype.newbyteorder("=")), stored)
    return StoredSequences(stored, heap, references, dtype, spec, lost=lost)


def _references(group: OpenGroup, stored: StoredDataset, dataset: h5py.Dataset, heap: GlobalHeap) -> Indices:
    """The references of a dataset, as of `GlobalHeap`; those in many chunks are kept for the next opening."""
    key = dataclasses.replace(IndexKey.of(dataset), name=f"{dataset.name} references")
    found = group.cache.load(key) if key.chunk else None
    if found is None:
        found = {"references": heap.references(_stored_references(stored, dataset.file.id.get_vfd_handle())).ravel()}
        if key.chunk:
            group.cache.store(key, found)
    return found["references"].reshape(-1, 3)


def _stored_references(stored: StoredDataset, file: int) -> Bytes:
    """The references of a dataset as bytes, shape (rows, bytes), read without libhdf5, which would follow them."""
    index = stored.index
    if stored.offset is not None:
        data = system.pread(file, stored.nbytes, stored.offset)
        return np.frombuffer(data, np.uint8).reshape(stored.shape)
    assert index is not None
    chunks = np.zeros((len(index.offsets), math.prod(index.shape)), np.uint8)
    for number in np.flatnonzero(index.offsets >= 0).tolist():
        data = system.pread(file, int(index.sizes[number]), int(index.offsets[number]))
        try:
            decoded = index.filters.decode(np.frombuffer(data, np.uint8), int(index.masks[number]))
        except CorruptError as error:
            row = number * index.shape[0]
            raise CorruptError(
                f"{stored}, row {row}: {error}; restore the file", file=stored.path, dataset=stored.name, row=row
            ) from error
        chunks[number] = decoded.view(np.uint8).ravel()
    return chunks.reshape(-1, stored.shape[1])[: stored.rows]
