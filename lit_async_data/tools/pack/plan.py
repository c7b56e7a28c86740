"""`Plan`: the datasets of the packed file, how each is stored, as a trial tells, and the pieces that are written."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Self

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.hdf5.schema.conversion import PACKING
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.codecs import DEFLATE
from lit_async_data.sources.hdf5.storage.extra_codecs import LZ4, ZSTD
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py

# Bytes of samples that a thread reads and compresses at a time; and the most, where the chunks of the input need more.
PIECE_BYTES, MOST_PIECE_BYTES = 4 * 2**20, 64 * 2**20
# The group of the sections, where the parts of the input stay apart.
PARTS = "parts"
# The number and the level of the HDF5 filter that undoes each codec.
FILTERS = {"deflate": (DEFLATE, 6), "zstd": (ZSTD, 3), "lz4": (LZ4, 0)}
NAMES = ("none", *FILTERS)
# A sample of this size has a chunk of its own: any order decodes exactly what it needs. Smaller ones share chunks.
ALONE_BYTES, CHUNK_BYTES = 4096, 64 * 1024
# Smaller samples, such as labels, are never compressed; nor are chunks that only libhdf5 could read.
LEAST_BYTES, MOST_CHUNK_BYTES = 64, 2**30
# ``auto`` compresses a field if that saves this share of its bytes; the shuffle filter must save another share.
LEAST_SAVED, SHUFFLE_SAVED = 1 / 3, 0.02
# The trial reads the input at several places: bytes at each, samples at each, number of places.
TRIAL_BYTES, TRIAL_SAMPLES, TRIAL_PLACES = 512 * 1024, 128, 8


@dataclasses.dataclass(frozen=True)
class PackedField:
    key: str  # also the name of the dataset
    shape: tuple[int, ...]  # of a stored sample
    dtype: np.dtype[np.generic]
    channel: int | None  # axis of the stored sample
    classes: tuple[str, ...]
    packing: Mapping[str, Any]  # attributes that say how to unpack the values (NetCDF)
    missing: bool = False  # whether it is stored as codes of which some are −1, for no class
    chunk: int = 0  # samples per chunk; 0 if it is contiguous
    shuffle: bool = False

    @property
    def categorical(self) -> bool:
        """Whether it is stored as codes and categories, which `HDF5Source` takes class names from."""
        return bool(self.classes) and not self.shape

    @property
    def dataset(self) -> str:
        return f"{self.key}/codes" if self.categorical else self.key

    @property
    def layout(self) -> str | None:
        """The letters of its axes; None if `HDF5Source` needs none."""
        if self.channel is None:
            return None
        letters = "HWDTABEFGIJKLMOPQRSUVXYZ"[: len(self.shape) - 1]
        return f"N{letters[: self.channel]}C{letters[self.channel :]}"

    def given(self, *, unpacked: bool = False) -> str | dict[str, Any]:
        """The field as `HDF5Source` takes it."""
        classes = {} if self.categorical or not self.classes else {"classes": list(self.classes)}
        null = {"null": "ignore"} if self.missing else {}
        options = classes | null | ({"mask_and_scale": True} if unpacked else {})
        return {"name": self.key, **options} if options else self.key


class Piece(NamedTuple):
    """Samples that one thread reads and compresses."""

    group: str  # of their datasets; empty for the root
    rows: int  # of these datasets
    row: int  # of the first sample
    samples: Indices


@dataclasses.dataclass(frozen=True)
class Plan:
    fields: Sequence[PackedField]
    codec: str  # of the fields that have chunks
    sections: Sequence[tuple[str, int]]  # groups and their numbers of samples; one without a name is the root
    step: int  # samples per piece: whole chunks of the output, and of the input where these are not too large

    @classmethod
    def of(cls, source: Source, codec: str, chunk: int | None, *, keep_parts: bool) -> Self:
        fields, codec = _chosen(source, codec, chunk)
        sections = [("", len(source))]
        if keep_parts:
            sections = [(f"{PARTS}/{number}", part.samples) for number, part in enumerate(source.parts)]
        own, nbytes = max(1, *(field.chunk for field in fields)), max(source.spec.nbytes, 1)
        both = math.lcm(own, source.chunks.rows)
        step = both if both * nbytes <= MOST_PIECE_BYTES else own
        return cls(fields, codec, sections, max(PIECE_BYTES // nbytes // step, 1) * step)

    @property
    def source_options(self) -> dict[str, Any]:
        layout = {field.key: field.layout for field in self.fields if field.layout is not None}
        return ({"layout": layout} if layout else {}) | ({"group": f"{PARTS}/*"} if self.sections[0][0] else {})

    def pieces(self) -> Iterator[Piece]:
        begins = itertools.accumulate((rows for _, rows in self.sections), initial=0)
        for (group, rows), begin in zip(self.sections, begins, strict=False):
            for row in range(0, rows, self.step):
                yield Piece(group, rows, row, np.arange(begin + row, begin + min(row + self.step, rows)))


def _chosen(source: Source, codec: str, chunk: int | None) -> tuple[list[PackedField], str]:
    """The fields with their chunks, and the codec of those."""
    auto, fields = codec == "auto", _contiguous(source)
    if auto:  # contiguous, if the input need not be decoded either
        codec = "none" if chunk is None and source.chunks.reading in ("copied", "opened") else "deflate"
    _check(codec, chunk)
    rows = [0 if codec == "none" else _rows(field, chunk, auto=auto) for field in fields]
    run = int(np.clip(TRIAL_BYTES // max(source.spec.nbytes, 1), 1, min(TRIAL_SAMPLES, len(source))))
    starts = np.linspace(0, len(source) - run, TRIAL_PLACES).astype(np.int64)
    tried = read(source, np.unique(starts[:, None] + np.arange(run))) if any(rows) else {}
    for number, (field, count) in enumerate(zip(fields, rows, strict=True)):
        if count:
            values = tried[field.key].astype(field.dtype, copy=False)
            chunks = [values[at : at + count] for at in range(0, len(values), count)]
            plain, shuffled = (sum(len(encoded(each, codec, shuffle=how)) for each in chunks) for how in (False, True))
            shuffle = shuffled < (1 - SHUFFLE_SAVED) * plain
            if not auto or (shuffled if shuffle else plain) <= (1 - LEAST_SAVED) * values.nbytes:
                fields[number] = dataclasses.replace(field, chunk=count, shuffle=shuffle)
    return fields, codec


def _rows(field: PackedField, chunk: int | None, *, auto: bool) -> int:
    nbytes = math.prod(field.shape) * field.dtype.itemsize
    if nbytes < LEAST_BYTES or nbytes * (chunk or 1) > MOST_CHUNK_BYTES:
        return 0
    several = 0 if auto else 2 ** (CHUNK_BYTES // nbytes).bit_length() // 2
    return chunk or (1 if nbytes >= ALONE_BYTES else several)


def _contiguous(source: Source) -> list[PackedField]:
    """The fields of a source, contiguous, with the element types of the input."""
    packings, fields = _packings(source) if isinstance(source, HDF5Source) else {}, list[PackedField]()
    for key, each in source.spec.fields.items():
        dtype, classes = _element_type(source, key), each.classes or each.texts
        missing = bool(classes) and not each.shape and bool((source.column(key) == IGNORED).any())
        dtype = np.min_scalar_type(-len(classes)) if missing else dtype
        fields.append(PackedField(key, each.stored_shape, dtype, each.channel, classes, packings.get(key, {}), missing))
    return fields


def _element_type(source: Source, key: str) -> np.dtype[np.generic]:
    """That of the input, where sources deliver whole numbers as int64; the smallest that holds all classes."""
    field = source.spec[key]
    if field.classes and not field.shape:
        return np.min_scalar_type(max(len(field.classes) - 1, 1))
    if isinstance(source, HDF5Source) and not field.shape and field.dtype.kind in "iu":
        stored = [part.fields[key] for part in source.stored_parts]
        if all(each.plain and each.lengths is None for each in stored):
            return np.result_type(*(each.values.dtype.newbyteorder("=") for each in stored))
    return field.dtype


def _packings(source: HDF5Source) -> dict[str, dict[str, Any]]:
    """The fields whose values stay packed (NetCDF), with the attributes that say how, alike in all files."""
    parts, packings = source.stored_parts, dict[str, dict[str, Any]]()
    keys = {key for part in parts for key, field in part.fields.items() if field.packed}
    for part in parts if keys else ():
        with as_source_errors(part.path, "cannot be read", file=part.path), open_h5py(part.path) as file:
            for key in keys:
                name = part.fields[key].stored.name
                found: Any = file[name].attrs
                packing = {each: found[each] for each in PACKING if each in found}
                first = packings.setdefault(key, packing)
                as_bytes = [{name: np.asarray(each[name]).tobytes() for name in each} for each in (first, packing)]
                if as_bytes[0] != as_bytes[1]:
                    raise ConfigError(
                        f"{key} is packed in another way in {part} than in {parts[0]}; pack unpacked values, "
                        f"in Python: from lit_async_data.tools.pack.packing import pack; pack(HDF5Source(…, {{{key!r}: "
                        f"Field({name!r}, mask_and_scale=True)}}), OUT)",
                        "fields",
                    )
    return packings


def _check(codec: str, chunk: int | None) -> None:
    if codec not in NAMES:
        raise ConfigError(f"{codec!r} is not one of auto, {', '.join(NAMES)}", "codec")
    try:
        encoded(np.zeros(1), codec, shuffle=False)
    except ImportError:
        raise ConfigError(f"{codec} needs a library: pip install 'lit-async-data[codecs]'", "codec") from None
    if chunk is not None and (chunk < 1 or codec == "none"):
        what = "is not a number of samples from 1 on" if chunk < 1 else "but without a codec, values are contiguous"
        raise ConfigError(f"{chunk} {what}; leave it out", "chunk")


def encoded(values: Array, codec: str, *, shuffle: bool) -> bytes:
    """The stored bytes of a C-contiguous chunk, made without libhdf5, its lock and the GIL."""
    data: Any = values.reshape(-1).view(np.uint8)
    if shuffle:
        data = np.ascontiguousarray(data.reshape(-1, values.itemsize).T).reshape(-1)
    if codec == "zstd":
        return bytes(import_module("imagecodecs").zstd_encode(data, level=FILTERS[codec][1]))
    if codec == "lz4":
        return bytes(import_module("imagecodecs").lz4h5_encode(data))
    try:
        return bytes(data if codec == "none" else import_module("deflate").zlib_compress(data, FILTERS[codec][1]))
    except ImportError:
        return zlib.compress(data, FILTERS[codec][1])
