"""`Source`: the contract between stored samples and a loader."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, BatchSpec
from lit_async_data.errors import ConfigError, FormatError, MissingError, WorkerError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources.contract.user_code import Watch
from lit_async_data.system import ProcessGuard

# ruff: noqa: ARG002, B027  # the defaults of `Source` ignore their arguments, and may do nothing

BLOCK_SAMPLES = 2**20  # per read when a field is read for all samples
# The least number of run chunks from which batches are mixed, unless ``shuffle_chunks`` is smaller.
LEAST_WIDTH = 8
# Stands in the group of a part for the name of each group or dataset, if that is a sample; the names are the column
# ``group``.
EACH = "*"

Reading = Literal["copied", "opened", "locked", "decoded", "python"]
HOW_READ: dict[Reading, str] = {  # from the cheapest to the most expensive
    "copied": "read by copying",
    "opened": "read from a file for each sample",
    "locked": "read under a lock",
    "decoded": "read by decoding",
    "python": "read by Python code",
}

_Name = TypeVar("_Name", bound=Hashable)


def slowest(readings: Iterable[Reading]) -> Reading:
    return max(readings, key=list(HOW_READ).index)


class Remote(NamedTuple):
    """What an epoch fetches over a network."""

    nbytes: int  # if they are known
    requests: int  # about as many
    folder: str | None  # that keeps what was fetched; None if nothing does
    room: int | None = None  # the bytes that stay in memory at a time; None if the folder keeps every file

    @staticmethod
    def joined(several: Iterable[Remote | None]) -> Remote | None:
        found = list(filter(None, several))
        if not found:
            return None
        nbytes, requests, folders, rooms = zip(*found, strict=True)
        return Remote(sum(nbytes), sum(requests), folders[0], sum(filter(None, rooms)) or None)


@dataclasses.dataclass(frozen=True)
class StorageLayout:
    """How samples are stored, and what reading them costs.

    Attributes:
        runs: The samples in order, cut into the chunks that store them; empty if each sample is stored alone.
        compressed: Whether a chunk can only be decoded as a whole.
        reading: ``"copied"``: a copy from memory. ``"opened"``: a file is opened and copied for each sample, which
            takes the GIL. ``"decoded"``: work without a lock, which threads can share. With these three, several small
            batches are read together. ``"locked"``: work under a lock of the process, where a second thread would only
            wait. ``"python"``: Python code for each sample, which would hold the GIL against the training loop.
        spread: Storage chunks that one chunk of a run touches, on average; above 1 if samples reach into the next
            chunk, which is then decoded twice.
        chunks_per_run: Storage chunks in one chunk of a run, as ``shuffle_chunks`` counts them.
        amplification: Bytes that are decoded for each one used, if patches touch parts of chunks; 0 if unknown.
        alone: The same if no patch shares a chunk with another, as under a global shuffle of many volumes.
        chunks_per_sample: Storage chunks that one sample touches, on average; above 1 with windows.
        largest: Whether this field has the largest compressed chunks.
        order: The samples in storage order, which is the order that ``runs`` cut; int64, shape (samples,). None: sample
            numbers are in storage order.
        overlap: Number of following samples that share values with a sample, as overlapping windows do, or its volume,
            as patches do; 0 if none.
        random: Whether `Source.read_random` reads a random part of each sample, such as a random crop of an image.
        drawn: Whether samples are patches, or points, at random places.
        ahead: Whether `Source.fetch` and `Source.decode` do anything; if not, workers do not call them.
        remote: What comes over a network, and samples of a chunk in ``runs`` together; None if nothing does.
        left_out: Stored data that belong to no sample, in words; empty if there are none.

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
    amplification: float = 0.0
    alone: float = 0.0
    chunks_per_sample: float = 1.0
    largest: bool = True
    order: Indices | None = dataclasses.field(default=None, compare=False)
    overlap: int = 0
    random: bool = False
    drawn: bool = False
    ahead: bool = False
    remote: Remote | None = None
    left_out: str = ""

    @property
    def rows(self) -> int:
        """Most samples that can only be decoded together; 1 if each sample can be read alone."""
        return max((run.rows for run in self.runs), default=1) if self.compressed else 1

    def width(self, shuffle_chunks: int) -> int:
        """Number of run chunks that hold ``shuffle_chunks`` storage chunks, or as many as mix well at least."""
        return max(shuffle_chunks // self.chunks_per_run, min(shuffle_chunks, LEAST_WIDTH))


def hashed(names: Sequence[str]) -> Words:
    """A 64-bit hash of each name, the same on every machine; uint64, shape (n,)."""
    # Names that are not UTF-8 hold surrogates.
    texts = (name.encode("utf-8", "surrogateescape") for name in names)
    words = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
    return np.fromiter(words, np.uint64, len(names))


class Location(NamedTuple):
    file: str
    group: str  # in the file; ``"/"`` for its root
    row: int  # of the datasets in the group; if groups or datasets are the samples, the number of this one


class Part(NamedTuple):
    """Consecutive samples that belong together: those of one file, or of one group in a file."""

    file: str
    group: str  # as in `Location`
    name: str  # does not change when files are added, or when all files move to another folder
    samples: int  # the number of samples
    rows: int = 0  # differs between row selections of one file; 0 for all rows
    datasets: frozenset[int] = frozenset()  # the datasets that it reads, if that is known


def end_to_end(name: str, columns: Sequence[npt.NDArray[Any]], origins: Sequence[str]) -> npt.NDArray[Any]:
    """Columns of several files or sources as one, without a change of any value."""
    numeric = [column.dtype.kind in "biufc" for column in columns]
    if len(set(numeric)) > 1:
        text, number = (origins[numeric.index(kind)] for kind in (False, True))
        what = f"column {name!r} holds numbers in {number}, but text in {text}; store it as one type everywhere"
        raise FormatError(what, dataset=name)
    if all(numeric) and np.result_type(*columns).kind not in {column.dtype.kind for column in columns}:
        columns = [column.astype(object) for column in columns]  # uint64 beside int64 would become float64
    return np.concatenate(columns)


@dataclasses.dataclass(frozen=True)
class Places:
    """Part and row of each sample."""

    parts: tuple[Part, ...]  # with distinct file and group, or datasets; ``samples`` is undefined
    which: Indices  # index of each sample's part
    rows: Indices  # of each sample in the complete part; the same in a subset, and when other parts are added
    episodes: npt.NDArray[Any] | None = None  # the id of each sample's episode in its part; None if it has none

    def __repr__(self) -> str:
        return f"<Places of {len(self.rows):,} samples of {len(self.parts):,} part{'s' * (len(self.parts) > 1)}>"

    @staticmethod
    def joined(several: Iterable[Places]) -> Places:
        listed = list(several)
        ids: list[Any] = [places.episodes for places in listed]
        first = starts([len(places.parts) for places in listed])
        return Places(
            tuple(part for places in listed for part in places.parts),
            np.concatenate([places.which + begin for places, begin in zip(listed, first, strict=False)]),
            np.concatenate([places.rows for places in listed]),
            None if any(each is None for each in ids) else np.concatenate(ids),
        ).distinct(without_links())

    def distinct(self, real: Callable[[str], str] = str) -> Places:
        """With one part for what several sources read: a file or group, if they share a dataset."""
        places = list[Any]()
        read = collections.defaultdict[Any, set[frozenset[int]]](set)
        for part in self.parts:
            end = part.name.partition(":/")[0]  # of the path, if the source knows files
            known = end and part.file.endswith(end)
            places.append((real(part.file), part.group, part.name.removeprefix(end)) if known else part[:3])
            read[places[-1]].add(part.datasets)
        apart = {key for key, sets in read.items() if all(sets) and len(frozenset.union(*sets)) == sum(map(len, sets))}
        pairs = zip(places, self.parts, strict=True)
        codes, _ = numbered((place, part.datasets if place in apart else None) for place, part in pairs)
        firsts = np.unique(codes, return_index=True)[1]
        for part, code in zip(self.parts, codes.tolist(), strict=True):
            if part.rows != self.parts[firsts[code]].rows:
                what = "occurs twice with different rows or windows, so overlaps cannot be found"
                ways = "split each source of this file first, then concatenate the sides"
                raise ConfigError(f"{part.file} {what}; {ways}", "source", file=part.file)
        parts = tuple(self.parts[first] for first in firsts.tolist())
        return Places(parts, codes[self.which], self.rows, self.episodes)

    def taken(self, samples: Indices) -> Places:
        episodes = None if self.episodes is None else self.episodes[samples]
        return Places(self.parts, self.which[samples], self.rows[samples], episodes)

    def named_episodes(self) -> npt.NDArray[Any]:
        """The id of each sample's episode, behind the name of its part if two parts have one id."""
        assert self.episodes is not None
        ids, codes = np.unique(self.episodes, return_inverse=True)
        pairs, numbers = np.unique(self.which * len(ids) + codes, return_inverse=True)
        if len(pairs) == len(ids):
            return self.episodes
        names = [part.name for part in self.parts]
        names = names if len({*names}) == len(names) else [f"{part.name} of {part.file}" for part in self.parts]
        texts = [f"{names[pair // len(ids)]}:{ids[pair % len(ids)]}" for pair in pairs.tolist()]
        return np.array(texts, object)[numbers]

    def order(self) -> Indices:
        """The samples sorted by part and row, stable."""
        # One key, and a sort that is fast on sorted data, which this mostly is.
        return np.argsort(self.which * (self.rows.max() + 1) + self.rows, kind="stable")


def without_links() -> Callable[[str], str]:  # one look at each file, not at all folders above it; addresses stay
    folder_of = functools.cache(lambda folder: folder if "://" in folder else os.path.realpath(folder))

    def real(path: str) -> str:
        folder = path.removesuffix(name := os.path.basename(path))
        return os.path.realpath(path) if os.path.islink(path) else os.path.join(folder_of(folder), name)

    return real


def numbered(names: Iterable[_Name]) -> tuple[Indices, list[_Name]]:
    """A number for each name, and the distinct names, in order of appearance."""
    numbers: dict[_Name, int] = {}
    return np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64), list(numbers)


def starts(counts: npt.ArrayLike) -> Indices:
    """The start of each of several consecutive blocks, and the end of the last block."""
    return np.append(0, np.cumsum(np.asarray(counts, np.int64)))


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a source needs in memory."""

    decoded: int = 0  # for decoded chunks that stay between batches
    per_thread: int = 0  # for each thread that decodes: input, stages and result
    cacheable: int = 0  # for all data that must be decoded; no cache can hold more

    @classmethod
    def together(cls, needs: Sequence[MemoryNeeds]) -> MemoryNeeds:
        """The needs of several sources that are read in turn."""
        per_thread = max((each.per_thread for each in needs), default=0)
        return cls(sum(each.decoded for each in needs), per_thread, sum(each.cacheable for each in needs))


class Reservation:
    """Room in a source, given back by a call or by garbage collection, as after an interrupt."""

    _release: Callable[[], object] | None = None  # until the constructor ends

    def __init__(self, release: Callable[[], object]) -> None:
        self._process = ProcessGuard()
        self._release = release

    def __call__(self) -> None:
        release = self._release  # read once: another thread, or garbage collection, may call this meanwhile
        if release is not None and not self._process.forked:  # a forked process may never get the lock of the room
            release()  # counts once, also if it is called again after an interrupt
            self._release = None

    def __del__(self) -> None:
        try:
            self()
        except BaseException:
            self()  # Python drops an interrupt in a finaliser; the room would stay taken
            raise


class Source(abc.ABC):
    """Samples that can be read by number, in any order, from any thread. Subclass it for your own kind of data.

    A subclass needs three members: ``__len__``, `spec` and `read_into`. All others have defaults, for samples that are
    stored one by one and read by Python code. `lit_async_data.testing.check_contract` tests a subclass.

    Sample numbers are int64 from 0 on and never change while the source exists. All samples have the shapes and dtypes
    of `spec`. A subclass promises:

    * The constructor checks what can be checked without reading samples, and raises `SourceError` or `ConfigError`. It
      starts no thread. The source can be pickled, and opens its handles on first use.
    * `read_into` fills exactly the given arrays, for any samples in any order, also repeated ones. Several threads may
      call it at once. It holds no lock while it waits for storage or decodes, as far as the format allows.
    * `read_into` returns correct values or raises an error that names file, dataset, row and sample. It never fills in
      values for missing data.
    * `close` closes every open handle; a later `read_into` may open them again.

    Example:
        >>> from lit_async_data import AsyncLoader, FieldSpec
        >>> class Squares(Source):
        ...     @property
        ...     def spec(self): return BatchSpec({"y": FieldSpec((), np.dtype("i8"))}, as_mapping=True)
        ...     def __len__(self): return 10
        ...     def read_into(self, samples, out): out["y"][...] = samples**2
        >>> with AsyncLoader(Squares(), {"batch_size": 4, "shuffle": False}) as loader:
        ...     [batch["y"].tolist() for batch in loader]
        [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of samples, ≥ 1."""

    @property
    @abc.abstractmethod
    def spec(self) -> BatchSpec:
        """Keys, shapes and dtypes of the fields, and whether batches are dicts or tuples."""

    @abc.abstractmethod
    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays.

        Args:
            samples: int64, shape (n,), all in ``range(len(self))``.
            out: For each key to read, a C-contiguous array of shape ``(n, *stored_shape)``, which is overwritten. It
                holds some of the keys of `spec`, or all.

        Raises:
            SourceError: The samples cannot be read, or have changed since the source was built.
        """

    def __repr__(self) -> str:
        kind = type(self).__name__
        name = "" if self.name == kind else self.name
        return f"<{kind} of {described(self, name, self.spec)}; {HOW_READ[self.chunks.reading]}>"

    # A Trainer that is given a source in place of a loader would otherwise take single samples for batches.
    __iter__ = None

    def __getitem__(self, number: int) -> dict[str, Any] | tuple[Any, ...]:
        """One sample, as from a map-style dataset of torch: an array for each field, in a dict or a tuple.

        A `torch.utils.data.DataLoader` can take a source as its dataset. Negative numbers count from the end; random
        crops take the middle. Raises `IndexError` if there is no such sample, and `SourceError` if it cannot be read.
        """
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any] | tuple[Any, ...]]:
        """Several samples, read at once; see `__getitem__`. A DataLoader calls this with the numbers of a batch."""
        samples = whole_numbers(numbers, self)
        samples[samples < 0] += len(self)
        check_range(samples, self)
        spec = self.spec
        out = spec.empty(len(samples))
        if len(samples):
            self._read_in_any_process(samples, out)
        fields = {key: spec[key].delivered(array) for key, array in out.items()}
        return [spec.packed({key: array[place] for key, array in fields.items()}) for place in range(len(samples))]

    def _read_in_any_process(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read, also in a forked process such as a worker of a DataLoader."""
        process, reader = vars(self).get("_reader_in_fork", (0, self))
        try:
            fill(reader if process == os.getpid() else self, samples, out)
        except WorkerError:  # handles and locks do not survive a fork
            arrays: list[pickle.PickleBuffer] = []
            pickled = pickle.dumps(self, protocol=5, buffer_callback=arrays.append)
            reader = pickle.loads(pickled, buffers=arrays)  # noqa: S301  # made here; it shares the arrays
            vars(self)["_reader_in_fork"] = os.getpid(), reader
            fill(reader, samples, out)

    @property
    def name(self) -> str:
        """The origin of the samples, for messages: a file, a table. The class, unless overridden."""
        return type(self).__name__

    def close(self) -> None:
        """Close every handle. Idempotent. Nothing to close, unless overridden."""

    # -- where samples are stored ------------------------------------------------------------------------------------

    @property
    def chunks(self) -> StorageLayout:
        """How storage groups the samples into chunks, and how they are read.

        Unless overridden: each sample is stored alone and read by Python code, which would hold the GIL against the
        training loop, so a reader process reads it. A `read_into` that releases the GIL says so here:
        ``StorageLayout(reading="copied")`` if it copies from memory or from one file, ``"opened"`` if it opens a file
        for each sample, ``"decoded"`` if it decodes.
        """
        return StorageLayout(reading="python")

    def layout(self) -> StorageLayout:
        """As `chunks`, which it is unless overridden, but it may examine every sample to find chunks."""
        return self.chunks

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Find where samples are stored, by the numbers that `ids` gives. The row in its part, unless overridden.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        samples = whole_numbers(ids, self)
        check_range(samples, self)
        parts = self.parts
        starts_of = starts([part.samples for part in parts])
        which = np.searchsorted(starts_of, samples, side="right") - 1
        pairs = zip(which.tolist(), (samples - starts_of[which]).tolist(), strict=True)
        return [Location(parts[part].file, parts[part].group, row) for part, row in pairs]

    @property
    def repeats(self) -> bool:
        """Whether a sample occurs twice, as in a subset that lists it twice; both draw different random numbers."""
        return False

    def ids(self, samples: Indices) -> Indices:
        """The numbers that `locate` takes. A subset gives samples the numbers of the whole source."""
        return samples

    def fingerprint(self) -> dict[str, int | str]:
        """Facts by which a resumed run notices that the data are not those of its checkpoint.

        Numbers and short texts by name, found without reading samples; equal for copies of the data in other folders.
        Number of samples and fields, unless overridden.
        """
        return {"samples": len(self), "fields": str(self.spec)}

    # -- which samples belong together -------------------------------------------------------------------------------

    @property
    def parts(self) -> Sequence[Part]:
        """Consecutive samples that belong together, in sample order. One part without a name, unless overridden."""
        return (Part(self.name, "/", "", len(self)),)

    def places(self) -> Places:
        """Part and row of each sample: as `parts` say, unless overridden."""
        counts = [part.samples for part in self.parts]
        which = np.repeat(np.arange(len(counts)), counts)
        return Places(tuple(self.parts), which, np.arange(which.size) - starts(counts)[which]).distinct()

    def ranges_read(self, samples: Indices) -> Iterator[tuple[Indices, frozenset[Any], Indices, Indices]]:
        """Places in ``samples``, the data they read, and of these the first rows and ends; themselves by default."""
        yield np.arange(len(samples)), frozenset([id(self)]), samples, samples + 1

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
        """The group number of each sample, and the names of groups, which ``naming`` makes of the path of its file.

        None, unless overridden: samples have no files of their own, and are grouped by the files of their `parts`.
        """
        return None

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample, numbers or text; shape (len(self),).

        The name is a key of `spec` with one value per sample, which is read; or another column of the source.

        Raises:
            MissingError: The source has no such column.
        """
        flat = [key for key, field in self.spec.fields.items() if math.prod(field.shape) == 1]
        if name not in flat:
            listed = f"fields with one value per sample: {', '.join(flat) or 'none'}"
            raise MissingError(f"{self.name}: no field {name!r} with one value per sample; {listed}", dataset=name)
        return read_all(self, name).reshape(-1)

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same samples, with text numbered by given names, such as the classes of the training set, by batch key.

        Names that the user gave stay. Other text is a `FormatError`, in a table a `ManifestError`. This source, unless
        overridden: its numbers are stored.
        """
        return self

    # -- code of the user --------------------------------------------------------------------------------------------

    @property
    def runs_user_code(self) -> bool:
        """Whether code outside of this package reads the samples."""
        return not type(self).__module__.startswith("lit_async_data.")

    def count_changes(self) -> int:
        """How many calls of this found an attribute, or an object in one, changed; loaders call it before each pass.

        Each call compares with the call before; `Watch` says which changes are seen.
        """
        if not self.runs_user_code:
            return 0
        watch, count = vars(self).get("_watched") or (Watch(), 0)
        count += bool(watch.look(self))
        vars(self)["_watched"] = watch, count
        return count

    # -- random parts of samples -------------------------------------------------------------------------------------

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples as `read_into` does, but the part that each key selects, not the middle.

        Called if `chunks` has ``random=True``. Keys: uint64, shape (n,); equal keys select the same part of a sample.
        """
        self.read_into(samples, out)

    # -- reading ahead, if `chunks` has ``ahead=True`` ---------------------------------------------------------------

    def fetch(self, samples: Indices) -> bool:
        """Start to bring samples that will be read soon into memory; true if some of them were not there.

        `read_into` raises any error again.
        """
        return False

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        """Decode the chunks of samples that will be read soon, and cache them if there is room. Errors as in `fetch`.

        ``chunk_group`` is the epoch and number of their group of chunks; chunks of earlier groups are dropped first.
        None if the order has no groups.
        """

    def memory(self, chunks: int = 0) -> MemoryNeeds:
        """The memory that reading ahead needs, with this number of chunks in use at a time; 0 if no order needs any."""
        return MemoryNeeds()

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Reserve memory for reading ahead: decoded chunks in use at a time, and bytes for chunks that stay decoded.

        The function that is returned releases it, as its garbage collection does; further calls do nothing.
        """
        return lambda: None


def fill(source: Source, samples: Indices, out: Mapping[str, Array], keys: Words | None = None) -> None:
    """Read samples into arrays; a `ConfigError` if the source replaced or added an array, or returned a value."""
    given, name = dict(out), "read_into" if keys is None else "read_random"
    call: Callable[..., object] = getattr(source, name)
    returned = call(samples, given) if keys is None else call(samples, given, keys)
    did, empty = "" if returned is None else f"returned a {type(returned).__name__}", next(iter(out), "")
    for key in {**out, **given}:
        if given.get(key) is not out.get(key):
            did, empty = (f"replaced out[{key!r}]", key) if key in out else (f"added out[{key!r}]", empty)
    if did:
        what = f"{name} {did}; fill the arrays that are in out: out[{empty!r}][...] = values"
        raise ConfigError(what, place=type(source).__name__)


def read(source: Source, samples: Indices, keys: Iterable[str] | None = None) -> dict[str, Array]:
    """Stored values, by key."""
    out = source.spec.empty(len(samples), keys)
    fill(source, samples, out)
    return out


def read_all(source: Source, key: str) -> Array:
    values = source.spec.empty(len(source), [key])[key]
    for first in range(0, len(values), BLOCK_SAMPLES):
        block = values[first : first + BLOCK_SAMPLES]
        fill(source, first + np.arange(len(block)), {key: block})
    return values


def reserve_shares(sources: Sequence[Any], chunks: int, cache_bytes: int) -> contextlib.ExitStack:
    """`Source.reserve` of several; they share ``cache_bytes`` in proportion to the bytes that they decode."""
    sizes = [source.memory().cacheable for source in sources]
    with contextlib.ExitStack() as stack:  # releases the others if one raises
        for source, size in zip(sources, sizes, strict=True):
            stack.callback(source.reserve(chunks, cache_bytes * size // max(sum(sizes), 1)))
        return stack.pop_all()


def whole_numbers(given: Any, source: Source) -> Indices:
    numbers = np.asarray(given).reshape(-1)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise IndexError(f"sample numbers are whole numbers below {len(source)}, not {numbers[:1].tolist()[0]!r}")
    return numbers.astype(np.int64)


def check_range(samples: Indices, source: Source) -> None:
    # As unsigned integers, negative numbers are the largest: one comparison instead of two.
    if samples.size and samples.view(np.uint64).max() >= len(source):
        wrong = samples[(samples < 0) | (samples >= len(source))][0]
        raise IndexError(f"sample {wrong} of {len(source)} in {source.name}")


def renumbered(kept: int, count: int) -> str:
    """A line that says how many of ``count`` samples are left out; empty if all are kept."""
    if kept == count:
        return ""
    return f"{count - kept:,} of {count:,} samples are left out, and sample numbers (`index`) count the rest"


def described(source: Source, name: str, spec: BatchSpec) -> str:
    size, left_out = f"{len(source):,} ", source.chunks.left_out
    origin = f" from {name}" if name else ""
    samples = name if name.startswith(size) else f"{size}samples{origin}"
    return f"{samples}: {spec}{left_out and f'; {left_out}'}"
