"""`pack`: writes the samples of a source into one HDF5 file."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lit_async_data.errors import AsyncDataError, ConfigError, ResumeError, SourceError
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.storage.failures import errno_of
from lit_async_data.tools.pack import compare, pieces, stored
from lit_async_data.tools.pack.origin import NUMBERS, PARTS, Origin
from lit_async_data.tools.pack.planning.choices import choose
from lit_async_data.tools.pack.planning.codec import Codec
from lit_async_data.tools.pack.planning.plan import COMMIT_BYTES, PackedField, Plan
from lit_async_data.tools.pack.planning.plan import PARTS as PART_GROUP
from lit_async_data.tools.pack.progress import Progress, Silent
from lit_async_data.tools.pack.writing import writes
from lit_async_data.tools.pack.writing.journal import Journal
from lit_async_data.tools.pack.writing.part_file import PartFile
from lit_async_data.tools.terminal import sized

# Of the estimate, to stay free: samples may compress worse than those of the trial, and chunks need an index.
SPARE = 1.1
# Decoded chunks of the input that stay in memory: the current ones of two threads.
INPUT_CHUNKS = 2
# Differences that a message shows.
SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed file.

    Attributes:
        path: The file.
        samples: Number of samples.
        nbytes: Bytes of the file.
        decoded: Bytes of its samples.
        plan: How it is stored.
        seconds: Seconds that it took; of the last run, if it was resumed.
    """

    path: str
    samples: int
    nbytes: int
    decoded: int
    plan: Plan
    seconds: float


def pack(
    source: Source,
    out: str | os.PathLike[str],
    *,
    codec: str = "auto",
    level: int | None = None,
    chunk: int | None = None,
    columns: Sequence[str] = (),
    keep_parts: bool = False,
    recipe: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Packed:
    """Write the samples of a source into one HDF5 file that is fast to read at random, and compare every value.

    The file has its name only when all is written and compared. Until then, ``OUT.part`` and ``OUT.part.journal`` hold
    what is done: after an interrupt or a crash, the same call goes on with it.

    Memory: in each thread two pieces of at most 64 MiB, or of one chunk if that is more; and two decoded chunks of the
    input. A text or a number for each sample and column of ``columns``.

    Args:
        source: The input. Each batch key becomes a dataset.
        out: The file to write.
        codec: ``none``, ``deflate``, ``zstd``, ``lz4``; ``auto`` is deflate for the fields where it saves a
            third, unless the input is not compressed either; other fields are contiguous.
        level: Level of the codec.
        chunk: Samples per chunk. None: one, or as many as fit in 64 KiB if they are smaller than 4 KiB.
        columns: Further columns of the source, one value per sample, to keep for groups of a split and for `column`.
        keep_parts: Whether files, and groups in them, become groups, which windows do not cross.
        recipe: Settings of the source that a resumed call must share. They are kept in the file.
        force: Whether to replace ``out``.
        progress: Shows how far it is.

    Returns:
        What was written.

    Raises:
        ConfigError: An argument is wrong.
        ResumeError: What is left of an earlier call does not fit this one; the message says what differs.
        SourceError: A sample cannot be read, ``out`` cannot be written, or a packed value differs.

    Example:
        >>> import numpy, tempfile
        >>> from lit_async_data import HDF5Source
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": numpy.zeros((5, 8, 8), "u1"), "y": numpy.arange(5)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     packed = pack(source, folder + "/x.h5", codec="none")
        ...     with_labels = HDF5Source(packed.path, fields={"x": "x", "y": "y"})
        ...     packed.samples, with_labels[3]["y"].tolist()
        (5, 3)
    """
    started = time.monotonic()
    progress = progress or Silent()
    path = os.path.abspath(os.path.expanduser(os.fspath(out)))
    part, log = f"{path}.part", f"{path}.part.journal"
    _check_arguments(source, columns)
    _check_output(source, path, part, log, force=force)
    arguments = {"codec": codec, "level": level, "chunk": chunk, "columns": list(columns), "keep_parts": keep_parts}
    request = _plain({"arguments": arguments, "recipe": dict(recipe or {}), "input": _input(source)})
    with _output_errors(path), Journal(log) as journal:
        try:
            plan = _plan(source, journal, request, part, progress)
            release = source.reserve(INPUT_CHUNKS, 0, 0)
            try:
                _write(source, plan, part, journal, progress)
                _compare(source, plan, part, columns, progress)
            finally:
                release()
                progress.end()
        except BaseException:
            if journal.last is None:  # nothing is done yet
                writes.remove(part)
                writes.remove(log)
            raise
        nbytes = os.path.getsize(part)
        writes.publish(part, path, force=force)
        writes.remove(log)
    return Packed(path, plan.samples, nbytes, source.spec.nbytes * len(source), plan, time.monotonic() - started)


# -- before ------------------------------------------------------------------------------------------------------------


def _check_arguments(source: Source, columns: Sequence[str]) -> None:
    if source.is_random:
        raise ConfigError(
            "resize: a packed file has the same crop in every epoch; pack with resize: crop or pad, in a larger "
            "image_size, and crop at random in a transform"
        )
    names = [*source.spec.fields, *columns]
    for name in names:
        if not name.strip("/") or name.split("/")[0] in ("origin", PART_GROUP) or names.count(name) > 1:
            raise ConfigError(
                f"fields: {name!r} cannot name a dataset, or names two; give a field another key: KEY=NAME"
            )


def _check_output(source: Source, path: str, part: str, log: str, *, force: bool) -> None:
    """Check that the file may be written; and clean up if a run was killed just when it had given the file its name."""
    for each in {each.file for each in source.parts}:
        for name in (path, part):
            if os.path.exists(each) and os.path.exists(name) and os.path.samefile(each, name):
                raise ConfigError(f"{path}: is also the input; leave it out there, or give another output")
    if os.path.isdir(path):
        raise ConfigError(f"{path}: is a folder; give the name of a file")
    if not os.path.isdir(os.path.dirname(path)):
        raise ConfigError(f"{os.path.dirname(path)}: no such folder; make it first")
    if not os.path.lexists(path):
        return
    if os.path.exists(part) and os.path.samefile(path, part):
        writes.remove(part)
    if not os.path.exists(part):
        writes.remove(log)
    if not force:
        raise ConfigError(f"{path}: exists already, and is not touched; give another name, or --force to replace it")


def _input(source: Source) -> dict[str, Any]:
    """What shows that the input is the same."""
    files = {}
    for file in sorted({part.file for part in source.parts}):
        with contextlib.suppress(OSError):  # a table in memory
            status = os.stat(file)
            files[file] = [status.st_size, status.st_mtime_ns]
    return {"name": source.name, **source.fingerprint(), "files": files}


def _plain(values: Any) -> Any:
    return json.loads(json.dumps(values))


def _plan(source: Source, journal: Journal, request: dict[str, Any], part: str, progress: Progress) -> Plan:
    """The plan of an earlier run that this one goes on with, or a new one."""
    arguments, left = request["arguments"], journal.plan
    if left is not None and journal.last is not None and os.path.exists(part):
        changed = list(_changes(left["request"], request))
        if changed:
            raise ResumeError(
                f"{part}: is left of a run with other settings or input: {'; '.join(changed[:SHOWN])}; run with "
                f"the same, or remove it and {journal.path} to start over"
            )
        kept = [PackedField.of_json(each) for each in left["fields"]]
        plan = Plan.of(source, kept, Codec(*left["codec"]), parts=arguments["keep_parts"])
        plan = dataclasses.replace(plan, piece=left["piece"])
        progress.print_line(f"going on with {part}: {journal.last.samples:,} of {plan.samples:,} samples are packed")
        _check_space(part, left["nbytes"])
        return plan
    journal.clear()
    fields, codec, nbytes = choose(
        source, arguments["codec"], arguments["level"], arguments["chunk"], stored.element_types(source)
    )
    packed = stored.packed_fields(source)
    fields = tuple(dataclasses.replace(field, packed=field.key in packed) for field in fields)
    plan = Plan.of(source, fields, codec, parts=arguments["keep_parts"])
    nbytes = int(SPARE * nbytes)
    _check_space(part, nbytes)
    listed = [dataclasses.asdict(field) for field in plan.fields]
    journal.begin(
        {
            "request": request,
            "fields": listed,
            "codec": [codec.name, codec.level],
            "piece": plan.piece,
            "nbytes": nbytes,
        }
    )
    return plan


def _changes(was: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two requests, for a message."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from _changes(was.get(key), now.get(key), key)
    elif was != now:
        yield f"{name}: was {was}, is {now}"


def _check_space(part: str, nbytes: int) -> None:
    """Check that the file will fit on its disk."""
    taken = os.stat(part).st_blocks * 512 if os.path.exists(part) else 0
    free = shutil.disk_usage(os.path.dirname(part)).free
    if nbytes - taken > free:
        raise SourceError(
            f"{part}: needs about {sized(nbytes - taken)}, but {os.path.dirname(part)} has {sized(free)} left; free "
            "some space, or write to another disk",
            file=part,
        )


# -- the two passes ----------------------------------------------------------------------------------------------------


def _write(source: Source, plan: Plan, part: str, journal: Journal, progress: Progress) -> None:
    """Write all samples that are not written yet."""
    origin, nbytes = Origin(source), source.spec.nbytes
    with PartFile(part, plan, journal) as file:
        if journal.last is None:
            _make(file, source, journal, origin)
        done = journal.last.samples if journal.last else 0
        work = functools.partial(pieces.encoded, source=source, plan=plan, origin=origin)
        progress.begin("packing", nbytes * plan.samples, nbytes * done)
        since = 0
        with contextlib.closing(pieces.in_threads(work, plan.pieces(done))) as results:
            for piece, written in results:
                file.write(piece, written)
                progress.advance(nbytes * piece.count)
                since += nbytes * piece.count
                if since >= COMMIT_BYTES:
                    file.commit(piece.first + piece.count)
                    since = 0
        if since:
            file.commit(plan.samples)
        file.sync()
    progress.end()


def _make(file: PartFile, source: Source, journal: Journal, origin: Origin) -> None:
    request = (journal.plan or {})["request"]
    recipe = json.dumps({"recipe": request["recipe"], "input": request["input"]["name"]})
    columns = {name: source.column(name) for name in request["arguments"]["columns"]}
    attributes = {"": {"lit_async_data": recipe}, **stored.attributes(source)}
    file.make(attributes, columns, NUMBERS, origin.texts, {PARTS: origin.parts})


def _compare(source: Source, plan: Plan, part: str, columns: Iterable[str], progress: Progress) -> None:
    """Compare all samples. Removes the packed file if it is wrong."""
    nbytes = source.spec.nbytes
    progress.begin("comparing", nbytes * plan.samples)
    try:
        packed = compare.packed_source(part, plan)
        compare.check_fields(source, packed)
        compare.check_columns(source, packed, columns)
        release = packed.reserve(INPUT_CHUNKS, 0, 0)
        try:
            work = functools.partial(compare.compare, source=source, packed=packed)
            with contextlib.closing(pieces.in_threads(work, plan.pieces())) as results:
                for piece, _ in results:
                    progress.advance(nbytes * piece.count)
        finally:
            release()
            packed.close()
    except SourceError as error:
        if isinstance(error, compare.DifferenceError) or error.file == part:
            writes.remove(part)
            writes.remove(f"{part}.journal")
        raise


@contextlib.contextmanager
def _output_errors(path: str) -> Iterator[None]:
    """Turn errors of the system that concern the output into errors that say what to do."""
    try:
        yield
    except AsyncDataError:
        raise
    except FileExistsError:
        raise ConfigError(f"{path}: was written meanwhile by another program; move it, or give --force") from None
    except (OSError, RuntimeError) as error:
        full = errno_of(error) in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space" if full else "check that you may write there, and that the disk works"
        raise SourceError(
            f"{path}: cannot be written: {error}; {advice}, and run the same again: it goes on where it stopped",
            file=path,
        ) from error
