"""`GivenSlots`: the vacant slots of a reader process, which come through a pipe."""

from __future__ import annotations

import io
import queue
import select
import struct

from lit_async_data.host.pipeline.slots import Vacancy

_NUMBER = struct.Struct("<i")
_NONE = -1
# Slots that there may be. A worker that takes one reads all that lie in the pipe, and puts the others back; if they did
# not fit, everybody would wait for a reader. The smallest pipe that Linux makes, one page, holds twice as many numbers.
MOST_SLOTS = 512


def packed_slots(slots: list[int]) -> bytes:
    return b"".join(map(_NUMBER.pack, slots))


class GivenSlots:
    """A queue of slots that two processes put into. Has the methods of `queue.SimpleQueue` that `SlotPool` calls.

    The training process puts a slot there when the user has dropped its batch, and wakes only workers that wait for
    one. Workers that decode, and the main thread of the reader process, sleep on: on a busy machine each of them could
    run only in place of the training loop. Reading from the pipe does not block.
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        # Closed files raise; a closed descriptor could be that of another file by now.
        self._read, self._write = io.FileIO(read_fd, "rb"), io.FileIO(write_fd, "wb")

    def put(self, item: Vacancy, /) -> None:
        """Add a slot; None wakes a worker."""
        assert item is None or isinstance(item, int)  # the reader process lends no slots
        self._write.write(_NUMBER.pack(_NONE if item is None else item))

    def get(self, *, timeout: float | None = None) -> int | None:
        """Take a slot, waiting for it. None if the pipe is closed, or a worker shall wake."""
        if self._read.closed:
            return None
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while poll.poll(None if timeout is None else 1e3 * timeout):
            try:
                return self.get_nowait()
            except queue.Empty:  # another worker has taken it
                continue
        raise queue.Empty

    def get_nowait(self) -> int | None:
        """Take a slot, or raise `queue.Empty`, also where the pipe is closed."""
        data = None if self._read.closed else self._read.read(_NUMBER.size)
        if not data:
            raise queue.Empty
        (slot,) = _NUMBER.unpack(data)
        return None if slot == _NONE else slot

    def close(self) -> None:
        self._read.close()
        self._write.close()
