"""Every exception of the package. All can be imported from the top level, too."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Self

# User and query of an address. Where it is none of a web server, a query has "=", since "?" may be a wildcard.
_USER = re.compile(r"(https?://|://(?=[^\s/:@]*:))[^\s/]+@", re.IGNORECASE)
_QUERY = re.compile(r"""(https?://[^\s?]*\?|://[^\s?]*\?(?=\S*=))\S+?(?=['")\]},;:.]*(?:\s|$))""", re.IGNORECASE)


def redact(text: str) -> str:
    """A text for people, with … in place of user, password and query of each address in it."""
    return _QUERY.sub(r"\1…", _USER.sub(r"\1…@", text))


class AsyncDataError(Exception):
    """Base of every error of this package.

    Args:
        message: What is wrong, and what to do next. Without ``place``, it begins with the location. Addresses are shown
            without user, password and query.
        place: The location; the text of the error begins with it.
        file: Path of the file.
        dataset: Name of the dataset inside ``file``.
        row: Row of that dataset, counted from 0.
        sample_id: Sample number in the source, as ``source.locate`` takes it.
        stage: The step that failed: ``"read"``, ``"transform"``, ``"copy"``, …
        worker: Number of the worker in which it failed.

    All arguments but ``place``, and the ``span`` of bytes that did not come, are attributes; unknown ones are None.

    Example:
        >>> error = ReadError("short read", place="scan.h5:/data[7]", file="scan.h5", row=7)
        >>> str(error), error.message, error.row, error.worker
        ('scan.h5:/data[7]: short read', 'short read', 7, None)
    """

    def __init__(
        self,
        message: str = "",
        *,
        place: str = "",
        file: str | None = None,
        dataset: str | None = None,
        row: int | None = None,
        sample_id: int | None = None,
        stage: str | None = None,
        worker: int | None = None,
    ) -> None:
        message = redact(message)
        super().__init__(redact(f"{place}: {message}") if place else message)
        self.span: tuple[int, int] | None = None  # of a remote file
        self.message, self.stage, self.worker = message, stage, worker
        self.file, self.dataset, self.row, self.sample_id = file, dataset, row, sample_id


class ConfigError(AsyncDataError, ValueError):
    """An option is unknown, of the wrong type or out of range; the message begins with its key.

    Args:
        message: As for `AsyncDataError`.
        option: The key of the option, such as ``"fields.y.null"``; None if no single option is wrong.
        place: The location; the text begins with option and place.
        **where: As for `AsyncDataError`.

    Example:
        >>> error = ConfigError("'skip' is not one of error, ignore, drop", option="null").within("fields.y.")
        >>> error.option, str(error)
        ('fields.y.null', "fields.y.null: 'skip' is not one of error, ignore, drop")
    """

    def __init__(self, message: str = "", option: str | None = None, *, place: str = "", **where: Any) -> None:
        super().__init__(message, place=": ".join(filter(None, (option, place))), **where)
        self.option = option

    def within(self, prefix: str) -> Self:
        """The same error, if the option is part of another option; ``prefix`` ends with a dot."""
        error = copy.copy(self)
        error.args = (f"{prefix}{self}",)
        error.option = self.option and prefix + self.option
        return error


class MemoryBudgetError(ConfigError):
    """The options need more memory than ``memory_budget`` allows."""


class SourceError(AsyncDataError):
    """The data do not match the source's description, or the system cannot read them.

    Args:
        message: As for `AsyncDataError`.
        errors: The error of each bad sample, in the order of the samples; empty if there is only one.
        **where: As for `AsyncDataError`.

    Example:
        >>> error = ManifestError("2 files cannot be read", errors=[CorruptError(row=3), MissingError(row=7)])
        >>> [each.row for each in error.errors]
        [3, 7]
    """

    def __init__(self, message: str = "", *, errors: Sequence[SourceError] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self._errors = tuple(errors)

    @property
    def errors(self) -> tuple[SourceError, ...]:
        """The error of each bad sample; this error itself if there is only one."""
        return self._errors or (self,)


class MissingError(SourceError):
    """A file or dataset does not exist."""


class FormatError(SourceError):
    """A file or dataset exists, but its contents cannot be a field of a batch."""


class ChangedError(SourceError):
    """A file changed, shrank or was replaced since the source was built."""


class CorruptError(SourceError):
    """Stored bytes are damaged: they do not decode to the values that the file describes."""


class StoreError(AsyncDataError):
    """A store, its network or the disk of a cache failed. It is no fault of a sample, so ``on_error`` skips none."""


class ManifestError(SourceError):
    """A row of a manifest table is wrong, or rows name files that cannot be read."""


class ReadError(AsyncDataError):
    """Reading a batch failed; the cause is chained."""


class TransformError(AsyncDataError):
    """A transform failed on a sample or a batch, or returned a value that does not fit; the cause is chained."""


class WorkerError(AsyncDataError):
    """A worker could not be started, died, or belongs to another process (after a fork).

    Attributes:
        in_its_place: True if only this batch is lost and iteration can go on.
    """

    in_its_place = False


class StalledError(AsyncDataError, TimeoutError):
    """No batch came within ``timeout_s`` seconds."""


class ResumeError(AsyncDataError):
    """A saved position does not fit the data or the options."""


class ClosedError(AsyncDataError):
    """The loader is closed."""


def batch_error(
    cause: BaseException, epoch: int, step: int, samples: Sequence[int], worker: int | None
) -> AsyncDataError:
    if isinstance(cause, AsyncDataError):
        cause.stage = cause.stage or "read"
        cause.worker = worker if cause.worker is None else cause.worker
        cause.add_note(f"in batch {step} of epoch {epoch}, samples {few(samples)}")
        return cause
    which = f"batch {step} of epoch {epoch}" + f" (samples {few(samples)})" * bool(samples)
    what = f"{which} could not be read: {type(cause).__name__}: {cause}"
    error = ReadError(what, sample_id=samples[0] if samples else None, stage="read", worker=worker)
    error.__cause__ = cause
    return error


def few(numbers: Sequence[int | str], most: int = 3) -> str:
    """The first numbers or names, and the count if there are more, for a message."""
    shown = ", ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown}, … ({len(numbers)} in all)"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
