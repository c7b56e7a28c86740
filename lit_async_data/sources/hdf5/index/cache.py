"""`IndexCache`: keeps indexes of chunks in a folder for the next opening, since building one takes 1 to 2 µs per chunk.

The head of a file describes the index; its body is a list of columns in plain text, and their values.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_async_data.sources.hdf5.index.columns import IndexKey
from lit_async_data.sources.local_files.cache_folder import CacheFolder
from lit_async_data.sources.local_files.opening import changed_recently

# Smaller indexes are built in 20 to 40 ms; they are not worth a file.
FEWEST_CHUNKS = 2**14
# Raise this when the columns or their meaning change.
VERSION = 8
# Letters of the data file's name in the name of its index: few enough for any file system.
NAME_SHOWN = 50

Array = npt.NDArray[Any]


class IndexCache:
    """The cache in a folder, which is made if it does not exist; or no cache."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else CacheFolder(folder, "index")

    def load(self, key: IndexKey) -> dict[str, Array] | None:
        """The kept columns of a dataset in its current state, by name; None if no file holds them."""
        if self._folder is None:
            return None
        data = self._folder.load(str(key), _name(key), _head(key))
        if data is None:
            return None
        begin, columns = data.index(b"\n") + 1, dict[str, Array]()
        for name, dtype, count in json.loads(data[:begin]):
            columns[name] = np.frombuffer(data, dtype, count, begin).copy()
            begin += columns[name].nbytes
        return columns

    def store(self, key: IndexKey, columns: Mapping[str, Array]) -> None:
        """Keep the columns of a dataset. Processes may do so at once, and failing to do so is no error."""
        small = key.chunk and key.chunks < FEWEST_CHUNKS
        if self._folder is None or small or changed_recently(key.mtime_ns, key.ctime_ns):
            return
        listed = json.dumps([(name, each.dtype.str, len(each)) for name, each in columns.items()]).encode()
        body = b"".join([listed, b"\n", *(each.tobytes() for each in columns.values())])
        self._folder.store(str(key), _name(key), _head(key), body)


def _name(key: IndexKey) -> str:
    import hashlib

    real = os.path.realpath(key.path)  # all links to the data share one index
    digest = hashlib.blake2b(f"{real}\0{key.name}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return f"{os.path.basename(real)[:NAME_SHOWN]}.{digest}.index"


def _head(key: IndexKey) -> bytes:
    properties = {name: value for name, value in dataclasses.asdict(key).items() if name != "path"}
    return f"lit_async_data: an index of chunks, version {VERSION}; may be deleted\n{json.dumps(properties)}\n".encode()
