"""JPEG: headers, and pixels decoded by simplejpeg, which reports the warnings of libjpeg.

Pillow uses the same libjpeg but drops its warnings, so a damaged JPEG becomes an image with made-up pixels. This module
alone decides whether a JPEG is damaged, for every mode, with one decoder.
"""

from __future__ import annotations

import functools
import importlib
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.manifest.images.formats.image_bytes import JPEG, DamageError, check_ended, cut_short

_BEGIN = b"\xff\xd8"
_APP0, _APP1, _APP14, _SCAN = 0xE0, 0xE1, 0xEE, 0xDA
_EXIF, _XMP, _JFIF, _ADOBE = b"Exif\x00\x00", b"http://ns.adobe.com/xap/1.0/\x00", b"JFIF\x00", b"Adobe"
# Markers without a length; and markers that end a header without pixels.
_NO_LENGTH, _NO_SCAN = (0x01, *range(0xD0, 0xD8)), (0xD8, 0xD9)
# Frames that libjpeg decodes (Huffman or arithmetic coding, sequential or progressive); and all others.
_BASELINE, _SEQUENTIAL = 0xC0, (0xC0, 0xC1, 0xC9)
_FRAMES = (*_SEQUENTIAL, 0xC2, 0xCA)
_OTHER_FRAMES = {
    **dict.fromkeys((0xC3, 0xCB), "lossless"),
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical"),
}
_ALL_FRAMES = (*_FRAMES, *_OTHER_FRAMES)
# Other segments that pixels depend on: tables of both codings, quantization, restart intervals.
_TABLES = (0xC4, 0xCC, 0xDB, 0xDD)
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_COLOURS = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}
_TRANSFORM = 6  # offset after "Adobe" of the byte that gives the colour transform
_PLAIN_JFIF = _JFIF + bytes((1, 1, 0, 0, 1, 0, 1, 0, 0))

# simplejpeg refuses sampling factors that it has no name for; Pillow decodes them.
_UNNAMED_SAMPLING = "determine subsampling"
_EXTRA = re.compile(r"(\d+) extraneous bytes before marker 0x(\w\w)")
_LAST_MARKER = "d9"
# Encoders that pad data to words leave up to seven bytes before the next marker. Damage usually leaves more.
_MAX_PADDING = 7


class Head(NamedTuple):
    """The header of a JPEG.

    Attributes:
        size: (width, height) as stored.
        mode: Pillow's mode: ``"L"``, ``"RGB"`` or ``"CMYK"``.
        exif: The EXIF block; empty if there is none.
        xmp: The XMP block; empty if there is none.
        coefficient_bytes: Bytes of the coefficients, which libjpeg holds until the last scan; 0 if there is one scan.
    """

    size: tuple[int, int]
    mode: str
    exif: bytes
    xmp: bytes
    coefficient_bytes: int


def head_of(data: bytes, where: str) -> Head:
    """The header of a complete JPEG.

    Args:
        data: All bytes of the file.
        where: The file in messages.

    Raises:
        CorruptError: The header is inconsistent or ends too soon, or the end marker is missing.
        FormatError: An unsupported kind of JPEG.
    """
    frame, exif, xmp, several, components = None, b"", b"", False, b""
    for marker, start, stop in _segments(data):
        if marker in _ALL_FRAMES:
            if frame is not None:
                raise CorruptError(f"{where}: the JPEG states its size twice; fetch the file again")
            frame = _frame(marker, data[start:stop], where)
            several, components = marker not in _SEQUENTIAL, data[start + 6 : stop]
        elif marker == _APP1 and data.startswith(_EXIF, start):
            exif += data[start + len(_EXIF) if exif else start : stop]
        elif marker == _APP1 and data.startswith(_XMP, start):
            xmp = data[start + len(_XMP) : stop]
        elif marker == _SCAN and frame is not None:
            check_ended(data, start, where)
            several = several or 3 * data[start] < len(components)
            return Head(*frame, exif, xmp, _coefficients(frame[0], components) if several else 0)
    raise cut_short(JPEG, where)


def jpeg_pixels(data: bytes, mode: str, size: tuple[int, int], factor: int, out: Bytes | None = None) -> Bytes | None:
    """Decode a JPEG, to the same values as Pillow.

    Args:
        data: All bytes of the file.
        mode: From `Head`.
        size: (width, height) as stored.
        factor: Divides both sides: 1, 2, 4 or 8.
        out: uint8, C-contiguous, of the returned shape: receives the pixels. None: a new array.

    Returns:
        uint8, shape (height, width, channels); None if only Pillow decodes the sampling factors.

    Raises:
        DamageError: libjpeg found damage.
        ConfigError: simplejpeg is missing.
    """
    width, height = (-(-side // factor) for side in size)
    decode = functools.partial(
        _library().decode_jpeg,
        colorspace=_COLOURS[mode],
        min_height=height,
        min_width=width,
        min_factor=factor,
        buffer=out,
    )
    pixels = _decoded(data, decode)
    if pixels is None or pixels.shape[:2] != (height, width):
        return None
    if mode == "CMYK":  # stored inverted, as by Adobe; Pillow assumes this too
        np.subtract(255, pixels, out=pixels)
    return pixels


def check_jpeg(data: bytes) -> None:
    """Raise DamageError if libjpeg finds damage in a JPEG, such as a strip of a TIFF.

    Args:
        data: From the first marker to the last.
    """
    frames = [(marker, data[start:stop]) for marker, start, stop in _segments(data) if marker in _ALL_FRAMES]
    if len(frames) != 1 or frames[0][0] not in _FRAMES or frames[0][1][:1] != b"\x08":
        return  # left to Pillow: simplejpeg crashes when it downscales a lossless JPEG
    colours = "CMYK" if frames[0][1][5:6] == b"\x04" else "GRAY"
    _decoded(
        data, functools.partial(_library().decode_jpeg, colorspace=colours, min_height=1, min_width=1, min_factor=8)
    )


def _library() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        raise ConfigError(
            "image: simplejpeg is missing; install it by pip install 'lit-async-data[manifest]'"
        ) from None


def _decoded(data: bytes, decode: Callable[..., Bytes]) -> Bytes | None:
    """Pixels, if libjpeg has no warning that matters; None if simplejpeg cannot name the sampling."""
    try:
        return decode(data)
    except ValueError as error:
        if _UNNAMED_SAMPLING in str(error):
            return None
    # libjpeg reports only its first warning, so decode again without anything harmless to warn about.
    cleaned = _without_harmless_parts(data)
    try:
        return decode(cleaned)
    except ValueError as error:
        if _UNNAMED_SAMPLING in str(error):
            return None
        extra = _EXTRA.search(str(error))
        if extra is None or (extra[2] != _LAST_MARKER and int(extra[1]) > _MAX_PADDING):
            raise DamageError(f"libjpeg says: {error}") from error
    return decode(cleaned, strict=False)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of the content of each segment before the pixels, found as libjpeg finds them.

    The last one is the first scan, unless the header ends before it. Skips bytes between segments.
    """
    place = len(_BEGIN)
    while 0 <= (place := data.find(b"\xff", place)) < len(data) - 3:
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
        elif marker == 0 or marker in _NO_LENGTH:
            place += 2
        elif marker in _NO_SCAN:
            return
        else:
            stop = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
            if not place + 4 <= stop <= len(data):
                return
            yield marker, place + 4, stop
            if marker == _SCAN:
                return
            place = stop


def _frame(marker: int, content: bytes, where: str) -> tuple[tuple[int, int], str]:
    """Size and mode."""
    damaged = CorruptError(f"{where}: the header of the JPEG is inconsistent; fetch the file again")
    if len(content) < 6:
        raise damaged
    bits, height, width, components = struct.unpack_from(">BHHB", content)
    if len(content) != 6 + 3 * components or not 2 <= bits <= 16 or (marker == _BASELINE and bits != 8):
        raise damaged
    kind = _OTHER_FRAMES.get(marker) or (f"{bits}-bit" if bits != 8 else "")
    if kind:
        raise FormatError(f"{where}: a {kind} JPEG, which is not supported; convert it to PNG, TIFF or .npy")
    if components not in _MODES:
        raise FormatError(
            f"{where}: a JPEG of {components} channels, but only 1, 3 or 4 are supported; convert it to PNG, TIFF or "
            ".npy"
        )
    return (width, height), _MODES[components]


def _coefficients(size: tuple[int, int], components: bytes) -> int:
    """Bytes of all coefficients of a JPEG, two each."""
    width, height = size
    samples = [(factors >> 4, factors & 15) for factors in components[1::3]]
    across, down = (max(*sides, 1) for sides in zip(*samples, strict=True))
    return sum(2 * -(-width * wide // across) * -(-height * tall // down) for wide, tall in samples)


def _without_harmless_parts(data: bytes) -> bytes:
    """The JPEG without header parts that cause warnings but change no pixel.

    These are stray bytes between segments, odd versions, and segments that only describe the image.

    Raises:
        DamageError: The stray bytes contain the colour transform.
    """
    kept, sequential, channels, last = [_BEGIN], False, 0, len(_BEGIN)
    for marker, start, stop in _segments(data):
        stray = data[last : start - 4].partition(_ADOBE)
        if stray[1] and stray[2][_TRANSFORM : _TRANSFORM + 1] != b"\x01":  # 1 is the default
            raise DamageError("the segment of the colour transform has no marker")
        content, last = data[start:stop], stop
        if marker == _APP0 and content.startswith(_JFIF):
            content = _PLAIN_JFIF
        elif marker == _APP14 and content.startswith(_ADOBE) and len(content) >= 12:
            # libjpeg replaces an unknown number by the usual one.
            usual = 2 if channels == 4 else 1
            content = content[:11] + bytes((content[11] if content[11] <= 2 else usual,)) + content[12:]
        elif marker in _FRAMES:
            sequential, channels = marker in _SEQUENTIAL, content[5] if len(content) > 5 else 0
        elif marker == _SCAN:
            # The range of coefficients matters only in progressive JPEGs.
            kept += [data[start - 4 : stop - 3], b"\x00\x3f\x00" if sequential else data[stop - 3 : stop], data[stop:]]
            break
        elif marker not in _TABLES:
            continue
        kept.append(b"\xff" + bytes((marker,)) + struct.pack(">H", len(content) + 2) + content)
    return b"".join(kept)
