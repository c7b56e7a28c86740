"""The cache file of one chunk index: reads and writes the `Columns` of an `IndexKey`.

A file holds a head that describes the index in plain text, the three columns, and the CRC-32 of both. It is used only
if its head equals the one that would be written now and if length and checksum are right. So an incomplete file, left
by a crash or a full disk, is detected when it is read, and writing needs no fsync.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import os
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data import system
from lit_async_data.sources.local_files.cache_files import on_network, opened, owner

if TYPE_CHECKING:
    import h5py

# Larger files are mapped, smaller ones read: a map holds a descriptor while it is in use, and a source of a thousand
# files would run out of them. On network file systems all are read; see `on_network`.
MOST_READ_BYTES = 2**24
BEGINNING = b"lit_async_data: an index of chunks, version "
# Raise this when the columns or their meaning change.
VERSION = 2
# The columns begin at a multiple of this.
ALIGNMENT = 64
SUM_BYTES = 4


class StaleError(ValueError):
    """The file holds the index of another dataset, or of an earlier state of this one."""


class Columns(NamedTuple):
    """Where the chunks of a dataset are: 16 bytes per chunk, in grid order (last axis fastest).

    Attributes:
        offsets: int64: offset of each chunk in the file; -1 if it was never written.
        sizes: uint32: stored bytes of each chunk.
        masks: uint32: bit i means that filter i was skipped.
        mapped_from: Path of the cache file that the columns map, read-only; None if they are in memory.
    """

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    masks: npt.NDArray[np.uint32]
    mapped_from: str | None = None

    def little_endian(self) -> tuple[memoryview, memoryview, memoryview]:
        """The bytes of the columns as stored."""
        offsets, sizes, masks = self.offsets.astype("<i8", copy=False), self.sizes, self.masks
        return offsets.data, sizes.astype("<u4", copy=False).data, masks.astype("<u4", copy=False).data

    @classmethod
    def of(cls, buffer: Any, begin: int, chunks: int, mapped_from: str | None) -> Columns:
        """Columns that follow each other in a buffer."""
        offsets = np.frombuffer(buffer, "<i8", chunks, begin)
        sizes = np.frombuffer(buffer, "<u4", chunks, begin + 8 * chunks)
        return cls(offsets, sizes, np.frombuffer(buffer, "<u4", chunks, begin + 12 * chunks), mapped_from)


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """Identifies an index: a dataset, and the state of its file.

    Without the file's device number, which differs between machines and mounts: ranks on two machines would replace
    each other's index for ever.

    Attributes:
        path: The file.
        name: The dataset in it.
        inode: Inode of the file.
        size: Bytes of the file.
        mtime_ns: Time of the last write, unless a program has set it.
        ctime_ns: Time of the last change to content or metadata, which no program can set. It is part of the head, so
            that a rewritten file with its old mtime does not match. It does not count for equality, since chmod and new
            hard links change it too.
        dtype: As stored, with byte order.
        shape: Shape of the dataset.
        chunk: Shape of a chunk.
        filters: Numbers of the filters, in the order of the mask bits.
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
        """The key of an open chunked dataset, with the current state of its file."""
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
        """Number of chunks in the grid."""
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @property
    def file_bytes(self) -> int:
        """Size of the cache file."""
        return len(self.head()) + 16 * self.chunks + SUM_BYTES

    def head(self) -> bytes:
        """The head of the cache file, padded so that the columns are aligned."""
        import json

        properties = {name: value for name, value in vars(self).items() if name != "path"}
        text = BEGINNING + f"{VERSION}; may be deleted\n{json.dumps(properties)}".encode()
        return text + b" " * (-(len(text) + 1) % ALIGNMENT) + b"\n"

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"


def read_columns(path: str, key: IndexKey) -> Columns:
    """The columns in a cache file.

    Raises:
        OSError: The file cannot be read.
        ForeignError: Another user owns it or may write to it.
        StaleError: It holds the index of another dataset or state.
        ValueError: It is damaged.
    """
    head, length = key.head(), key.file_bytes
    with opened(path, {owner(os.stat(key.path))}) as file:
        size = os.fstat(file.fileno()).st_size
        found = file.read(len(head))
        if found != head and len(found) == len(head) and found.startswith(BEGINNING):
            raise StaleError("it describes another state of the data file")
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


def write_columns(path: str, key: IndexKey, columns: Columns) -> None:
    """Write a cache file under a temporary name, then rename it, so that no incomplete file has the final name.

    A file with the same columns stays, since other processes may have mapped it.

    Raises:
        OSError: The file cannot be written.
    """
    import secrets

    new = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}.chunks-new")
    data = os.stat(key.path)
    # Readable for whoever may read the data; writable for the owner only, or it would not be trusted.
    mode = data.st_mode & 0o444 | 0o200
    try:
        with open(new, "xb", opener=functools.partial(os.open, mode=mode)) as file:
            system.give_to_group(file.fileno(), data.st_gid)
            head = key.head()
            file.write(head)
            total = zlib.crc32(head)
            for column in columns.little_endian():
                file.write(column)
                total = zlib.crc32(column, total)
            file.write(total.to_bytes(SUM_BYTES, "little"))
        if not _has_columns(path, key, columns):
            os.replace(new, path)
    finally:
        try:  # noqa: SIM105  # an interrupt can come when `suppress` is called, before anything is removed
            os.unlink(new)
        except OSError:
            pass


def _has_columns(path: str, key: IndexKey, columns: Columns) -> bool:
    """Whether a cache file holds the same columns."""
    try:
        offsets, sizes, masks, _ = read_columns(path, key)
    except (OSError, ValueError):
        return False
    same = np.array_equal(offsets, columns.offsets) and np.array_equal(sizes, columns.sizes)
    return same and np.array_equal(masks, columns.masks)
