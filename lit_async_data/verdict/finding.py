"""`Verdict`: what a loop waits for, and what helps, in words."""

from __future__ import annotations

import enum
from typing import NamedTuple

# A share that differs by less than this from the one that was said last is not said again.
NOTICEABLE = 0.1


class Bound(enum.Enum):
    """What a loop waits for, as a sentence goes on."""

    LOOP = ": data keep up"
    STORAGE = ", mostly for storage"
    DECODING = ", mostly for decoding"
    TRANSFORM = ", mostly for sample_transform and batch_transform"
    PYTHON = ", mostly for the Python code that reads samples"
    LOCK = ", mostly for a lock: one thread reads at a time"
    LATE = ": a batch is late now and then"
    COPY = ", mostly for copies to the device"
    CALLER = ": it reads by itself, and nothing is read ahead"
    FOREIGN = ", mostly for your DataLoader"
    FIRST = ", mostly for the first batch"
    HANDOVER = ": each batch was ready, and handing it over takes this long"
    IN_LOOP = " in device_transform, which runs in the loop on a CPU"


class Cure(enum.Enum):
    """What to change."""

    NONE = ""
    WORKERS = "; set {prefix}workers={value}"
    PROCESS = "; set {prefix}worker_kind=process"
    QUEUE_DEPTH = "; set {prefix}queue_depth={value}"
    SHUFFLE = "; set {prefix}shuffle=chunk; python -m lit_async_data doctor says how well that mixes"
    PACK = "; python -m lit_async_data pack writes a file that is read faster"
    NUM_WORKERS = "; set its num_workers={value}"
    SOURCE = "; have HDF5Source or ManifestSource read its files"
    BYTES = "; hand over fewer bytes, such as uint8, and convert them in device_transform"
    BATCH_SIZE = "; make batch_size larger"
    BATCH_TRANSFORM = "; as batch_transform, in numpy, the readers run it"
    CORES = "; no core is free for more workers"


class Verdict(NamedTuple):
    """Why a loop waits, for which share of the time, and what to change, to which value.

    Example:
        >>> print(Verdict(0.519, Bound.DECODING, Cure.WORKERS, 2).sentence("training", "3.1 s"))
        training waited 51.9 % of 3.1 s for data, mostly for decoding; set loader.workers=2
    """

    share: float
    bound: Bound
    cure: Cure = Cure.NONE
    value: int = 0

    def sentence(self, who: str, total: str, prefix: str = "loader.") -> str:
        """In words: who waited, of how long, and what the options of the loader begin with."""
        of = f"{100 * self.share:.1f} % of {total}"
        said = f"{who} spent {of}" if self.bound is Bound.IN_LOOP else f"{who} waited {of} for data"
        return said + self.bound.value + self.cure.value.format(prefix=prefix, value=self.value)

    def repeats(self, before: Verdict | None) -> bool:
        """Whether the same was said before, of about as long a wait."""
        return before is not None and before[1:3] == self[1:3] and abs(before.share - self.share) < NOTICEABLE
