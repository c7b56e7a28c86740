"""One dataset of one file, looked at through h5py: `StoredDataset`, all that a reader needs to know."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import os
from typing import Any

import h5py
import numpy as np

from lit_async_data.errors import ConfigError, FormatError, MissingError
from lit_async_data.sources.hdf5.codecs import filters_of
from lit_async_data.sources.hdf5.identity import Others, other_files
from lit_async_data.sources.hdf5.index import MISSING, ChunkIndex, index_of, lies_as_numpy, refusal
from lit_async_data.sources.hdf5.index_cache import IndexCache
from lit_async_data.spec import TENSOR_TYPES, FieldSpec

log = logging.getLogger(__name__)

# Values at either end that are read both ways before an offset is believed.
PROVED = 512
# Names shown when one was not found.
NAMES_SHOWN = 12


@dataclasses.dataclass(frozen=True)
class StoredDataset:
    """One field of one file.

    Attributes:
        path: The file.
        name: The dataset in it.
        shape: As stored.
        dtype: As stored, byte order included.
        axis: Which stored axis counts the samples.
        spec: The field as it is delivered.
        offset: Byte of the file at which the raw values begin, if they lie there in one piece; else None.
        chunk_rows: Samples that lie in one chunk; 1 if it is not chunked.
        filtered: Whether chunks can only be decoded as a whole.
        index: Where its chunks lie, if they may be read without libhdf5; else None.
        others: Other files that values lie in.
        slow: Why h5py must read it, one thread at a time; None where it need not.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int
    spec: FieldSpec
    offset: int | None
    chunk_rows: int
    filtered: bool
    index: ChunkIndex | None = dataclasses.field(default=None, compare=False)
    others: Others = ()
    slow: str | None = None

    @property
    def rows(self) -> int:
        """Samples in it."""
        return self.shape[self.axis]

    @property
    def nbytes(self) -> int:
        """Bytes of all its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


def look_at(
    file: h5py.File, path: str, name: str, layout: str | None, *, cache: IndexCache, external: bool
) -> StoredDataset:
    """Look at one dataset and check that it can be a field.

    Args:
        file: The file, open.
        path: Its path, for messages.
        name: Name of the dataset.
        layout: The letters of its axes, or None where the first counts the samples.
        cache: Where the index of its chunks is kept.
        external: Whether its values may lie in other files.

    Raises:
        MissingError: There is no such dataset; near names are suggested.
        FormatError: It is a group, holds no numbers, or no samples, or nothing here decodes it.
        ConfigError: ``layout`` does not fit it.
    """
    dataset = _opened(file, path, name)
    where: dict[str, Any] = {"file": path, "dataset": name}
    full = f"{path}:/{name.strip('/')}"
    others = other_files(dataset, file, name, allowed=external)
    _check_values(dataset, full, where)
    shape = tuple(int(n) for n in dataset.shape)
    axis, channel = axes(layout, shape, full)
    if shape[axis] == 0 or math.prod(shape) == 0:
        raise FormatError(f"{full} has shape {shape}: there are no samples in it", **where)
    stored = [n for position, n in enumerate(shape) if position != axis]
    if channel is not None:
        stored.insert(0, stored.pop(channel))
    dtype = dataset.dtype.newbyteorder("=")
    if not stored and dtype.kind in "iu":
        dtype = np.dtype(np.int64)  # class labels: torch's losses take nothing else
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    offset = None if others else _raw_offset(dataset)
    index, slow = (None, "its values lie in other files") if others else _index(dataset, cache, full, where)
    return StoredDataset(
        path=path,
        name=name,
        shape=shape,
        dtype=dataset.dtype,
        axis=axis,
        spec=FieldSpec(tuple(stored), dtype, channel),
        offset=offset,
        chunk_rows=min(dataset.chunks[axis], shape[axis]) if dataset.chunks else 1,
        filtered=filtered,
        index=index,
        others=others,
        slow=slow if offset is None and index is None else None,
    )


def axes(layout: str | None, shape: tuple[int, ...], where: str) -> tuple[int, int | None]:
    """The axis that counts samples, and which of the others holds the channels.

    Args:
        layout: One letter per stored axis, N for samples and C for channels; None for samples first.
        shape: The stored shape.
        where: Name of the dataset, for messages.

    Raises:
        ConfigError: The letters do not fit the shape.

    Example:
        >>> axes("HWCN", (64, 48, 3, 100), "x.h5:/data")
        (3, 2)
    """
    if layout is None:
        return 0, None
    if (
        not isinstance(layout, str)
        or not layout.isalpha()
        or layout != layout.upper()
        or len(set(layout)) != len(layout)
        or "N" not in layout
    ):
        raise ConfigError(
            f"layout: {layout!r} for {where} must be different capital letters, one per axis, with N for the samples"
        )
    if len(layout) != len(shape):
        raise ConfigError(
            f"layout: {layout!r} names {len(layout)} axes, but {where} has {len(shape)}: its shape is {shape}"
        )
    rest = layout.replace("N", "")
    return layout.index("N"), rest.index("C") if "C" in rest else None


def _opened(file: h5py.File, path: str, name: str) -> h5py.Dataset:
    where: dict[str, Any] = {"file": path, "dataset": name}
    try:
        found = file.get(name)
    except (OSError, RuntimeError) as error:
        raise FormatError(f"{path}:/{name.strip('/')} cannot be opened: {error}", **where) from error
    if found is None:
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
            to = f"{link.path} of {link.filename}" if isinstance(link, h5py.ExternalLink) else link.path
            raise MissingError(f"{path}:/{name.strip('/')} is a link to {to}, which is not there", **where)
        raise MissingError(f"{path} has no dataset {name!r}; {_names_near(file, name)}", **where)
    if isinstance(found, h5py.Group):
        raise FormatError(f"{path}:/{name.strip('/')} is a group, not a dataset; {_names_in(found)}", **where)
    if not isinstance(found, h5py.Dataset):
        raise FormatError(f"{path}:/{name.strip('/')} is a {type(found).__name__}, not a dataset", **where)
    return found


def _names_near(file: h5py.File, name: str) -> str:
    parent, _, last = name.strip("/").rpartition("/")
    group = file.get(parent) if parent else file
    if not isinstance(group, h5py.Group):
        return _names_in(file)
    near = difflib.get_close_matches(last, list(group), n=3, cutoff=0.5)
    if not near:
        return _names_in(group)
    return "did you mean " + " or ".join(f"{parent}/{n}" if parent else n for n in near) + "?"


def _names_in(group: h5py.Group) -> str:
    names = list(group)
    shown = ", ".join(names[:NAMES_SHOWN]) + (f", … ({len(names)} in all)" if len(names) > NAMES_SHOWN else "")
    return f"{'the file' if group.name == '/' else group.name} holds: {shown or 'nothing'}"


def _check_values(dataset: h5py.Dataset, full: str, where: dict[str, Any]) -> None:
    if not dataset.shape:
        what = "no value" if dataset.shape is None else "a single value"
        raise FormatError(f"{full} holds {what}: a field has one per sample", **where)
    dtype = dataset.dtype
    refusals = {
        "text; store class numbers, and the names beside them": bool(h5py.check_string_dtype(dtype))
        or dtype.kind in "SU",
        "values of variable length; store them padded to one length": h5py.check_vlen_dtype(dtype) is not None,
        "references; store what they refer to": h5py.check_ref_dtype(dtype) is not None,
        "compound values; store each part as a dataset of its own": dtype.names is not None,
    }
    for reason, applies in refusals.items():
        if applies:
            raise FormatError(f"{full} holds {reason}", **where)
    if (dtype.kind, dtype.itemsize) not in TENSOR_TYPES or dtype.subdtype:
        raise FormatError(f"{full} holds {dtype}, which no tensor can hold; store it as another type", **where)


def _raw_offset(dataset: h5py.Dataset) -> int | None:
    """Where the raw values lie in the file, if they do so in one piece and as numpy would have them."""
    offset = dataset.id.get_offset()
    if offset is None or dataset.chunks is not None or not lies_as_numpy(dataset):
        return None
    # A last proof that the offset means what it seems to: the first and the last values, read both ways.
    values = min(dataset.shape[-1], PROVED)
    length = values * dataset.dtype.itemsize
    last = offset + math.prod(dataset.shape) * dataset.dtype.itemsize - length
    ends = ((0, slice(0, values), offset), (-1, slice(dataset.shape[-1] - values, None), last))
    with open(dataset.file.filename, "rb", buffering=0) as raw:
        for corner, some, at in ends:
            line = dataset[(*(corner,) * (dataset.ndim - 1), some)]
            if os.pread(raw.fileno(), length, at) != line.astype(dataset.dtype, copy=False).tobytes():
                return None
    return int(offset)


def _index(
    dataset: h5py.Dataset, cache: IndexCache, full: str, where: dict[str, Any]
) -> tuple[ChunkIndex | None, str | None]:
    """The index of a dataset, or None and why, if h5py must read it, and can."""
    reason = refusal(dataset)
    index = None if reason else index_of(dataset, cache)
    if index is not None:
        return index, None
    _check_filters(dataset, full, where, missing=reason == MISSING)
    # Of a missing codec more has been said already.
    return None, None if reason == MISSING else reason or "its chunks are not where, or what, its index says"


def _check_filters(dataset: h5py.Dataset, full: str, where: dict[str, Any], *, missing: bool) -> None:
    """Make sure that h5py has what it needs to decode a dataset; a word on what would make that fast."""
    properties = dataset.id.get_create_plist()
    for place, which in enumerate(filters_of(dataset)):
        codec = which.codec if missing else None
        name = properties.get_filter(place)[3].decode(errors="replace").partition(";")[0] or "without a name"
        install = "pip install hdf5plugin, and import hdf5plugin before the source is built"
        if codec is not None:
            name, install = codec.name, f"pip install 'lit-async-data[{codec.extra}]'"
        if not h5py.h5z.filter_avail(which.number):
            raise FormatError(
                f"{full} went through the HDF5 filter {name} ({which.number}), which nothing here undoes; {install}",
                **where,
            )
        if codec is not None and codec.missing:
            _say_slow(name, install)


@functools.cache
def _say_slow(name: str, install: str) -> None:
    """Once: there may be a thousand such files."""
    log.warning("%s is decoded by h5py, one chunk at a time; %s makes it fast", name, install)
