"""`StageTimes`: where the time of batches went, stage by stage; and `StageMeter`, which counts it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from lit_async_data.sources.contract.stage_clock import Work


class Stage(NamedTuple):
    """One stage on the way of batches.

    Attributes:
        seconds: Time spent in it, summed over the workers.
        bytes: Bytes that came out of it.

    Example:
        >>> Stage(0.5, 6_000_000).mb_per_s
        12.0
    """

    seconds: float = 0.0
    bytes: int = 0

    @property
    def mb_per_s(self) -> float:
        """10⁶ bytes per second of this stage; 0 if it took no time."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


NOT_RUN = Stage()


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Where the time of batches went since the loader was built. Seconds are sums over the workers.

    Attributes:
        read: Bringing stored bytes into memory, and copying values to their places. Bytes as they are stored, where
            chunks or files are decoded; else those of the samples.
        decode: Decoding chunks and images; bytes of the results, also of samples that are not used. If the file is
            mapped, the wait for its pages is here.
        transform: ``sample_transform`` and ``batch_transform``; bytes of the samples.
        copy: Copies to a device with streams, by its own clock.
        cpu_s: Seconds of reading, decoding and transforming in which a core worked. The others waited for storage, for
            the GIL or for a core.
        slot_s: Seconds that workers waited for a slot while the loop waited for data, too.
        loop_s: Seconds that workers waited because all slots were full: the loop had data enough.

    Example:
        >>> times = StageTimes(read=Stage(1.0, 10), decode=Stage(3.0, 30), cpu_s=3.0)
        >>> times.worked_s, times.since(StageTimes(read=Stage(0.5, 4))).read
        (4.0, Stage(seconds=0.5, bytes=6))
    """

    read: Stage = NOT_RUN
    decode: Stage = NOT_RUN
    transform: Stage = NOT_RUN
    copy: Stage = NOT_RUN
    cpu_s: float = 0.0
    slot_s: float = 0.0
    loop_s: float = 0.0

    @property
    def worked_s(self) -> float:
        """Seconds that workers spent reading, decoding and transforming."""
        return self.read.seconds + self.decode.seconds + self.transform.seconds

    def since(self, before: StageTimes) -> StageTimes:
        """What came after an earlier snapshot."""
        return self._with(before, -1)

    def after(self, before: StageTimes) -> StageTimes:
        """This with the sums of an earlier engine, or of another loader, added."""
        return self._with(before, 1)

    def _with(self, other: StageTimes, sign: int) -> StageTimes:
        def combined(name: str) -> Stage:
            mine, others = getattr(self, name), getattr(other, name)
            return Stage(mine.seconds + sign * others.seconds, mine.bytes + sign * others.bytes)

        return StageTimes(
            combined("read"),
            combined("decode"),
            combined("transform"),
            combined("copy"),
            self.cpu_s + sign * other.cpu_s,
            self.slot_s + sign * other.slot_s,
            self.loop_s + sign * other.loop_s,
        )


NO_TIMES = StageTimes()


class StageMeter:
    """Sums of one pipeline; its owner guards it.

    Attributes:
        seconds: As in `Work`; the other sums likewise.
        slot_s: See `StageTimes`.
        loop_s: See `StageTimes`.
    """

    def __init__(self) -> None:
        self.set(Work())
        self.slot_s = self.loop_s = 0.0

    def set(self, work: Work) -> None:
        """Take over sums from another process."""
        self.seconds, self.decode_s, self.transform_s, self.cpu_s, self.stored, self.decoded = work

    def worked(self, work: Work) -> None:
        """A worker read, decoded or transformed."""
        seconds, decode_s, transform_s, cpu_s, stored, decoded = work
        self.seconds += seconds
        self.decode_s += decode_s
        self.transform_s += transform_s
        self.cpu_s += cpu_s
        self.stored += stored
        self.decoded += decoded

    @property
    def work(self) -> Work:
        """All that workers did."""
        return Work(self.seconds, self.decode_s, self.transform_s, self.cpu_s, self.stored, self.decoded)

    @property
    def idle_s(self) -> float:
        """Seconds that workers waited for a slot, for whatever reason."""
        return self.slot_s + self.loop_s

    def waited(self, seconds: float, *, starved: bool) -> None:
        """A worker waited for a slot.

        Args:
            seconds: How long.
            starved: Whether the loop waited for data meanwhile.
        """
        if starved:
            self.slot_s += seconds
        else:
            self.loop_s += seconds

    def times(self, read_bytes: int) -> StageTimes:
        """What was counted so far; ``read_bytes`` are those of the samples."""
        return StageTimes(
            Stage(max(self.seconds - self.decode_s - self.transform_s, 0.0), self.stored or read_bytes),
            Stage(self.decode_s, self.decoded),
            Stage(self.transform_s, read_bytes if self.transform_s else 0),
            cpu_s=self.cpu_s,
            slot_s=self.slot_s,
            loop_s=self.loop_s,
        )
