"""`Writer` makes the datasets of a packed file, and fills them: threads encode pieces, one thread writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import FormatError
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.hdf5.storage.stored_chunk import write_chunk
from lit_async_data.tools.pack.plan import FILTERS, PackedField, Piece, Plan, encoded

TEXT = h5py.string_dtype()


class Writer:
    """Writes the samples of a source, where each comes from, and columns, into an empty file."""

    def __init__(self, file: h5py.File, source: Source, plan: Plan, columns: Mapping[str, Array]) -> None:
        self._file, self._source, self._plan = file, source, plan
        parts = dict.fromkeys((part.file, part.group.strip("/")) for part in source.parts)
        self._parts = {part: number for number, part in enumerate(parts)}
        first: Any = source.locate(source.ids(np.zeros(1, np.int64)))[0]
        self._texts = [name for name in ("id", "path") if getattr(first, name, None) is not None]
        file.create_dataset(
            "origin/parts", data=[f"{name}:/{group}".removesuffix(":/") for name, group in parts], dtype=TEXT
        )
        begin = 0
        for group, rows in plan.sections:
            holder = file.require_group(group or "/")
            for field in plan.fields:
                self._make(holder, field, rows)
            for name, kind in {"part": np.int32, "row": np.int64, **dict.fromkeys(self._texts, TEXT)}.items():
                holder.create_dataset(f"origin/{name}", (rows,), kind)
            for name, values in columns.items():
                dtype = TEXT if values.dtype == object else values.dtype
                holder.create_dataset(name, data=values[begin : begin + rows], dtype=dtype)
            begin += rows

    def _make(self, holder: h5py.Group, field: PackedField, rows: int) -> None:
        """Make a dataset: contiguous; or in chunks, whose filters libhdf5 need not know."""
        if field.categorical:  # as AnnData stores categories
            group = holder.require_group(field.key)
            group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
            group.create_dataset("categories", data=list(field.classes), dtype=TEXT)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if field.chunk:
            properties.set_chunk((min(field.chunk, rows), *field.shape))
            if field.shuffle:
                properties.set_shuffle()
            number, level = FILTERS[self._plan.codec]
            properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, (level,))
        kind, space = h5py.h5t.py_create(field.dtype, logical=True), h5py.h5s.create_simple((rows, *field.shape))
        above, _, name = field.dataset.rpartition("/")
        h5py.h5d.create(holder.require_group(above or holder.name).id, name.encode(), kind, space, properties).close()
        holder[field.key].attrs.update(field.packing)

    def encoded(self, piece: Piece) -> dict[str, Any]:
        """Read a piece, and turn it into values and lists of stored chunks, by dataset. In any thread."""
        values, found = read(self._source, piece.samples), dict[str, Any]()
        for field in self._plan.fields:
            stored = _stored(values.pop(field.key), field, piece)
            if field.chunk:
                rows = min(field.chunk, piece.rows)
                missing = np.zeros((-len(stored) % rows, *field.shape), field.dtype)  # all chunks are equally long
                stored = np.concatenate([stored, missing]) if len(missing) else stored
                chunks = (stored[row : row + rows] for row in range(0, len(stored), rows))
                found[field.dataset] = [encoded(chunk, self._plan.codec, shuffle=field.shuffle) for chunk in chunks]
            else:
                found[field.dataset] = stored
        places: Any = self._source.locate(self._source.ids(piece.samples))
        numbers = self._parts  # a part of groups that are samples is named *
        groups = [((each.file, each.group.strip("/")), (each.file, "*")) for each in places]
        found["origin/part"] = [numbers.get(own, numbers.get(every, -1)) for own, every in groups]
        found["origin/row"] = [each.row for each in places]
        for name in self._texts:  # bytes of a file name that are no text are spelled out
            texts = (getattr(each, name) or "" for each in places)
            found[f"origin/{name}"] = [text.encode(errors="backslashreplace").decode() for text in texts]
        return found

    def write(self, piece: Piece, stored: dict[str, Any]) -> None:
        group: Any = self._file[piece.group or "/"]
        for name, values in stored.items():
            dataset: Any = group[name]
            if dataset.chunks is None:
                dataset[piece.row : piece.row + len(piece.samples)] = values
                continue
            for number, chunk in enumerate(values):
                corner = (piece.row + number * dataset.chunks[0], *[0] * (dataset.ndim - 1))
                write_chunk(dataset, corner, 0, chunk)


def _stored(values: Array, field: PackedField, piece: Piece) -> Array:
    outside = (values < 0) | (values >= len(field.classes)) if field.categorical else np.zeros(1, bool)
    if outside.any():
        sample = int(piece.samples[outside.argmax()])
        where = f"{field.key}, sample {sample}: {values[outside][0]} is none of its {len(field.classes)} classes"
        raise FormatError(f"{where}; leave such samples out", dataset=field.key, sample_id=sample)
    return values.astype(field.dtype, copy=False)
