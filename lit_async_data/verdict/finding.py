"""`Verdict`: what a loop waits for, and what helps: in words for people, in numbers for other ranks."""

from __future__ import annotations

import dataclasses
import enum

# A smaller gain is not promised.
LEAST_GAIN = 0.01
PACKING = "python -m lit_async_data pack"


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
    OWN = 14
    IN_LOOP = 15


WORDS = {
    Bound.LOOP: "data keep up",
    Bound.READING: "reading-bound (storage)",
    Bound.DECODING: "decoding-bound",
    Bound.TRANSFORM: "transform-bound",
    Bound.PYTHON: "bound by the Python code that reads samples",
    Bound.LOCK: "bound by the lock of h5py",
    Bound.GIL: "GIL-bound, readers and loop take it from each other",
    Bound.OWN: "GIL-bound, threads of your own program hold it",
    Bound.CORES: "no core is free for reading",
    Bound.QUEUE: "slot-bound, a batch is late now and then",
    Bound.COPY: "copy-bound",
    Bound.CALLER: "the loop itself reads",
    Bound.FOREIGN: "bound by your loader",
    Bound.HANDOVER: "data keep up; each batch was ready, and handing it over takes this long",
    Bound.IN_LOOP: "data keep up; each batch was ready, and the loop itself runs device_transform, on a CPU",
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
    PACK_DECODED = 10
    PROCESS_LATER = 11
    OWN_PROCESS = 12
    BATCH_TRANSFORM = 13


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why a loop waits, and what helps.

    Attributes:
        share: Share of the time that it waited.
        bound: What it waits for.
        option: What to change.
        value: The number for it.
        gain: Share of the time that this should save; 0 if that is not known.
        packing: The command that packs what the loader reads. It does not travel: all ranks read the same files.

    Example:
        >>> print(Verdict(0.062, Bound.DECODING, Option.WORKERS, 4, 0.052))
        decoding-bound; loader.workers=4 should save about 5 %
    """

    share: float
    bound: Bound
    option: Option = Option.NOTHING
    value: int = 0
    gain: float = 0.0
    packing: str = PACKING

    def cure(self, prefix: str = "loader.") -> str:
        """What to change, as it is typed; empty if nothing helps.

        Args:
            prefix: Of the loader's options.
        """
        packed = "" if self.gain >= LEAST_GAIN else " writes a file that is read with less work"
        return {
            Option.NOTHING: "",
            Option.WORKERS: f"{prefix}workers={self.value}",
            Option.PROCESS: f"{prefix}worker_kind=process",
            Option.PROCESS_WORKERS: f"{prefix}worker_kind=process {prefix}workers={self.value}",
            Option.QUEUE_DEPTH: f"{prefix}queue_depth={self.value}",
            Option.SHUFFLE: f"{prefix}shuffle=chunk",
            Option.PACK: f"{self.packing}{packed}",
            Option.PACK_DECODED: f"{self.packing} --codec none writes a larger file that needs no decoding",
            Option.PROCESS_LATER: f"{prefix}worker_kind=process, once a core is free for it",
            Option.OWN_PROCESS: "do what they do in a process of its own",
            Option.BATCH_TRANSFORM: "as batch_transform, in numpy, the readers run it",
            Option.WHY: "the lines before training say what keeps it from a process of its own",
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
    def of_numbers(numbers: list[float], packing: str = PACKING) -> Verdict:
        """From `numbers`, of whatever rank.

        Args:
            numbers: Those.
            packing: The command of this rank.
        """
        share, bound, option, value, gain = numbers
        return Verdict(share, Bound(round(bound)), Option(round(option)), round(value), gain, packing)
