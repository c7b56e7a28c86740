"""`Mirror`: a local copy of an object, filled block by block; it may be shared by processes, without locks.

A sparse file is as long as the object, and a table has the CRC-32 of each block of 16 KiB, 0 for a block that is not
there. Bytes are written before their CRC, and processes that fetch the same block write the same bytes. So a process
that is killed leaves no wrong block. After a crash of the machine the CRC may be there without the bytes: each process
compares each block once, before its first use. A mirror in memory belongs to one process, and a `Ring` limits it.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import deflate
import numpy as np
import numpy.typing as npt

from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.permutation import Indices

BLOCK = 2**14
# The table has 0 for a block that is not there; a CRC of 0 is stored as this.
_CRC_OF_ZERO = 1


class Mirror:
    """Thread-safe. Owns the descriptors of the sparse file and the table.

    ``ring`` limits the memory of a mirror that no other process has; without it, a mirror keeps every block.
    """

    def __init__(self, data: int, table: int, size: int, ring: Ring | None = None) -> None:
        weakref.finalize(self, os.close, data).atexit = False
        self.descriptor, self.size, self.blocks, self.ring = data, size, -(-size // BLOCK), ring
        try:
            if os.fstat(data).st_size != size:
                os.ftruncate(data, size)  # whoever comes first; others do the same
            if os.fstat(table).st_size != 4 * self.blocks:
                os.ftruncate(table, 4 * self.blocks)
                if hasattr(os, "posix_fallocate"):  # on a full disk, writing into a hole by a map would end the process
                    os.posix_fallocate(table, 0, 4 * self.blocks)
            self._crcs: npt.NDArray[np.uint32] = np.frombuffer(mmap.mmap(table, 4 * self.blocks), np.uint32)
        finally:
            os.close(table)
        self._mapped = mmap.mmap(data, size, access=mmap.ACCESS_READ if ring is None else mmap.ACCESS_WRITE)
        self.map: npt.NDArray[np.uint8] = np.frombuffer(self._mapped, np.uint8)
        self.map.flags.writeable = False
        # Blocks that this process has written or compared. Read without the lock.
        self._there = np.zeros(self.blocks, np.bool_)
        self._coming = np.zeros(self.blocks, np.bool_)  # blocks that are being written
        self._lock, self._left = threading.Lock(), self.blocks

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Blocks that are there or come meanwhile keep their bytes until the end."""
        return contextlib.nullcontext() if self.ring is None else self.ring.reading()

    def holds(self, begin: int, end: int) -> bool:
        """Whether the blocks of a range are there, as far as this process knows."""
        return not self._left or bool(self._there[begin // BLOCK : (end - 1) // BLOCK + 1].all())

    def missing(self, begins: Indices, ends: Indices) -> Indices:
        """The blocks of these ranges that are not there, sorted; int64. Compares blocks of other processes."""
        first, last = begins // BLOCK, (ends - 1) // BLOCK
        if not self._left:
            return first[:0]
        widest = int((last - first).max(initial=0))
        blocks = first if not widest else np.minimum(first[:, None] + np.arange(widest + 1), last[:, None]).ravel()
        blocks = blocks[~self._there[blocks]]
        if not len(blocks):
            return blocks
        blocks = distinct_of(blocks)
        if self.ring is not None:  # nobody else stores
            return blocks
        stored = blocks[self._crcs[blocks] != 0]
        if len(stored):
            same = [self._crc(self.map[at : at + BLOCK]) == self._crcs[at // BLOCK] for at in (stored * BLOCK).tolist()]
            with self._lock:
                self._note(stored[same])
        return blocks[~self._there[blocks]]

    def store(self, begin: int, data: memoryview) -> None:
        """Write bytes that begin with a block, and end with one or with the object."""
        blocks, done = slice(begin // BLOCK, -(-(begin + len(data)) // BLOCK)), 0
        crcs: Any = _CRC_OF_ZERO
        if self.ring is None:  # else no other process reads them
            crcs = [self._crc(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        with self._lock:
            self._coming[blocks] = True
        while done < len(data):  # the bytes first; without the lock, for which other threads would wait
            done += os.pwrite(self.descriptor, data[done:], begin + done)
        with self._lock:
            self._crcs[blocks] = crcs
            self._note(blocks)
            self._coming[blocks] = False
        if self.ring is not None:
            self.ring.stored(self, blocks)

    def _note(self, blocks: slice | Indices) -> None:
        self._left -= int(np.count_nonzero(~self._there[blocks]))
        self._there[blocks] = True

    def drop(self, blocks: slice) -> None:
        """Forget blocks, whose bytes stay until `free`, for readers that have found them there."""
        with self._lock:
            self._left += int(np.count_nonzero(self._there[blocks]))
            self._there[blocks], self._crcs[blocks] = False, 0

    def free(self, blocks: slice) -> None:
        """Give back the memory of dropped blocks, unless they have come again."""
        with self._lock:
            kept = self._there[blocks] | self._coming[blocks]
            for begin, end in runs(np.flatnonzero(~kept) + blocks.start, 0, self.blocks):
                self._mapped.madvise(mmap.MADV_REMOVE, begin * BLOCK, min(end * BLOCK, self.size) - begin * BLOCK)

    @staticmethod
    def _crc(data: Any) -> int:
        return deflate.crc32(data) or _CRC_OF_ZERO  # several times as fast as zlib's


class Ring:
    """The memory of mirrors: the oldest blocks make room for others once no reader can use them. Thread-safe.

    Blocks take ``nbytes`` at most, but for those that came since the longest read began.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.held = nbytes, 0
        self._lock, self._clock = threading.Lock(), 0
        self._begun = dict[object, int]()  # when each read that goes on began
        self._blocks = collections.deque[tuple[int, Mirror, slice]]()
        self._dropped = collections.deque[tuple[int, Mirror, slice]]()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._lock:
            self._begun[key := object()] = self._clock
        try:
            yield
        finally:
            with self._lock:
                del self._begun[key]
                self._free()

    def holds(self, nbytes: int) -> bool:
        """Whether this many more bytes leave half of the memory to others."""
        return self.held + nbytes <= self.nbytes // 2

    def stored(self, mirror: Mirror, blocks: slice) -> None:
        with self._lock:
            self._clock += 1
            self._blocks.append((self._clock, mirror, blocks))
            self.held += (blocks.stop - blocks.start) * BLOCK
            oldest = min(self._begun.values(), default=self._clock)
            while self.held > self.nbytes and self._blocks[0][0] <= oldest and len(self._blocks) > 1:
                _, old, gone = self._blocks.popleft()
                old.drop(gone)
                self.held -= (gone.stop - gone.start) * BLOCK
                self._clock += 1
                self._dropped.append((self._clock, old, gone))
            self._free()

    def _free(self) -> None:
        oldest = min(self._begun.values(), default=self._clock)
        while self._dropped and self._dropped[0][0] <= oldest:
            _, mirror, blocks = self._dropped.popleft()
            mirror.free(blocks)


def runs(blocks: Indices, gap: int, most: int) -> list[tuple[int, int]]:
    """Sorted blocks as ranges of blocks: those at most ``gap`` apart together, and at most ``most`` in each."""
    found, breaks = list[tuple[int, int]](), np.flatnonzero(np.diff(blocks) > gap + 1) + 1
    for part in np.split(blocks, breaks) if len(blocks) else ():
        first, end = int(part[0]), int(part[-1]) + 1
        found += [(begin, min(begin + most, end)) for begin in range(first, end, most)]
    return found
