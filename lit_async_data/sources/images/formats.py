"""`FORMATS`: how images of each format are recognized, opened and decoded. A new format is one entry here.

Pillow decodes images; where installed, simplejpeg decodes JPEGs, and imagecodecs plain PNGs: see
docs/design/sources/images.md.
`ImageShape` says how images of any size become arrays of one shape; `Crop` is the part of an image to deliver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import math
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.options import flag, one_of, whole
from lit_async_data.sources.contract.checks import is_real
from lit_async_data.sources.local_files import HEAD_BYTES, mistaken
from lit_async_data.system import Lazy

simplejpeg = Lazy("simplejpeg")

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
            None: ``"RGB"``; an error if the field is named as a mask, or beside another image has a palette, or is
            grey and resized.
        resize: How an image of another shape is made to fit. ``"stretch"``: both sides are resized. ``"crop"``: the
            largest middle part of that shape is cut, in whole pixels, and resized. ``"pad"``: the longer side is
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

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


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


def _size(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    pair = _items(given) or (given, given)
    if len(pair) != 2 or not all(is_real(side) and side in range(1, _MAX_SIDE + 1) for side in pair):
        what = f"is not a number of pixels from 1 to {_MAX_SIDE}, nor (height, width)"
        raise ConfigError(f"{given!r} {what}", "image_size")
    return int(pair[0]), int(pair[1])


def _range(name: str, given: Any, most: float) -> tuple[float, float]:
    pair = _items(given)
    if len(pair) == 2 and all(map(is_real, pair)) and 0 < pair[0] <= pair[1] <= most and math.isfinite(pair[1]):
        return float(pair[0]), float(pair[1])
    limit = "" if math.isinf(most) else f" of at most {most:g}"
    raise ConfigError(f"{given!r} is not a pair of numbers above 0{limit}, the lower one first", name)


def _items(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()


# -- crops -------------------------------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]

TRIES = 10  # of a random crop; each takes four words
_LARGE = 128  # least side, in pixels, of boxes that are rounded to whole pixels


class Crop(NamedTuple):
    """A part of an image, and the part of the output that it fills."""

    box: Box  # left, upper, right and lower edge in pixels of the image; inside of it and not empty
    size: tuple[int, int]  # (height, width) to which the box is resized
    corner: tuple[int, int] = (0, 0)  # row and column of the output where it begins


#: Random words that select the part of an image; None for the middle.
Draw = Sequence[int] | None


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
    """As ImageOps.pad of Pillow; an image becomes at least one pixel wide and high."""
    tall, wide = target
    if width / height > wide / tall:
        size = max(round(height / width * wide), 1), wide
    else:
        size = tall, max(round(width / height * tall), 1)
    return Crop((0, 0, width, height), size, (round((tall - size[0]) / 2), round((wide - size[1]) / 2)))


def _random_box(shape: ImageShape, height: int, width: int, draw: Sequence[int]) -> Box:
    """A box of random area and aspect ratio, distributed as torchvision.transforms.RandomResizedCrop.

    The share of the area and the logarithm of width / height are uniform. A box that does not fit is drawn again, up to
    ten times; then the largest middle box that ``ratio`` allows is taken. From Szegedy et al., CVPR 2015.
    """
    least, most = math.log(shape.ratio[0]), math.log(shape.ratio[1])
    for turn in range(0, 4 * TRIES, 4):
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


UPRIGHT = 1
ORIENTATION = 0x0112  # the tag
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
PALETTES = ("P", "PA")
GREYS = ("1", "L", *_SIXTEEN_BITS)
# Modes of Pillow that can be converted; others have more than 8 bits, or colours that Pillow does not convert.
_SUPPORTED = (*PALETTES, *GREYS, "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


class Head(NamedTuple):
    size: tuple[int, int]  # (width, height) of the decoded pixels, before they are turned
    mode: str  # as Pillow calls it
    turned: int  # the orientation of the decoded pixels, 1 to 8
    bits: int = 8  # bits per stored value
    white_is_zero: bool = False
    image: Any = None  # the image in Pillow; None if another library decodes it
    was_turned: int = UPRIGHT  # the orientation that the decoder itself applies


class Format(NamedTuple):
    name: str  # in messages
    suffixes: tuple[str, ...]  # of file names, in lower case
    magic: re.Pattern[bytes]  # matches the first bytes
    # Reads the header of a file; the second argument is its name in messages. Errors that are not of this package mean
    # damage.
    head: Callable[[bytes, str], Head]
    # Decodes a file at its size divided by a factor. Returns the given array (uint8, C-contiguous), a new array in the
    # mode of the file, or the image in Pillow.
    decode: Callable[[bytes, Head, int, Bytes | None], Any]
    factors: tuple[int, ...] = ()  # that ``decode`` takes besides 1, the largest first


def format_of(data: bytes, where: str) -> Format:
    if not data:
        raise CorruptError(f"{where}: empty; fetch the file again")
    for each in FORMATS:
        if each.magic.match(data):
            return each
    if what := mistaken(data[:HEAD_BYTES]):
        raise FormatError(f"{where}: is {what}")
    *names, last = (each.name for each in FORMATS)
    what = f"begins with {data[:8]!r}, which is not a {', '.join(names)} or {last}; convert it, or leave it out"
    raise FormatError(f"{where}: {what} by exclude: python -m lit_async_data inspect --check-all lists all such files")


def _opened(data: bytes, plugin: str) -> Any:
    # By its class, since Image.open warns of large images, or refuses them by a limit for the whole process.
    return getattr(importlib.import_module(f"PIL.{plugin}ImagePlugin"), f"{plugin}ImageFile")(io.BytesIO(data))


def _head(data: bytes, where: str, plugin: str) -> Head:
    image = _opened(data, plugin)
    if getattr(image, "is_animated", False):
        what = "a file of several images (frames or pages), but one is expected; store each in its own file"
        raise FormatError(f"{where}: {what}")
    exif, xmp = (image.info.get(name) for name in ("exif", "xmp"))
    turned = orientation_of(*(block if isinstance(block, bytes) else b"" for block in (exif, xmp)))
    return Head(image.size, image.mode, turned, image=image)


def _decoded(_data: bytes, head: Head, _factor: int, _out: Bytes | None) -> Any:
    head.image.load()
    return head.image


# -- modes -------------------------------------------------------------------------------------------------------------


def check_mode(kind: str, head: Head, shape: ImageShape, where: str) -> None:
    """Refuse an image whose values the requested mode would change."""
    deep = head.bits > 8
    if head.mode not in _SUPPORTED:
        reason = f"of Pillow's mode {head.mode}, which has no standard conversion to 8 bits; convert it, or store .npy"
    elif head.mode in _SIXTEEN_BITS and head.white_is_zero:
        reason = "of 16 bits in which 0 is white, which Pillow does not invert; convert it"
    elif deep and shape.target_mode.endswith("A") and head.image and "transparency" in head.image.info:
        reason = "of 16 bits with one transparent colour; store opacity as a channel"
    elif shape.target_mode == DEEP:
        reason = _not_deep(head)
    elif shape.target_mode == INDICES:
        reason = _not_numbers(kind, head)
    elif deep and not shape.upper_8_bits:
        all_ = ", or mode: uint16 to get all of them" if head.mode in _SIXTEEN_BITS else ""
        reason = f"of {head.bits} bits, but mode {shape.target_mode} delivers 8; set upper_8_bits: true to get the "
        reason += f"upper 8{all_}"
    elif head.mode in PALETTES and shape.target_mode in ("L", "LA") and shape.resampling == "nearest":
        reason = f"with a palette, but mode {shape.target_mode} makes grey tones of its colours; set mode: P to get "
        reason += "the stored class numbers (for grey tones set another interpolation)"
    else:
        return
    if reason:
        raise FormatError(f"{where}: a {kind} {reason}")


def _not_deep(head: Head) -> str:
    if head.bits <= 8:
        what = f"of {head.bits} bits, but mode uint16 delivers more than 8, and the scale of its values is unknown"
        return f"{what}; set mode: L, or convert the file to 16 bits"
    if head.mode in _SIXTEEN_BITS:
        return ""
    what = f"of {head.bits} bits with several channels, but mode uint16 delivers one"
    return f"{what}; set upper_8_bits: true and mode: RGB, or store it as .npy"


def _not_numbers(kind: str, head: Head) -> str:
    if head.mode in _SIXTEEN_BITS:
        return f"of {head.bits} bits, but mode P delivers numbers of 8; set mode: uint16 and interpolation: nearest"
    if kind == "JPEG":
        return "whose compression changes class numbers; store masks as PNG, or set mode: L"
    if head.mode not in (*PALETTES, *GREYS):
        what = "of colours without a palette, but mode P delivers the numbers of a palette image or of a grey one"
        return f"{what}; set mode: RGB, or convert the file"
    if head.mode in GREYS and (head.white_is_zero or head.bits in (2, 4)):
        stored = "upside down (0 is white)" if head.white_is_zero else f"in {head.bits} bits, which Pillow multiplies"
        what = f"whose grey values are stored {stored}, so the class numbers are unknown"
        return f"{what}; set mode: L for 0 (black) to 255, or convert the file to 8 bits"
    return ""


def values_of(decoded: Any, head: Head, shape: ImageShape) -> Array:
    """An array in the requested mode, or in grey that becomes colours later, of the result of `Format.decode`."""
    if isinstance(decoded, np.ndarray):
        if head.mode == shape.target_mode or (head.mode == "L" and shape.target_mode in ("RGB", INDICES)):
            return decoded
        from PIL import Image

        decoded = Image.frombuffer(head.mode, decoded.shape[1::-1], decoded, "raw", head.mode, 0, 1)
    if shape.target_mode == DEEP:
        return np.asarray(decoded, np.uint16)[..., None]
    image = _numbers(decoded) if shape.target_mode == INDICES else _converted(decoded, shape, head.bits)
    width, height = image.size
    return np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, -1)


def _numbers(image: Any) -> Any:
    if image.mode == "1":
        return image.convert("L").point([0] * 255 + [1])
    return image.getchannel(0) if image.mode == "PA" else image


def _converted(image: Any, shape: ImageShape, bits: int) -> Any:
    from PIL import Image

    if image.mode in _SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if not shape.target_mode.endswith("A"):
        # Otherwise Pillow would apply it or warn.
        image.info.pop("transparency", None)
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if image.mode == shape.target_mode or (image.mode == "L" and shape.target_mode == "RGB"):
        return image
    return image.convert(shape.target_mode)


# -- orientation: as Pillow's `exif_transpose` finds it, in a tenth of the time and without its warnings ---------------


def orientation_of(exif: bytes, xmp: bytes = b"") -> int:
    """The orientation, 1 to 8, of EXIF, else of XMP; 1 (as stored) if neither has a valid one."""
    value = _exif_orientation(exif) if exif else None
    if value is None and xmp and (match := _IN_XMP.search(xmp)):
        value = int(match[1])
    return value if value is not None and 1 <= value <= 8 else UPRIGHT


def _exif_orientation(exif: bytes) -> int | None:
    block = exif.removeprefix(_EXIF)
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(bytes(block[:4]))
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(order + "I", block, 4)
        (entries,) = struct.unpack_from(order + "H", block, start)
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", block, entry)
            if tag == ORIENTATION:
                letter = {3: "H", 4: "I"}.get(kind) if count == 1 else None  # short and long
                return int(struct.unpack_from(order + letter, block, entry + 8)[0]) if letter else UPRIGHT
    except struct.error:
        pass  # the block is shorter than its entries
    return None


def upright_size(size: tuple[int, int], turned: int) -> tuple[int, int]:
    width, height = size
    return (width, height) if turned >= 5 else (height, width)


def mirrored(turned: int) -> tuple[bool, bool]:
    """Whether an orientation mirrors left and right, and top and bottom."""
    return turned in (2, 3, 6, 7), turned in (3, 4, 7, 8)


def upright(pixels: Array, turned: int) -> Array:
    """An upright view of stored pixels, shape (height, width, channels)."""
    if turned >= 5:
        pixels = pixels.transpose(1, 0, 2)
    right_first, lower_first = mirrored(turned)
    return pixels[:: -1 if lower_first else 1, :: -1 if right_first else 1]


# -- JPEG --------------------------------------------------------------------------------------------------------------

_APP1, _SCAN = 0xE1, 0xDA
_EXIF, _XMP = b"Exif\x00\x00", b"http://ns.adobe.com/xap/1.0/\x00"
_NO_LENGTH = (0x00, 0x01, *range(0xD0, 0xDA))
# Frames that libjpeg decodes: sequential or progressive, in Huffman or arithmetic coding. Others are hierarchical, or
# lossless, which crashes simplejpeg.
_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)
_ALL_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


def _jpeg_head(data: bytes, where: str) -> Head:
    frame: tuple[int, int, int, int] | None = None
    exif, xmp, place = b"", b"", 2
    while 0 <= (place := data.find(b"\xff", place)) < len(data) - 3:
        marker = data[place + 1]
        if marker == 0xFF or marker in _NO_LENGTH:
            place += 1 + (marker != 0xFF)
            continue
        content = data[place + 4 : place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")]
        place += 4 + len(content)
        if marker in _ALL_FRAMES:
            frame = struct.unpack_from(">BHHB", content)
            if marker not in _FRAMES or frame[0] != 8 or frame[3] not in _JPEG_MODES:
                what = f"a JPEG of {frame[3]} channels of {frame[0]} bits (frame {marker:02X}), but only 1, 3 or 4 "
                what += "channels of 8 bits, sequential or progressive, are supported; convert it to PNG, TIFF or .npy"
                raise FormatError(f"{where}: {what}")
        elif marker == _APP1 and content.startswith(_EXIF):
            exif += content[len(_EXIF) if exif else 0 :]
        elif marker == _APP1 and content.startswith(_XMP):
            xmp = content[len(_XMP) :]
        elif marker == _SCAN:
            break
    if frame is None:
        raise ValueError("no header before its pixels")
    _, height, width, channels = frame
    return Head((width, height), _JPEG_MODES[channels], orientation_of(exif, xmp))


def _jpeg(data: bytes, head: Head, factor: int, out: Bytes | None) -> Any:
    """Decode by simplejpeg, which raises the warnings of libjpeg; Pillow drops them."""
    width, height = -(-head.size[0] // factor), -(-head.size[1] // factor)
    size = {"min_height": height, "min_width": width, "min_factor": factor}
    try:
        pixels: Bytes = simplejpeg.decode_jpeg(data, {"L": "GRAY"}.get(head.mode, head.mode), buffer=out, **size)
    except ValueError:
        try:
            simplejpeg.decode_jpeg_header(data, strict=False)
        except ValueError:  # subsampled in a way that simplejpeg has no name for
            image = _opened(data, "Jpeg")
            if factor > 1:
                image.draft(None, (head.size[0] // factor, head.size[1] // factor))
            return _decoded(data, head._replace(image=image), factor, out)
        raise
    if pixels.shape[:2] != (height, width):
        raise ValueError("its size is stated twice")
    if head.mode == "CMYK":  # stored inverted, as by Adobe; Pillow assumes this too
        np.subtract(255, pixels, out=pixels)
    return pixels if out is None else out


# -- PNG ---------------------------------------------------------------------------------------------------------------

_PNG_MODES = {0: "L", 2: "RGB", 6: "RGBA"}  # by colour type
# Parts of PNGs that imagecodecs decodes: without transparency, and without text, which may hold the orientation.
_PLAIN = {b"IHDR", b"IDAT", b"IEND", b"eXIf", b"pHYs", b"gAMA", b"sRGB", b"cHRM"}
_RAW_EXIF = "Raw profile type exif"  # a text of ImageMagick
_PIECE = 5 * 2**10  # bytes for which zlib keeps the GIL; to get it back would take longer than the checksum


def _png_head(data: bytes, where: str) -> Head:
    parts = _png_parts(data)
    width, height, bits, colours, *_, interlaced = struct.unpack(">II5B", parts[b"IHDR"])
    exif = bytes(parts.get(b"eXIf", b""))  # Pillow does not look behind the pixels before it decodes them
    if bits == 8 and not interlaced and colours in _PNG_MODES and parts.keys() <= _PLAIN and _imagecodecs():
        return Head((width, height), _PNG_MODES[colours], orientation_of(exif))
    head = _head(data, where, "Png")
    if not exif and (text := head.image.info.get(_RAW_EXIF)):
        with contextlib.suppress(ValueError):
            exif = bytes.fromhex("".join(text.split("\n")[3:]))  # the first three lines are name and length
    if exif:
        head = head._replace(turned=orientation_of(exif, head.image.info.get("xmp", b"")))
    return head._replace(bits=bits)


def _png_parts(data: bytes) -> dict[bytes, memoryview]:
    """The first part of each name; compares all checksums."""
    view, parts, place = memoryview(data), dict[bytes, memoryview](), 8
    while b"IEND" not in parts:
        length, name = struct.unpack_from(">I4s", data, place)
        end = place + 8 + length
        if end + 4 > len(data):
            raise ValueError("it ends too soon")
        checksum = 0
        for begin in range(place + 4, end, _PIECE):
            checksum = zlib.crc32(view[begin : min(begin + _PIECE, end)], checksum)
        if struct.unpack_from(">I", data, end) != (checksum,):
            raise ValueError(f"the checksum of its part {name.decode('latin-1')} is wrong")
        parts.setdefault(name, view[place + 8 : end])
        place = end + 4
    return parts


def _png(data: bytes, head: Head, factor: int, out: Bytes | None) -> Any:
    if head.image is not None:
        return _decoded(data, head, factor, out)
    try:
        pixels: Bytes = _imagecodecs().spng_decode(data, out=out)
    except RuntimeError:
        return _decoded(data, head._replace(image=_opened(data, "Png")), factor, out)
    # A grey image has no axis of channels.
    return pixels.reshape(head.size[1], head.size[0], CHANNELS[head.mode]) if out is None else out


@functools.cache
def _imagecodecs() -> Any:
    """The module; None if it or its libspng is missing."""
    try:
        library = importlib.import_module("imagecodecs")
    except ImportError:
        return None
    return library if library.SPNG.available else None


# -- TIFF --------------------------------------------------------------------------------------------------------------

_BITS_PER_SAMPLE, _PHOTOMETRIC, _SUBSAMPLING, _YCBCR = 258, 262, 530, 6


def _tiff_head(data: bytes, where: str) -> Head:
    """The size is that of upright pixels if a tag holds the orientation: then Pillow turns them itself."""
    head = _head(data, where, "Tiff")
    tags = head.image.tag_v2
    raw_ycbcr = (tags.get(_PHOTOMETRIC), head.image.info.get("compression")) == (_YCBCR, "raw")
    # Pillow 12 reads four values per pixel from these, and no version knows subsampling in them.
    if raw_ycbcr and (tags.get(_SUBSAMPLING, (1, 1)) != (1, 1) or head.image.tile[0].args[0] != "YCbCr"):
        what = "a TIFF of uncompressed YCbCr, which Pillow decodes from version 13 on, if it is not subsampled"
        raise FormatError(f"{where}: {what}; install it, or convert the image to RGB")
    was = tags.get(ORIENTATION, head.turned)
    size = head.size if ORIENTATION in tags else upright_size(head.size, head.turned)[::-1]
    head = head._replace(size=size, turned=UPRIGHT, was_turned=was if was in range(1, 9) else UPRIGHT)
    return head._replace(bits=int(max(tags.get(_BITS_PER_SAMPLE, (1,)))), white_is_zero=tags.get(_PHOTOMETRIC) == 0)


def _by_pillow(name: str, suffixes: tuple[str, ...], magic: bytes, plugin: str) -> Format:
    return Format(name, suffixes, re.compile(magic, re.DOTALL), functools.partial(_head, plugin=plugin), _decoded)


FORMATS = (
    Format("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), re.compile(rb"\xff\xd8\xff"), _jpeg_head, _jpeg, (8, 4, 2)),
    Format("PNG", (".png",), re.compile(rb"\x89PNG\r\n\x1a\n"), _png_head, _png),
    Format("TIFF", (".tif", ".tiff"), re.compile(rb"II[*+]\0|MM\0[*+]"), _tiff_head, _decoded),
    _by_pillow("WebP", (".webp",), rb"RIFF....WEBP", "WebP"),
    _by_pillow("BMP", (".bmp",), rb"BM", "Bmp"),
    _by_pillow("GIF", (".gif",), rb"GIF8[79]a", "Gif"),
)
