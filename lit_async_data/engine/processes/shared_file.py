"""`SharedFile`: a file in memory that two processes map, and that nothing is left of however they end.

With memfd it has no name, and takes nothing of ``/dev/shm``, which containers limit to 64 MB. Where the system has no
memfd (gVisor, macOS), it is a temporary file without a name: in ``/dev/shm`` if there is one. Its bytes are reserved
before they are used, since touching a map without memory behind it ends the process (SIGBUS).
"""

from __future__ import annotations

import errno
import os
import tempfile

from lit_async_data.errors import MemoryBudgetError
from lit_async_data.sources.local_files.descriptors import advice_on

FOLDER = "/dev/shm"  # noqa: S108  # the file in it has no name
# Bytes of zeros written per step.
_STEP = 2**20


class SharedFile:
    """A new file in memory; its descriptor is closed with the object."""

    def __init__(self, name: str) -> None:
        self.folder: str | None = None  # the folder whose space it takes; None if it takes only memory
        try:
            self.file = open(name, "w+b", buffering=0, opener=_memory_descriptor)  # noqa: SIM115
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                what = "memory_budget: the system refuses a file in memory, which processes share"
                raise MemoryBudgetError(f"{what}: {advice_on(error) or error.strerror}") from error
            self.folder = FOLDER if os.access(FOLDER, os.W_OK | os.X_OK) else tempfile.gettempdir()
            # Linux creates it without a name (O_TMPFILE); elsewhere it has one for a moment.
            self.file = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115

    def reach(self, size: int) -> None:
        """Let the file have this many bytes, of which new ones are 0; an `OSError` if the system refuses them."""
        if self.folder is None:
            os.ftruncate(self.file.fileno(), size)
            return
        begin = self.file.seek(0, os.SEEK_END)
        try:
            while (missing := size - self.file.tell()) > 0:
                self.file.write(bytes(min(missing, _STEP)))
        except OSError:
            self.file.truncate(begin)
            raise

    def advice(self) -> str:
        """What to do if there is no room for it."""
        if self.folder is None:
            return "set a smaller batch_size or queue_depth, or a higher limit (ulimit -v)"
        if self.folder == FOLDER:
            return f"make {FOLDER} larger (docker run --shm-size=8g), or set worker_kind=thread"
        return f"make room in {self.folder}, or set worker_kind=thread"


def _memory_descriptor(name: str, _: int) -> int:
    (descriptor,) = map(os.memfd_create, (name,))  # returned without another call: see `opening`
    return descriptor
