"""`StorageLayout`: how samples are stored, and what reading them costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, get_args

from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices

Reading = Literal["copied", "opened", "locked", "decoded", "python"]
READINGS: tuple[Reading, ...] = get_args(Reading)  # from the cheapest to the most expensive

# What people read of each.
HOW_READ: dict[Reading, str] = {
    "copied": "read by copying",
    "opened": "read from a file for each sample",
    "locked": "read under a lock",
    "decoded": "read by decoding",
    "python": "read by Python code",
}


def slowest(readings: Iterable[Reading]) -> Reading:
    """The most expensive of these readings, at least one."""
    return max(readings, key=READINGS.index)


@dataclasses.dataclass(frozen=True)
class StorageLayout:
    """How samples are stored, and what reading them costs.

    Attributes:
        runs: The samples in order, cut into the chunks that store them; empty if each sample is stored alone.
        compressed: Whether a chunk can only be decoded as a whole.
        reading: ``"copied"``: a copy from memory; one thread is enough. ``"opened"``: a file is opened for each sample,
            and copied; two threads are slower than one, and each file takes the GIL. ``"decoded"``: work without a
            lock, which threads can share. With these three, several small batches are read together. ``"locked"``: work
            under a lock, where a second thread would only wait; each process has its own. ``"python"``: Python code for
            each sample; in a thread it would hold the GIL against the training loop.
        spread: Storage chunks that one chunk of a run touches, on average; above 1 if samples reach into the next
            chunk, which is then decoded twice.
        chunks_per_run: Storage chunks in one chunk of a run, as ``shuffle_chunks`` counts them.
        largest: Whether this field has the largest compressed chunks.
        order: The samples in storage order, which is the order that ``runs`` cut; int64, shape (samples,). None: sample
            numbers are in storage order.
        overlap: Number of following samples that share values with a sample, as overlapping windows do; 0 if none.
        random: Whether `Source.read_random` reads a random part of each sample, such as a random crop of an image.
        ahead: Whether `Source.fetch` and `Source.decode` do anything; if not, workers do not call them.
        left_out: Which of the stored data belong to no sample, for people; empty if there is nothing to say.

    Example:
        >>> layout = StorageLayout((ChunkRun(samples=1000, rows=64),), compressed=True, reading="decoded")
        >>> layout.rows
        64
    """

    runs: tuple[ChunkRun, ...] = ()
    compressed: bool = False
    reading: Reading = "locked"
    spread: float = 1.0
    chunks_per_run: int = 1
    largest: bool = True
    order: Indices | None = dataclasses.field(default=None, compare=False)
    overlap: int = 0
    random: bool = False
    ahead: bool = False
    left_out: str = ""

    @property
    def rows(self) -> int:
        """Most samples that can only be decoded together; 1 if each sample can be read alone."""
        return max((run.rows for run in self.runs), default=1) if self.compressed else 1

    def width(self, shuffle_chunks: int) -> int:
        """Number of run chunks that hold ``shuffle_chunks`` storage chunks, at least 1."""
        return max(shuffle_chunks // self.chunks_per_run, 1)
