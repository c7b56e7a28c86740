"""Turns errors of h5py, numpy and the system into errors of this package, which name the file and the remedy.

`open_local` and `open_raw` open regular files only: a pipe would block them for ever.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lit_async_data import system
from lit_async_data.errors import AsyncDataError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.sources import local_files
from lit_async_data.sources.local_files import HEAD_BYTES, SEPARATORS, errno_of, mistaken, opening, retry_once

if TYPE_CHECKING:
    import h5py as h5py  # noqa: PLC0414  # other modules of this room take it from here
else:
    h5py = system.Lazy("h5py")

# What h5py raises for any failure of libhdf5, and what numpy and the system raise while they read.
LIBRARY_ERRORS = (OSError, RuntimeError, LookupError, TypeError, ValueError, ArithmeticError, MemoryError)
# First bytes of HDF5 files, and of the NetCDF formats before NetCDF-4, which is HDF5.
SIGNATURE = b"\x89HDF\r\n\x1a\n"
NETCDF3 = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
_UNLOCKED = "set HDF5_USE_FILE_LOCKING=FALSE before Python starts"
# Failures of the system that say nothing about the data, and what to do about them.
REMEDIES = {
    **local_files.ADVICE,
    errno.ENOMEM: "there is not enough memory: raise the limit (ulimit -v), use smaller batches or a smaller "
    "cache_bytes, or memory_map=False",
    errno.EIO: "the disk or the network failed, twice in a row: check dmesg, and copy the file to another disk",
    errno.ESTALE: "the file server no longer knows the file: build the source again",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "this user may not read it: change its permissions (chmod)"),
    # libhdf5 locks each file that it opens, and "best-effort" goes on without a lock for ENOSYS alone.
    **dict.fromkeys(
        (errno.ENOLCK, errno.EOPNOTSUPP),
        f"its file system (NFS, Lustre) gives no locks, and libhdf5 asks for one: {_UNLOCKED}",
    ),
}


class NoSamplesError(FormatError):
    """A dataset or group has no rows. A part in which all fields have none is left out."""


def context_of(path: str, name: str, row: int | None = None) -> dict[str, Any]:
    place = f"{path}:/{name.strip('/')}" + f", row {row}" * (row is not None)
    return {"file": path, "dataset": name, "row": row, "place": place}


def source_error(error: BaseException, where: str, problem: str, **context: Any) -> SourceError:
    """The `SourceError` for an error of h5py, numpy or the system: what failed (``"cannot be opened"``) and where."""
    number = errno_of(error)
    kind: type[SourceError] = CorruptError
    advice = "the file is damaged; restore it, or copy what can be read of it"
    if number in REMEDIES:
        kind, advice = SourceError, REMEDIES[number]
    elif number in (errno.ENOENT, errno.ENOTDIR):
        kind, advice = MissingError, "the file is gone; was it moved or deleted?"
    elif isinstance(error, OSError) and error.errno:
        kind, advice = SourceError, "check that this user may read it, and that the disk works"
    elif isinstance(error, TypeError | NotImplementedError):
        kind, advice = FormatError, "h5py does not support what is stored there; write it as numbers of another type"
    return kind(f"{problem}: {_error_text(error)}; {advice}", place=where, **context)


def _error_text(error: BaseException) -> str:
    """The message of an error, with the name of its class where the message needs it."""
    if isinstance(error, OSError) and error.filename is not None:  # the message has the path already
        return f"[Errno {error.errno}] {error.strerror}"
    text = str(error) or "no reason given"
    return text if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def as_source_errors(where: str, problem: str, **context: Any) -> Iterator[None]:
    """Turn errors of h5py, numpy and the system into `source_error`; those of this package pass unchanged."""
    try:
        yield
    except AsyncDataError:
        raise  # some of them are also a ValueError or an OSError
    except LIBRARY_ERRORS as error:
        raise source_error(error, where, problem, **context) from error


def open_local(path: str) -> h5py.File:
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            what = f"{path}: no such file; check the path{SEPARATORS * (chr(92) in path)}"
            raise MissingError(what, file=path) from error
        raise source_error(error, path, "cannot be opened", file=path) from error
    _refuse_irregular(path, status)
    try:
        return retry_once(lambda: h5py.File(path, "r", locking="best-effort"))
    except LIBRARY_ERRORS as error:
        if errno_of(error) in REMEDIES:
            raise source_error(error, path, "cannot be opened", file=path) from error
        with open_raw(path) as raw:
            why = why_not_hdf5(path, error, raw.read(HEAD_BYTES))
        raise FormatError(f"{path}: {why}: {error}", file=path) from error


def open_raw(path: str) -> io.FileIO:
    try:
        # Without O_NONBLOCK, opening a pipe blocks until somebody writes to it. Regular files ignore the flag.
        file = retry_once(lambda: opening(path, system.NO_BLOCKING))
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
    problem = "is no regular file; give a file"
    if stat.S_ISDIR(status.st_mode):
        problem = f"is a folder; for all files in it write {path}/*.h5, and for those in its folders too {path}/**/*.h5"
    raise FormatError(f"{path}: {problem}", file=path)


def why_not_hdf5(path: str, error: BaseException, head: bytes) -> str:
    if errno_of(error) == errno.EAGAIN:  # it has locked the file
        what = "is open for writing in another process; wait until it is closed. If no process has it open, its file "
        return f"{what}server (NFS, Lustre) keeps the lock of one that is gone: {_UNLOCKED}"
    if head.startswith(NETCDF3):
        return f"is a classic NetCDF file (format 3), not HDF5; convert it with nccopy -k nc4 {path} new.nc"
    if head.startswith(SIGNATURE):
        if "h5clear" not in str(error):
            return "is damaged or cut short; copy it again, once nobody writes to it"
        what = "is marked as open for writing by a program that still writes to it or was killed"
        return f"{what}; if nobody writes to it, h5clear -s {path} removes the mark; else copy it again"
    if what := mistaken(head):
        return f"is {what}"
    what = f"is not an HDF5 file, or is damaged{'' if head else ': it is empty'}; check the path, or copy it again"
    return f"{what}; tables and images are read by ManifestSource"
