"""Samples of variable length and encoded images, as programs store them (encodings 0.1.0 to 0.2.0 of AnnData)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Bytes, FieldSpec
from lit_async_data.errors import ConfigError, CorruptError, FormatError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import columns_of, first_good
from lit_async_data.sources.hdf5.index.index import ChunkIndex, IndexKey
from lit_async_data.sources.hdf5.schema.field import BOUNDS, Field
from lit_async_data.sources.hdf5.schema.inspect import Located, OpenGroup, StoredDataset, member_of
from lit_async_data.sources.hdf5.select import Episodes, Select
from lit_async_data.sources.hdf5.storage import failures
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, NoSamplesError, context_of, h5py
from lit_async_data.sources.hdf5.storage.handles import bytes_at, path_of
from lit_async_data.sources.hdf5.storage.open_file import GlobalHeap, refuse_external_link
from lit_async_data.sources.images.image import ImageDecoder
from lit_async_data.sources.local_files import natural
from lit_async_data.sources.table.labels import INEXACT

SPARSE = ("data", "indices", "indptr")
VARIABLE = ("values", "offsets")
TEXT = np.dtype(np.uint8)  # text is delivered as its bytes
# Attributes that name the columns of a dataset.
_COLUMNS = re.compile(r"(\w+_)?(columns?|names?|keys|channels|features|variables)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredRanges(Located):
    """A field whose samples are ranges of stored elements, in the order of the samples."""

    path: str
    name: str
    offsets: Indices  # the first element of each sample, and the end of the last; int64, shape (rows + 1,)
    values: StoredDataset
    columns: StoredDataset | None  # the column of each element of a sparse matrix; None for samples of variable length
    spec: FieldSpec  # the field as delivered, padded or filled with zeros

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def lengths(self) -> Indices:
        return np.diff(self.offsets)

    def places(self, rows: Indices) -> Select:
        begins = self.offsets[rows]
        return Select(begins, self.offsets[rows + 1] - begins)


def encoding(group: h5py.Group) -> str:
    """The kind of a group that stands for a dataset: csr, csc, variable, categorical or nullable; empty for others."""
    kind = group.attrs.get("encoding-type", group.attrs.get("h5sparse_format", ""))
    kind = str(kind.decode() if isinstance(kind, bytes) else kind).removesuffix("_matrix")
    if kind in ("csr", "csc", "categorical"):
        return kind
    if kind in ("nullable-integer", "nullable-boolean", "nullable-string-array"):
        return "nullable"
    known = (("variable", VARIABLE), ("csr", SPARSE))  # looked up without following links
    return next((kind for kind, names in known if all(group.get(each, getlink=True) for each in names)), "")


def sparse_shape(group: h5py.Group) -> tuple[int, ...]:
    """The numbers of rows and columns. 10x Genomics stores cells as columns, by columns: here, these are rows."""
    refuse_external_link(group.file, f"{group.name}/shape")
    places: Any = ((group.attrs, "shape"), (group.attrs, "h5sparse_shape"), (group, "shape"))
    shape = np.ravel(next((place[name] for place, name in places if name in place), ()))
    return tuple(int(n) for n in (shape[::-1] if "barcodes" in group else shape))


def inspect_sparse(group: OpenGroup, name: str, kind: str) -> StoredRanges:
    node: Any = group.file[name]
    context, shape, bounds = context_of(group.path, name), sparse_shape(node), f"{name.rstrip('/')}/{SPARSE[2]}"
    if len(shape) != 2 or min(shape) < 1:
        error = NoSamplesError if shape[:1] == (0,) else FormatError
        what = f"of shape {shape}, which holds no samples; leave it out" if shape else "without shape; give it one"
        raise error(f"is a sparse matrix {what}", **context)
    numbers = _integers(group, bounds)
    said = any(each in node.attrs for each in ("encoding-type", "h5sparse_format")) or "barcodes" in node
    if kind == "csc" or (not said and len(numbers) == shape[1] + 1):
        what = "is stored by columns (csc)" if said else "does not say by encoding-type = 'csr_matrix' that it is csr"
        what += ", so that each row is spread over the file" * said
        raise FormatError(f"{what}; store it by rows: adata.X = adata.X.tocsr(); adata.write('x.h5ad')", **context)
    with _some_values(shape[0], context):
        values, columns = (group.inspect_dataset(f"{name.rstrip('/')}/{part}") for part in SPARSE[:2])
    if len(numbers) != shape[0] + 1:
        raise FormatError(f"has {len(numbers)} values, not {shape[0] + 1}", **context_of(group.path, bounds))
    offsets = _offsets(group.path, bounds, "offsets", numbers, values.rows)
    if len(values.shape) != 1 or columns.shape != values.shape or columns.dtype.kind not in "iu":
        what = f"has data of shape {values.shape} and indices of shape {columns.shape}, {columns.dtype}"
        raise FormatError(f"{what}; a sparse matrix must have one integer index for each value", **context)
    spec = FieldSpec((shape[1],), values.dtype.newbyteorder("="), columns=named_columns(group, name, shape[1:]))
    return StoredRanges(group.path, name, offsets, values, columns, spec)


def named_columns(group: OpenGroup, name: str, row: Sequence[int], column: int | None = None) -> str:
    """The columns of a matrix, or one, by its format; or by attributes, where only another order is refused."""
    with contextlib.suppress(*LIBRARY_ERRORS, ValueError, SourceError):  # of objects that nobody reads
        if names := _format_names(group, name, row[-1:]):
            return columns_of(names if column is None else names[column : column + 1], first=column or 0)
        for names in _attribute_names(group, name, row[-1:], _COLUMNS):
            if len({*names}) == len(names):
                order = names if column is None else [names[column], *sorted({*names} - {names[column]})]
                return columns_of(order, first=column or 0, reordered=True)
    return ""


def column_numbers(group: OpenGroup, name: str, row: Sequence[int], column: str) -> tuple[list[int], list[str]]:
    """The places of a column by name, and the names there are."""
    known = list[str]()
    with contextlib.suppress(*LIBRARY_ERRORS, ValueError, SourceError):
        every = [_format_names(group, name, row[-1:]), *_attribute_names(group, name, row[-1:])]
        known = next((names for names in every if column in names), next(filter(None, every), known))
    return [place for place, each in enumerate(known) if each == column], known


def _format_names(group: OpenGroup, name: str, row: Sequence[int]) -> list[str]:
    """By AnnData's ``var``, 10x's features, pandas's items, or text axes of NetCDF."""
    node, full = group.node(name), f"/{name.strip('/')}"
    var = f"{full.rpartition('/')[0].removesuffix('/layers')}/var"
    index = getattr(group.node(var), "attrs", {}).get("_index") if row else None
    places = [f"{var}/{index}", f"{var}/{index}/values"] * bool(index) + [f"{full}/features/id"] * hasattr(node, "keys")
    places += [full.removesuffix("_values") + "_items"] * full.endswith("_values")
    scales = [*node.dims][1:][-1:] if isinstance(node, h5py.Dataset) and "DIMENSION_LIST" in node.attrs else ()
    for each in [*map(group.node, places), *(axis[0] for axis in scales if len(axis))]:
        if getattr(each, "shape", None) in [(n,) for n in row] and h5py.check_string_dtype(each.dtype):
            return list(each.asstr(errors="replace")[...].tolist())
    return []


def _attribute_names(
    group: OpenGroup, name: str, row: Sequence[int], named: re.Pattern[str] = re.compile(".*", re.DOTALL)
) -> Iterator[list[str]]:
    """The attributes of a dataset that hold a text for each of its columns."""
    node = group.node(name)
    for key in node.attrs if row and len(getattr(node, "attrs", ())) else ():
        texts: Any = np.zeros(())
        with contextlib.suppress(*LIBRARY_ERRORS, ValueError):  # of types that nobody reads
            texts = np.asarray(node.attrs[key]) if named.fullmatch(key) else texts
        if texts.shape == (*row,) and texts.dtype.kind in "SO" and isinstance(texts[0], str | bytes):
            yield [t.decode(errors="replace") if isinstance(t, bytes) else t for t in texts.tolist()]


class Delimited(NamedTuple):
    name: str  # the name in messages that count samples; rows of the values are no samples
    values: str  # the dataset of samples of variable length, end to end
    bounds: str  # the dataset of their boundaries
    rule: str  # the meaning of the boundaries: one of `BOUNDS`


def delimited(group: OpenGroup, field: Field) -> Delimited | None:
    """How a field is divided into samples of variable length, by the user or the file; None if it is not."""
    name = group.name(field.dataset)
    for rule, bounds in ((rule, getattr(field, rule)) for rule in BOUNDS):
        if isinstance(bounds, str):
            return Delimited(group.name(bounds), name, group.name(bounds), rule)
    node = group.node(name)
    if isinstance(node, h5py.Group):
        values, bounds = (f"{name.rstrip('/')}/{part}" for part in VARIABLE)
        return Delimited(name, values, bounds, "offsets") if encoding(node) == "variable" else None
    if not isinstance(node, h5py.Dataset) or not len(node.attrs) or "neurodata_type" not in node.attrs:
        return None
    index: Any = node if _is_index(node) else group.node(f"{name}_index")
    if not _is_index(index):
        return None
    target: Any = index.file[index.attrs["target"]]
    if _is_index(target):
        raise FormatError(f"is an index of the index {target.name}; name that", **context_of(group.path, name))
    return Delimited(index.name, target.name, index.name, "ends")


def _is_index(node: Any) -> bool:  # of NWB's tables
    return isinstance(node, h5py.Dataset) and node.attrs.get("neurodata_type") in ("VectorIndex", b"VectorIndex")


def inspect_variable(group: OpenGroup, given: Delimited, *, most: int | None, cast: bool = False) -> StoredRanges:
    numbers = _integers(group, given.bounds)
    rows = len(numbers) - (given.rule == "offsets")
    with _some_values(rows, context_of(group.path, given.name)):
        values = group.inspect_dataset(*group.split(given.values), cast=cast)
    if rows < 1:
        raise FormatError(f"has {len(numbers)} values, which bound no sample", **context_of(group.path, given.bounds))
    offsets = _offsets(group.path, given.bounds, given.rule, numbers, values.rows)
    element = values.member or values
    row = FieldSpec(element.spec.stored_shape, element.dtype.newbyteorder("="))
    found = StoredRanges(group.path, given.name, offsets, values, None, row)
    return dataclasses.replace(found, spec=padded_spec(found.lengths, most, row, found))


def padded_spec(lengths: Indices, most: int | None, row: FieldSpec, stored: Located) -> FieldSpec:
    longest = int(lengths.max())
    if most is not None and longest > most:
        place = int((lengths > most).argmax())
        what = f"has {lengths[place]} values, more than max_length {most}; the longest has {longest}"
        raise stored.error(FormatError, f"{what}: raise max_length to that", place)
    return dataclasses.replace(row, shape=(max(most or longest, 1), *row.shape), ragged=most is None)


@contextlib.contextmanager
def _some_values(rows: int, context: dict[str, Any], what: str = "value for {} rows; leave it out") -> Iterator[None]:
    """Turn the error for a dataset without values into another one if there are samples: zeros, or of length 0."""
    try:
        yield
    except NoSamplesError as error:
        if rows <= 0:
            raise
        raise FormatError(f"holds no {what.format(rows)}", **context) from error


def _integers(group: OpenGroup, name: str) -> Indices:
    own = context_of(group.path, name)
    dataset, member = group.whole_member(f"/{name.strip('/')}", "")
    values = member_of(dataset[...], member)
    if not values.size:
        raise NoSamplesError(f"has shape {values.shape}, so it holds no samples; leave it out, or write them", **own)
    values = whole_numbers(values)
    if values.size != max(values.shape, default=0) or values.dtype.kind not in "iu":
        raise FormatError("has not one axis of integers; write it so", **own)
    return values.ravel().astype(np.int64)


def whole_numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Whole numbers as int64, also of floats, as MATLAB stores them."""
    whole = values.dtype.kind in "uf" and (np.abs(values) < INEXACT).all() and (values % 1 == 0).all()
    return values.astype(np.int64) if whole else values


def _offsets(path: str, name: str, rule: str, numbers: Indices, elements: int) -> Indices:
    """The begin of each sample and the end of the last; checked, since wrong ones would raise no error later."""
    ends = np.append(0, np.cumsum(numbers) if rule == "lengths" else numbers)
    offsets: Indices = {"offsets": ends[1:], "starts": np.append(numbers, elements)}.get(rule, ends)
    wrong = np.zeros(len(offsets) - 1, np.bool_)
    wrong[0] |= offsets[0] != 0
    wrong[-1] |= rule == "offsets" and offsets[-1] != elements
    must = {
        "offsets": f"begin with 0, never fall and end with {elements}",
        "starts": "begin with 0 and never fall",
        "ends": f"never fall, nor exceed {elements}",
        "lengths": f"not be negative, nor exceed {elements} together",
    }
    bounds = Episodes(offsets[:-1], offsets[1:])
    _check_bounds(path, name, bounds, elements, must=f"{rule} must {must[rule]}", wrong=wrong)
    return offsets


def _check_bounds(path: str, name: str, bounds: Episodes, elements: int, *, must: str, wrong: Any) -> None:
    begins, ends = bounds
    if (wrong := wrong | (begins > ends) | (ends > elements)).any():
        row = int(wrong.argmax())
        what = f"{begins[row]} to {ends[row]} of {elements} elements; {must}; restore or correct the file"
        raise CorruptError(what, **context_of(path, name, row))


def episodes_of(group: OpenGroup, given: Any, rows: int) -> tuple[Episodes, npt.NDArray[Any] | None]:
    """The episodes of a part, by an id or flags of ends for each row, or by their bounds; and their ids, if given."""
    rules, steps = dict(given) if isinstance(given, Mapping) else {"ids": given}, group.steps
    begins = np.arange(0, rows, steps.length if steps else rows)
    if rules.pop("axis", None) is not None and steps and not rules:
        return Episodes(begins, begins + steps.length), None
    rule = "starts" if {*rules} == {"starts", "lengths"} else next(iter(rules)) if len(rules) == 1 else ""
    names = {each: [of] if isinstance(of, str) else of for each, of in rules.items()}
    listed = all(isinstance(of, Sequence) and of and (each == "flags" or len(of) == 1) for each, of in names.items())
    named = listed and all(isinstance(name, str) and name.strip("/") for of in names.values() for name in of)
    if rule not in ("ids", "flags", *BOUNDS) or not named or (steps and [*rules] != ["lengths"]):
        ways = "{'flags': NAME}, {'ends': NAME}, {'lengths': NAME}, {'starts': NAME, 'lengths': NAME} or {'axis': 0}"
        raise ConfigError(f"{given!r} is neither the name of a dataset with an id for each row, nor {ways}", "episodes")
    name = group.name(names[rule][0])
    if rule in BOUNDS:
        what = "episode for {} rows; write their bounds, or leave the file out"
        with _some_values(rows, context_of(group.path, name), what):
            found = {each: _integers(group, group.name(of)) for each, [of] in names.items()}
        found |= {"starts": begins} if steps else {}
        if len(found) == 1:
            offsets = _offsets(group.path, name, rule, found[rule], rows)
            return Episodes(offsets[:-1], offsets[1:]), None
        starts, lengths = found["starts"], found["lengths"]
        if len(starts) != len(lengths):
            what = f"holds {len(starts)} starts for {len(lengths)} lengths; each episode needs both"
            raise CorruptError(what, **context_of(group.path, name))
        episodes, must = Episodes(starts, starts + lengths), "each must begin behind the one before it, none end beyond"
        wrong = starts < np.append(0, episodes.ends[:-1])
        _check_bounds(group.path, name, episodes, rows, must=must, wrong=wrong)
        return episodes, None
    cure = "; bounds of episodes are episodes={'ends': NAME} or 'lengths'"
    values = [one_of_each(group, each, rows, "episodes: ", cure) for each in names[rule]]
    for each, own in zip(names[rule], values, strict=True):
        if (wrong := np.not_equal(own, own)).any():  # NaN
            what = f"is {own[wrong][0]}, no {rule.removesuffix('s')}; correct the file"
            raise FormatError(what, **context_of(group.path, group.name(each), int(wrong.argmax())))
    if rule == "ids" and values[0].dtype.kind == "b":
        raise ConfigError(f"{names[rule][0]} holds flags, not ids; write {{'flags': NAME}}", "episodes")
    changes = values[0][1:] != values[0][:-1] if rule == "ids" else np.any(values, axis=0)[:-1]
    edges = np.concatenate([[0], np.flatnonzero(changes) + 1, [rows]])
    own = whole_numbers(values[0][edges[:-1]])
    again = np.delete(edges[:-1], np.unique(own, return_index=True)[1])
    if rule == "ids" and again.size:
        what = f"{values[0][again].tolist()[0]!r} begins an episode again; give each episode an id of its own, or if "
        what += "the values mark ends of episodes, write episodes={'flags': NAME}"
        raise FormatError(what, **context_of(group.path, name, int(again[0])))
    texts = (each.decode(errors="surrogateescape") if isinstance(each, bytes) else each for each in own.tolist())
    return Episodes(edges[:-1], edges[1:]), np.array([*texts]) if rule == "ids" else None


def times_of(group: OpenGroup, episodes: Episodes | None, name: str, rows: int) -> npt.NDArray[np.floating[Any]]:
    """The times of rows, which rise within each episode. Sources keep them in memory."""
    cure = "; if these are times of other rows, the field whose rows are the samples needs time= too"
    times = one_of_each(group, name, rows, "time: ", cure)
    context = context_of(group.path, group.name(name))
    if times.dtype.kind not in "iuf":
        raise FormatError(f"holds {times.dtype}, not seconds", **context)
    if times.dtype.kind == "f" and rows > 1:
        resolution, steps = np.spacing(np.abs(times).max()), np.diff(times)
        later = steps[steps > 0] if (steps > 0).any() else np.array([0.001])  # if all are equal, a coarse clock is why
        if 4 * resolution > later[later <= 2 * np.median(later)].mean(dtype=np.float64):  # beyond the slack of a window
            what = f"{times.dtype} rounds times near {times[-1]:.10g} s to {resolution:.3g} s, too coarse to tell rows"
            raise FormatError(f"{what} apart; write float64, or seconds since the first row", **context)
    rises = times[1:] > times[:-1]
    if episodes:
        rises |= np.diff(episodes.number(np.arange(rows))) > 0
    if (wrong := np.append(False, ~rises) | ~np.isfinite(times)).any():
        row = int(wrong.argmax())
        what = f"{times[row]} s" + f" comes after {times[row - 1]} s" * (row > 0)
        cure = "times must rise, at least within an episode: correct the file"
        cure += ", or if they begin again in each episode, write episodes=" * (episodes is None)
        raise FormatError(f"{what}; {cure}", **context_of(group.path, group.name(name), row))
    return times if times.dtype.kind == "f" else times.astype(np.float64)


def one_of_each(group: OpenGroup, name: str, rows: int, where: str = "", cure: str = "") -> npt.NDArray[Any]:
    """A dataset with one value for each row, also as MATLAB stores vectors, or for each step of every episode."""
    dataset, member = group.whole_member(name, where)
    if group.steps and dataset.shape in (group.steps.shape, (group.steps.length,)):
        return group.steps.flat(member_of(dataset[...], member))
    if dataset.shape not in ((rows,), (1, rows), (rows, 1)):
        what = f"has shape {dataset.shape}; it must have one value for each of the {rows} rows{cure}"
        raise FormatError(what, **context_of(group.path, group.name(name)))
    return np.asarray(member_of(dataset[...].reshape(-1), member))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredSequences:
    """Samples of variable length: sequences in the global heap, or a dataset for each sample."""

    # The references to sequences; or all datasets as one, as long as the longest, whose index has the chunks of all.
    values: StoredDataset
    heap: GlobalHeap | None  # None for datasets
    # As `GlobalHeap.references` returns them; for a dataset, its bytes, its first chunk, and the end of its chunks.
    references: Indices  # int64, shape (rows, 3)
    dtype: np.dtype[Any]  # of the elements, as stored
    spec: FieldSpec  # the field, padded
    chunks: npt.NDArray[Any] | None = None  # the shape of the chunks of each dataset; shape (rows, axes)
    # Rows with a dangling reference. They have the length of another row.
    lost: Indices = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    @functools.cached_property
    def lengths(self) -> Indices:
        return np.asarray(self.references[:, 0] // (self.dtype.itemsize * math.prod(self.spec.shape[1:])))


def element_type(dataset: h5py.Dataset, field: Field) -> np.dtype[Any] | None:
    """The type of the elements of sequences; None for other datasets. Text is a sequence if its bytes are wanted."""
    try:
        dtype = dataset.dtype
    except failures.LIBRARY_ERRORS:  # `inspect_dataset` refuses a type that numpy lacks
        return None
    if dtype.kind == "O" and h5py.check_string_dtype(dtype) is not None:
        return TEXT if field.dtype == TEXT and not (field.classes or field.kind) else None
    within = h5py.check_vlen_dtype(dtype)
    return within if within is not None and field.takes(within) else None


def inspect_sequences(group: OpenGroup, name: str, dtype: np.dtype[Any], most: int | None) -> StoredSequences:
    """Sequences in the global heap, with the place of each. They are padded to ``most`` elements, or the longest."""
    stored = group.inspect_dataset(name, holds="heap")
    dataset: Any = group.file[name]
    if stored.offset is None and stored.index is None:
        why = stored.slow if stored.external or dataset.chunks else "none was ever written"
        cure = "write them into another file, or as a group of values and offsets"
        raise stored.error(FormatError, f"holds values of variable length that cannot be read, since {why}; {cure}")
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
    """The references of a dataset. References in many chunks are cached for the next opening."""
    key = dataclasses.replace(IndexKey.of(dataset), name=f"{dataset.name} references")
    found = group.cache.load(key) if dataset.chunks else None
    if found is None:
        found = {"references": heap.references(_stored_references(stored, dataset.file)).ravel()}
        if dataset.chunks:
            group.cache.store(key, found)
    return found["references"].reshape(-1, 3)


def _stored_references(stored: StoredDataset, file: h5py.File) -> Bytes:
    """The references as bytes, shape (rows, bytes). They are read without libhdf5, which would follow them."""
    index = stored.index
    if stored.offset is not None:
        return np.frombuffer(bytes_at(file, stored.nbytes, stored.offset), np.uint8).reshape(stored.shape)
    assert index is not None
    chunks = np.zeros((len(index.offsets), math.prod(index.shape)), np.uint8)
    for number in np.flatnonzero(index.offsets >= 0).tolist():
        data = bytes_at(file, int(index.sizes[number]), int(index.offsets[number]))
        try:
            decoded = index.filters.decode(np.frombuffer(data, np.uint8), int(index.masks[number]))
        except CorruptError as error:
            raise stored.error(CorruptError, f"{error}; restore the file", number * index.shape[0]) from error
        chunks[number] = decoded.view(np.uint8).ravel()
    return chunks.reshape(-1, stored.shape[1])[: stored.rows]


NO_IMAGE = "does not hold one image in this file, as uint8 on one axis or as one value of bytes"


@dataclasses.dataclass(frozen=True, eq=False)
class StoredImages:
    # The bytes of images, or references to these; or a chunk for each dataset, at offset −1 if h5py must read it.
    values: StoredDataset
    decoder: ImageDecoder
    swapped: bool  # whether red and blue change places
    heap: GlobalHeap | None = None  # None if rows hold the bytes, or h5py must read them
    alone: bool = True  # whether images are read one by one
    # The place of each image, if images lie end to end. None: a row ends with its image, or with zeros behind it.
    ranges: StoredRanges | None = None


def inspect_images(group: OpenGroup, field: Field) -> StoredImages:
    name, heap, ranges = group.name(field.dataset), None, None
    node: Any = group.node(name)
    if (parts := delimited(group, field)) is not None:
        ranges = inspect_variable(group, parts, most=None)
        values, begins, sizes = ranges.values, ranges.offsets[:-1], ranges.lengths.astype(np.uint32)
        if values.dtype != np.uint8 or len(values.shape) > 1:
            what = f"holds {values.dtype} {values.shape}, not the bytes of images as uint8 on one axis; write them so"
            raise values.error(FormatError, what)
        alone, node = values.offset is not None, group.file[values.name]
        places = np.full(len(sizes), -1) if values.offset is None else values.offset + begins
        stored = datasets_as_rows(group.path, parts.name, places, sizes, slow=values.slow, external=values.external)
    elif isinstance(node, h5py.Group):
        stored, alone = _inspect_group(group, name), True
    else:
        stored, alone, node = group.inspect_dataset(name, holds="images"), False, group.file[name]
        if node.dtype.kind == "O":
            alone = stored.offset is None and stored.index is None
            heap = None if alone else GlobalHeap.of(node.file)
            stored = dataclasses.replace(stored, chunk_rows=1, filtered=False)  # references are small

    def bytes_of(row: int, node: Any = node) -> bytes:
        begin, size = -1, stored.shape[1]
        if stored.index is not None and (stored.names is not None or ranges):
            begin, size = int(stored.index.offsets[row]), int(stored.index.sizes[row])
        elif stored.offset is not None and node.dtype.kind != "O":
            begin = stored.offset + row * size
        if begin >= 0:  # not by h5py, which cuts text at a zero
            return bytes_at(node.file, size, begin)
        if stored.names is not None:
            return np.asarray(node.file[stored.dataset(row)][()]).tobytes()
        data = np.asarray(node[slice(*ranges.offsets[row : row + 2]) if ranges else row]).tobytes()
        return data.ljust(size, b"\0") if node.dtype.kind == "S" else data  # numpy cuts text at zeros

    return dataclasses.replace(images_of(field, stored, bytes_of), heap=heap, alone=alone, ranges=ranges)


def images_of(field: Field, stored: StoredDataset, bytes_of: Callable[[int], bytes]) -> StoredImages:
    """Images that are read one by one, with a decoder for the size of the first good image."""

    def attempt(row: int) -> ImageDecoder:
        where = stored.at(row)
        try:
            with failures.as_source_errors(where, "cannot be read", file=stored.path):
                return ImageDecoder.of(field.image, b"" if field.image.image_size else bytes_of(row), where)
        except SourceError as error:
            raise of_row(error, stored, row) from error.__cause__

    of_all = "; the first good image gives the size of all, unless image_size=(height, width) gives it"
    return StoredImages(stored, first_good(stored.rows, attempt, of_all), field.channels == "BGR")


def of_row(error: SourceError, stored: StoredDataset, row: int) -> SourceError:
    return type(error)(str(error), file=stored.path, dataset=stored.dataset(row), row=row)


def _inspect_group(group: OpenGroup, name: str) -> StoredDataset:
    node: Any = group.file[name]
    names, context = sorted(node, key=natural), context_of(group.path, name)
    if not names:
        raise NoSamplesError("holds no images; leave it out", **context)
    if node.file != group.file:
        raise FormatError(f"is in {path_of(node.file)}; give that file as path", **context)
    found = {each: place_of_image(group, node.id, name, each) for each in names}
    for each in (each for each, place in found.items() if place is None):
        context["place"] += f"/{each}"
        raise FormatError(f"{NO_IMAGE}; move it to another group", **context)
    places = np.array([*found.values()], np.int64)
    own = np.array([each.encode(errors="surrogateescape") for each in names])
    return datasets_as_rows(group.path, f"{name}/*", places[:, 0], places[:, 1].astype(np.uint32), names=own)


def datasets_as_rows(path: str, name: str, offsets: Indices, sizes: npt.NDArray[Any], **more: Any) -> StoredDataset:
    """Datasets of bytes at places in a file as chunks of one dataset."""
    count, most = len(offsets), max(int(sizes.max()), 1)
    index = ChunkIndex((1, most), (count, 1), offsets, sizes, np.zeros_like(sizes), FilterPipeline((), most), 0)
    spec = FieldSpec((most,), np.dtype(np.uint8))
    return StoredDataset(path, name, (count, most), spec.dtype, 0, spec, index=index, **more)


def place_of_image(group: OpenGroup, within: Any, name: str, each: str) -> tuple[int, int] | None:
    """Offset (−1 if h5py must read it) and size of an image; None if a dataset cannot hold one. Fast, by handles."""
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
