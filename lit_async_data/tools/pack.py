"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. A pack that fails or is interrupted leaves no file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import math
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import h5py
import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.engine.resources import readable
from lit_async_data.errors import ConfigError, CorruptError, SourceError, counted
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.contract.source import Source, read, starts
from lit_async_data.sources.hdf5.parts.part import PACKED_PARTS
from lit_async_data.sources.hdf5.schema.categories import PACKING
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.codecs import LZ4, ZSTD, write_chunk
from lit_async_data.sources.hdf5.storage.failures import as_source_errors
from lit_async_data.sources.hdf5.storage.handles import open_h5py
from lit_async_data.sources.local_files import is_address, local_path
from lit_async_data.tools.call import Call, add_source_arguments
from lit_async_data.tools.inspect import given_call
from lit_async_data.tools.terminal import INPUT_CHUNKS, Piece, Progress, in_threads, progress_bar

# Bytes of samples that a thread reads and compresses at a time; and the most, where the chunks of the input need more.
PIECE_BYTES, MOST_PIECE_BYTES = 4 * 2**20, 64 * 2**20
PARTS = "parts"  # the group of the sections, where the parts of the input stay apart
FILTERS = {"deflate": ("gzip", 6), "zstd": (ZSTD, (3,)), "lz4": (LZ4, (0,))}  # that undo each codec, and options
NAMES = ("none", *FILTERS)
# Samples of this size have a chunk each, so that any order decodes only its samples. Smaller samples share chunks.
ALONE_BYTES, CHUNK_BYTES = 4096, 64 * 1024
# Smaller samples, such as labels, are never compressed; nor are chunks that only libhdf5 could read.
LEAST_BYTES, MOST_CHUNK_BYTES = 64, 2**30
# ``auto`` compresses a field if that saves this share of its bytes; the shuffle filter must save another share.
LEAST_SAVED, SHUFFLE_SAVED = 1 / 3, 0.02
# The trial reads the input at several places: bytes at each, samples at each, number of places.
TRIAL_BYTES, TRIAL_SAMPLES, TRIAL_PLACES = 512 * 1024, 128, 8
TEXT = h5py.string_dtype()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="HDF5 files (and a table of labels), a table, or a folder")
    add("-o", "--output", required=True, metavar="OUT.h5", help="the file to write")
    add_source_arguments(parser)
    add("--columns", nargs="+", default=[], metavar="NAME", help="keep more columns, for groups of a split")
    auto = "auto: deflate where it saves a third, none if the input has none"
    add("--codec", choices=["auto", *NAMES], default="auto", help=auto)
    add("--chunk", type=int, metavar="N", help="samples per chunk; by default one, or 64 KiB of small ones")
    add("--keep-parts", action="store_true", help="files, or groups in them, become groups; windows cross no group")
    add("--force", action="store_true", help="replace OUT.h5 if it exists")


def run(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in ("codec", "chunk", "columns", "keep_parts", "force")}
    call = given_call(arguments.input, arguments, whole=True)
    with contextlib.closing(call.build()) as source, progress_bar(sys.stderr) as progress:
        packed = pack(source, arguments.output, progress=progress, **given)
    suggested = "" if arguments.fields else f"as inspect suggests: {call.python().splitlines()[-1]}\n"
    if suggested and (left_out := [name for name in call.left_out if name not in arguments.columns]):
        suggested += f"not packed: {', '.join(left_out)}; name all with --fields KEY=NAME …\n"
    sys.stdout.write(suggested + report(packed, arguments.output))


def report(packed: Packed, path: str) -> str:
    plan, decoded = packed.plan, sum(math.prod(each.shape) * each.dtype.itemsize for each in packed.plan.fields)
    sizes = f"{readable(os.path.getsize(local_path(path)))} ({readable(packed.samples * decoded)} decoded)"
    lines = [f"{path}: {packed.samples:,} samples, {sizes}, every value compared"]
    width = max(len(field.key) for field in plan.fields)
    for field in plan.fields:
        shape = f" {field.shape}" if field.shape else ""
        classes = f", {len(field.classes)} classes" if field.classes else ""
        codec = f"{'shuffle and ' if field.shuffle else ''}{plan.codec}"
        how = f"chunks of {counted(field.chunk, 'sample')}, {codec}" if field.chunk else "contiguous"
        lines.append(f"  {field.key:<{width}}  {field.dtype}{shape}{classes}; {how}")
    fields = {field.key: field.given(unpacked=bool(field.packing)) for field in plan.fields}
    program = Call("HDF5Source", path, fields, plan.source_options).python()
    return "\n".join([*lines, "Read it with", *(f"  {line}" for line in program.splitlines()), ""])


class Packed(NamedTuple):
    samples: int
    plan: Plan


def pack(
    source: Source,
    out: str | os.PathLike[str],
    *,
    codec: str = "auto",
    chunk: int | None = None,
    columns: Sequence[str] = (),
    keep_parts: bool = False,
    force: bool = False,
    progress: Progress = lambda *_: None,
) -> Packed:
    """Write the samples of a source into one HDF5 file that is fast to read at random, and compare every value.

    Until all is compared, the file is called ``OUT.PID.part``. A call that fails or is interrupted removes it. The
    options are those of the command line; see docs/tools/pack.md. ``progress`` is called with ``packing`` or
    ``comparing``, and how many of how many bytes of samples are done.

    Example:
        >>> import numpy, tempfile
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": numpy.zeros((5, 8, 8), "u1"), "y": numpy.arange(5)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pack(source, folder + "/x.h5").samples
        5
    """
    if is_address(str(out)):
        raise ConfigError(f"{out}: pack writes files of this machine; pack into one, and copy it there", "output")
    path = local_path(out)
    part = f"{path}.{os.getpid()}.part"
    _check_names(source, columns)
    _check_output(source, path, force=force)
    plan = planned(source, codec, chunk, keep_parts=keep_parts)
    try:
        with h5py.File(part, "x", libver=("earliest", "v110")) as file:  # for old programs, too
            _Writer(file, source, plan, columns).write_all(progress)
        with open(part, "rb+", buffering=0) as written:
            os.fsync(written.fileno())
        _compare(source, plan, part, columns, progress)
        _check_output(source, path, force=force)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        advice = "check that you may write there, and that the disk works and has space, and run the same again"
        raise SourceError(f"{path}: cannot be written: {error}; {advice}", file=path) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return Packed(len(source), plan)


def _check_names(source: Source, columns: Sequence[str]) -> None:
    if source.chunks.random:
        larger = "pack with resize: crop or pad, in a larger image_size, and crop at random in a transform"
        raise ConfigError(f"a packed file has the same crop in every epoch; {larger}", "resize")
    for key, field in source.spec.fields.items():
        if (field.lead and field.channel is not None) or (field.texts and field.masked and not field.lead):
            what = "is a list or a window; leave it out, or pack single images, and give the packed file the window"
            raise ConfigError(what, f"fields.{key}")
    names = [*source.spec.fields, *columns]
    for name in names:
        if not name.strip("/") or name.split("/")[0] in ("origin", PARTS) or names.count(name) > 1:
            raise ConfigError(f"{name!r} cannot name a dataset, or names two; give another key: KEY=NAME", "fields")


def _check_output(source: Source, path: str, *, force: bool) -> None:
    for each in {each.file for each in source.parts}:
        if os.path.exists(each) and os.path.exists(path) and os.path.samefile(each, path):
            raise ConfigError(f"{path}: is also the input; leave it out there, or give another output")
    if os.path.isdir(path):
        raise ConfigError(f"{path}: is a folder; give the name of a file")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path}: exists already, and is not touched; give another name, or --force to replace it")


@dataclasses.dataclass(frozen=True)
class PackedField:
    key: str  # also the name of the dataset
    shape: tuple[int, ...]  # of a stored sample
    dtype: np.dtype[np.generic]
    channel: int | None  # axis of the stored sample
    classes: tuple[str, ...]
    packing: Mapping[str, Any]  # attributes that say how to unpack the values (NetCDF)
    missing: bool  # whether some of its codes are −1, for no class
    chunk: int = 0  # samples per chunk; 0 if it is contiguous
    shuffle: bool = False

    @property
    def categorical(self) -> bool:
        """Stored as codes and categories, which `HDF5Source` takes class names from."""
        return bool(self.classes) and not self.shape

    @property
    def dataset(self) -> str:
        return f"{self.key}/codes" if self.categorical else self.key

    @property
    def layout(self) -> str:
        """Empty if `HDF5Source` needs none."""
        letters, channel = "HWDTABEFGIJKLMOPQRSUVXYZ"[: len(self.shape) - 1], self.channel
        return "" if channel is None else f"N{letters[:channel]}C{letters[channel:]}"

    def given(self, *, unpacked: bool = False) -> str | dict[str, Any]:
        options: dict[str, Any] = {"classes": list(self.classes)} if self.classes and self.shape else {}
        options |= ({"null": "ignore"} if self.missing else {}) | ({"mask_and_scale": True} if unpacked else {})
        return {"name": self.key, **options} if options else self.key


@dataclasses.dataclass(frozen=True)
class Plan:
    fields: Sequence[PackedField]
    codec: str  # of the fields that have chunks
    sections: Sequence[tuple[str, int]]  # groups and their numbers of samples; one without a name is the root
    step: int  # samples per piece: whole chunks of the output, and of the input where these are not too large

    @property
    def source_options(self) -> dict[str, Any]:
        layout = {field.key: field.layout for field in self.fields if field.layout}
        return ({"layout": layout} if layout else {}) | ({"group": f"{PARTS}/*"} if self.sections[0][0] else {})

    def pieces(self) -> Iterator[Piece]:
        begins = itertools.accumulate((rows for _, rows in self.sections), initial=0)
        for (group, rows), begin in zip(self.sections, begins, strict=False):
            for row in range(0, rows, self.step):
                yield Piece(group, rows, row, np.arange(begin + row, begin + min(row + self.step, rows)))


def planned(source: Source, codec: str, chunk: int | None, *, keep_parts: bool) -> Plan:
    auto, fields = codec == "auto", _contiguous(source)
    if auto:  # contiguous, if the input need not be decoded either
        codec = "none" if chunk is None and source.chunks.reading in ("copied", "opened") else "deflate"
    if codec not in NAMES:
        raise ConfigError(f"{codec!r} is not one of auto, {', '.join(NAMES)}", "codec")
    try:
        encoded(np.zeros(1), codec, shuffle=False)
    except ImportError:
        raise ConfigError(f"{codec} needs a library: pip install 'lit-async-data[codecs]'", "codec") from None
    if chunk is not None and (chunk < 1 or codec == "none"):
        raise ConfigError(f"{chunk}: chunks need a codec and a number of samples from 1 on; leave it out", "chunk")
    if codec != "none":
        run = int(np.clip(TRIAL_BYTES // max(source.spec.nbytes, 1), 1, min(TRIAL_SAMPLES, len(source))))
        begins = np.linspace(0, len(source) - run, TRIAL_PLACES).astype(np.int64)
        tried = read(source, np.unique(begins[:, None] + np.arange(run)))
        fields = [_chunked(field, tried[field.key], codec, chunk, auto=auto) for field in fields]
    sections = [("", len(source))]
    if keep_parts:
        sections = [(f"{PARTS}/{number}", part.samples) for number, part in enumerate(source.parts)]
    own, nbytes = max(1, *(field.chunk for field in fields)), max(source.spec.nbytes, 1)
    both = math.lcm(own, source.chunks.rows)
    step = both if both * nbytes <= MOST_PIECE_BYTES else own
    return Plan(fields, codec, sections, max(PIECE_BYTES // nbytes // step, 1) * step)


def _chunked(field: PackedField, tried: Array, codec: str, chunk: int | None, *, auto: bool) -> PackedField:
    """The field in chunks, if chunks save enough bytes of the tried samples."""
    nbytes, values = math.prod(field.shape) * field.dtype.itemsize, tried.astype(field.dtype, copy=False)
    small = auto and chunk is None and nbytes < ALONE_BYTES
    if small or nbytes < LEAST_BYTES or nbytes * (chunk or 1) > MOST_CHUNK_BYTES:
        return field
    rows = chunk or (1 if nbytes >= ALONE_BYTES else 2 ** (CHUNK_BYTES // nbytes).bit_length() // 2)
    chunks = [values[at : at + rows] for at in range(0, len(values), rows)]
    plain, shuffled = (sum(len(encoded(each, codec, shuffle=how)) for each in chunks) for how in (False, True))
    shuffle = shuffled < (1 - SHUFFLE_SAVED) * plain
    if auto and (shuffled if shuffle else plain) > (1 - LEAST_SAVED) * values.nbytes:
        return field
    return dataclasses.replace(field, chunk=rows, shuffle=shuffle)


def _contiguous(source: Source) -> list[PackedField]:
    parts = source.stored_parts if isinstance(source, HDF5Source) else []
    packings, fields = _packings(source) if isinstance(source, HDF5Source) else {}, list[PackedField]()
    for key, each in source.spec.fields.items():
        stored = [part.fields[key] for part in parts]
        dtype, classes, scalar, missing = each.dtype, each.classes or each.texts, not each.shape, False
        if stored and scalar and dtype.kind in "iu" and all(field.plain for field in stored):
            dtype = np.result_type(*(field.values.dtype.newbyteorder("=") for field in stored))
        if scalar and classes:
            missing = bool((source.column(key) == IGNORED).any())
            dtype = np.min_scalar_type(-len(classes) if missing else max(len(classes) - 1, 1))
        fields.append(PackedField(key, each.stored_shape, dtype, each.channel, classes, packings.get(key, {}), missing))
    return fields


def _packings(source: HDF5Source) -> dict[str, dict[str, Any]]:
    """The attributes that say how to unpack the values of a field (NetCDF), alike in all files."""
    packings, parts = dict[str, dict[str, Any]](), source.stored_parts
    keys = {key for part in parts for key, field in part.fields.items() if field.packed}
    for part in parts if keys else ():
        with as_source_errors(part.path, "cannot be read", file=part.path), open_h5py(part.path, source.files) as file:
            for key in keys:
                found: Any = file[part.fields[key].values.name].attrs
                packing = {name: found[name] for name in PACKING if name in found}
                first = packings.setdefault(key, packing)
                if len({str([(n, np.asarray(each[n]).tobytes()) for n in each]) for each in (first, packing)}) > 1:
                    advice = "pack unpacked values: in Python, of an HDF5Source with Field(…, mask_and_scale=True)"
                    what = f"{key} is packed in another way in {part} than in {parts[0]}"
                    raise ConfigError(f"{what}; {advice}", "fields")
    return packings


def encoded(values: Array, codec: str, *, shuffle: bool) -> bytes:
    """A C-contiguous chunk as stored, made without libhdf5, its lock and the GIL."""
    data: Any = values.reshape(-1).view(np.uint8)
    if shuffle:
        data = np.ascontiguousarray(data.reshape(-1, values.itemsize).T).reshape(-1)
    if codec == "zstd":
        return bytes(import_module("imagecodecs").zstd_encode(data, level=3))
    if codec == "lz4":
        return bytes(import_module("imagecodecs").lz4h5_encode(data))
    with contextlib.suppress(ImportError):
        return bytes(import_module("deflate").zlib_compress(data, 6))
    return zlib.compress(data, 6)


class _Writer:
    def __init__(self, file: h5py.File, source: Source, plan: Plan, columns: Sequence[str]) -> None:
        self._file, self._source, self._plan = file, source, plan
        names = [f"{part.file}:/{part.group.strip('/')}".removesuffix(":/") for part in source.parts]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._parts = np.array([numbers[name] for name in names])
        self._starts = starts([part.samples for part in source.parts])
        first: Any = source.locate(source.ids(np.zeros(1, np.int64)))[0]
        self._texts = [name for name in ("id", "path") if getattr(first, name, None) is not None]
        file.create_dataset(PACKED_PARTS, data=list(numbers), dtype=TEXT)
        kept, begin = {name: _column(source, name) for name in columns}, 0
        for group, rows in plan.sections:
            holder = file.require_group(group or "/")
            for field in plan.fields:
                self._make(holder, field, rows)
            for name, kind in {"part": np.int32, "row": np.int64, **dict.fromkeys(self._texts, TEXT)}.items():
                holder.create_dataset(f"origin/{name}", (rows,), kind)
            for name, values in kept.items():
                dtype = TEXT if values.dtype == object else values.dtype
                holder.create_dataset(name, data=values[begin : begin + rows], dtype=dtype)
            begin += rows

    def _make(self, holder: h5py.Group, field: PackedField, rows: int) -> None:
        if field.categorical:  # as AnnData stores categories
            group = holder.require_group(field.key)
            group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
            group.create_dataset("categories", data=list(field.classes), dtype=TEXT)
        options: dict[str, Any] = {"fill_time": "never"}
        if field.chunk:
            options |= {"chunks": (min(field.chunk, rows), *field.shape), "shuffle": field.shuffle}
            options |= dict(zip(("compression", "compression_opts"), FILTERS[self._plan.codec], strict=True))
        shape = (rows, *field.shape)
        holder.create_dataset(field.dataset, shape, field.dtype, allow_unknown_filter=True, **options)
        holder[field.key].attrs.update(field.packing)

    def _encoded(self, piece: Piece) -> dict[str, Any]:
        """Values and lists of stored chunks, by dataset. In any thread."""
        values, found = read(self._source, piece.samples), dict[str, Any]()
        for field in self._plan.fields:
            stored = values.pop(field.key)
            stored = np.where(stored == IGNORED, -1, stored) if field.missing else stored
            stored = found[field.dataset] = stored.astype(field.dtype, copy=False)
            if field.chunk:
                rows = min(field.chunk, piece.rows)
                missing = np.zeros((-len(stored) % rows, *field.shape), field.dtype)  # all chunks are equally long
                stored = np.concatenate([stored, missing]) if len(missing) else stored
                chunks = (stored[row : row + rows] for row in range(0, len(stored), rows))
                found[field.dataset] = [encoded(chunk, self._plan.codec, shuffle=field.shuffle) for chunk in chunks]
        places: Any = self._source.locate(self._source.ids(piece.samples))
        found["origin/part"] = self._parts[np.searchsorted(self._starts, piece.samples, side="right") - 1]
        found["origin/row"] = [each.row for each in places]
        for name in self._texts:  # bytes of a file name that are no text are spelled out
            texts = (getattr(each, name) or "" for each in places)
            found[f"origin/{name}"] = [text.encode(errors="backslashreplace").decode() for text in texts]
        return found

    def write_all(self, progress: Progress) -> None:
        work = in_threads(self._encoded, self._plan.pieces(), "packing", self._source, progress)
        with contextlib.closing(work) as pieces:
            for piece, stored in pieces:
                for name, values in stored.items():
                    dataset: Any = self._file[f"{piece.group}/{name}"]
                    if dataset.chunks is None:
                        dataset[piece.row : piece.row + len(piece.samples)] = values
                        continue
                    for row, chunk in zip(itertools.count(piece.row, dataset.chunks[0]), values, strict=False):
                        write_chunk(dataset, (row, *[0] * (dataset.ndim - 1)), 0, chunk)


def packed_source(path: str, plan: Plan) -> HDF5Source:
    return HDF5Source(path, {field.key: field.given() for field in plan.fields}, **plan.source_options)


def _compare(source: Source, plan: Plan, part: str, columns: Iterable[str], progress: Progress) -> None:
    """Types, columns and all values, byte by byte, so that NaN equals the same NaN."""
    integers, fields = np.dtype(np.int64), source.spec.fields  # in which `HDF5Source` delivers whole numbers
    types = {key: integers if not it.shape and it.dtype.kind in "iu" else it.dtype for key, it in fields.items()}

    def work(piece: Piece) -> None:
        values, others = read(source, piece.samples), read(packed, piece.samples)
        for key, dtype in types.items():
            _check(source, key, values.pop(key).astype(dtype, copy=False), others.pop(key), piece.samples)

    with contextlib.closing(packed_source(part, plan)) as packed:
        release = packed.reserve(INPUT_CHUNKS, 0)
        for key, field in fields.items():
            other = packed.spec[key]
            if (field.shape, types[key], field.classes or field.texts) != (other.shape, other.dtype, other.classes):
                raise CorruptError(f"{packed.name}: {key} is {other} instead of {field}", dataset=key)
        for name in columns:
            _check(source, name, _column(source, name), _column(packed, name), np.arange(len(source)))
        collections.deque(in_threads(work, plan.pieces(), "comparing", source, progress), maxlen=0)
        release()


def _column(source: Source, name: str) -> Array:
    """The values as pack stores them: text as str, empty where it is missing."""
    values = source.column(name)
    texts = values.tolist() if values.dtype.kind in "OUS" else None
    return values if texts is None else np.array(["" if each is None else str(each) for each in texts], object)


def _check(source: Source, key: str, expected: Array, found: Array, samples: Indices) -> None:
    if expected.dtype != object:
        pair = (np.ascontiguousarray(each.astype(expected.dtype, copy=False)) for each in (expected, found))
        expected, found = (each.reshape(-1).view(np.uint8).reshape(len(samples), -1) for each in pair)
    if np.array_equal(expected, found):
        return
    number = int(samples[(expected != found).reshape(len(samples), -1).any(axis=1).argmax()])
    place = source.locate(source.ids(np.array([number])))[0]
    what = f"{key}, sample {number} ({getattr(place, 'path', None) or place.file}, row {place.row}): the packed value "
    what += "differs from the input; did the input change meanwhile? Pack it again, and check memory and disk"
    raise CorruptError(what, file=place.file, dataset=key, row=place.row, sample_id=number)
