"""Checks files of a table before training: the first ones, or all."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from tqdm import tqdm

from lit_async_data.errors import AsyncDataError, FormatError, ManifestError, SourceError
from lit_async_data.sources.manifest.fields.file import FileField
from lit_async_data.sources.manifest.fields.hdf5 import HDF5Fields
from lit_async_data.sources.manifest.fields.rows import Rows
from lit_async_data.system import usable_cores

Check = Literal["first", "all", "none"]
# Files whose shapes are compared if the decoder does not make all shapes equal.
SHAPE_FILES = 32
# Samples per task of a thread.
_TASK_SAMPLES = 128
# Rows of HDF5 files per read.
_ROWS = 256
# Most rows that a message names.
_NAMED = 5


class _Bar(tqdm):  # type: ignore[misc]  # it has no types
    """A progress bar without the thread that watches bars, which would outlive it."""

    monitor_interval = 0


def check_paths(how: Check, fields: Mapping[str, FileField], hdf5: Sequence[HDF5Fields], rows: Rows) -> None:
    """Check files, as the user chose.

    Args:
        how: ``"first"``: decode the files of the first sample, and compare the shapes of a few other files if the
            decoder does not make them equal. ``"all"``: decode every file in as many threads as there are cores, with a
            progress bar on a terminal. ``"none"``: check nothing.
        fields: Fields with one file per sample, by batch key.
        hdf5: Fields with rows of HDF5 files; ``"all"`` reads every row.
        rows: The samples.

    Raises:
        SourceError: A file cannot be read or decoded; names row, id and path.
        ManifestError: Several files cannot be read; names the first five, and its attribute ``errors`` holds the error
            of each.
        FormatError: Files have different shapes.
    """
    if how == "none":
        return
    for key, field in fields.items():
        if not field.decoder.fits_all:
            _check_shapes(key, field, rows, all_=how == "all")
    errors = _file_errors(fields, len(rows) if how == "all" else 1)
    if any(field.decoder.images for field in fields.values()):
        _return_freed_memory()
    if how == "all":
        errors += [error for each in hdf5 for error in _row_errors(each)]
    if errors:
        _raise(errors, rows)


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps the blocks in which Pillow decodes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _check_shapes(key: str, field: FileField, rows: Rows, *, all_: bool) -> None:
    """Check that a few files across the table have one shape."""
    count = len(rows)
    samples = np.unique(np.linspace(0, count - 1, min(SHAPE_FILES, count)).astype(np.int64)).tolist()
    shapes = {}
    for sample in samples:
        # With "all", unreadable files are reported together later.
        with contextlib.suppress(SourceError) if all_ else contextlib.nullcontext():
            shapes[sample] = field.shape_of(sample)
    first = next(iter(shapes), 0)
    others = [sample for sample in shapes if shapes[sample] != shapes[first]]
    if others:
        paths = field.paths.of(np.array([first, *others[:_NAMED]]))
        named = "; ".join(
            f"{_shown(shapes[sample])} in {rows.where(sample)} ({path})"
            for sample, path in zip([first, *others], paths, strict=False)
        )
        more = f"; … ({len(others)} of {len(samples)} checked)" if len(others) > _NAMED else ""
        raise FormatError(
            f"{key}: files have different shapes: {named}{more}; {field.decoder.advice}",
            file=paths[1],
            row=rows.place(others[0])[1],
            sample_id=others[0],
        )


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a single value"


def _file_errors(fields: Mapping[str, FileField], count: int) -> list[SourceError]:
    """Errors of the files of the first ``count`` samples, in order."""
    if count == 1:
        return _decode_errors(fields, range(1))
    errors: list[SourceError] = []
    threads = usable_cores()
    with (
        ThreadPoolExecutor(threads, "lit_async_data check") as pool,
        # disable=None: on a terminal only; elsewhere the bar would fill a log.
        _Bar(desc="checking files", total=count, unit=" files", leave=False, disable=None) as bar,
    ):
        for first in range(0, count, threads * _TASK_SAMPLES):
            end = min(first + threads * _TASK_SAMPLES, count)
            blocks = [range(start, min(start + _TASK_SAMPLES, end)) for start in range(first, end, _TASK_SAMPLES)]
            for found in pool.map(functools.partial(_decode_errors, fields), blocks):
                errors += found
            bar.update(end - first)
    return errors


def _decode_errors(fields: Mapping[str, FileField], block: range) -> list[SourceError]:
    """Errors of decoding the files of a block of samples; the samples are discarded."""
    errors = []
    for field in fields.values():
        out = np.empty((1, *field.spec.stored_shape), field.spec.dtype)
        for sample in block:
            try:
                field.read(np.array([sample]), out, None)
            except SourceError as error:
                errors.append(error)
    return sorted(errors, key=lambda error: error.sample_id or 0)


def _row_errors(stored: HDF5Fields) -> list[SourceError]:
    """Errors of reading rows of HDF5 files, in storage order, so that each chunk is decoded about once."""
    errors: list[SourceError] = []
    order = np.argsort(stored.source.samples, kind="stable")
    for first in range(0, len(order), _ROWS):
        samples = order[first : first + _ROWS]
        out = {key: np.empty((len(samples), *field.stored_shape), field.dtype) for key, field in stored.specs.items()}
        try:
            stored.source.read_into(samples, out)
        except AsyncDataError:
            for place, sample in enumerate(samples.tolist()):
                try:
                    stored.read(np.array([sample]), {key: array[place : place + 1] for key, array in out.items()})
                except SourceError as error:
                    errors.append(error)
    return sorted(errors, key=lambda error: error.sample_id or 0)


def _raise(errors: list[SourceError], rows: Rows) -> None:
    if len(errors) == 1:
        raise errors[0]
    listed = "\n".join(f"  {error}" for error in errors[:_NAMED])
    more = f"\n  … and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    first = errors[0]
    left_out = "filters"
    if rows.id is not None:
        ids = rows.table.array(rows.id)
        bad = dict.fromkeys(repr(ids[error.sample_id].as_py()) for error in errors[:_NAMED])
        left_out = f"filters=[[{rows.id!r}, 'not in', [{', '.join(bad)}{', …' if more else ''}]]]"
    summary = (
        f"{len(errors)} files of {len(rows)} samples cannot be read; repair them, or leave their rows out: {left_out}; "
        "the attribute errors of this error holds all errors, each with file, row and sample_id"
    )
    raise ManifestError(
        f"{summary}:\n{listed}{more}",
        file=first.file,
        row=first.row,
        sample_id=first.sample_id,
        errors=errors,
    )
