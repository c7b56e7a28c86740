"""`verdict`: the stage that a loop waits for, and the first change that can help and is not made yet."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from lit_async_data.engine.verdict.watch import Facts

# A loop that waits for less than this share of the time, or had to wait for fewer of its batches, has its data.
KEEPS_UP = 0.02
# Readers that take less than this share of a step's time per batch could keep up: a batch is late now and then.
IDLE = 0.85
# A core is free for one more worker if this much of it did nothing.
FREE = 0.5
# The depth of the queue that is advised; where it is as deep, a deeper one does not help either.
QUEUE_DEPTH = 8


class Bound(enum.Enum):
    """What a loop waits for, as a sentence goes on."""

    LOOP = ": data keep up"
    READING = ", mostly for reading"
    DECODING = ", mostly for decoding"
    TRANSFORM = ", mostly for sample_transform and batch_transform"
    PYTHON = ", mostly for the Python code that reads samples"
    LOCK = ", mostly for a lock: one thread reads at a time"
    LATE = ": a batch is late now and then"
    COPY = ", mostly for copies to the device"
    CALLER = ": it reads by itself, and nothing is read ahead"
    FOREIGN = ", mostly for your DataLoader"
    FIRST = ", mostly for the first batch"
    HANDOVER = ": batches were ready; the remaining time is hand-over cost"
    IN_LOOP = " in device_transform, which runs in the loop on a CPU"


class Cure(enum.Enum):
    NONE = ""
    WORKERS = "; set {prefix}workers={value}"
    AUTO = "; set {prefix}workers=auto, which keeps as many as help"
    PROCESS = "; set {prefix}worker_kind=process"
    QUEUE_DEPTH = "; set {prefix}queue_depth={value}"
    SHUFFLE = "; set {prefix}shuffle=chunk, which decodes each chunk once"
    PACK = "; python -m lit_async_data pack writes a file that is read faster"
    NUM_WORKERS = "; set its num_workers={value}"
    SOURCE = "; have HDF5Source or ManifestSource read its files"
    BYTES = "; hand over fewer bytes, such as uint8, and convert them in device_transform"
    BATCH_SIZE = "; make batch_size larger"
    BATCH_TRANSFORM = "; as batch_transform, in numpy, the readers run it"
    CORES = "; no core is free for more workers"


class Verdict(NamedTuple):
    """Why a loop waits, for which share of the time, and what to change, to which value."""

    share: float
    bound: Bound
    cure: Cure = Cure.NONE
    value: int = 0

    def sentence(self, who: str, total: str, prefix: str = "loader.") -> str:
        """In words: who waited, of how long, and what the options of the loader begin with."""
        of = f"{100 * self.share:.1f} % of {total}"
        said = f"{who} spent {of}" if self.bound is Bound.IN_LOOP else f"{who} waited {of} for data"
        return said + self.bound.value + self.cure.value.format(prefix=prefix, value=self.value)


def verdict(facts: Facts) -> Verdict:
    waited = facts.waited
    if facts.transform_s > max(waited.wait_s, KEEPS_UP * waited.total_s):
        return Verdict(facts.transform_s / waited.total_s, Bound.IN_LOOP, Cure.BATCH_TRANSFORM)
    if waited.share < KEEPS_UP:
        return Verdict(waited.share, Bound.LOOP)
    bound = Bound.FIRST if waited.gap_s > waited.wait_s else _bound(facts)
    return Verdict(waited.share, bound, *_cure(bound, facts))


def _bound(facts: Facts) -> Bound:
    readers, stages = facts.readers, facts.stages
    read_s, most_s = stages.seconds / max(readers.count, 1), max(stages.read.seconds, stages.decode.seconds)
    first = {
        Bound.CALLER: readers.kind == "caller",
        Bound.COPY: stages.copy.seconds > max(facts.waited.busy_s, read_s),
        Bound.HANDOVER: facts.starved < KEEPS_UP * facts.waited.steps,
        Bound.FOREIGN: readers.kind == "foreign",
        Bound.LATE: read_s < IDLE * facts.waited.busy_s,
        Bound.TRANSFORM: stages.transform.seconds >= most_s,
        Bound.LOCK: readers.reading == "locked",
        Bound.DECODING: stages.decode.seconds == most_s,
        Bound.PYTHON: readers.reading == "python",
    }
    return next((bound for bound, holds in first.items() if holds), Bound.READING)


def _cure(bound: Bound, facts: Facts) -> tuple[Cure, int]:
    readers, full = facts.readers, facts.free < FREE
    if bound is Bound.CALLER and readers.chosen:  # else the lines before training say why nobody else can read
        return Cure.WORKERS, 1
    if bound is Bound.LATE and readers.queue_depth < QUEUE_DEPTH:
        return Cure.QUEUE_DEPTH, QUEUE_DEPTH
    if bound is Bound.FOREIGN:
        # Once: what two of them do side by side does not show whether a third would help.
        if 0 <= readers.count < min(facts.cores, 2) and not (full and readers.count):
            return Cure.NUM_WORKERS, _workers(facts, facts.cores)
        return Cure.SOURCE if readers.replaceable else Cure.NONE, 0
    if bound in (Bound.TRANSFORM, Bound.PYTHON, Bound.LOCK, Bound.DECODING, Bound.READING):
        return _quicker(bound, facts, full=full)
    return {Bound.COPY: Cure.BYTES, Bound.HANDOVER: Cure.BATCH_SIZE}.get(bound, Cure.NONE), 0


def _quicker(bound: Bound, facts: Facts, *, full: bool) -> tuple[Cure, int]:
    """What helps readers of ours that take too long."""
    readers, python = facts.readers, bound in (Bound.TRANSFORM, Bound.PYTHON, Bound.LOCK)
    if python and readers.kind == "thread" and readers.chosen and facts.cores > 1:
        return Cure.PROCESS, 0
    if bound is Bound.DECODING and readers.in_vain:
        return Cure.SHUFFLE, 0
    # Threads of one process do not run Python side by side; two that open files are slower than one.
    apart = readers.kind == "process" and readers.reading == "python"
    # A count beyond that of `auto` was given, as this advises once: where storage is the limit, none helps.
    known = readers.auto == "tried" or readers.count > readers.by_auto
    helps = (apart or not (python or readers.reading == "opened")) and not known
    # Readers that wait for storage need no core each; those that copy from the page cache do.
    waits = bound is Bound.READING and facts.stages.cpu_s < facts.stages.seconds / 2
    full, most = (False, max(facts.cores, 2)) if waits else (full, facts.cores)
    if helps and not full and readers.count < most:
        if readers.auto == "tries":
            return Cure.NONE, 0
        return (Cure.AUTO, 0) if readers.count < readers.by_auto else (Cure.WORKERS, _workers(facts, most))
    if readers.replaceable and (bound in (Bound.DECODING, Bound.LOCK) or readers.reading == "opened"):
        return Cure.PACK, 0
    return Cure.CORES if helps and full else Cure.NONE, 0


def _workers(facts: Facts, most: int) -> int:
    """More workers than there are: as many as the steps need, if there are cores for them."""
    return min(max(math.ceil(facts.stages.seconds / max(facts.waited.busy_s, 1e-9)), facts.readers.count + 1, 2), most)
