"""`Crop`: the part of an image to deliver, and its place in the output."""

from __future__ import annotations

import math
from typing import NamedTuple

from lit_async_data.order.permutation import derived_key
from lit_async_data.sources.manifest.images.image_shape import ImageShape

Box = tuple[float, float, float, float]

_TRIES = 10
# From this box side on, crops are rounded to whole pixels.
_LARGE = 128


class Crop(NamedTuple):
    """A part of an image, and the part of the output that it becomes.

    Attributes:
        box: Left, upper, right and lower edge in pixels of the image; inside of it and not empty.
        size: (height, width) that the box is resized to.
        corner: Row and column of the output where it begins.
    """

    box: Box
    size: tuple[int, int]
    corner: tuple[int, int] = (0, 0)


def crop_of(shape: ImageShape, height: int, width: int, target: tuple[int, int], key: int | None) -> Crop:
    """The part of an image of some height and width to deliver as the target (H, W); without a key, of the middle."""
    if shape.resize == "random_crop" and key is not None:
        return Crop(_random_box(shape, height, width, key), target)
    if shape.resize in ("crop", "random_crop"):
        return Crop(_middle_box(height, width, target), target)
    if shape.resize == "pad":
        return _padded(height, width, target)
    return Crop((0, 0, width, height), target)


def _middle_box(height: int, width: int, target: tuple[int, int]) -> Box:
    """The largest box in the middle with the aspect ratio of the target."""
    tall, wide = target
    box_width = min(height * wide / tall, width)
    box_height = min(width * tall / wide, height)
    left, upper = (width - box_width) / 2, (height - box_height) / 2
    box = left, upper, left + box_width, upper + box_height
    return whole_pixels(*box) if min(box_width, box_height) >= _LARGE else box


def whole_pixels(left: float, upper: float, right: float, lower: float) -> Box:
    """The nearest box of whole pixels that is not larger."""
    width, height = max(int(right - left), 1), max(int(lower - upper), 1)
    first, top = min(round(left), math.ceil(right) - width), min(round(upper), math.ceil(lower) - height)
    return first, top, first + width, top + height


def _padded(height: int, width: int, target: tuple[int, int]) -> Crop:
    tall, wide = target
    scale = min(tall / height, wide / width)
    size = min(max(round(height * scale), 1), tall), min(max(round(width * scale), 1), wide)
    return Crop((0, 0, width, height), size, ((tall - size[0]) // 2, (wide - size[1]) // 2))


def _random_box(shape: ImageShape, height: int, width: int, key: int) -> Box:
    """A box of random area and aspect ratio, distributed as torchvision.transforms.RandomResizedCrop.

    The share of the area and the logarithm of width / height are uniform. A box that does not fit is drawn again, up to
    ten times; then the largest middle box that ``ratio`` allows is taken. Introduced by Szegedy et al., "Going deeper
    with convolutions" (CVPR 2015).
    """
    least, most = math.log(shape.ratio[0]), math.log(shape.ratio[1])
    for turn in range(_TRIES):
        area = height * width * (shape.scale[0] + (shape.scale[1] - shape.scale[0]) * _uniform(key, 4 * turn))
        ratio = math.exp(least + (most - least) * _uniform(key, 4 * turn + 1))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            upper = _below(height - tall + 1, key, 4 * turn + 2)
            left = _below(width - wide + 1, key, 4 * turn + 3)
            return left, upper, left + wide, upper + tall
    wide, tall = width, height
    if width / height < shape.ratio[0]:
        tall = max(round(width / shape.ratio[0]), 1)
    elif width / height > shape.ratio[1]:
        wide = max(round(height * shape.ratio[1]), 1)
    upper, left = (height - tall) // 2, (width - wide) // 2
    return left, upper, left + wide, upper + tall


def _uniform(key: int, number: int) -> float:
    """The ``number``-th draw from a key, in [0, 1) with 53 bits."""
    return (derived_key(key, number) >> 11) * 2.0**-53


def _below(limit: int, key: int, number: int) -> int:
    """A whole number in ``range(limit)``, uniform up to a bias of limit / 2⁶⁴."""
    return derived_key(key, number) * limit >> 64
