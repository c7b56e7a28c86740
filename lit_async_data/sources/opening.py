"""`opening`: a file whose descriptor no interrupt loses.

CPython delivers an interrupt (Ctrl-C) when a call from Python has returned: also between ``os.open`` and the statement
that notes the descriptor, which then stays open for ever. Where C code calls ``os.open`` and notes it, nothing comes
between. A file object closes its descriptor when nobody refers to it.
"""

from __future__ import annotations

import functools
import io
import os


def opening(path: str, flags: int = 0) -> io.FileIO:
    """A file, open for reading without a buffer.

    Args:
        path: The file.
        flags: For ``os.open``, beside those that Python sets.

    Raises:
        OSError: It cannot be opened, or is a folder.
    """
    return open(path, "rb", buffering=0, opener=functools.partial(_descriptor, flags))


def _descriptor(more: int, path: str, flags: int) -> int:
    (descriptor,) = map(os.open, (path,), (flags | more,))  # and returned without another call
    return descriptor
