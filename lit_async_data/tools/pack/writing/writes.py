"""Every change that a pack makes to the disk, each a function: a test ends the program at any of them."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """Write all bytes at an offset."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def append(descriptor: int, data: bytes) -> None:
    """Write all bytes at the end of a file that is open for appending."""
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def cut(descriptor: int, nbytes: int) -> None:
    """Make a file end at this byte."""
    os.ftruncate(descriptor, nbytes)


def sync(descriptor: int) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    os.fsync(descriptor)


def publish(part: str, out: str, *, force: bool) -> None:
    """Give a finished file its name, in one step.

    Args:
        part: The file.
        out: Its name.
        force: Whether it may replace another file.

    Raises:
        FileExistsError: There is such a file, and it may not be replaced.
    """
    if force:
        os.replace(part, out)
    else:
        _name_if_free(part, out)
    folder = os.open(os.path.dirname(out) or ".", os.O_RDONLY)
    try:
        sync(folder)
    finally:
        os.close(folder)


def _name_if_free(part: str, out: str) -> None:
    try:
        os.link(part, out)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(out):
            raise FileExistsError(out) from None
        os.rename(part, out)
    else:
        remove(part)


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
