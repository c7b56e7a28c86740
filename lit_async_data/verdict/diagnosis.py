"""`Verdict`: why a loop waits for data, what to change, and what that should gain. Pure: facts in, verdict out.

The model is small. A loop takes `step_s` per batch. Its readers take `read_s` per batch, and with m instead of n of
them ``read_s · (n/m)**0.85``: they share memory and storage. All cores together must do the work of both. The longest
of the three is the time per batch. A cure changes one of them, and its gain is what the time per batch falls by.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from lit_async_data.host.stages import StageTimes
from lit_async_data.verdict.facts import Facts

# A loop that waits for less than this share of the time has its data.
KEEPS_UP = 0.02
# Slowdown from which the readers are said to hold the loop up.
SLOWED = 0.05
# Readers that take less than this share of a step's time per batch could keep up: a batch is late now and then.
IDLE = 0.85
# Readers that have a core for less than this share of their time wait for something.
OFF_CORE = 0.5
# A loop that had to wait for fewer of its batches has its data.
STARVED = 0.02
# A loop whose thread has a core for this share of its steps holds the GIL.
BUSY = 0.6
# Python code of readers that has the GIL for this share of the time holds up a loop that needs it as often.
HELD = 0.25
# Cores of which this share is busy are full; other programs leave at least so many.
FULL, LEAST_CORES = 0.8, 0.5
# How a rate grows with workers.
SHARED = 0.85
# A smaller gain is not promised, and a worker that adds less than a tenth of the gain is not asked for.
LEAST_GAIN, NEARLY = 0.01, 0.9


class Bound(enum.IntEnum):
    """What a loop waits for. The numbers travel between ranks."""

    LOOP = 0
    READING = 1
    DECODING = 2
    TRANSFORM = 3
    PYTHON = 4
    LOCK = 5
    GIL = 6
    CORES = 7
    QUEUE = 8
    COPY = 9
    CALLER = 10
    FOREIGN = 11
    FIRST = 12
    HANDOVER = 13


WORDS = {
    Bound.LOOP: "data keep up",
    Bound.READING: "reading-bound (storage)",
    Bound.DECODING: "decoding-bound",
    Bound.TRANSFORM: "transform-bound",
    Bound.PYTHON: "bound by the Python code that reads samples",
    Bound.LOCK: "bound by the lock of h5py",
    Bound.GIL: "GIL-bound, readers and loop take it from each other",
    Bound.CORES: "no core is free for reading",
    Bound.QUEUE: "slot-bound, a batch is late now and then",
    Bound.COPY: "copy-bound",
    Bound.CALLER: "the loop itself reads",
    Bound.FOREIGN: "bound by your loader",
    Bound.HANDOVER: "data keep up; each batch was ready, and handing it over takes this long",
    Bound.FIRST: "nearly all of it for the first batch",
}


class Option(enum.IntEnum):
    """What to change. The numbers travel between ranks."""

    NOTHING = 0
    WORKERS = 1
    PROCESS = 2
    PROCESS_WORKERS = 3
    QUEUE_DEPTH = 4
    SHUFFLE = 5
    PACK = 6
    NUM_WORKERS = 7
    BYTES = 8
    WHY = 9


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why a loop waits, and what helps.

    Attributes:
        share: Share of the time that it waited.
        bound: What it waits for.
        option: What to change.
        value: The number for it.
        gain: Share of the time that this should save; 0 if that is not known.

    Example:
        >>> print(Verdict(0.062, Bound.DECODING, Option.WORKERS, 4, 0.052))
        decoding-bound; loader.workers=4 should save about 5 %
    """

    share: float
    bound: Bound
    option: Option = Option.NOTHING
    value: int = 0
    gain: float = 0.0

    def cure(self, prefix: str = "loader.") -> str:
        """What to change, as it is typed; empty if nothing helps.

        Args:
            prefix: Of the loader's options.
        """
        return {
            Option.NOTHING: "",
            Option.WORKERS: f"{prefix}workers={self.value}",
            Option.PROCESS: f"{prefix}worker_kind=process",
            Option.PROCESS_WORKERS: f"{prefix}worker_kind=process {prefix}workers={self.value}",
            Option.QUEUE_DEPTH: f"{prefix}queue_depth={self.value}",
            Option.SHUFFLE: f"{prefix}shuffle=chunk",
            Option.PACK: f"{'' if self.bound is Bound.CORES else 'more workers do not help here; '}files without "
            "compression, or with a faster codec, are read with less work",
            Option.WHY: f"{prefix}worker_kind=process says what keeps it from a process of its own",
            Option.NUM_WORKERS: f"num_workers={self.value} of your DataLoader",
            Option.BYTES: "hand over fewer bytes, such as uint8, and convert them in device_transform",
        }[self.option]

    def text(self, prefix: str = "loader.") -> str:
        """In words, for people."""
        cure = self.cure(prefix)
        if not cure:
            return WORDS[self.bound]
        if self.gain < LEAST_GAIN:
            return f"{WORDS[self.bound]}; {cure}"
        return f"{WORDS[self.bound]}; {cure} should save about {100 * self.gain:.0f} %"

    def __str__(self) -> str:
        return self.text()

    def numbers(self) -> list[float]:
        """As numbers, for other ranks."""
        return [self.share, float(self.bound), float(self.option), float(self.value), self.gain]

    @staticmethod
    def of_numbers(numbers: list[float]) -> Verdict:
        """From `numbers`."""
        share, bound, option, value, gain = numbers
        return Verdict(share, Bound(round(bound)), Option(round(option)), round(value), gain)


def verdict(facts: Facts) -> Verdict:
    """Why a loop waited.

    Example:
        >>> from lit_async_data.host.stages import Stage, StageTimes
        >>> stages = StageTimes(read=Stage(1.0), decode=Stage(9.0), cpu_s=10.0)
        >>> print(verdict(Facts(100, total_s=10.5, waited_s=4.5, cores=4, starved=100, stages=stages)))
        decoding-bound; loader.workers=2 should save about 43 %
    """
    return _Case(facts).verdict()


class _Case:
    """The model, with the numbers of one case."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.readers = facts, facts.readers
        self.batch_s, self.step_s = facts.batch_s, facts.step_s
        per = max(facts.batches, 1)
        self.worked_s, self.cpu_s = facts.stages.worked_s / per, facts.stages.cpu_s / per
        self.read_s = self.worked_s / max(self.readers.count, 1)
        # Cores that loop and readers have for themselves.
        self.cores = max(facts.cores - facts.elsewhere, LEAST_CORES)
        self.cores_s = (self.cpu_s + facts.others_cpu_s) / self.cores

    def verdict(self) -> Verdict:
        facts, slowdown = self.facts, self.facts.slowdown
        steady = facts.waited_s / max(facts.total_s - facts.gap_s, 1e-9)
        slowed = 0.0 if slowdown is None or slowdown.share < 2 * slowdown.error else slowdown.share
        if slowed >= max(SLOWED, steady):
            return self._slowed(slowed)
        if slowdown is None and self._share_gil():
            return self._in_a_process(Bound.GIL)
        if steady < KEEPS_UP:
            return self._given(Bound.FIRST if facts.share >= max(2 * steady, KEEPS_UP) else Bound.LOOP)
        return self._waiting()

    def _slowed(self, share: float) -> Verdict:
        if self.readers.gil and self.facts.cores > 1:
            return self._given(Bound.GIL, Option.PROCESS, gain=share)
        return self._given(Bound.CORES, *self._less_work())

    def _share_gil(self) -> bool:
        """Whether the loop and Python code of readers both run in one process for a good part of the time."""
        facts, stages = self.facts, self.facts.stages
        python_s = stages.transform.seconds + (stages.read.seconds if self.readers.reading == "python" else 0.0)
        # Of what the readers do, as much has a core as of all of it.
        python_s *= min(stages.cpu_s / max(stages.worked_s, 1e-9), 1.0)
        return self.readers.gil and min(python_s, facts.loop_cpu_s) > HELD * facts.total_s > 0

    def _waiting(self) -> Verdict:
        facts = self.facts
        if self.readers.kind == "caller":
            return self._caller()
        copy_s = facts.stages.copy.seconds / max(facts.batches, 1)
        if copy_s > max(self.step_s, self.read_s):
            return self._given(Bound.COPY, Option.BYTES)
        if facts.starved < STARVED * facts.batches:
            return self._given(Bound.FIRST if facts.gap_s > facts.waited_s else Bound.HANDOVER)
        if self.readers.kind == "foreign":
            return self._foreign()
        if self.read_s < IDLE * self.step_s:
            gain = self._gain(max(self.step_s, self.read_s))
            return self._given(Bound.QUEUE, Option.QUEUE_DEPTH, 2 * self.readers.queue_depth, gain)
        return self._readers()

    # -- who is slow -------------------------------------------------------------------------------------------------

    def _readers(self) -> Verdict:
        facts, readers, stages = self.facts, self.readers, self.facts.stages
        waits = self.worked_s - self.cpu_s > OFF_CORE * self.worked_s
        busy_loop = facts.loop_cpu_s > BUSY * self.step_s * facts.batches
        if waits and readers.gil and readers.reading != "copied" and busy_loop:
            return self._in_a_process(Bound.GIL)
        if waits:
            if self.cores_s > FULL * self.batch_s:
                return self._given(Bound.CORES, *self._less_work())
            return self._more(Bound.READING, waits=True)
        return self._working(stages)

    def _working(self, stages: StageTimes) -> Verdict:
        readers = self.readers
        if stages.transform.seconds >= max(stages.read.seconds, stages.decode.seconds):
            return self._in_a_process(Bound.TRANSFORM) if not readers.apart else self._more(Bound.TRANSFORM)
        if stages.decode.seconds >= stages.read.seconds:
            return self._more(Bound.DECODING if readers.reading != "locked" else Bound.LOCK)
        if readers.reading == "python":
            return self._in_a_process(Bound.PYTHON) if not readers.apart else self._more(Bound.PYTHON)
        return self._more(Bound.LOCK if readers.reading == "locked" else Bound.READING)

    def _more(self, bound: Bound, *, waits: bool = False) -> Verdict:
        """More workers, if there are cores for them."""
        if bound is not Bound.LOCK and not self.readers.tried:
            found = self._workers(self.readers.count, waits=waits)
            if found is not None:
                return self._given(bound, Option.WORKERS, *found)
        return self._given(bound, *self._less_work())

    def _in_a_process(self, bound: Bound) -> Verdict:
        """A process of their own, for readers that hold the GIL; several, if there are cores for them."""
        if self.facts.cores < 2:
            return self._given(bound, *self._less_work())
        # There they work without waiting for the GIL; and the loop's steps no longer wait while they have it.
        loop_s = self.facts.loop_cpu_s / max(self.facts.batches, 1)
        step_s = max(loop_s, self.step_s - self.cpu_s) if bound is Bound.GIL else self.step_s
        found = self._workers(1, read_s=self.cpu_s, step_s=step_s, least=1)
        if found is None and bound is Bound.GIL:
            return self._given(bound, Option.PROCESS)
        if found is None:
            return self._given(bound, *self._less_work())
        workers, gain = found
        if self.readers.kind == "process":
            return self._given(bound, Option.WORKERS, max(workers, 2), gain)
        if workers <= self.readers.count:
            return self._given(bound, Option.PROCESS, gain=gain)
        return self._given(bound, Option.PROCESS_WORKERS, workers, gain)

    def _workers(
        self,
        now: int,
        *,
        read_s: float | None = None,
        step_s: float | None = None,
        waits: bool = False,
        least: int | None = None,
    ) -> tuple[int, float] | None:
        """How many workers the loop needs, and the gain; None if more do not help.

        Args:
            now: How many there are.
            read_s: Seconds that these take per batch; None for what was measured.
            step_s: Seconds of the loop per batch; None for what was measured.
            waits: Whether they wait for storage rather than work, so that they need no core each.
            least: The fewest that may be chosen; None for one more.
        """
        now = max(now, 1)
        read_s = self.read_s if read_s is None else read_s
        step_s = self.step_s if step_s is None else step_s
        gains = {}
        for workers in range(now + 1 if least is None else least, self.facts.cores + 1):
            shared_s = read_s * (now / workers) ** SHARED
            cores_s = 0.0 if waits else self.cores_s
            gains[workers] = self._gain(max(step_s, shared_s, cores_s))
        best = max(gains.values(), default=0.0)
        if best < LEAST_GAIN:
            return None
        return next((workers, gain) for workers, gain in gains.items() if gain >= NEARLY * best)

    def _caller(self) -> Verdict:
        if self.readers.stuck:
            return self._given(Bound.CALLER, Option.WHY)
        # What is waited for includes reading; beside the loop it takes as long, if there is a core for it.
        beside_s = max(self.step_s, self.worked_s, self.cores_s)
        return self._given(Bound.CALLER, Option.WORKERS, 1, self._gain(beside_s))

    def _foreign(self) -> Verdict:
        count = self.readers.count
        if count < 0:
            return self._given(Bound.FOREIGN)
        if count == 0:
            gain = self._gain(max(self.step_s, self.worked_s))
            return self._given(Bound.FOREIGN, Option.NUM_WORKERS, 1, gain)
        if self.worked_s < IDLE * self.step_s:
            return self._given(Bound.FOREIGN)
        # Its `next` takes as long as all its workers take for one batch each, over their number.
        gains = {
            workers: self._gain(max(self.step_s, self.worked_s * (count / workers) ** SHARED))
            for workers in range(count + 1, self.facts.cores + 1)
        }
        best = max(gains.values(), default=0.0)
        if best < LEAST_GAIN:
            return self._given(Bound.FOREIGN, Option.PACK)
        found = next((workers, gain) for workers, gain in gains.items() if gain >= NEARLY * best)
        return self._given(Bound.FOREIGN, Option.NUM_WORKERS, *found)

    # -- what helps --------------------------------------------------------------------------------------------------

    def _less_work(self) -> tuple[Option, int, float]:
        """What helps where no more workers do."""
        readers, decode = self.readers, self.facts.stages.decode
        if readers.amplification > 1.5 and readers.shuffle == "global":
            saved_s = decode.seconds / max(self.facts.batches, 1) * (1 - 1 / readers.amplification)
            share = saved_s / max(self.worked_s, 1e-9)
            return Option.SHUFFLE, 0, self._gain(max(self.step_s, self.read_s * (1 - share)))
        if decode.seconds:
            return Option.PACK, 0, 0.0
        return Option.NOTHING, 0, 0.0

    def _gain(self, batch_s: float) -> float:
        """The share of the time that is saved if a batch takes so long."""
        total_s = self.facts.total_s / max(self.facts.batches, 1)
        return min(max(self.batch_s - batch_s, 0.0) / max(total_s, 1e-9), 1.0)

    def _given(self, bound: Bound, option: Option = Option.NOTHING, value: int = 0, gain: float = 0.0) -> Verdict:
        gain = 0.0 if math.isnan(gain) else gain
        return Verdict(self.facts.share, bound, option, value, gain)
