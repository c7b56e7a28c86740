"""`Superblock`: what the head of an HDF5 file says about the file, read without libhdf5."""

from __future__ import annotations

from typing import NamedTuple, Self

SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Bits of the file consistency flags.
WRITING, SWMR = 1, 4


class Superblock(NamedTuple):
    """The fields of a superblock that are of use here; see the HDF5 file format specification.

    Attributes:
        flags: `WRITING` and `SWMR`, as long as a program writes, or if it was killed meanwhile. 0 before version 3.
        end: Bytes that the file should have at least; 0 if the head is cut off.
    """

    flags: int = 0
    end: int = 0

    @classmethod
    def of(cls, path: str) -> Self | None:
        """The superblock of a file; None if it has none."""
        with open(path, "rb") as file:
            for begin in (0, *(2**power for power in range(9, 32))):  # after a user block
                file.seek(begin)
                head = file.read(96)
                if head.startswith(SIGNATURE):
                    return cls._parsed(head)
                if not head:
                    break
        return None

    @classmethod
    def _parsed(cls, head: bytes) -> Self:
        if len(head) < 48:
            return cls()
        version = head[8]
        size, addresses = (head[9], 12) if version >= 2 else (head[13], 28 if version == 1 else 24)
        third = addresses + 2 * size
        return cls(head[11] if version == 3 else 0, int.from_bytes(head[third : third + size], "little"))
