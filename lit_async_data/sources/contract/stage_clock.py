"""`CLOCK`: what each thread spends on decoding and transforming, counted where that happens.

Sources add to it once per chunk, file or batch, and never per sample. Whoever runs the thread takes the sums after each
slot. Nothing is shared between threads, so nothing is locked.
"""

from __future__ import annotations

import operator
import threading
import time
from typing import NamedTuple


class Work(NamedTuple):
    """What one thread, or several together, did."""

    seconds: float = 0.0  # all of it: reading, decoding and transforming
    decode_s: float = 0.0  # of these, decoding
    transform_s: float = 0.0  # of these, the user's transforms
    # Of these, those in which a core worked, and those spent waiting for another worker that had the same chunk or
    # transform. The rest waited for storage, for the GIL or for a core.
    cpu_s: float = 0.0
    stored: int = 0  # bytes as stored, of what was decoded
    decoded: int = 0  # bytes of the results

    def plus(self, other: Work) -> Work:
        return Work._make(map(operator.add, self, other))


class StageClock(threading.local):
    """The sums of the calling thread since they were taken last; each thread has its own.

    ``_wall`` and ``_cpu`` say when that was, without waits for slots.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Work begins: the sums are 0 again."""
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        self._decode_s = self._transform_s = self._others_s = 0.0
        self._stored = self._decoded = 0

    def waited(self, began_s: float) -> float:
        """The thread had nothing to do from a moment until now: that is no work."""
        now = time.perf_counter()
        # The sums of a thread begin with its first call, which may be this one.
        self._wall = min(self._wall + now - began_s, now)
        return now - began_s

    def decoded(self, seconds: float, stored: int, nbytes: int) -> None:
        self._decode_s += seconds
        self._stored += stored
        self._decoded += nbytes

    def transformed(self, seconds: float) -> None:
        self._transform_s += seconds

    def waited_for_others(self, seconds: float) -> None:
        """Another worker had what this one needed, and worked meanwhile."""
        self._others_s += seconds

    def take(self) -> Work:
        """What the thread has done since `start`, or since this was called last, without its waits."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu + self._others_s
        work = Work(wall, self._decode_s, self._transform_s, min(cpu, wall), self._stored, self._decoded)
        self.start()
        return work


CLOCK = StageClock()
