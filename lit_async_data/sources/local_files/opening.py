"""`opening`: opens a file so that an interrupt cannot lose its descriptor; and whether a file changed just now.

CPython runs signal handlers between Python instructions, also between ``os.open`` and the assignment of its result. An
interrupt (Ctrl-C) there leaks the descriptor. If C code calls ``os.open`` and stores the result, there is no such
moment. A file object closes its descriptor when it is freed.
"""

from __future__ import annotations

import functools
import io
import os
import time

# File systems that store times in seconds cannot tell two changes within this time apart.
RECENT_NS = 2 * 10**9


def opening(path: str, flags: int = 0) -> io.FileIO:
    """Open a file for reading, unbuffered."""
    return open(path, "rb", buffering=0, opener=functools.partial(_descriptor, flags))


def _descriptor(more: int, path: str, flags: int) -> int:
    (descriptor,) = map(os.open, (path,), (flags | more,))  # returned without another call
    return descriptor


def changed_recently(*times_ns: int) -> bool:
    """Whether the latest of these times of a file lies within `RECENT_NS` of now: it may change without a new time."""
    return abs(time.time_ns() - max(times_ns)) < RECENT_NS
