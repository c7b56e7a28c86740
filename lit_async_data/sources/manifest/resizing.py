"""Resizing a part of an image: by torch where it can, which takes a fifth of the time that Pillow does.

Measured on JPEGs of 330×370 pixels that become 224×224: Pillow 900 µs, torch 170 µs, for values that differ by no more
than 1 of 255, and by 0.001 on average (bicubic by more, where a few pixels become many): torch's kernel for bytes is
that of Pillow, in vector instructions.
"""

from __future__ import annotations

import numpy as np
import torch

from lit_async_data.sources.manifest.cropping import Box
from lit_async_data.sources.manifest.image_shape import ImageShape
from lit_async_data.spec import Bytes

# What torch.nn.functional.interpolate calls with antialias=True. That has no ``out``, and its copies are a fifth of the
# time.
_KERNELS = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,  # noqa: SLF001
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,  # noqa: SLF001
}


def write_resized(pixels: Bytes, box: Box, shape: ImageShape, out: Bytes) -> None:
    """Write a part of an image, in the size of what it is written to.

    Args:
        pixels: uint8, shape (height, width, channels): grey, grey and opacity, RGB or RGBA.
        box: Left, upper, right and lower edge of the part.
        shape: Says how pixels are weighed.
        out: uint8, shape (height, width, channels), or of more channels than a grey image; overwritten.
    """
    size = out.shape[0], out.shape[1]
    if all(float(edge).is_integer() for edge in box):
        # Cut out first, as torchvision does: what lies beside the part has no say in its edge.
        left, upper, right, lower = (int(edge) for edge in box)
        pixels = pixels[upper:lower, left:right]
        if pixels.shape[:2] == size:
            out[...] = pixels
            return
        if shape.interpolation in _KERNELS and pixels.shape[2] in (1, 3):
            _by_torch(pixels, shape.interpolation, out)
            return
        box = (0, 0, right - left, lower - upper)
    # Torch knows of no parts of pixels.
    out[...] = _by_pillow(pixels, box, size, shape.interpolation)


def _by_torch(pixels: Bytes, interpolation: str, out: Bytes) -> None:
    if not (_dense(pixels) and pixels.flags.writeable):
        pixels = np.array(pixels, order="C")  # torch would copy, too, by threads of its own, or warn
    straight = _dense(out) and out.shape[2] == pixels.shape[2]
    found = out if straight else np.empty((*out.shape[:2], pixels.shape[2]), np.uint8)
    _KERNELS[interpolation](_channels_first(pixels), out.shape[:2], False, None, None, out=_channels_first(found))
    if not straight:
        out[...] = found


def _dense(pixels: Bytes) -> bool:
    # Numpy calls a single row or column contiguous, whatever its strides are; torch would believe them.
    _, width, channels = pixels.shape
    return pixels.strides == (width * channels, channels, 1)


def _channels_first(pixels: Bytes) -> torch.Tensor:
    return torch.from_numpy(pixels[None].transpose(0, 3, 1, 2))


def _by_pillow(pixels: Bytes, box: Box, size: tuple[int, int], interpolation: str) -> Bytes:
    from PIL import Image

    # Opacity weighs colours: Pillow does that for images that have it.
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    filter_ = Image.Resampling[interpolation.upper()]
    found = image.resize((size[1], size[0]), filter_, box=box)
    return np.frombuffer(found.tobytes(), np.uint8).reshape(*size, -1)
