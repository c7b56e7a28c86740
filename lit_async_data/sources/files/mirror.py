"""`Mirror`: a local copy of a file or an object, filled block by block; processes may share it, without locks.

A mirror in memory belongs to one process, and a `Ring` limits it: see docs/design/sources/files.md. `MirroredFile`
reads the bytes from there, and fetches each block once. `ObjectFile` is such a file for h5py.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import io
import itertools
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deflate
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, StoreError
from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.transport import Started, Transport

BLOCK = 2**14
# The table has 0 for a block that is not there; a CRC of 0 is stored as this.
_CRC_OF_ZERO = 1


class Mirror:
    """Thread-safe. Owns the descriptors of the sparse file and the table.

    ``ring`` limits the memory of a mirror that no other process has; without it, a mirror keeps every block.
    """

    def __init__(self, data: int, table: int, size: int, ring: Ring | None = None) -> None:
        weakref.finalize(self, os.close, data).atexit = False
        self.descriptor, self.size, self.blocks, self.ring = data, size, -(-size // BLOCK), ring
        try:
            if os.fstat(data).st_size != size:
                os.ftruncate(data, size)  # whoever comes first; others do the same
            if os.fstat(table).st_size != 4 * self.blocks:
                os.ftruncate(table, 4 * self.blocks)
                if hasattr(os, "posix_fallocate"):  # on a full disk, writing into a hole by a map would end the process
                    os.posix_fallocate(table, 0, 4 * self.blocks)
            self._crcs: npt.NDArray[np.uint32] = np.frombuffer(mmap.mmap(table, 4 * self.blocks), np.uint32)
        finally:
            os.close(table)
        self._mapped = mmap.mmap(data, size, access=mmap.ACCESS_READ if ring is None else mmap.ACCESS_WRITE)
        self.map: npt.NDArray[np.uint8] = np.frombuffer(self._mapped, np.uint8)
        self.map.flags.writeable = False
        # Blocks that this process has written or compared. Read without the lock.
        self._there = np.zeros(self.blocks, np.bool_)
        self._coming = np.zeros(self.blocks, np.bool_)  # blocks that are being written
        self._lock, self._left = threading.Lock(), self.blocks

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Blocks that are there or come meanwhile keep their bytes until the end."""
        return contextlib.nullcontext() if self.ring is None else self.ring.reading()

    def holds(self, begin: int, end: int) -> bool:
        """Whether the blocks of a range are there, as far as this process knows."""
        return not self._left or bool(self._there[begin // BLOCK : (end - 1) // BLOCK + 1].all())

    def missing(self, begins: Indices, ends: Indices) -> Indices:
        """The blocks of these ranges that are not there, sorted; int64. Compares blocks of other processes."""
        first, last = begins // BLOCK, (ends - 1) // BLOCK
        if not self._left:
            return first[:0]
        widest = int((last - first).max(initial=0))
        blocks = first if not widest else np.minimum(first[:, None] + np.arange(widest + 1), last[:, None]).ravel()
        blocks = blocks[~self._there[blocks]]
        if not len(blocks):
            return blocks
        blocks = distinct_of(blocks)
        if self.ring is not None:  # nobody else stores
            return blocks
        stored = blocks[self._crcs[blocks] != 0]
        if len(stored):
            same = [self._crc(self.map[at : at + BLOCK]) == self._crcs[at // BLOCK] for at in (stored * BLOCK).tolist()]
            with self._lock:
                self._note(stored[same])
        return blocks[~self._there[blocks]]

    def store(self, begin: int, data: memoryview) -> None:
        """Write bytes that begin with a block, and end with one or with the object."""
        blocks, done = slice(begin // BLOCK, -(-(begin + len(data)) // BLOCK)), 0
        crcs: Any = _CRC_OF_ZERO
        if self.ring is None:  # else no other process reads them
            crcs = [self._crc(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        with self._lock:
            self._coming[blocks] = True
        while done < len(data):  # the bytes first; without the lock, for which other threads would wait
            done += os.pwrite(self.descriptor, data[done:], begin + done)
        with self._lock:
            self._crcs[blocks] = crcs
            self._note(blocks)
            self._coming[blocks] = False
        if self.ring is not None:
            self.ring.stored(self, blocks)

    def _note(self, blocks: slice | Indices) -> None:
        self._left -= int(np.count_nonzero(~self._there[blocks]))
        self._there[blocks] = True

    def drop(self, blocks: slice) -> None:
        """Forget blocks, whose bytes stay until `free`, for readers that have found them there."""
        with self._lock:
            self._left += int(np.count_nonzero(self._there[blocks]))
            self._there[blocks], self._crcs[blocks] = False, 0

    def free(self, blocks: slice) -> None:
        """Give back the memory of dropped blocks, unless they have come again."""
        with self._lock:
            kept = self._there[blocks] | self._coming[blocks]
            for begin, end in runs(np.flatnonzero(~kept) + blocks.start, 0, self.blocks):
                self._mapped.madvise(mmap.MADV_REMOVE, begin * BLOCK, min(end * BLOCK, self.size) - begin * BLOCK)

    @staticmethod
    def _crc(data: Any) -> int:
        return deflate.crc32(data) or _CRC_OF_ZERO  # several times as fast as zlib's


class Ring:
    """The memory of mirrors: the oldest blocks make room for others once no reader can use them. Thread-safe.

    Blocks take ``nbytes`` at most, but for those that came since the longest read began.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.held = nbytes, 0
        self._lock, self._clock = threading.Lock(), 0
        self._begun = dict[object, int]()  # when each read that goes on began
        self._blocks = collections.deque[tuple[int, Mirror, slice]]()
        self._dropped = collections.deque[tuple[int, Mirror, slice]]()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._lock:
            self._begun[key := object()] = self._clock
        try:
            yield
        finally:
            with self._lock:
                del self._begun[key]
                self._free()

    def holds(self, nbytes: int) -> bool:
        """Whether this many more bytes leave half of the memory to others."""
        return self.held + nbytes <= self.nbytes // 2

    def stored(self, mirror: Mirror, blocks: slice) -> None:
        with self._lock:
            self._clock += 1
            self._blocks.append((self._clock, mirror, blocks))
            self.held += (blocks.stop - blocks.start) * BLOCK
            oldest = min(self._begun.values(), default=self._clock)
            while self.held > self.nbytes and self._blocks[0][0] <= oldest and len(self._blocks) > 1:
                _, old, gone = self._blocks.popleft()
                old.drop(gone)
                self.held -= (gone.stop - gone.start) * BLOCK
                self._clock += 1
                self._dropped.append((self._clock, old, gone))
            self._free()

    def _free(self) -> None:
        oldest = min(self._begun.values(), default=self._clock)
        while self._dropped and self._dropped[0][0] <= oldest:
            _, mirror, blocks = self._dropped.popleft()
            mirror.free(blocks)


def runs(blocks: Indices, gap: int, most: int) -> list[tuple[int, int]]:
    """Sorted blocks as ranges of blocks: those at most ``gap`` apart together, and at most ``most`` in each."""
    found, breaks = list[tuple[int, int]](), np.flatnonzero(np.diff(blocks) > gap + 1) + 1
    for part in np.split(blocks, breaks) if len(blocks) else ():
        first, end = int(part[0]), int(part[-1]) + 1
        found += [(begin, min(begin + most, end)) for begin in range(first, end, most)]
    return found


# Ranges that are nearer than this are one request, of at most this size.
GAP_BLOCKS, MOST_BLOCKS = 4, 2**20 // BLOCK
# Small pieces come by whole blocks if these have at most as many times the bytes.
_DENSE = 4

Get = Callable[[int, int], memoryview]
# While it is set, `MirroredFile.fetch` only tells whether it would ask for some of these bytes.
ASKED_FOR = contextvars.ContextVar[tuple[int, int] | None]("ASKED_FOR", default=None)


class MirroredFile:
    """Thread-safe. Threads of the transport call ``get``, which returns the bytes of a range."""

    def __init__(self, name: str, identity: FileIdentity, mirror: Mirror, get: Get, transport: Transport) -> None:
        self.name, self.identity, self.mirror, self._get, self._transport = name, identity, mirror, get, transport
        self._lock, self._last, self._coming = threading.Lock(), 0, dict[int, Started[None]]()
        self._asked = np.zeros(mirror.blocks, np.int64)  # which fetch will bring each block, by number; 0: none

    def fetch(self, begins: Indices, ends: Indices, *, urgent: bool = False) -> bool:
        """Start to fetch the blocks that are missing; returns whether any is."""
        begins, ends = self._inside(begins, ends)
        if span := ASKED_FOR.get():
            return bool(((begins < span[1]) & (ends > span[0])).any())
        blocks = self.mirror.missing(begins, ends)
        if urgent or not self._asked[blocks].all():
            self._started(begins, ends, urgent=urgent)
        return len(blocks) > 0

    def _inside(self, begins: Indices, ends: Indices) -> tuple[Indices, Indices]:
        """The ranges as far as they are in the file; damaged references may lead anywhere."""
        ends = np.minimum(ends, self.mirror.size)
        inside = begins < ends
        return begins[inside], ends[inside]

    def _started(self, begins: Indices, ends: Indices, *, urgent: bool) -> list[Started[None]]:
        """The fetches that will bring the blocks that are missing."""
        with self._lock:
            blocks = self.mirror.missing(begins, ends)
            asked = runs(blocks[self._asked[blocks] == 0], GAP_BLOCKS, MOST_BLOCKS)
            CLOCK.add(requests=len(asked), fetched=BLOCK * sum(end - first for first, end in asked))
            for run in asked:
                number = self._last + 1
                started = self._transport.start(functools.partial(self._load, run, number), urgent=urgent)
                started.add_done_callback(functools.partial(self._forget, run, number))  # it may be dropped
                self._asked[slice(*run)], self._coming[number], self._last = number, started, number
            coming = [self._coming[number] for number in distinct_of(self._asked[blocks]).tolist()]
        if urgent:
            self._transport.hurry(coming)
        return coming

    def need(self, begins: Indices, ends: Indices) -> None:
        """Wait until the bytes of these ranges are there. Raises as ``get`` and `Transport.result_of`."""
        begins, ends = self._inside(begins, ends)
        while len(self.mirror.missing(begins, ends)):
            if span := ASKED_FOR.get():
                error = StoreError(f"{self.name}: has not come", file=self.name)
                error.span = span if self.fetch(begins, ends) else None
                raise error
            for started in reversed(self._started(begins, ends, urgent=True)):  # the last to come first: one wake
                self._transport.result_of(started, self.name)

    def scattered(self, places: Mapping[int, int]) -> dict[int, Callable[[], bytes]]:
        """Start to fetch small pieces, by where they begin. Returns functions that wait for the bytes of each.

        A mirror in memory does not get them if their blocks are far larger. One in a folder does, for the next start.
        """
        begins = np.fromiter(places, np.int64)
        ends = np.minimum(begins + np.fromiter(places.values(), np.int64), self.mirror.size)
        with self._lock:
            missing = self.mirror.missing(begins, ends)
            dense = len(missing) * BLOCK <= _DENSE * int((ends - begins).sum())
            alone = not dense and self.mirror.ring is not None and not self._asked[missing].any()
        if not alone:
            self.fetch(begins, ends, urgent=True)
            return {begin: functools.partial(self.bytes_at, begin, size) for begin, size in places.items()}
        CLOCK.add(requests=len(places), fetched=sum(places.values()))
        start, wait = self._transport.start, self._transport.result_of
        return {
            begin: functools.partial(wait, start(functools.partial(self._piece, begin, end)), self.name)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        }

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Fewer at the end."""
        end = min(offset + size, self.mirror.size)
        with self.mirror.reading():
            if end > offset:
                self.need(np.array([offset]), np.array([end]))
            return self.mirror.map[offset:end].tobytes()

    def store(self, begin: int, data: memoryview) -> None:
        try:
            self.mirror.store(begin, data)
        except OSError as error:
            what = f"its mirror cannot be written: {error.strerror}; make room, or give another folder as cache"
            raise StoreError(f"{self.name}: {what}", file=self.name) from error

    def _answer(self, begin: int, end: int) -> memoryview:
        try:
            return self._get(begin, end)
        except AsyncDataError as error:
            error.span = begin, end
            raise

    def _piece(self, begin: int, end: int) -> bytes:
        return bytes(self._answer(begin, end))  # not a part of a larger buffer

    def _load(self, run: tuple[int, int], number: int) -> None:
        begin, end = run[0] * BLOCK, min(run[1] * BLOCK, self.mirror.size)
        try:
            self.store(begin, self._answer(begin, end))
        finally:
            self._forget(run, number)  # before anybody who waits goes on

    def _forget(self, run: tuple[int, int], number: int, _: object = None) -> None:
        with self._lock:
            if self._coming.pop(number, None) is not None:
                own = self._asked[slice(*run)]
                own[own == number] = 0


# Metadata is fetched in pieces of this size: a smaller one needs as long, and the next object is often near. A piece
# behind the last is twice as long, up to the most.
PIECE, MOST_PIECE = 4 * BLOCK, 2**20
# The most bytes of objects that are fetched because a node names them; more objects come by blocks, not by pieces.
_MOST_AHEAD = 2**26
_HEAD = 24  # bytes of a node of a tree before its first key
_GROUP_NODE_BYTES, _GROUP_TREE_BYTES = 8 + 40 * 8, 544  # of the default sizes
_OBJECT_HEADER = 1024  # bytes to fetch of an object whose size nobody knows
_NUMBERS = itertools.count()
_MOST_NODES = 2**17  # of a tree, in case that its bytes are no tree
# A link: version, flags with the size of the name's length, order of creation or not, set of characters or not.
_LINK = re.compile(rb"\x01(?:[\x00-\x03]|[\x04-\x07].{8}|[\x10-\x13].|[\x14-\x17].{9})", re.DOTALL)


class ObjectFile(io.RawIOBase):
    """Fetches the metadata that libhdf5 will want before it does. For one thread at a time, as h5py is.

    Each node of a tree has the addresses of its children (HDF5 file format specification 3.0, III.A.1, III.B, III.C,
    III.G and IV.A.2.g); nothing depends on them. h5py calls no more than `io.RawIOBase` and these methods have.
    """

    def __init__(self, file: MirroredFile) -> None:
        self.file, self._mirror, self._at = file, file.mirror, 0
        self._name = f"mirror {next(_NUMBERS)}"
        self._piece, self._missed = PIECE, -1  # the size of the last piece that was missing, and its end
        # Nodes that may be without the rest of their blocks, or functions that wait for them.
        self._nodes = dict[int, bytes | Callable[[], bytes]]()

    def __repr__(self) -> str:
        return self._name  # h5py gives the file this name

    def drop_mirror(self) -> None:
        """h5py keeps this object for ever if it cannot open it."""
        del self.file, self._mirror, self._nodes

    def seek(self, to: int, whence: int = 0, /) -> int:
        self._at = to + (0, self._at, self._mirror.size)[whence]
        return self._at

    def readinto(self, out: object, /) -> int:
        view = memoryview(out).cast("B")  # type: ignore[arg-type]
        end = min(self._at + len(view), self._mirror.size)
        node = self._nodes.get(self._at, b"")
        if not isinstance(node, bytes):
            del self._nodes[self._at]  # if it does not come, it is fetched again
            node = self._nodes[self._at] = node()  # libhdf5 may read it again
        if len(node) >= len(view):
            view[:] = node[: len(view)]
        elif end > self._at:
            collecting = gc.isenabled()
            gc.disable()  # a thread that fetches would wait to free an object of h5py, whose lock the caller has
            try:
                with self._mirror.reading():
                    self._need(self._at, end)
                    view[: end - self._at] = self._mirror.map[self._at : end].data
                    self._fetch_below(bytes(view[: end - self._at]))
            finally:
                if collecting:
                    gc.enable()
        done, self._at = max(end - self._at, 0), max(end, self._at)
        return done

    def _need(self, begin: int, end: int) -> None:
        if self._mirror.holds(begin, end) or not len(self._mirror.missing(np.array([begin]), np.array([end]))):
            return
        self._piece = min(2 * self._piece, MOST_PIECE) if 0 < end - self._missed <= self._piece else PIECE
        self._missed = min(max(-(-end // PIECE) * PIECE, begin + self._piece), self._mirror.size)
        self.file.need(np.array([begin // PIECE * PIECE]), np.array([self._missed]))

    def _fetch_below(self, node: bytes) -> None:
        """Fetch the nodes below this one, level by level, and start to fetch the objects that they name."""
        level, left, objects = [node], _MOST_NODES, dict[int, int]()
        while level and left > 0:
            nodes = dict[int, int]()
            for each in level:
                nodes |= _nodes_below(each)
                objects |= _objects_below(each)
            nodes = {at: size for at, size in self._inside(nodes).items() if at not in self._nodes}
            left -= len(nodes)
            leaves = level[0][4:6] == b"\1\1"  # of chunks, which have nothing below them: they come as libhdf5 reads
            level = []
            if len(nodes) > 1:  # else libhdf5 reads it next
                read = self.file.scattered(nodes)
                self._nodes |= read
                level = [] if leaves else [wait() for wait in reversed(read.values())]  # the last first: one wake
        if objects := self._inside(objects):
            begins = np.fromiter(objects, np.int64)
            ends = begins + np.fromiter(objects.values(), np.int64)
            size = PIECE if len(objects) * PIECE <= _MOST_AHEAD else BLOCK
            begins, ends = begins // size * size, np.minimum(-(-ends // size) * size, self._mirror.size)
            most = _MOST_AHEAD // size
            self.file.fetch(begins[:most], ends[:most], urgent=True)

    def _inside(self, found: dict[int, int]) -> dict[int, int]:
        return {at: size for at, size in found.items() if 0 < at < self._mirror.size - size}


def _nodes_below(node: bytes) -> dict[int, int]:
    """The sizes of a tree's nodes below this one, by their addresses; none of a leaf, and of bytes that are no node."""
    if len(node) < _HEAD or node[:4] != b"TREE":
        return {}
    of_chunks, depth, used = struct.unpack_from("<BBH", node, 4)
    if of_chunks and not depth:
        return {}  # the chunks themselves
    # Addresses of 64 chunks lie between 65 keys, and of groups' names between keys of 8 bytes.
    key, rest = divmod(len(node) - _HEAD - 64 * 8, 65) if of_chunks else (8, 0)
    size, step = len(node) if of_chunks or depth else _GROUP_NODE_BYTES, key + 8
    places = range(_HEAD + key, min(_HEAD + step * used, len(node) - 8) + 1, step) if key > 0 and not rest else ()
    return {struct.unpack_from("<Q", node, place)[0]: size for place in places}


def _objects_below(node: bytes) -> dict[int, int]:
    """How much to fetch of the objects that links in a node lead to, by their addresses."""
    found = dict[int, int]()
    if len(node) < _HEAD or node[:4] != b"SNOD":
        return _of_links(node) if node[:4] in (b"FHDB", b"OHDR") else found
    for entry in range(8, min(8 + 40 * struct.unpack_from("<H", node, 6)[0], len(node) - 39), 40):
        at, kind, tree, heap = struct.unpack_from("<8xQI4xQQ", node, entry)
        found[at] = _OBJECT_HEADER
        if kind == 1:  # a group, whose tree and heap it names
            found |= {tree: _GROUP_TREE_BYTES, heap: _OBJECT_HEADER}
    return found


def _of_links(node: bytes) -> dict[int, int]:
    """The objects that hard links of the latest format lead to: messages, of which nobody says where they begin."""
    found, at = dict[int, int](), 0
    while link := _LINK.search(node, at):
        at, size = link.start() + 1, 1 << (link[0][1] & 3)
        name = link.end() + size
        end = name + int.from_bytes(node[link.end() : name], "little")
        if name < end <= len(node) - 8 and node[name:end].isascii() and node[name:end].decode("ascii").isprintable():
            found[struct.unpack_from("<Q", node, end)[0]] = _OBJECT_HEADER
            at = end + 8
    return found
