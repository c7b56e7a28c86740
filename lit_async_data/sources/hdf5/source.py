"""`HDF5Source`: the samples of one or several HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.chunk_order import ChunkRun
from lit_async_data.errors import ConfigError, SourceError
from lit_async_data.permutation import Indices
from lit_async_data.sources.base import ChunkLayout, Location
from lit_async_data.sources.hdf5.chunked import ChunkedReader, H5pyBands, IndexedBands
from lit_async_data.sources.hdf5.dataset import StoredDataset
from lit_async_data.sources.hdf5.decoded import RecentBands, Room
from lit_async_data.sources.hdf5.index_cache import IndexCache
from lit_async_data.sources.hdf5.open_file import OpenFile, OpenFiles
from lit_async_data.sources.hdf5.part import check_same, look_at_file
from lit_async_data.sources.hdf5.raw import RawReader, lies_raw
from lit_async_data.sources.hdf5.readers import H5pyReader, Reader, StridedReader
from lit_async_data.sources.hdf5.selection import Path, chosen_fields, chosen_files, chosen_layouts
from lit_async_data.spec import BatchSpec

# Bytes of decoded bands that are kept for each field between batches, or two bands if those are larger: so that batches
# smaller than a band, read in order, decode it once.
RECENT_BYTES = 16 * 2**20
# What counts where fields are read in several ways: decoding is work that threads share, whatever waits beside it.
READING = ("copied", "locked", "decoded")


class HDF5Source:
    """Samples from datasets of HDF5 files, read where they lie. Safe to read from several threads.

    Args:
        path: A file, a glob such as ``"scans/*.h5"`` (in natural order), or a list of these; several files are parts of
            one dataset, one after the other.
        fields: What a batch holds. A mapping from batch key to dataset name gives dicts; a sequence of dataset names
            gives tuples, with the names as keys.
        layout: Letters of the stored axes, ``N`` for samples and ``C`` for channels: a string for the first field, or
            a mapping by batch key. Batches come out as N, then C, then the rest as stored. A field without one has its
            samples on axis 0, and nothing moves.
        index_cache: Where to keep the indexes of datasets of many chunks (`FEWEST_CHUNKS`), so that opening them again
            takes no time: ``"auto"`` for a hidden file beside the data, or in the user's cache folder if that cannot
            be written to; a folder; or False for nowhere.
        memory_map: Whether files may be mapped. Without, they are read by ``pread``, a little slower where samples are
            small, and what lies scattered by h5py; a file that another process truncates is then an error and not the
            end of this process.
        external: Whether datasets may take values from other files: virtual datasets, links into other files, values
            stored outside. These files must be there, and are read through h5py.

    Values are delivered as stored: uint8 stays uint8. Only integer fields without any axis but N become int64, which
    is what torch's losses take. Channels-last data are delivered as a view in that memory format; no byte is moved.

    Raises:
        MissingError: A file or dataset is not there.
        FormatError: A file is not HDF5, or a dataset cannot be a field.
        ConfigError: ``fields`` or ``layout`` do not fit the files, or ``index_cache`` is no folder.

    Example:
        >>> import h5py, numpy, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with h5py.File(folder.name + "/scan.h5", "w") as file:
        ...     file["data"] = numpy.zeros((10, 8, 8, 3), "u1")
        ...     file["labels"] = numpy.arange(10)
        >>> source = HDF5Source(folder.name + "/*.h5", fields={"x": "data", "y": "labels"}, layout={"x": "NHWC"})
        >>> len(source), source.spec["x"].shape, source.spec["y"].shape
        (10, (3, 8, 8), ())
        >>> source.locate([7])[0].row
        7
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: Path | Sequence[Path],
        fields: Mapping[str, str] | Sequence[str] = ("data", "labels"),
        *,
        layout: str | Mapping[str, str] | None = None,
        index_cache: Path | bool = "auto",
        memory_map: bool = True,
        external: bool = False,
    ) -> None:
        for name, given in {"memory_map": memory_map, "external": external}.items():
            if not isinstance(given, bool):
                raise ConfigError(f"{name}: {given!r} is not true or false")
        cache = IndexCache(index_cache)
        self.paths = chosen_files(path)
        names, as_mapping = chosen_fields(fields)
        layouts = chosen_layouts(layout, list(names))
        parts = [look_at_file(file, names, layouts, cache=cache, external=external) for file in self.paths]
        first = parts[0][1]
        for file, (_, datasets) in zip(self.paths, parts, strict=True):
            check_same(file, datasets, self.paths[0], first)
        self._spec = BatchSpec({key: stored.spec for key, stored in first.items()}, as_mapping=as_mapping)
        # starts[i] is the first sample of file i, and starts[-1] the length of the whole.
        self._starts = np.cumsum([0] + [next(iter(datasets.values())).rows for _, datasets in parts])
        self._identities = [identity for identity, _ in parts]
        self._datasets = [datasets for _, datasets in parts]
        self._widest = max(first, key=lambda key: first[key].spec.nbytes)
        self._memory_map = memory_map
        self._make_readers()

    def _make_readers(self) -> None:
        files = zip(self.paths, self._identities, self._datasets, strict=True)
        self._files = OpenFiles(
            [
                OpenFile(
                    path,
                    identity,
                    others=tuple({other for stored in datasets.values() for other in stored.others}),
                    mapped=self._memory_map,
                )
                for path, identity, datasets in files
            ]
        )
        self._recent, self._room = RecentBands(), Room()
        self._readers = [
            {key: self._reader(stored, self._files[part]) for key, stored in datasets.items()}
            for part, datasets in enumerate(self._datasets)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Not what holds maps, locks and decoded values: they stay where they are.
        return {
            name: value for name, value in vars(self).items() if name not in ("_files", "_recent", "_room", "_readers")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_readers()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __str__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}"

    @property
    def spec(self) -> BatchSpec:
        """Keys, shapes and dtypes of the fields."""
        return self._spec

    @property
    def chunks(self) -> ChunkLayout:
        """Which samples of the widest field lie together, and how all of them are read."""
        widest = [datasets[self._widest] for datasets in self._datasets]
        runs = tuple(ChunkRun(stored.rows, stored.chunk_rows) for stored in widest)
        return ChunkLayout(
            runs if any(run.rows > 1 for run in runs) else (),
            compressed=any(stored.filtered for stored in widest),
            reading=max((each.reading for part in self._readers for each in part.values()), key=READING.index),
        )

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays; see `Source.read_into`.

        Raises:
            IndexError: A sample is not in ``range(len(self))``.
            ChangedError: A file is not what it was when the source was built.
            CorruptError: Stored bytes do not decode.
        """
        self._check_range(samples)
        if not samples.size:
            return
        if len(self.paths) == 1:
            self._read_part(0, samples, out)
            return
        parts = self._parts(samples)
        for part in np.unique(parts).tolist():
            where = np.flatnonzero(parts == part)
            rows = samples[where] - self._starts[part]
            if len(where) == len(samples):
                self._read_part(part, rows, out)
                continue
            pieces = {key: np.empty((len(where), *array.shape[1:]), array.dtype) for key, array in out.items()}
            self._read_part(part, rows, pieces)
            for key, piece in pieces.items():
                out[key][where] = piece

    def _read_part(self, part: int, rows: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        try:
            with self._files.reading(part):
                for key, array in out.items():
                    self._readers[part][key].read(rows, array)
        except SourceError as error:
            if error.row is not None and error.sample_id is None:
                error.sample_id = int(self._starts[part]) + error.row
            raise

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """File, group and row of samples.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        numbers = np.asarray(ids)
        if numbers.dtype.kind not in "iu" and numbers.size:
            raise IndexError(f"sample numbers are whole numbers below {len(self)}, not {numbers.ravel()[0]!r}")
        samples = numbers.astype(np.int64)
        self._check_range(samples)
        parts = self._parts(samples)
        rows = samples - self._starts[parts]
        return [Location(self.paths[part], "/", row) for part, row in zip(parts.tolist(), rows.tolist(), strict=True)]

    def prepare(self, samples: Indices, *, decode: bool) -> bool:
        """Get ready what will be read soon; see `KeepingSource.prepare`."""
        self._check_range(samples)
        parts = self._parts(samples)
        useful = False
        for part in np.unique(parts).tolist():
            with self._files.reading(part):
                for reader in self._readers[part].values():
                    useful |= reader.prepare(samples[parts == part] - self._starts[part], decode=decode)
        return useful

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks that are held between batches; see `KeepingSource.decoded_bytes`."""
        return sum(self._decoded_bytes(key, chunks) for key in self._spec.fields)

    def _decoded_bytes(self, key: str, chunks: int) -> int:
        held = [readers[key] for readers in self._readers if readers[key].band_bytes]
        if not held:
            return 0
        band, whole = max(reader.band_bytes for reader in held), sum(reader.decodable_bytes for reader in held)
        if not chunks:
            return min(max(2 * band, RECENT_BYTES), whole)
        # A chunk of the widest field goes over this many of another one's.
        wide = max(datasets[self._widest].chunk_rows for datasets in self._datasets)
        over = 1 if key == self._widest else -(-wide // min(reader.rows for reader in held)) + 1
        return min(chunks * over * band, whole)

    @property
    def band_bytes(self) -> int:
        """Bytes of the largest chunk, decoded; see `KeepingSource.band_bytes`."""
        return max((reader.band_bytes for readers in self._readers for reader in readers.values()), default=0)

    @property
    def decodable_bytes(self) -> int:
        """Bytes of everything that must be decoded; see `KeepingSource.decodable_bytes`."""
        return sum(reader.decodable_bytes for readers in self._readers for reader in readers.values())

    def keep(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks; see `KeepingSource.keep`."""
        self._files.check_process()  # before any lock, which another thread may have held when this process was forked
        nbytes = self.decoded_bytes(chunks)
        self._recent.add_room(nbytes)
        self._room.add(cache_bytes)

        def give_back() -> None:
            self._recent.add_room(-nbytes)
            if self._room.add(-cache_bytes) < 0:
                self._forget()

        return give_back

    def close(self) -> None:
        """Close every file and let go of what was decoded. Reading opens them again."""
        if self._files.forked:
            return  # nothing here is this process's, and a lock may have been held when it was forked
        self._files.close()
        self._recent.clear()
        self._forget()

    def _forget(self) -> None:
        for readers in self._readers:
            for reader in readers.values():
                reader.forget()

    def _reader(self, stored: StoredDataset, file: OpenFile) -> Reader:
        """The fastest reader that reads a dataset right."""
        if lies_raw(stored):
            return RawReader(stored, file)
        if stored.offset is not None and file.mapped:
            return StridedReader(stored, file)
        if stored.index is not None:
            return ChunkedReader(stored, IndexedBands(stored, stored.index, file), self._recent, self._room)
        if stored.filtered:
            return ChunkedReader(stored, H5pyBands(stored, file), self._recent, self._room)
        return H5pyReader(stored, file)

    def _check_range(self, samples: Indices) -> None:
        # As unsigned numbers those below 0 are the greatest: one look instead of two.
        if samples.size and samples.view(np.uint64).max() >= len(self):
            bad = samples[(samples < 0) | (samples >= len(self))][0]
            raise IndexError(f"sample {bad} of {len(self)} in {self}")

    def _parts(self, samples: Indices) -> Indices:
        """The number of the file that each sample is in."""
        return np.searchsorted(self._starts, samples, side="right") - 1
