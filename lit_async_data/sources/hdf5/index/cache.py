"""`IndexCache`: keeps indexes of chunks in a folder for the next opening, since building one takes 1 to 2 µs per chunk.

A cache file holds a head that describes the index in plain text, a list of its columns, their values, and the CRC-32 of
all. It is used only if its head is the one that would be written now. So one that a crash or a full disk has cut short
is detected when it is read, and writing needs no fsync.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.errors import ConfigError
from lit_async_data.sources.hdf5.index.columns import IndexKey
from lit_async_data.sources.local_files.file_times import changed_recently

# Smaller indexes are built in 20 to 40 ms; they are not worth a file.
FEWEST_CHUNKS = 2**14
# Raise this when the columns or their meaning change.
VERSION = 4
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

    def load(self, key: IndexKey) -> dict[str, Array] | None:
        """The kept columns of a dataset in its current state, by name; None if no file holds them."""
        path = self._path(key)
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            return None
        head = _head(key)
        if not data.startswith(head) or data[-4:] != zlib.crc32(memoryview(data)[:-4]).to_bytes(4, "little"):
            _log.info("%s: the index in %s is damaged or of another state; building it again", key, path)
            return None
        begin, columns = data.index(b"\n", len(head)) + 1, dict[str, Array]()
        for name, dtype, count in json.loads(data[len(head) : begin]):
            columns[name] = np.frombuffer(data, dtype, count, begin).copy()
            begin += columns[name].nbytes
        return columns

    def store(self, key: IndexKey, columns: Mapping[str, Array]) -> None:
        """Keep the columns of a dataset. Processes may do so at once, and failing to do so is no error."""
        path = self._path(key)
        if path is None or changed_recently(key.mtime_ns, key.ctime_ns):
            return
        listed = json.dumps([(name, each.dtype.str, len(each)) for name, each in columns.items()]).encode()
        data = b"".join([_head(key), listed, b"\n", *(each.tobytes() for each in columns.values())])
        self._write(str(key), path, data + zlib.crc32(data).to_bytes(4, "little"))

    def _write(self, what: str, path: str, data: bytes) -> None:
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
        import hashlib

        if self._folder is None or (key.chunk and key.chunks < FEWEST_CHUNKS):
            return None
        real = os.path.realpath(key.path)  # all links to the data share one index
        digest = hashlib.blake2b(f"{real}\0{key.name}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        return os.path.join(self._folder, f"{os.path.basename(real)[:NAME_SHOWN]}.{digest}.index")


def _head(key: IndexKey) -> bytes:
    properties = {name: value for name, value in dataclasses.asdict(key).items() if name != "path"}
    return f"lit_async_data: an index of chunks, version {VERSION}; may be deleted\n{json.dumps(properties)}\n".encode()
