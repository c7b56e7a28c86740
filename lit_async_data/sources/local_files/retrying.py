"""`retry_once`: reads again, after a pause, what a disk or a file server failed to deliver."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from typing import TypeVar

# A file server that fails over answers again after a while. ESTALE: it does not know the open file any more.
TRANSIENT = (errno.EIO, errno.ESTALE)
PAUSE_S = 0.1
# libhdf5 writes the number into its message; h5py sets it as an attribute only on errors of opening a file.
_ERRNO = re.compile(r"\berrno = (\d+)")

_T = TypeVar("_T")


def errno_of(error: BaseException) -> int | None:
    """The system's error number behind an error; None if the system did not cause it.

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


def retry_once(read: Callable[[], _T]) -> _T:
    """Call a function, and once more after a pause if it fails with a `TRANSIENT` error."""
    try:
        return read()
    except OSError as error:
        if errno_of(error) not in TRANSIENT:
            raise
    time.sleep(PAUSE_S)
    return read()
