"""`ObjectFile`: a mirror as a file for h5py, which fetches the metadata that libhdf5 will want before it does.

libhdf5 walks the tree of a group or of a dataset's chunks one node after the other, a round trip for each. Each node
has the addresses of its children, so those of a level are fetched at once (HDF5 file format specification 3.0, III.A.1,
III.B, III.C, III.G and IV.A.2.g). Nothing depends on the addresses that are found: libhdf5 reads what it wants, and a
wrong address costs a request.
"""

from __future__ import annotations

import gc
import io
import itertools
import re
import struct
from collections.abc import Callable

import numpy as np

from lit_async_data.sources.files.mirror import BLOCK
from lit_async_data.sources.files.mirrored import MirroredFile

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
    """For one thread at a time, as h5py is, which calls no more than `io.RawIOBase` and these methods have."""

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
