"""`StoredImages`: how the rows of a field that are encoded images are stored, and decoded."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_async_data import system
from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import FormatError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.index.index import ChunkIndex, in_one_file
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, offset_of
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.failures import NoSamplesError
from lit_async_data.sources.hdf5.storage.global_heap import GlobalHeap
from lit_async_data.sources.images.decoder import ImageDecoder
from lit_async_data.sources.local_files.patterns import natural

if TYPE_CHECKING:
    import h5py


@dataclasses.dataclass(frozen=True, eq=False)
class StoredImages:
    """Rows that are encoded images.

    Attributes:
        rows: Their bytes, or references to them. If they are the datasets of a group, each is a chunk; its offset is −1
            if h5py must read it.
        swapped: Whether red and blue change places.
        lengths: Bytes of each image; int64, shape (rows,). None: a row ends with its image, or with zeros behind it.
        names: The datasets in a group; empty for a dataset.
        heap: What references lead to; None if rows hold the bytes, or h5py must read them.
        alone: Whether images are read one by one, and not their rows together.
    """

    rows: StoredDataset
    decoder: ImageDecoder
    swapped: bool
    lengths: Indices | None
    names: tuple[str, ...]
    heap: GlobalHeap | None
    alone: bool


def inspect_images(group: OpenGroup, field: Field, where: str) -> StoredImages:
    """Inspect the rows of a field, and the first image if it gives the size of all."""
    import h5py

    name, names, heap = group.name(field.name), tuple[str, ...](), None
    node: Any = group.node(name)
    if isinstance(node, h5py.Group):
        names = tuple(sorted(node, key=natural))
        stored, alone = _inspect_group(group, name, names), True
        node = node[names[0]]
        first = (int(stored.index.offsets[0]), int(stored.index.sizes[0])) if stored.index else (-1, 0)
    else:
        stored, alone = group.inspect_dataset(name, images=True), False
        node = group.file[name]
        first = -1 if stored.offset is None or node.dtype.kind == "O" else stored.offset, stored.shape[1]
        if node.dtype.kind == "O":
            slow = "the file has a user block" if node.file.userblock_size else stored.slow
            heap, alone = None if slow else heap_of(node.file), bool(slow)
            stored = dataclasses.replace(stored, chunk_rows=1, filtered=False, slow=slow)  # references are small
    lengths = None if field.lengths is None else _lengths(group, field.lengths, stored, where)
    data: Any = b""
    if field.image.image_size is None and first[0] >= 0:
        data = system.pread(node.file.id.get_vfd_handle(), first[1], first[0])
    elif field.image.image_size is None:
        data = np.asarray(node[()] if names else node[0]).tobytes()
    try:
        decoder = ImageDecoder.of(field.image, data, f"{stored}, row 0")
    except SourceError as error:
        raise of_row(error, stored, 0) from error.__cause__
    return StoredImages(stored, decoder, field.channels == "BGR", lengths, names, heap, alone)


def of_row(error: SourceError, stored: StoredDataset, row: int) -> SourceError:
    """The error of an image, with its place."""
    return type(error)(str(error), file=stored.path, dataset=stored.name, row=row)


def _inspect_group(group: OpenGroup, name: str, names: tuple[str, ...]) -> StoredDataset:
    """The datasets of a group as chunks of one dataset, of one row each."""
    if not names:
        where = f"{group.path}:/{name.strip('/')}"
        raise NoSamplesError(f"{where}: holds no images; leave it out", file=group.path, dataset=name)
    offsets, sizes = np.full(len(names), -1, np.int64), np.zeros(len(names), np.uint32)
    for number, each in enumerate(names):
        dataset = group.image(f"{name}/{each}")
        if dataset.chunks is None and dataset.dtype.kind != "O" and in_one_file(dataset):
            offsets[number], sizes[number] = offset_of(dataset) or -1, dataset.id.get_storage_size()
    most = max(int(sizes.max()), 1)
    index = ChunkIndex((1, most), (len(names), 1), offsets, sizes, np.zeros_like(sizes), FilterPipeline((), most), 0)
    spec = FieldSpec((most,), np.dtype(np.uint8))
    return StoredDataset(
        group.path, name, (len(names), most), spec.dtype, 0, spec, None, 1, filtered=False, index=index
    )


def heap_of(file: h5py.File) -> GlobalHeap:
    return GlobalHeap(file.id.get_create_plist().get_sizes()[1], os.fstat(file.id.get_vfd_handle()).st_size)


def _lengths(group: OpenGroup, name: str, stored: StoredDataset, where: str) -> Indices:
    dataset = group.whole(name, f"{where}.lengths: ")
    if dataset.shape != (stored.rows,) or dataset.dtype.kind not in "iu":
        raise FormatError(
            f"{where}.lengths: {group.path}:{dataset.name} has dtype {dataset.dtype} and shape {dataset.shape}, not an "
            f"integer for each of {stored.rows} images; leave it out, since an image knows where it ends",
            file=group.path,
            dataset=name,
        )
    return np.asarray(dataset[...], np.int64)
