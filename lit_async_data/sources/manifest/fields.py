"""Fields of a table: their values, and the files and HDF5 rows that they name."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import functools
import io
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from lit_async_data.batch.spec import TENSOR_TYPES, Array, BatchSpec, FieldSpec, mask_key
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, FormatError, ManifestError, SourceError
from lit_async_data.options import within
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.composed.composed import ConcatSource, SubsetSource
from lit_async_data.sources.contract.checks import first_good
from lit_async_data.sources.contract.source import StorageLayout, numbered, renumbered, starts
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.hdf5.readers.part_reader import LOOKS
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.images.formats import Draw
from lit_async_data.sources.images.image import Alignment, ImageDecoder, Places, Shown
from lit_async_data.sources.local_files import HEAD_BYTES, Exclude, is_address, mistaken
from lit_async_data.sources.manifest.columns import FILES, Column, Kind, Paths, Rows, kind_of
from lit_async_data.sources.manifest.files import FilePrefetcher, RootDirectory
from lit_async_data.sources.table.embedded import EmbeddedFiles
from lit_async_data.sources.table.formats import NoColumnError, is_number, listed, quoted
from lit_async_data.sources.table.labels import Labels, padded_length
from lit_async_data.sources.table.table import Table, TableReader

DATASET_COLUMN, DATASET = "dataset", "data"


class HDF5Fields:
    """Fields from rows of HDF5 files, of which ``source`` is a subset; all have the same columns of paths and rows."""

    def __init__(self, columns: Mapping[str, Column], samples: Rows, root: RootDirectory) -> None:
        first = next(iter(columns.values()))
        self._columns, self.paths = dict(columns), Paths(samples, first, root)
        if (missing := samples.table.missing(first.names[0])).size:
            message = f"no path; give one, or set null: drop in fields.{next(iter(columns))}"
            raise samples.table.origin.error(message, row=int(missing[0]), column=first.names[0])
        by, rows = dataset_column(first, samples.table), row_numbers(first, samples.table)
        codes, named = self.paths.distinct()
        # A table can name one file by several paths.
        real = (each if is_address(each) else os.path.realpath(each) for each in named)
        numbers, self._files = numbered(real)
        self._codes = numbers[codes]
        which, names = (np.zeros_like(rows), [""]) if by is None else samples.table.encoded(by)
        sources: list[HDF5Source] = []
        selected, total = np.empty_like(rows), 0
        for dataset, name in enumerate(names):
            own = np.flatnonzero(which == dataset)
            if own.size:
                source, numbers = self._open_dataset(name, own, rows[own])
                selected[own] = total + numbers
                total += len(source)
                sources.append(source)
        self.source = SubsetSource(sources[0] if len(sources) == 1 else ConcatSource(sources), selected)

    def _open_dataset(self, name: str, samples: Indices, rows: Indices) -> tuple[HDF5Source, Indices]:
        """A source of the files of one dataset, and the numbers of the samples in it."""
        used, place = np.unique(self._codes[samples], return_inverse=True)
        files = [self._files[code] for code in used.tolist()]
        fields = dict[str, Field]()
        for key, column in self._columns.items():
            null = column.null if column.null == "ignore" else "error"
            of = name or column.dataset or DATASET
            fields[key] = Field(of, dtype=column.dtype, classes=column.classes, null=null)
        layout = {key: column.layout for key, column in self._columns.items() if column.layout is not None}
        try:
            context = contextvars.copy_context()
            context.run(LOOKS.set, False)  # the source must not look at rows that the table does not name
            source = context.run(HDF5Source, files, fields, layout=layout, **self.paths.root.files.options)
        except SourceError as error:
            if error.file not in files:
                raise
            first = samples[place == files.index(error.file)][:1]
            raise self.paths.rows.with_row(error, int(first[0]), self.paths.of(first)[0][0]) from None
        lengths = np.array([part.samples for part in source.parts], np.int64)
        wrong = np.flatnonzero((rows < 0) | (rows >= lengths[place]))
        if wrong.size:
            first = int(wrong[0])
            message = f"{files[place[first]]} has rows 0 to {lengths[place[first]] - 1}, not {rows[first]}"
            row, named = int(samples[first]), next(iter(self._columns.values())).row
            raise self.paths.rows.table.origin.error(f"{message}; correct the row number", row=row, column=named)
        return source, starts(lengths)[place] + rows

    @property
    def chunks(self) -> StorageLayout:
        """Chunks in storage order, whatever the order of the table."""
        whole = self.source.source.chunks
        if not whole.runs:
            return whole
        order = np.argsort(self.source.samples, kind="stable")
        as_stored = SubsetSource(self.source.source, self.source.samples[order])
        return dataclasses.replace(as_stored.chunks, order=None if (np.diff(order) == 1).all() else order)

    def read(self, samples: Indices, out: Mapping[str, Array]) -> None:
        """After an error, samples are read one by one, to name the row of the table."""
        try:
            self.source.read_into(samples, out)
        except AsyncDataError as error:
            if len(samples) == 1:
                raise self.paths.rows.with_row(error, int(samples[0])) from error.__cause__
            for place in range(len(samples)):
                self.read(samples[place : place + 1], {key: array[place : place + 1] for key, array in out.items()})
            raise


def with_hdf5_columns(columns: Mapping[str, Column], table: Table, reader: TableReader) -> Table:
    wanted = {column.row for column in columns.values()} - set(table.names)
    if wanted:
        table = table.with_columns_of(reader.columns(sorted(wanted)))
    for name in sorted({column.dataset or DATASET_COLUMN for column in columns.values()} - set(table.names)):
        # If there is no such column, the name is that of a dataset.
        with contextlib.suppress(NoColumnError):
            table = table.with_columns_of(reader.columns([name]))
    return table


def dataset_column(column: Column, table: Table) -> str | None:
    name = column.dataset or DATASET_COLUMN
    return name if name in table.names else None


def row_numbers(column: Column, table: Table) -> Indices:
    missing = table.missing(column.row)
    if missing.size:
        raise table.origin.error("no row number; give one, or set null: drop", row=int(missing[0]), column=column.row)
    rows = table.labels(column.row, kind="number").values
    if rows.dtype.kind == "f" and rows.ndim == 1 and (np.abs(rows) < 2**53).all() and (rows % 1 == 0).all():
        rows = rows.astype(np.int64)  # pandas holds whole numbers as floats if one is missing
    if rows.dtype.kind != "i" or rows.ndim > 1:
        what = "does not hold whole numbers; rows of HDF5 files are counted from 0"
        raise ConfigError(f"column {column.row!r} {what}", "row")
    return rows


_SUSPICIOUS_ROWS = 10  # least rows for a warning that each has another class
_MAX_HEADER = 10_000  # bytes; numpy parses a header as Python, and a long one could crash the parser

_log = logging.getLogger(__name__)


class FileField:
    """One file per sample, or ``length`` files, padding included."""

    def __init__(self, paths: Paths, kind: Kind | None, column: Column, prefetcher: FilePrefetcher) -> None:
        self.paths, self._prefetcher, self.embedded, image = paths, prefetcher, paths.embedded, column.image

        def attempt(number: int) -> ImageDecoder | NpyDecoder:
            if kind == "image" and image.image_size is not None:
                return ImageDecoder.of(image, b"", "")
            sample = int(filled[number])
            path = paths.of(np.array([sample]))[0][0]
            try:
                data = self._bytes(sample, 0, path)
                return ImageDecoder.of(image, data, path) if kind == "image" else NpyDecoder.of(data, path)
            except SourceError as error:
                raise paths.failed(error, sample, path) from error.__cause__

        self.length, masked = None, False
        if paths.lengths is not None:
            self.length, masked = padded_length(paths.lengths, column.max_length, paths.rows.table.origin, paths.column)
        filled: Any = range(len(paths.rows)) if paths.lengths is None else np.flatnonzero(paths.lengths > 0)
        self.decoder = first_good(len(filled), attempt)
        self.spec = spec = self.decoder.spec
        if self.length is not None:
            channel = None if spec.channel is None else spec.channel + 1
            more: dict[str, Any] = {"channel": channel, "lead": spec.lead + 1, "masked": masked}
            self.spec = dataclasses.replace(spec, shape=(self.length, *spec.shape), **more)

    def read(self, samples: Indices, out: Array, keys: Words | None) -> Places:
        """Read files; crops take the middle without ``keys``. Returns images by place of the sample and in its list."""
        drawn, known = self.decoder.draws(keys, len(samples)), self.decoder.head
        if self.embedded is not None or out.dtype != self.spec.dtype or not out.flags.c_contiguous:
            known = None  # the decoder copies, or raises
        head = bytearray(known or b"")
        nbytes = len(head) + self.decoder.spec.nbytes
        decode_s, stored, shown = 0.0, 0, dict[Any, Shown]()
        if self.spec.masked:
            out[~self.mask(samples)] = 0
        for place, files in enumerate(self.paths.of(samples)):
            sample = int(samples[place])
            for item, path in enumerate(files):
                view = out[place, ...] if self.length is None else out[place, item, ...]
                try:
                    if known is not None and self._prefetcher.fill(path, (head, view), nbytes) and head == known:
                        continue  # takes half the time: the file has the bytes of the sample
                    data = self._bytes(sample, item, path)
                    began = time.perf_counter()
                    if image := self.decoder.decode(data, view, drawn[place], path):
                        shown[place, item] = image
                    decode_s += time.perf_counter() - began
                    stored += len(data)
                except AsyncDataError as error:
                    raise self.paths.failed(error, sample, path, item) from error.__cause__
        if stored:
            CLOCK.add(decode_s=decode_s, stored=stored, decoded=out.nbytes)
        return shown

    def mask(self, samples: Indices) -> npt.NDArray[np.bool_]:
        assert self.paths.lengths is not None
        return np.asarray(np.arange(self.length or 0) < self.paths.lengths[samples, None])

    def _bytes(self, sample: int, item: int, path: str) -> bytes:
        if self.embedded is None:
            return self._prefetcher.read(path)
        data, named = self.embedded.file(sample, item)
        if data is None:
            what = "no bytes" + (f", only the path {quoted(named)} of a file that is not in the table" if named else "")
            raise FormatError(f"{path}: {what}; write them into it{self.paths.or_drop(sample)}")
        return data

    def fetch(self, samples: Indices) -> bool:
        if self.embedded is None and self._prefetcher.wanted:
            texts = filter(None, itertools.chain(*self.paths.texts(samples)))
            self._prefetcher.fetch(map(self.paths.root.named, texts))
            return True
        return False


class Fields:
    """Fields by batch key: ``labels``, ``files``, and ``hdf5``, where fields with the same columns are together.

    ``rows`` are the samples; ``excluded`` are the numbers of rows that ``exclude`` has left out, counted before that.
    ``left_out`` tells the rows that options have left out; empty if there are none.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        reader: TableReader,
        root: RootDirectory,
        id: str | None,  # noqa: A002  # the user's word
        exclude: Exclude | None = None,
    ) -> None:
        self._columns, self.root = dict(columns), root
        names = [name for column in columns.values() for name in column.names]
        table = reader.columns([*names, *([] if id is None else [id])])
        kinds: dict[str, Kind | None] = {key: kind_of(key, column, table, root) for key, column in columns.items()}
        files = {key: columns[key] for key, kind in kinds.items() if kind in FILES}
        hdf5 = {key: column for key, column in files.items() if kinds[key] == "hdf5"}
        inline = {key: column for key, column in columns.items() if key not in files}
        count, dropping = int(table.origin.starts[-1]), [column for column in columns.values() if column.null == "drop"]
        dropped = [
            table.missing(name, column.separator, column.classes) for column in dropping for name in column.names
        ]
        table = _without(table, reader, dropped)
        table = with_hdf5_columns(hdf5, table, reader)
        table = _without(table, reader, [table.missing(each.row) for each in hdf5.values() if each.null == "drop"])
        if id is not None:
            table = table.with_ids(id)
        table, self.labels = _labels(inline, table, reader)
        self.excluded = np.empty(0, np.int64)
        if exclude is not None:
            rows = Rows(table, id)
            paths = [Paths(rows, column, root) for column in files.values()]
            self.excluded = np.flatnonzero(~rows.kept(exclude, [each for each in paths if each.embedded is None]))
            table = _without(table, reader, [self.excluded])
            table, self.labels = _labels(inline, table, reader)
        self.left_out = renumbered(len(table), count)
        self.rows = Rows(table, id)
        self.prefetcher = FilePrefetcher(root)
        self.files = dict[str, FileField]()
        for key, column in files.items():
            if key not in hdf5:
                with within(f"fields.{key}."):
                    self.files[key] = FileField(Paths(self.rows, column, root), kinds[key], column, self.prefetcher)
        self.hdf5, groups = list[HDF5Fields](), dict[Any, dict[str, Column]]()
        for key, column in hdf5.items():  # fields of the same rows together, so that each file is opened once
            groups.setdefault((column.names[0], column.row, dataset_column(column, table)), {})[key] = column
        for group in groups.values():
            with within(f"fields.{next(iter(group))}."):
                self.hdf5.append(HDF5Fields(group, self.rows, root))
        images = {key: columns[key].image for key in self.files if kinds[key] == "image"}
        arrays = {key: spec.shape for key, spec in self.specs.items() if key not in images}
        self.alignment = Alignment(images, arrays, {key: columns[key].names[0] for key in images})

    @property
    def specs(self) -> dict[str, FieldSpec]:
        specs = {key: each.spec for key, each in (self.labels | self.files).items()}
        for fields in self.hdf5:
            specs.update(fields.source.spec)
        found = dict[str, FieldSpec]()
        for key in self._columns:
            found[key] = specs[key]
            if specs[key].masked:
                if mask_key(key) in self._columns:
                    what = f"{mask_key(key)} is the field that tells the padding of {key}; choose another key"
                    raise ConfigError(what, f"fields.{mask_key(key)}")
                found[mask_key(key)] = FieldSpec(specs[key].shape[:1], np.dtype(bool))
        return found

    @property
    def embedded(self) -> list[EmbeddedFiles]:
        """Those whose groups must be decoded."""
        found = [field.embedded for field in self.files.values() if field.embedded is not None]
        return [each for each in found if any(each.groups.nbytes)]

    @property
    def paths(self) -> Paths | None:
        """The paths of the first field with files; None if no field has files."""
        by_key = {key: field.paths for key, field in self.files.items() if field.embedded is None}
        by_key |= {key: fields.paths for fields in self.hdf5 for key in fields.source.spec}
        return next((by_key[key] for key in self._columns if key in by_key), None)

    def read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        for key, labels in self.labels.items():
            if key in out:
                np.take(labels.values, samples, axis=0, out=out[key], mode="clip")  # other modes copy `out` first
        for fields in self.hdf5:
            requested = {key: out[key] for key in fields.source.spec if key in out}
            if requested:
                fields.read(samples, requested)
        self._read_files(samples, out, keys)
        for key, field in (self.labels | self.files).items():
            if field.spec.masked and mask_key(key) in out:
                out[mask_key(key)][...] = field.mask(samples)

    def _read_files(self, samples: Indices, out: Mapping[str, Array], keys: Words | None) -> dict[str, Places]:
        found = {key: file.read(samples, out[key], keys) for key, file in self.files.items() if key in out}
        for key, (place, item), what in self.alignment.mismatches(found):
            paths, sample = self.files[key].paths, samples[place : place + 1]
            path = paths.of(sample)[0][item]
            raise paths.failed(FormatError(f"{path}: {what}"), int(sample[0]), path, item)
        return found

    def check_first(self, spec: BatchSpec) -> None:
        """Read the first good sample of each field; aligned images are read together."""
        together = [key for key in self.files if key in self.alignment.keys]
        for keys in [together, *([key] for key in self.files if key not in together)]:
            out = spec.empty(1, keys)

            def attempt(sample: int, out: Mapping[str, Array] = out) -> dict[str, Places]:
                return self._read_files(np.array([sample]), out, None)

            self.alignment.check_modes(first_good(len(self.rows), attempt))

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """Text labels by the numbers of other classes, where the user gave none."""
        changed, own = copy.copy(self), [key for key in self.labels if key in classes]
        encoded = {key: self._encoded(self._columns[key], self.labels[key], classes[key]) for key in own}
        changed.labels = self.labels | encoded
        return changed

    def _encoded(self, column: Column, labels: Labels, classes: Sequence[str]) -> Labels:
        if column.classes is not None or column.kind == "number" or column.several:
            return labels
        table, own = self.rows.table, column.names[0]

        def unknown(row: int, name: str) -> ManifestError:
            what = f"{quoted(name)} is not one of the {len(classes)} classes ({listed(classes)}) of training. If this "
            what += f'column is a label, name all its classes: {{"name": {json.dumps(own)}, "classes": [...]}}. If it '
            what += "only says whose samples these are, such as a patient, set kind: text; "
            return table.origin.error(f"{what}source.spec.names(KEY, batch[KEY]) gives the text", row=row, column=own)

        if labels.classes or labels.texts:
            labels = labels.of_classes(classes, unknown)
        elif table.origin.untyped and table.is_text(own):  # text that was read as numbers
            labels = labels_of(dataclasses.replace(column, classes=tuple(classes)), table)
        return _cast(column, labels, table)


def _without(table: Table, reader: TableReader, dropped: Sequence[Indices]) -> Table:
    kept = np.ones(len(table), np.bool_)
    for rows in dropped:
        kept[rows] = False
    if kept.all():
        return table
    if not kept.any():
        raise table.origin.error("null: drop removes all of its rows; check the column, or set null: ignore")
    rows = np.flatnonzero(kept)
    reader.select(rows)
    return table.taken(rows)


# -- .npy files --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NpyDecoder:
    """Has the members of `ImageDecoder`."""

    spec: FieldSpec
    stored: np.dtype[Any]
    head: bytes | None = None
    images = is_random = False

    @staticmethod
    def of(data: bytes, where: str) -> NpyDecoder:
        header = npy_header(data, where)
        dtype = header.dtype.newbyteorder("=")
        if (dtype.kind, dtype.itemsize) not in TENSOR_TYPES:
            raise FormatError(f"{where}: holds {header.dtype}, which no tensor can hold; store another dtype")
        if not math.prod(header.shape):
            raise FormatError(f"{where}: an empty array of shape {header.shape}; leave it out")
        # Whole-number scalars are int64 in all sources, since losses need it.
        delivered = np.dtype(np.int64) if not header.shape and dtype.kind in "iu" else dtype
        is_stored_sample = header.dtype == delivered and header.dtype.isnative and not header.fortran
        head = bytes(data[: header.start]) if is_stored_sample else None
        return NpyDecoder(FieldSpec(header.shape, delivered), dtype, head)

    def draws(self, keys: Words | None, count: int) -> Sequence[None]:  # noqa: ARG002  # nothing is drawn
        return [None] * count

    def decode(self, data: bytes, out: Array, draw: Draw, where: str) -> None:  # noqa: ARG002
        header = npy_header(data, where)
        expected = out.shape, self.stored if out.dtype == self.spec.dtype else out.dtype
        if (header.shape, header.dtype.newbyteorder("=")) != expected:
            what = f"holds {header.dtype} of shape {header.shape}, but {expected[1]} of shape {expected[0]} is expected"
            raise FormatError(f"{where}: {what}; store arrays of one shape and type, padded or cropped")
        values = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start)
        out[...] = values.reshape(header.shape, order="F" if header.fortran else "C")


class NpyHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def npy_header(data: Any, where: str) -> NpyHeader:
    if bytes(data[: len(npy_format.MAGIC_PREFIX)]) != npy_format.MAGIC_PREFIX:
        what = mistaken(bytes(data[:HEAD_BYTES]))
        raise FormatError(f"{where}: {f'is {what}' if what else 'not a .npy file; write it with numpy.save'}")
    width = 2 if bytes(data[len(npy_format.MAGIC_PREFIX) : npy_format.MAGIC_LEN]) == b"\x01\x00" else 4
    length = int.from_bytes(data[npy_format.MAGIC_LEN : npy_format.MAGIC_LEN + width], "little")
    try:
        header = _parsed(bytes(data[: npy_format.MAGIC_LEN + width + min(length, _MAX_HEADER + 1)]))
    except Exception as error:  # numpy raises many types of errors for damaged headers
        what = f"the header of the .npy file cannot be read ({error}); fetch the file again"
        raise CorruptError(f"{where}: {what}") from error
    if header.dtype.hasobject:
        raise FormatError(f"{where}: holds Python objects, and pickle can run any code; store numbers")
    expected, actual = math.prod(header.shape) * header.dtype.itemsize, len(data) - header.start
    if actual != expected:
        what = f"{actual} bytes follow the header, but {header.dtype} of shape {header.shape} has {expected}"
        raise CorruptError(f"{where}: {what}; fetch the file again")
    return header


# Files of one field share a header: without the cache, parsing took 25 of 30 µs per file.
@functools.lru_cache(maxsize=64)
def _parsed(head: bytes) -> NpyHeader:
    stream = io.BytesIO(head)
    # Version 3 differs from 2 only in the encoding of field names, and tensors cannot hold records.
    first = npy_format.read_magic(stream) == (1, 0)
    read = npy_format.read_array_header_1_0 if first else npy_format.read_array_header_2_0
    shape, fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    return NpyHeader(shape, dtype, fortran, stream.tell())


# -- labels ------------------------------------------------------------------------------------------------------------


def _labels(columns: Mapping[str, Column], table: Table, reader: TableReader) -> tuple[Table, dict[str, Labels]]:
    """The labels of columns, and the table without rows that any of the columns drops."""
    labels = {}
    for key, column in columns.items():
        with within(f"fields.{key}."):
            labels[key] = labels_of(column, table)
    if dropped := [each.dropped for each in labels.values() if each.dropped.size]:
        # NaN and missing values in lists are known only now. Classes that only dropped rows have must vanish, too.
        return _labels(columns, _without(table, reader, dropped), reader)
    for key, each in labels.items():
        labels[key] = _cast(columns[key], each, table)
        if columns[key].kind is None and columns[key].classes is None and (what := no_repeats(each)):
            _log.warning("column %s: %s", quoted(columns[key].names[0]), what)
    return table, labels


def labels_of(column: Column, table: Table) -> Labels:
    kind = column.kind
    if kind is None and column.classes is None and table.origin.untyped:
        kind = "number" if all(is_number(table.first(name, column.separator)) for name in column.names) else None
    names = list(column.names) if column.several else column.names[0]
    options: dict[str, Any] = {name: getattr(column, name) for name in ("classes", "null", "separator", "max_length")}
    return table.labels(names, kind=kind, **options)


def _cast(column: Column, labels: Labels, table: Table) -> Labels:
    def unfit(row: int, message: str) -> ManifestError:
        return table.origin.error(message, row=row, column=", ".join(column.names))

    return labels.cast(None if column.dtype is None else np.dtype(column.dtype), unfit)


def no_repeats(labels: Labels) -> str:
    """A warning if each text is another class; empty if texts repeat."""
    count = np.count_nonzero(labels.values) if labels.values.ndim > 1 else len(labels.values)
    what = f"each of its {count} texts is another class; for captions or ids, set kind: text; for paths of files, "
    what += "kind: image or kind: npy, and suffix if they lack an ending, and check root"
    return what if len(labels.classes) == count >= _SUSPICIOUS_ROWS else ""
