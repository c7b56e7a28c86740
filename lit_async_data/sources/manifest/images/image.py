"""Decoding images into arrays, by Pillow and torch, which hold no lock of Python's meanwhile.

Pillow comes with the extra ``manifest`` and is imported when the first image is decoded. None of its settings is
changed: they are one for the whole process.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable
from typing import Any

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError, CorruptError, FormatError, SourceError
from lit_async_data.sources.manifest.images.cropping import Box, Crop, crop_of
from lit_async_data.sources.manifest.images.decode_memory import check_memory, decode_bytes, turn_for
from lit_async_data.sources.manifest.images.image_bytes import (
    BMP,
    GIF,
    JPEG,
    PNG,
    TIFF,
    WEBP,
    DamageError,
    early_size,
    format_of,
)
from lit_async_data.sources.manifest.images.image_shape import ImageShape
from lit_async_data.sources.manifest.images.jpeg import head_of as head_of_jpeg
from lit_async_data.sources.manifest.images.orientation import ORIENTATION, UPRIGHT, orientation_of, upright_size
from lit_async_data.sources.manifest.images.picture import Picture, head_of
from lit_async_data.sources.manifest.images.pixels import pixels_of, write_as_stored
from lit_async_data.sources.manifest.images.png import Parts, exif_of_png, file_of_pixels, whole_png, xmp_of_png
from lit_async_data.sources.manifest.images.resizing import write_resized
from lit_async_data.sources.manifest.images.stored_values import SIXTEEN_BITS, bits_of, check_mode, white_is_zero
from lit_async_data.sources.manifest.images.strips import Pixels
from lit_async_data.sources.manifest.images.tiff import check_page, keep_as_stored, pages_of, unsupported_tiff

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

    JPEG, PNG, TIFF, WebP, BMP and GIF, by their first bytes. The orientation in EXIF or XMP is applied. CMYK and
    palettes become colours, and a grey image has the same value in R, G and B; mode P delivers the stored numbers of a
    palette instead. Values of more than 8 bits are delivered in mode I;16, or with ``depth: 8`` as their upper 8 bits.
    Files of several images, animations or pages, are refused; overviews and thumbnails in a TIFF are no pages.

    What comes out is decoded from all of a file that is whole as far as anything tells, whatever the mode: a file that
    ends too soon is an error, and so is a PNG with a wrong check sum or too few rows, and a JPEG that libjpeg finds
    damaged. Other formats have no check sums: changed bytes inside of them can come out as changed pixels.

    Args:
        data: All bytes of the file.
        shape: How it becomes the array.
        out: Of ``shape.dtype``, shape (H, W, ``shape.channels``), overwritten; undefined after an error.
        key: 64 bits for a random crop; None for the middle.
        where: What the image is called in messages; they begin with it.

    Raises:
        CorruptError: It cannot be decoded, or not all of it is there.
        FormatError: It is no image of these formats, of a kind that is not supported, one of too many pixels or of
            values that the mode cannot deliver; or it has another size than ``out`` and ``shape`` has none.
        ConfigError: Pillow or simplejpeg is missing.
    """
    if out.dtype != shape.dtype or out.ndim != 3 or out.shape[2] != shape.channels:
        raise ValueError(f"an array of {out.dtype} {out.shape} for an image of {shape.channels} channels")
    stored = bytes(data)  # no copy where it is bytes already
    kind = format_of(stored, where)
    picture = _opened(stored, kind, shape, where)
    turned = picture.turned
    target = out.shape[0], out.shape[1]
    height, width = upright_size(picture.size, turned)
    if shape.image_size is None and target != (height, width):
        raise FormatError(
            f"{where}: {height}×{width} pixels (height × width), where {target[0]}×{target[1]} are expected; give "
            "image_size, to which images are resized"
        )
    try:
        crop = crop_of(shape, height, width, target, key)
        taken = decode_bytes(picture, crop, shape)
        check_memory(taken, picture, shape, out, where)
        with turn_for(taken):
            if not write_as_stored(picture, crop, shape, turned, out):
                pixels, box = pixels_of(picture, crop, shape, turned)
                _write(pixels, box, crop, shape, out)
    except (MemoryError, ConfigError, FormatError):
        raise
    except ImportError:
        _library()  # says what to install
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
    return upright_size(picture.size, picture.turned)


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
    opening = functools.partial(_pillow, data, kind)
    if kind == JPEG:
        jpeg = head_of_jpeg(data, where)
        _check_pixels(jpeg.size, shape, where)
        check_mode(kind, jpeg.mode, 8, shape, where)
        turned = orientation_of(jpeg.exif, jpeg.xmp)
        return Picture(kind, data, jpeg.size, jpeg.mode, turned, opening, {}, plain=True, beside=jpeg.beside)
    try:
        _check_pixels(early_size(data, kind), shape, where)
        parts = whole_png(data, where) if kind == PNG else {}
        head = head_of(kind, data, parts)
    except struct.error as error:
        raise _broken(kind, error, where) from error
    if kind == PNG:
        opening = functools.partial(_pillow_of_png, data, parts)
    if head is None:
        return _opened_by_pillow(data, kind, parts, shape, where, opening=opening)
    _check_pixels(head.size, shape, where)
    check_mode(kind, head.mode, 8, shape, where)
    return Picture(kind, data, head.size, head.mode, _turned_png(data, parts), opening, parts, plain=True)


def _pillow(data: bytes, kind: str) -> Any:
    return _library()[1][kind](io.BytesIO(data))


def _pillow_of_png(data: bytes, parts: Parts) -> Any:
    return _pillow(file_of_pixels(data, parts), PNG)


def _turned_png(data: bytes, parts: Parts) -> int:
    return orientation_of(exif_of_png(data, parts), xmp_of_png(data, parts))


def _opened_by_pillow(
    data: bytes, kind: str, parts: Parts, shape: ImageShape, where: str, *, opening: Callable[[], Any]
) -> Picture:
    _library()
    pages = pages_of(data, where) if kind == TIFF else []
    try:
        image = opening()
        several = len(pages) > 1 or (kind != TIFF and getattr(image, "is_animated", False))
        if pages and pages[0] and not several:
            image.seek(pages[0])
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise whatever damaged data make them
        raise _not_opened(kind, data, error, where) from error
    if kind == TIFF:
        keep_as_stored(image)
    _check_pixels(image.size, shape, where)
    if several:
        raise FormatError(
            f"{where}: a {kind} of several images (frames or pages), where one is expected; store each in a file "
            "of its own"
        )
    if kind == TIFF:
        check_page(image, where)
    _check_values(image, data, kind, shape, where)
    turned = _turned_png(data, parts) if kind == PNG else _turned(image, kind)
    bits = bits_of(image, data, kind)
    return Picture(kind, data, image.size, image.mode, turned, lambda: image, parts, plain=False, bits=bits)


def _turned(image: Any, kind: str) -> int:
    if kind == TIFF and ORIENTATION in image.tag_v2:
        noted = image.tag_v2[ORIENTATION]
        return noted if noted in range(UPRIGHT, 9) else UPRIGHT
    exif, xmp = (image.info.get(name) for name in ("exif", "xmp"))
    return orientation_of(*(block if isinstance(block, bytes) else b"" for block in (exif, xmp)))


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
    # Other words come from the insides of a decoder; the error itself is chained.
    said = str(error) if isinstance(error, DamageError) else "its data contradict themselves or end too soon"
    return CorruptError(f"{where}: the {kind} cannot be decoded ({said}); is the file whole?")


def _not_opened(kind: str, data: bytes, error: Exception, where: str) -> SourceError:
    """The error of a file that Pillow did not open."""
    if kind == TIFF and (unsupported := unsupported_tiff(data, error)):
        return FormatError(
            f"{where}: a kind of TIFF that is not supported ({unsupported}); convert it to 8 bits per channel, or "
            "store it as .npy"
        )
    if kind == BMP and str(error).startswith("Unsupported BMP"):
        return FormatError(f"{where}: a kind of BMP that is not supported; convert it, for example to PNG")
    return _broken(kind, error, where)


def _write(pixels: Pixels, box: Box, crop: Crop, shape: ImageShape, out: Array) -> None:
    if crop.size != out.shape[:2]:
        (row, column), (height, width) = crop.corner, crop.size
        out[...] = shape.fill
        out = out[row : row + height, column : column + width]
    write_resized(pixels, box, shape, out)
