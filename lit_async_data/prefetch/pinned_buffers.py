"""`PinnedBufferPool`: pinned blocks of host memory, into which batches are packed on their way to a device.

Pinning takes milliseconds and may make the device wait, so blocks are used again. Any thread may take one; only the
consumer's thread allocates new ones, since only that thread calls the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lit_async_data.batch.spec import ALIGNMENT, Bytes
from lit_async_data.host.resources.memory import pinned_bytes, readable

log = logging.getLogger(__name__)


class PinnedBufferPool:
    """Blocks of pinned memory, ``most`` at most, which can be set at any time. Safe to use from several threads.

    Example:
        >>> staging = PinnedBufferPool(bytearray, most=2)
        >>> staging.claim(1000)  # there is none yet
        >>> block = staging.provide(1000)
        >>> len(block), len(staging)
        (1024, 2)
        >>> staging.give_back(block)
        >>> staging.claim(1024) is block
        True
    """

    def __init__(self, allocate: Callable[[int], Bytes], most: int) -> None:
        self._allocate = allocate
        self.most = most
        # Reentrant: garbage collection can end a loader inside any allocation, also of a thread that holds it.
        self._lock = threading.RLock()
        self._free: list[Bytes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_room(self) -> bool:
        with self._lock:
            return bool(self._free) or self._count < self.most

    def claim(self, nbytes: int) -> Bytes | None:
        """A free block of at least this size, or None. Allocates nothing."""
        with self._lock:
            fitting = [number for number, block in enumerate(self._free) if len(block) >= nbytes]
            # The one that was given back last: the processor's cache may still hold it.
            return self._free.pop(fitting[-1]) if fitting else None

    def provide(self, nbytes: int) -> Bytes | None:
        """A block of at least this size, allocated if need be; None if all are in use. On the consumer's thread only.

        The first call allocates all blocks; if the free ones are too small, it replaces them all.
        """
        with self._lock:
            block = self.claim(nbytes)
            if block is None and (self._free or self._count < self.most):
                self._count -= len(self._free)
                self._free.clear()
                size = max(pinned_bytes(nbytes), ALIGNMENT)
                log.info(
                    "%d pinned blocks of %s for batches to be packed into", self.most - self._count, readable(size)
                )
                while self._count < self.most:
                    self._free.append(self._allocate(size))
                    self._count += 1
                block = self.claim(nbytes)
            return block

    def give_back(self, block: Bytes) -> None:
        with self._lock:
            if self._count > self.most:
                self._count -= 1
            else:
                self._free.append(block)
