"""Opens files so that an interrupt cannot lose their descriptors; and whether a file changed just now.

CPython runs signal handlers between Python instructions, also between ``os.open`` and the assignment of its result. An
interrupt (Ctrl-C) there leaks the descriptor. If C code calls ``os.open`` and stores the result, there is no such
moment. A file object closes its descriptor when it is freed.
"""

from __future__ import annotations

import io
import os
import time

# File systems that store times in seconds cannot tell two changes within this time apart.
RECENT_NS = 2 * 10**9


def open_into(opened: list[int], path: str, flags: int) -> None:
    """Open a file and append its descriptor to a list, which the caller closes."""
    opened.extend(map(os.open, (path,), (flags,)))


def opening(path: str, flags: int = 0) -> io.FileIO:
    """Open a file for reading, unbuffered."""

    def opener(path: str, more: int) -> int:
        (descriptor,) = map(os.open, (path,), (flags | more,))
        return descriptor

    return open(path, "rb", buffering=0, opener=opener)


def changed_recently(*times_ns: int) -> bool:
    """Whether the latest of these times of a file lies within `RECENT_NS` of now: it may change without a new time."""
    return abs(time.time_ns() - max(times_ns)) < RECENT_NS
