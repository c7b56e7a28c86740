"""`PersistentChunkCache`: decoded slabs that are kept for good; and `ByteBudget`, the bytes for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.reservations import Owner, Reservations

Array = npt.NDArray[Any]
# A flag of Linux that Python names only since 3.12.
# Not known to Python 3.11. Systems other than Linux reserve nothing for such maps, or have another number for it.

_log = logging.getLogger(__name__)


class ByteBudget:
    """Bytes for persistent slabs, shared by all fields and files of a source. Thread-safe.

    Attributes:
        lock: Hold it while ``taken`` changes. Reentrant, since garbage collection can close a loader while it is held.
        taken: Number of bytes in use.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.taken = 0
        self._given = Reservations()

    @property
    def limit(self) -> int:
        """Number of bytes that may be in use."""
        return self._given.nbytes

    def set_room(self, owner: Owner, nbytes: int) -> int:
        """Set how many bytes one owner reserves; returns the bytes left, negative if too many are taken."""
        with self.lock:
            self._given.set(owner, nbytes)
            return self.limit - self.taken


class PersistentChunkCache:
    """Slabs of one dataset that are kept for good, as many as fit, in one table of rows. Thread-safe.

    The first slabs stay: any order that visits all samples once per epoch profits equally from every cached byte, while
    the least recently used slab is the one needed next.

    Args:
        samples: Samples in the dataset.
        rows: Samples in a slab.
        shape: Stored shape of a sample.
        dtype: Of a value, in native byte order.
        room: Provides the bytes.
    """

    def __init__(self, samples: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], room: ByteBudget) -> None:
        self._rows = rows
        self._shape = shape
        self._dtype = dtype
        self._room = room
        self._lock = threading.RLock()  # as in `ByteBudget`
        self._slab_bytes = rows * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._slabs = -(-samples // rows)
        # The table of rows, and the place of each slab in it, -1 if absent. One attribute, so that no thread combines
        # an old table with new places while another clears and refills the cache.
        self._content: tuple[Array, Indices] | None = None
        self._next = 0
        self._map_failed = False  # for want of address space

    @property
    def enabled(self) -> bool:
        """Whether anything can be cached."""
        return self._room.limit > 0 and not (self._map_failed and self._content is None)

    @property
    def empty(self) -> bool:
        """Whether no slab is cached."""
        return self._content is None

    def missing(self, numbers: Indices) -> Indices:
        """The slabs that are not cached."""
        content = self._content
        return numbers if content is None else numbers[self._places(content[1], numbers) < 0]

    def slab(self, number: int) -> Array | None:
        """A slab, if cached. The last one of a dataset may have extra rows at its end."""
        content = self._content
        place = -1 if content is None else int(self._places(content[1], number))
        if content is None or place < 0:
            return None
        return content[0][place * self._rows : (place + 1) * self._rows]

    def copy_rows(self, rows: Indices, out: Array, check: Callable[[Array, Indices], Array]) -> Indices | None:
        """Copy the cached ones of some rows.

        Args:
            rows: Row numbers.
            out: Receives a row in each place.
            check: Converts values whose dtype differs from that of ``out``; takes values and their rows.

        Returns:
            Places in ``out`` of the rows that are not cached; None if all are.
        """
        content = self._content
        if content is None:
            return np.arange(len(rows))
        table, place = content
        slabs, inside = np.divmod(rows, self._rows)
        places = self._places(place, slabs)
        cached = places >= 0
        table_rows = places * self._rows + inside
        if cached.all() and out.dtype == self._dtype:
            table.take(table_rows, axis=0, out=out, mode="clip")
            return None
        if cached.any():
            out[cached] = check(table[table_rows[cached]], rows[cached])
        return None if cached.all() else np.flatnonzero(~cached)

    def put(self, number: int, slab: Array) -> None:
        """Cache a slab if it fits."""
        if not self.enabled:
            return
        with self._lock:
            content = self._ensure_table()
            if content is None:
                return
            table, place = content
            first = self._next * self._rows
            if place[number] >= 0 or first + self._rows > len(table):
                return
            unused = 0  # bytes that are taken but hold no slab
            try:
                with self._room.lock:
                    if self._room.taken + self._slab_bytes > self._room.limit:
                        return
                    # Interrupts come only at calls: none between these two statements, nor between the three below.
                    self._room.taken += self._slab_bytes
                    unused = self._slab_bytes
                table[first : first + len(slab)] = slab
                with self._room.lock:  # after the copy: whoever sees the place finds the slab there; see `_places`
                    if self._content is content:  # garbage collection may have closed the loader and cleared the cache
                        place[number] = self._next
                        self._next += 1
                        unused = 0
            finally:
                if unused:
                    with self._room.lock:
                        self._room.taken -= unused

    def clear(self) -> None:
        """Drop all slabs."""
        with self._lock, self._room.lock:
            # No call between these two statements.
            self._room.taken -= self._next * self._slab_bytes
            self._content, self._next, self._map_failed = None, 0, False

    def _places(self, place: Indices, numbers: Any) -> Any:
        # 1. A thread writes a slab, and then its place. 2. Another sees the place, but not yet the slab: a processor
        # such as ARM may make writes of one thread visible to others in another order. The GIL prevented that; without
        # it, only a lock that both threads take does. See test_places_are_read_and_written_under_the_lock.
        with self._room.lock:
            return place[numbers]

    def _ensure_table(self) -> tuple[Array, Indices] | None:
        """The table and places, mapped on first use; None if nothing fits."""
        slabs = min(self._slabs, self._room.limit // max(self._slab_bytes, 1))
        # When a table is full and another loader has added room, a larger one starts empty.
        full = self._content is None or self._next * self._rows == len(self._content[0])
        if self._map_failed or not full or slabs <= self._next:
            return self._content
        # Not reserved: other datasets may take the bytes first. `ByteBudget` limits how many slabs are cached.
        try:
            memory = system.private_memory(slabs * self._slab_bytes, system.NO_RESERVE)
        except (OSError, MemoryError, OverflowError) as error:
            self._map_failed = True
            _log.warning(
                "cache of decoded chunks: %d bytes cannot be mapped (%s), so no more of this dataset is cached; "
                "raise the limit on memory (ulimit -v), or set a smaller cache_bytes",
                slabs * self._slab_bytes,
                error,
            )
            return self._content
        self.clear()
        table = np.frombuffer(memory, self._dtype).reshape(-1, *self._shape)
        self._content = table, np.full(self._slabs, -1, np.int64)
        return self._content
