"""`verdict`: why a loop waits for data, what to change, and what that should gain. Pure: facts in, verdict out.

The model is small. A loop takes `step_s` per batch. Its readers take `read_s` per batch, and with m instead of n of
them ``read_s · (n/m)**0.85``: they share memory and storage. The longer of the two is the time per batch, if there are
cores enough. All cores together need `cores_s` for the work of both. Threads wait for cores before these are full, so
the time per batch is ``(longer³ + cores_s³)**(1/3)``. A cure changes one of these, and its gain is what the time falls
by.

A thread that has no core may still hold the GIL. So the GIL counts as full by the time in which threads that run Python
had a core or waited for one. Only the cure distinguishes it from busy cores: a reader process gains nothing without a
free core.
"""

from __future__ import annotations

import math

from lit_async_data.host.metrics.stages import StageTimes
from lit_async_data.verdict.facts import HELD, Facts
from lit_async_data.verdict.finding import LEAST_GAIN, PACKING, Bound, Option, Verdict

# A loop that waits for less than this share of the time has its data.
KEEPS_UP = 0.02
# Readers that take less than this share of a step's time per batch could keep up: a batch is late now and then.
IDLE = 0.85
# Readers that have a core for less than this share of their time wait for something.
OFF_CORE = 0.5
# A loop that had to wait for fewer of its batches has its data.
STARVED = 0.02
# A loop whose thread has a core for this share of its steps holds the GIL.
BUSY = 0.6
# Cores are full if this share of them is busy. However busy other programs are, this number of cores is ours.
FULL, LEAST_CORES = 0.8, 0.5
# Threads that queue for a core for this share of the time in which they have one are too many for the cores.
QUEUED = 0.25
# How a rate grows with workers.
SHARED = 0.85
# A worker that adds less than a tenth of the gain is not asked for.
NEARLY = 0.9
# Chunks are decoded in vain if this number of samples is decoded for each one used. A shuffle by chunks can replace a
# global shuffle if its batches have this share of the distinct chunks of the global shuffle's batches.
IN_VAIN, MIXED = 1.5, 0.5


def verdict(facts: Facts) -> Verdict:
    """Why a loop waited.

    Example:
        >>> from lit_async_data.host.metrics.stages import Stage, StageTimes
        >>> stages = StageTimes(read=Stage(1.0), decode=Stage(9.0), cpu_s=10.0)
        >>> print(verdict(Facts(100, total_s=10.5, waited_s=4.5, cores=4, starved=100, stages=stages)))
        decoding-bound; loader.workers=2 should save about 42 %
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
        # Seconds per batch in which readers neither worked nor wanted a core: they waited for storage, or for the GIL.
        self.blocked_s = max(self.worked_s - self.cpu_s - facts.readers_queued_s / per, 0.0)
        # Whether loop and readers had to queue for cores: then nothing that takes another core gains.
        queued_s = facts.loop_queued_s + facts.readers_queued_s
        self.crowded = queued_s > QUEUED * (facts.loop_cpu_s + facts.stages.cpu_s)
        # Seconds of the loop's thread with a core, or without one, but perhaps with the GIL.
        self.loop_s = facts.loop_cpu_s + facts.loop_queued_s

    def verdict(self) -> Verdict:
        facts = self.facts
        steady = facts.waited_s / max(facts.total_s - facts.gap_s, 1e-9)
        if self._share_gil():
            return self._in_a_process(Bound.GIL)
        if steady < KEEPS_UP:
            return self._ready(Bound.FIRST if facts.share >= max(2 * steady, KEEPS_UP) else Bound.LOOP)
        return self._waiting()

    def _share_gil(self) -> bool:
        """Whether the loop and Python code of readers both have the GIL for a good part of the time."""
        facts, stages = self.facts, self.facts.stages
        python_s = stages.transform.seconds + (stages.read.seconds if self.readers.reading == "python" else 0.0)
        # Of what the readers do, as much holds the GIL as of all of it.
        held = (stages.cpu_s + facts.readers_queued_s) / max(stages.worked_s, 1e-9)
        return self.readers.gil and min(python_s * min(held, 1.0), self.loop_s) > HELD * facts.total_s > 0

    def _ready(self, bound: Bound) -> Verdict:
        """Batches are ready; other threads may hold up the loop all the same, or what it does with them."""
        if self.facts.own_s:
            return self._given(Bound.OWN, Option.OWN_PROCESS)
        if bound is Bound.HANDOVER and self.readers.in_loop:
            return self._given(Bound.IN_LOOP, Option.BATCH_TRANSFORM)
        return self._given(bound)

    def _waiting(self) -> Verdict:
        facts = self.facts
        if self.readers.kind == "caller":
            return self._caller()
        copy_s = facts.stages.copy.seconds / max(facts.batches, 1)
        if copy_s > max(self.step_s, self.read_s):
            return self._given(Bound.COPY, Option.BYTES)
        if facts.starved < STARVED * facts.batches:
            return self._ready(Bound.FIRST if facts.gap_s > facts.waited_s else Bound.HANDOVER)
        if self.readers.kind == "foreign":
            return self._foreign()
        if self.read_s < IDLE * self.step_s:
            gain = self._gain(max(self.step_s, self.read_s))
            return self._given(Bound.QUEUE, Option.QUEUE_DEPTH, 2 * self.readers.queue_depth, gain)
        return self._readers()

    # -- who is slow -------------------------------------------------------------------------------------------------

    def _readers(self) -> Verdict:
        facts, readers, stages = self.facts, self.readers, self.facts.stages
        if self.worked_s - self.cpu_s <= OFF_CORE * self.worked_s:
            return self._working(stages)
        blocked = self.blocked_s > OFF_CORE * self.worked_s
        python = readers.reading != "copied" or stages.transform.seconds > 0
        if blocked and readers.gil and python and self.loop_s > BUSY * self.step_s * facts.batches:
            return self._in_a_process(Bound.GIL)
        if blocked and readers.gil and facts.own_s:
            return self._given(Bound.OWN, Option.OWN_PROCESS)
        known = readers.gil and facts.readers_queued_s + facts.loop_queued_s > 0
        if not blocked or (not known and self.cores_s > FULL * self.batch_s):
            return self._given(Bound.CORES, *self._less_work())
        return self._more(Bound.READING, waits=True)

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
        readers = self.readers
        # Two threads that open files are slower than one, and under a lock one waits for the other.
        helps = readers.apart or (bound is not Bound.LOCK and readers.reading != "opened")
        if helps and not readers.tried:
            found = self._workers(readers.count, waits=waits)
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
        if bound is Bound.GIL and (found is None or self.crowded):
            return self._given(bound, Option.PROCESS_LATER)
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
        # Those that wait need no core each; one core may be all that a rank has.
        most = max(self.facts.cores, 2 * now) if waits else self.facts.cores
        for workers in range(now + 1 if least is None else least, most + 1):
            shared_s = read_s * (now / workers) ** SHARED
            cores_s = 0.0 if waits else self.cores_s
            gains[workers] = self._gain(_on_cores(max(step_s, shared_s), cores_s))
        best = max(gains.values(), default=0.0)
        if best < LEAST_GAIN:
            return None
        return next((workers, gain) for workers, gain in gains.items() if gain >= NEARLY * best)

    def _caller(self) -> Verdict:
        if self.readers.stuck:
            return self._given(Bound.CALLER, Option.WHY)
        # What is waited for includes reading; beside the loop it takes as long, if there is a core for it.
        beside_s = _on_cores(max(self.step_s, self.worked_s), self.cores_s)
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
            return self._given(Bound.FOREIGN)
        found = next((workers, gain) for workers, gain in gains.items() if gain >= NEARLY * best)
        return self._given(Bound.FOREIGN, Option.NUM_WORKERS, *found)

    # -- what helps --------------------------------------------------------------------------------------------------

    def _less_work(self) -> tuple[Option, int, float]:
        """What helps where no more workers do."""
        readers, stages = self.readers, self.facts.stages
        locked = readers.reading == "locked" and readers.compressed
        if not readers.packing or (2 * stages.decode.seconds < stages.worked_s and not locked):
            return Option.NOTHING, 0, 0.0
        if readers.amplification > IN_VAIN and readers.shuffle == "global":
            share = stages.decode.seconds / max(stages.worked_s, 1e-9) * (1 - 1 / readers.amplification)
            # Chunks that are decoded once are faster than samples that are packed one by one.
            option = Option.SHUFFLE if readers.mixing >= MIXED else Option.PACK
            return option, 0, self._gain(max(self.step_s, self.read_s * (1 - share)))
        return (Option.PACK_DECODED if readers.compressed and not locked else Option.PACK), 0, 0.0

    def _gain(self, batch_s: float) -> float:
        """The share of the time that is saved if a batch takes so long."""
        total_s = self.facts.total_s / max(self.facts.batches, 1)
        return min(max(self.batch_s - batch_s, 0.0) / max(total_s, 1e-9), 1.0)

    def _given(self, bound: Bound, option: Option = Option.NOTHING, value: int = 0, gain: float = 0.0) -> Verdict:
        gain = 0.0 if math.isnan(gain) else gain
        return Verdict(self.facts.share, bound, option, value, gain, self.readers.packing or PACKING)


def _on_cores(longer_s: float, cores_s: float) -> float:
    """Seconds per batch of something that takes so long by itself, on cores that are busy for so long."""
    return math.cbrt(longer_s**3 + cores_s**3)
