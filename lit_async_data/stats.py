"""Frozen snapshots of what a loader did; under each field stands what it means, with its unit."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ReadStats:
    """What the readers did since the loader was built.

    Attributes:
        batches: Batches read.
        bytes: Bytes of samples written to slots.
        seconds: Seconds that workers spent reading, summed over the workers.
        ready: Batches that wait on the host at this moment.
        slots: Slots of memory at this moment, each for one batch, or for several that are small.
        slot_bytes: Bytes of one slot.

    Example:
        >>> ReadStats(batches=2, bytes=6_000_000, seconds=0.5).mb_per_s
        12.0
    """

    batches: int = 0
    bytes: int = 0
    seconds: float = 0.0
    ready: int = 0
    slots: int = 0
    slot_bytes: int = 0

    @property
    def mb_per_s(self) -> float:
        """Megabytes (10⁶ bytes) read per second of reading; 0 before the first."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0

    def since(self, before: ReadStats) -> ReadStats:
        """What came after an earlier snapshot."""
        return dataclasses.replace(
            self,
            batches=self.batches - before.batches,
            bytes=self.bytes - before.bytes,
            seconds=self.seconds - before.seconds,
        )

    def plus(self, batches: int, read_bytes: int, seconds: float) -> ReadStats:
        """The sums with some more batches."""
        return ReadStats(self.batches + batches, self.bytes + read_bytes, self.seconds + seconds)


@dataclasses.dataclass(frozen=True)
class LoaderStats:
    """What the consumer saw since the loader was built.

    Attributes:
        batches: Batches handed out.
        wait_s: Seconds spent inside ``next``, over all batches but the first of each epoch.
        last_wait_s: Seconds spent inside the last ``next``.
        epoch_gap_s: Seconds spent inside ``next`` for the first batch of the last epoch begun.
        queue_fill: Batches that were ready, on host and device together, when the last one was asked for.
        copied: Batches handed out as ordinary copies, because everything that was handed out before is still in use
            and the memory budget is spent.
        read: What the readers did.
    """

    batches: int = 0
    wait_s: float = 0.0
    last_wait_s: float = 0.0
    epoch_gap_s: float = 0.0
    queue_fill: int = 0
    copied: int = 0
    read: ReadStats = ReadStats()

    def of(self, read: ReadStats, copied: int) -> LoaderStats:
        """This, with what the readers did."""
        return dataclasses.replace(self, read=read, copied=copied)

    def metrics(self) -> dict[str, float]:
        """The last step as metrics: milliseconds, batches and 10⁶ bytes per second."""
        return {
            "data/wait_ms": self.last_wait_s * 1e3,
            "data/queue_fill": float(self.queue_fill),
            "data/epoch_gap_ms": self.epoch_gap_s * 1e3,
            "data/read_mb_s": self.read.mb_per_s,
        }


class WaitMeter:
    """Counts what one consumer waits; a snapshot of it is made only when somebody asks."""

    def __init__(self) -> None:
        self._batches = self._queue_fill = 0
        self._wait_s = self._last_wait_s = self._epoch_gap_s = 0.0

    def add(self, waited_s: float, *, first: bool, queue_fill: int) -> None:
        """One more batch was handed out.

        Args:
            waited_s: Seconds inside ``next``.
            first: Whether it is the first of an epoch.
            queue_fill: Batches that were ready when it was asked for.
        """
        self._batches += 1
        self._last_wait_s, self._queue_fill = waited_s, queue_fill
        if first:
            self._epoch_gap_s = waited_s
        else:
            self._wait_s += waited_s

    def stats(self) -> LoaderStats:
        """What was counted so far."""
        return LoaderStats(self._batches, self._wait_s, self._last_wait_s, self._epoch_gap_s, self._queue_fill)
