"""`ReadAhead`: has the kernel fetch pieces of a file from disk before they are read."""

from __future__ import annotations

import os
import threading

import numpy as np

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.system import is_cold

# Pieces that a worker probes for being in memory before it tells the kernel to fetch. A probe takes 0.8 µs; telling the
# kernel to fetch what it already has halves the speed of reading.
PROBES = 8
# The kernel may ignore what one call asks for beyond this size.
MAX_FETCH_BYTES = 128 * 1024


class ReadAhead:
    """Fetches pieces of one file, if a probe finds some of them cold. Thread-safe."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.cold = True  # whether the last probe found a piece that is not in memory
        self._lock = threading.Lock()

    def fetch(self, offsets: Indices, sizes: Indices | int) -> bool:
        """Tell the kernel to fetch pieces if some of them are not in memory; returns whether, before they are there.

        Offsets are negative for pieces that were never written.
        """
        there = offsets >= 0
        begins, ends = offsets[there], (offsets + sizes)[there]
        descriptor = self._file.descriptor()
        self.cold = any(is_cold(descriptor, at) for at in begins[:: max(len(begins) // PROBES, 1)].tolist())
        if not self.cold:
            return False
        pieces = _merged(begins, ends)
        # One thread at a time for each dataset: each call releases the GIL, and threads that do this at once pass it
        # on at each of them. With two, a cold file came at 0.4 of the rate.
        with self._lock:
            for first, end in pieces:
                for begin in range(first, end, MAX_FETCH_BYTES):
                    os.posix_fadvise(descriptor, begin, min(MAX_FETCH_BYTES, end - begin), os.POSIX_FADV_WILLNEED)
        return True


def _merged(begins: Indices, ends: Indices) -> list[tuple[int, int]]:
    """Pieces in file order, with adjacent and overlapping ones merged."""
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    return list(zip(begins[np.append(0, breaks)].tolist(), ends[np.append(breaks - 1, -1)].tolist(), strict=True))
