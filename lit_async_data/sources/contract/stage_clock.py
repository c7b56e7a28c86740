"""`CLOCK`: what each thread spends on decoding and transforming, counted where that happens.

Sources add to it once per chunk, file or batch, and never per sample. Whoever runs the thread takes the sums after each
slot. Nothing is shared between threads, so nothing is locked.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple


class Work(NamedTuple):
    """What one thread, or several together, did.

    Attributes:
        seconds: All of it: reading, decoding and transforming.
        decode_s: Of these, decoding.
        transform_s: Of these, the user's transforms.
        cpu_s: Of these, those in which a core worked, and those spent waiting for another worker that had the same
            chunk or transform. The rest waited for storage, for the GIL or for a core.
        stored: Bytes as stored, of what was decoded.
        decoded: Bytes of the results.
    """

    seconds: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    cpu_s: float = 0.0
    stored: int = 0
    decoded: int = 0

    def plus(self, other: Work) -> Work:
        return Work(
            self.seconds + other.seconds,
            self.decode_s + other.decode_s,
            self.transform_s + other.transform_s,
            self.cpu_s + other.cpu_s,
            self.stored + other.stored,
            self.decoded + other.decoded,
        )


class _Sums:
    """Of one thread, since they were taken last. ``wall`` and ``cpu`` say when that was, without waits for slots."""

    __slots__ = ("cpu", "decode_s", "decoded", "others_s", "stored", "transform_s", "wall")

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.thread_time()
        self.decode_s = self.transform_s = self.others_s = 0.0
        self.stored = self.decoded = 0


class StageClock:
    """The sums of the calling thread. Each thread has its own."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def _sums(self) -> _Sums:
        try:
            sums: _Sums = self._thread.sums
        except AttributeError:
            sums = self._thread.sums = _Sums()
        return sums

    def start(self) -> None:
        """Work begins; what was counted before belongs to nobody."""
        self._thread.sums = _Sums()

    def waited(self, began_s: float) -> float:
        """The thread had nothing to do from a moment until now: that is no work."""
        now, sums = time.perf_counter(), self._sums()
        # The sums of a thread begin with its first call, which may be this one.
        sums.wall = min(sums.wall + now - began_s, now)
        return now - began_s

    def decoded(self, seconds: float, stored: int, nbytes: int) -> None:
        """Something was decoded."""
        sums = self._sums()
        sums.decode_s += seconds
        sums.stored += stored
        sums.decoded += nbytes

    def transformed(self, seconds: float) -> None:
        """A batch was transformed."""
        self._sums().transform_s += seconds

    def waited_for_others(self, seconds: float) -> None:
        """Another worker had what this one needed, and worked meanwhile."""
        self._sums().others_s += seconds

    def take(self) -> Work:
        """What the thread has done since `start`, or since this was called last, without its waits."""
        sums = self._sums()
        wall, cpu = time.perf_counter(), time.thread_time()
        seconds, worked = wall - sums.wall, cpu - sums.cpu + sums.others_s
        work = Work(seconds, sums.decode_s, sums.transform_s, min(worked, seconds), sums.stored, sums.decoded)
        sums.wall, sums.cpu = wall, cpu
        sums.decode_s = sums.transform_s = sums.others_s = 0.0
        sums.stored = sums.decoded = 0
        return work


CLOCK = StageClock()
