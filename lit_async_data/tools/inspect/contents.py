"""What an HDF5 file holds: datasets as stored, how each is read and why not faster, groups of equal structure."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import glob
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from lit_async_data.errors import AsyncDataError, FormatError
from lit_async_data.sources.hdf5.parts.stored_field import inspect_field
from lit_async_data.sources.hdf5.readers.part_reader import Choice, choice
from lit_async_data.sources.hdf5.schema.compound import members
from lit_async_data.sources.hdf5.schema.encoded import VARIABLE, StoredRanges, encoding
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import image_format
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.external_files import refuse_external_link
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, as_source_errors
from lit_async_data.tools.inspect.words import HELD_OUT, TRAINING, common_start, has_word

# Groups that hold no data of the user: of MATLAB and PyTables.
_OWN_GROUPS = ("#refs#", "#subsystem#", "_i_")
# Members of a group that are looked at.
MOST_MEMBERS = 20_000
# Datasets of a group that are looked at to tell whether each is an image.
_LOOKED_AT = 8
# By choice of the source: how it is told in `StorageLayout`, and in words.
_WAYS: dict[Choice, tuple[str, str]] = {
    "raw": ("copied", "copied as stored"),
    "strided": ("copied", "copied, gathered from all over the dataset"),
    "chunks": ("decoded", "decoded in reader threads"),
    "h5py chunks": ("locked", "decoded by h5py, one chunk at a time"),
    "h5py rows": ("locked", "read by h5py, one thread at a time"),
    "h5py groups": ("locked", "read by h5py, one group at a time"),
    "kept": ("copied", "kept in memory"),
}


@dataclasses.dataclass
class Dataset:
    """A dataset, or a group that stands for one. The page on the JSON says what the attributes up to `why` are."""

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
    encoded: str = ""  # the kind of group, as of `encoding`, or "images"; empty for a dataset of values
    images: str = ""  # the format of the image files that it holds, such as JPEG
    axis: str = ""  # the name of its first axis, as NetCDF gives it
    scale: bool = False  # whether it holds the coordinates of an axis of other datasets
    packed: bool = False  # whether NetCDF's attributes of packed values are there
    matlab: bool = False
    path: str = ""  # in the file, where `name` has the pattern of its groups
    pandas: str = ""  # the group of pandas that it is in
    size: tuple[int, ...] = ()  # (height, width) of the first image

    def __post_init__(self) -> None:
        self.path = self.path or self.name


#: What the report tells of a dataset.
SHOWN = [field.name for field in dataclasses.fields(Dataset)][:12]


def datasets_of(group: h5py.Group, seen: set[h5py.Group], path: str = "", pandas: str = "") -> Iterator[Dataset]:
    """The datasets below a group, apart from those of groups that were seen before."""
    seen.add(group)
    pandas, kind = path if "pandas_type" in group.attrs else pandas, encoding(group)
    if kind:
        yield _of_group(group, path or ".", kind)
    elif path and (images := _format_in_group(group)):
        yield Dataset(
            path, f"{images} images", (len(group),), rows=(len(group), len(group)), encoded="images", images=images
        )
        return
    members = itertools.islice(group, MOST_MEMBERS)
    names: list[Any] = [name for name in members if name not in VARIABLE] if kind in ("", "variable") else []
    groups = []
    for each in names:
        name = f"{path}/{each}" if path else each
        try:
            refuse_external_link(group.file, name)
            node: Any = group[each]
        except (FormatError, *LIBRARY_ERRORS):  # the source says why
            yield Dataset(name)
            continue
        if isinstance(node, h5py.Dataset):
            yield dataclasses.replace(_of_dataset(node, name), pandas=pandas)
        elif isinstance(node, h5py.Group) and node not in seen and not each.startswith(_OWN_GROUPS):
            groups.append((node, name))
    for node, name in groups:
        yield from datasets_of(node, seen, name, pandas)


def _of_dataset(dataset: h5py.Dataset, name: str) -> Dataset:
    try:
        dtype = dataset.dtype
    except LIBRARY_ERRORS:
        return Dataset(name, "a type that numpy lacks")
    shape = tuple(map(int, dataset.shape or ()))
    images = image_format(dataset)
    return Dataset(
        name,
        f"{images} images" if images else _type_name(dtype),
        shape,
        rows=(shape[0], shape[0]) if shape else None,
        chunks=dataset.chunks,
        filters=_filters_of(dataset),
        bytes=math.prod(shape) * dtype.itemsize if dataset.shape is not None else 0,
        stored_bytes=int(dataset.id.get_storage_size()),
        dtype=dtype,
        encoded="images" if images else "",
        images=images,
        axis=next((str(scale.name).rpartition("/")[2] for scale in dataset.dims[0].values()), "") if shape else "",
        scale=dataset.attrs.get("CLASS") == b"DIMENSION_SCALE",
        packed=any(each in dataset.attrs for each in ("scale_factor", "add_offset", "_FillValue")),
        matlab="MATLAB_class" in dataset.attrs,
    )


def _of_group(group: h5py.Group, name: str, kind: str) -> Dataset:
    """A group that stands for one dataset."""
    values: Any = group[{"categorical": "codes", "variable": "values"}.get(kind, "data")]
    made, sides = _of_dataset(values, name), group.attrs.get("shape", group.attrs.get("h5sparse_shape", ()))
    shape: tuple[int, ...] = tuple(map(int, sides)) if kind in ("csr", "csc") else values.shape
    if kind == "variable":
        offsets: Any = group["offsets"]
        shape = (offsets.shape[0] - 1, *shape[1:])
    rows = (shape[0], shape[0])
    return dataclasses.replace(made, type=f"{kind}, {made.type}", shape=shape, rows=rows, encoded=kind)


def _format_in_group(group: h5py.Group) -> str:
    """The format of the images that a group holds, each in a dataset of its own; empty if it holds anything else."""
    found = set()
    for name in itertools.islice(group, _LOOKED_AT):
        node: Any = group.get(name) if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        single = isinstance(node, h5py.Dataset) and node.ndim <= (node.dtype == np.uint8)
        found.add(image_format(node) if single else "")
    return "" if "" in found else "/".join(sorted(found))


def _type_name(dtype: np.dtype[Any]) -> str:
    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        return "text"
    if (within := h5py.check_vlen_dtype(dtype)) is not None:
        return f"variable length, {within}"
    if dtype.names is not None:
        return f"compound: {', '.join(members(dtype))}"
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else ", big-endian")


def _filters_of(dataset: h5py.Dataset) -> tuple[str, ...]:
    """The names of the filters of a dataset, with the level of gzip."""
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(place) for place in range(properties.get_nfilters())]
    return tuple(
        f"gzip {values[0]}" if number == 1 else name.decode(errors="replace").partition(";")[0] or f"filter {number}"
        for number, _, values, name in filters
    )


# -- how it is read ---------------------------------------------------------------------------------------------------


def describe(group: OpenGroup, node: Dataset, layout: str | None = None) -> None:
    """Say how a field of a dataset is read, and why not faster, or not at all."""
    where = f"{group.path}:/{node.path}"
    try:
        with as_source_errors(where, "cannot be read", file=group.path, dataset=node.path):
            decode: Any = "image" if node.encoded == "images" else None
            field = inspect_field(group, "x", Field(node.path, decode=decode), layout)["x"]
    except AsyncDataError as error:
        text = str(error).removeprefix(f"{where}: ").removeprefix(f"{group.path}: ")
        node.why = text.replace(f"{group.path}:/", "")
        return
    if field.images is not None:
        node.reading, node.how = _WAYS["chunks"]
        node.size, node.dtype, node.why = field.spec.shape[1:], field.spec.dtype, field.values.slow or ""
        return
    if field.sequences is not None:
        node.reading, node.how = _WAYS["chunks"][0], "found by reader threads, padded to one length"
        node.encoded, node.dtype = "variable", field.spec.dtype
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


# -- groups of equal structure -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Scope:
    """The datasets of a file; or of the first of the groups that a pattern matches, named by the pattern."""

    nodes: list[Dataset]
    group: str | None = None
    count: int = 1
    attributes: Sequence[str] = ()  # of the first group, or of the file

    def relative(self, node: Dataset) -> str:
        return node.name.removeprefix(f"{self.group}/")


def scopes_of(nodes: Sequence[Dataset], parent: str = "") -> list[Scope]:
    """The datasets outside of groups of equal structure; and each set of such groups."""
    rest, groups = list[Dataset](), collections.defaultdict[str, list[Dataset]](list)
    for node in nodes:
        name, slash, _ = node.name.removeprefix(parent).partition("/")
        (groups[name] if slash else rest).append(node)
    alike = collections.defaultdict[str, list[str]](list)
    for name, inside in groups.items():
        begin = f"{parent}{name}/"
        alike[str([(n.name.removeprefix(begin), n.type, len(n.shape), n.shape[1:]) for n in inside])].append(name)
    siblings, found = [*(node.name.removeprefix(parent) for node in rest), *groups], list[Scope]()
    for names in alike.values():
        pattern = _pattern(names, siblings)
        if pattern is None:
            for name in names:
                outside, *more = scopes_of(groups[name], f"{parent}{name}/")
                rest += outside.nodes
                found += more
            continue
        for node, *others in zip(*(groups[name] for name in names), strict=True):
            rows = [each.shape[0] for each in (node, *others) if each.shape]
            node.groups, node.rows = len(names), (min(rows), max(rows)) if rows else None
            node.name = f"{parent}{pattern}/{node.name.removeprefix(f'{parent}{names[0]}/')}"
        found.append(Scope(groups[names[0]], f"{parent}{pattern}", len(names)))
    return [Scope(rest), *found]


def _pattern(names: Sequence[str], siblings: Sequence[str]) -> str | None:
    """The pattern that matches these groups and no sibling; None if there is none, or they are stages."""
    if len(names) < 2 or any(has_word(name, f"{TRAINING}|{HELD_OUT}") for name in names):
        return None
    prefix = glob.escape(common_start(names).rstrip("0123456789"))
    fitting = (p for p in (f"{prefix}*", f"{prefix}[0-9]*") if sorted(fnmatch.filter(siblings, p)) == sorted(names))
    return next(fitting, None)
