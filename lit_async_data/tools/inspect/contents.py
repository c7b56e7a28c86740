"""What an HDF5 file holds: groups and datasets as stored, how each is read, and why not faster."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.hdf5.readers.choice import Choice, choice
from lit_async_data.sources.hdf5.schema.encoded import VARIABLE, StoredRanges, encoding
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.schema.stored_field import inspect_field
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, as_source_errors
from lit_async_data.sources.manifest.images.formats import FORMATS

if TYPE_CHECKING:
    import h5py

MOST_OBJECTS = 20_000  # of one file; others are left out
MOST_CHUNKS = 100_000  # whose storage is added up: libhdf5 visits each
# Groups that hold no data of the user.
_OWN_GROUPS = ("#refs#", "#subsystem#", "_i_")
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "n-bit", 6: "scale-offset", 32000: "lzf"}
_WORDS = {"csr": "sparse rows", "csc": "sparse columns", "categorical": "categories", "variable": "variable length"}
_HEAD = 16  # bytes; enough to tell any image format
# By choice of the source: how it is told in `StorageLayout`, and in words.
_WAYS: dict[Choice, tuple[str, str]] = {
    "raw": ("copied", "copied as stored"),
    "strided": ("copied", "copied, gathered from all over the dataset"),
    "chunks": ("decoded", "decoded in reader threads"),
    "h5py chunks": ("locked", "decoded by h5py, one chunk at a time"),
    "h5py rows": ("locked", "read by h5py, one thread at a time"),
}


@dataclasses.dataclass
class Dataset:
    """A dataset, or a group that stands for one. The page on the JSON says what the attributes up to `why` are.

    Attributes:
        dtype: As numpy has it; None if it has none.
        encoded: The kind of group, as of `encoding`; empty for a dataset.
        images: The format of the encoded images that it holds, such as JPEG.
        axes: Names of its axes, as NetCDF gives them.
        scale: Whether it holds the coordinates of an axis of other datasets.
        packed: Whether NetCDF's attributes of packed values are there.
    """

    name: str
    type: str = ""
    shape: tuple[int, ...] = ()
    groups: int = 1
    rows: tuple[int, int] | None = None
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    bytes: int = 0
    stored_bytes: int | None = None
    reading: str | None = None
    how: str = "not read"
    why: str = ""
    dtype: np.dtype[Any] = dataclasses.field(default_factory=lambda: np.dtype(object))
    encoded: str = ""
    images: str = ""
    axes: tuple[str, ...] = ()
    scale: bool = False
    packed: bool = False


#: What the report tells of a dataset.
SHOWN = [field.name for field in dataclasses.fields(Dataset)][:12]


@dataclasses.dataclass
class Tree:
    """A group, its datasets, and its groups; and what wrote it, if an attribute says so."""

    name: str
    writer: str | None = None
    pandas: bool = False
    nodes: list[Dataset] = dataclasses.field(default_factory=list)
    groups: list[Tree] = dataclasses.field(default_factory=list)

    def all_groups(self) -> Iterator[Tree]:
        """This group and all groups in it."""
        yield self
        for group in self.groups:
            yield from group.all_groups()

    def all_nodes(self) -> list[Dataset]:
        """The datasets of this group and of all groups in it."""
        return [node for group in self.all_groups() for node in group.nodes]

    def structure(self) -> str:
        """What groups of equal structure have in common: names, types, and shapes without the first axis."""
        return str(sorted((n.name[len(self.name) :], n.type, len(n.shape), n.shape[1:]) for n in self.all_nodes()))


def tree_of(file: h5py.File) -> Tree:
    """The groups and datasets of an open file."""
    import h5py

    left, seen = MOST_OBJECTS, set[object]()

    def identity(group: h5py.Group) -> object:
        info = h5py.h5g.get_objinfo(group.id)  # groups of other files come through external links
        return info.fileno, info.objno

    def walk(group: h5py.Group, path: str) -> Tree:
        nonlocal left
        tree, kind = Tree(path, _writer(group), "pandas_type" in group.attrs), encoding(group)
        seen.add(identity(group))
        if kind:
            tree.nodes.append(_group(group, path or ".", kind))
        names: list[Any] = []
        try:
            names = [name for name in group if name not in VARIABLE] if kind in ("", "variable") else []
        except LIBRARY_ERRORS:
            tree.nodes.append(Dataset(path or "/"))
        if len(names) > left:
            why = f"only the first {MOST_OBJECTS:,} objects of the file are shown"
            tree.nodes.append(Dataset(f"{path}/…".lstrip("/"), why=why))
        for each in names[:left]:
            left -= 1
            name = f"{path}/{_text(each)}" if path else _text(each)
            try:
                node: Any = group[each]
            except LIBRARY_ERRORS:  # the source says why
                tree.nodes.append(Dataset(name))
                continue
            if isinstance(node, h5py.Dataset):
                tree.nodes.append(_dataset(node, name))
            elif isinstance(node, h5py.Group) and identity(node) not in seen and not each.startswith(_OWN_GROUPS):
                below = walk(node, name)
                if [n.name for n in below.nodes] == [name] and not below.groups:  # it stands for a dataset
                    tree.nodes += below.nodes
                else:
                    tree.groups.append(below)
        return tree

    return walk(cast("h5py.Group", file["/"]), "")


def _writer(group: h5py.Group) -> str | None:
    return {"anndata": "AnnData"}.get(str(group.attrs.get("encoding-type"))) or (
        "PyTables" if "PYTABLES_FORMAT_VERSION" in group.attrs else None
    )


def _text(name: str | bytes) -> str:
    """A name that can be printed. h5py returns names that are not UTF-8 as bytes, or with surrogates."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "backslashreplace")


def _dataset(dataset: h5py.Dataset, name: str) -> Dataset:
    try:
        dtype = dataset.dtype
    except LIBRARY_ERRORS:
        return Dataset(name, "a type that numpy lacks")
    shape, chunks = tuple(map(int, dataset.shape or ())), dataset.chunks
    count = math.prod(-(-n // c) for n, c in zip(shape, chunks or (), strict=False))
    return Dataset(
        name,
        _type_name(dtype),
        shape,
        rows=(shape[0], shape[0]) if shape else None,
        chunks=chunks,
        filters=_filters_of(dataset),
        bytes=math.prod(shape) * dtype.itemsize if dataset.shape is not None else 0,
        stored_bytes=int(dataset.id.get_storage_size()) if count <= MOST_CHUNKS else None,
        dtype=dtype,
        images=_image_format(dataset, shape),
        axes=_axes(dataset),
        scale=dataset.attrs.get("CLASS") == b"DIMENSION_SCALE",
        packed=any(each in dataset.attrs for each in ("scale_factor", "add_offset", "_FillValue")),
    )


def _group(group: h5py.Group, name: str, kind: str) -> Dataset:
    """A group that stands for one dataset."""
    try:
        values: Any = group[{"categorical": "codes", "variable": "values"}.get(kind, "data")]
        made, sides = _dataset(values, name), group.attrs.get("shape", group.attrs.get("h5sparse_shape", ()))
        shape: tuple[int, ...] = tuple(map(int, sides)) if kind in ("csr", "csc") else values.shape
        if kind == "variable":
            offsets: Any = group["offsets"]
            shape = (offsets.shape[0] - 1, *shape[1:])
    except LIBRARY_ERRORS:
        return Dataset(name, kind, encoded=kind)
    return dataclasses.replace(made, type=f"{_WORDS[kind]}, {made.type}", shape=shape, encoded=kind)


def _image_format(dataset: h5py.Dataset, shape: tuple[int, ...]) -> str:
    """The format of the image files that a dataset holds, by the first bytes of the first; empty if it holds none."""
    in_bytes = dataset.dtype == np.uint8
    if not shape or 0 in shape or len(shape) > 1 + in_bytes or not (in_bytes or dataset.dtype.kind in "SVO"):
        return ""
    data: Any = b""
    with contextlib.suppress(*LIBRARY_ERRORS):  # a filter is missing, or the file is damaged
        first: Any = dataset[:_HEAD] if in_bytes and len(shape) == 1 else dataset[0]
        data = first if isinstance(first, bytes) else first.tobytes() if hasattr(first, "tobytes") else b""
    # A BMP begins with two letters, as text may do.
    return next((each.name for each in FORMATS if each.name != "BMP" and each.magic.match(data)), "")


def _axes(dataset: h5py.Dataset) -> tuple[str, ...]:
    names = []
    with contextlib.suppress(*LIBRARY_ERRORS):
        names = [str(scale.name).rpartition("/")[2] for axis in dataset.dims for scale in axis.values()[:1]]
    return tuple(names) if len(names) == len(dataset.shape or ()) else ()


def _type_name(dtype: np.dtype[Any]) -> str:
    import h5py

    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        return "text"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    if (within := h5py.check_vlen_dtype(dtype)) is not None:
        return f"variable length, {within}"
    if dtype.names is not None:
        return f"compound: {', '.join(dtype.names)}"
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else ", big-endian")


def _filters_of(dataset: h5py.Dataset) -> tuple[str, ...]:
    """The names of the filters of a dataset, with the level of gzip."""
    properties, found = dataset.id.get_create_plist(), []
    for place in range(properties.get_nfilters()):
        number, _, values, name = properties.get_filter(place)
        known = _FILTERS.get(number) or name.decode(errors="replace").partition(";")[0] or f"filter {number}"
        found.append(f"{known} {values[0]}" if number == 1 and values else known)
    return tuple(found)


# -- how it is read ---------------------------------------------------------------------------------------------------


def describe(group: OpenGroup, node: Dataset, layout: str | None = None) -> None:
    """Say how a field of a dataset is read, and why not faster, or not at all."""
    if node.why and not node.reading:
        return
    where = f"{group.path}:/{node.name}"
    try:
        with as_source_errors(where, "cannot be read", file=group.path, dataset=node.name):
            field = inspect_field(group, "x", Field(node.name), layout)["x"]
    except AsyncDataError as error:
        text = str(error).removeprefix(f"{where}: ").removeprefix(f"{group.path}: ")
        node.why = _encoded_images(node) or text.replace(f"{group.path}:/", "")
        return
    stored, ranges = field.values, isinstance(field.stored, StoredRanges)
    way = choice(stored, mapped=True)
    node.reading, node.how = _WAYS[way]
    if ranges:
        node.how += ", made dense" if field.datasets[1:] else ", padded to one length"
    reasons = []
    if stored.slow and way != "raw":
        reasons.append(f"{stored.slow}; pack writes it once in a way that needs no lock")
    elif way == "h5py chunks":
        reasons.append("the library that decodes its filters is missing: pip install 'lit-async-data[codecs]'")
    elif way == "strided" or stored.axis:
        reasons.append(f"samples are on axis {stored.axis}; on axis 0, each would lie in one piece")
    if way == "chunks" and stored.index is not None:
        sides = enumerate(zip(stored.shape, stored.index.shape, strict=True))
        pieces = math.prod(-(-n // c) for axis, (n, c) in sides if axis != stored.axis)
        reasons += [f"each sample is spread over {pieces:,} chunks"] if pieces > 1 else []
        if stored.filtered and stored.chunk_rows > 1 and not ranges:
            shared = f"{stored.chunk_rows:,} samples share a chunk and are decoded together"
            reasons.append(f"{shared}; the chunk shuffle decodes them once per epoch")
        elif stored.filtered:
            reasons.append("compressed: each sample is decoded when it is read")
    node.why = "; ".join(reasons)


def _encoded_images(node: Dataset) -> str:
    return node.images and (
        f"holds encoded {node.images} images: store their bytes as a group of values and offsets, and decode them in a "
        "sample_transform, or write a Source of your own (docs/data/sources.md)"
    )
