"""`TaskQueue`: the tasks of a reader process, which come through a pipe."""

from __future__ import annotations

import io
import select

from lit_async_data.host.processes.messages import TASK_BYTES, Task

_NONE = bytes(TASK_BYTES)


class TaskQueue:
    """A pipe from which threads take tasks. Safe to use from several threads.

    The training process writes a task there, and wakes only a thread that waits for one. Threads that decode, and the
    main thread of the reader process, sleep on: on a busy machine each of them could run only in place of the training
    loop. Reading from the pipe does not block.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        # Closed files raise; a closed descriptor could be that of another file by now.
        self._read, self._write = io.FileIO(read_fd, "rb"), io.FileIO(write_fd, "wb")

    def get(self) -> Task | None:
        """Take the next task, waiting for it; None if the thread shall end."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        # None if there is none, or another thread was faster. The system gives each reader whole records.
        while (data := self._read.read(TASK_BYTES)) is None:
            poll.poll()
        return None if data in (b"", _NONE) else Task.unpacked(data)

    def wake(self, threads: int) -> None:
        """Let this many threads end."""
        self._write.write(threads * _NONE)

    def close(self) -> None:
        """Close the pipe, when no thread uses it any more."""
        self._read.close()
        self._write.close()
