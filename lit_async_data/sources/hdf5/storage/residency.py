"""Whether what is to be read of a file is in memory already."""

from __future__ import annotations

import errno
import os


def is_cold(descriptor: int, offset: int) -> bool | None:
    """Whether a byte of a file must come from the disk; None where the system cannot say."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError as error:
        # Of a disk that fails, the read itself will say so.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.EIO):
            raise
        return None
    return False
