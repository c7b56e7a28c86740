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
READINGS: tuple[Reading, ...] = get_args(Reading)  # from the cheapest to the most expensive


def slowest(readings: Iterable[Reading]) -> Reading:
    """The most expensive of these readings, at least one."""
    return max(readings, key=READINGS.index)


@dataclasses.dataclass(frozen=True)
class StorageLayout:
    """How storage groups samples into chunks, and what reading them costs.

    Attributes:
        runs: The samples in order, cut into the chunks that store them; empty if each sample is stored alone.
        compressed: Whether a chunk can only be decoded as a whole.
        reading: ``"copied"``: a copy from memory; one thread is enough, and several small batches are read together.
            ``"decoded"``: work without a lock, which threads can share. ``"locked"``: work under a lock, where a second
            thread would only wait. ``"python"``: Python code for each sample; in a thread it would hold the GIL against
            the training loop.
        spread: Storage chunks that one chunk of a run touches, on average; above 1 if samples reach into the next
            chunk, which is then decoded twice.
        chunks_per_run: Storage chunks in one chunk of a run, as ``shuffle_chunks`` counts them.
        largest: Whether no other field has compressed chunks of more samples; such chunks would be decoded once for
            each of several groups.
        order: The samples in storage order, which is the order that ``runs`` cut; int64, shape (samples,). None: sample
            numbers are in storage order.
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
        """Most samples that can only be decoded together; 1 if each sample can be read alone."""
        return max((run.rows for run in self.runs), default=1) if self.compressed else 1

    def width(self, shuffle_chunks: int) -> int:
        """Number of run chunks that hold ``shuffle_chunks`` storage chunks, at least 1."""
        return max(shuffle_chunks // self.chunks_per_run, 1)


class Location(NamedTuple):
    """Where a sample is stored.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        row: Row of the datasets in that group, counted from 0.
    """

    file: str
    group: str
    row: int


@runtime_checkable
class Source(Protocol):
    """Samples that can be read by number, in any order, from any thread.

    A sample is what ``len`` counts: a row, a window of rows, a line of a table. Sample numbers are int64 from 0 on and
    never change while the source exists. All samples have the shapes and dtypes of ``spec``.

    An implementation promises:

    * The constructor checks what can be checked without reading samples, and raises `SourceError` or `ConfigError`. It
      starts no thread. The source can be pickled and opens its handles on first use.
    * `read_into` fills exactly the given arrays, for any samples in any order, also repeated ones. Several threads may
      call it at once. It holds no lock while it waits for storage or decodes, as far as the format allows.
    * `read_into` returns correct values or raises. It never fills in values for missing data and never leaves a batch
      partly filled without an error. Errors name file, dataset, row and sample.
    * `close` closes every open handle; a later `read_into` may open them again.
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
        """How storage groups the samples into chunks."""
        ...

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays.

        Args:
            samples: int64, shape (n,).
            out: For each key to read, a C-contiguous array of shape ``(n, *stored_shape)``, which is overwritten.

        Raises:
            SourceError: The data have changed since the source was built.
        """
        ...

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Find where samples are stored.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        ...

    def close(self) -> None:
        """Close every handle. Idempotent."""
        ...


class Part(NamedTuple):
    """Consecutive samples that belong together: those of one file, or of one group in a file.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        name: A name that does not change when files are added, or when all files move to another folder.
        samples: Number of samples.
        rows: A number that differs between different row selections of the same file; 0 for all rows.
    """

    file: str
    group: str
    name: str
    samples: int
    rows: int = 0


@runtime_checkable
class PartedSource(Source, Protocol):
    """A source that knows which samples belong together, so that `split` can keep them on one side."""

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the source, in sample order."""
        ...

    @property
    def overlap(self) -> int:
        """Number of following samples that share values with a sample, as overlapping windows do; 0 if none."""
        ...

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample, numbers or text; shape (len(self),).

        Args:
            name: A dataset with one axis, a column of the table, or a key of ``spec``.

        Raises:
            MissingError: The source has no such column.
        """
        ...


@runtime_checkable
class RandomizedSource(Source, Protocol):
    """A source that can read a random part of each sample, such as a random crop of an image."""

    @property
    def is_random(self) -> bool:
        """Whether samples are cropped at random."""
        ...

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples as `read_into` does, but take the part that each key selects instead of the middle.

        Args:
            samples: int64, shape (n,).
            out: As for `read_into`.
            keys: uint64, shape (n,). The same key selects the same part of a sample.

        Raises:
            SourceError: As `read_into`.
        """
        ...


def shown(source: Source, name: str) -> str:
    """The ``repr`` of a source: its class, size, origin and fields."""
    return f"<{type(source).__name__} of {described(len(source), name, source.spec)}>"


def described(samples: int, name: str, spec: BatchSpec) -> str:
    """One line for people: number of samples, origin and fields.

    Args:
        samples: Number of samples.
        name: Origin of the samples, as messages name it; the name of a subset begins with its number of samples.
        spec: The fields.
    """
    size = f"{samples:,} "
    return f"{name if name.startswith(size) else f'{size}samples from {name}'}: {spec}"


def layout_of(source: Source) -> StorageLayout:
    """``source.layout()`` where there is one, which may examine every sample; else ``source.chunks``."""
    examine = getattr(source, "layout", None)
    layout: StorageLayout = source.chunks if examine is None else examine()
    return layout


def is_random(source: Source) -> bool:
    """Whether a source reads a random part of each sample."""
    return isinstance(source, RandomizedSource) and source.is_random


def ids_of(source: Source, samples: Indices) -> Indices:
    """The numbers that ``source.locate`` takes. A subset gives samples the numbers of the whole source.

    Args:
        source: Any source; one with its own numbering has a method ``ids``.
        samples: int64, shape (n,).
    """
    numbered = getattr(source, "ids", None)
    return samples if numbered is None else numbered(samples)


@runtime_checkable
class CachingSource(Source, Protocol):
    """A source that can decode chunks before they are read, and keep decoded chunks in memory."""

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Prepare samples that will be read soon: ask the kernel to fetch their bytes, and decode their chunks.

        Args:
            samples: int64, shape (n,).
            decode: Whether to decode the chunks and keep them, if there is room. A turn (epoch, group of chunks) tells
                which group needs them; chunks of earlier turns are dropped first.

        Returns:
            Whether there was anything to do.

        Raises:
            SourceError: As `read_into`, which will raise it again.
        """
        ...

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that stay in memory between batches.

        Args:
            chunks: Number of chunks in use at a time; 0 if no order needs them.
        """
        ...

    @property
    def decode_bytes(self) -> int:
        """Bytes that each thread needs to decode one chunk, besides the kept chunks: input, stages and result."""
        ...

    @property
    def decodable_bytes(self) -> int:
        """Bytes of all data that must be decoded. No cache can hold more."""
        ...

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Reserve memory for decoded chunks.

        Args:
            chunks: Number of chunks in use at a time.
            cache_bytes: Bytes for chunks that stay, so that they are decoded only once.

        Returns:
            A function that releases the reservation. If an interrupt (Ctrl-C) ends it early, it is called again.
        """
        ...


@runtime_checkable
class FetchingSource(CachingSource, Protocol):
    """A source that can read whole files before their samples are needed, and hold them until then."""

    def file_bytes(self) -> int:
        """Bytes of the files of one sample, estimated from a few samples; 0 if nothing would be held."""
        ...

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow `prepare` to read files ahead.

        Args:
            nbytes: Most bytes of files held at a time.

        Returns:
            A function that ends reading ahead; as for `reserve`, it may be called again.
        """
        ...
