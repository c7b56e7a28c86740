"""What h5py, numpy and the system raise, as errors of this package: which file and dataset, and what to do.

`opened` and `opened_raw` open a file, and refuse what is no regular file: a pipe would block them for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import TypeVar

import h5py

from lit_async_data.errors import AsyncDataError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.sources import descriptors
from lit_async_data.sources.opening import opening

# What h5py raises for whatever libhdf5 finds wrong, and numpy and the system while they read.
FOREIGN = (OSError, RuntimeError, LookupError, TypeError, ValueError, ArithmeticError, MemoryError)
# The first bytes of the formats that NetCDF had before it was HDF5.
NETCDF3 = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
# What the system refuses though nothing is wrong with the data, and what to do about it.
REMEDIES = {
    **descriptors.ADVICE,
    errno.ENOMEM: "there is not enough memory: raise the limit (ulimit -v), use smaller batches or a smaller "
    "cache_bytes, or memory_map=False",
    errno.EIO: "the disk or the network failed, twice in a row: look at dmesg, and copy the file to another disk",
    errno.ESTALE: "the file server no longer knows the file: build the source again",
    errno.EACCES: "this user may not read it: change its permissions (chmod)",
    errno.EPERM: "this user may not read it: change its permissions (chmod)",
}
# libhdf5 says it so in its messages; h5py passes it on as a number only where a file is opened.
_ERRNO = re.compile(r"\berrno = (\d+)")

_T = TypeVar("_T")


def errno_of(error: BaseException) -> int | None:
    """The number by which the system said what is wrong; None where something else did.

    Example:
        >>> errno_of(OSError("Can't read data (file read failed: errno = 5, error message = 'Input/output error')"))
        5
    """
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _ERRNO.search(str(error))
    return int(found[1]) if found and int(found[1]) else None


def source_error(
    error: BaseException,
    where: str,
    doing: str,
    *,
    file: str,
    dataset: str | None = None,
    row: int | None = None,
) -> SourceError:
    """An error of ours for one of h5py, numpy or the system.

    Args:
        error: What was raised.
        where: The file, dataset, rows or bytes, for the message.
        doing: What failed: ``"cannot be opened"``.
        file: Path of the file.
        dataset: Name of the dataset in it.
        row: Row of the dataset.
    """
    number = errno_of(error)
    kind: type[SourceError] = CorruptError
    advice = "the file is damaged; restore it, or copy what can be read of it"
    if number in REMEDIES:
        kind, advice = SourceError, REMEDIES[number]
    elif number in (errno.ENOENT, errno.ENOTDIR):
        kind, advice = MissingError, "the file is gone; was it moved or deleted?"
    elif isinstance(error, OSError) and error.errno:
        kind, advice = SourceError, "the system refuses it"
    elif isinstance(error, TypeError | NotImplementedError):
        kind, advice = FormatError, "h5py does not support what is stored there; write it as numbers of another type"
    return kind(f"{where} {doing}: {_said(error)}; {advice}", file=file, dataset=dataset, row=row)


def _said(error: BaseException) -> str:
    """What an error says; with its name where that says more than the text."""
    text = str(error) or "no reason is given"
    return text if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def as_source_errors(where: str, doing: str, *, file: str, dataset: str | None = None) -> Iterator[None]:
    """Raise what h5py, numpy or the system raise inside as a `SourceError`; the arguments are those of `source_error`.

    Errors of this package pass unchanged.
    """
    try:
        yield
    except AsyncDataError:
        raise  # some are a ValueError or an OSError too
    except FOREIGN as error:
        raise source_error(error, where, doing, file=file, dataset=dataset) from error


def retried(read: Callable[[], _T]) -> _T:
    """What a call returns; after an input/output error it is made once more, since some of these pass."""
    try:
        return read()
    except OSError as error:
        if errno_of(error) != errno.EIO:
            raise
    return read()


def opened(path: str) -> h5py.File:
    """A file, opened by h5py for reading.

    Raises:
        MissingError: It is not there.
        FormatError: It is no regular file, or not HDF5, or another process writes to it.
        SourceError: The system does not open it; says what to do.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise MissingError(f"{path}: there is no such file", file=path) from error
        raise source_error(error, path, "cannot be opened", file=path) from error
    _refuse_irregular(path, status)
    try:
        return retried(lambda: h5py.File(path, "r", locking="best-effort"))
    except FOREIGN as error:
        if errno_of(error) in REMEDIES and "unable to lock" not in str(error):
            raise source_error(error, path, "cannot be opened", file=path) from error
        raise FormatError(f"{path} {_what_is_wrong(path, error)}: {error}", file=path) from error


def opened_raw(path: str) -> io.FileIO:
    """A file, open for reading its bytes; as `opened`."""
    try:
        # A pipe would block until somebody writes to it; of a regular file O_NONBLOCK changes nothing.
        file = retried(lambda: opening(path, os.O_NONBLOCK))
    except IsADirectoryError:
        _refuse_irregular(path, os.stat(path))
        raise
    except OSError as error:
        raise source_error(error, path, "cannot be opened", file=path) from error
    try:
        _refuse_irregular(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _refuse_irregular(path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    what = "no regular file"
    if stat.S_ISDIR(status.st_mode):
        what = f"a folder; for all files in it write {path}/*.h5"
    raise FormatError(f"{path} is {what}", file=path)


def _what_is_wrong(path: str, error: BaseException) -> str:
    if "unable to lock" in str(error) or "already open for write" in str(error):
        return "is open for writing in another process; wait until it is closed"
    with contextlib.suppress(OSError, SourceError):
        with opened_raw(path) as file:
            head = file.read(4)
        if head in NETCDF3:
            return f"is NetCDF of the classic format (3), not HDF5; convert it: nccopy -k nc4 {path} new.nc"
    return "is not an HDF5 file, or is damaged"
