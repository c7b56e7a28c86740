"""`PartFile`: the HDF5 file that is being written, from one commit to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import h5py
import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.sources.hdf5.storage.stored_chunk import write_chunk
from lit_async_data.tools.pack.planning.plan import PackedField, Piece, Plan
from lit_async_data.tools.pack.writing import writes
from lit_async_data.tools.pack.writing.journal import Commit, Journal
from lit_async_data.tools.pack.writing.staged_file import StagedFile

# HDF5 1.10 and later read it, and so do older programs, since it needs no newer feature.
VERSIONS = ("earliest", "v110")
SHUFFLE = h5py.h5z.FILTER_SHUFFLE


@dataclasses.dataclass
class Written:
    """What is written of one piece.

    Attributes:
        arrays: Values of contiguous datasets, by name in the section.
        chunks: Stored chunks of others.
        texts: Texts.
    """

    arrays: dict[str, Array] = dataclasses.field(default_factory=dict)
    chunks: dict[str, list[bytes]] = dataclasses.field(default_factory=dict)
    texts: dict[str, list[str]] = dataclasses.field(default_factory=dict)


class PartFile:
    """A file in the making. A crash at any moment leaves the state of the last commit. One thread at a time.

    Contiguous values are written to their place in the file, which is reserved when it is made. Chunks are appended by
    libhdf5, through a `StagedFile`.

    Args:
        path: The file.
        plan: What it holds.
        journal: Its commits.

    Raises:
        OSError: The file cannot be opened or written.
    """

    def __init__(self, path: str, plan: Plan, journal: Journal) -> None:
        self._plan, self._journal = plan, journal
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666), "r+b", 0)  # noqa: SIM115
        self._descriptor = self._file.fileno()
        self._staged: StagedFile | None = None
        self._h5: h5py.File | None = None
        self._datasets: dict[str, h5py.Dataset] = {}
        self._offsets: dict[str, int] = {}
        try:
            self._apply(journal.last or Commit(0, 0, {}))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _apply(self, commit: Commit) -> None:
        """Go to the state of a commit."""
        for at, page in commit.pages.items():
            writes.write_at(self._descriptor, page, at)
        writes.cut(self._descriptor, commit.end)
        self._end = commit.end

    # -- making it ---------------------------------------------------------------------------------------------------

    def make(
        self,
        attributes: Mapping[str, Mapping[str, Any]],
        columns: Mapping[str, Array],
        numbers: Mapping[str, np.dtype[Any]],
        texts: Sequence[str],
        whole: Mapping[str, Sequence[str]],
    ) -> None:
        """Make all datasets, and commit.

        Args:
            attributes: Of fields, by batch key, and of the file, by an empty key.
            columns: Further datasets of one value per sample.
            numbers: Names and types of further datasets that are written piece by piece.
            texts: Names of datasets of texts that are written piece by piece.
            whole: Texts that belong to the whole file, by name.
        """
        file = self._session("w")
        file.attrs.update(attributes.get("", {}))
        for name, listed in whole.items():
            file.create_dataset(name, data=list(listed), dtype=h5py.string_dtype())
        for section in self._plan.sections:
            group = file.require_group(section.group) if section.group else file
            for field in self._plan.fields:
                self._make_field(group, field, section.count, attributes.get(field.key, {}))
            for name, dtype in numbers.items():
                _make(group, name, dtype, (section.count,))
            for name in texts:
                group.create_dataset(name, (section.count,), h5py.string_dtype())
            for name, values in columns.items():
                _write_column(group, name, values[section.first : section.first + section.count])
        self.commit(0)

    def _make_field(self, group: h5py.Group, field: PackedField, rows: int, attributes: Mapping[str, Any]) -> None:
        holder = group
        if field.categorical:  # as AnnData stores categories
            holder = group.require_group(field.key)
            holder.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
            holder.create_dataset("categories", data=list(field.classes), dtype=h5py.string_dtype())
        filters: list[tuple[int, tuple[int, ...]]] = []
        if field.chunk:
            number, parameters = self._plan.codec.filter
            itemsize = np.dtype(field.dtype).itemsize
            filters += [(SHUFFLE, (itemsize,))] if field.shuffle else []
            filters.append((number, parameters))
        chunk = (min(field.chunk, rows), *field.shape) if field.chunk else None
        _make(group, field.dataset, np.dtype(field.dtype), (rows, *field.shape), chunk=chunk, filters=filters)
        (holder if field.categorical else group[field.key]).attrs.update(attributes)

    # -- filling it --------------------------------------------------------------------------------------------------

    def write(self, piece: Piece, written: Written) -> None:
        """Write a piece; it counts from the next commit on."""
        for name, values in written.arrays.items():
            full = piece.section.name(name)
            if full not in self._offsets:
                self._offsets[full] = self._dataset(full).id.get_offset()
            nbytes = values.nbytes // max(len(values), 1)
            writes.write_at(
                self._descriptor, values.reshape(-1).view(np.uint8), self._offsets[full] + piece.row * nbytes
            )
        for name, chunks in written.chunks.items():
            dataset = self._dataset(piece.section.name(name))
            assert dataset.chunks is not None
            rows, corner = dataset.chunks[0], [0] * (dataset.ndim - 1)
            for number, chunk in enumerate(chunks):
                write_chunk(dataset, (piece.row + number * rows, *corner), 0, chunk)
        for name, texts in written.texts.items():
            self._dataset(piece.section.name(name))[piece.row : piece.row + len(texts)] = texts

    def _dataset(self, name: str) -> h5py.Dataset:
        if name not in self._datasets:
            self._datasets[name] = cast(h5py.Dataset, self._session("r+")[name])
        return self._datasets[name]

    def _session(self, mode: str) -> h5py.File:
        if self._h5 is None:
            self._staged = StagedFile(self._descriptor, self._end)
            self._h5 = h5py.File(self._staged, mode, libver=VERSIONS)
        return self._h5

    def commit(self, samples: int) -> None:
        """Make everything so far the state to which a crash goes back.

        Args:
            samples: Samples that are packed.

        Raises:
            OSError: It cannot be written.
        """
        self._end_session()
        staged = self._staged
        end, pages = (self._end, {}) if staged is None else (staged.size, staged.pages())
        commit = Commit(samples, end, pages)
        # 1. What was appended is on the disk. 2. So is the journal, with what is to change in place. 3. The change
        # itself, which is on the disk before the next entry of the journal. Going back to this commit repeats it.
        writes.sync(self._descriptor)
        self._journal.add(commit)
        self._apply(commit)
        self._staged = None

    def _end_session(self) -> None:
        file, self._h5 = self._h5, None
        self._datasets.clear()
        if file is not None:
            file.close()
        if self._staged is not None and self._staged.failed:
            raise OSError("an earlier write failed")

    def sync(self) -> None:
        """Wait until the last commit is on the disk."""
        writes.sync(self._descriptor)

    def close(self) -> None:
        """Close the file. What was written since the last commit is lost."""
        if self._staged is not None:
            self._staged.failed = True  # no further write
        with contextlib.suppress(OSError, RuntimeError):
            self._end_session()
        self._file.close()


def _make(
    group: h5py.Group,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    *,
    chunk: tuple[int, ...] | None = None,
    filters: Sequence[tuple[int, tuple[int, ...]]] = (),
) -> None:
    """Make a dataset: contiguous, with its place in the file; or in chunks, whose filters libhdf5 need not know."""
    above, _, last = name.rpartition("/")
    holder = group.require_group(above) if above else group
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if chunk is None:
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    else:
        properties.set_chunk(chunk)
        for number, parameters in filters:
            properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, parameters)
    kind = h5py.h5t.py_create(dtype, logical=True)
    h5py.h5d.create(holder.id, last.encode(), kind, h5py.h5s.create_simple(shape), properties).close()


def _write_column(group: h5py.Group, name: str, values: Array) -> None:
    if values.dtype.kind in "OUS":
        texts = ["" if value is None else str(value) for value in values.tolist()]
        group.create_dataset(name, data=texts, dtype=h5py.string_dtype())
    else:
        group.create_dataset(name, data=values)
