"""`StoredImages`: how the rows of a field that are encoded images are stored, and decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import FormatError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import first_good
from lit_async_data.sources.hdf5.index.index import ChunkIndex
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges, encoding, inspect_variable
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.external_files import refuse_external_link
from lit_async_data.sources.hdf5.storage.failures import NoSamplesError, as_source_errors
from lit_async_data.sources.hdf5.storage.global_heap import GlobalHeap
from lit_async_data.sources.images.image import ImageDecoder
from lit_async_data.sources.local_files.patterns import natural

NO_IMAGE = "does not hold one image in this file, as uint8 on one axis or as one value of bytes"


@dataclasses.dataclass(frozen=True, eq=False)
class StoredImages:
    """Rows that are encoded images."""

    # The bytes of images, or references to these. If images are the datasets of a group, each is a chunk; its offset is
    # −1 if h5py must read it.
    rows: StoredDataset
    decoder: ImageDecoder
    swapped: bool  # whether red and blue change places
    # Bytes of each image; int64, shape (rows,). None: a row ends with its image, or with zeros behind it.
    lengths: Indices | None
    names: tuple[str, ...]  # the datasets in a group; empty for a dataset
    heap: GlobalHeap | None  # what references lead to; None if rows hold the bytes, or h5py must read them
    alone: bool  # whether images are read one by one, and not their rows together
    # Where the bytes are, if images lie one after the other.
    ranges: StoredRanges | None = None


def inspect_images(group: OpenGroup, field: Field, where: str) -> StoredImages:
    """Inspect the rows of a field, and the first image if it gives the size of all."""
    import h5py

    name, names, heap, ranges, known = group.name(field.dataset), tuple[str, ...](), None, None, None
    node: Any = group.node(name)
    begins = np.empty(0, np.int64)
    if isinstance(node, h5py.Group) and encoding(node) == "variable":
        ranges = inspect_variable(group, name, most=None)
        begins, known = ranges.places(np.arange(ranges.rows))
        values, sizes = ranges.values, known.astype(np.uint32)
        if values.dtype != np.uint8 or len(values.shape) > 1:
            what = f"holds {values.dtype} {values.shape}, not the bytes of images as uint8 on one axis; write these"
            raise FormatError(f"{values}: {what}", file=group.path, dataset=values.name)
        alone, node = values.offset is not None, group.file[values.name]
        places = np.full(len(sizes), -1) if values.offset is None else values.offset + begins
        stored = datasets_as_rows(group.path, name, places, sizes, slow=values.slow, external=values.external)
    elif isinstance(node, h5py.Group):
        names = tuple(sorted(node, key=natural))
        stored, alone = _inspect_group(group, name, names), True
    else:
        stored, alone, node = group.inspect_dataset(name, images=True), False, group.file[name]
        if node.dtype.kind == "O":
            alone = stored.offset is None and stored.index is None
            heap = None if alone else GlobalHeap.of(node.file)
            stored = dataclasses.replace(stored, chunk_rows=1, filtered=False)  # references are small
    lengths = known if field.lengths is None else _lengths(group, field.lengths, stored, where)

    def bytes_of(row: int, node: Any = node) -> bytes:
        begin, size = -1, stored.shape[1]
        if stored.index is not None and (names or ranges):
            begin, size = int(stored.index.offsets[row]), int(stored.index.sizes[row])
        elif stored.offset is not None and node.dtype.kind != "O":
            begin = stored.offset + row * size
        if begin >= 0:  # as they are; h5py cuts text at a zero
            return system.pread(node.file.id.get_vfd_handle(), size, begin)
        at = row if known is None else slice(begins[row], begins[row] + known[row])
        data = np.asarray(node[names[row]][()] if names else node[at]).tobytes()
        return data.ljust(size, b"\0") if not names and node.dtype.kind == "S" else data  # numpy cuts text at zeros

    return StoredImages(
        stored, _decoder(field, stored, bytes_of), field.channels == "BGR", lengths, names, heap, alone, ranges
    )


def images_in_groups(field: Field, stored: StoredDataset, bytes_of: Callable[[int], bytes]) -> StoredImages:
    """Images that are datasets, each in a group of its own."""
    return StoredImages(stored, _decoder(field, stored, bytes_of), field.channels == "BGR", None, (), None, alone=True)


def _decoder(field: Field, stored: StoredDataset, bytes_of: Callable[[int], bytes]) -> ImageDecoder:
    """The decoder of all images. Unless the user gives their size, the first good image in 16 rows gives it."""

    def attempt(row: int) -> ImageDecoder:
        where = stored.at(row)
        try:
            with as_source_errors(where, "cannot be read", file=stored.path):
                return ImageDecoder.of(field.image, b"" if field.image.image_size else bytes_of(row), where)
        except SourceError as error:
            raise of_row(error, stored, row) from error.__cause__

    of_all = "; the first good image gives the size of all, unless image_size=(height, width) says it"
    return first_good(stored.rows, attempt, of_all)


def of_row(error: SourceError, stored: StoredDataset, row: int) -> SourceError:
    return type(error)(str(error), file=stored.path, dataset=stored.name, row=row)


def _inspect_group(group: OpenGroup, name: str, names: tuple[str, ...]) -> StoredDataset:
    node, where = group.file[name], f"{group.path}:/{name.strip('/')}"
    if not names:
        raise NoSamplesError("holds no images; leave it out", file=group.path, dataset=name, place=where)
    if node.file.filename != group.file.filename:
        what = f"is in {node.file.filename}; give that file as path"
        raise FormatError(what, file=group.path, dataset=name, place=where)
    found = {each: place_of_image(group, node.id, name, each) for each in names}
    for each in (each for each, place in found.items() if place is None):
        what = f"{where}/{each}: {NO_IMAGE}; move it to another group"
        raise FormatError(what, file=group.path, dataset=name)
    places = np.array([*found.values()], np.int64)
    return datasets_as_rows(group.path, name, places[:, 0], places[:, 1].astype(np.uint32))


def datasets_as_rows(path: str, name: str, offsets: Indices, sizes: npt.NDArray[Any], **more: Any) -> StoredDataset:
    """Datasets of bytes at places in a file as chunks of one dataset."""
    count, most = len(offsets), max(int(sizes.max()), 1)
    index = ChunkIndex((1, most), (count, 1), offsets, sizes, np.zeros_like(sizes), FilterPipeline((), most), 0)
    spec = FieldSpec((most,), np.dtype(np.uint8))
    return StoredDataset(path, name, (count, most), spec.dtype, 0, spec, index=index, **more)


def place_of_image(group: OpenGroup, within: Any, name: str, each: str) -> tuple[int, int] | None:
    """Offset and size of the image that a dataset holds, if it may; the offset is −1 if h5py must read it.

    By handles, in a tenth of the time that h5py's objects take: there may be very many.
    """
    import h5py

    low: Any = h5py
    h5d, h5f, h5l, h5o, h5t = low.h5d, low.h5f, low.h5l, low.h5o, low.h5t
    linked = within.links.get_info(each.encode()).type != h5l.TYPE_HARD
    if linked and not group.allow_external:
        refuse_external_link(group.file, f"{name}/{each}")
    dataset: Any = h5o.open(within, each.encode())
    kind: Any = dataset.get_type() if isinstance(dataset, h5d.DatasetID) else None
    stored: Any = kind and dataset.get_create_plist()
    axes = {h5t.STRING: 0, h5t.VLEN: 0, h5t.OPAQUE: 0, h5t.INTEGER: 1}.get(kind and kind.get_class())
    elsewhere = stored and (stored.get_external_count() or stored.get_layout() == h5d.VIRTUAL)
    elsewhere = elsewhere or (linked and h5f.get_name(dataset) != h5f.get_name(within))
    if kind is None or dataset.rank != axes or (axes and kind.get_size() > 1) or elsewhere:
        return None
    variable = kind.get_class() == h5t.VLEN or (kind.get_class() == h5t.STRING and kind.is_variable_str())
    plain = not variable and stored.get_layout() == h5d.CONTIGUOUS
    offset: int | None = dataset.get_offset() if plain else None
    return (-1, 0) if offset is None else (offset, int(dataset.get_storage_size()))


def _lengths(group: OpenGroup, name: str, stored: StoredDataset, where: str) -> Indices:
    dataset = group.whole(name, f"{where}.lengths: ")
    if dataset.shape != (stored.rows,) or dataset.dtype.kind not in "iu":
        has = f"{group.path}:{dataset.name} has dtype {dataset.dtype} and shape {dataset.shape}"
        what = f"not an integer for each of {stored.rows} images; leave it out, since an image knows where it ends"
        raise FormatError(f"{where}.lengths: {has}, {what}", file=group.path, dataset=name)
    return np.asarray(dataset[...], np.int64)
