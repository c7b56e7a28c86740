"""One part of a source: a file, or a group in it. Its fields fit each other, and those of other parts."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup, Tables
from lit_async_data.sources.hdf5.schema.selection import chosen_groups
from lit_async_data.sources.hdf5.schema.stored_field import StoredField, inspect_field
from lit_async_data.sources.hdf5.schema.window_starts import Span, WindowStarts, anchor_range
from lit_async_data.sources.hdf5.storage.external_files import ExternalFiles
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.sources.hdf5.storage.identity import FileIdentity
from lit_async_data.sources.hdf5.storage.index_cache import IndexCache

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PartRequest:
    """What is wanted of each part.

    Attributes:
        fields: By batch key.
        layouts: Letters of the axes of their datasets, for those that have any.
        group: A group, or a pattern of groups.
        rows: Name of a dataset that holds the rows that are wanted, or None.
        stride: Rows from one sample to the next.
        allow_external: Whether values may lie in other files.
    """

    fields: Mapping[str, Field]
    layouts: Mapping[str, str]
    group: str | None
    rows: str | None
    stride: int
    allow_external: bool


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPart:
    """One part.

    Attributes:
        path: The file.
        group: The group in it; ``"/"`` for its root.
        fields: By batch key.
        anchors: The rows of its samples.
    """

    path: str
    group: str
    fields: Mapping[str, StoredField]
    anchors: WindowStarts

    @property
    def rows(self) -> int:
        """Rows of each of its fields."""
        return next(iter(self.fields.values())).stored.rows

    @property
    def external(self) -> ExternalFiles:
        """Other files that values lie in."""
        return tuple(file for field in self.fields.values() for file in field.stored.external)

    @property
    def overlap(self) -> int:
        """How many samples behind one share rows with it."""
        spans = [field.span for field in self.fields.values()]
        return self.anchors.overlap(max(end for _, end in spans) - min(begin for begin, _ in spans))

    def dataset_key(self, stored: StoredDataset) -> str:
        """A dataset, the same in all groups, and its axis of rows: two fields may lay it out in two ways."""
        return f"{stored.name.strip('/').removeprefix(self.group.strip('/') + '/')} {stored.axis}"

    def spans(self) -> dict[str, Span | None]:
        """The rows around an anchor that are read of each dataset; None where it holds elements and not rows."""
        found: dict[str, Span | None] = {}
        for field in self.fields.values():
            if isinstance(field.stored, StoredRanges):
                found |= dict.fromkeys(map(self.dataset_key, field.datasets), None)
                continue
            name = self.dataset_key(field.stored)
            begin, end = found.get(name) or field.span
            found[name] = min(begin, field.span[0]), max(end, field.span[1])
        return found

    def sample(self, dataset: str | None, row: int, among: Indices) -> int | None:
        """The first of these samples that takes a row of a dataset, or an element; None if none does."""
        anchors = self.anchors.rows(among)
        for field in self.fields.values():
            first, last = field.extent(anchors)
            if isinstance(field.stored, StoredRanges) and dataset == field.stored.name:
                first = last = anchors  # the row of a sparse matrix itself
            elif dataset not in [each.name for each in field.datasets]:
                continue
            takes = (first <= row) & (row <= last)
            if takes.any():
                return int(among[takes.argmax()])
        return None

    def column(self, name: str, *, allow_external: bool) -> npt.NDArray[Any]:
        """The values of a dataset of one axis at the rows of all samples; text as text.

        Args:
            name: Of the dataset.
            allow_external: Whether its values may lie in other files.

        Raises:
            MissingError: There is no such dataset.
            FormatError: It has not one value for each row, or lies elsewhere.
        """
        full = f"{self.path}:/{name.strip('/')}"
        with as_source_errors(full, "cannot be read", file=self.path, dataset=name), open_h5py(self.path) as file:
            dataset = OpenGroup(file, self.path, self.group, IndexCache(False), allow_external).whole(name, "")
            if dataset.shape != (self.rows,):
                raise FormatError(
                    f"{self.path}:{dataset.name} has the shape {dataset.shape}; it must have one value for each of the "
                    f"{self.rows} rows",
                    file=self.path,
                    dataset=name,
                )
            text = h5py.check_string_dtype(dataset.dtype) is not None
            values = np.asarray(dataset.asstr()[...] if text else dataset[...])
        return values[self.anchors.rows(np.arange(self.anchors.count))]

    def __str__(self) -> str:
        return self.path if self.group == "/" else f"{self.path}:/{self.group}"

    def at(self, rows: Indices) -> StoredPart:
        """This part with other samples: those at these rows.

        Raises:
            ConfigError: The window of one does not lie inside the part; names its row.
        """
        first, last = anchor_range(self.rows, [field.span for field in self.fields.values()])
        wrong = (rows < first) | (rows > last)
        if wrong.any():
            row = int(rows[wrong.argmax()])
            span = "" if first == 0 and last == self.rows - 1 else f", for windows that lie inside it {first} to {last}"
            raise ConfigError(f"rows: {row} is none of the {self.rows} rows of {self}{span}")
        return dataclasses.replace(self, anchors=WindowStarts.at(rows))


def inspect_file(path: str, request: PartRequest, cache: IndexCache) -> tuple[FileIdentity, list[StoredPart]]:
    """Look at the parts of one file.

    Args:
        path: The file.
        request: What is read from it.
        cache: Where indices of chunks are kept.

    Raises:
        MissingError: A file, group or dataset is not there.
        FormatError: The file is not HDF5, or a dataset cannot be a field.
        CorruptError: It is damaged.
        SourceError: The system does not let it be read; says what to do.
        ConfigError: What is wanted does not fit.
    """
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path) as file:
        identity = FileIdentity.of(os.stat(path))
        tables: Tables = {}
        groups = chosen_groups(file, path, request.group)
        return identity, [
            _inspect_part(OpenGroup(file, path, group, cache, request.allow_external, tables), request)
            for group in groups
        ]


def _inspect_part(within: OpenGroup, request: PartRequest) -> StoredPart:
    path = within.path
    fields: dict[str, StoredField] = {}
    for key, field in request.fields.items():
        name = within.name(field.name)
        full = f"{path}:/{name.strip('/')}"
        with as_source_errors(full, "cannot be read", file=path, dataset=name):
            found = inspect_field(within, key, field, request.layouts.get(key))
        twice = set(found) & (set(fields) | set(request.fields) - {key})
        if twice:
            raise ConfigError(f"fields: {twice.pop()} is the key of the lengths of {key}; give that field another one")
        fields |= found
    lengths = {field.stored: field.stored.rows for field in fields.values()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{stored.name} has {n}" for stored, n in lengths.items())
        raise FormatError(f"{path}: the fields are of different lengths: {said}; {_advice(fields)}", file=path)
    spans = [field.span for field in fields.values()]
    rows = next(iter(lengths.values()))
    part = StoredPart(path, within.group, fields, WindowStarts.within(rows, spans, request.stride))
    if request.rows is not None:
        dataset = within.whole(request.rows, "rows: ")
        return part.at(row_numbers(dataset[...], part.rows, f"{path}:{dataset.name}"))
    return part


def _advice(fields: Mapping[str, StoredField]) -> str:
    """What may be meant where fields are of different lengths: another axis, or rows that are looked up."""
    longest = max(field.stored.rows for field in fields.values())
    key = min(fields, key=lambda key: fields[key].stored.rows)
    name = fields[key].stored.name
    asked = [_other_axis(key, field, fields) for key, field in fields.items()]
    return (
        next(filter(None, asked), "")
        + f"a sample takes the same row of each, or a window around it, and rows= chooses among these rows. If one row "
        f"of {name} belongs to several of the {longest}, store its row number for each of them in a dataset, and write "
        f"fields={{{key!r}: Field({name!r}, lookup=NAME)}} with the name of that dataset; {name} is then kept in memory"
    )


def _other_axis(key: str, field: StoredField, fields: Mapping[str, StoredField]) -> str:
    """A question, if an axis of a field has as many rows as another field; else nothing."""
    others = {each.stored.rows for each in fields.values()} - {field.stored.rows}
    shape = field.values.shape
    axes = [axis for axis, n in enumerate(shape) if n in others]
    if field.values is not field.stored or not axes:
        return ""
    letters = itertools.chain("HWDTABEFGIJKLMOPQRSUVXYZ", itertools.repeat("?"))
    layout = "".join("N" if axis == axes[-1] else next(letters) for axis in range(len(shape)))
    name, single = field.values.name, sorted(shape)[:-1] == [1]
    column = f", and for class numbers Field({name!r}, column=0, dtype='int64')" if single else ""
    return (
        f"are the samples of {name}, of shape {shape}, on axis {axes[-1]}? Then write "
        f"layout={{{key!r}: {layout!r}}}{column}. Else: "
    )


def row_numbers(given: npt.ArrayLike, rows: int, where: str = "it") -> Indices:
    """Numbers of rows from numbers, or from a mask.

    Args:
        given: Whole numbers of any count, or truth values, one for each row; of one axis.
        rows: How many rows there are.
        where: What holds them, for messages.

    Raises:
        ConfigError: They are neither, or there are none.
    """
    found: npt.NDArray[Any] = np.asarray(given)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iub":
        kind = f"{found.dtype}, shape {found.shape}"
        raise ConfigError(f"rows: {where} holds neither row numbers nor a mask, but {kind}")
    if found.dtype.kind == "b":
        if len(found) != rows:
            raise ConfigError(f"rows: {where} is a mask of {len(found)} values, and there are {rows} rows")
        found = np.flatnonzero(found)
        if not found.size:
            raise ConfigError(f"rows: {where} is a mask that chooses no row")
    return found.astype(np.int64)


def log_warnings(part: StoredPart) -> None:
    """Say of the datasets of a part why they are slow, and what seems to be meant otherwise than it is delivered."""
    slow = {str(field.values): field.values.slow for field in part.fields.values() if field.values.slow}
    for name, reason in slow.items():
        log.warning("%s is read by h5py, one thread at a time: %s", name, reason)
    packed = {str(field.stored): field.packed for field in part.fields.values() if field.packed}
    for name, attributes in packed.items():
        said = ", ".join(attributes)
        log.warning("%s has %s: values come as stored; Field(mask_and_scale=True) applies it", name, said)


def check_compatible(part: StoredPart, first: StoredPart) -> None:
    """Make sure that the samples of a part are like those of the first.

    Raises:
        FormatError: They are not; names both.
    """
    if list(part.fields) != list(first.fields):
        raise FormatError(f"{part} has the fields {', '.join(part.fields)}, and {first} {', '.join(first.fields)}")
    for key, field in part.fields.items():
        mine, other = field.spec, first.fields[key].spec
        if mine == other:
            continue
        one, two = f"{mine.dtype} {mine.shape}", f"{other.dtype} {other.shape}"
        if one == two:
            one, two = (f"{one} of {each.classes or 'no classes'}" for each in (mine, other))
        raise FormatError(
            f"{field.stored} has samples of {one}, but in {first} they are {two}; "
            f"{'parts' if part.group != '/' else 'files'} of one source must agree",
            file=part.path,
            dataset=field.stored.name,
        )
