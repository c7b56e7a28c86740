"""What the bytes of an image say of themselves before anything is decoded: format, size, and whether they are whole.

What Pillow does not look at: the check sums of PNG's pixels, and whether a JPEG has its last marker.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from lit_async_data.errors import CorruptError, FormatError

JPEG, PNG, TIFF, WEBP, BMP, GIF = "JPEG", "PNG", "TIFF", "WebP", "BMP", "GIF"
_BEGINNINGS = {
    b"\xff\xd8\xff": JPEG,
    b"\x89PNG\r\n\x1a\n": PNG,
    b"II*\x00": TIFF,
    b"MM\x00*": TIFF,
    b"II+\x00": TIFF,
    b"MM\x00+": TIFF,
    b"BM": BMP,
    b"GIF87a": GIF,
    b"GIF89a": GIF,
}
# Where the parts of a PNG lie in its file, by name; of several of one name, the first.
Parts = dict[bytes, slice]

_END_OF_JPEG = b"\xff\xd9"
_END_OF_PNG = b"IEND"


def format_of(data: bytes, where: str) -> str:
    """The format, by its first bytes; what a file is called says nothing.

    Raises:
        FormatError: None that is read here.
        CorruptError: There are no bytes.

    Example:
        >>> format_of(b"GIF89a...", "x.gif")
        'GIF'
    """
    if not data:
        raise CorruptError(f"{where}: empty; there is no image in it")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return WEBP
    for beginning, kind in _BEGINNINGS.items():
        if data.startswith(beginning):
            return kind
    raise FormatError(
        f"{where}: begins with {data[:8]!r}, which is not a JPEG, PNG, TIFF, WebP, BMP or GIF; convert it, or leave it "
        "out"
    )


def whole_png(data: bytes, where: str) -> Parts:
    """Where the parts of a PNG lie, once it ends as it should and every check sum is right.

    Args:
        data: All of the file.
        where: Its name, for messages.

    Raises:
        CorruptError: It is not what was written once.
    """
    parts: Parts = {}
    name, view = b"", memoryview(data)
    for name, start, end in _png_parts(data):
        if zlib.crc32(view[start:end]) != int.from_bytes(data[end : end + 4], "big"):
            raise CorruptError(f"{where}: the check sum of a part of the PNG ({name!r}) is wrong; fetch the file again")
        parts.setdefault(name, slice(start + 4, end))
    if name != _END_OF_PNG:
        raise _cut(PNG, where)
    return parts


def check_ended(data: bytes, start: int, where: str) -> None:
    """Refuse a JPEG without its last marker: a file whose end was never written may be decoded as far as it goes.

    Args:
        data: All of the file.
        start: Where its first scan begins: a thumbnail before it has an end of its own.
        where: Its name, for messages.

    Raises:
        CorruptError: It has none.
    """
    if data.rfind(_END_OF_JPEG, start) < 0:
        raise _cut(JPEG, where)


def exif_of_png(data: bytes, parts: Parts) -> bytes:
    """The EXIF block of a PNG, which may stand behind the pixels; empty where there is none."""
    return data[parts.get(b"eXIf", slice(0))]


def _png_parts(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of each part that is there as a whole: its check sum is of data[begin:end], and follows."""
    place = 8
    while place + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, place)
        end = place + 8 + length
        if end + 4 > len(data):
            return
        yield name, place + 4, end
        if name == _END_OF_PNG:
            return
        place = end + 4


def _cut(kind: str, where: str) -> CorruptError:
    return CorruptError(f"{where}: the {kind} ends too soon; was the file cut short? Fetch it again")


def early_size(data: bytes, kind: str) -> tuple[int, int]:
    """(width, height) of a format whose decoder takes memory as soon as it sees the data; (1, 1) for others.

    Raises:
        struct.error: The data end too soon.
    """
    if kind == GIF:
        width, height = struct.unpack_from("<HH", data, 6)
        return width, height
    if kind != WEBP:
        return 1, 1
    chunk = data[12:16]
    if chunk == b"VP8X":
        both = int.from_bytes(struct.unpack_from("6s", data, 24)[0], "little")
        return (both & 0xFFFFFF) + 1, (both >> 24) + 1
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF
