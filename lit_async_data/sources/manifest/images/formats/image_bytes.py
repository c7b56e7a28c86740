"""Format, size and completeness of an image from its bytes, before decoding."""

from __future__ import annotations

import struct

from lit_async_data.errors import CorruptError, FormatError

JPEG, PNG, TIFF, WEBP, BMP, GIF = "JPEG", "PNG", "TIFF", "WebP", "BMP", "GIF"
_SIGNATURES = {
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
_END_OF_JPEG = b"\xff\xd9"


class DamageError(ValueError):
    """Damage in the data of an image; its message becomes part of a `CorruptError` that names the file."""


def format_of(data: bytes, where: str) -> str:
    """The format of an image by its first bytes, whatever its name is.

    Raises:
        FormatError: The format is not supported.
        CorruptError: The file is empty.

    Example:
        >>> format_of(b"GIF89a...", "x.gif")
        'GIF'
    """
    if not data:
        raise CorruptError(f"{where}: empty; fetch the file again")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return WEBP
    for beginning, kind in _SIGNATURES.items():
        if data.startswith(beginning):
            return kind
    raise FormatError(
        f"{where}: begins with {data[:8]!r}, which is not a JPEG, PNG, TIFF, WebP, BMP or GIF; convert it, or leave it "
        "out"
    )


def check_ended(data: bytes, start: int, where: str) -> None:
    """Refuse a JPEG without an end marker: decoders would make up the missing pixels.

    Args:
        data: All bytes of the file.
        start: Offset of its first scan; a thumbnail before it has its own end marker.
        where: The file in messages.

    Raises:
        CorruptError: The end marker is missing.
    """
    if data.rfind(_END_OF_JPEG, start) < 0:
        raise cut_short(JPEG, where)


def cut_short(kind: str, where: str) -> CorruptError:
    """The error of a file that ends too soon."""
    return CorruptError(f"{where}: the {kind} ends too soon; was the file cut short? Fetch it again")


def has_frames(data: bytes) -> bool:
    """Whether a WebP has the structure of an animation, even with one frame."""
    return data[12:16] == b"VP8X" and bool(data[20] & 2)


def is_lossless(data: bytes) -> bool:
    """Whether the first image in a WebP is lossless."""
    place = 12
    while (name := data[place : place + 4]) and name not in (b"VP8 ", b"VP8L"):
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8 + size + size % 2
    return name == b"VP8L"


def early_size(data: bytes, kind: str) -> tuple[int, int]:
    """(width, height) for formats whose decoder allocates memory as soon as it sees the data; (1, 1) for others.

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
