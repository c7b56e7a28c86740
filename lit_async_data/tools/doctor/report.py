"""`DoctorReport`: what ``doctor`` measured and advises, as plain values; ``--json`` prints it."""

from __future__ import annotations

import dataclasses
from typing import Any

#: Raised if a key of the JSON changes its meaning or goes.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was measured, with all files in the page cache.

    Attributes:
        shuffle: ``none``, ``chunk`` or ``global``.
        shuffle_chunks: Chunks that ``chunk`` mixes at a time.
        workers: Readers.
        worker_kind: ``thread`` or ``process``, as ``auto`` chose.
        samples_per_s: Samples per second that a loop gets which does nothing else.
        amplification: Samples that were decoded for each one used, computed from bytes; less than 1 if decoded chunks
            were kept.
        mixing: Distinct chunks in a batch, as a share of those in a batch of the global shuffle.
        labels: How well label fields, groups or parts are mixed, by name; 1 is as well as by the global shuffle.
        memory: Bytes that the loader takes.

    Example:
        >>> Trial("chunk", 64, 2, "process", 1000.0, 1.0, 0.98, {"y": 0.7}, 10**8).mixed
        0.7
    """

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


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the readers did, all together, in one measurement.

    Attributes:
        samples_per_s: Samples per second that a loop gets which does nothing else.
        read_mb_per_s: 10⁶ bytes per second of a reader while it reads; as stored, where chunks or files are decoded.
        decode_mb_per_s: 10⁶ decoded bytes per second of a reader while it decodes; 0 where nothing is decoded.
        decoding: The share of the readers' time that decoding takes.
    """

    samples_per_s: float
    read_mb_per_s: float
    decode_mb_per_s: float
    decoding: float


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """What was measured, and what follows.

    Attributes:
        source: Its name.
        samples: Number of samples.
        batch: Element type, and shape without N, by batch key.
        batch_size: Samples per batch.
        reading: How the slowest field is read, as in `StorageLayout`.
        cores: Cores that this process may use.
        trials: The settings that were measured.
        chosen: The number of the trial that is advised.
        warm: Of the advised setting, with the files in the page cache.
        cold: The same with the files on the disk; None if that was not measured.
        why_not_cold: Why it was not; empty if it was.
        files: Number of files.
        bytes: Of these files.
        free_memory: Bytes that the page cache may take.
        risks: What may go wrong, or be slower than measured.
        options: The options that are advised and are not as given (by a configuration; else the defaults), by name.
        override: The same, as arguments of a command line.
        python: The lines that build the loader; empty for a configuration.
        command: The command line of ``train.py`` that reads the files, without the override; empty for a configuration,
            and for a folder, which no configuration of ``train.py`` reads.
        pack: The command that writes the samples into one file that is read faster; empty if that would not help.
        why_pack: Why it would; empty likewise.
        notes: What else helps.
    """

    source: str
    samples: int
    batch: dict[str, dict[str, Any]]
    batch_size: int
    reading: str
    cores: int
    trials: list[Trial]
    chosen: int
    warm: Reading
    cold: Reading | None
    why_not_cold: str
    files: int
    bytes: int
    free_memory: int
    risks: list[str]
    options: dict[str, Any]
    override: str
    python: str
    command: str
    pack: str
    why_pack: str
    notes: list[str]

    @property
    def advised(self) -> Trial:
        """The trial that is advised."""
        return self.trials[self.chosen]

    @property
    def fits(self) -> bool:
        """Whether the page cache can hold all files, so that they are on the disk in the first epoch only."""
        return self.bytes <= self.free_memory

    @property
    def samples_per_s(self) -> float:
        """The predicted rate: from the page cache if the files fit, else from the disk."""
        return self.warm.samples_per_s if self.fits or self.cold is None else self.cold.samples_per_s

    @property
    def step_samples(self) -> int:
        """Samples of a step: a batch, or all if they are fewer."""
        return min(self.batch_size, self.samples)

    @property
    def steps_per_s(self) -> float:
        """The most steps per second that this feeds."""
        return self.samples_per_s / self.step_samples

    def as_dict(self) -> dict[str, Any]:
        """This report as values of JSON."""
        predicted = {"fits": self.fits, "samples_per_s": self.samples_per_s, "steps_per_s": self.steps_per_s}
        return {"version": VERSION, **dataclasses.asdict(self), **predicted}
