"""The pixels of an image that has been opened: decoded, in the wanted mode, and upright."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from lit_async_data.sources.manifest.cropping import Box, Crop, whole_pixels
from lit_async_data.sources.manifest.image_shape import ImageShape
from lit_async_data.sources.manifest.orientation import mirrored, upright, upright_size
from lit_async_data.spec import Bytes

JPEG = "JPEG"
# Modes of Pillow whose values have more than 8 bits.
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
# A JPEG is decoded at half, a quarter or an eighth of its size where at least this many times the wanted pixels are
# left in each direction. Measured on photographs: what it changes is then about what the JPEG itself has changed
# (0.4 to 0.9 of 255 on average); at 1 it would be three times that.
_LEFT_OVER = 2


def pixels_of(image: Any, data: bytes, crop: Crop, shape: ImageShape, turned: int) -> tuple[Bytes, Box]:
    """The pixels of an image, perhaps of half, a quarter or an eighth of its size, and the wanted part of them.

    Args:
        image: Of Pillow, opened; its pixels may not have been decoded yet.
        data: All bytes of its file.
        crop: What of it is wanted, as it is seen.
        shape: Says which mode is wanted.
        turned: How the camera was held, 1 to 8.

    Returns:
        uint8, shape (height, width, channels), upright; of one channel where each grey value becomes a colour later.
        And left, upper, right and lower edge of the wanted part.
    """
    factor = _factor(image, crop, shape)
    box = _reduced(image, crop, shape, turned, factor)
    pixels = _jpeg(image, data, shape, factor)
    if pixels is None:
        if factor > 1:
            image.draft(None, (image.size[0] // factor, image.size[1] // factor))
        image.load()
        pixels = _array(_converted(image, shape))
    return upright(pixels, turned), box


def _factor(image: Any, crop: Crop, shape: ImageShape) -> int:
    """By what both sides of a JPEG are divided when it is decoded."""
    if image.format != JPEG or shape.interpolation == "nearest":
        return 1
    left, upper, right, lower = crop.box
    room = min((right - left) / crop.size[1], (lower - upper) / crop.size[0]) / _LEFT_OVER
    return next((factor for factor in (8, 4, 2) if factor <= room), 1)


def _reduced(image: Any, crop: Crop, shape: ImageShape, turned: int, factor: int) -> Box:
    """The wanted part of an image whose sides have been divided."""
    if factor == 1:
        return crop.box
    left, upper, right, lower = crop.box
    # Stored, not upright: but both sides are divided alike.
    height, width = upright_size(image.size, turned)
    # The last column and row may be wider than the image: where it is mirrored, they come first.
    right_first, lower_first = mirrored(turned)
    across = -(-width // factor) - width / factor if right_first else 0
    down = -(-height // factor) - height / factor if lower_first else 0
    box = (left / factor + across, upper / factor + down, right / factor + across, lower / factor + down)
    # A part that was chosen is no worse for beginning a pixel before or behind; and it can be resized faster.
    return whole_pixels(*box) if shape.resize in ("crop", "random_crop") else box


@functools.cache
def simplejpeg() -> Any:
    """The library of that name, of the extra ``jpeg``; None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def _jpeg(image: Any, data: bytes, shape: ImageShape, factor: int) -> Bytes | None:
    """The pixels of a JPEG by simplejpeg, if that is installed: the same values as Pillow's, in 0.6 of its time.

    None for what is left to Pillow: CMYK, other modes, and what simplejpeg has something to say of.
    """
    library = simplejpeg()
    as_stored = image.mode == shape.mode or (image.mode == "L" and shape.mode == "RGB")
    if library is None or image.format != JPEG or image.mode not in ("L", "RGB") or not as_stored:
        return None
    width, height = (-(-side // factor) for side in image.size)
    colours = "GRAY" if image.mode == "L" else "RGB"
    try:
        pixels: Bytes = library.decode_jpeg(data, colours, min_height=height, min_width=width, min_factor=factor)
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


def _converted(image: Any, shape: ImageShape) -> Any:
    """The image in a mode that can be resized: the wanted one, or grey where each grey value becomes a colour later."""
    if image.mode in SIXTEEN_BITS:
        image = _eight_bits(image)
    if not shape.alpha:
        # Converted, it would be filled in or warned of.
        image.info.pop("transparency", None)
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if image.mode == shape.mode or (image.mode == "L" and shape.mode == "RGB"):
        return image
    return image.convert(shape.mode)


def _eight_bits(image: Any) -> Any:
    """The upper 8 of the bits that were stored."""
    from PIL import Image

    tags = getattr(image, "tag_v2", {})
    bits = tags.get(258, (16,))[0]
    values = np.asarray(image) >> (bits - 8)
    return Image.fromarray(values.astype(np.uint8))


def _array(image: Any) -> Bytes:
    width, height = image.size
    return np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, -1)
