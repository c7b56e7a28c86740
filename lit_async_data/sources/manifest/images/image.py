"""Decodes images into arrays by Pillow and torch, which release the GIL.

Pillow is part of the extra ``manifest`` and is imported with the first image. Its settings hold for the whole process
and are not changed.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Callable
from typing import Any

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError, CorruptError, FormatError, SourceError
from lit_async_data.sources.manifest.images.decode_memory import check_memory, decode_bytes, turn_for
from lit_async_data.sources.manifest.images.formats.image_bytes import (
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
from lit_async_data.sources.manifest.images.formats.jpeg import head_of as head_of_jpeg
from lit_async_data.sources.manifest.images.formats.png import Parts, exif_of_png, file_of_pixels, whole_png, xmp_of_png
from lit_async_data.sources.manifest.images.formats.tiff import check_page, keep_as_stored, pages_of, unsupported_tiff
from lit_async_data.sources.manifest.images.geometry.cropping import Box, Crop, crop_of
from lit_async_data.sources.manifest.images.geometry.image_shape import ImageShape
from lit_async_data.sources.manifest.images.geometry.orientation import (
    ORIENTATION,
    UPRIGHT,
    orientation_of,
    upright_size,
)
from lit_async_data.sources.manifest.images.geometry.resizing import write_resized
from lit_async_data.sources.manifest.images.geometry.strips import Pixels
from lit_async_data.sources.manifest.images.picture import Picture, head_of
from lit_async_data.sources.manifest.images.pixels import pixels_of, write_as_stored
from lit_async_data.sources.manifest.images.stored_values import SIXTEEN_BITS, bits_of, check_mode, white_is_zero

# Modes of Pillow that can be converted; others have more than 8 bits, or colours that Pillow does not convert.
_SUPPORTED_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", *SIXTEEN_BITS)


def installed() -> bool:
    """Whether Pillow can be imported."""
    try:
        _library()
    except ConfigError:
        return False
    return True


def decode(data: Any, shape: ImageShape, out: Array, key: int | None, where: str) -> None:
    """Decode an image, resize it, and write it.

    Supports JPEG, PNG, TIFF, WebP, BMP and GIF, recognized by their first bytes. Applies the orientation in EXIF or
    XMP. CMYK and palettes become colours, and a grey image has equal R, G and B; mode P delivers the stored numbers of
    a palette instead. Values of more than 8 bits need mode I;16, or ``depth: 8`` for their upper 8 bits. Files of
    several images (animations or pages) are refused; overviews and thumbnails in a TIFF are ignored.

    In every mode, damage that can be detected is an error: a file that ends too soon, a PNG with a wrong checksum or
    too few rows, and a JPEG that libjpeg finds damaged. Other formats have no checksums, so changed bytes can become
    changed pixels.

    Args:
        data: All bytes of the file.
        shape: How the image becomes an array.
        out: Array of ``shape.dtype``, shape (H, W, ``shape.channels``), overwritten; undefined after an error.
        key: 64 bits that select a random crop; None for the middle.
        where: The image; messages begin with it.

    Raises:
        CorruptError: The image cannot be decoded, or is incomplete.
        FormatError: It has another or an unsupported format, too many pixels, or values that the mode cannot deliver;
            or its size differs from ``out`` and ``shape`` has no size.
        ConfigError: Pillow or simplejpeg is missing.
    """
    if out.dtype != shape.dtype or out.ndim != 3 or out.shape[2] != shape.channels:
        raise ValueError(f"an array of {out.dtype} {out.shape} for an image of {shape.channels} channels")
    stored = bytes(data)  # no copy of bytes
    kind = format_of(stored, where)
    picture = _open_picture(stored, kind, shape, where)
    turned = picture.turned
    target = out.shape[0], out.shape[1]
    height, width = upright_size(picture.size, turned)
    if shape.image_size is None and target != (height, width):
        raise FormatError(
            f"{where}: {height}×{width} pixels (height × width), but {target[0]}×{target[1]} are expected; give "
            "image_size to resize all images"
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
        _library()  # raises if Pillow is missing
        raise
    except Exception as error:  # Pillow raises many types of errors for damaged data
        raise _damage_error(kind, error, where) from error


def size_of(data: Any, shape: ImageShape, where: str) -> tuple[int, int]:
    """(height, width) of an image after orientation, without decoding it.

    Args:
        data: All bytes of the file.
        shape: Gives ``max_pixels``.
        where: The image in messages.

    Raises:
        CorruptError: The image cannot be read, or is incomplete.
        FormatError: As in `decode`.
    """
    stored = bytes(data)
    kind = format_of(stored, where)
    picture = _open_picture(stored, kind, shape, where)
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
        raise ConfigError("image: Pillow is missing; install it by pip install 'lit-async-data[manifest]'") from None
    # The class of each format, because Image.open warns of large images or refuses them by its own limit.
    classes = {
        JPEG: JpegImagePlugin.JpegImageFile,
        PNG: PngImagePlugin.PngImageFile,
        TIFF: TiffImagePlugin.TiffImageFile,
        WEBP: WebPImagePlugin.WebPImageFile,
        BMP: BmpImagePlugin.BmpImageFile,
        GIF: GifImagePlugin.GifImageFile,
    }
    return Image, classes


def _open_picture(data: bytes, kind: str, shape: ImageShape, where: str) -> Picture:
    """The image before decoding, after all checks that are possible without pixels."""
    opening = functools.partial(_pillow, data, kind)
    if kind == JPEG:
        jpeg = head_of_jpeg(data, where)
        _check_pixels(jpeg.size, shape, where)
        check_mode(kind, jpeg.mode, 8, shape, where)
        turned = orientation_of(jpeg.exif, jpeg.xmp)
        return Picture(
            kind, data, jpeg.size, jpeg.mode, turned, opening, {}, plain=True, coefficient_bytes=jpeg.coefficient_bytes
        )
    try:
        _check_pixels(early_size(data, kind), shape, where)
        parts = whole_png(data, where) if kind == PNG else {}
        head = head_of(kind, data, parts)
    except struct.error as error:
        raise _damage_error(kind, error, where) from error
    if kind == PNG:
        opening = functools.partial(_pillow_of_png, data, parts)
    if head is None:
        return _open_by_pillow(data, kind, parts, shape, where, opening=opening)
    _check_pixels(head.size, shape, where)
    check_mode(kind, head.mode, 8, shape, where)
    return Picture(kind, data, head.size, head.mode, _png_orientation(data, parts), opening, parts, plain=True)


def _pillow(data: bytes, kind: str) -> Any:
    return _library()[1][kind](io.BytesIO(data))


def _pillow_of_png(data: bytes, parts: Parts) -> Any:
    return _pillow(file_of_pixels(data, parts), PNG)


def _png_orientation(data: bytes, parts: Parts) -> int:
    return orientation_of(exif_of_png(data, parts), xmp_of_png(data, parts))


def _open_by_pillow(
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
    except Exception as error:  # Pillow raises many types of errors for damaged data
        raise _not_open_picture(kind, data, error, where) from error
    if kind == TIFF:
        keep_as_stored(image)
    _check_pixels(image.size, shape, where)
    if several:
        raise FormatError(
            f"{where}: a {kind} of several images (frames or pages), but one is expected; store each in its own file"
        )
    if kind == TIFF:
        check_page(image, where)
    _check_values(image, data, kind, shape, where)
    turned = _png_orientation(data, parts) if kind == PNG else _orientation(image, kind)
    bits = bits_of(image, data, kind)
    return Picture(kind, data, image.size, image.mode, turned, lambda: image, parts, plain=False, bits=bits)


def _orientation(image: Any, kind: str) -> int:
    if kind == TIFF and ORIENTATION in image.tag_v2:
        noted = image.tag_v2[ORIENTATION]
        return noted if noted in range(UPRIGHT, 9) else UPRIGHT
    exif, xmp = (image.info.get(name) for name in ("exif", "xmp"))
    return orientation_of(*(block if isinstance(block, bytes) else b"" for block in (exif, xmp)))


def _check_pixels(size: tuple[int, int], shape: ImageShape, where: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise CorruptError(f"{where}: an image of {height}×{width} pixels (height × width); fetch the file again")
    if width * height > shape.max_pixels:
        raise FormatError(
            f"{where}: {height}×{width} pixels (height × width) are more than max_pixels "
            f"({shape.max_pixels}), and decoding may take all memory; raise max_pixels if the image really has this "
            "size"
        )


def _check_values(image: Any, data: bytes, kind: str, shape: ImageShape, where: str) -> None:
    inverted = white_is_zero(image, kind)
    if image.mode not in _SUPPORTED_MODES:
        raise FormatError(
            f"{where}: a {kind} of Pillow's mode {image.mode}, which has no standard conversion to 8 bits; "
            "convert it, or store it as .npy"
        )
    if image.mode in SIXTEEN_BITS and inverted:
        raise FormatError(f"{where}: a TIFF of 16 bits in which 0 is white, which Pillow does not invert; convert it")
    deep = kind == PNG and data[24] == 16
    if deep and shape.alpha and "transparency" in image.info:
        raise FormatError(f"{where}: a PNG of 16 bits with one transparent colour; store opacity as a channel")
    check_mode(kind, image.mode, bits_of(image, data, kind), shape, where, inverted=inverted)


def _damage_error(kind: str, error: Exception, where: str) -> CorruptError:
    # Other errors name internals of a decoder; they are only chained.
    reason = str(error) if isinstance(error, DamageError) else "its data are inconsistent or end too soon"
    return CorruptError(f"{where}: the {kind} cannot be decoded ({reason}); fetch the file again")


def _not_open_picture(kind: str, data: bytes, error: Exception, where: str) -> SourceError:
    """The error of a file that Pillow did not open."""
    if kind == TIFF and (unsupported := unsupported_tiff(data, error)):
        return FormatError(
            f"{where}: an unsupported kind of TIFF ({unsupported}); convert it to 8 bits per channel, or "
            "store it as .npy"
        )
    if kind == BMP and str(error).startswith("Unsupported BMP"):
        return FormatError(f"{where}: an unsupported kind of BMP; convert it, for example to PNG")
    return _damage_error(kind, error, where)


def _write(pixels: Pixels, box: Box, crop: Crop, shape: ImageShape, out: Array) -> None:
    if crop.size != out.shape[:2]:
        (row, column), (height, width) = crop.corner, crop.size
        out[...] = shape.fill
        out = out[row : row + height, column : column + width]
    write_resized(pixels, box, shape, out)
