"""Errors and advice when no file or folder can be opened because all descriptors are in use."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from lit_async_data.errors import SourceError

ADVICE = {
    errno.EMFILE: "this process may open no more files: raise its limit (ulimit -n), or read fewer files at once",
    errno.ENFILE: "this machine may open no more files: close other programs, or raise fs.file-max",
}


def advice_on(error: BaseException | None) -> str | None:
    """What to do if no descriptor was left, according to an error or one of its causes; None otherwise."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in ADVICE:
            return f"{os.strerror(error.errno)}; {ADVICE[error.errno]}"
        error = error.__cause__
    return None


def raise_if_none_left(error: OSError) -> None:
    """Re-raise an error if no descriptor was left. For ``onerror`` of ``os.walk``, which skips unreadable folders."""
    if error.errno in ADVICE:
        raise error


@contextlib.contextmanager
def listing(path: str) -> Iterator[None]:
    """Raise a `SourceError` if no descriptor is left to list folders with."""
    try:
        yield
    except OSError as error:
        advice = advice_on(error)
        if advice is None:
            raise
        raise SourceError(f"{path}: cannot be listed: {advice}", file=path) from error


def check_listable(pattern: str) -> None:
    """Check that a descriptor is left for expanding a pattern: ``glob`` treats unreadable folders as empty."""
    import glob

    folder = pattern
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    with listing(pattern):
        try:
            os.scandir(folder or ".").close()
        except OSError as error:
            raise_if_none_left(error)
