"""What follows from the measurements: the setting to use, and whether packing helps. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# An order that mixes this well, as a share of the global shuffle, is as good for training.
MIXED = 0.8
# Of settings whose rates are this close, the simpler one is taken: measurements differ by as much.
CLOSE = 0.9
# Another file pays if at least this number of samples is decoded for each one used.
WASTEFUL = 2.0
# A reader that decodes for this share of its time has nothing else to save.
DECODING = 0.7


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was measured, with all files in the page cache. docs/tools/doctor.md describes each value."""

    shuffle: str
    shuffle_chunks: int
    workers: int
    worker_kind: str
    samples_per_s: float
    amplification: float
    mixing: float
    labels: dict[str, float]
    memory: int

    @property
    def mixed(self) -> float:
        """The worst of the mixing scores."""
        return min([self.mixing, *self.labels.values()])


def best(trials: Sequence[Trial]) -> int:
    """The number of the trial to use: the fastest of those that mix well; of close ones, the one with fewer workers."""
    mixing = [number for number, trial in enumerate(trials) if trial.shuffle != "none" and trial.mixed >= MIXED]
    known = mixing or range(len(trials))
    most = max(trials[number].samples_per_s for number in known)
    close = [number for number in known if trials[number].samples_per_s >= CLOSE * most]
    return min(close, key=lambda number: (trials[number].workers, -trials[number].mixed, -trials[number].samples_per_s))


def why_pack(trials: Sequence[Trial], chosen: Trial, reading: str, decoding: float, *, files: bool) -> str:
    """Why one packed file would be read faster; empty if it would not. ``files``: each sample has files of its own."""
    if reading == "locked":
        return "h5py reads it under a lock, one thread at a time"
    if chosen.amplification >= WASTEFUL:
        chunk = max((trial.mixed for trial in trials if trial.shuffle == "chunk"), default=1.0)
        if chosen.shuffle == "global" and chunk < MIXED:
            return (
                f"the chunk shuffle mixes only {chunk:.2f} as well as a global one, which decodes "
                f"{chosen.amplification:.1f} samples for each one used"
            )
        return f"each sample that is used costs {chosen.amplification:.1f} that are decoded"
    if files and decoding >= DECODING:
        return f"readers spend {100 * decoding:.0f} % of their time decoding images, each epoch again"
    return ""
