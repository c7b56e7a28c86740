"""`HDF5Source`: the samples of one or several HDF5 files."""

from __future__ import annotations

import collections
import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, FormatError, MissingError, SourceError
from lit_async_data.permutation import Indices
from lit_async_data.sources.base import ChunkLayout, Location
from lit_async_data.sources.hdf5.chunked import ChunkedReader
from lit_async_data.sources.hdf5.dataset import FileIdentity, StoredDataset, look_at
from lit_async_data.sources.hdf5.index_cache import IndexCache
from lit_async_data.sources.hdf5.readers import ContiguousReader, H5pyReader, OpenFile, Reader
from lit_async_data.spec import BatchSpec

Path = str | os.PathLike[str]


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
    ) -> None:
        cache = IndexCache(index_cache)
        self.paths = _files(path)
        names, as_mapping = _names(fields)
        layouts = _layouts(layout, list(names))
        parts = [_look_at_file(file, names, layouts, cache) for file in self.paths]
        first = parts[0][1]
        for file, (_, datasets) in zip(self.paths, parts, strict=True):
            _check_same(file, datasets, self.paths[0], first)
        self._spec = BatchSpec({key: stored.spec for key, stored in first.items()}, as_mapping=as_mapping)
        # starts[i] is the first sample of file i, and starts[-1] the length of the whole.
        self._starts = np.cumsum([0] + [next(iter(datasets.values())).rows for _, datasets in parts])
        self._files = [OpenFile(file, identity) for file, (identity, _) in zip(self.paths, parts, strict=True)]
        self._datasets = [datasets for _, datasets in parts]
        self._readers = self._new_readers()
        widest = max(first, key=lambda key: first[key].spec.nbytes)
        self._chunks = ChunkLayout(rows=max(datasets[widest].chunk_rows for _, datasets in parts))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_readers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._readers = self._new_readers()  # they hold maps and locks, which stay where they are

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
        """Samples of the widest field that are decoded together."""
        return self._chunks

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays; see `Source.read_into`.

        Raises:
            IndexError: A sample is not in ``range(len(self))``.
            ChangedError: A file is not what it was when the source was built.
            CorruptError: Stored bytes do not decode.
        """
        parts, rows = self._rows(samples)
        for part in [0] if len(self._files) == 1 else np.unique(parts).tolist():
            where = np.flatnonzero(parts == part)
            try:
                with self._files[part].reading():
                    self._read_part(part, rows, where, out)
            except SourceError as error:
                if error.row is not None and error.sample_id is None:
                    error.sample_id = int(self._starts[part]) + error.row
                raise

    def _read_part(self, part: int, rows: Indices, where: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        for key, array in out.items():
            reader = self._readers[part][key]
            if len(where) == len(rows):
                reader.read(rows, array)
            else:
                piece = np.empty((len(where), *array.shape[1:]), array.dtype)
                reader.read(rows[where], piece)
                array[where] = piece

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """File, group and row of samples.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        numbers = np.asarray(ids)
        if numbers.dtype.kind not in "iu" and numbers.size:
            raise IndexError(f"sample numbers are whole numbers below {len(self)}, not {numbers.ravel()[0]!r}")
        parts, rows = self._rows(numbers.astype(np.int64))
        return [Location(self.paths[part], "/", row) for part, row in zip(parts.tolist(), rows.tolist(), strict=True)]

    def close(self) -> None:
        """Close every file. Reading opens them again."""
        for file in self._files:
            file.close()
        self._readers = self._new_readers()  # the old ones hold maps

    def _new_readers(self) -> list[dict[str, Reader]]:
        return [
            {key: _reader(stored, file) for key, stored in datasets.items()}
            for file, datasets in zip(self._files, self._datasets, strict=True)
        ]

    def _rows(self, samples: Indices) -> tuple[Indices, Indices]:
        if samples.size and (samples.min() < 0 or samples.max() >= len(self)):
            bad = samples[(samples < 0) | (samples >= len(self))][0]
            raise IndexError(f"sample {bad} of {len(self)} in {self}")
        if len(self._files) == 1:
            return np.zeros_like(samples), samples
        parts = np.searchsorted(self._starts, samples, side="right") - 1
        return parts, samples - self._starts[parts]


def _reader(stored: StoredDataset, file: OpenFile) -> Reader:
    """The fastest reader that reads a dataset right."""
    if stored.offset is not None:
        return ContiguousReader(stored, file)
    return H5pyReader(stored, file) if stored.index is None else ChunkedReader(stored, stored.index, file)


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts scan2 before scan10."""
    return [(piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in re.split(r"(\d+)", path)]


def _files(path: Path | Sequence[Path]) -> list[str]:
    given: Any = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, Sequence) or not given or not all(p and isinstance(p, str | os.PathLike) for p in given):
        raise ConfigError(f"path: {path!r} is not a file, a glob or a list of these")
    files = []
    for item in [
        os.path.abspath(os.path.expanduser(item)) for item in given
    ]:  # absolute: the source may outlive the working folder
        found = sorted(glob.glob(item), key=_natural) if glob.has_magic(item) and not os.path.exists(item) else [item]
        if not found:
            raise MissingError(f"{item} matches no file", file=item)
        files += found
    twice = sorted(file for file, times in collections.Counter(files).items() if times > 1)
    if twice:
        raise ConfigError(f"path: {twice[0]} is named twice; its samples would count double")
    return files


def _names(fields: Mapping[str, str] | Sequence[str]) -> tuple[dict[str, str], bool]:
    as_mapping = isinstance(fields, Mapping)
    names = dict(fields) if isinstance(fields, Mapping) else {}
    if not as_mapping and isinstance(fields, Sequence) and not isinstance(fields, str):
        names = {str(name): name for name in fields}
        if len(names) < len(fields):
            raise ConfigError(f"fields: {list(fields)} names a dataset twice; a mapping gives each a key of its own")
    if not names or not all(isinstance(n, str) and n for pair in names.items() for n in pair):
        raise ConfigError(f"fields: {fields!r} is not a mapping from batch key to dataset name or a list of names")
    return names, as_mapping


def _layouts(layout: str | Mapping[str, str] | None, keys: list[str]) -> dict[str, str]:
    if not isinstance(layout, str | Mapping | None):
        raise ConfigError(f"layout: {layout!r} is neither letters nor a mapping from batch key to letters")
    layouts = {keys[0]: layout} if isinstance(layout, str) else dict(layout or {})
    for key in layouts:
        if key not in keys:
            raise ConfigError(f"layout: {key!r} is not one of the fields {', '.join(keys)}")
    return layouts


def _look_at_file(
    path: str, names: dict[str, str], layouts: dict[str, str], cache: IndexCache
) -> tuple[FileIdentity, dict[str, StoredDataset]]:
    if not os.path.exists(path):
        raise MissingError(f"{path}: there is no such file", file=path)
    if not os.path.isfile(path):
        what = f"a folder; for all files in it write {path}/*.h5" if os.path.isdir(path) else "no regular file"
        raise FormatError(f"{path} is {what}", file=path)
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            identity = FileIdentity.of(os.stat(path))
            datasets = {key: look_at(file, path, name, layouts.get(key), cache) for key, name in names.items()}
    except OSError as error:
        what = "is not an HDF5 file, or is damaged" if os.access(path, os.R_OK) else "may not be read"
        if "unable to lock" in str(error) or "already open for write" in str(error):
            what = "is open for writing in another process; wait until it is closed"
        raise FormatError(f"{path} {what}: {error}", file=path) from error
    lengths = {key: stored.rows for key, stored in datasets.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{datasets[key].name} has {n}" for key, n in lengths.items())
        raise FormatError(
            f"{path}: the fields are of different lengths: {said}; is layout right about their N?", file=path
        )
    return identity, datasets


def _check_same(path: str, datasets: dict[str, StoredDataset], first: str, model: dict[str, StoredDataset]) -> None:
    for key, stored in datasets.items():
        if stored.spec != model[key].spec:
            mine, other = stored.spec, model[key].spec
            raise FormatError(
                f"{stored} has samples of {mine.dtype} {mine.shape}, but in {first} they are {other.dtype} "
                f"{other.shape}; files of one source must agree",
                file=path,
                dataset=stored.name,
            )
