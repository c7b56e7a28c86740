"""Describes HDF5 files: their datasets, how a source reads each, and groups of equal structure; prints the report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import glob
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import digits
from typing import Any

import h5py
import numpy as np

from lit_async_data.engine.resources import readable
from lit_async_data.errors import AsyncDataError, FormatError, counted
from lit_async_data.sources.contract.checks import first_good
from lit_async_data.sources.contract.source import HOW_READ, Reading, Source
from lit_async_data.sources.contract.user_code import probes
from lit_async_data.sources.hdf5.parts.stored_field import inspect_field
from lit_async_data.sources.hdf5.readers.part_reader import choice
from lit_async_data.sources.hdf5.schema.categories import find_coded
from lit_async_data.sources.hdf5.schema.encoded import SPARSE, VARIABLE, StoredRanges, encoding, sparse_shape
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, image_format, member_of, members
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, as_source_errors
from lit_async_data.sources.hdf5.storage.open_file import refuse_external_link
from lit_async_data.sources.local_files import has_word
from lit_async_data.tools.call import Call
from lit_async_data.tools.terminal import indented, section, shapes, shortened, table

common_start = os.path.commonprefix  # of texts, letter by letter
VERSION = 3  # raised if a key of the JSON changes its meaning or goes
# Words in names of training, and of stages that are sources of their own.
TRAINING, HELD_OUT = "train|training", "val|valid|validation|dev|test|testing"
PLAIN = ("", "member")  # kinds of datasets that hold values as they are
SPACE = "lat|latitude|lon|longitude|x|y|z|level|c|channels?"  # axes along which there are no samples
_OWN_GROUPS = ("#refs#", "#subsystem#", "_i_")  # of MATLAB and PyTables, without data of the user
_METADATA = {"kind": "metadata"}
# By members or attributes of a group: Keras; Loom, whose columns are cells; Imaris; SLEAP, with frames last; AnnData.
_FORMATS: dict[str, dict[str, dict[str, Any]]] = {
    "weight_names": {".*": _METADATA},
    "matrix col_attrs": {"matrix|layers/.*": {"samples": 1}, "(row_attrs|row_graphs|col_graphs)/.*": _METADATA},
    "DataSet DataSetInfo": {"DataSet/ResolutionLevel [1-9].*|Thumbnail/.*": _METADATA},
    "tracks node_names": {"tracks|.*_scores": {"samples": -1}, "edge_inds": _METADATA},
    "var obs": {"(var|varm|varp|obsp|uns)([./].*)?|.*/__categories/.*": _METADATA},
}
_OWN_ATTRIBUTES = "CLASS|NAME|DIMENSION_L.*|REFERENCE_LIST|_.*|encoding-.*"  # of h5py, NetCDF and AnnData
_PEOPLE = re.compile("(?i)(patient|subject|participant|donor|animal|speaker)s?_?(ids?|names?|numbers?|index)?")
_IDS = ("text", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
WIDTH = 24  # letters of the value of an attribute
# At most this many members of a group are listed; at most this many datasets whose names differ in a number stay apart.
MOST_MEMBERS, MOST_ALONE = 20_000, 8


@dataclasses.dataclass
class Dataset:
    """A dataset, a group that is read as one, or several alike; docs/tools/inspect.md describes attributes to `why`."""

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
    kind: str = ""  # of a group, as of `encoding`; else "images", "member", "metadata"; empty for plain values
    axis: str = ""  # the name of its first axis
    samples: int | None = None  # the axis that counts samples, where its format says so
    across: bool = False  # groups have it as (channels, time), of different times; then `rows` are these
    attributes: tuple[str, ...] = ()
    field: str = ""  # its name in its group
    dtype: np.dtype[Any] = dataclasses.field(default_factory=lambda: np.dtype(object))  # as read
    decoding: dict[str, Any] = dataclasses.field(default_factory=dict)  # the options of a field that decodes its images
    each: str = ""  # if it stands for datasets that may be samples: their name with a ``*``
    first: str = ""  # of datasets of several sizes, the name of one

    def __post_init__(self) -> None:
        self.field, self.rows = self.field or self.name, self.rows or (self.shape[:1] * 2 or None)

    @property
    def structure(self) -> tuple[object, ...]:  # equal in datasets that are alike, whatever their lengths
        sides = self.shape[1:] if len(self.shape) < 3 else ()  # volumes may have different sizes
        return self.kind, self.type if not self.one_image else "", len(self.shape), sides

    @property
    def varies(self) -> bool:  # the datasets that it stands for have different lengths
        return self.rows is not None and self.rows[0] < self.rows[1]

    @property
    def one_image(self) -> bool:  # it is the bytes of an encoded image
        return self.kind == "images" and not self.each and (not self.shape or self.shape == (self.bytes,))

    @property
    def flat(self) -> bool:  # it has one value for each row
        return math.prod(self.shape) <= max(self.shape, default=1)


SHOWN = [field.name for field in dataclasses.fields(Dataset)][:11]


def datasets_of(group: Any, seen: set[h5py.Group], path: str = "") -> Iterator[Dataset]:
    """The datasets below a group. Skips groups in ``seen``, to which several links may lead."""
    seen.add(group)
    if "pandas_type" in group.attrs:
        why = f"pandas wrote it: ManifestSource takes the DataFrame pandas.read_hdf({group.file.filename!r}, {path!r})"
        yield Dataset(path, "DataFrame", why=why)
        return
    kind, conventions = encoding(group), _conventions(group, path)
    whole, found, below = [_of_group(group, path or ".", kind)] if kind else [], list[Dataset](), list[Any]()
    for each in itertools.islice(group, MOST_MEMBERS) if kind in ("", "variable", "csr") else ():
        name = f"{path}/{each}" if path else str(each)  # bytes, if it is not UTF-8
        node, own = _member(group, each, name), bool(kind) and each in (*VARIABLE, *SPARSE, "shape")
        if node is None and not own:
            found.append(Dataset(name))
        elif isinstance(node, h5py.Dataset) and not own:
            found += _of_dataset(node, name)
        elif isinstance(node, h5py.Group) and node not in seen and not str(each).startswith(_OWN_GROUPS):
            below.append(datasets_of(node, seen, name))
    for node in itertools.chain(whole, _merged(found, path, len(group)), *below):
        inside = node.name.removeprefix(path).strip("/")
        changes = next((each for pattern, each in conventions.items() if re.fullmatch(pattern, inside)), {})
        yield dataclasses.replace(node, **changes) if changes and node.kind != "metadata" else node


def _conventions(group: Any, path: str) -> Mapping[str, dict[str, Any]]:
    """The roles that a format gives to the datasets below a group, by patterns of their names."""
    nexus, signal, axes = (_texts(group.attrs.get(name, ())) for name in ("NX_class", "signal", "axes"))
    if nexus == ["NXdata"] and signal:
        return {re.escape(signal[0]): {"axis": "".join(axes[:1]).strip(".")}, ".*": _METADATA}
    names = {*map(str, itertools.islice(group, MOST_MEMBERS)), *group.attrs}
    if (nexus and nexus != ["NXdata"]) or (path.endswith("vars") and all(map(str.isdecimal, names))):  # or Keras
        return {"[^/]*": _METADATA}
    return next((found for members, found in _FORMATS.items() if {*members.split()} <= names), {})


def _texts(value: Any) -> list[str]:
    return [t.decode(errors="replace") if isinstance(t, bytes) else str(t) for t in np.ravel(value).tolist()]


def _member(group: Any, each: str, name: str) -> Any:
    """The member; None if it cannot be read: the error of the source then gives the reason."""
    with contextlib.suppress(FormatError, *LIBRARY_ERRORS):
        refuse_external_link(group.file, name)
        return group[each]


def _merged(found: Sequence[Dataset], path: str, members: int) -> Iterator[Dataset]:
    """Yield one `Dataset` for many that differ only in length and in a number in their names, or in their names."""
    alike = collections.defaultdict[object, list[Dataset]](list)
    only = path and len({node.structure for node in found}) == 1
    only = only and (len(found[0].shape) != 1 or len({node.shape for node in found}) > 1)  # else they may be columns
    for node in found:
        alike["" if only else re.sub(r"\d+", "0", node.name), node.structure].append(node)
    for nodes in alike.values():
        # Volumes of several sizes: neither cameras with rows in common, nor the levels of a pyramid.
        lengths, sides = {n.shape[:1] for n in nodes}, {n.shape[1:] for n in nodes}
        volumes = sorted(math.prod(shape) for shape in {n.shape for n in nodes})
        sizes = min(len(lengths), len(sides)) > 1 and any(3 * n > more for n, more in itertools.pairwise(volumes))
        alone = 1 if nodes[0].one_image or (path and sizes) else MOST_ALONE
        if len(nodes) <= alone or nodes[0].kind not in ("", "images"):
            yield from nodes
            continue
        name, count = _name_of([n.name for n in nodes]), members if len(nodes) == MOST_MEMBERS else len(nodes)
        made = dataclasses.replace(nodes[0], name=name, field=name, each=name, groups=count, rows=_lengths(nodes))
        made.type = f"{made.type}, {count:,} datasets{' of several sizes' * sizes}".removeprefix(", ")
        made.first = nodes[0].name * sizes
        made.bytes, made.stored_bytes = sum(n.bytes for n in nodes), sum(n.stored_bytes or 0 for n in nodes)
        if path and nodes[0].one_image and len(nodes) == len(found):  # a group of images is a field of rows
            made.name, made.field, made.shape, made.rows = path, path, (count,), (count, count)
        yield made


def _lengths(nodes: Sequence[Dataset], axis: int = 0) -> tuple[int, int] | None:
    rows = [node.shape[axis] for node in nodes if node.shape]
    return (min(rows), max(rows)) if rows else None


def _name_of(names: Sequence[str]) -> str:
    """The common name, with a ``*`` in place of the part that differs."""
    begin, end = common_start(names), common_start([each[::-1] for each in names])[::-1]
    if len({re.sub(r"\d+", "0", each) for each in names}) > 1:  # more than numbers
        begin, end = begin[: begin.rfind("/") + 1], "." * ("." in end) + end.partition(".")[2]
    return f"{begin.rstrip(digits)}*{end.lstrip(digits)}"


def _of_dataset(dataset: h5py.Dataset, name: str) -> Iterator[Dataset]:
    try:
        dtype, images = dataset.dtype, image_format(dataset)
    except LIBRARY_ERRORS:
        yield Dataset(name, "a type that numpy lacks")
        return
    shape, attributes, properties = tuple(map(int, dataset.shape or ())), dataset.attrs, dataset.id.get_create_plist()
    filters = tuple(
        f"gzip {values[0]}" if number == 1 else known.decode(errors="replace").partition(";")[0] or str(number)
        for number, _, values, known in map(properties.get_filter, range(properties.get_nfilters()))
    )
    for member, path in members(dtype).items():
        inner: Any = member_of(dtype, path)
        element, sides = inner.subdtype or (inner, ())
        made = Dataset(name, f"{images} images" if images else _type_name(element), (*shape, *sides))
        made.chunks, made.filters = dataset.chunks, filters
        made.bytes = math.prod(shape) * inner.itemsize if dataset.shape is not None else 0
        if member:
            yield dataclasses.replace(made, name=f"{name}.{member}", field=f"{name}.{member}", kind="member")
            continue
        made.stored_bytes, made.attributes = int(dataset.id.get_storage_size()), tuple(attributes)
        made.kind = "images" if images else "metadata" if _texts(attributes.get("CLASS")) == ["DIMENSION_SCALE"] else ""
        if shape:
            scales = [str(scale.name).rpartition("/")[2] for scale in dataset.dims[0].values()]
            made.axis = [*scales, str(dataset.dims[0].label)][0]
        yield made


def _of_group(group: h5py.Group, name: str, kind: str) -> Dataset:
    parts = {"categorical": ("codes",), "nullable": ("values",), "variable": VARIABLE}.get(kind, ("data",))
    first, *others = (_member(group, part, f"{name}/{part}") for part in parts)
    if not all(isinstance(node, h5py.Dataset) and node.shape is not None for node in (first, *others)):
        return Dataset(name, kind)
    made = next(_of_dataset(first, name))
    made.type, made.kind = f"{kind}, {made.type}", made.kind or kind
    with contextlib.suppress(FormatError, *LIBRARY_ERRORS):
        made.shape = sparse_shape(group) if kind in ("csr", "csc") else made.shape
    made.shape = (others[0].size - 1, *made.shape[1:]) if others else made.shape
    made.rows = made.shape[:1] * 2
    return made


def _type_name(dtype: np.dtype[Any]) -> str:
    if h5py.check_string_dtype(dtype) is not None or dtype.kind in "SU":
        return "text"
    if (within := h5py.check_vlen_dtype(dtype)) is not None:
        return f"variable length, {within}"
    return str(dtype.newbyteorder("=")) + ("" if dtype.isnative else ", big-endian")


def describe(group: OpenGroup, node: Dataset, options: Mapping[str, Any]) -> None:
    name, given = group.name(node.field), Field(node.field, decode="image" if node.kind == "images" else None)
    try:
        with as_source_errors(f"{group.path}:/{name}", "cannot be read", file=group.path, dataset=name):
            if (node.field == node.each and not node.first) or node.one_image:
                given = dataclasses.replace(given, name=name)
                source = HDF5Source(group.path, {"x": given}, sample="dataset" if node.each else "group", **options)
                with contextlib.closing(source):
                    field, node.reading = source.stored_parts[0].fields["x"], source.chunks.reading
            else:
                field = inspect_field(group, "x", dataclasses.replace(given, name=node.first or given.name), None)["x"]
    except AsyncDataError as error:
        where = f"{error.dataset}: " if error.row is None else f"{error.dataset}, row {error.row}: "
        node.why = node.why or where * (error.dataset not in (name, None)) + error.message
        return
    stored, node.dtype = field.values, field.spec.dtype
    node.decoding = {"decode": "image", "image_size": list(field.spec.shape[1:])} if field.images else {}
    if node.kind != "metadata":
        node.kind = "variable" if field.sequences else node.kind
        node.kind = "categorical" if node.kind in PLAIN and find_coded(group, name).place else node.kind
    way = "chunks" if field.images or field.sequences else choice(stored, mapped=True)
    node.reading = node.reading or ("decoded" if way == "chunks" else "locked" if way.startswith("h5py") else "copied")
    index = stored.index if way == "chunks" else None
    pieces = math.prod(index.grid) // index.grid[0] if index else 1
    filtered = index is not None and stored.filtered
    shared = filtered and stored.chunk_rows > 1 and not isinstance(field.stored, StoredRanges)
    together = "samples share a chunk and are decoded together; the chunk shuffle decodes them once per epoch"
    reasons = {
        f"each sample is spread over {pieces:,} chunks": pieces > 1,
        f"{stored.slow}; pack writes it once in a way that needs no lock": stored.slow,
        f"{stored.chunk_rows:,} {together}": shared,
        "compressed: each sample is decoded when it is read": filtered and not shared,
    }
    node.why = "; ".join(reason for reason, applies in reasons.items() if applies)


@dataclasses.dataclass
class Scope:
    """The datasets of a file; or of the first of the groups that a pattern matches, named by the pattern."""

    nodes: list[Dataset]
    group: str | None = None
    first: str = "/"  # of these groups
    count: int = 1
    attributes: Sequence[str] = ()  # of the first group, or of the file
    files: int = 1
    call: Call = dataclasses.field(default_factory=lambda: Call("HDF5Source", ""))  # of all files, without fields

    @property
    def several(self) -> bool:
        return max(self.count, self.files) > 1

    def unread(self, call: Call) -> list[str]:
        """A note on others with the name of the first field, in other groups; or of a recording with another number."""
        first, ends = next(iter(call.fields.values()), ""), digits * ("CN" in call.options.get("layout", {}).values())
        name = str(first.get("name", "") if isinstance(first, Mapping) else first)
        every = [name, *of_training(n.field for n in self.nodes if n.kind != "metadata" and "*" not in n.field)]
        last, *others = (each.rpartition("/")[2].rstrip(ends) for each in every)
        how = "group= takes groups together whose datasets have the same names and axes, and ConcatSource takes sources"
        return [f"{others.count(last) - 1} more like {name} are not read: {how}"] if others.count(last) > 2 else []


def scopes_of(nodes: Sequence[Dataset], parent: str = "") -> list[Scope]:
    """The datasets outside of groups of equal structure; and each set of such groups."""
    rest, groups = list[Dataset](), collections.defaultdict[str, list[Dataset]](list)
    for node in nodes:
        name, slash, below = node.name.removeprefix(parent).partition("/")
        (groups[name] if slash and ("*" not in below or "/" in below) else rest).append(node)
    siblings, found = [*(node.name.removeprefix(parent) for node in rest), *groups], list[Scope]()
    for names in _alike(groups, parent):
        start = glob.escape(common_start(names).rstrip(digits))
        fitting = [each for each in (f"{start}*", f"{start}[0-9]*") if {*fnmatch.filter(siblings, each)} == {*names}]
        if len(names) < 2 or not fitting or any(has_word(name, f"{TRAINING}|{HELD_OUT}") for name in names):
            for name in names:
                outside, *more = scopes_of(groups[name], f"{parent}{name}/")
                rest += outside.nodes
                found += more
            continue
        pattern = f"{parent}{fitting[0]}"
        names.sort(key=lambda name: any(0 in node.shape for node in groups[name]))  # an empty one tells nothing
        for node, *others in zip(*(groups[name] for name in names), strict=True):
            node.across = across = len({n.structure for n in (node, *others)}) > 1
            node.groups, node.rows, node.samples = len(names), _lengths([node, *others], across), across or node.samples
            node.field = node.name.removeprefix(f"{parent}{names[0]}/")
            node.name = f"{pattern}/{node.field}"
        found.append(Scope(groups[names[0]], pattern, f"{parent}{names[0]}", len(names)))
    return [Scope(rest), *found]


def _alike(groups: Mapping[str, list[Dataset]], parent: str) -> Iterator[list[str]]:
    """The names of groups of equal structure, in which recordings (channels, time) may have different times."""
    kinds = collections.defaultdict[str, dict[str, list[str]]](dict)
    for name, inside in groups.items():
        own = [(n.name.removeprefix(f"{parent}{name}/"), n.structure) for n in inside]
        loose = [(below, kind, *(rest[:-1] if kind in PLAIN else rest)) for below, (kind, *rest) in own]
        kinds[str(loose)].setdefault(str(own), []).append(name)
    for equal in kinds.values():
        names = [*itertools.chain(*equal.values())]
        datasets = zip(*(groups[name] for name in names), strict=True)
        differ = [[n.shape for n in each] for each in datasets if len({n.structure for n in each}) > 1]
        across = all(len({few for few, _ in each}) == 1 and each[0][0] < max(each)[1] for each in differ)
        yield from [names] if across else equal.values()


def attributes_of(group: OpenGroup, scope: Scope) -> dict[str, list[str]]:
    """The attributes of a scope's datasets and groups, and their values or shapes, by names in the file."""
    found = dict[str, list[str]]()
    names = ["/", *(f"{scope.first}/{n.first or n.field}" for n in scope.nodes), scope.first]
    for name in dict.fromkeys(re.sub("/+", "/", each) for each in names):
        with contextlib.suppress(AsyncDataError, *LIBRARY_ERRORS):  # of links into other files
            for key, value in getattr(group.node(name), "attrs", {}).items():
                if not re.fullmatch(_OWN_ATTRIBUTES, key):
                    shown = _texts(value)[0][:WIDTH] if np.size(value) == 1 else np.shape(value)
                    found.setdefault(name.strip("/") or "/", []).append(f"{key} {shown}")
    return found


def of_people(nodes: Sequence[Dataset], taken: Sequence[str]) -> str:
    """A dataset that says whose each sample of the first field is, which must be in one stage only; empty if none."""
    rows = next((node.rows for node in nodes if node.field == taken[0]), ())
    for node in (n for n in nodes if n.rows == rows and n.flat and n.type in _IDS and n.field not in taken):
        name = _PEOPLE.fullmatch(node.field.rpartition("/")[2])
        if name and (name[2] or node.type == "text"):  # others may be flags
            return node.field
    return ""


def of_training(names: Iterable[str]) -> list[str]:
    """Leave out validation and test, if some names are of training. The start that all names share does not count."""
    every = list(names)
    begin = len(common_start(every).rpartition("/")[0])
    training = [name for name in every if has_word(name[begin:], TRAINING, whole=True)]
    return [n for n in every if n in training or not (training and has_word(n[begin:], HELD_OUT, whole=True))]


@dataclasses.dataclass(frozen=True)
class ColumnReport:
    name: str
    type: str
    kind: str | None
    distinct: int | None
    missing: int
    examples: tuple[str, ...]
    why: str


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A proposal: the call that builds a source; and once it was built, its samples, fields and way of reading."""

    title: str
    call: Call
    notes: tuple[str, ...] = ()
    samples: int = 0
    batch: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    reading: str = ""


@dataclasses.dataclass
class Report:
    kind: str
    files: list[str]
    bytes: int | None = None
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    datasets: list[Dataset] = dataclasses.field(default_factory=list)
    attributes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    columns: list[ColumnReport] = dataclasses.field(default_factory=list)
    rows: int | None = None
    suggestions: list[Suggestion] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def suggest(self, candidates: Iterable[Suggestion]) -> Suggestion | None:
        """Add the first candidate that can be built and read, and return it; else note the error of the first."""
        errors = list[str]()
        for each in candidates:
            try:
                self.suggestions.append(_verified(each))
            except AsyncDataError as error:
                errors.append(f"{each.call.python().splitlines()[-1]} does not fit: {' '.join(str(error).split())}")
            else:
                self.notes += [error for error in errors if "classes=" in error][:1]  # of a likelier label
                return each
        self.notes += errors[:1]
        return None

    def as_dict(self) -> dict[str, Any]:
        values = {"version": VERSION, **vars(self)}
        values["datasets"] = [{key: getattr(each, key) for key in SHOWN} for each in self.datasets]
        values["columns"] = [vars(each) for each in self.columns]
        values["suggestions"] = [{**vars(each), "python": each.call.python()} for each in self.suggestions]
        for shown in values["suggestions"]:
            shown["command"] = shown.pop("call").command()
        return values


READ, READ_BYTES = 32, 2**26  # the most samples of a proposal that are read, and their bytes


def _verified(each: Suggestion) -> Suggestion:
    lost = list[int]()
    with contextlib.closing(each.call.build()) as source:
        first = first_good(len(source), lambda sample: (source[sample], sample)[1])
        most = min(READ, READ_BYTES // max(source.spec.nbytes, 1))
        of_table = each.call.source != "HDF5Source"  # whose files are read one by one, all over it
        for sample in probes(len(source), max(most, 2)).tolist() if of_table else range(min(most, len(source))):
            try:
                source[sample]
            except AsyncDataError as error:
                lost.append(sample)  # or it has another shape than the first that can be read
                if " expected; " in str(error):
                    raise
        batch = {key: {"dtype": str(it.dtype), "shape": it.shape} for key, it in source.spec.items()}
        bad = f"the first that can be read is sample {first}" if first else f"sample {[*lost, 0][0]} cannot be read"
        notes = (*each.notes, *_notes(source), *[f"{bad}: --check-all lists the bad ones"] * bool(first or lost))
        return Suggestion(each.title, each.call, notes, len(source), batch, source.chunks.reading)


def _notes(source: Source) -> list[str]:
    x, y, notes = source.spec.get("x"), source.spec.get("y"), list[str]()
    if y is not None and not y.shape and y.classes:
        notes.append(f"y has {len(y.classes)} classes: {', '.join(y.classes[:4])}{', …' * (len(y.classes) > 4)}")
    if wide := " and ".join(key for key, each in source.spec.items() if each.dtype == np.float64):
        how = 'dtype="float32" of a field, or "int64" for classes'
        notes.append(f"{wide}: float64, as stored; {how}, is what networks take")
    if x is not None and x.dtype.kind == "u" and len(x.shape) > 1:
        on_gpu = 'on a GPU, device_transform=ToFloat("x") makes float32 from 0 to 1'
        on_cpu = "on a CPU, where the loop would wait for it, divide in a batch_transform"
        notes.append(f"x is {x.dtype}, as stored: {on_gpu}; {on_cpu}")
    if x is None or y is None or len(x.shape) not in (2, 3) or y.shape or y.dtype.kind not in "iu":
        notes.append("the network of train.py takes images and class numbers: add model._target_=package.YourModule")
    return notes


def text_of(report: Report) -> str:
    names, listed = collections.defaultdict[str, list[str]](list), list[ColumnReport | Dataset](report.columns)
    for each in (*listed, *report.datasets):
        names[each.why].append(each.name)
    columns = [["column", "type", "values", "missing", "field", "for example"]]
    for column in report.columns:
        counts = ["" if not n else f"{n:,}" for n in (column.distinct, column.missing)]
        columns.append([column.name, column.type, *counts, column.kind or "none", ", ".join(column.examples)])
    datasets = [["dataset", "shape", "type", "stored", "how"]]
    for node in report.datasets:
        rows = ["–".join(f"{n:,}" for n in dict.fromkeys(node.rows))] if node.rows else []
        sides = [*map(str, node.shape[:1]), *rows] if node.across else [*rows, *map(str, node.shape[1:])]
        shape = "×".join(sides) or "one value" * bool(node.bytes)
        chunks = [f"chunks of {'×'.join(map(str, node.chunks))}"] if node.chunks else []
        stored = [readable(node.stored_bytes or node.bytes), *node.filters, *chunks] if node.bytes else []
        how = HOW_READ[node.reading] if node.reading else "not read"
        datasets.append([node.name, shape, node.type, ", ".join(stored), how])
    whys = [f"{', '.join(shortened(alike))}: {why}" for why, alike in names.items() if why]
    title = [report.kind, *([] if report.bytes is None else [readable(report.bytes)])]
    numbers = {"row": report.rows, "dataset": len(report.datasets), "other file": len(report.files) - 1}
    title += [counted(number, what) for what, number in numbers.items() if number]
    title += [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    lines = [f"{report.files[0]}   {' · '.join(title)}", *indented(table(columns)), *indented(table(datasets))]
    lines += section("Attributes", [f"{name}: {', '.join(each)}" for name, each in report.attributes.items()])
    lines += [*section("Why not faster, or not at all", whys), *section("Notes", report.notes)]
    for suggestion in report.suggestions:
        lines += ["", f"── {suggestion.title[:1].upper()}{suggestion.title[1:]} ──"]
        lines += [f"  {suggestion.samples:,} samples · {shapes(suggestion.batch)} · {suggestion.reading}"]
        lines += [*indented(suggestion.call.python().splitlines()), *indented([suggestion.call.command()])]
        lines += ["", *(f" · {note}" for note in suggestion.notes)]
    return "\n".join([*lines, ""])
