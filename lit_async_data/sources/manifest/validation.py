"""Looking at the files of a table before training: at the first of them, or at all."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress

from lit_async_data.batch.spec import Array
from lit_async_data.errors import AsyncDataError, FormatError, ManifestError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.file_field import FileField
from lit_async_data.sources.manifest.hdf5_fields import HDF5Fields
from lit_async_data.sources.manifest.rows import Rows

Check = Literal["first", "all", "none"]
# Files that are opened to see whether all have one shape, where nothing makes them so.
LOOKED_AT = 32
# Samples that a thread looks at in one go.
_AT_ONCE = 32
# Rows of HDF5 files that are read in one go.
_ROWS = 256
# Rows that a message names.
_NAMED = 5


def check_paths(how: Check, fields: Mapping[str, FileField], stored: Sequence[HDF5Fields], entries: Rows) -> None:
    """Look at files, as much as is asked for.

    Args:
        how: ``"first"``: the files of the first sample are decoded, and where nothing makes all of one shape, a few
            others are opened. ``"all"``: every file is decoded, by as many threads as there are cores, with a progress
            bar on a terminal. ``"none"``: nothing.
        fields: Those of one file for each sample, by batch key.
        stored: Those in rows of HDF5 files, of which ``"all"`` reads every one.
        entries: The samples.

    Raises:
        SourceError: A file cannot be read or decoded; names row, id and path.
        ManifestError: Several cannot; names the first five, and its attribute ``errors`` holds the error of each.
        FormatError: Files are of different shapes.
    """
    if how == "none":
        return
    for key, field in fields.items():
        if not field.decoder.fits_all:
            _check_shapes(key, field, entries, all_=how == "all")
    wrong = _wrong(fields, len(entries) if how == "all" else 1)
    if any(field.decoder.images for field in fields.values()):
        _return_freed_memory()
    if how == "all":
        wrong += [error for each in stored for error in _wrong_rows(each)]
    if wrong:
        _raise(wrong, entries)


def _return_freed_memory() -> None:
    """Have the C library return freed memory to the system: glibc keeps the blocks in which Pillow decodes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, or another system
        ctypes.CDLL(None).malloc_trim(0)


def _check_shapes(key: str, field: FileField, entries: Rows, *, all_: bool) -> None:
    """Make sure that files have one shape: of a few, which are spread over the table."""
    count = len(entries)
    samples = np.unique(np.linspace(0, count - 1, min(LOOKED_AT, count)).astype(np.int64)).tolist()
    shapes = {}
    for sample in samples:
        # What cannot be read is listed with all of its kind, where all are looked at.
        with contextlib.suppress(SourceError) if all_ else contextlib.nullcontext():
            shapes[sample] = field.shape_of(sample)
    first = next(iter(shapes), 0)
    others = [sample for sample in shapes if shapes[sample] != shapes[first]]
    if others:
        paths = field.paths.of(np.array([first, *others[:_NAMED]]))
        named = "; ".join(
            f"{_shown(shapes[sample])} in {entries.where(sample)} ({path})"
            for sample, path in zip([first, *others], paths, strict=False)
        )
        more = f"; … ({len(others)} of {len(samples)} looked at)" if len(others) > _NAMED else ""
        raise FormatError(
            f"{key}: files are of different shapes: {named}{more}; {field.decoder.advice}",
            file=paths[1],
            row=entries.place(others[0])[1],
            sample_id=others[0],
        )


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a single value"


def _wrong(fields: Mapping[str, FileField], count: int) -> list[SourceError]:
    """What is wrong with the files of so many samples, in their order."""
    if count == 1:
        return _decoded(fields, range(1))
    stretches = (range(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE))
    wrong: list[SourceError] = []
    threads = len(os.sched_getaffinity(0))
    # Said on a terminal only: elsewhere it would fill a log.
    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(threads, "lit_async_data check") as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("checking files", total=count)
        for stretch, found in _in_order(pool, fields, stretches, 2 * threads):
            wrong += found
            bar.update(task, advance=len(stretch))
    return wrong


def _in_order(
    pool: ThreadPoolExecutor, fields: Mapping[str, FileField], stretches: Iterator[range], ahead: int
) -> Iterator[tuple[range, list[SourceError]]]:
    """What is wrong with the files of each stretch, so many of which are looked at ahead: not all are queued."""
    begun: list[tuple[range, Future[list[SourceError]]]] = []
    for stretch in itertools.chain(stretches, itertools.repeat(None, ahead)):
        if stretch is not None:
            begun.append((stretch, pool.submit(_decoded, fields, stretch)))
        if begun and (stretch is None or len(begun) > ahead):
            first, found = begun.pop(0)
            yield first, found.result()


def _decoded(fields: Mapping[str, FileField], stretch: range) -> list[SourceError]:
    """Decode the files of a stretch of samples, and throw them away; what went wrong."""
    wrong = []
    for field in fields.values():
        out = np.empty((1, *field.spec.stored_shape), field.spec.dtype)
        for sample in stretch:
            try:
                field.read(np.array([sample]), out, None)
            except SourceError as error:
                wrong.append(error)
    return sorted(wrong, key=lambda error: error.sample_id or 0)


def _wrong_rows(stored: HDF5Fields) -> list[SourceError]:
    """What is wrong with rows of HDF5 files, read in the order in which they lie: each chunk is decoded about once."""
    wrong: list[SourceError] = []
    order = np.argsort(stored.source.samples, kind="stable")
    for first in range(0, len(order), _ROWS):
        samples = order[first : first + _ROWS]
        out = {key: np.empty((len(samples), *field.stored_shape), field.dtype) for key, field in stored.specs.items()}
        try:
            stored.source.read_into(samples, out)
        except AsyncDataError:
            wrong += _each_wrong(stored, samples, out)
    return sorted(wrong, key=lambda error: error.sample_id or 0)


def _each_wrong(stored: HDF5Fields, samples: Indices, out: Mapping[str, Array]) -> list[SourceError]:
    wrong = []
    for place, sample in enumerate(samples.tolist()):
        try:
            stored.read(np.array([sample]), {key: array[place : place + 1] for key, array in out.items()})
        except SourceError as error:
            wrong.append(error)
    return wrong


def _raise(wrong: list[SourceError], entries: Rows) -> None:
    if len(wrong) == 1:
        raise wrong[0]
    listed = "\n".join(f"  {error}" for error in wrong[:_NAMED])
    more = f"\n  … and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    first = wrong[0]
    said = (
        f"{len(wrong)} files of {len(entries)} samples cannot be read; mend them, or leave their rows out; the "
        "attribute errors of this error lists all, each with file, row and sample_id"
    )
    raise ManifestError(
        f"{said}:\n{listed}{more}",
        file=first.file,
        row=first.row,
        sample_id=first.sample_id,
        errors=wrong,
    )
