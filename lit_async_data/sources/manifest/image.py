"""Decoding images into arrays, by Pillow and torch, which hold no lock of Python's meanwhile.

Pillow comes with the extra ``manifest`` and is imported when the first image is decoded. None of its settings is
changed: they are one for the whole process.
"""

from __future__ import annotations

import functools
import io
import struct
from typing import Any

from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.manifest.cropping import Box, Crop, crop_of
from lit_async_data.sources.manifest.image_bytes import (
    BMP,
    GIF,
    JPEG,
    PNG,
    TIFF,
    WEBP,
    check_ended,
    early_size,
    format_of,
)
from lit_async_data.sources.manifest.image_shape import ImageShape
from lit_async_data.sources.manifest.orientation import UPRIGHT, orientation_of, upright_size
from lit_async_data.sources.manifest.picture import Picture, head_of
from lit_async_data.sources.manifest.pixels import pixels_of, write_as_stored
from lit_async_data.sources.manifest.png import Parts, exif_of_png, whole_png
from lit_async_data.sources.manifest.resizing import write_resized
from lit_async_data.sources.manifest.stored_values import SIXTEEN_BITS, bits_of, check_mode, white_is_zero
from lit_async_data.sources.manifest.strips import Pixels
from lit_async_data.spec import Array

# What is converted from; others hold values of more than 8 bits, or colours that Pillow does not convert.
_UNDERSTOOD = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", *SIXTEEN_BITS)


def installed() -> bool:
    """Whether Pillow can be imported."""
    try:
        _library()
    except ConfigError:
        return False
    return True


def decode(data: Any, shape: ImageShape, out: Array, key: int | None, where: str) -> None:
    """Decode an image, make it fit, and write it.

    JPEG, PNG, TIFF, WebP, BMP and GIF, by their first bytes. The orientation that a camera noted in EXIF is applied.
    CMYK and palettes become colours, and a grey image has the same value in R, G and B; mode P delivers the stored
    numbers of a palette instead. Values of more than 8 bits are delivered in mode I;16, or with ``depth: 8`` as their
    upper 8 bits. Files of several images, animations or pages, are refused.

    What comes out is decoded from all of a file that is whole as far as anything tells: a file that ends too soon is an
    error, and so is a PNG with a wrong check sum or too few rows. Other formats have no check sums: changed bytes
    inside of them can come out as changed pixels.

    Args:
        data: All bytes of the file.
        shape: How it becomes the array.
        out: Of ``shape.dtype``, shape (H, W, ``shape.channels``), overwritten; undefined after an error.
        key: 64 bits for a random crop; None for the middle.
        where: What the image is called in messages; they begin with it.

    Raises:
        CorruptError: It cannot be decoded, or not all of it is there.
        FormatError: It is no image of these formats, one of too many pixels or of values that the mode cannot deliver;
            or it has another size than ``out`` and ``shape`` has none.
        ConfigError: Pillow is missing.
    """
    if out.dtype != shape.dtype or out.ndim != 3 or out.shape[2] != shape.channels:
        raise ValueError(f"an array of {out.dtype} {out.shape} for an image of {shape.channels} channels")
    stored = bytes(data)  # no copy where it is bytes already
    kind = format_of(stored, where)
    picture = _opened(stored, kind, shape, where)
    turned = _orientation(picture)
    target = out.shape[0], out.shape[1]
    height, width = upright_size(picture.size, turned)
    if shape.image_size is None and target != (height, width):
        raise FormatError(
            f"{where}: {height}×{width} pixels (height × width), where {target[0]}×{target[1]} are expected; give "
            "image_size, to which images are resized"
        )
    try:
        crop = crop_of(shape, height, width, target, key)
        if not write_as_stored(picture, crop, shape, turned, out):
            pixels, box = pixels_of(picture, crop, shape, turned)
            _write(pixels, box, crop, shape, out)
    except (MemoryError, ConfigError):
        raise
    except Exception as error:  # Pillow's decoders raise whatever damaged data make them
        raise _broken(kind, error, where) from error


def size_of(data: Any, shape: ImageShape, where: str) -> tuple[int, int]:
    """(height, width) of an image as it will be seen, without decoding it.

    Args:
        data: All bytes of the file.
        shape: Says how many pixels there may be.
        where: What the image is called in messages.

    Raises:
        CorruptError: It cannot be read, or not all of it is there.
        FormatError: As in `decode`.
    """
    stored = bytes(data)
    kind = format_of(stored, where)
    picture = _opened(stored, kind, shape, where)
    return upright_size(picture.size, _orientation(picture))


def _library() -> Any:
    try:
        from PIL import (
            BmpImagePlugin,
            GifImagePlugin,
            Image,
            JpegImagePlugin,
            PngImagePlugin,
            TiffImagePlugin,
            WebPImagePlugin,
        )
    except ImportError:
        raise ConfigError(
            "image: Pillow, which decodes images, is missing: pip install 'lit-async-data[manifest]'"
        ) from None
    # Each format's own class: Image.open would warn of large images, or refuse them, by a limit of its own.
    classes = {
        JPEG: JpegImagePlugin.JpegImageFile,
        PNG: PngImagePlugin.PngImageFile,
        TIFF: TiffImagePlugin.TiffImageFile,
        WEBP: WebPImagePlugin.WebPImageFile,
        BMP: BmpImagePlugin.BmpImageFile,
        GIF: GifImagePlugin.GifImageFile,
    }
    return Image, classes


def _opened(data: bytes, kind: str, shape: ImageShape, where: str) -> Picture:
    """The image before its pixels are decoded, once everything is checked that can be checked by then."""
    try:
        _check_pixels(early_size(data, kind), shape, where)
        parts = whole_png(data, where) if kind == PNG else {}
        head = head_of(kind, data, parts)
    except struct.error as error:
        raise _broken(kind, error, where) from error
    if head is None:
        return _opened_by_pillow(data, kind, parts, shape, where)
    _check_pixels(head.size, shape, where)
    if kind == JPEG:
        check_ended(data, head.pixels, where)
    check_mode(kind, head.mode, 8, shape, where)
    opening = functools.partial(_pillow, data, kind)
    return Picture(kind, data, head.size, head.mode, head.exif, opening, parts, plain=True)


def _pillow(data: bytes, kind: str) -> Any:
    return _library()[1][kind](io.BytesIO(data))


def _opened_by_pillow(data: bytes, kind: str, parts: Parts, shape: ImageShape, where: str) -> Picture:
    _, classes = _library()
    try:
        stream = io.BytesIO(data)
        image = classes[kind](stream)
        several = getattr(image, "is_animated", False)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise whatever damaged data make them
        raise _broken(kind, error, where) from error
    _check_pixels(image.size, shape, where)
    if kind == JPEG:
        check_ended(data, stream.tell(), where)
    if several:
        raise FormatError(
            f"{where}: a {kind} of several images (frames or pages), where one is expected; store each in a file "
            "of its own"
        )
    _check_values(image, data, kind, shape, where)
    exif = exif_of_png(data, parts) if kind == PNG else image.info.get("exif", b"")
    bits = bits_of(image, data, kind)
    return Picture(kind, data, image.size, image.mode, exif, lambda: image, parts, plain=False, bits=bits)


def _check_pixels(size: tuple[int, int], shape: ImageShape, where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise CorruptError(f"{where}: an image of {width}×{height} pixels")
    if width * height > shape.max_pixels:
        raise FormatError(
            f"{where}: {height}×{width} pixels (height × width) are more than max_pixels "
            f"({shape.max_pixels}), and decoding may take all memory; raise max_pixels if the image is really so large"
        )


def _check_values(image: Any, data: bytes, kind: str, shape: ImageShape, where: str) -> None:
    inverted = white_is_zero(image, kind)
    if image.mode not in _UNDERSTOOD:
        raise FormatError(
            f"{where}: a {kind} of values that do not become 8 bits by themselves (Pillow's mode {image.mode}); "
            "convert it, or store it as .npy"
        )
    if image.mode in SIXTEEN_BITS and inverted:
        raise FormatError(
            f"{where}: a TIFF of 16 bits in which 0 is white, which Pillow does not turn round; convert it"
        )
    deep = kind == PNG and data[24] == 16
    if deep and shape.alpha and "transparency" in image.info:
        raise FormatError(f"{where}: a PNG of 16 bits with one transparent colour; store opacity as a channel")
    check_mode(kind, image.mode, bits_of(image, data, kind), shape, where, inverted=inverted)


def _broken(kind: str, error: Exception, where: str) -> CorruptError:
    said = str(error) or type(error).__name__
    return CorruptError(f"{where}: the {kind} cannot be decoded ({said}); is the file whole?")


def _orientation(picture: Picture) -> int:
    """How the pixels must be turned; those of a TIFF are turned by Pillow."""
    turned = picture.kind != TIFF and isinstance(picture.exif, bytes)
    return orientation_of(picture.exif) if turned else UPRIGHT


def _write(pixels: Pixels, box: Box, crop: Crop, shape: ImageShape, out: Array) -> None:
    if crop.size != out.shape[:2]:
        (row, column), (height, width) = crop.corner, crop.size
        out[...] = shape.fill
        out = out[row : row + height, column : column + width]
    write_resized(pixels, box, shape, out)
