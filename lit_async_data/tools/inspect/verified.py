"""Builds a suggestion and reads a sample, so that only lines that work are shown; and looks at its labels."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.contract.storage_layout import slowest
from lit_async_data.sources.hdf5.schema.part import READ_BY_H5PY
from lit_async_data.tools.inspect.report import SuggestionReport
from lit_async_data.tools.suggestion import Suggestion

# Labels of more samples are not read; whole numbers of more different values are no classes.
MOST_LABELS, MOST_CLASSES = 2_000_000, 1000


def first_that_works(candidates: Sequence[Suggestion]) -> SuggestionReport | str:
    """The first of these suggestions that fits the files; else why the first does not, or nothing if it is unlikely."""
    errors = []
    for each in candidates:
        try:
            if (found := _verified(each)) is not None:
                return found
        except AsyncDataError as error:
            errors.append(f"{each.python().splitlines()[-1]} does not fit: {error}")
    return errors[0] if errors else ""


def _verified(suggestion: Suggestion) -> SuggestionReport | None:
    log, logged = logging.getLogger("lit_async_data"), BufferingHandler(sys.maxsize)
    propagate, log.propagate = log.propagate, False
    log.addHandler(logged)
    with contextlib.ExitStack() as opened:
        opened.callback(log.removeHandler, logged)
        opened.callback(setattr, log, "propagate", propagate)
        sources = {stage: call.build() for stage, call in suggestion.calls.items()}
        for source in sources.values():
            opened.callback(source.close)
            source[0]
        first = next(iter(sources.values()))
        spec, y = first.spec, first.spec.get("y")
        values = None if y is None or y.shape or len(first) > MOST_LABELS else first.column("y")
        classes = values is not None and _are_classes(values)
        if not (classes or suggestion.likely):
            return None
        told = [record.getMessage() for record in logged.buffer if record.msg != READ_BY_H5PY]
        return SuggestionReport(
            title=suggestion.title,
            python=suggestion.python(),
            command=suggestion.command(),
            samples={stage: len(source) for stage, source in sources.items()},
            batch={key: {"dtype": str(each.dtype), "shape": each.shape} for key, each in spec.items()},
            reading=slowest(source.chunks.reading for source in sources.values()),
            notes=tuple(dict.fromkeys([*suggestion.notes, *_about(spec, values), *told])),
            calls=suggestion.calls,
        )


def _are_classes(values: npt.NDArray[Any]) -> bool:
    """Whether numbers are those of classes: fewer than samples, which a row index has not."""
    return bool((values % 1 == 0).all()) and 1 < len(np.unique(values)) <= min(MOST_CLASSES, max(len(values) // 2, 2))


def _about(spec: BatchSpec, values: npt.NDArray[Any] | None) -> Iterator[str]:
    """What to know of labels and types."""
    x, y = spec.get("x"), spec.get("y")
    if y is not None and y.classes:
        yield f"y has {len(y.classes)} classes: {', '.join(y.classes[:4])}{', …' if len(y.classes) > 4 else ''}"
    elif values is not None and (values.dtype.kind in "iu" or _are_classes(values)):
        low, high = int(values.min()), int(values.max())
        from_1 = "; torch's losses count classes from 0: subtract in a transform"
        yield f"y is from {low:,} to {high:,}{from_1 if 0 < low <= high < MOST_CLASSES else ''}"
    elif values is not None and np.isnan(values).any():
        yield f"y is NaN in {int(np.isnan(values).sum()):,} of {len(values):,} samples"
    if wide := [key for key, each in spec.items() if each.dtype == np.float64]:
        names = " and ".join(wide)
        yield f'{names}: float64, as stored; dtype="float32" of a field, or "int64" for classes, is what networks take'
    if x is not None and x.dtype.kind == "u" and len(x.shape) > 1:
        yield (
            f'x is {x.dtype}, as stored: on a GPU, device_transform=ToFloat("x") makes float32 from 0 to 1; on a CPU, '
            "where the loop would wait for it, divide in a batch_transform"
        )
    if x is None or len(x.shape) not in (2, 3) or y is None or y.shape or y.dtype.kind not in "iu":
        yield "the network of train.py takes images and class numbers: add model._target_=package.YourModule"
