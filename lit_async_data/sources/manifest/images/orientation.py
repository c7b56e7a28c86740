"""How a camera was held: the orientation in an image's EXIF or XMP block, as Pillow's ``exif_transpose`` finds it.

Read here and not by Pillow, which parses all of the block, warns of anything odd in it, and takes ten times as long.
"""

from __future__ import annotations

import re
import struct

from lit_async_data.batch.spec import Array

# Left, upper, right and lower edge, in whole pixels.
Part = tuple[int, int, int, int]

UPRIGHT = 1
ORIENTATION = 0x0112  # the tag
_SHORT, _LONG = 3, 4
_PREFIX = b"Exif\x00\x00"
# As an attribute or an element of XMP.
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation_of(exif: bytes, xmp: bytes = b"") -> int:
    r"""The orientation, 1 to 8; 1, as stored, where there is none or it cannot be read.

    Args:
        exif: The EXIF block, with or without the ``Exif`` that JPEG puts before it.
        xmp: The XMP block, which counts where EXIF names no orientation.

    Example:
        >>> orientation_of(b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 3, 1, 6))
        6
        >>> orientation_of(b"nothing of the kind")
        1
        >>> orientation_of(b"", b'<rdf:Description tiff:Orientation="8"/>')
        8
    """
    named = _named_in_exif(exif)
    if named is None:
        found = _XMP.search(xmp)
        named = int(found[1]) if found else UPRIGHT
    return named if 1 <= named <= 8 else UPRIGHT


def _named_in_exif(exif: bytes) -> int | None:
    """The value of the tag; None where there is no such tag."""
    block = exif.removeprefix(_PREFIX)
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(bytes(block[:4]))
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for number in range(entries):
            tag, kind, count = struct.unpack_from(order + "HHI", block, start + 2 + 12 * number)
            if tag == ORIENTATION:
                return _value(order, kind, count, block, start + 10 + 12 * number)
    except struct.error:
        pass  # the block ends before the entries that it promises
    return None


def _value(order: str, kind: int, count: int, block: bytes, place: int) -> int:
    letter = {_SHORT: "H", _LONG: "I"}.get(kind)
    if letter is None or count != 1:
        return UPRIGHT
    (value,) = struct.unpack_from(order + letter, block, place)
    return int(value)


def upright_size(size: tuple[int, int], turned: int) -> tuple[int, int]:
    """(height, width) of an image as it is seen, from (width, height) as it is stored."""
    width, height = size
    return (width, height) if turned >= 5 else (height, width)


def mirrored(turned: int) -> tuple[bool, bool]:
    """Whether what is stored at the right is seen at the left, and what is stored at the bottom at the top."""
    return turned in (2, 3, 6, 7), turned in (3, 4, 7, 8)


def stored_part(part: Part, size: tuple[int, int], turned: int) -> Part:
    """Where a part of an image lies as it is stored.

    Args:
        part: Left, upper, right and lower edge, as it is seen.
        size: (height, width) of the image, as it is seen.
        turned: How the camera was held, 1 to 8.
    """
    left, upper, right, lower = part
    right_first, lower_first = mirrored(turned)
    if right_first:
        left, right = size[1] - right, size[1] - left
    if lower_first:
        upper, lower = size[0] - lower, size[0] - upper
    return (upper, left, lower, right) if turned >= 5 else (left, upper, right, lower)


def upright(pixels: Array, turned: int) -> Array:
    """Pixels as they are seen: a view of those that are stored.

    Args:
        pixels: Shape (height, width, channels).
        turned: How the camera was held, 1 to 8.
    """
    if turned >= 5:
        pixels = pixels.transpose(1, 0, 2)
    right_first, lower_first = mirrored(turned)
    return pixels[:: -1 if lower_first else 1, :: -1 if right_first else 1]
