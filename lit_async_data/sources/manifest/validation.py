"""Checks files of a table before training: the first ones, or all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from tqdm import tqdm

from lit_async_data.errors import AsyncDataError, FormatError, ManifestError, SourceError
from lit_async_data.sources.contract.fingerprints import probes
from lit_async_data.sources.manifest.fields.fields import FileField
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
    """Check files, as the user chose; see ``check_files`` of `ManifestSource`.

    The error of several bad files names the first five, and its attribute ``errors`` holds the error of each.
    """
    if how == "none":
        return
    for key, field in fields.items():
        if not field.decoder.fits_all:
            _check_shapes(key, field, rows, all_=how == "all")
    if how == "first":
        errors = _decode_errors(fields, range(1))
    else:
        errors = _file_errors(fields, len(rows)) + [error for each in hdf5 for error in _row_errors(each)]
    if errors:
        raise errors[0] if len(errors) == 1 else _summary(errors, rows)


def _check_shapes(key: str, field: FileField, rows: Rows, *, all_: bool) -> None:
    shapes = {}
    for sample in probes(len(rows), most=SHAPE_FILES).tolist():
        # With "all", unreadable files are reported together later.
        with contextlib.suppress(SourceError) if all_ else contextlib.nullcontext():
            shapes[sample] = field.shape_of(sample)
    first = next(iter(shapes), 0)
    others = [sample for sample in shapes if shapes[sample] != shapes[first]]
    if others:
        paths = field.paths.of(np.array([first, *others[:_NAMED]]))
        named = "; ".join(
            f"{'×'.join(map(str, shapes[sample])) or 'a single value'} in {rows.where(sample)} ({path})"
            for sample, path in zip([first, *others], paths, strict=False)
        )
        more = f"; … ({len(others)} of {len(shapes)} checked)" if len(others) > _NAMED else ""
        raise FormatError(
            f"{key}: files have different shapes: {named}{more}; {field.decoder.advice}",
            file=paths[1],
            row=rows.place(others[0])[1],
            sample_id=others[0],
        )


def _file_errors(fields: Mapping[str, FileField], count: int) -> list[SourceError]:
    """Errors of all files, in the order of the samples, from as many threads as there are cores."""
    errors: list[SourceError] = []
    threads = usable_cores()
    with (
        ThreadPoolExecutor(threads, "lit_async_data check") as pool,
        # disable=None: on a terminal only; elsewhere the bar would fill a log.
        _Bar(desc="checking files", total=count, unit=" files", leave=False, disable=None) as bar,
    ):
        for first in range(0, count, threads * _TASK_SAMPLES):  # a few tasks at a time, so that Ctrl-C ends them soon
            end = min(first + threads * _TASK_SAMPLES, count)
            blocks = [range(start, min(start + _TASK_SAMPLES, end)) for start in range(first, end, _TASK_SAMPLES)]
            for found in pool.map(functools.partial(_decode_errors, fields), blocks):
                errors += found
            bar.update(end - first)
    return errors


def _decode_errors(fields: Mapping[str, FileField], block: range) -> list[SourceError]:
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


def _summary(errors: list[SourceError], rows: Rows) -> ManifestError:
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
    message = f"{summary}:\n{listed}{more}"
    return ManifestError(message, file=first.file, row=first.row, sample_id=first.sample_id, errors=errors)
