"""One dataset of one file, looked at through h5py: `StoredDataset`, all that a reader needs to know."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import os
import posixpath
from typing import Any

import h5py
import numpy as np

from lit_async_data.batch.spec import TENSOR_TYPES, FieldSpec
from lit_async_data.errors import ConfigError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.sources.hdf5.storage.codecs import filters_of
from lit_async_data.sources.hdf5.storage.failures import FOREIGN, retried
from lit_async_data.sources.hdf5.storage.identity import Others, other_files
from lit_async_data.sources.hdf5.storage.index import (
    MISSING,
    ChunkIndex,
    check_refused,
    in_one_file,
    index_of,
    lies_as_numpy,
    refusal,
)
from lit_async_data.sources.hdf5.storage.index_cache import IndexCache
from lit_async_data.sources.hdf5.storage.records import superblock_bytes

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


def inspect_dataset(
    file: h5py.File, path: str, name: str, layout: str | None, *, cache: IndexCache, allow_external: bool
) -> StoredDataset:
    """Look at one dataset and check that it can be a field.

    Args:
        file: The file, open.
        path: Its path, for messages.
        name: Name of the dataset.
        layout: The letters of its axes, or None where the first counts the samples.
        cache: Where the index of its chunks is kept.
        allow_external: Whether its values may lie in other files.

    Raises:
        MissingError: There is no such dataset; near names are suggested.
        FormatError: It is a group, holds no numbers, or no samples, or nothing here decodes it.
        CorruptError: It is damaged.
        ConfigError: ``layout`` does not fit it.
    """
    dataset = opened_dataset(file, path, name)
    where: dict[str, Any] = {"file": path, "dataset": name}
    full = f"{path}:/{name.strip('/')}"
    others = other_files(dataset, file, name, allowed=allow_external)
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
    if not others:
        _check_offset(dataset, full, where)
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


def opened_dataset(file: h5py.File, path: str, name: str) -> h5py.Dataset:
    """A dataset of a file that is open.

    Args:
        file: The file.
        path: Its path, for messages.
        name: Name of the dataset.

    Raises:
        MissingError: There is none of this name, or a link leads nowhere; near names are suggested.
        FormatError: It is something else.
        CorruptError: It is there, but libhdf5 cannot open it.
    """
    full = f"{path}:/{name.strip('/')}"
    where: dict[str, Any] = {"file": path, "dataset": name}
    try:
        found = file[name]
    except KeyError as error:
        raise _not_found(file, path, name, error) from error
    except RuntimeError as error:
        if "too many links" not in str(error):
            raise
        raise FormatError(f"{full} cannot be opened, since its links lead in a circle: {error}", **where) from error
    if isinstance(found, h5py.Group):
        raise FormatError(f"{full} is a group, not a dataset; {_names_in(found)}", **where)
    if not isinstance(found, h5py.Dataset):
        raise FormatError(f"{full} is a {type(found).__name__}, not a dataset", **where)
    return found


def _not_found(file: h5py.File, path: str, name: str, error: KeyError) -> SourceError:
    """Why h5py does not find a dataset: there is no link of this name, its link leads nowhere, or it is damaged."""
    full = f"{path}:/{name.strip('/')}"
    where: dict[str, Any] = {"file": path, "dataset": name}
    try:
        link = file.get(name, getlink=True)
    except TypeError:
        return FormatError(f"{full} is a link of a kind that h5py cannot follow; give the dataset it leads to", **where)
    if link is None:
        return MissingError(f"{path} has no dataset {name!r}{_instead(file, name)}", **where)
    if isinstance(link, h5py.ExternalLink):
        to = f"{link.path} of {link.filename}"
        return MissingError(f"{full} is a link to {to}, which is not there: {_text(error)}", **where)
    if isinstance(link, h5py.SoftLink):
        target = posixpath.join(posixpath.dirname(f"/{name.strip('/')}"), link.path)
        if not isinstance(file.get(target, getlink=True), h5py.HardLink):
            return MissingError(f"{full} is a link to {link.path}, which is not there", **where)
    return CorruptError(
        f"{full} is in the file, but cannot be opened: {_text(error)}; the file is damaged: restore it", **where
    )


def _text(error: KeyError) -> str:
    return str(error.args[0]) if error.args else "no reason is given"  # the text of a KeyError is quoted


def _instead(file: h5py.File, name: str) -> str:
    """What may have been meant by a dataset that is not there."""
    above, _, last = name.strip("/").rpartition("/")
    holder: Any = file.get(above) if above else file
    if isinstance(holder, h5py.Group | h5py.Dataset) and last in holder.attrs:
        of = holder.name if above else "the file"
        return (
            f": {last!r} is an attribute of {of}, one value for all samples, and fields are read from datasets; store "
            "it as a dataset of one value per sample, or give it in a column of a table (ManifestSource)"
        )
    group = holder if isinstance(holder, h5py.Group) else file
    near = difflib.get_close_matches(last, _names_of(group), n=3, cutoff=0.5) if group is holder else []
    if near:
        return "; did you mean " + " or ".join(f"{above}/{n}" if above else n for n in near) + "?"
    return f'; {_names_in(group)}; choose datasets by fields={{"x": NAME, "y": NAME}}'


def _names_in(group: h5py.Group) -> str:
    what = "the file" if group.name == "/" else group.name
    try:
        names = _names_of(group)
    except FOREIGN as error:
        return f"the names in {what} cannot be listed: {error}"
    shown = ", ".join(names[:NAMES_SHOWN]) + (f", … ({len(names)} in all)" if len(names) > NAMES_SHOWN else "")
    return f"{what} holds: {shown or 'nothing'}"


def _names_of(group: h5py.Group) -> list[str]:
    """The names in a group; h5py gives those that are no UTF-8 as bytes."""
    names: list[Any] = list(group)
    return [each.decode(errors="backslashreplace") if isinstance(each, bytes) else each for each in names]


def _check_values(dataset: h5py.Dataset, full: str, where: dict[str, Any]) -> None:
    if not dataset.shape:
        what = "no value" if dataset.shape is None else "a single value"
        raise FormatError(f"{full} holds {what}: a field has one per sample", **where)
    try:
        dtype = dataset.dtype
    except FOREIGN as error:
        raise FormatError(
            f"{full} holds values of a type that numpy has not: {error}; store it as another type", **where
        ) from error
    refusals = {
        "text; store class numbers, and give their names as Field(classes=[…])": bool(h5py.check_string_dtype(dtype))
        or dtype.kind in "SU",
        "values of variable length; store them padded to one length, or as a group of two datasets: values, one sample "
        "after the other, and offsets, where each begins and the last ends": h5py.check_vlen_dtype(dtype) is not None,
        "references; store what they refer to": h5py.check_ref_dtype(dtype) is not None,
        "compound values; store each part as a dataset of its own": dtype.names is not None,
    }
    for reason, applies in refusals.items():
        if applies:
            raise FormatError(f"{full} holds {reason}", **where)
    if (dtype.kind, dtype.itemsize) not in TENSOR_TYPES or dtype.subdtype:
        raise FormatError(f"{full} holds {dtype}, which no tensor can hold; store it as another type", **where)
    if h5py.h5t.find(dataset.id.get_type(), h5py.h5t.py_create(dtype)) is None:
        raise FormatError(f"{full} holds values that libhdf5 cannot make {dtype} of; store it as another type", **where)


def _check_offset(dataset: h5py.Dataset, full: str, where: dict[str, Any]) -> None:
    """Make sure that values in one piece do not begin in the head of the file: h5py would deliver that."""
    offset = dataset.id.get_offset()
    head = dataset.file.userblock_size + superblock_bytes(dataset.file)
    never_written = offset == dataset.file.userblock_size - 1  # libhdf5 adds the user block to "nowhere", which is -1
    if offset is not None and offset < head and not never_written and in_one_file(dataset):
        raise CorruptError(
            f"{full}: its values begin at byte {offset}, in the head of the file, which has {head} bytes; the file is "
            "damaged: restore it, or write the dataset again from what can be read of it",
            **where,
        )


def _raw_offset(dataset: h5py.Dataset) -> int | None:
    """Where the raw values lie in the file, if they do so in one piece and as numpy would have them."""
    offset = dataset.id.get_offset()
    if offset is None or dataset.chunks is not None or not in_one_file(dataset) or not lies_as_numpy(dataset):
        return None
    # A last proof that the offset means what it seems to: the first and the last values, read both ways.
    values = min(dataset.shape[-1], PROVED)
    length = values * dataset.dtype.itemsize
    last = offset + math.prod(dataset.shape) * dataset.dtype.itemsize - length
    ends = ((0, slice(0, values), offset), (-1, slice(dataset.shape[-1] - values, None), last))
    handle = dataset.file.id.get_vfd_handle()
    for corner, some, at in ends:
        line = retried(functools.partial(dataset.__getitem__, (*(corner,) * (dataset.ndim - 1), some)))
        found = retried(functools.partial(os.pread, handle, length, at))
        if found != line.astype(dataset.dtype, copy=False).tobytes():
            return None
    return int(offset)


def _index(
    dataset: h5py.Dataset, cache: IndexCache, full: str, where: dict[str, Any]
) -> tuple[ChunkIndex | None, str | None]:
    """The index of a dataset, or None and why, if h5py must read it, and can."""
    reason = refusal(dataset)
    if reason is not None:
        check_refused(dataset)
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
