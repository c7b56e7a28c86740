"""`Picture`: an image before its pixels are decoded, and what the head of its file says of them.

Pillow takes 27 µs to open a JPEG, under Python's lock, where 9 are enough for the few bytes that matter. Of usual
images these are read here, and Pillow is asked only where its decoder is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_async_data.sources.manifest.image_bytes import JPEG, PNG
from lit_async_data.sources.manifest.png import HEAD, Parts, exif_of_png

_EXIF = b"Exif\x00\x00"
# Of JPEG: what begins a frame that every decoder knows (baseline, extended, progressive), the pixels, and a block of a
# camera; and those that have no length.
_FRAMES, _SCAN, _APP1 = (0xC0, 0xC1, 0xC2), 0xDA, 0xE1
_ALONE = (0x01, *range(0xD0, 0xDA))
# Of PNG: modes of 8 bits that the faster library knows, by the type of colour.
_MODES = {0: "L", 2: "RGB", 6: "RGBA"}


class Head(NamedTuple):
    """What the head of a file says.

    Attributes:
        size: (width, height) as stored.
        mode: As Pillow calls it: ``"L"``, ``"RGB"`` or ``"RGBA"``, of 8 bits.
        exif: The block of a camera; empty where there is none.
        pixels: Byte at which the pixels begin.
    """

    size: tuple[int, int]
    mode: str
    exif: bytes
    pixels: int


@dataclasses.dataclass
class Picture:
    """An image whose pixels have not been decoded.

    Attributes:
        kind: Its format.
        data: All bytes of its file.
        size: (width, height) as stored.
        mode: As Pillow calls it.
        exif: The block of a camera.
        opening: Has Pillow open it.
        parts: Of a PNG, where they lie.
        plain: Whether its head could be read here, so that a faster library may decode it.
        bits: Of each stored value.
    """

    kind: str
    data: bytes
    size: tuple[int, int]
    mode: str
    exif: Any
    opening: Callable[[], Any]
    parts: Parts
    plain: bool
    bits: int = 8

    @functools.cached_property
    def pillow(self) -> Any:
        """The image of Pillow; raises whatever damaged data make Pillow raise."""
        return self.opening()


def head_of(kind: str, data: bytes, parts: Parts) -> Head | None:
    """The head of a plain JPEG or PNG; None where Pillow is to look at it, or nothing else could decode it.

    Args:
        kind: Its format.
        data: All bytes of the file.
        parts: Of a PNG, from `whole_png`.
    """
    if kind == JPEG and simplejpeg() is not None:
        return _jpeg(data)
    if kind == PNG and imagecodecs() is not None:
        return _png(data, parts)
    return None


def _jpeg(data: bytes) -> Head | None:
    place, frame, exif, end = 2, None, b"", len(data) - 9
    while place < end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in _ALONE or marker == 0xFF:
            return None
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == _SCAN:
            return None if frame is None else Head(*frame, exif, place)
        if marker in _FRAMES:
            if frame is not None or data[place + 4] != 8:
                return None
            height, width, components = struct.unpack_from(">HHB", data, place + 5)
            if not (height and width and components in (1, 3)):
                return None
            frame = (width, height), "L" if components == 1 else "RGB"
        elif marker == _APP1 and data.startswith(_EXIF, place + 4):
            block = data[place + 4 : place + 2 + length]
            exif = exif + block.removeprefix(_EXIF) if exif else block
        place += 2 + length
    return None


def _png(data: bytes, parts: Parts) -> Head | None:
    width, height, depth, colours, _, _, interlaced = HEAD.unpack_from(data, 16)
    unusual = depth != 8 or interlaced or colours not in _MODES or b"acTL" in parts  # frames of an animation
    return None if unusual else Head((width, height), _MODES[colours], exif_of_png(data, parts), 8)


@functools.cache
def simplejpeg() -> Any:
    """The library of that name, of the extra ``jpeg``; None where it is not installed."""
    return _imported("simplejpeg")


@functools.cache
def imagecodecs() -> Any:
    """The library of that name, of the extra ``codecs``; None where it, or what is needed of it, is not installed."""
    found = _imported("imagecodecs")
    return found if found is not None and found.SPNG.available and found.DEFLATE.available else None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
