"""Resizing a part of an image: by torch where it can, which takes a fifth of the time that Pillow does.

Measured on JPEGs of 330×370 pixels that become 224×224: Pillow 900 µs, torch 170 µs, for values that differ by no more
than 1 of 255, and by 0.001 on average: torch's kernel for bytes is that of Pillow, in vector instructions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from lit_async_data.sources.manifest.cropping import Box
from lit_async_data.sources.manifest.image_shape import ImageShape
from lit_async_data.spec import Bytes

# Pillow's own shortcut for images that become much smaller; from 3 on it changes less than 0.4 of 255 on average.
_REDUCING_GAP = 3.0


def resized(pixels: Bytes, box: Box, size: tuple[int, int], shape: ImageShape) -> Bytes:
    """A part of an image in another size.

    Args:
        pixels: uint8, shape (height, width, channels): grey, grey and opacity, RGB or RGBA.
        box: Left, upper, right and lower edge of the part.
        size: (height, width) that it gets.
        shape: Says how pixels are weighed.

    Returns:
        uint8, shape (height, width, channels); may be a view of the pixels.
    """
    if all(float(edge).is_integer() for edge in box):
        # Cut out first, as torchvision does: what lies beside the part has no say in its edge.
        left, upper, right, lower = (int(edge) for edge in box)
        pixels = pixels[upper:lower, left:right]
        if pixels.shape[:2] == size:
            return pixels
        if shape.interpolation in ("bilinear", "bicubic") and pixels.shape[2] in (1, 3):
            return _by_torch(pixels, size, shape.interpolation)
        box = (0, 0, right - left, lower - upper)
    # Torch knows of no parts of pixels.
    return _by_pillow(pixels, box, size, shape.interpolation)


def _by_torch(pixels: Bytes, size: tuple[int, int], interpolation: str) -> Bytes:
    # A copy of the part, which torch can take without one of its own, by threads of its own.
    batch = torch.from_numpy(np.array(pixels, order="C"))[None].permute(0, 3, 1, 2)
    found: Bytes = interpolate(batch, size, mode=interpolation, antialias=True).permute(0, 2, 3, 1)[0].numpy()
    return found


def _by_pillow(pixels: Bytes, box: Box, size: tuple[int, int], interpolation: str) -> Bytes:
    from PIL import Image

    # Opacity weighs colours: Pillow does that for images that have it.
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    filter_ = Image.Resampling[interpolation.upper()]
    found = image.resize((size[1], size[0]), filter_, box=box, reducing_gap=_REDUCING_GAP)
    return np.frombuffer(found.tobytes(), np.uint8).reshape(*size, -1)
