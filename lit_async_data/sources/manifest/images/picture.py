"""`Picture`: an image before decoding, with the properties from its header.

Pillow takes longer to open a file, under the GIL, than reading the few bytes that matter. Headers of plain PNGs are
read here and those of JPEGs in `formats/jpeg.py`; Pillow opens only what it decodes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_async_data.sources.manifest.images.formats.image_bytes import PNG
from lit_async_data.sources.manifest.images.formats.png import HEAD, Parts

# PNG: modes of 8 bits that imagecodecs decodes, by colour type.
_MODES = {0: "L", 2: "RGB", 6: "RGBA"}


class Head(NamedTuple):
    """The header of a file.

    Attributes:
        size: (width, height) as stored.
        mode: Pillow's mode: ``"L"``, ``"RGB"`` or ``"RGBA"``, of 8 bits.
    """

    size: tuple[int, int]
    mode: str


@dataclasses.dataclass
class Picture:
    """An image whose pixels have not been decoded.

    Attributes:
        kind: Format.
        data: All bytes of the file.
        size: (width, height) as stored.
        mode: Pillow's mode.
        turned: Orientation of the stored pixels, 1 to 8.
        opening: Opens the image in Pillow.
        parts: Positions of the parts of a PNG.
        plain: Whether its header was read here, so that a faster library may decode it.
        bits: Bits per stored value.
        coefficient_bytes: Bytes of JPEG coefficients that the decoder holds besides the pixels.
    """

    kind: str
    data: bytes
    size: tuple[int, int]
    mode: str
    turned: int
    opening: Callable[[], Any]
    parts: Parts
    plain: bool
    bits: int = 8
    coefficient_bytes: int = 0

    @functools.cached_property
    def pillow(self) -> Any:
        """The Pillow image; raises any error that Pillow raises for damaged data."""
        return self.opening()


def head_of(kind: str, data: bytes, parts: Parts) -> Head | None:
    """The header of a plain PNG; None if Pillow must read it, or no other library could decode it.

    Args:
        kind: Format.
        data: All bytes of the file.
        parts: For a PNG, from `whole_png`.
    """
    return _png(data, parts) if kind == PNG and imagecodecs() is not None else None


def _png(data: bytes, parts: Parts) -> Head | None:
    width, height, depth, colours, _, _, interlaced = HEAD.unpack_from(data, 16)
    unusual = depth != 8 or interlaced or colours not in _MODES or b"acTL" in parts  # frames of an animation
    return None if unusual else Head((width, height), _MODES[colours])


@functools.cache
def imagecodecs() -> Any:
    """The library imagecodecs from the extra ``codecs``; None if it, or a codec that is needed, is missing."""
    library = _imported("imagecodecs")
    return library if library is not None and library.SPNG.available and library.DEFLATE.available else None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
