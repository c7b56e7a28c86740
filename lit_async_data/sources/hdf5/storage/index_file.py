"""A file that holds where the chunks of one dataset lie: `Columns` for an `IndexKey`.

A head, which says in plain text what the columns are of; the three columns, one after the other; and the CRC-32 of all
that. It is used only if its head is what it would be if it were written now, its length is right and its sum is right.
So a file that a crash or a full disk left incomplete is found out when it is read, and nothing waits for the disk when
it is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import mmap
import os
import secrets
import zlib
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.sources.cache_files import on_network, opened, owner

# Larger files are mapped, smaller ones read: a map holds a descriptor open for as long as it is used, and a source of a
# thousand files would run out of them. On a network all are read: see `on_network`.
MOST_READ_BYTES = 2**24
BEGINNING = b"lit_async_data: an index of chunks, version "
# To be raised when the columns or what they mean change.
VERSION = 2
# The columns begin at a multiple of this.
ALIGNMENT = 64
SUM_BYTES = 4


class StaleError(ValueError):
    """A file holds the index of another dataset, or of another state of it."""


class Columns(NamedTuple):
    """Where the chunks of a dataset lie: 16 bytes per chunk, in the order of their places (last axis fastest).

    Attributes:
        offsets: int64: byte of the file at which a chunk begins; -1 where none was ever written.
        sizes: uint32: bytes of it as stored.
        masks: uint32: bit i says that filter i was left out.
        kept_in: The file of which these are a read-only map; None if they are in memory of their own.
    """

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint32]
    kept_in: str | None = None

    def little_endian(self) -> tuple[memoryview, memoryview, memoryview]:
        """The bytes of the columns as they are kept."""
        offsets, sizes, masks = self.offsets.astype("<i8", copy=False), self.sizes, self.masks
        return offsets.data, sizes.astype("<u4", copy=False).data, masks.astype("<u4", copy=False).data

    @classmethod
    def of(cls, buffer: Any, begin: int, chunks: int, kept_in: str | None) -> Columns:
        """Columns that lie in a buffer one after the other."""
        offsets = np.frombuffer(buffer, "<i8", chunks, begin)
        sizes = np.frombuffer(buffer, "<u4", chunks, begin + 8 * chunks)
        return cls(offsets, sizes, np.frombuffer(buffer, "<u4", chunks, begin + 12 * chunks), kept_in)


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """What an index is of: a dataset, and the state of its file.

    Without the file's device, whose number differs from machine to machine and from mount to mount: ranks on two
    machines would replace each other's index for ever.

    Attributes:
        path: The file.
        name: The dataset in it.
        inode: Of the file.
        size: Of the file in bytes.
        mtime_ns: When the file was changed.
        ctime_ns: When anything about it was changed, which no program can set. It is in the head of a file, so that one
            that was rewritten and given its old time is not taken for what it was. But keys that differ in it alone are
            equal: other rights, or one more link, change it too.
        dtype: As stored, byte order included.
        shape: As stored.
        chunk: Shape of a chunk.
        filters: Numbers of its filters, which the bits of a mask stand for.
    """

    path: str = dataclasses.field(compare=False)
    name: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int = dataclasses.field(compare=False)
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    filters: tuple[int, ...]

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> IndexKey:
        """The key of a chunked dataset that is open; the state is that of its file now."""
        now = os.fstat(dataset.file.id.get_vfd_handle())
        properties = dataset.id.get_create_plist()
        return cls(
            dataset.file.filename,
            dataset.name or "",
            now.st_ino,
            now.st_size,
            now.st_mtime_ns,
            now.st_ctime_ns,
            dataset.dtype.str,
            tuple(int(n) for n in dataset.shape),
            tuple(int(n) for n in dataset.chunks or ()),
            tuple(int(properties.get_filter(number)[0]) for number in range(properties.get_nfilters())),
        )

    @property
    def chunks(self) -> int:
        """How many chunks there can be."""
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def file_bytes(self) -> int:
        """Bytes of a file of this index."""
        return len(self.head()) + 16 * self.chunks + SUM_BYTES

    def head(self) -> bytes:
        """How a file of this index begins; of a length that leaves the columns aligned."""
        said = {name: value for name, value in vars(self).items() if name != "path"}
        text = BEGINNING + f"{VERSION}; may be deleted\n{json.dumps(said)}".encode()
        return text + b" " * (-(len(text) + 1) % ALIGNMENT) + b"\n"

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


def read(path: str, key: IndexKey) -> Columns:
    """The columns kept in a file.

    Raises:
        OSError: It cannot be read.
        ForeignError: It is somebody else's.
        StaleError: It is not of this dataset in this state.
        ValueError: It is damaged.
    """
    head, length = key.head(), key.file_bytes
    with opened(path, {owner(os.stat(key.path))}) as file:
        size = os.fstat(file.fileno()).st_size
        found = file.read(len(head))
        if found != head and len(found) == len(head) and found.startswith(BEGINNING):
            raise StaleError("it is not of the file in its present state")
        if found != head:
            raise ValueError("it is damaged: it does not begin as an index does")
        if size != length:
            raise ValueError(f"it is damaged: {size} bytes instead of {length}")
        mapped = length > MOST_READ_BYTES and not on_network(file.fileno())
        if mapped:
            buffer: Any = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
        else:
            file.seek(0)
            buffer = file.read()
    with memoryview(buffer) as data:
        if len(data) != length or zlib.crc32(data[:-SUM_BYTES]) != int.from_bytes(data[-SUM_BYTES:], "little"):
            raise ValueError("it is damaged: its checksum is wrong")
    return Columns.of(buffer, len(head), key.chunks, path if mapped else None)


def write(path: str, key: IndexKey, columns: Columns) -> None:
    """Write a file and then give it its name, so that there is never half a file of that name.

    If one that holds the same has that name by now, it stays: others may have mapped it.

    Raises:
        OSError: It cannot be written.
    """
    new = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.chunks-new")
    data = os.stat(key.path)
    # Whoever may read the data may read their index, and nobody else may write it: it would not be believed.
    mode = data.st_mode & 0o444 | 0o200
    try:
        with open(new, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            with contextlib.suppress(OSError):
                os.fchown(file.fileno(), -1, data.st_gid)
            head = key.head()
            file.write(head)
            total = zlib.crc32(head)
            for column in columns.little_endian():
                file.write(column)
                total = zlib.crc32(column, total)
            file.write(total.to_bytes(SUM_BYTES, "little"))
        if not _holds(path, key, columns):
            os.replace(new, path)
    finally:
        try:  # noqa: SIM105  # an interrupt can come when `suppress` is called, before anything is removed
            os.unlink(new)
        except OSError:
            pass


def _holds(path: str, key: IndexKey, columns: Columns) -> bool:
    """Whether a file holds these very columns."""
    try:
        offsets, sizes, masks, _ = read(path, key)
    except (OSError, ValueError):
        return False
    same = np.array_equal(offsets, columns.offsets) and np.array_equal(sizes, columns.sizes)
    return same and np.array_equal(masks, columns.masks)
