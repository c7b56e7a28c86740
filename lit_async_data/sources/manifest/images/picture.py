"""`Picture`: an image before its pixels are decoded, and what the head of its file says of them.

Pillow takes longer to open a file, under the GIL, than reading the few bytes that matter. Those of plain PNGs are read
here and those of JPEGs in `jpeg.py`; Pillow opens only what it decodes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from lit_async_data.sources.manifest.images.image_bytes import PNG
from lit_async_data.sources.manifest.images.png import HEAD, Parts

# Of PNG: modes of 8 bits that the faster library knows, by the type of colour.
_MODES = {0: "L", 2: "RGB", 6: "RGBA"}


class Head(NamedTuple):
    """What the head of a file says.

    Attributes:
        size: (width, height) as stored.
        mode: As Pillow calls it: ``"L"``, ``"RGB"`` or ``"RGBA"``, of 8 bits.
    """

    size: tuple[int, int]
    mode: str


@dataclasses.dataclass
class Picture:
    """An image whose pixels have not been decoded.

    Attributes:
        kind: Its format.
        data: All bytes of its file.
        size: (width, height) as stored.
        mode: As Pillow calls it.
        turned: How its pixels must be turned, 1 to 8.
        opening: Has Pillow open it.
        parts: Of a PNG, where they lie.
        plain: Whether its head could be read here, so that a faster library may decode it.
        bits: Of each stored value.
        beside: Of a JPEG, bytes that its decoder holds besides the pixels.
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
    beside: int = 0

    @functools.cached_property
    def pillow(self) -> Any:
        """The image of Pillow; raises whatever damaged data make Pillow raise."""
        return self.opening()


def head_of(kind: str, data: bytes, parts: Parts) -> Head | None:
    """The head of a plain PNG; None where Pillow must read it, or nothing else could decode it.

    Args:
        kind: Its format.
        data: All bytes of the file.
        parts: Of a PNG, from `whole_png`.
    """
    return _png(data, parts) if kind == PNG and imagecodecs() is not None else None


def _png(data: bytes, parts: Parts) -> Head | None:
    width, height, depth, colours, _, _, interlaced = HEAD.unpack_from(data, 16)
    unusual = depth != 8 or interlaced or colours not in _MODES or b"acTL" in parts  # frames of an animation
    return None if unusual else Head((width, height), _MODES[colours])


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
