"""Describes the groups and datasets of a file, and members of compound values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import posixpath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import TENSOR_TYPES, Array, FieldSpec
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, SourceError, few
from lit_async_data.sources.contract.checks import FIRST_SAMPLES
from lit_async_data.sources.hdf5.index import index as chunks
from lit_async_data.sources.hdf5.select import Steps
from lit_async_data.sources.hdf5.storage.codecs import check_filters
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, NoSamplesError, context_of, h5py
from lit_async_data.sources.hdf5.storage.handles import bytes_at
from lit_async_data.sources.hdf5.storage.open_file import ExternalFiles, external_files, refuse_external_link
from lit_async_data.sources.images.formats import FORMATS
from lit_async_data.sources.local_files import retry_once

Holds = Literal["values", "images", "heap"]


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    file: h5py.File
    path: str
    group: str  # name of the group; ``"/"`` for the root
    cache: chunks.IndexCache
    allow_external: bool
    episodes: int | None = None  # the axis of episodes, if datasets have one
    steps: Steps | None = None  # and what it shares with the axis of their rows, when that is known
    tables: dict[tuple[str, int | None, int], Array] = dataclasses.field(default_factory=dict)  # lookup tables
    verified: set[str] = dataclasses.field(default_factory=set)  # types of datasets whose offsets were verified
    _nodes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def beside(self, group: str) -> OpenGroup:
        """Another group of the file. Both share lookup tables and verified types."""
        return dataclasses.replace(self, group=group, _nodes={})

    def name(self, given: str) -> str:
        return given if given.startswith("/") or self.group == "/" else f"{self.group.strip('/')}/{given}"

    def _check_links(self, name: str) -> None:
        if not self.allow_external:
            refuse_external_link(self.file, name)

    def node(self, name: str) -> Any:
        """The object with this name, or None if it cannot be opened; `inspect_dataset` then raises an error."""
        if name not in self._nodes:
            self._check_links(name)
            try:
                self._nodes[name] = self.file[name]
            except LIBRARY_ERRORS:
                self._nodes[name] = None
        return self._nodes[name]

    def whole(self, name: str, what: str) -> h5py.Dataset:
        """A dataset that is read as a whole. Messages begin with ``what``, such as ``"rows: "``."""
        name = self.name(name)
        self._check_links(name)
        try:
            dataset = open_dataset(self.file, self.path, name, "; name one of them")
            external_files(dataset, self.file, name, allowed=self.allow_external)
            check_filters(dataset, self.path, name)
            if dataset.size and not math.prod(shape_of(dataset)):
                raise NoSamplesError("is an empty array of MATLAB; leave it out", **context_of(self.path, name))
            # Text of variable length is stored as references, whose size h5py does not tell.
            if dataset.chunks and dataset.shape and dataset.dtype.kind != "O":
                chunks.check_unindexed(dataset)
                chunks.check_chunk_lengths(dataset)
        except SourceError as error:
            raise type(error)(f"{what}{error}", file=self.path, dataset=name) from error.__cause__
        return dataset

    def whole_member(self, name: str, what: str) -> tuple[h5py.Dataset, tuple[str, ...]]:
        """As `whole`, and the path of a member of its values, if the name has one."""
        of, member = self.split(self.name(name))
        dataset = self.whole(f"/{of.strip('/')}" if member else name, what)
        return dataset, find_member(dataset, member, context_of(self.path, of))[0] if member else ()

    def inspect_dataset(
        self, name: str, member: str = "", layout: str | None = None, *, holds: Holds = "values", cast: bool = False
    ) -> StoredDataset:
        """Describe a dataset that can be a field, or a ``member`` of its values; a ``cast`` allows long doubles.

        If it holds "images", or refers to the "heap", rows are described as their bytes: uint8, on one more axis.
        """
        dataset = self.node(name)
        if not isinstance(dataset, h5py.Dataset):
            dataset = open_dataset(self.file, self.path, name, ADVICE)
        context = context_of(self.path, name)
        external = external_files(dataset, self.file, name, allowed=self.allow_external)
        path_to, kind = find_member(dataset, member, context)
        if holds == "images":
            _check_images(dataset, context)
        elif holds == "heap":
            _check_in_heap(dataset, context)
        else:
            _check_values(dataset, kind, dict(context, place=context["place"] + f".{member}" * bool(member)), cast=cast)
        shape = shape_of(dataset)
        axis, channel, others = _axes_of(shape, layout, self.episodes, context)
        if math.prod(shape) == 0:
            error = NoSamplesError if shape.count(0) > others.count(0) else FormatError
            raise error(f"has shape {shape}, so it holds no samples; leave it out, or write its samples", **context)
        elements, inner = kind.dtype.subdtype or (kind.dtype, ())
        row = [*others, *inner]
        if channel is not None:
            row.insert(0, row.pop(channel))
        if holds != "values":
            elements, row = np.dtype(np.uint8), row or [chunks.element_bytes(dataset)]
        dtype = elements.newbyteorder("=")
        if not row and dtype.kind in "iu" and dtype != np.uint64:  # int64 cannot hold every uint64
            dtype = np.dtype(np.int64)  # torch's losses take class labels of this type only
        spec, taken = FieldSpec(tuple(row), dtype, channel), None
        if member:
            record, size = chunks.stored_type(dataset, dataset.id.get_type())
            taken, elements = Member(path_to, elements, record, spec), np.dtype(np.uint8)
            spec = FieldSpec((*others, size), elements)
        offset, index, slow = _place(dataset, self, context, external)
        if member or (holds != "values" and len(shape) == 1):
            shape = (*shape, spec.shape[-1])
            if index is not None:
                fill = np.frombuffer(index.fill.tobytes(), np.uint8) if isinstance(index.fill, np.void) else 0
                index = dataclasses.replace(index, shape=(*index.shape, shape[-1]), grid=(*index.grid, 1), fill=fill)
        more: dict[str, Any] = {"offset": offset, "index": index, "external": external, "slow": slow, "member": taken}
        more["chunk_rows"] = min(dataset.chunks[axis], shape[axis]) if dataset.chunks else 1
        more["filtered"] = dataset.id.get_create_plist().get_nfilters() > 0
        stored = StoredDataset(self.path, name, shape, elements, axis, spec, **more)
        return stored if self.episodes is None else _end_to_end(stored, self.episodes, dataset.chunks)

    def split(self, name: str) -> tuple[str, str]:
        """The name of a dataset, and the member behind it; no member if a dataset has the whole name."""
        end = len(name)
        while self.node(name) is None and (end := name.rfind(".", 0, end)) > 0:
            node = self.node(name[:end])
            if isinstance(node, h5py.Dataset) and node.dtype.names:
                return name[:end], name[end + 1 :]
        return name, ""

    def inspect_any(self, name: str) -> StoredDataset:
        """As `inspect_dataset`, but of any dataset that h5py can read, such as text."""
        node = self.node(name)
        if not isinstance(node, h5py.Dataset) or (
            node.size and node.shape and (node.dtype.kind, node.dtype.itemsize) in TENSOR_TYPES
        ):
            return self.inspect_dataset(name)
        dataset = self.whole(name, "")
        if dataset.shape is None:
            raise FormatError(f"{self.path}:{dataset.name}: holds no value", file=self.path, dataset=name)
        external = external_files(dataset, self.file, name, allowed=self.allow_external)
        dtype, inner = dataset.dtype.subdtype or (dataset.dtype, ())
        shape = (*dataset.shape, *inner)
        spec, chunk = FieldSpec(shape[1:], dtype), dataset.chunks[0] if dataset.chunks else 1
        return StoredDataset(self.path, name, shape, dtype, 0, spec, None, chunk, external=external)


@dataclasses.dataclass(frozen=True)
class Member:
    path: tuple[str, ...]  # the names of the members that contain it, and its own
    dtype: np.dtype[Any]  # as stored
    record: np.dtype[Any]  # the stored type of the compound values
    spec: FieldSpec  # the values of a row

    def __str__(self) -> str:
        return f".{'.'.join(self.path)}"

    def of(self, records: Array) -> Array:
        values = member_of(records if records.dtype.names else records.view(self.record)[..., 0], self.path)
        return values.astype(self.dtype.newbyteorder("="), copy=False)


def find_member(dataset: h5py.Dataset, name: str, context: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
    """The path of a member, and its type in libhdf5; without a name, the type of whole values."""
    found = members(dataset.dtype if name else np.dtype(bool))
    if name not in found:
        raise MissingError(f"has no member {name!r}; its members are {', '.join(found)}", **context)
    kind = dataset.id.get_type()
    for each in found[name]:
        kind = kind.get_member_type(kind.get_member_index(each.encode(errors="surrogateescape")))
    return found[name], kind


def members(dtype: np.dtype[Any]) -> dict[str, tuple[str, ...]]:
    """The path of each member by its dotted name: ``{"pos.x": ("pos", "x")}``; of other values, ``{"": ()}``."""
    paths = [(name, *inner) for name in dtype.names or () for inner in members(dtype[name]).values()] or [()]
    return {".".join(path): path for path in paths}


def member_of(records: Array, path: tuple[str, ...]) -> Array:
    for name in path:
        records = records[name]
    return records


PROBED_VALUES = 512  # at either end of a dataset, which are read by h5py and by their offset, to verify it
# The begin of the attribute NAME of a NetCDF dimension without a variable (NetCDF-4 format specification).
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
HEAD_BYTES = 16
NAMES_SHOWN = 12
ADVICE = "; python -m lit_async_data inspect lists the datasets and suggests fields"


class Located:
    path: str
    name: str
    names: Any = None
    member: Member | None = None
    steps: Steps | None = None

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}{self.member or ''}"

    def dataset(self, row: int | None) -> str:
        """The name of the dataset of a row: of its own dataset if each row has one."""
        if self.names is None or row is None or row >= len(self.names):
            return self.name
        return in_group(self.name, self.names, row)

    def at(self, row: int) -> str:
        if self.names is not None:
            return f"{self.path}:/{self.dataset(row)}"
        of = f" (episode {row // self.steps.length}, step {row % self.steps.length})" if self.steps else ""
        return f"{self}, row {row}{of}"

    def error(self, kind: type[SourceError], what: str, row: int | None = None) -> SourceError:
        place = str(self) if row is None else self.at(row)
        return kind(what, place=place, file=self.path, dataset=self.dataset(row), row=row)


@dataclasses.dataclass(frozen=True)
class StoredDataset(Located):
    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # as stored, with byte order
    axis: int  # the stored axis that counts samples
    spec: FieldSpec
    offset: int | None = None  # offset in the file of the raw values, if they are contiguous; else None
    chunk_rows: int = 1  # samples per chunk; 1 if the dataset is not chunked
    filtered: bool = False  # whether chunks have filters, so that each must be decoded as a whole
    index: chunks.ChunkIndex | None = dataclasses.field(default=None, compare=False)  # None if libhdf5 must read chunks
    external: ExternalFiles = ()
    slow: str | None = None  # why h5py must read the dataset, one thread at a time; None if it need not
    kept: Any = dataclasses.field(default=None, compare=False)  # values in memory: one for each row, or one for all
    # The names of rows, as bytes, in place of the ``*`` in ``name``, if each row is a group or dataset; else None.
    names: Any = dataclasses.field(default=None, compare=False)
    member: Member | None = None  # which a field takes from compound values, if rows are the bytes of these
    # If episodes have an axis of their own, which ``axis`` then is together with that of their rows, as stored.
    steps: Steps | None = None

    @property
    def rows(self) -> int:
        return self.shape[self.axis]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _end_to_end(stored: StoredDataset, episodes: int, chunks: tuple[int, ...] | None) -> StoredDataset:
    """A dataset whose episodes have an axis beside that of their rows, as one axis of all rows."""
    axis, index = min(episodes, stored.axis), stored.index
    if abs(episodes - stored.axis) > 1:
        what = f"has episodes on axis {episodes} and their rows on axis {stored.axis}, with others between them"
        raise stored.error(FormatError, f"{what}; write it again with both side by side")
    both, size = slice(axis, axis + 2), chunks[axis : axis + 2] if chunks else (1, 1)
    # What is not decoded by chunks lies in the order of the axes.
    steps = Steps(stored.shape[both], size if index or stored.filtered else stored.shape[both], stored.axis < episodes)

    def joined(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:axis], math.prod(shape[both]), *shape[axis + 2 :])

    index = index and dataclasses.replace(index, shape=joined(index.shape), grid=joined(index.grid))
    shape = (*stored.shape[:axis], math.prod(steps.grid), *stored.shape[axis + 2 :])
    more: dict[str, Any] = {"axis": axis, "index": index, "chunk_rows": math.prod(size), "steps": steps}
    return dataclasses.replace(stored, shape=shape, **more)


def shape_of(dataset: h5py.Dataset) -> tuple[int, ...]:
    """The shape of a dataset. MATLAB writes the shape of an empty array, in its own order, in place of values."""
    empty = dataset.ndim == 1 and dataset.dtype == np.uint64 and dataset.attrs.get("MATLAB_empty", 0)
    return tuple(map(int, dataset[...][::-1] if empty else dataset.shape))


def in_group(name: str, names: npt.NDArray[np.bytes_], row: int) -> str:
    """A name with the group or dataset of a row in place of its ``*``."""
    return name.replace("*", names[row].decode(errors="surrogateescape"), 1).strip("/")


def _axes_of(
    shape: tuple[int, ...], layout: str | None, episodes: int | None, context: dict[str, Any]
) -> tuple[int, int | None, list[int]]:
    """The axis N, the axis C among the axes of a sample, and their lengths; ``episodes`` is the axis of episodes."""
    if episodes is not None and any(shape) and len(shape) <= max(episodes, 1):
        what = f"has shape {shape}, without axis {max(episodes, 1)}; rows of episodes need two axes"
        raise FormatError(f"{what}, one value for each episode Field(…, per='episode')", **context)
    others = [n for place, n in enumerate(shape) if place != episodes]
    if layout and episodes is not None:
        layout = layout[:episodes] + layout[episodes + 1 :]
    # Some programs write all empty arrays with shape (0,), MATLAB with (0, 0).
    axis, channel = axes(layout, tuple(others), context["place"]) if any(shape) else (0, None)
    del others[axis : axis + 1]
    return axis + (episodes is not None and episodes <= axis), channel, others


def axes(layout: str | None, shape: tuple[int, ...], where: str, *, volume: bool = False) -> tuple[int, int | None]:
    """The axis N of samples, which a volume has not, and the axis C of channels. Without a layout, N comes first."""
    if layout is None:
        return 0, None
    letters = layout if isinstance(layout, str) and layout.isalpha() and layout == layout.upper() else ""
    if not letters or ("N" in letters) == volume or len({*letters}) < len(letters):
        what = "without N, since no axis counts samples" if volume else "with N for the samples"
        raise ConfigError(f"{layout!r} for {where} must be different capital letters, one per axis, {what}", "layout")
    if len(layout) != len(shape):
        raise ConfigError(f"{layout!r} names {len(layout)} axes, but {where} has {len(shape)}: {shape}", "layout")
    rest = layout.replace("N", "")
    return layout.find("N"), rest.index("C") if "C" in rest else None


def open_dataset(file: h5py.File, path: str, name: str, advice: str = "") -> h5py.Dataset:
    """A dataset of an open file. The error for a missing dataset suggests similar names, or gives the advice."""
    context = context_of(path, name)
    try:
        node = file[name]
    except KeyError as error:
        raise _not_found(file, path, name, error, advice) from error
    if isinstance(node, h5py.Group):
        raise FormatError(f"is a group, not a dataset; {_names_in(node)}", **context)
    if not isinstance(node, h5py.Dataset):
        raise FormatError(f"is a {type(node).__name__}, not a dataset; give a dataset", **context)
    return node


def _not_found(file: h5py.File, path: str, name: str, error: KeyError, advice: str) -> SourceError:
    context: dict[str, Any] = context_of(path, name)
    link: Any = file.get(name, getlink=True)
    said = "".join(map(str, error.args))  # str() of a KeyError is quoted
    if link is None:
        return MissingError(f"has no dataset {name!r}{_suggestion(file, name, advice)}", **{**context, "place": path})
    above: Any = file[posixpath.dirname(f"/{name.strip('/')}")]
    soft = isinstance(link, h5py.SoftLink)
    found = not soft or isinstance(above.get(link.path, getlink=True), h5py.HardLink)
    if isinstance(link, h5py.ExternalLink) or not found:
        what = f"is a broken link to {link.path} of {getattr(link, 'filename', 'this file')}: {said}"
        return MissingError(f"{what}; restore it, or correct the link", **context)
    return CorruptError(f"is in the file, but cannot be opened: {said}; the file is damaged: restore it", **context)


def _suggestion(file: h5py.File, name: str, advice: str) -> str:
    import difflib

    if "*" in name:
        return "; if each dataset that the * stands for is a sample: sample='dataset'"
    above, _, last = name.strip("/").rpartition("/")
    holder: Any = file.get(above) if above else file
    if isinstance(holder, h5py.Group | h5py.Dataset) and last in holder.attrs:
        of, field = (holder.name if above else "the file"), f"Field(attr={last!r})"
        field = f"Field({above!r}, attr={last!r})" if isinstance(holder, h5py.Dataset) else field
        return f": {last!r} is an attribute of {of}, one value for all samples; read it by {field}"
    group = holder if isinstance(holder, h5py.Group) else file
    near = difflib.get_close_matches(last, _names_of(group), n=3, cutoff=0.5) if group is holder else []
    if near:
        return "; did you mean " + " or ".join(f"{above}/{n}" if above else n for n in near) + "?"
    return f"; {_names_in(group)}{advice}"


def _names_in(group: h5py.Group) -> str:
    what = "the file" if group.name == "/" else group.name
    return f"{what} holds: {few(_names_of(group), NAMES_SHOWN) or 'nothing'}"


def _names_of(group: Any) -> list[str]:
    """The names in a group, printable. h5py returns names that are not UTF-8 as bytes."""
    names = (each.decode(errors="backslashreplace") if isinstance(each, bytes) else each for each in group)
    return [each if each.isprintable() else ascii(each)[1:-1] for each in names]


def _check_values(dataset: h5py.Dataset, kind: Any, context: dict[str, Any], *, cast: bool) -> None:
    if not dataset.shape:
        what = "no value" if dataset.shape is None else "a single value"
        raise FormatError(f"holds {what}; give a dataset with one value per sample", **context)
    member = kind != dataset.id.get_type()
    try:
        dtype = kind.dtype
    except LIBRARY_ERRORS as error:
        raise FormatError(f"holds values of a type that numpy lacks: {error}; store another", **context) from error
    images = dtype.kind in "OSV" and image_format(dataset) != ""
    refusals = {
        f"encoded images; decode them: Field({context['dataset']!r}, decode='image'); whole episodes with window="
        "(0, LONGEST), pad='zero', and episodes={'ends': NAME} and rows= their first rows, not Field(ends=)": images,
        "text; one text per row can be a field, as the number of a class, or as the bytes of text of any length: "
        "Field(…, dtype='uint8')": bool(h5py.check_string_dtype(dtype)) or dtype.kind in "SU",
        "values of variable length; store them padded to one length, or as a group of two datasets: values, one sample "
        "after the other, and offsets, where each begins and the last ends": h5py.check_vlen_dtype(dtype) is not None,
        "no values: it is a NetCDF dimension without a variable; give a variable": NO_VARIABLE
        in str(dataset.attrs.get("NAME")),
        "references, as cells of MATLAB are; store the values that they refer to end to end, and their lengths in "
        "another dataset: Field(…, lengths=NAME)": h5py.check_ref_dtype(dtype) is not None,
        "compound values; name one of their members: "
        + ", ".join(f"{context['dataset']}.{each}" for each in members(dtype)): dtype.names is not None,
    }
    for reason, applies in refusals.items():
        if applies:
            raise FormatError(f"holds {reason}", **context)
    if member and dtype.subdtype:
        kind, dtype = kind.get_super(), dtype.base
    wide = {"f": "float64", "c": "complex128"}.get(dtype.kind, "")  # the type that long doubles are cast to
    if ((dtype.kind, dtype.itemsize) not in TENSOR_TYPES and not (wide and cast)) or dtype.subdtype:
        cure = f"store it as another type{wide and f', or give dtype={wide!r}'}"
        raise FormatError(f"holds {dtype}, which no tensor can hold; {cure}", **context)
    if member and not chunks.as_numpy(kind, dtype):
        raise FormatError(f"holds numbers with unusual bits in compound values; store it as {dtype}", **context)


def _check_in_heap(dataset: h5py.Dataset, context: dict[str, Any]) -> None:
    shape = dataset.shape
    if len(shape or ()) != 1 and not (shape and dataset.dtype.kind in "iuf" and math.prod(shape) <= max(shape)):
        raise FormatError(f"holds text or sequences on {dataset.ndim} axes; store them on one", **context)


def _check_images(dataset: h5py.Dataset, context: dict[str, Any]) -> None:
    dtype = dataset.dtype
    plain = dtype.kind in "SV" and dtype.names is None and not dtype.subdtype
    variable = h5py.check_vlen_dtype(dtype) in (np.uint8, np.int8) or h5py.check_string_dtype(dtype) is not None
    single = dtype in (np.uint8, np.int8)
    if dataset.ndim != 1 + single or not (plain or variable or single):
        what = f"holds {dtype} of shape {dataset.shape}, not encoded images: these are bytes, opaque values or uint8"
        raise FormatError(f"{what}, of one length or of variable length; leave out decode, or store them so", **context)


def image_format(dataset: h5py.Dataset) -> str:
    """The format of encoded images, by the first bytes of the first rows; empty if a dataset holds no images."""
    shape, single = dataset.shape, dataset.dtype == np.uint8
    if shape is None or 0 in shape or len(shape) > 1 + single or dataset.dtype.kind not in "SVOu":
        return ""
    for row in range(min(math.prod(shape[:1]), FIRST_SAMPLES)):
        with contextlib.suppress(*LIBRARY_ERRORS):  # a filter is missing, or the file is damaged
            data: Any = dataset[:HEAD_BYTES] if single and len(shape) == 1 else dataset[row] if shape else dataset[()]
            data = np.asarray(data).tobytes()
            # A BMP begins with two letters, as text may.
            if found := next((each.name for each in FORMATS if each.name != "BMP" and each.magic.match(data)), ""):
                return found
    return ""


def _place(
    dataset: h5py.Dataset, group: OpenGroup, context: dict[str, Any], external: ExternalFiles
) -> tuple[int | None, chunks.ChunkIndex | None, str | None]:
    """The offset of contiguous values, or the index of chunks, or the reason why h5py must read the values."""
    if external:
        return None, None, "other files hold its values"
    offset, head = dataset.id.get_offset(), group.file.userblock_size
    offset = None if offset == head - 1 else offset  # if no value was ever written
    if offset is not None and dataset.chunks is None and chunks.in_one_file(dataset):
        if offset <= head:  # h5py would return the head as values
            what = f"its values begin at byte {offset}, in the head of the file, which is damaged; restore the file"
            raise CorruptError(what, **context)
        if chunks.has_numpy_layout(dataset) and (dataset.dtype.str in group.verified or _is_verified(dataset, offset)):
            group.verified.add(dataset.dtype.str)
            return int(offset), None, None
    reason = chunks.unsupported_reason(dataset)
    index = None if reason else chunks.index_of(dataset, group.cache)
    if index is not None:
        return None, index, None
    chunks.check_unindexed(dataset)
    check_filters(dataset, context["file"], context["dataset"])
    return None, None, reason or "its chunks do not match its index"


def _is_verified(dataset: h5py.Dataset, offset: int) -> bool:
    """Whether the first and the last contiguous values are the same when read by their offset and by h5py."""
    if dataset.dtype.kind in "SVO" and dataset.dtype.names is None:
        return True  # encoded images, which h5py may end at a zero
    record, size = chunks.stored_type(dataset, dataset.id.get_type())
    values = min(dataset.shape[-1], PROBED_VALUES)
    last = offset + (math.prod(dataset.shape) - values) * size
    ends = ((0, slice(0, values), offset), (-1, slice(dataset.shape[-1] - values, None), last))
    for corner, span, at in ends:
        line = retry_once(functools.partial(dataset.__getitem__, (*(corner,) * (dataset.ndim - 1), span)))
        found = np.frombuffer(bytes_at(dataset.file, values * size, at), record)
        line = line.astype(dataset.dtype, copy=False)
        for path in members(record).values():
            if member_of(found, path).tobytes() != member_of(line, path).tobytes():
                return False
    return True
