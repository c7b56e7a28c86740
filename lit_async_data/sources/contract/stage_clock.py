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
    """What one thread, or several together, did: sums of seconds, bytes and batches."""

    seconds: float = 0.0  # of reading, decoding and transforming, summed over the workers
    decode_s: float = 0.0  # of these, for chunks and images; if a file is mapped, the wait for its pages is here
    transform_s: float = 0.0  # of these, for ``sample_transform`` and ``batch_transform``
    # Of these, in which a core worked, or another worker on the same chunk or transform; the others were waits.
    cpu_s: float = 0.0
    stored: int = 0  # bytes of decoded chunks and files
    decoded: int = 0  # bytes of the results, also of samples that are not used
    batches: int = 0
    bytes: int = 0  # of the samples
    slot_s: float = 0.0  # that workers waited for a slot while the loop waited for data, too
    loop_s: float = 0.0  # that workers waited because all slots were full: the loop had data enough
    starved: int = 0  # how often the loop had to wait for a batch, or for several that are read together
    copy_s: float = 0.0  # of copies to a device with streams, by its own clock
    copied: int = 0  # bytes of these copies

    def plus(self, other: Work) -> Work:
        return Work._make(map(operator.add, self, other))

    def minus(self, other: Work) -> Work:
        return Work._make(map(operator.sub, self, other))

    def waited(self, seconds: float, *, starved: bool) -> Work:
        if starved:
            return self._replace(slot_s=self.slot_s + seconds)
        return self._replace(loop_s=self.loop_s + seconds)

    @property
    def read(self) -> Work:
        """Seconds and bytes of reading: bringing stored bytes into memory, and copying values to their places."""
        seconds = max(self.seconds - self.decode_s - self.transform_s, 0.0)
        return Work(seconds, bytes=self.stored or self.bytes)

    @property
    def decode(self) -> Work:
        return Work(self.decode_s, bytes=self.decoded)

    @property
    def transform(self) -> Work:
        return Work(self.transform_s, bytes=self.bytes if self.transform_s else 0)

    @property
    def copy(self) -> Work:
        return Work(self.copy_s, bytes=self.copied)

    @property
    def mb_per_s(self) -> float:
        """10⁶ bytes; 0 if it took no time."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


NO_WORK = Work()


class StageClock(threading.local):
    """The sums of the calling thread since they were taken last; ``_wall`` and ``_cpu`` say when that was."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
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
        """Since `start`, or since this was called last, without waits for slots."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu + self._others_s
        work = Work(wall, self._decode_s, self._transform_s, min(cpu, wall), self._stored, self._decoded)
        self.start()
        return work


CLOCK = StageClock()
