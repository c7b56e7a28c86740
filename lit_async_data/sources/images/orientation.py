"""The orientation in an image's EXIF or XMP block, found as Pillow's ``exif_transpose`` finds it.

Parsed here because Pillow parses the whole block, warns of anything odd in it, and takes ten times as long.
"""

from __future__ import annotations

import re
import struct

from lit_async_data.batch.spec import Array

UPRIGHT = 1
ORIENTATION = 0x0112  # the tag
_SHORT, _LONG = 3, 4
_PREFIX = b"Exif\x00\x00"
# An attribute or element in XMP.
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation_of(exif: bytes, xmp: bytes = b"") -> int:
    """The orientation, 1 to 8; 1 (as stored) if there is none or it cannot be read. XMP counts if EXIF has none."""
    value = _exif_orientation(exif) if exif else None
    if value is None and xmp and (match := _XMP.search(xmp)):
        value = int(match[1])
    return value if value in range(1, 9) else UPRIGHT


def _exif_orientation(exif: bytes) -> int | None:
    block = exif.removeprefix(_PREFIX)
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(bytes(block[:4]))
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", block, entry)
            if tag == ORIENTATION:
                letter = {_SHORT: "H", _LONG: "I"}.get(kind) if count == 1 else None
                return int(struct.unpack_from(order + letter, block, entry + 8)[0]) if letter else UPRIGHT
    except struct.error:
        pass  # the block is shorter than its entries
    return None


def upright_size(size: tuple[int, int], turned: int) -> tuple[int, int]:
    """(height, width) of the upright image, from its stored (width, height)."""
    width, height = size
    return (width, height) if turned >= 5 else (height, width)


def mirrored(turned: int) -> tuple[bool, bool]:
    """Whether the stored image is mirrored left to right, and top to bottom."""
    return turned in (2, 3, 6, 7), turned in (3, 4, 7, 8)


def upright(pixels: Array, turned: int) -> Array:
    """A view of stored pixels, shape (height, width, channels), as the upright image."""
    if turned >= 5:
        pixels = pixels.transpose(1, 0, 2)
    right_first, lower_first = mirrored(turned)
    return pixels[:: -1 if lower_first else 1, :: -1 if right_first else 1]
