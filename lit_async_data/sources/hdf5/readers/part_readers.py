"""`PartReaders`: reads samples of all parts of a source, and keeps what it decodes of them."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import SourceError
from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Reading, Turn, slowest
from lit_async_data.sources.hdf5.readers.chunk_cache import ByteBudget, DecodedChunkCache
from lit_async_data.sources.hdf5.readers.decode_memory import DecodeMemory
from lit_async_data.sources.hdf5.readers.part_reader import PartReader
from lit_async_data.sources.hdf5.schema.chunk_grouping import ChunkGrouping
from lit_async_data.sources.hdf5.schema.part import StoredPart
from lit_async_data.sources.hdf5.storage.failures import source_error
from lit_async_data.sources.hdf5.storage.identity import FileIdentity
from lit_async_data.sources.hdf5.storage.open_file import OpenFile
from lit_async_data.sources.hdf5.storage.open_files import OpenFiles
from lit_async_data.sources.room import Giver

# Bytes of samples of one part that are read aside at a time, before they go to their places in the batch.
BLOCK_BYTES = 2**20


class PartReaders:
    """Reads samples of all parts. Safe from several threads.

    Args:
        stored: The parts.
        files: The identity of each file, by its path.
        lies: How samples of the widest field lie.
        widest: Its key.
        mapped: Whether files may be mapped.

    Attributes:
        parts: The reader of each part.
        holding: What decoded chunks take.
        starts: The first sample of each part, and the end of the last.
    """

    def __init__(
        self,
        stored: Sequence[StoredPart],
        files: Mapping[str, FileIdentity],
        lies: ChunkGrouping,
        widest: str,
        *,
        mapped: bool,
    ) -> None:
        self._stored = stored
        self.starts = np.cumsum([0] + [part.anchors.count for part in stored])
        others: dict[str, set[Any]] = {path: set() for path in files}
        for part in stored:
            others[part.path].update(part.others)
        numbers = {path: number for number, path in enumerate(files)}
        self._file_of = [numbers[part.path] for part in stored]
        self._files = OpenFiles(
            [OpenFile(path, identity, others=tuple(others[path]), mapped=mapped) for path, identity in files.items()]
        )
        # One for each dataset: bands of labels, wanted again and again, are not to go because those of images come.
        self.recent: collections.defaultdict[str, DecodedChunkCache] = collections.defaultdict(DecodedChunkCache)
        self._room = ByteBudget()
        self.parts = [
            PartReader(part, self._files[number], self.recent, self._room)
            for part, number in zip(stored, self._file_of, strict=True)
        ]
        self.holding = DecodeMemory(self.parts, lies, stored, widest)
        self._layout = None if lies.bands == 1 else ChunkExtents(lies.runs)

    @property
    def reading(self) -> Reading:
        """How they are read, over all fields; as in `StorageLayout`."""
        return slowest(how for part in self.parts for how in part.reading)

    def read(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples, of which there is at least one, into arrays; see `Source.read_into`."""
        if len(self._stored) == 1:
            self._read_part(0, samples, out)
            return
        sample_bytes = sum(array.nbytes for array in out.values()) // len(samples)
        block = max(BLOCK_BYTES // max(sample_bytes, 1), 1)
        pieces: dict[str, npt.NDArray[Any]] = {}
        for part, where in self.by_part(samples):
            if len(where) == len(samples):
                self._read_part(part, samples, out)
                return
            # Taken once for all parts: memory that is fresh from the system costs more than the copy.
            if not pieces:
                pieces = {key: np.empty_like(array[:block]) for key, array in out.items()}
            # In the order in which they lie, if in several blocks: a chunk that samples share is then decoded once.
            order = where[np.argsort(samples[where], kind="stable")] if len(where) > block else where
            for first in range(0, len(order), block):
                places = order[first : first + block]
                some = {key: piece[: len(places)] for key, piece in pieces.items()}
                self._read_part(part, samples[places], some)
                for key, piece in some.items():
                    out[key][places] = piece

    def _neighbours(self, samples: Indices) -> Indices:
        """These samples, with all that lie together with them, if those may take other chunks."""
        if self._layout is None:
            return samples
        firsts, counts = self._layout.extents(np.unique(self._layout.chunks_of(samples)))
        ends = np.cumsum(counts)
        found: Indices = np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)
        return found

    def by_part(self, samples: Indices) -> Iterator[tuple[int, Indices]]:
        """The parts that samples are in, each with the places of its samples among them."""
        parts = np.searchsorted(self.starts, samples, side="right") - 1
        order = np.argsort(parts, kind="stable")
        ordered = parts[order]
        edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(parts)]
        for begin, end in itertools.pairwise(edges):
            yield int(ordered[begin]), order[begin:end]

    def _read_part(self, part: int, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        own = samples - self.starts[part]
        try:
            with self._files.used(self._file_of[part]):
                self.parts[part].read(own, out)
        except SourceError as error:
            if error.row is not None and error.sample_id is None:
                found = self._stored[part].sample(error.dataset, error.row, own)
                error.sample_id = None if found is None else int(self.starts[part]) + found
            raise
        except (OSError, MemoryError) as error:
            raise self._unreadable(part, error) from error

    def _unreadable(self, part: int, error: BaseException) -> SourceError:
        path = self._stored[part].path
        return source_error(error, path, "cannot be read", file=path)

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Get ready what will be read soon of samples, of which there is at least one; see `CachingSource.prepare`."""
        if decode:
            samples = self._neighbours(samples)
        useful = False
        for part, where in self.by_part(samples) if samples.size else ():
            try:
                with self._files.used(self._file_of[part]):
                    useful |= self.parts[part].prepare(samples[where] - self.starts[part], decode=decode)
            except (OSError, MemoryError) as error:
                raise self._unreadable(part, error) from error
        return useful

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks; see `CachingSource.reserve`."""
        self._files.check_process()  # before any lock, which another thread may have held when this process was forked
        rooms, giver = self.holding.room(chunks), Giver()
        give_back = functools.partial(self._take_back, giver, list(rooms))
        try:
            for name, nbytes in rooms.items():
                self.recent[name].set_room(giver, nbytes)
            self._room.set_room(giver, cache_bytes)
        except BaseException:
            give_back()
            raise
        return give_back

    def _take_back(self, giver: Giver, names: list[str]) -> None:
        for name in names:
            self.recent[name].set_room(giver, 0)
        if self._room.set_room(giver, 0) < 0:
            self._forget()

    def close(self) -> None:
        """Close every file and let go of what was decoded. Reading opens them again."""
        if self._files.forked:
            return  # nothing here is this process's, and a lock may have been held when it was forked
        self._files.close()
        for recent in self.recent.values():
            recent.clear()
        self._forget()

    def _forget(self) -> None:
        for part in self.parts:
            part.forget()
