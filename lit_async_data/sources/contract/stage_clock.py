"""`CLOCK`: the time that each thread spends on decoding and transforming.

Sources add to it once per chunk, file or batch, never per sample; the pipeline takes the sums after each slot. Threads
share nothing, so there is no lock.
"""

from __future__ import annotations

import collections
import operator
import threading
import time
from typing import Any, NamedTuple


class Work(NamedTuple):
    """The work of one thread, or several together: sums of seconds, bytes and batches."""

    seconds: float = 0.0  # of reading, decoding and transforming, summed over the workers
    decode_s: float = 0.0  # of these, for chunks and images; includes waits for pages of a mapped file
    transform_s: float = 0.0  # of these, for ``sample_transform`` and ``batch_transform``
    cpu_s: float = 0.0  # of these, while a core worked, or another worker on the same chunk or transform; not waits
    stored: int = 0  # bytes of decoded chunks and files
    decoded: int = 0  # bytes of the results, also of samples that are not used
    requests: int = 0  # over a network, ahead or not
    fetched: int = 0  # bytes of these
    batches: int = 0
    bytes: int = 0  # of the samples
    slot_s: float = 0.0  # that workers waited for a slot while the loop waited for data
    loop_s: float = 0.0  # that workers waited because all slots were full
    starved: int = 0  # waits of the loop for a batch, or for several that are read together
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
        """Seconds and bytes of reading stored bytes into memory, and of copying values to their places."""
        return Work(max(self.seconds - self.decode_s - self.transform_s, 0.0), bytes=self.stored or self.bytes)

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
        """In 10⁶ bytes per second; 0 if the work took no time."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


NO_WORK = Work()


class StageClock(threading.local):
    """The sums of the calling thread since `take`, whose times ``_wall`` and ``_cpu`` hold."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()
        self._sums = collections.defaultdict[str, Any](int)

    def waited(self, began_s: float) -> float:
        """Leave out the time since ``began_s``, in which the thread had nothing to do."""
        now = time.perf_counter()
        # The sums of a thread begin at its first call, which may be this one.
        self._wall = min(self._wall + now - began_s, now)
        return now - began_s

    def add(self, **sums: float) -> None:
        """Add to numbers of `Work`; to ``cpu_s``, the time in which this worker waited for the work of another one."""
        for name, number in sums.items():
            self._sums[name] += number

    def take(self) -> Work:
        """The work since `start` or the last call, without waits for slots."""
        wall, cpu = time.perf_counter() - self._wall, time.thread_time() - self._cpu + self._sums["cpu_s"]
        work = NO_WORK._replace(**self._sums | {"seconds": wall, "cpu_s": min(cpu, wall)})
        self.start()
        return work


CLOCK = StageClock()
