"""`Tree`: the groups and datasets of an HDF5 file, as stored; reads no values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lit_async_data.sources.hdf5.schema.encoded import encoding
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS

if TYPE_CHECKING:
    import h5py

# A file with more objects is shown in part.
MOST_OBJECTS = 20_000
# The storage of a dataset with more chunks is not added up: libhdf5 would visit each.
MOST_CHUNKS = 100_000
# Attributes that only their library needs, and groups that hold no data of the user.
_OWN_ATTRIBUTES = {"DIMENSION_LIST", "REFERENCE_LIST", "NAME", "CLASS", "VERSION", "TITLE", "encoding-version"}
_OWN_PREFIXES = ("_Netcdf4", "_NC", "_Nc", "FIELD_", "PYTABLES_")
_OWN_GROUPS = ("#refs#", "#subsystem#", "_i_")
_SHOWN_VALUES = 8
_FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "n-bit", 6: "scale-offset", 32000: "lzf"}


@dataclasses.dataclass(frozen=True)
class Node:
    """A dataset, or a group that stands for one.

    Attributes:
        name: From the root of the file, without a leading slash.
        type: Element type, for people.
        dtype: As numpy has it; None if it has none.
        shape: As stored; None if there is no array.
        encoded: The kind of group, as of `encoding`; empty for a dataset.
        chunks: Shape of a chunk.
        filters: In the order in which they were applied.
        nbytes: Bytes of the values.
        stored: Bytes in the file; None if unknown.
        attributes: For people.
        scale: Whether it holds the coordinates of an axis of other datasets.
        packed: Whether NetCDF's attributes of packed values are there.
        matlab: MATLAB's class of the values.
        problem: Why it cannot be opened.
    """

    name: str
    type: str = ""
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None
    encoded: str = ""
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    nbytes: int = 0
    stored: int | None = None
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    scale: bool = False
    packed: bool = False
    matlab: str = ""
    problem: str = ""

    @property
    def last(self) -> str:
        """The last component of the name."""
        return self.name.rpartition("/")[2]


@dataclasses.dataclass
class Tree:
    """A group, and what is in it.

    Attributes:
        name: From the root, without a leading slash; empty for the root.
        attributes: For people.
        nodes: Its datasets.
        groups: Its groups.
        full: Whether all objects are there; False beyond `MOST_OBJECTS`.
        pytables: Whether PyTables wrote the file.
    """

    name: str
    attributes: dict[str, Any]
    nodes: list[Node] = dataclasses.field(default_factory=list)
    groups: list[Tree] = dataclasses.field(default_factory=list)
    full: bool = True
    pytables: bool = False

    def all_nodes(self) -> Iterator[Node]:
        """The datasets of this group and of all groups in it."""
        yield from self.nodes
        for group in self.groups:
            yield from group.all_nodes()

    def structure(self) -> tuple[Any, ...]:
        """What groups of equal structure have in common: names, types, and shapes without the first axis."""
        begin = len(self.name) + 1 if self.name else 0
        return tuple(
            sorted(
                (n.name[begin:], n.type, n.encoded, n.shape and (len(n.shape), *n.shape[1:])) for n in self.all_nodes()
            )
        )


def tree_of(file: h5py.File) -> Tree:
    """The groups and datasets of an open file."""
    tree = _Walk(file).group(cast("h5py.Group", file["/"]), "")
    tree.pytables = "PYTABLES_FORMAT_VERSION" in file.attrs
    return tree


def text(name: str | bytes) -> str:
    """A name that can be printed. h5py returns names that are not UTF-8 as bytes, or with surrogates."""
    raw = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "backslashreplace")


def _identity(group: h5py.Group) -> object:
    """The file, of those that are open, and the place in it: groups of other files come through external links."""
    import h5py

    info = h5py.h5g.get_objinfo(group.id)
    return info.fileno, info.objno


class _Walk:
    def __init__(self, file: h5py.File) -> None:
        self._file, self._left = file, MOST_OBJECTS
        self._seen: set[object] = set()

    def group(self, group: h5py.Group, name: str) -> Tree:

        tree = Tree(name, attributes_of(group))
        self._seen.add(_identity(group))
        try:
            names: list[Any] = list(group)
        except LIBRARY_ERRORS as error:
            tree.nodes.append(Node(name or "/", problem=f"cannot be listed: {error}"))
            return tree
        for each in names:
            if self._left <= 0:
                tree.full = False
                break
            self._left -= 1
            self._add(tree, group, each)
        return tree

    def _add(self, tree: Tree, group: h5py.Group, each: Any) -> None:
        import h5py

        name = f"{tree.name}/{text(each)}" if tree.name else text(each)
        if text(each).startswith(_OWN_GROUPS):
            return
        try:
            node: Any = group[each]
        except LIBRARY_ERRORS as error:
            link = group.get(each, getlink=True) if isinstance(each, str) else None
            broken = "is a broken link" if isinstance(link, h5py.SoftLink | h5py.ExternalLink) else "cannot be opened"
            tree.nodes.append(Node(name, problem=f"{broken}: {' '.join(map(str, error.args))}"))
            return
        if isinstance(node, h5py.Dataset):
            tree.nodes.append(_dataset(node, name))
        elif isinstance(node, h5py.Group):
            kind = encoding(node)
            if kind:
                tree.nodes.append(_encoded(node, name, kind))
            elif _identity(node) not in self._seen:  # hard links may lead in a circle
                below = self.group(node, name)
                tree.groups.append(below)
                tree.full &= below.full


def _dataset(dataset: h5py.Dataset, name: str) -> Node:
    try:
        dtype = dataset.dtype
    except LIBRARY_ERRORS:
        return Node(name, "a type that numpy lacks", shape=dataset.shape)
    attributes = attributes_of(dataset)
    shape = None if dataset.shape is None else tuple(int(n) for n in dataset.shape)
    scale = attribute_of(dataset, "CLASS") == "DIMENSION_SCALE"
    chunks = dataset.chunks
    count = math.prod(-(-n // c) for n, c in zip(shape or (), chunks or (), strict=False))
    return Node(
        name,
        type_name(dtype),
        dtype,
        shape,
        chunks=chunks,
        filters=filters_of(dataset),
        nbytes=0 if shape is None else math.prod(shape) * dtype.itemsize,
        stored=int(dataset.id.get_storage_size()) if count <= MOST_CHUNKS else None,
        attributes=attributes,
        scale=scale,
        packed=any(each in attributes for each in ("scale_factor", "add_offset", "_FillValue")),
        matlab=str(attributes.get("MATLAB_class", "")),
    )


def _encoded(group: h5py.Group, name: str, kind: str) -> Node:
    attributes = attributes_of(group)
    held = {"csr": "data", "csc": "data", "categorical": "codes", "variable": "values"}[kind]
    try:
        values: Any = group[held]
        inner = _dataset(values, name)
        given = attribute_of(group, "shape" if "shape" in group.attrs else "h5sparse_shape")
        shape: tuple[int, ...] = tuple(given) if isinstance(given, list) else ()
        if kind == "categorical":
            shape = values.shape
        elif kind == "variable":
            shape = (cast("h5py.Dataset", group["offsets"]).shape[0] - 1, *values.shape[1:])
    except LIBRARY_ERRORS as error:
        return Node(name, kind, encoded=kind, problem=f"cannot be opened: {error}")
    words = {"csr": "sparse rows", "csc": "sparse columns", "categorical": "categories", "variable": "variable length"}
    return dataclasses.replace(
        inner, type=f"{words[kind]}, {inner.type}", shape=shape, encoded=kind, attributes=attributes
    )


def type_name(dtype: np.dtype[Any]) -> str:
    """An element type, for people.

    Example:
        >>> type_name(np.dtype(">f4")), type_name(np.dtype([("a", "i4"), ("b", "f8")]))
        ('float32, big-endian', 'compound: a, b')
    """
    import h5py

    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        return "text"
    if h5py.check_ref_dtype(dtype) is not None:
        return "references"
    within = h5py.check_vlen_dtype(dtype)
    if within is not None:
        return f"variable length, {within}"
    if dtype.names is not None:
        return f"compound: {', '.join(dtype.names)}"
    enum = h5py.check_enum_dtype(dtype) if dtype.kind in "iu" else None
    if enum:
        return f"{np.dtype(dtype.str)}, {len(enum)} named values"
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else ", big-endian")


def filters_of(dataset: h5py.Dataset) -> tuple[str, ...]:
    """The names of the filters of a dataset, with the level of gzip."""
    properties = dataset.id.get_create_plist()
    found = []
    for place in range(properties.get_nfilters()):
        number, _, values, name = properties.get_filter(place)
        known = _FILTERS.get(number) or name.decode(errors="replace").partition(";")[0] or f"filter {number}"
        found.append(f"{known} {values[0]}" if number == 1 and values else known)
    return tuple(found)


def attributes_of(holder: Any) -> dict[str, Any]:
    """The attributes of a group or dataset as values of JSON, without those that only their library needs."""
    try:
        names: list[Any] = list(holder.attrs)
    except LIBRARY_ERRORS:
        return {}
    shown = [name for name in names if text(name) not in _OWN_ATTRIBUTES and not text(name).startswith(_OWN_PREFIXES)]
    return {text(name): attribute_of(holder, name) for name in shown}


def attribute_of(holder: Any, name: Any) -> Any:
    """An attribute as a value of JSON; of many values, their number, without reading them. None if there is none."""
    import h5py

    try:
        if name not in holder.attrs:
            return None
        stored = holder.attrs.get_id(name)
        values = math.prod(stored.shape or ())  # None if it is empty
        if values > _SHOWN_VALUES:
            return f"{values} values of {stored.dtype}"
        value = holder.attrs[name]
    except LIBRARY_ERRORS:
        return "cannot be read"
    if isinstance(value, h5py.Empty):
        return None
    if isinstance(value, bytes):
        return text(value)
    array = np.asarray(value)
    if array.dtype.kind == "O" or array.dtype.names is not None:
        texts = [str(text(each) if isinstance(each, bytes) else each) for each in array.ravel()]
        array = np.array(texts).reshape(array.shape)
    return _values(array.tolist())


def _values(value: Any) -> Any:
    if isinstance(value, list):
        return [_values(each) for each in value]
    if isinstance(value, bytes | str):
        return text(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, bool | int | float) and finite else str(value)
