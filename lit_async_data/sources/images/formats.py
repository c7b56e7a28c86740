"""`FORMATS`: how images of each format are recognized, opened and decoded. A new format is one entry here.

Pillow decodes all formats. simplejpeg decodes JPEGs, and imagecodecs, where installed, plain PNGs: to the same values
in less time. This module reads the headers of both, since Pillow takes longer, under the GIL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.images.image_shape import CHANNELS, DEEP, INDICES, ImageShape
from lit_async_data.sources.local_files import HEAD_BYTES, mistaken

UPRIGHT = 1
ORIENTATION = 0x0112  # the tag
_SHORT, _LONG = 3, 4
# An attribute or element in XMP.
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
    raise FormatError(f"{where}: {what}")


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
    elif deep and shape.alpha and head.image is not None and "transparency" in head.image.info:
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
        decoded = _image(decoded, head.mode)
    if shape.target_mode == DEEP:
        return np.asarray(decoded, np.uint16)[..., None]
    image = _numbers(decoded) if shape.target_mode == INDICES else _converted(decoded, shape, head.bits)
    width, height = image.size
    return np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, -1)


def _image(pixels: Bytes, mode: str) -> Any:
    from PIL import Image

    return Image.frombuffer(mode, pixels.shape[1::-1], pixels, "raw", mode, 0, 1)


def _numbers(image: Any) -> Any:
    if image.mode == "1":
        return image.convert("L").point([0] * 255 + [1])
    return image.getchannel(0) if image.mode == "PA" else image


def _converted(image: Any, shape: ImageShape, bits: int) -> Any:
    from PIL import Image

    if image.mode in _SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if not shape.alpha:
        # Otherwise Pillow would apply it or warn.
        image.info.pop("transparency", None)
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if image.mode == shape.target_mode or (image.mode == "L" and shape.target_mode == "RGB"):
        return image
    return image.convert(shape.target_mode)


# -- orientation -------------------------------------------------------------------------------------------------------
#
# Found in EXIF or XMP as by Pillow's `exif_transpose`, which parses the whole block, warns of anything odd in it, and
# takes ten times as long.


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
                letter = {_SHORT: "H", _LONG: "I"}.get(kind) if count == 1 else None
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
_COLOURS = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}


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
    try:
        library = importlib.import_module("simplejpeg")
    except ImportError:
        raise ConfigError("simplejpeg is missing; install it by pip install simplejpeg", "image") from None
    width, height = -(-head.size[0] // factor), -(-head.size[1] // factor)
    size = {"min_height": height, "min_width": width, "min_factor": factor}
    try:
        pixels: Bytes = library.decode_jpeg(data, _COLOURS[head.mode], buffer=out, **size)
    except ValueError:
        try:
            library.decode_jpeg_header(data, strict=False)
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
    turned = UPRIGHT if ORIENTATION in tags else head.turned
    was = tags.get(ORIENTATION, head.turned)
    head = head._replace(was_turned=was if was in range(1, 9) else UPRIGHT)
    height, width = upright_size(head.size, turned)
    bits, white_is_zero = int(max(tags.get(_BITS_PER_SAMPLE, (1,)))), tags.get(_PHOTOMETRIC) == 0
    return head._replace(size=(width, height), turned=UPRIGHT, bits=bits, white_is_zero=white_is_zero)


# ----------------------------------------------------------------------------------------------------------------------


def _by_pillow(name: str, suffixes: tuple[str, ...], magic: bytes, plugin: str) -> Format:
    return Format(name, suffixes, re.compile(magic, re.DOTALL), functools.partial(_head, plugin=plugin), _decoded)


FORMATS = (
    Format(
        "JPEG", (".jpg", ".jpeg", ".jpe", ".jfif"), re.compile(rb"\xff\xd8\xff"), _jpeg_head, _jpeg, factors=(8, 4, 2)
    ),
    Format("PNG", (".png",), re.compile(rb"\x89PNG\r\n\x1a\n"), _png_head, _png),
    Format("TIFF", (".tif", ".tiff"), re.compile(rb"II[*+]\0|MM\0[*+]"), _tiff_head, _decoded),
    _by_pillow("WebP", (".webp",), rb"RIFF....WEBP", "WebP"),
    _by_pillow("BMP", (".bmp",), rb"BM", "Bmp"),
    _by_pillow("GIF", (".gif",), rb"GIF8[79]a", "Gif"),
)
