"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. A pack that fails or is interrupted leaves no file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import h5py
import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.engine.resources.memory import readable
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, FormatError, SourceError, counted
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.contract.places import starts
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.stored_chunk import write_chunk
from lit_async_data.sources.local_files.retrying import errno_of
from lit_async_data.system import usable_cores
from lit_async_data.tools.call import Call, add_source_arguments, given_source
from lit_async_data.tools.pack.plan import FILTERS, NAMES, PARTS, PackedField, Piece, Plan, encoded
from lit_async_data.tools.terminal import ProgressLine

# Decoded chunks of the input that stay in memory, and pieces per thread at a time.
INPUT_CHUNKS, AHEAD = 2, 2
TEXT = h5py.string_dtype()

Progress = Callable[[str, int, int], object]
_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="HDF5 files, or one table, or one folder")
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
    call = given_source(arguments.input, arguments)
    if call.source == "ManifestSource" and not call.fields:
        raise ConfigError(f"missing; which columns of {call.path}? For example --fields x=path y=label", "fields")
    with contextlib.closing(call.build()) as source:
        progress = ProgressLine(sys.stderr)
        try:
            packed = pack(source, arguments.output, progress=progress, **given)
        finally:
            progress.end()
    sys.stdout.write(report(packed, arguments.output))


def report(packed: Packed, path: str) -> str:
    plan, took = packed.plan, timedelta(seconds=round(packed.seconds))
    sizes = f"{readable(packed.nbytes)} ({readable(packed.decoded)} decoded)"
    lines = [f"{path}: {packed.samples:,} samples, {sizes}, every value compared, in {took}"]
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


@dataclasses.dataclass(frozen=True)
class Packed:
    samples: int
    nbytes: int
    decoded: int  # bytes of its samples
    plan: Plan
    seconds: float


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

    Until all is compared, the file is called ``OUT.PID.part``. A call that fails or is interrupted removes it. Memory:
    in each thread two pieces of 4 MiB, or of one chunk if that is more, and two decoded chunks of the input.

    Args:
        source: The input. Each batch key becomes a dataset.
        out: The file to write.
        codec: ``none``, ``deflate``, ``zstd``, ``lz4``; ``auto`` is deflate for the fields where it saves a
            third, unless the input is not compressed either; other fields are contiguous.
        chunk: Samples per chunk. None: one, or as many as fit in 64 KiB if they are smaller than 4 KiB.
        columns: Further columns of the source, one value per sample, to keep for groups of a split and for `column`.
        keep_parts: Whether files, and groups in them, become groups, which windows do not cross.
        force: Whether to replace ``out``.
        progress: Called with ``packing`` or ``comparing``, and how many of how many bytes of samples are done.

    Raises:
        ConfigError: An argument is wrong.
        SourceError: A sample cannot be read, ``out`` cannot be written, or a packed value differs.

    Example:
        >>> import numpy, tempfile
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": numpy.zeros((5, 8, 8), "u1"), "y": numpy.arange(5)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pack(source, folder + "/x.h5").samples
        5
    """
    started = time.monotonic()
    path = os.path.abspath(os.path.expanduser(os.fspath(out)))
    part = f"{path}.{os.getpid()}.part"
    _check_names(source, columns)
    _check_output(source, path, force=force)
    plan = Plan.of(source, codec, chunk, keep_parts=keep_parts)
    release = source.reserve(INPUT_CHUNKS, 0, 0)
    try:
        _write(source, plan, part, columns, progress)
        _compare(source, plan, part, columns, progress)
        nbytes = os.path.getsize(part)
        _check_output(source, path, force=force)
        os.replace(part, path)
    except AsyncDataError:
        raise
    except (OSError, RuntimeError) as error:
        full = errno_of(error) in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space" if full else "check that you may write there, and that the disk works"
        raise SourceError(f"{path}: cannot be written: {error}; {advice}, and run the same again", file=path) from error
    finally:
        release()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return Packed(len(source), nbytes, source.spec.nbytes * len(source), plan, time.monotonic() - started)


def _check_names(source: Source, columns: Sequence[str]) -> None:
    if source.chunks.random:
        larger = "pack with resize: crop or pad, in a larger image_size, and crop at random in a transform"
        raise ConfigError(f"a packed file has the same crop in every epoch; {larger}", "resize")
    if windows := [key for key, field in source.spec.fields.items() if field.lead and field.channel is not None]:
        raise ConfigError("pack single images, and give the packed file the window", f"fields.{windows[0]}.window")
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


def _write(source: Source, plan: Plan, part: str, columns: Sequence[str], progress: Progress) -> None:
    with h5py.File(part, "x", libver=("earliest", "v110")) as file:  # for old programs, too
        writer = Writer(file, source, plan, {name: column(source, name) for name in columns})
        with contextlib.closing(in_threads(writer.encoded, plan.pieces(), "packing", source, progress)) as pieces:
            for piece, encoded in pieces:
                writer.write(piece, encoded)
    with open(part, "rb+", buffering=0) as written:
        os.fsync(written.fileno())


def _compare(source: Source, plan: Plan, part: str, columns: Sequence[str], progress: Progress) -> None:
    with contextlib.closing(packed_source(part, plan)) as packed:
        release = packed.reserve(INPUT_CHUNKS, 0, 0)
        check_whole(source, packed, columns)
        work = functools.partial(check_piece, source=source, packed=packed)
        collections.deque(in_threads(work, plan.pieces(), "comparing", source, progress), maxlen=0)
        release()


def in_threads(
    work: Callable[[Piece], _T], pieces: Iterable[Piece], step: str, source: Source, progress: Progress
) -> Generator[tuple[Piece, _T], None, None]:
    """Each piece, in order, with the result of some work on it, which is done in as many threads as there are cores."""
    threads, sample_bytes, done = usable_cores(), source.spec.nbytes, 0
    total = sample_bytes * len(source)
    progress(step, 0, total)
    waiting: collections.deque[tuple[Piece, Future[_T]] | None] = collections.deque()
    with ThreadPoolExecutor(threads, f"lit_async_data {step}") as pool:
        for piece in itertools.chain(pieces, itertools.repeat(None, AHEAD * threads)):
            waiting.append((piece, pool.submit(work, piece)) if piece is not None else None)
            if len(waiting) > AHEAD * threads and (first := waiting.popleft()):
                yield first[0], first[1].result()
                done += sample_bytes * len(first[0].samples)
                progress(step, done, total)


# -- the file ----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes the samples of a source, where each comes from, and columns, into an empty file."""

    def __init__(self, file: h5py.File, source: Source, plan: Plan, columns: Mapping[str, Array]) -> None:
        self._file, self._source, self._plan = file, source, plan
        parts = dict.fromkeys((part.file, part.group.strip("/")) for part in source.parts)
        numbers = {part: number for number, part in enumerate(parts)}
        self._parts = np.array([numbers[part.file, part.group.strip("/")] for part in source.parts])
        self._starts = starts([part.samples for part in source.parts])
        first: Any = source.locate(source.ids(np.zeros(1, np.int64)))[0]
        self._texts = [name for name in ("id", "path") if getattr(first, name, None) is not None]
        file.create_dataset(
            "origin/parts", data=[f"{name}:/{group}".removesuffix(":/") for name, group in parts], dtype=TEXT
        )
        begin = 0
        for group, rows in plan.sections:
            holder = file.require_group(group or "/")
            for field in plan.fields:
                self._make(holder, field, rows)
            for name, kind in {"part": np.int32, "row": np.int64, **dict.fromkeys(self._texts, TEXT)}.items():
                holder.create_dataset(f"origin/{name}", (rows,), kind)
            for name, values in columns.items():
                dtype = TEXT if values.dtype == object else values.dtype
                holder.create_dataset(name, data=values[begin : begin + rows], dtype=dtype)
            begin += rows

    def _make(self, holder: h5py.Group, field: PackedField, rows: int) -> None:
        """Make a dataset: contiguous; or in chunks, whose filters libhdf5 need not know."""
        if field.categorical:  # as AnnData stores categories
            group = holder.require_group(field.key)
            group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
            group.create_dataset("categories", data=list(field.classes), dtype=TEXT)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if field.chunk:
            properties.set_chunk((min(field.chunk, rows), *field.shape))
            if field.shuffle:
                properties.set_shuffle()
            number, level = FILTERS[self._plan.codec]
            properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (level,))
        kind, space = h5py.h5t.py_create(field.dtype, logical=True), h5py.h5s.create_simple((rows, *field.shape))
        above, _, name = field.dataset.rpartition("/")
        h5py.h5d.create(holder.require_group(above or holder.name).id, name.encode(), kind, space, properties).close()
        holder[field.key].attrs.update(field.packing)

    def encoded(self, piece: Piece) -> dict[str, Any]:
        """Read a piece, and turn it into values and lists of stored chunks, by dataset. In any thread."""
        values, found = read(self._source, piece.samples), dict[str, Any]()
        for field in self._plan.fields:
            stored = _stored(values.pop(field.key), field, piece)
            if field.chunk:
                rows = min(field.chunk, piece.rows)
                missing = np.zeros((-len(stored) % rows, *field.shape), field.dtype)  # all chunks are equally long
                stored = np.concatenate([stored, missing]) if len(missing) else stored
                chunks = (stored[row : row + rows] for row in range(0, len(stored), rows))
                found[field.dataset] = [encoded(chunk, self._plan.codec, shuffle=field.shuffle) for chunk in chunks]
            else:
                found[field.dataset] = stored
        places: Any = self._source.locate(self._source.ids(piece.samples))
        found["origin/part"] = self._parts[np.searchsorted(self._starts, piece.samples, side="right") - 1]
        found["origin/row"] = [each.row for each in places]
        for name in self._texts:  # bytes of a file name that are no text are spelled out
            texts = (getattr(each, name) or "" for each in places)
            found[f"origin/{name}"] = [text.encode(errors="backslashreplace").decode() for text in texts]
        return found

    def write(self, piece: Piece, stored: dict[str, Any]) -> None:
        group: Any = self._file[piece.group or "/"]
        for name, values in stored.items():
            dataset: Any = group[name]
            if dataset.chunks is None:
                dataset[piece.row : piece.row + len(piece.samples)] = values
                continue
            for number, chunk in enumerate(values):
                corner = (piece.row + number * dataset.chunks[0], *[0] * (dataset.ndim - 1))
                write_chunk(dataset, corner, 0, chunk)


def _stored(values: Array, field: PackedField, piece: Piece) -> Array:
    values = np.where(values == IGNORED, -1, values) if field.missing else values
    outside = (values < -field.missing) | (values >= len(field.classes)) if field.categorical else np.zeros(1, bool)
    if outside.any():
        sample = int(piece.samples[outside.argmax()])
        where = f"{field.key}, sample {sample}: {values[outside][0]} is none of its {len(field.classes)} classes"
        raise FormatError(f"{where}; leave such samples out", dataset=field.key, sample_id=sample)
    return values.astype(field.dtype, copy=False)


# -- comparison --------------------------------------------------------------------------------------------------------


def packed_source(path: str, plan: Plan) -> HDF5Source:
    return HDF5Source(path, {field.key: field.given() for field in plan.fields}, **plan.source_options)


def check_whole(source: Source, packed: HDF5Source, columns: Iterable[str]) -> None:
    """Check that batches of both look alike, and that columns are the same."""
    for key, field in source.spec.fields.items():
        other = packed.spec[key]
        if (field.shape, _delivered(field), field.classes) != (other.shape, other.dtype, other.classes):
            raise CorruptError(f"{packed.name}: {key} is {other} instead of {field}", dataset=key)
    for name in columns:
        _check(source, name, column(source, name), column(packed, name), np.arange(len(source)))


def check_piece(piece: Piece, source: Source, packed: HDF5Source) -> None:
    """Compare all values of a piece, byte by byte, so that NaN equals the same NaN."""
    values, others = read(source, piece.samples), read(packed, piece.samples)
    for key, field in source.spec.fields.items():
        _check(source, key, values.pop(key).astype(_delivered(field), copy=False), others.pop(key), piece.samples)


def column(source: Source, name: str) -> Array:
    """A column as it is stored: texts as text, missing ones as empty."""
    values = source.column(name)
    if values.dtype.kind not in "OUS":
        return values
    return np.array(["" if value is None else str(value) for value in values.tolist()], object)


def _delivered(field: FieldSpec) -> np.dtype[np.generic]:
    """The type in which `HDF5Source` delivers the values of a field."""
    return np.dtype(np.int64) if not field.shape and field.dtype.kind in "iu" else field.dtype


def _check(source: Source, key: str, expected: Array, found: Array, samples: Indices) -> None:
    if expected.dtype != object:
        found = found.astype(expected.dtype, copy=False)
        expected, found = (
            np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(len(samples), -1)
            for each in (expected, found)
        )
    if np.array_equal(expected, found):
        return
    row = int((expected != found).reshape(len(samples), -1).any(axis=1).argmax())
    place = source.locate(source.ids(samples[row : row + 1]))[0]
    raise CorruptError(
        f"{key}, sample {samples[row]} ({getattr(place, 'path', None) or place.file}, row {place.row}): the packed "
        "value differs from the input; did the input change meanwhile? Pack it again, and check memory and disk",
        file=place.file,
        dataset=key,
        row=place.row,
        sample_id=int(samples[row]),
    )
