"""Exceptions on their way from a reader process, with cause and traceback, also those that cannot be pickled."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from lit_async_data.engine.pipeline.bad_samples import BadSample, ReadAround
from lit_async_data.engine.pipeline.read_task import BatchResult
from lit_async_data.errors import AsyncDataError, ReadError

# The result of a batch that could not be read as planned.
Unplanned = Exception | ReadAround


def packed_results(batches: Sequence[BatchResult]) -> bytes:
    """Pack the errors of a task's batches, and the samples of those read around bad ones; empty if there are none."""
    errors = [(number, batch.error) for number, batch in enumerate(batches) if batch.error is not None]
    around = [
        (number, batch.around.samples, [(*bad[:2], _portable(bad.error)[0]) for bad in batch.around.bad])
        for number, batch in enumerate(batches)
        if batch.around is not None
    ]
    return pickle.dumps((packed_errors(errors), around)) if errors or around else b""


def unpacked_results(payload: bytes, process: int) -> dict[int, Unplanned]:
    errors, around = pickle.loads(payload)  # noqa: S301  # from the reader process
    found: dict[int, Unplanned] = {**unpacked_errors(errors, process)}
    return found | {
        number: ReadAround(samples, tuple(BadSample(*each) for each in bad)) for number, samples, bad in around
    }


def packed_errors(errors: Sequence[tuple[int, BaseException]]) -> bytes:
    return pickle.dumps([(number, *_portable(error)) for number, error in errors])


def unpacked_errors(payload: bytes, process: int) -> dict[int, Exception]:
    """The exceptions by number, with their causes; their tracebacks are notes."""
    found = {}
    for number, error, cause, text in pickle.loads(payload):  # noqa: S301  # from the reader process
        error.__cause__ = cause
        error.add_note(f"In reader process {process}:\n{text}")
        found[number] = error
    return found


def _portable(error: BaseException) -> tuple[BaseException, BaseException | None, str]:
    """An exception that can be pickled, its cause, and the text of both with tracebacks."""
    text = "".join(traceback.format_exception(error)).rstrip()
    cause = error.__cause__ if error.__cause__ is not None and _travels(error.__cause__) else None
    if not (isinstance(error, Exception) and _travels(error)):
        known = ("file", "dataset", "row", "sample_id", "stage", "worker")
        place: dict[str, Any] = {name: getattr(error, name, None) for name in known}
        kind = type(error) if type(error) in (AsyncDataError, ReadError) else ReadError
        error = kind(f"{type(error).__name__}: {error}", **place)
    return error, cause, text


def _travels(error: BaseException) -> bool:
    """Whether an exception can be pickled and built again: one may need arguments that it does not keep."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301  # made here
    except Exception:  # noqa: BLE001  # whatever its own code raises
        return False
