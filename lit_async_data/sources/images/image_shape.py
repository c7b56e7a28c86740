"""`ImageShape`: how images of any size become arrays of one shape. `Crop`: the part of an image to deliver."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.options import flag, one_of, whole
from lit_async_data.order.permutation import Words, derived_keys

# Channels of each mode. Values have 8 bits, in mode DEEP 16.
CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "P": 1, "uint16": 1}
INDICES, DEEP = "P", "uint16"
RESIZES = ("stretch", "crop", "pad", "random_crop")
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
MAX_PIXELS = 178_956_970  # 512 MiB as RGB; Pillow refuses larger images as decompression bombs
_MAX_SIDE = 65_535  # of a JPEG; a larger number is a typing error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options of images; in YAML, names of a mapping.

    Attributes:
        image_size: (H, W), or one number for both. None: all images must have one size already.
        mode: ``"RGB"``, ``"L"`` (grey), ``"RGBA"`` or ``"LA"``. Modes without A drop transparency and show the colours
            stored below it. ``"P"``: the stored numbers of a palette image, for masks of classes; also the values of
            8-bit grey, and 0 and 1 of 1-bit images. ``"uint16"``: grey of 9 to 16 bits (PNG and TIFF), as stored.
            None: ``"RGB"``; an error if the image is resized and its field is named as a mask, or is grey or has a
            palette beside another image.
        resize: How an image of another shape is made to fit. ``"stretch"``: both sides are resized. ``"crop"``: the
            shorter side is resized to fit, and the middle of the longer one is taken. ``"pad"``: the longer side is
            resized to fit, and the rest is ``fill``. ``"random_crop"``: a random part of each image, another one in
            each epoch, as torchvision's RandomResizedCrop; in evaluation, as ``"crop"``.
        scale: Least and largest share of the image's area in a random crop, 0 < … ≤ 1.
        ratio: Least and largest width / height of a random crop before it is resized.
        interpolation: ``"bilinear"``, ``"bicubic"``, ``"lanczos"``, ``"hamming"`` and ``"box"`` average all pixels that
            a smaller one covers; ``"nearest"`` takes one of them, which masks need. None: ``"nearest"`` in mode P,
            which allows no other, and ``"bilinear"`` in other modes.
        fill: Value of every channel of padding, 0 to 255; in mode uint16, 0 to 65535.
        max_pixels: Images with more pixels are refused before decoding: a file of a few bytes can claim any size.
            Decoding takes up to 20 bytes per pixel; images of more than 16 million pixels are decoded one at a time.
        upper_8_bits: Whether images of more than 8 bits may be read in a mode of 8 bits, which is an error otherwise:
            the upper 8 of the stored bits are kept (for 16 bits, the value divided by 256).
        draw: Image fields with the same text share their random crops, such as an image and its mask. None: all fields
            without a text share them. Pixels of fields that share correspond, so an error tells if only one is turned
            by its orientation, if a mask has another shape than its image, or if an array of its size is not cut.
    """

    image_size: int | tuple[int, int] | None = None
    mode: str | None = None
    resize: str = "stretch"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str | None = None
    fill: float = 0
    max_pixels: int = MAX_PIXELS
    upper_8_bits: bool = False
    draw: str | None = None


@dataclasses.dataclass(frozen=True)
class ImageShape(ImageOptions):
    """Options that fit together: arrays of shape (H, W, C), uint8 or uint16."""

    def __post_init__(self) -> None:
        self._set("image_size", _size(self.image_size))
        one_of("mode", self.target_mode, CHANNELS)
        one_of("resize", self.resize, RESIZES)
        if self.interpolation is not None:
            one_of("interpolation", self.interpolation, INTERPOLATIONS)
        if self.target_mode == INDICES and self.resampling != "nearest":
            raise ConfigError(f"{self.interpolation!r} mixes class numbers; set nearest for mode P", "interpolation")
        if self.image_size is None and self.resize != "stretch":
            raise ConfigError(f"missing; resize={self.resize!r} needs the size of the result", "image_size")
        self._set("scale", _range("scale", self.scale, 1.0))
        self._set("ratio", _range("ratio", self.ratio, math.inf))
        # jsonargparse makes floats of numbers for an option of type float.
        fill: Any = int(self.fill) if isinstance(self.fill, float) and self.fill.is_integer() else self.fill
        self._set("fill", whole("fill", fill, 0, int(np.iinfo(self.dtype).max)))
        self._set("max_pixels", whole("max_pixels", self.max_pixels, 1))
        flag("upper_8_bits", self.upper_8_bits)
        if self.upper_8_bits and self.target_mode == DEEP:
            raise ConfigError("mode uint16 delivers all bits; leave it out, or set mode: L", "upper_8_bits")
        if self.draw is not None and not (isinstance(self.draw, str) and self.draw):
            raise ConfigError(f"{self.draw!r} is not text; name what the fields share", "draw")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @functools.cached_property
    def target_mode(self) -> str:
        return "RGB" if self.mode is None else self.mode

    @functools.cached_property
    def channels(self) -> int:
        return CHANNELS[self.target_mode]

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.target_mode == DEEP else np.uint8)

    @functools.cached_property
    def resampling(self) -> str:
        return self.interpolation or ("nearest" if self.target_mode == INDICES else "bilinear")

    @functools.cached_property
    def alpha(self) -> bool:
        return self.target_mode.endswith("A")


def _size(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    pair = _items(given) or (given, given)
    if len(pair) != 2 or not all(_is_real(side) and side in range(1, _MAX_SIDE + 1) for side in pair):
        what = f"is not a number of pixels from 1 to {_MAX_SIDE}, nor (height, width)"
        raise ConfigError(f"{given!r} {what}", "image_size")
    return int(pair[0]), int(pair[1])


def _range(name: str, given: Any, most: float) -> tuple[float, float]:
    pair = _items(given)
    if len(pair) != 2 or not all(map(_is_real, pair)):
        raise ConfigError(f"{given!r} is not a pair of numbers, the least and the most", name)
    least, last = float(pair[0]), float(pair[1])
    if not (0 < least <= last <= most and math.isfinite(last)):
        limit = "" if math.isinf(most) else f" of at most {most:g}"
        raise ConfigError(f"{given!r} is not a pair of numbers above 0{limit}, the lower one first", name)
    return least, last


def _items(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# -- crops -------------------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]

_TRIES = 10
_LARGE = 128  # least side, in pixels, of boxes that are rounded to whole pixels


class Crop(NamedTuple):
    """A part of an image, and the part of the output that it fills."""

    box: Box  # left, upper, right and lower edge in pixels of the image; inside of it and not empty
    size: tuple[int, int]  # (height, width) to which the box is resized
    corner: tuple[int, int] = (0, 0)  # row and column of the output where it begins


#: Random words that select the part of an image; None for the middle.
Draw = Sequence[int] | None


def draws_of(shape: ImageShape, keys: Words | None, count: int) -> Sequence[Draw]:
    if keys is None or shape.resize != "random_crop":
        return [None] * count
    keys = keys if shape.draw is None else derived_keys(keys, zlib.crc32(shape.draw.encode()))
    drawn: list[Draw] = derived_keys(keys[:, None], np.arange(4 * _TRIES)).tolist()
    return drawn


def crop_of(shape: ImageShape, height: int, width: int, target: tuple[int, int], draw: Draw) -> Crop:
    if draw is not None:
        return Crop(_random_box(shape, height, width, draw), target)
    if shape.resize in ("crop", "random_crop"):
        return Crop(_middle_box(height, width, target), target)
    if shape.resize == "pad":
        return _padded(height, width, target)
    return Crop((0, 0, width, height), target)


def _middle_box(height: int, width: int, target: tuple[int, int]) -> Box:
    tall, wide = target
    box_width = min(height * wide / tall, width)
    box_height = min(width * tall / wide, height)
    left, upper = (width - box_width) / 2, (height - box_height) / 2
    box = left, upper, left + box_width, upper + box_height
    return whole_pixels(*box) if min(box_width, box_height) >= _LARGE else box


def whole_pixels(left: float, upper: float, right: float, lower: float) -> Box:
    """The nearest box that is not larger."""
    width, height = max(int(right - left), 1), max(int(lower - upper), 1)
    first, top = min(round(left), math.ceil(right) - width), min(round(upper), math.ceil(lower) - height)
    return first, top, first + width, top + height


def _padded(height: int, width: int, target: tuple[int, int]) -> Crop:
    tall, wide = target
    scale = min(tall / height, wide / width)
    size = min(max(round(height * scale), 1), tall), min(max(round(width * scale), 1), wide)
    return Crop((0, 0, width, height), size, ((tall - size[0]) // 2, (wide - size[1]) // 2))


def _random_box(shape: ImageShape, height: int, width: int, draw: Sequence[int]) -> Box:
    """A box of random area and aspect ratio, distributed as torchvision.transforms.RandomResizedCrop.

    The share of the area and the logarithm of width / height are uniform. A box that does not fit is drawn again, up to
    ten times; then the largest middle box that ``ratio`` allows is taken. From Szegedy et al., CVPR 2015.
    """
    least, most = math.log(shape.ratio[0]), math.log(shape.ratio[1])
    for turn in range(0, 4 * _TRIES, 4):
        first, second, third, fourth = draw[turn : turn + 4]
        # With 53 bits, in [0, 1); whole numbers are uniform up to a bias of their limit / 2⁶⁴.
        share, shift = (first >> 11) * 2.0**-53, (second >> 11) * 2.0**-53
        area = height * width * (shape.scale[0] + (shape.scale[1] - shape.scale[0]) * share)
        ratio = math.exp(least + (most - least) * shift)
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            upper, left = third * (height - tall + 1) >> 64, fourth * (width - wide + 1) >> 64
            return left, upper, left + wide, upper + tall
    wide, tall = width, height
    if width / height < shape.ratio[0]:
        tall = max(round(width / shape.ratio[0]), 1)
    elif width / height > shape.ratio[1]:
        wide = max(round(height * shape.ratio[1]), 1)
    upper, left = (height - tall) // 2, (width - wide) // 2
    return left, upper, left + wide, upper + tall
