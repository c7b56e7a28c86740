"""What an HDF5 file holds: datasets as stored, how each is read and why not faster, groups of equal structure."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import glob
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from string import digits
from typing import Any

import h5py
import numpy as np

from lit_async_data.errors import AsyncDataError, FormatError
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.sources.hdf5.parts.stored_field import inspect_field
from lit_async_data.sources.hdf5.readers.part_reader import choice
from lit_async_data.sources.hdf5.schema.categories import find_coded
from lit_async_data.sources.hdf5.schema.compound import member_of, members
from lit_async_data.sources.hdf5.schema.encoded import VARIABLE, StoredRanges, encoding
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import image_format
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.external_files import refuse_external_link
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, as_source_errors
from lit_async_data.tools.inspect.words import HELD_OUT, TRAINING, common_start, has_word

# Kinds of datasets that hold values as they are; and numbers that stand for names, or beside a mask.
PLAIN, CODED = ("", "member"), ("categorical", "nullable")
# Groups that hold no data of the user: of MATLAB and PyTables.
_OWN_GROUPS = ("#refs#", "#subsystem#", "_i_")
# At most this many members of a group are listed. Its first few datasets tell whether it holds images.
MOST_MEMBERS, _LOOKED_AT = 20_000, 8


@dataclasses.dataclass
class Dataset:
    """A dataset, or what stands for one. The page on the JSON says what the attributes up to `why` are."""

    name: str
    type: str = ""
    shape: tuple[int, ...] = ()
    groups: int = 1
    rows: tuple[int, ...] | None = None
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    bytes: int = 0
    stored_bytes: int | None = None
    reading: Reading | None = None
    why: str = ""
    kind: str = ""  # of a group, as of `encoding`; else "images", "member", "scale"; empty for plain values
    axis: str = ""  # the name of its first axis, as NetCDF gives it
    attributes: tuple[str, ...] = ()
    field: str = ""  # its name in its group
    dtype: np.dtype[Any] = dataclasses.field(default_factory=lambda: np.dtype(object))  # as read
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)  # the options of a field that decodes its images
    each: str = ""  # if it stands for datasets that may be samples: their name with a ``*``

    def __post_init__(self) -> None:
        self.field, self.rows = self.field or self.name, self.rows or (self.shape[:1] * 2 or None)

    @property
    def structure(self) -> tuple[object, ...]:
        """What datasets that are alike have in common, whatever their lengths."""
        return self.kind, self.type, len(self.shape), self.shape[1:]

    @property
    def varies(self) -> bool:
        """Whether those that it stands for have different lengths."""
        return self.rows is not None and self.rows[0] < self.rows[1]

    @property
    def one_image(self) -> bool:
        """Whether it holds one encoded image, of which it is the bytes."""
        return self.kind == "images" and not self.each and (not self.shape or self.shape == (self.bytes,))

    @property
    def flat(self) -> bool:
        """Whether it has one value for each row."""
        return math.prod(self.shape) <= max(self.shape, default=1)


SHOWN = [field.name for field in dataclasses.fields(Dataset)][:11]


def datasets_of(group: Any, seen: set[h5py.Group], path: str = "") -> Iterator[Dataset]:
    """The datasets below a group, apart from those of groups that were seen before."""
    seen.add(group)
    kind, images = encoding(group), _format_in_group(group) if path else ""
    if "pandas_type" in group.attrs:
        why = f"pandas wrote it: ManifestSource takes the DataFrame pandas.read_hdf({group.file.filename!r}, {path!r})"
        yield Dataset(path, "DataFrame", why=why)
        return
    if kind:
        yield _of_group(group, path or ".", kind)
    elif images:
        attributes, each = tuple(next(iter(group.values())).attrs), _name_of([f"{path}/{name}" for name in group])
        yield Dataset(path, f"{images} images", (len(group),), kind="images", attributes=attributes, each=each)
        return
    groups, found = [], list[Dataset]()
    for each in itertools.islice(group, MOST_MEMBERS) if kind in ("", "variable") else ():
        name = f"{path}/{each}" if path else str(each)  # bytes, if it is not UTF-8
        node, own = _member(group, each, name), bool(kind) and each in VARIABLE
        if node is None and not own:
            found.append(Dataset(name))
        elif isinstance(node, h5py.Dataset) and not own:
            found += _of_dataset(node, name)
        elif isinstance(node, h5py.Group) and node not in seen and not str(each).startswith(_OWN_GROUPS):
            groups.append((node, name))
    yield from _merged(found, path, len(group))
    for node, name in groups:
        yield from datasets_of(node, seen, name)


def _member(group: Any, each: str, name: str) -> Any:
    """A member of a group; None if it cannot be read, of which the source says why."""
    with contextlib.suppress(FormatError, *LIBRARY_ERRORS):
        refuse_external_link(group.file, name)
        return group[each]


def _merged(found: Sequence[Dataset], path: str, members: int) -> Iterator[Dataset]:
    """The datasets of a group; one for many of which only numbers in names, or all names, differ, and lengths."""
    alike = collections.defaultdict[object, list[Dataset]](list)
    only = path and len({node.structure for node in found}) == 1
    only = only and (len(found[0].shape) != 1 or len({node.shape for node in found}) > 1)  # else they may be columns
    for node in found:
        alike["" if only else re.sub(r"\d+", "0", node.name), node.structure].append(node)
    for nodes in alike.values():
        if len(nodes) <= _LOOKED_AT or nodes[0].kind not in ("", "images"):
            yield from nodes
            continue
        name, count = _name_of([n.name for n in nodes]), members if len(nodes) == MOST_MEMBERS else len(nodes)
        made = dataclasses.replace(nodes[0], name=name, field=name, each=name, groups=count, rows=_lengths(nodes))
        made.type = f"{made.type}, {count:,} datasets".removeprefix(", ")
        made.bytes, made.stored_bytes = sum(n.bytes for n in nodes), sum(n.stored_bytes or 0 for n in nodes)
        yield made


def _lengths(nodes: Sequence[Dataset]) -> tuple[int, int] | None:
    rows = [node.shape[0] for node in nodes if node.shape]
    return (min(rows), max(rows)) if rows else None


def _name_of(names: Sequence[str]) -> str:
    """One name for all, with a ``*`` for what differs."""
    begin, end = common_start(names), common_start([each[::-1] for each in names])[::-1]
    if len({re.sub(r"\d+", "0", each) for each in names}) > 1:  # more than numbers
        begin, end = begin[: begin.rfind("/") + 1], "." * ("." in end) + end.partition(".")[2]
    return f"{begin.rstrip(digits)}*{end.lstrip(digits)}"


def _of_dataset(dataset: h5py.Dataset, name: str) -> Iterator[Dataset]:
    """A dataset; of compound values, each member of them."""
    try:
        dtype, images = dataset.dtype, image_format(dataset)
    except LIBRARY_ERRORS:
        yield Dataset(name, "a type that numpy lacks")
        return
    shape, attributes, properties = tuple(map(int, dataset.shape or ())), dataset.attrs, dataset.id.get_create_plist()
    whole = Dataset(
        name,
        f"{images} images" if images else _type_name(dtype),
        shape,
        chunks=dataset.chunks,
        filters=tuple(
            f"gzip {values[0]}" if number == 1 else known.decode(errors="replace").partition(";")[0] or str(number)
            for number, _, values, known in map(properties.get_filter, range(properties.get_nfilters()))
        ),
        bytes=math.prod(shape) * dtype.itemsize if dataset.shape is not None else 0,
        stored_bytes=int(dataset.id.get_storage_size()),
        kind="images" if images else "scale" if attributes.get("CLASS") == b"DIMENSION_SCALE" else "",
        axis=next((str(scale.name).rpartition("/")[2] for scale in dataset.dims[0].values()), "") if shape else "",
        attributes=tuple(attributes),
    )
    if dtype.names is None:
        yield whole
    for member, path in members(dtype).items() if dtype.names else ():
        inner: Any = member_of(dtype, path)
        element, sides = inner.subdtype or (inner, ())
        made = Dataset(f"{name}.{member}", _type_name(element), (*shape, *sides), kind="member", chunks=whole.chunks)
        yield dataclasses.replace(made, filters=whole.filters, bytes=math.prod(shape) * inner.itemsize)


def _of_group(group: h5py.Group, name: str, kind: str) -> Dataset:
    parts = {"categorical": ("codes",), "nullable": ("values",), "variable": VARIABLE}.get(kind, ("data",))
    stored = kind
    nodes = [_member(group, part, f"{name}/{part}") for part in parts]
    if not all(isinstance(node, h5py.Dataset) and node.shape is not None for node in nodes):
        return Dataset(name, kind)
    values = nodes[0]
    made, whole = next(_of_dataset(values, name)), np.ravel(group.attrs.get("shape", group.attrs.get("h5sparse_shape")))
    sparse = kind in ("csr", "csc") and whole.dtype.kind in "iu"
    shape: tuple[int, ...] = tuple(whole.tolist()) if sparse else values.shape
    if kind == "variable":
        shape, kind = (nodes[1].size - 1, *shape[1:]), made.kind or kind
    return dataclasses.replace(made, type=f"{stored}, {made.type}", shape=shape, rows=None, kind=kind)


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
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else ", big-endian")


def describe(group: OpenGroup, node: Dataset, layout: str | None = None) -> None:
    """Say how a field of a dataset is read, and why not faster, or not at all."""
    name, given = group.name(node.field), Field(node.field, decode="image" if node.kind == "images" else None)
    try:
        with as_source_errors(f"{group.path}:/{name}", "cannot be read", file=group.path, dataset=name):
            if node.field == node.each or node.one_image:
                given = dataclasses.replace(given, name=name)
                source = HDF5Source(group.path, {"x": given}, sample="dataset" if node.each else "group")
                with contextlib.closing(source):
                    field, node.reading = source.stored_parts[0].fields["x"], source.chunks.reading
            else:
                field, node.reading = inspect_field(group, "x", given, layout)["x"], None
    except AsyncDataError as error:
        where = f"{error.dataset}: " if error.row is None else f"{error.dataset}, row {error.row}: "
        node.why = node.why or where * (error.dataset not in (name, None)) + error.message
        return
    stored, node.dtype = field.values, field.spec.dtype
    node.decoding = {"decode": "image", "image_size": list(field.spec.shape[1:])} if field.images else {}
    node.kind = "variable" if field.sequences else node.kind
    node.kind = "categorical" if node.kind in PLAIN and find_coded(group, name).place else node.kind
    way = "chunks" if field.images or field.sequences else choice(stored, mapped=True)
    copied = way in ("raw", "strided", "kept")
    node.reading = node.reading or ("copied" if copied else "decoded" if way == "chunks" else "locked")
    index = stored.index if way == "chunks" else None
    pieces = math.prod(index.grid) // index.grid[stored.axis] if index else 1
    compressed = index is not None and stored.filtered
    shared = compressed and stored.chunk_rows > 1 and not isinstance(field.stored, StoredRanges)
    reasons = {
        f"{stored.slow}; pack writes it once in a way that needs no lock": stored.slow,
        "the library that decodes its filters is missing: pip install 'lit-async-data[codecs]'": not stored.slow
        and way == "h5py chunks",
        f"samples are on axis {stored.axis}; on axis 0, each would lie in one piece": way == "strided" or stored.axis,
        f"each sample is spread over {pieces:,} chunks": pieces > 1,
        f"{stored.chunk_rows:,} samples share a chunk and are decoded together; the chunk shuffle decodes them once "
        "per epoch": shared,
        "compressed: each sample is decoded when it is read": compressed and not shared,
    }
    node.why = "; ".join(reason for reason, holds in reasons.items() if holds)


@dataclasses.dataclass
class Scope:
    """The datasets of a file; or of the first of the groups that a pattern matches, named by the pattern."""

    nodes: list[Dataset]
    group: str | None = None
    first: str = "/"  # of these groups
    count: int = 1
    attributes: Sequence[str] = ()  # of the first group, or of the file
    paths: Sequence[str] = ()  # of all files


def scopes_of(nodes: Sequence[Dataset], parent: str = "") -> list[Scope]:
    """The datasets outside of groups of equal structure; and each set of such groups."""
    rest, groups = list[Dataset](), collections.defaultdict[str, list[Dataset]](list)
    for node in nodes:
        name, slash, below = node.name.removeprefix(parent).partition("/")
        (groups[name] if slash and ("*" not in below or "/" in below) else rest).append(node)
    alike = collections.defaultdict[str, list[str]](list)
    for name, inside in groups.items():
        alike[str([(n.name.removeprefix(f"{parent}{name}/"), n.structure) for n in inside])].append(name)
    siblings, found = [*(node.name.removeprefix(parent) for node in rest), *groups], list[Scope]()
    for names in alike.values():
        patterns = (glob.escape(common_start(names).rstrip(digits)) + end for end in ("*", "[0-9]*"))
        fitting = (each for each in patterns if sorted(fnmatch.filter(siblings, each)) == sorted(names))
        stages = any(has_word(name, f"{TRAINING}|{HELD_OUT}") for name in names)
        pattern = None if len(names) < 2 or stages else next(fitting, None)
        if pattern is None:
            for name in names:
                outside, *more = scopes_of(groups[name], f"{parent}{name}/")
                rest += outside.nodes
                found += more
            continue
        names.sort(key=lambda name: any(0 in node.shape for node in groups[name]))  # an empty one tells nothing
        for node, *others in zip(*(groups[name] for name in names), strict=True):
            node.groups, node.rows = len(names), _lengths([node, *others])
            node.field = node.name.removeprefix(f"{parent}{names[0]}/")
            node.name = f"{parent}{pattern}/{node.field}"
        found.append(Scope(groups[names[0]], f"{parent}{pattern}", f"{parent}{names[0]}", len(names)))
    return [Scope(rest), *found]
