"""`is_cold`: whether bytes of a file must come from disk."""

from __future__ import annotations

import errno
import os

from lit_async_data import system


def is_cold(descriptor: int, offset: int) -> bool | None:
    """Whether a byte of a file is not in memory; None if the system cannot tell."""
    if not system.NO_WAIT:
        return None
    try:
        os.preadv(descriptor, [bytearray(1)], offset, system.NO_WAIT)
    except BlockingIOError:
        return True
    except OSError as error:
        # If the disk fails, the read itself will report it.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EIO):
            raise
        return None
    return False
