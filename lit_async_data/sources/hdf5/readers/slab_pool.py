"""`SlabPool`: memory for decoded chunks that is used again and again.

Decoders allocate what they return. Kept as it is, it makes malloc hold more than is in use: it lies between what was
freed in each thread's own region. In turns of three seconds (768 KiB chunks, `shuffle_chunks=64`, two workers, a budget
of 113 MiB) the process grew by 118 MiB at most with the copies made here, and by up to 166 MiB without them. A fresh
map for each slab takes as little, but its pages must be cleared anew each time.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Bytes

Array = npt.NDArray[Any]
# Below it malloc has room enough between other things.
MIN_POOLED_BYTES = 64 * 1024


class _Lease:
    """Keeps memory with whoever sees a slab in it; an exporter and no array, for the reason that `Lease` gives."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = dict(memory.__array_interface__)


class _LeaseRef(weakref.ref[_Lease]):
    """A reference to a lease that knows its memory: it puts itself among what is vacant when the lease dies."""

    __slots__ = ("memory",)
    memory: mmap.mmap


class SlabPool:
    """Anonymous maps, of which each is for one slab at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        # Held for the dictionaries alone, never while memory is taken or copied. Reentrant, since garbage collection
        # can close a source inside it.
        self._lock = threading.RLock()
        # By their bytes. SimpleQueue, since a slab can be dropped inside any allocation: its put never waits. It is
        # itself the callback of a lease: it runs no Python code, in which CPython would drop an interrupt (Ctrl-C).
        self._free: dict[int, queue.SimpleQueue[_LeaseRef]] = {}
        self._leases: dict[int, _LeaseRef] = {}  # by their ids: a reference that nobody holds calls nothing

    def copy(self, slab: Array) -> Array:
        """A copy of a slab whose memory is for another slab when nobody sees it any more.

        Args:
            slab: Of any shape and type. A small one is returned as it is.
        """
        if slab.nbytes < MIN_POOLED_BYTES:
            return slab
        free, memory = self._acquire(slab.nbytes)
        if memory is None:
            memory = mmap.mmap(-1, slab.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lease = _Lease(np.frombuffer(memory, np.uint8))
        ref = _LeaseRef(lease, free.put)
        ref.memory = memory
        with self._lock:
            self._leases[id(ref)] = ref
        copy: Array = np.asarray(lease).view(slab.dtype).reshape(slab.shape)
        copy[...] = slab
        return copy

    def _acquire(self, nbytes: int) -> tuple[queue.SimpleQueue[_LeaseRef], mmap.mmap | None]:
        """Where memory of this size goes when nobody sees it any more, and some that is there already."""
        with self._lock:
            free = self._free.setdefault(nbytes, queue.SimpleQueue())
            try:
                ref = free.get_nowait()
            except queue.Empty:
                # Of other sizes nothing is held that nobody uses. Their queues stay: slabs that are still seen refer to
                # them, and would fill one that is here no more.
                self._drain()
                return free, None
            self._leases.pop(id(ref), None)
            return free, ref.memory

    def clear(self) -> None:
        """Give back what nobody uses."""
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        for free in list(self._free.values()):
            with contextlib.suppress(queue.Empty):
                while True:
                    free.get_nowait()
        for number, ref in self._leases.copy().items():
            if ref() is None:
                self._leases.pop(number, None)
