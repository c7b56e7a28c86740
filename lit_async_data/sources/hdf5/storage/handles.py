"""Files that h5py has opened: their paths, states and bytes, whether libhdf5 reads the file itself or its mirror."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable

from lit_async_data import system
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.files.files import LOCAL, Files
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import MirroredFile, ObjectFile
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, h5py, open_local, why_not_hdf5
from lit_async_data.sources.local_files import HEAD_BYTES, retry_once

# Mirrors that h5py reads, by the names that it gives to them.
_MIRRORED: weakref.WeakValueDictionary[str, ObjectFile] = weakref.WeakValueDictionary()


def open_h5py(path: str, files: Files = LOCAL) -> h5py.File:
    mirrored = files.opened(path)
    if mirrored is None:
        return open_local(path)
    files.fetch_small(mirrored)
    opened = ObjectFile(mirrored)
    try:
        file = h5py.File(opened, "r")
    except BaseException as error:
        opened.drop_mirror()
        if isinstance(error, AsyncDataError) or not isinstance(error, LIBRARY_ERRORS):
            raise
        why = why_not_hdf5(path, error, mirrored.bytes_at(0, HEAD_BYTES))
        raise FormatError(f"{path}: {why}: {error}", file=path) from error
    _MIRRORED[repr(opened)] = opened
    return file


def refuse_external(paths: Iterable[str], files: Files) -> None:
    """Refuse values in other files, for which libhdf5 would look in the mirror, and find datasets of the same name."""
    if not all(map(files.is_local, paths)):
        what = "other files are not read through cache, storage or an address; copy them, or pack all into one"
        raise ConfigError(what, "allow_external")


def mirrored_file(file: h5py.File) -> MirroredFile | None:
    opened = _MIRRORED.get(file.filename)
    return None if opened is None else opened.file


def path_of(file: h5py.File) -> str:
    mirrored = mirrored_file(file)
    return str(file.filename) if mirrored is None else mirrored.name


def identity_of(file: h5py.File) -> FileIdentity:
    mirrored = mirrored_file(file)
    return FileIdentity.of(os.fstat(file.id.get_vfd_handle())) if mirrored is None else mirrored.identity


def bytes_at(file: h5py.File, size: int, offset: int) -> bytes:
    """Fewer at the end of the file."""
    mirrored = mirrored_file(file)
    if mirrored is not None:
        return mirrored.bytes_at(offset, size)
    return retry_once(functools.partial(system.pread, file.id.get_vfd_handle(), size, offset))


def fetch(file: h5py.File, offsets: Indices, sizes: Indices) -> None:
    """Start to fetch bytes that will be read one after the other, if a mirror must."""
    mirrored = mirrored_file(file)
    if mirrored is not None:
        mirrored.fetch(offsets, offsets + sizes, urgent=True)
