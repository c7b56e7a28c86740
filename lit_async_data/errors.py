"""Every exception of the package, and what each one means to the caller.

::

    AsyncDataError                 anything below; carries where it happened
    ├── ConfigError (ValueError)   an option is wrong: change the named key and start again
    │   └── MemoryBudgetError      the batches do not fit: the message says how many bytes they need
    ├── SourceError                the data are not what the source was told they are, or the system does not read them
    │   ├── MissingError           a file or dataset is not there
    │   ├── FormatError            it is there, but cannot be a field of a batch
    │   ├── ChangedError           a file is not the one that was opened
    │   ├── CorruptError           stored bytes do not decode to what the file promises
    │   └── ManifestError          a row of a table is wrong
    ├── ReadError                  reading a batch failed: raised at that batch's place in the order
    ├── TransformError             a hook of yours failed on a batch
    ├── TransferError              what is on the device is not what was read; see ``verify_copies``
    ├── WorkerError                a worker died, or a loader crossed a fork
    ├── StalledError (TimeoutError) no batch came within ``timeout_s``
    ├── ResumeError                a saved position does not fit these data
    └── ClosedError                the loader was closed before it was asked
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AsyncDataError(Exception):
    """Base of every error of this package.

    Args:
        message: Where it happened and what to do about it, in one or two sentences.
        file: Path of the file concerned.
        dataset: Name of the dataset inside ``file``.
        row: Row of that dataset, counted from 0.
        sample_id: Sample number in the source, as ``source.locate`` takes it.
        stage: What was being done: ``"read"``, ``"transform"``, ``"copy"``, …
        worker: Number of the worker that did it.

    Each of these is also an attribute; it is None where it is unknown.

    Example:
        >>> error = ReadError("scan.h5:/data[7]: short read", file="scan.h5", row=7)
        >>> error.row, error.worker
        (7, None)
    """

    def __init__(
        self,
        message: str = "",
        *,
        file: str | None = None,
        dataset: str | None = None,
        row: int | None = None,
        sample_id: int | None = None,
        stage: str | None = None,
        worker: int | None = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.dataset = dataset
        self.row = row
        self.sample_id = sample_id
        self.stage = stage
        self.worker = worker


class ConfigError(AsyncDataError, ValueError):
    """An option is unknown, of the wrong type or out of range; the message begins with its key."""


class MemoryBudgetError(ConfigError):
    """The memory that the options ask for is more than ``memory_budget``."""


class SourceError(AsyncDataError):
    """The data are not what the source was told they are, or the system does not read them: the message says why.

    Args:
        message: As for `AsyncDataError`.
        errors: Where this one stands for several, each of them, in the order of the samples.
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
        """The error of each sample that is wrong: this one itself, where there is one only."""
        return self._errors or (self,)


class MissingError(SourceError):
    """A file or dataset is not there."""


class FormatError(SourceError):
    """A file or dataset is there, but cannot be read as a field of a batch."""


class ChangedError(SourceError):
    """A file changed, shrank or was replaced since the source was built."""


class CorruptError(SourceError):
    """Stored bytes do not decode to what the file promises."""


class ManifestError(SourceError):
    """A row of a manifest table is wrong, or several rows name files that cannot be read."""


class ReadError(AsyncDataError):
    """Reading a batch failed; the cause is chained."""

    @staticmethod
    def of_batch(
        cause: BaseException, epoch: int, step: int, samples: Sequence[int], worker: int | None
    ) -> AsyncDataError:
        """The error of a batch: its cause, if that is one of ours and says where it happened, else a `ReadError`."""
        if isinstance(cause, AsyncDataError):
            cause.stage = cause.stage or "read"
            cause.worker = worker if cause.worker is None else cause.worker
            cause.add_note(f"in batch {step} of epoch {epoch}, samples {few(samples)}")
            return cause
        which = (
            f"batch {step} of epoch {epoch} (samples {few(samples)})" if samples else f"batch {step} of epoch {epoch}"
        )
        error = ReadError(
            f"{which} could not be read: {type(cause).__name__}: {cause}",
            sample_id=samples[0] if samples else None,
            stage="read",
            worker=worker,
        )
        error.__cause__ = cause
        return error


class TransformError(AsyncDataError):
    """A hook failed on a batch; the cause is chained."""


class TransferError(AsyncDataError):
    """A batch on its device is not, or is no more, what was read: copy verification found it."""


class WorkerError(AsyncDataError):
    """A worker could not be started, died, or belongs to another process."""


class StalledError(AsyncDataError, TimeoutError):
    """No batch came within ``timeout_s`` seconds."""


class ResumeError(AsyncDataError):
    """A saved position does not fit the data or the options."""


class ClosedError(AsyncDataError):
    """The loader has been closed."""


def few(numbers: Sequence[int]) -> str:
    """The first numbers of many, for a message."""
    shown = ", ".join(map(str, numbers[:3]))
    return shown if len(numbers) <= 3 else f"{shown}, … ({len(numbers)} in all)"
