"""The contract between data and loader: the `Source` protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices, Words

Turn = bool | tuple[int, int]
Reading = Literal["copied", "locked", "decoded", "python"]
READINGS: tuple[Reading, ...] = get_args(Reading)  # from the least that reading takes to the most


def slowest(readings: Iterable[Reading]) -> Reading:
    """The one that takes most, of at least one."""
    found = set(readings)
    return next(reading for reading in reversed(READINGS) if reading in found)


@dataclasses.dataclass(frozen=True)
class StorageLayout:
    """How samples lie together in storage, and what reading them takes.

    Attributes:
        runs: The samples in their order, cut into chunks that are stored together; empty where each lies alone.
        compressed: Whether a chunk can only be decoded as a whole.
        reading: ``"copied"``: no more than a copy from memory, so that several small batches are read in one go and one
            thread is enough. ``"decoded"``: work that holds no lock, so that threads share it. ``"locked"``: under a
            lock, where a second thread would only wait. ``"python"``: code in Python for each sample, which in a thread
            of its own would keep the training loop from running.
        spread: Chunks of storage that a run's chunk takes, on average: more than 1 where samples reach into the next
            one, which is then decoded twice.
        together: Chunks of storage in a run's chunk, of those that ``shuffle_chunks`` counts.
        largest: Whether no other field has compressed chunks of more samples than these: those would be decoded for
            several groups.
        order: The samples in the order in which they lie, which is then the one that runs cut; int64, shape (samples,).
            None: their own.
    """

    runs: tuple[ChunkRun, ...] = ()
    compressed: bool = False
    reading: Reading = "locked"
    spread: float = 1.0
    chunks_per_run: int = 1
    largest: bool = True
    order: Indices | None = dataclasses.field(default=None, compare=False)

    @property
    def rows(self) -> int:
        """Samples that can only be decoded together, at most; 1 where each can be read alone."""
        return max((run.rows for run in self.runs), default=1) if self.compressed else 1

    def width(self, shuffle_chunks: int) -> int:
        """How many chunks of runs make as many chunks of storage, at least one."""
        return max(shuffle_chunks // self.chunks_per_run, 1)


class Location(NamedTuple):
    """Where a sample lies.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        row: Row of the datasets there, counted from 0.
    """

    file: str
    group: str
    row: int


@runtime_checkable
class Source(Protocol):
    """Samples that can be read by number, in any order, from any thread.

    A sample is what ``len`` counts: a row, a window of rows, a line of a table. Sample numbers are int64 from 0 on and
    never change while the source lives. All samples have the shapes and dtypes of ``spec``.

    What an implementation promises:

    * Building it checks what can be checked without reading samples, and raises `SourceError` or `ConfigError`. It
      starts no thread. It can be pickled; handles are opened where they are used.
    * `read_into` fills exactly the arrays given, for any samples in any order, repeated ones too; it may be called from
      several threads at once. It holds no lock while it waits for storage or decodes, where the format allows.
    * It returns right values or raises: never fill values for something missing, never a partly filled batch without
      an error. Errors name file, dataset, row and sample.
    * After `close` everything it opened is closed; a later `read_into` may open it again.
    """

    def __len__(self) -> int:
        """Number of samples, ≥ 1."""
        ...

    @property
    def spec(self) -> BatchSpec:
        """Keys, shapes and dtypes of the fields, and whether batches are dicts or tuples."""
        ...

    @property
    def chunks(self) -> StorageLayout:
        """Which samples lie together."""
        ...

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays.

        Args:
            samples: int64, shape (n,).
            out: For the wanted keys of ``spec`` a C-contiguous array of shape ``(n, *stored_shape)`` to be overwritten.

        Raises:
            SourceError: The data are not what they were when the source was built.
        """
        ...

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Where these samples lie.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        ...

    def close(self) -> None:
        """Close every handle. Idempotent."""
        ...


class Part(NamedTuple):
    """Samples that follow each other and belong together: those of a file, or of a group in it.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        name: What stays the same when other files are added, or all of them are moved to another folder.
        samples: How many.
        rows: What tells its choice of rows from others of the same file; 0 where it has all of them.
    """

    file: str
    group: str
    name: str
    samples: int
    rows: int = 0


@runtime_checkable
class PartedSource(Source, Protocol):
    """A source that knows how its samples belong together, so that they can be split without leaking."""

    @property
    def parts(self) -> Sequence[Part]:
        """All samples, in their order."""
        ...

    @property
    def overlap(self) -> int:
        """How many of the samples after it share values with a sample: windows overlap; 0 where none do."""
        ...

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample, numbers or text; shape (len(self),).

        Args:
            name: A dataset of one axis or a column of the table; or one of the keys of ``spec``.

        Raises:
            MissingError: There is none of this name.
        """
        ...


@runtime_checkable
class RandomizedSource(Source, Protocol):
    """A source that can draw what it takes of a sample at random, such as a part of an image."""

    @property
    def is_random(self) -> bool:
        """Whether it does so."""
        ...

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples as `read_into` does, which takes what is in the middle; here the keys decide.

        Args:
            samples: int64, shape (n,).
            out: As for `read_into`.
            keys: uint64, shape (n,): the same key gives the same part of a sample.

        Raises:
            SourceError: As `read_into`.
        """
        ...


def shown(source: Source, name: str) -> str:
    """A source as ``repr`` shows it: its class, size, origin and fields."""
    return f"<{type(source).__name__} of {described(len(source), name, source.spec)}>"


def described(samples: int, name: str, spec: BatchSpec) -> str:
    """How many samples there are, where they come from, and their fields.

    Args:
        samples: How many.
        name: Where they come from, as messages say it; that of a subset begins with how many there are.
        spec: Their fields.
    """
    size = f"{samples:,} "
    return f"{name if name.startswith(size) else f'{size}samples from {name}'}: {spec}"


def layout_of(source: Source) -> StorageLayout:
    """Which samples lie together, also where every sample must be looked at to tell: such a source has a ``layout``."""
    found = getattr(source, "layout", None)
    layout: StorageLayout = source.chunks if found is None else found()
    return layout


def is_random(source: Source) -> bool:
    """Whether a source takes parts of samples at random."""
    return isinstance(source, RandomizedSource) and source.is_random


def ids_of(source: Source, samples: Indices) -> Indices:
    """The numbers that ``source.locate`` takes: samples of a subset bear those of the whole.

    Args:
        source: Any; one that numbers its samples otherwise has a method ``ids``.
        samples: int64, shape (n,).
    """
    numbered = getattr(source, "ids", None)
    return samples if numbered is None else numbered(samples)


@runtime_checkable
class CachingSource(Source, Protocol):
    """A source that can make things ready before they are read, and keep what it has decoded."""

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Do now what reading these samples soon will need: have the kernel fetch them, and decode their chunks.

        Args:
            samples: int64, shape (n,).
            decode: Whether to decode their chunks and keep them, where there is room. A turn, (epoch, group of chunks),
                says for which group they are: those of earlier turns go first.

        Returns:
            Whether there was anything to do.

        Raises:
            SourceError: As `read_into`, where it will be raised again.
        """
        ...

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that are held between batches, when so many chunks are in use at a time.

        Args:
            chunks: How many; 0 where no order asks for them.
        """
        ...

    @property
    def decode_bytes(self) -> int:
        """Bytes that each thread takes to decode a chunk, beside those held: as stored, step by step, and in hand."""
        ...

    @property
    def decodable_bytes(self) -> int:
        """Bytes of everything that must be decoded: no cache can hold more."""
        ...

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks.

        Args:
            chunks: That are in use at a time.
            cache_bytes: For chunks that stay, so that they are decoded once only.

        Returns:
            What gives the room back. Where an interrupt (Ctrl-C) ended that, it is called again.
        """
        ...


@runtime_checkable
class FetchingSource(CachingSource, Protocol):
    """A source that can read files as a whole before their samples are wanted, and hold them until then."""

    def file_bytes(self) -> int:
        """Bytes of the files of one sample, as estimated from a few; 0 where nothing would be held."""
        ...

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow `prepare` to read files ahead.

        Args:
            nbytes: Room for those that are held.

        Returns:
            What takes that back; as `reserve`.
        """
        ...
