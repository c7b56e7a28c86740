"""`opening`: opens a file so that an interrupt cannot lose its descriptor.

CPython runs signal handlers between Python instructions, also between ``os.open`` and the assignment of its result. An
interrupt (Ctrl-C) there leaks the descriptor. If C code calls ``os.open`` and stores the result, there is no such
moment. A file object closes its descriptor when it is freed.
"""

from __future__ import annotations

import functools
import io
import os


def opening(path: str, flags: int = 0) -> io.FileIO:
    """Open a file for reading, unbuffered."""
    return open(path, "rb", buffering=0, opener=functools.partial(_descriptor, flags))


def _descriptor(more: int, path: str, flags: int) -> int:
    (descriptor,) = map(os.open, (path,), (flags | more,))  # returned without another call
    return descriptor
