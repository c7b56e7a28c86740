"""Groups or datasets that are samples: the datasets of a field, one for each sample, become chunks of one dataset."""

from __future__ import annotations

import array
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec, length_key, listed_names
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.contract.checks import column_clash
from lit_async_data.sources.contract.source import EACH
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.hdf5.index import index as chunk_index
from lit_async_data.sources.hdf5.index.index import ChunkIndex, IndexCache, IndexKey
from lit_async_data.sources.hdf5.parts import stored_field
from lit_async_data.sources.hdf5.parts.part import PartRequest, StoredPart, inspect_file, inspect_part, value_of
from lit_async_data.sources.hdf5.parts.samples import KEY
from lit_async_data.sources.hdf5.parts.stored_field import Lacking, StoredField
from lit_async_data.sources.hdf5.schema import categories, encoded
from lit_async_data.sources.hdf5.schema import field as field_schema
from lit_async_data.sources.hdf5.schema.categories import Coded, Conversion, enumerated, find_coded, is_numbered
from lit_async_data.sources.hdf5.schema.field import IMAGE, VARIABLE, Field, changed
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset, axes, in_group, open_dataset
from lit_async_data.sources.hdf5.select import Episodes, WindowStarts
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, as_source_errors, context_of, h5py
from lit_async_data.sources.hdf5.storage.handles import identity_of, open_h5py
from lit_async_data.sources.hdf5.storage.open_file import external_files, refuse_external_link
from lit_async_data.sources.local_files import natural

Columns = dict[str, Array]  # what is known of a field: by name, an entry for each sample
# Seconds from one line of the log to the next while groups are listed.
PROGRESS_S = 10.0
# If so many first samples of a single file lack a field, the listing stops: the name of the field is misspelt.
MISSES = 1000
# Options of fields that have no rows, since a group or dataset is a sample.
OPTIONS = {"name", "attr", "dtype", "classes", "kind", "null", *VARIABLE}
ENCODED = {"name", "decode", "channels", *IMAGE}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Root(OpenGroup):
    samples: dict[tuple[str, Field], StoredDataset] = dataclasses.field(default_factory=dict)

    def sample(self, name: str, field: Field) -> StoredDataset:
        """Describe a dataset that is one sample, of any number of axes, as `inspect_dataset` describes many samples."""
        if (known := self.samples.get((name, field))) is not None:
            return known  # a description takes as long as opening a small file
        node: Any = self.node(name)
        dtype, shape = getattr(node, "dtype", np.dtype(object)), getattr(node, "shape", None)
        if shape is None or shape[:1] not in ((), (0,)) or not field.takes(dtype):
            stored = self.inspect_dataset(name, cast=field.dtype is not None)
        else:
            external_files(node, self.file, name, allowed=False)
            plain = chunk_index.in_one_file(node) and chunk_index.has_numpy_layout(node)
            offset = node.id.get_offset() if plain else None
            slow = "it is not contiguous" if offset is None else None
            stored = StoredDataset(self.path, name, shape, dtype, 0, FieldSpec(shape, dtype), offset, slow=slow)
        return self.samples.setdefault((name, field), stored)


def inspect_files(
    paths: Sequence[str], request: PartRequest, cache: IndexCache
) -> tuple[dict[str, FileIdentity], list[StoredPart]]:
    """The identity of each file, and the parts of all."""
    request.files.open_all(paths)
    inspect = inspect_file if request.sample == "row" else _inspect_groups
    found = {path: inspect(path, request, cache) for path in paths}
    identities, seen = {path: identity for path, (identity, _) in found.items()}, dict[tuple[int, int], str]()
    for path, identity in identities.items():
        if (other := seen.setdefault((identity.device, identity.inode), path)) != path:
            what = "are the same file, whose samples would count twice; give one of them"
            raise ConfigError(f"{other} and {path} {what}", "path")
    parts = [part for _, own in found.values() for part in own]
    return identities, _with_absent(parts, request) if any(part.absent for part in parts) else parts


def _inspect_groups(path: str, request: PartRequest, cache: IndexCache) -> tuple[FileIdentity, list[StoredPart]]:
    """The groups or datasets of a file as the rows of one part, or as volumes; otherwise as `inspect_file`."""
    if any(field.places for field in request.fields.values()):
        return _inspect_volumes(path, request, cache)
    for key, field in request.fields.items():
        options = ENCODED if field.decode else OPTIONS
        field_schema.check_options({key: field}, options, f"where a {request.sample} is a sample")
    names_of = _names_of_samples(request)
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path, request.files) as file:
        identity = identity_of(file)
        group = _Root(file, path, "/", cache, allow_external=False)
        listed, kept_as = dict[str, Columns](), dict[str, IndexKey]()
        for key, each in request.fields.items():
            of = request.sample, request.group, *names_of.values(), key, each.attr, each.kind, each.decode
            kept_as[key] = IndexKey(path, f"list of {of}", identity.state)
            listed[key] = cache.load(kept_as[key]) or {}
        absent = dict[str, SourceError]()
        if not all(listed.values()):
            listed, absent = _listed(group, request, names_of)
            for key in kept_as if all({"values", "offsets"} & {*each} for each in listed.values()) else ():
                cache.store(kept_as[key], listed[key])
        names = next(iter(listed.values()))["names"]
        own = {key: _field(group, key, names_of[key], request, of) for key, of in listed.items() if key not in absent}
    anchors = WindowStarts.within(Episodes.whole(len(names)), (0, 1), request.stride)
    place = EACH if request.sample == "group" else next(iter(names_of.values()))
    lacking = {key: Lacking(each["lacking"], each["why"]) for key, each in listed.items() if len(each["lacking"])}
    return identity, [StoredPart(path, place, own, anchors, names=names, lacking=lacking, absent=absent)]


def _inspect_volumes(path: str, request: PartRequest, cache: IndexCache) -> tuple[FileIdentity, list[StoredPart]]:
    names_of, parts = _names_of_samples(request), list[StoredPart]()
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path, request.files) as file:
        group = OpenGroup(file, path, "/", cache, allow_external=False)
        for name in _named_alike(group, names_of)[0]:
            volume = next(iter(names_of.values())).replace("*", name, 1)
            fields = {key: _renamed(field, name, volume) for key, field in request.fields.items()}
            part = inspect_part(group.beside("/"), dataclasses.replace(request, fields=fields))
            parts.append(dataclasses.replace(part, group=volume))
        return identity_of(file), parts


def _renamed(field: Field, name: str, volume: str) -> Field:
    """The field of a volume: its own name in place of ``*``. An attribute without a name is the volume's."""
    if field.stacked:
        return dataclasses.replace(field, name=tuple(_renamed(each, name, volume) for each in field.stacked))
    return dataclasses.replace(field, name=field.dataset.replace("*", name, 1) or volume)


def _with_absent(parts: Sequence[StoredPart], request: PartRequest) -> list[StoredPart]:
    """The parts. A field that no sample of a part has is described as in another part; nothing reads it."""
    of_key = {key: field for part in reversed(parts) for key, field in part.fields.items()}
    filled = list[StoredPart]()
    for part in parts:
        fields = dict(part.fields)
        for key, error in part.absent.items():
            if key not in of_key:
                raise error
            fields[key] = _absent(of_key[key], part)
        filled.append(dataclasses.replace(part, fields={key: fields[key] for key in request.fields}, absent={}))
    return filled


def _absent(of: StoredField, part: StoredPart) -> StoredField:
    stored, kind, names = of.values, of.stored, part.names
    assert names is not None
    shape = (len(names), *stored.shape[1:])
    kept = None if stored.kept is None else np.full(shape, IGNORED if of.text else 0, stored.dtype)
    rows = dataclasses.replace(stored, path=part.path, shape=shape, names=names, kept=kept)
    if isinstance(kind, StoredDataset):
        return dataclasses.replace(of, stored=rows)
    own: dict[str, Any] = {"values": rows}
    if isinstance(kind, encoded.StoredSequences):
        own |= {name: np.repeat(getattr(kind, name)[:1], len(names), axis=0) for name in ("references", "chunks")}
    return dataclasses.replace(of, stored=dataclasses.replace(kind, **own))


def _listed(
    group: _Root, request: PartRequest, names_of: Mapping[str, str]
) -> tuple[dict[str, Columns], dict[str, SourceError]]:
    """The columns of each field, and the errors of fields that no sample has. Gaps repeat the first entry."""
    if request.sample == "dataset":
        matches, above = _named_alike(group, names_of)
    else:
        matches = field_schema.chosen_groups(group.file, group.path, request.group, allow_external=False)
        above = dict[str, Any]()
    names, shown = list[bytes](), time.monotonic()
    listers = {key: _Lister(group, field) for key, field in request.fields.items()}
    for number, name in enumerate(each.strip("/") for each in matches):
        if time.monotonic() > shown + PROGRESS_S:
            shown = time.monotonic()
            what = f"{request.sample}s are listed; cache_dir= keeps the list, and pack writes them into one dataset"
            _log.warning("%s: %d of %d %s", group.path, number, len(matches), what)
        stored, node = name.encode(errors="surrogateescape"), None
        try:
            if not above:
                _refuse_link(group, group.file.id, stored, name, checked=True)
                node = h5py.h5g.open(group.file.id, b"/" + stored)
        except LIBRARY_ERRORS:
            if isinstance(group.node(name), h5py.Dataset):
                continue  # beside the groups
            open_dataset(group.file, group.path, name)  # raises an error that says more
            raise
        for key, field in request.fields.items():
            full = names_of[key].replace("*", name, 1).strip("/")
            within, own = above[key] if above else (node, field.dataset)
            listers[key].add(len(names), within, own.replace("*", name, 1), full)
        names.append(stored)
        for lister in listers.values() if len(names) == MISSES + 1 and request.alone else ():
            lister.check_found()
    if not names:
        raise MissingError(f"{group.path}: {request.group!r} matches no group; check the name", file=group.path)
    found, absent = dict[str, Columns](), dict[str, SourceError]()
    for key, lister in listers.items():
        found[key] = {"names": np.array(names), "lacking": np.arange(len(names)), "why": np.zeros(len(names), "S1")}
        try:
            found[key] |= lister.columns(len(names))
        except MissingError as error:
            absent[key] = error
    return found, absent


def _names_of_samples(request: PartRequest) -> dict[str, str]:
    """The dataset of each field, with a ``*`` in place of the name of a sample."""
    names = {key: (field.stacked or (field,))[0].dataset for key, field in request.fields.items()}
    if request.sample == "group":
        start = "" if request.group is None else f"{EACH}/"  # else each file is a sample
        return {key: (name if name.startswith("/") else f"{start}{name}").strip("/") for key, name in names.items()}
    if request.group is not None:
        raise ConfigError("does not go with sample='dataset'; write it before the names of fields: 'images/*'", "group")
    first = next(iter(names.values()), "").strip("/")
    for number, (key, field) in enumerate(request.fields.items()):
        # An attribute without a name is the sample's own; without a *, all samples have it in common.
        names[key] = names[key].strip("/") or ("/" if names[key] else first)
        wrong = [name for name in [names[key], *(each.dataset for each in field.stacked)] if name.count("*") != 1]
        if wrong and not (number and field.attr and "*" not in names[key]):
            what = f"{wrong[0]!r} needs one *, which stands for the name of a sample, as in 'images/*'"
            what, option = (f"{what}; on='group' is that name", "on") if key == KEY else (what, f"fields.{key}")
            raise ConfigError(what, option)
    return names


def _named_alike(group: OpenGroup, names_of: Mapping[str, str]) -> tuple[list[str], dict[str, tuple[Any, str]]]:
    """The names of samples, in natural order, by the first pattern; by field, its group and its name in the group."""
    above, found = dict[str, tuple[Any, str]](), list[str]()
    for key, name in names_of.items():
        path = name.partition("*")[0].rpartition("/")[0]
        node, own = group.node(path or "/"), name.removeprefix(path).strip("/")
        if not isinstance(node, h5py.Group) and above:
            node, own = group.file, name  # none of the samples has it
        elif not isinstance(node, h5py.Group):
            raise MissingError(f"{group.path}: has no group {path!r}; check fields=", file=group.path, dataset=path)
        if not above:
            begin, end = own.partition("/")[0].split("*")
            alike = [each for each in field_schema.names_in(node, group.path) if len(each) >= len(begin + end)]
            alike = [each for each in alike if each.startswith(begin) and each.endswith(end)]
            found = [each[len(begin) : len(each) - len(end)] for each in alike]
        above[key] = node.id, own
    if not found:
        pattern = next(iter(names_of.values()))
        raise MissingError(f"{group.path}: {pattern!r} matches no dataset; check the name", file=group.path)
    return sorted(found, key=natural), above


class _Lister:
    def __init__(self, group: _Root, field: Field) -> None:
        self._group, self._field = group, field
        self._kind: Any = None  # `_Values`, `_Images` or `_Places`; None until a sample has the field
        self._lacking = dict[int, bytes]()  # why a sample lacks the field, by its number; empty if it is missing
        self._missing = list[tuple[Exception, str]]()  # the error and the dataset of the first sample without it
        self._unlike = ""  # the dataset of the first sample that differs

    def add(self, number: int, node: Any, name: str, full: str) -> None:
        group, field, why = self._group, self._field, b""
        try:
            text = not (self._kind or field.attr or field.decode) and is_numbered(group, full, field)
            kind = self._kind or (_Values if field.attr or text else _Images if field.decode else _Places)(group, field)
            kind.add(node, name, full)
        except _UnlikeError as error:
            self._unlike, why = self._unlike or full, str(error).encode()
        except (MissingError, *LIBRARY_ERRORS) as error:
            if not isinstance(error, MissingError) and full in group.file:
                if not field.attr:
                    open_dataset(group.file, group.path, full)  # raises an error that says more
                raise
            self._missing = self._missing or [(error, full)]
        else:
            self._kind = kind
            return
        self._lacking[number] = why

    def check_found(self) -> None:
        for error, full in self._missing if self._kind is None else ():
            if not isinstance(error, MissingError):
                open_dataset(self._group.file, self._group.path, full)  # raises an error that says more
            raise error

    def columns(self, count: int) -> Columns:
        """The columns of all ``count`` samples; an error if most differ from the first in type or shape."""
        lacking, why = np.array([*self._lacking], np.int64), np.array([*self._lacking.values()], "S")
        path, unlike = self._group.path, why[why != b""]
        if len(unlike) > count - len(lacking):
            raise FormatError(f"{path}:/{self._unlike}: {unlike[0].decode()}", file=path, dataset=self._unlike)
        self.check_found()
        entries = np.cumsum(np.isin(np.arange(count), lacking, invert=True)) - 1
        entries[lacking] = 0
        return {"lacking": lacking, "why": why, **self._kind.columns(entries)}


class _UnlikeError(Exception):
    """A sample differs from the first in type or shape."""


class _Values:
    def __init__(self, group: _Root, field: Field) -> None:
        self._group, self._field, self._values = group, field, list[Any]()
        self._first: Array | None = None

    def add(self, node: Any, name: str, full: str) -> None:
        low: Any = h5py
        attr = self._field.attr
        if attr:
            _refuse_link(self._group, node, name.encode(), full)
            value = value_of(low.h5o.open(node, name.encode() or b"."), self._field, self._group.path, full)
        else:
            value = np.asarray(self._group.whole(f"/{full}", "")[()])
        first = self._first = value if self._first is None else self._first
        kind, like = value.dtype, first.dtype
        alike = (kind == like and enumerated(kind) == enumerated(like)) or kind.kind == like.kind == "S"
        if value.shape != (first.shape if attr else ()) or not alike:
            what = f"its {attr or 'value'!r} is {kind} {value.shape}, but {like} {first.shape} in the first sample"
            raise _UnlikeError(f"{what}; write it as one type and shape")
        self._values.append(value[()])

    def columns(self, entries: Indices) -> Columns:
        return {"values": np.array(self._values)[entries]}


class _Images:
    def __init__(self, group: _Root, _: Field) -> None:
        self._group, self._offsets, self._sizes = group, array.array("q"), array.array("I")

    def add(self, node: Any, name: str, full: str) -> None:
        _refuse_link(self._group, node, name.encode(), full)
        place = encoded.place_of_image(self._group, node, full.removesuffix(name).strip("/"), name)
        if place is None:
            ways = "write one, or leave sample= out and read many as rows: window=(0, LONGEST), pad='zero'"
            raise _UnlikeError(f"{encoded.NO_IMAGE}; {ways}")
        self._offsets.append(place[0])
        self._sizes.append(place[1])

    def columns(self, entries: Indices) -> Columns:
        return {"offsets": np.array(self._offsets)[entries], "sizes": np.array(self._sizes)[entries]}


class _Places:
    """Lengths of the datasets of a field, and their places in the file unless libhdf5 must find one of them."""

    def __init__(self, group: _Root, field: Field) -> None:
        self._group, self._field = group, field
        self._alike: Any = None  # the name, the handle and the type of the first dataset
        self._first: Any = None  # the description and the creation properties of the first dataset with values
        self._head = group.file.userblock_size  # bytes before all values; one less is the place of none
        self._lengths, self._counts, self._chunks = array.array("q"), array.array("I"), array.array("q")
        self._places: Any = {"offsets": array.array("q"), "sizes": array.array("I"), "masks": array.array("I")}

    def add(self, node: Any, name: str, full: str) -> None:
        group = self._group
        _refuse_link(group, node, name.encode(), full)
        found: Any = h5py.h5d.open(node, name.encode())
        shape = found.shape
        first_name, alike, kind = self._alike = self._alike or (full, found, found.get_type())
        same = shape == alike.shape or (shape and alike.shape and shape[1:] == alike.shape[1:])
        if not same or not found.get_type().equal(kind):
            what = f"holds {found.dtype} {shape}, but {first_name} holds {alike.dtype} {alike.shape}"
            advice = "only lengths may differ: choose samples that agree by their names, or write values and offsets"
            raise _UnlikeError(f"{what}; {advice}")
        length, chunk = shape[0] if shape else 1, shape
        columns: Any = None
        if not length:
            chunk, columns = [1] * len(shape), [()] * 3
        else:
            if self._first is None:
                self._first = group.sample(full, self._field), found.get_create_plist()
            first, like = self._first
            offset = None if first.offset is None else found.get_offset()
            written = offset not in (None, self._head - 1)
            if written and offset <= self._head:
                what = f"lies at byte {offset}, where it cannot be; the file is damaged: restore it"
                raise CorruptError(what, **context_of(group.path, full))
            if written and (size := found.get_storage_size()) < 2**32:  # as sizes are uint32
                columns = [offset], [size], [0]
            elif first.index is not None and (dataset := h5py.Dataset(found)).chunks:
                chunk, properties = dataset.chunks, found.get_create_plist()
                properties.set_chunk(first.index.shape)
                usual = (shape, chunk) == (first.shape, first.index.shape)
                known = usual or chunk_index.unsupported_reason(dataset) is None
                columns = chunk_index.columns_of(dataset) if known and properties.equal(like) else None
        if columns is None:
            external_files(h5py.Dataset(found), group.file, full, allowed=False)
            self._places = {}
        self._lengths.append(length)
        self._counts.append(len(columns[0]) if columns else 0)
        self._chunks.extend(chunk)
        for places, each in zip(self._places.values(), columns or (), strict=False):
            places.extend(each)

    def columns(self, entries: Indices) -> Columns:
        chunks = np.array(self._chunks).reshape(len(self._lengths), -1)[entries]
        every, found = np.array(self._counts, np.int64), {"lengths": np.array(self._lengths)[entries]}
        found |= {"counts": every[entries], "chunks": chunks.ravel()}
        ends = np.cumsum(found["counts"])
        begins = np.cumsum(every)[entries] - ends
        numbers = np.arange(ends[-1]) + np.repeat(begins, found["counts"])
        return found | {name: np.array(each)[numbers] for name, each in self._places.items()}


def _refuse_link(group: OpenGroup, within: Any, name: bytes, full: str, *, checked: bool = False) -> None:
    """Refuse a name that leads into another file, before it is opened; if ``checked``, only by its last component."""
    low: Any = h5py
    if (b"/" in name and not checked) or (name and within.links.get_info(name).type != low.h5l.TYPE_HARD):
        refuse_external_link(group.file, full)


def _field(group: _Root, key: str, name: str, request: PartRequest, columns: Columns) -> StoredField:
    where, path, field = f"fields.{key}", group.path, request.fields[key]
    names, lacking = columns["names"], columns["lacking"]
    having = np.delete(names, lacking)
    if "values" in columns:
        label, values = name + (f"@{field.attr}" if field.attr else ""), columns["values"]
        if field.attr and values.dtype.kind in "iu":  # the enumeration of the first sample names the values of all
            full = in_group(name, having, 0)
            values = values.astype(value_of(group.node(full or "/").id, field, path, full).dtype)
        return stored_field.kept_field(stored_field.in_memory(path, label, values, names=names), field, where, lacking)
    names = names.copy()
    names[lacking] = having[0]
    if field.decode:
        if key in request.layouts:
            raise ConfigError(f"{request.layouts[key]!r} for {key}: images have their channels first", "layout")
        rows = encoded.datasets_as_rows(path, name, columns["offsets"], columns["sizes"], names=names)
        file: Any = group.file
        images = encoded.images_of(field, rows, lambda row: np.asarray(file[in_group(name, names, row)][()]).tobytes())
        return StoredField(images, images.decoder.spec)
    sequences = _as_one(group, name, field, request.layouts.get(key), names=names, columns=columns)
    stored = sequences.values
    row = dataclasses.replace(stored.spec, dtype=stored.dtype.newbyteorder("="))
    first = dataclasses.replace(_coded_alike(group, name, names), name=name)
    numbering, spec = stored_field.numbered_spec(first, field, row, stored, where)
    converted = (numbering and numbering.targets) or spec.dtype != stored.spec.dtype
    conversion = Conversion(stored, numbering=numbering, null=field.null) if converted else None
    packed = () if first.names else categories.packing_of(group, in_group(name, names, 0))
    return StoredField(sequences if stored.shape[1:] else stored, spec, conversion=conversion, raw=packed)


def _coded_alike(group: OpenGroup, name: str, names: Any) -> Coded:
    """The names of numbers in the first group; an error if another group has other names."""
    first = find_coded(group, in_group(name, names, 0))
    for number in range(len(names)) if first.names or first.mask is not None else ():
        full = in_group(name, names, number)
        coded = find_coded(group, full)
        if (coded.names, coded.missing) != (first.names, first.missing):
            what = f"its numbers stand for {listed_names(coded.names)}, but in the first group for "
            cure = 'leave out sample="group" and give classes=: each group then maps its numbers by name'
            raise FormatError(f"{group.path}:/{full}: {what}{listed_names(first.names)}; {cure}", file=group.path)
        if coded.mask is not None and coded.mask.any():
            what = 'holds missing values; leave out sample="group", where null= chooses their treatment'
            raise FormatError(f"{group.path}:/{full}: {what}", file=group.path, dataset=full)
    return first


def with_lengths(parts: list[StoredPart], request: PartRequest) -> list[StoredPart]:
    fields = [dict(part.fields) for part in parts]
    for key, field in request.fields.items() if parts[0].names is not None else ():
        found = list(filter(None, (own[key].sequences for own in fields)))
        lengths = np.unique(np.concatenate([each.lengths for each in found] or [np.ones(1, np.int64)]))
        uneven = len(found) == len(parts) and (len(lengths) > 1 or not lengths[0])
        padded = uneven or (changed(field, VARIABLE) and not field.decode)
        for part, own in zip(parts, fields, strict=True):
            if padded:
                own.update(_padded(part, key, request))
            elif found:
                own[key] = dataclasses.replace(own[key], stored=own[key].values)
    return [dataclasses.replace(part, fields=own) for part, own in zip(parts, fields, strict=True)]


def _padded(part: StoredPart, key: str, request: PartRequest) -> dict[str, StoredField]:
    field, of_key = request.fields[key], part.fields[key]
    sequences = of_key.sequences
    if sequences is None or key in request.layouts or field.classes or length_key(key) in request.fields:
        needs = f"need an axis, no layout, no classes, and the key {length_key(key)!r} for their lengths"
        raise ConfigError(f"{of_key.located}: samples of variable length {needs}; change the field", f"fields.{key}")
    row = dataclasses.replace(sequences.spec, shape=sequences.spec.shape[1:])
    spec = encoded.padded_spec(sequences.lengths, field.max_length, row, of_key.values)
    return stored_field.padded_fields(key, field, dataclasses.replace(sequences, spec=spec), of_key.raw)


def _as_one(
    group: _Root, name: str, field: Field, layout: str | None, *, names: Array, columns: Columns
) -> encoded.StoredSequences:
    path, lengths, counts = group.path, columns["lengths"], columns["counts"]
    first = group.sample(in_group(name, names, int(lengths.argmax())), field)
    shape = (len(names), *first.shape)
    _, channel = axes(layout, first.shape, f"{path}:/{name}", volume=True)
    named = encoded.named_columns(group, in_group(name, names, 0), shape[2:])
    some = np.linspace(0, len(names) - 1, 16).astype(np.int64).tolist() if named else ()
    for full in (in_group(name, names, number) for number in some):
        if clash := column_clash(encoded.named_columns(group, full, shape[2:]), named, f"/{in_group(name, names, 0)}"):
            raise FormatError(f"{path}:/{full}: {clash}", file=path, dataset=full)
    sample, chunks = list(first.shape), columns["chunks"].reshape(len(names), -1)
    if channel is not None:
        sample.insert(0, sample.pop(channel))
    dtype = first.dtype.newbyteorder("=")
    labels = not sample and dtype.kind in "iu" and dtype != np.uint64  # as in `inspect_dataset`
    spec = FieldSpec(tuple(sample), np.dtype(np.int64) if labels else dtype, channel, columns=named)
    whole = FieldSpec(shape[1:], dtype, columns=named)
    stored = StoredDataset(path, name, shape, first.dtype, 0, spec, filtered=first.filtered, names=names)
    ends = np.cumsum(counts)
    references = np.stack([lengths * (math.prod(shape[2:]) * dtype.itemsize), ends - counts, ends], axis=1)
    sequences = encoded.StoredSequences(stored, None, references, first.dtype, whole, chunks)
    readable = first.offset is not None or first.index is not None or not ends[-1]
    if "offsets" in columns and readable and ((lengths != lengths[0]).any() or (chunks == chunks[0]).all()):
        places = chunk_index.Columns(*(columns[each] for each in chunk_index.Columns._fields))
        plain = FilterPipeline((), first.nbytes)
        one = first.index or ChunkIndex(first.shape, (1,) * len(first.shape), *places, plain, 0)
        index = ChunkIndex((1, *one.shape), (len(names), *one.grid), *places, one.filters, one.fill)
        return dataclasses.replace(sequences, values=dataclasses.replace(stored, index=index))
    slow = first.slow or "its samples store it in different ways or in 4 GiB, or a library that decodes it is missing"
    return dataclasses.replace(sequences, values=dataclasses.replace(stored, slow=slow))
