"""`GlobalHeap`: values of variable length, which datasets refer to, without libhdf5 and its lock.

After the HDF5 file format specification 3.0, III.E (global heap) and IV.A.2.d (references to it).
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.order.permutation import Indices

# Bytes before the objects of a collection, and before the values of each object.
HEAD = 16
SIGNATURE = b"GCOL\x01"
_INTEGERS = {2: "H", 4: "I", 8: "Q"}  # by their bytes, as struct calls them


@dataclasses.dataclass(frozen=True)
class GlobalHeap:
    length_bytes: int  # of each length in it
    begin: int  # bytes of the user block, from whose end addresses count
    end: int  # bytes of the file

    @classmethod
    def of(cls, file: Any) -> GlobalHeap:
        """The heap of an open `h5py.File`."""
        handle = file.id.get_vfd_handle()
        return cls(file.id.get_create_plist().get_sizes()[1], file.userblock_size, os.fstat(handle).st_size)

    def references(self, stored: Bytes) -> Indices:
        """References from their bytes, shape (n, bytes); int64, shape (n, 3).

        Each is the number of bytes of a value, the offset of a collection (−1 if it is outside of the file), and the
        number of an object in it.
        """
        fields = np.zeros((len(stored), 3, 8), np.uint8)
        for number, part in enumerate((stored[:, :4], stored[:, 4:-4], stored[:, -4:])):
            fields[:, number, : part.shape[1]] = part
        found: Indices = fields.view("<i8")[..., 0].astype(np.int64)
        outside = (found[:, 1] < 0) | (found[:, 1] > self.end - self.begin - 2 * HEAD)
        found[:, 1] = np.where(outside, -1, found[:, 1] + self.begin)
        return found

    def value(self, reference: list[int], read: Callable[[int, int], Bytes], where: str) -> Bytes:
        """The bytes that a reference leads to; ``read`` takes an offset and a number of bytes.

        Raises `CorruptError` if they are not there; it begins with ``where``.
        """
        length, address, number = reference
        there = f"{where}: refers to object {number} at byte {address} of the file, in its global heap, "
        if not length:
            return np.empty(0, np.uint8)
        if address < 0:
            raise CorruptError(f"{where}: refers to a place outside of the file; restore the file")
        # Often it is the first object, and this is all of it; if the length is wrong, not too much.
        data = read(address, min(2 * HEAD + length, 2**20, self.end - address))
        # In the head of a collection and of an object, the length is in the same place.
        head = struct.Struct(f"<H6x{_INTEGERS[self.length_bytes]}").unpack_from
        most, place, found = head(data.data)[1], HEAD, 1
        if data[: len(SIGNATURE)].tobytes() != SIGNATURE or most > self.end - address:
            raise CorruptError(f"{there}but no collection of objects begins there; restore the file")
        while found and place + HEAD <= most:  # object 0 is the space that is left
            data = data if place + HEAD <= len(data) else read(address, most)
            (found, size), begin = head(data.data, place), place + HEAD
            if found == number and number:
                if size != length or begin + size > most:
                    raise CorruptError(f"{there}for {length} bytes, but it has {size}; restore the file")
                data = data if begin + size <= len(data) else read(address, most)
                return data[begin : begin + size]
            place = begin + -(-size // 8) * 8
        raise CorruptError(f"{there}where it is missing; restore the file")
