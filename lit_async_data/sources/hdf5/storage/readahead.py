"""`ReadAhead`: has the kernel fetch pieces of a file from the disk before they are read, if they are not in memory."""

from __future__ import annotations

import os

import numpy as np

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.hdf5.storage.residency import is_cold

# Pieces that are asked whether they are in memory before the kernel is told to fetch many: each takes 0.8 µs, and
# telling it what it has already halves the speed.
PROBES = 8
# The kernel may fetch no more than this in one call, whatever it is asked for.
FETCHED_BYTES = 128 * 1024


class ReadAhead:
    """What is known of how much of a file is in memory. Safe from several threads.

    Attributes:
        cold: Whether, of the pieces looked at last, some had to come from the disk.
    """

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self.cold = True

    def fetch(self, offsets: Indices, sizes: Indices | int) -> None:
        """Tell the kernel to fetch pieces, if it seems that some are not in memory. It does so while this returns.

        Args:
            offsets: int64, shape (n,): where each piece begins; below 0 for one that is not there.
            sizes: Bytes of each, or of all.
        """
        there = offsets >= 0
        begins, ends = offsets[there], (offsets + sizes)[there]
        descriptor = self._file.descriptor()
        self.cold = any(is_cold(descriptor, at) for at in begins[:: max(len(begins) // PROBES, 1)].tolist())
        if not self.cold:
            return
        for first, end in _merged(begins, ends):
            for begin in range(first, end, FETCHED_BYTES):
                os.posix_fadvise(descriptor, begin, min(FETCHED_BYTES, end - begin), os.POSIX_FADV_WILLNEED)


def _merged(begins: Indices, ends: Indices) -> list[tuple[int, int]]:
    """Pieces in the order of the file, those that touch made one."""
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    return list(zip(begins[np.append(0, breaks)].tolist(), ends[np.append(breaks - 1, -1)].tolist(), strict=True))
