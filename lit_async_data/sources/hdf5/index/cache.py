"""`IndexCache`: keeps indexes of chunks in a folder for the next opening, since building one takes 1 to 2 µs per chunk.

A cache file holds a head that describes the index in plain text, its three columns, and the CRC-32 of both. It is used
only if its head is the one that would be written now. So one that a crash or a full disk has cut short is detected when
it is read, and writing needs no fsync.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.errors import ConfigError
from lit_async_data.sources.hdf5.index.columns import Columns, IndexKey
from lit_async_data.sources.hdf5.storage.identity import FileIdentity
from lit_async_data.sources.local_files.file_times import changed_recently

# Smaller indexes are built in 20 to 40 ms; they are not worth a file.
FEWEST_CHUNKS = 2**14
# Raise this when the columns or their meaning change.
VERSION = 3
# Letters of the data file's name in the name of its index: few enough for any file system.
NAME_SHOWN = 50

Array = npt.NDArray[Any]
_log = logging.getLogger(__name__)


class IndexCache:
    """The cache in a folder, which is made if it does not exist; or no cache."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None
        if folder is None:
            return
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"cache_dir: {folder!r} is not a folder; give its path, or None", option="cache_dir")
        path = os.path.abspath(os.path.expanduser(folder))
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            owner = os.stat(path).st_uid
        except OSError as error:
            what = f"cache_dir: {path} cannot be made: {error.strerror}; give another folder"
            raise ConfigError(what, option="cache_dir", file=path) from error
        if owner != system.user_id():  # whoever writes an index decides which values are read
            what = f"cache_dir: {path} belongs to user {owner}, and you are {system.user_id()}; give a folder of yours"
            raise ConfigError(what, option="cache_dir", file=path)
        self._folder = path

    def load(self, key: IndexKey) -> Columns | None:
        """The kept columns of a dataset in its current state; None if no file holds them."""
        path = self._path(key)
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                data = memoryview(file.read())
        except OSError:
            return None
        head, chunks = _head(key), key.chunks
        begin, end = len(head), len(head) + 16 * chunks
        if data[:begin] != head or data[end:] != zlib.crc32(data[:end]).to_bytes(4, "little"):
            _log.info("%s: the index in %s is damaged or of another state; building it again", key, path)
            return None
        offsets = np.frombuffer(data, "<i8", chunks, begin)
        sizes = np.frombuffer(data, "<u4", chunks, begin + 8 * chunks)
        return Columns(offsets, sizes, np.frombuffer(data, "<u4", chunks, begin + 12 * chunks))

    def store(self, key: IndexKey, columns: Columns) -> None:
        """Keep the columns of a dataset. Processes may do so at once, and failing to do so is no error."""
        path = self._path(key)
        if path is None or changed_recently(key.mtime_ns, key.ctime_ns):
            return
        arrays = (columns.offsets.astype("<i8"), columns.sizes.astype("<u4"), columns.masks.astype("<u4"))
        data = b"".join([_head(key), *(each.tobytes() for each in arrays)])
        self._write(str(key), path, data + zlib.crc32(data).to_bytes(4, "little"))

    def load_arrays(self, path: str, identity: FileIdentity, of: str) -> dict[str, Array] | None:
        """The arrays that were kept for a purpose, if the file is in the same state; else None."""
        kept = self._path_of(path, of, "groups")
        if kept is None:
            return None
        try:  # the file of numpy is a zip archive, which has checksums
            with np.load(kept, allow_pickle=False) as file:
                found = dict(file)
        except (OSError, ValueError, EOFError, LookupError, zipfile.BadZipFile, zlib.error):
            return None
        return found if str(found.pop("of", "")) == _state(identity, of) else None

    def store_arrays(self, path: str, identity: FileIdentity, of: str, arrays: Mapping[str, Array]) -> None:
        """Keep arrays for a purpose, as `store` does."""
        kept = self._path_of(path, of, "groups")
        if kept is not None and not changed_recently(identity.mtime_ns, identity.ctime_ns):
            data = io.BytesIO()
            np.savez(data, of=np.array(_state(identity, of)), **arrays)  # type: ignore[arg-type]
            self._write(path, kept, data.getbuffer())

    def _write(self, what: str, path: str, data: bytes | memoryview) -> None:
        import secrets

        new = f"{path}.{secrets.token_hex(8)}"
        try:
            with open(new, "xb") as file:
                file.write(data)
            os.replace(new, path)
        except OSError as error:
            _log.warning("%s: its index cannot be kept in %s: %s", what, path, str(error))
        finally:
            try:  # noqa: SIM105  # an interrupt can come when `suppress` is called, before anything is removed
                os.unlink(new)
            except OSError:
                pass

    def _path(self, key: IndexKey) -> str | None:
        return None if key.chunks < FEWEST_CHUNKS else self._path_of(key.path, key.name, "chunks")

    def _path_of(self, path: str, name: str, kind: str) -> str | None:
        import hashlib

        if self._folder is None:
            return None
        real = os.path.realpath(path)  # all links to the data share one index
        digest = hashlib.blake2b(f"{real}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        return os.path.join(self._folder, f"{os.path.basename(real)[:NAME_SHOWN]}.{digest}.{kind}")


def _state(identity: FileIdentity, of: str) -> str:
    """Describes kept arrays. The device number differs between machines, so it is left out."""
    return f"{VERSION} {identity.inode} {identity.size} {identity.mtime_ns} {identity.ctime_ns} {of}"


def _head(key: IndexKey) -> bytes:
    """Describes an index; a multiple of 64 bytes, so that the columns are aligned."""
    import json

    properties = {name: value for name, value in dataclasses.asdict(key).items() if name != "path"}
    text = f"lit_async_data: an index of chunks, version {VERSION}; may be deleted\n{json.dumps(properties)}".encode()
    return text + b" " * (-(len(text) + 1) % 64) + b"\n"
