"""Builds a suggestion, so that only lines that work are shown, and looks at its labels."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.storage_layout import slowest
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.part import READ_BY_H5PY
from lit_async_data.tools.inspect.report.report import SuggestionReport
from lit_async_data.tools.inspect.report.suggestion import Call, Suggestion

# Labels of more samples are not read.
MOST_LABELS = 2_000_000
# Whole numbers of more different values are no classes.
MOST_CLASSES = 1000


def verified(suggestion: Suggestion, *, doubles: bool = False) -> SuggestionReport:
    """Build the sources of a suggestion, and read its labels.

    Args:
        suggestion: The suggestion.
        doubles: Whether class numbers may be stored as float64, as MATLAB does.

    Raises:
        AsyncDataError: It does not fit the files, or its labels cannot be read.
    """
    with _warnings() as logged, contextlib.ExitStack() as opened:
        sources = {stage: _built(call, opened) for stage, call in suggestion.calls.items()}
        first = next(iter(sources.values()))
        values = _labels(first)
        if doubles and values is not None and _are_classes(values):
            return verified(_with_int64(suggestion))
        spec = first.spec
        notes = [*suggestion.notes, *_about_labels(first, values), *_about_types(spec), *_about_the_demo(spec), *logged]
        return SuggestionReport(
            title=suggestion.title,
            python=suggestion.python(),
            command=suggestion.command(),
            samples={stage: len(source) for stage, source in sources.items()},
            batch={key: {"dtype": str(each.dtype), "shape": each.shape} for key, each in spec.items()},
            reading=slowest(source.chunks.reading for source in sources.values()),
            notes=tuple(dict.fromkeys(notes)),
            calls=suggestion.calls,
        )


def _built(call: Call, opened: contextlib.ExitStack) -> Source:
    source = call.build()
    opened.callback(source.close)
    return source


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects what the package would log, except for what the report tells of each dataset."""
    logged: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg != READ_BY_H5PY:
                logged.append(record.getMessage())

    log, handler = logging.getLogger("lit_async_data"), Collect(logging.WARNING)
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield logged
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


def _labels(source: Source) -> npt.NDArray[Any] | None:
    """The values of ``y``, if each is one number."""
    field = source.spec.get("y")
    return None if field is None or field.shape or len(source) > MOST_LABELS else source.column("y")


def _are_classes(values: npt.NDArray[Any]) -> bool:
    """Whether floats are class numbers."""
    return values.dtype.kind == "f" and bool((values % 1 == 0).all()) and len(np.unique(values)) <= MOST_CLASSES


def _about_labels(source: Source, values: npt.NDArray[Any] | None) -> Iterator[str]:
    if values is None:
        return
    classes = source.spec["y"].classes
    if classes:
        listed = ", ".join(classes[:4]) + (", …" if len(classes) > 4 else "")
        yield f"y has {len(classes)} classes: {listed}"
        return
    if values.dtype.kind in "iu":
        low, high = int(values.min()), int(values.max())
        first = (
            ""
            if not 0 < low <= high < MOST_CLASSES
            else "; torch's losses count classes from 0: subtract in a transform"
        )
        yield f"y is from {low:,} to {high:,}{first}"
    elif values.dtype.kind == "f" and np.isnan(values).any():
        yield f"y is NaN in {int(np.isnan(values).sum()):,} of {len(values):,} samples"


def _about_types(spec: BatchSpec) -> Iterator[str]:
    """How to make what networks compute with, where values as they are stored are something else."""
    wide = [key for key, each in spec.items() if each.dtype == np.float64]
    small = [key for key, each in spec.items() if key == "x" and each.dtype.kind == "u"]
    if wide or small:
        keys = sorted([*wide, *small])
        fields = ", ".join(f'"{key}"' for key in keys)
        made = f"ToFloat({fields if len(keys) == 1 else f'[{fields}]'})"
        yield (
            f"values come as they are stored: device_transform={made}, of AsyncLoader or AsyncDataModule, makes "
            f"float32 of {' and '.join(keys)}{', from 0 to 1' if small else ''}"
        )


def _about_the_demo(spec: BatchSpec) -> Iterator[str]:
    """What the command line needs besides, where the demo's network does not fit."""
    x, y = spec.get("x"), spec.get("y")
    fits = x is not None and len(x.shape) in (2, 3) and y is not None and not y.shape and y.dtype.kind in "iu"
    if not fits:
        yield "the network of train.py takes images and class numbers: add model._target_=package.YourModule"


def _with_int64(suggestion: Suggestion) -> Suggestion:
    calls = {}
    for stage, call in suggestion.calls.items():
        given = call.fields["y"]
        field = given if isinstance(given, Field) else Field(str(given))
        calls[stage] = dataclasses.replace(call, fields={**call.fields, "y": dataclasses.replace(field, dtype="int64")})
    return dataclasses.replace(suggestion, calls=calls)


def first_that_works(candidates: list[Suggestion], *, doubles: bool = False) -> SuggestionReport | AsyncDataError:
    """The first of these suggestions that fits the files; else the error of the first."""
    errors = []
    for each in candidates:
        try:
            return verified(each, doubles=doubles)
        except AsyncDataError as error:
            errors.append(error)
    return errors[0]
