"""Decodes the pixels of a `Picture`, converts them to the requested mode, and turns them upright."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.sources.manifest.images.formats.fax import check_fax
from lit_async_data.sources.manifest.images.formats.image_bytes import JPEG, PNG, TIFF, WEBP, has_frames
from lit_async_data.sources.manifest.images.formats.jpeg import jpeg_pixels
from lit_async_data.sources.manifest.images.formats.png import INTERLACED, check_rows, png_pixels
from lit_async_data.sources.manifest.images.formats.tiff import check_jpegs, is_plain, strip_bytes
from lit_async_data.sources.manifest.images.geometry.cropping import Box, Crop, whole_pixels
from lit_async_data.sources.manifest.images.geometry.image_shape import CHANNELS, DEEP, INDICES, ImageShape
from lit_async_data.sources.manifest.images.geometry.orientation import UPRIGHT, Part, mirrored, upright, upright_size
from lit_async_data.sources.manifest.images.geometry.strips import LARGE, Pixels, Strips, part_of
from lit_async_data.sources.manifest.images.picture import Picture, imagecodecs
from lit_async_data.sources.manifest.images.stored_values import SIXTEEN_BITS

# A JPEG is decoded at half, a quarter or an eighth of its size if this many times the output pixels remain in each
# direction. On photographs this changes values about as much as JPEG compression itself (0.4 to 0.9 of 255 on average);
# a value of 1 would change them three times as much.
_MIN_OVERSAMPLING = 2


def write_as_stored(picture: Picture, crop: Crop, shape: ImageShape, turned: int, out: Array) -> bool:
    """Decode an image into the output if all pixels are delivered as stored.

    Args:
        picture: The image.
        crop: The part to deliver, in the upright image.
        shape: Gives the mode.
        turned: The orientation, 1 to 8.
        out: Shape (height, width, channels), dtype of the mode.

    Returns:
        Whether it was decoded. Otherwise the output is undefined, and `pixels_of` decodes the image or raises its
        error.
    """
    width, height = picture.size
    as_stored = turned == UPRIGHT and picture.mode == shape.mode and crop.box == (0, 0, width, height)
    fits = out.shape[:2] == (height, width) and out.flags.c_contiguous
    return as_stored and fits and _directly(picture, shape, 1, out) is not None


def pixels_of(picture: Picture, crop: Crop, shape: ImageShape, turned: int) -> tuple[Pixels, Box]:
    """The pixels of an image, perhaps at half, a quarter or an eighth of its size, and the box to deliver.

    Args:
        picture: The image.
        crop: The part to deliver, in the upright image.
        shape: Gives the mode.
        turned: The orientation, 1 to 8.

    Returns:
        Pixels of shape (height, width, channels), upright; one channel if grey becomes colours later; for a large
        image, `Strips` that are converted when they are resized. And left, upper, right and lower edge of the box.
    """
    factor = factor_of(picture, crop, shape)
    box = _reduced(picture, crop, shape, turned, factor)
    pixels = _directly(picture, shape, factor)
    if pixels is None:
        strips = factor == 1 and picture.size[0] * picture.size[1] >= LARGE
        array = _in_own_mode(picture, factor, strips=strips)
        if strips:
            return Strips(_reader(picture, shape, array), picture.size, turned), box
        pixels = _values(
            _decoded(picture, factor) if array is None else _image(array, picture.mode), shape, picture.bits
        )
    return upright(pixels, turned), box


def _in_own_mode(picture: Picture, factor: int, *, strips: bool) -> Array | None:
    """All pixels in the mode of the file, by a library that needs less memory or finds more damage than Pillow."""
    if picture.kind == JPEG:
        return jpeg_pixels(picture.data, picture.mode, picture.size, factor)
    return _by_codecs(picture) if strips else None


def _reader(picture: Picture, shape: ImageShape, array: Array | None) -> Callable[[Part], Array]:
    """Converts a part of the pixels, from ``array`` or, if None, from the image that Pillow decodes."""
    if array is not None:
        return lambda part: _values(_image(part_of(array, part), picture.mode), shape, picture.bits)
    image = _decoded(picture, 1)
    return lambda part: _values(image.crop(part), shape, picture.bits)


def _decoded(picture: Picture, factor: int) -> Any:
    """The decoded Pillow image."""
    image = picture.pillow
    if picture.kind == TIFF:
        check_jpegs(picture.data, image.tag_v2)
    if factor > 1:
        image.draft(None, (image.size[0] // factor, image.size[1] // factor))
    image.load()
    if picture.kind == TIFF:
        check_fax(picture.data, image)
    if picture.kind == PNG and (picture.data[INTERLACED] or _last_row(image).getbbox() is None):
        check_rows(picture.data, picture.parts)
    return image


def _image(pixels: Array, mode: str) -> Any:
    from PIL import Image

    height, width, _ = pixels.shape
    return Image.frombuffer(mode, (width, height), np.ascontiguousarray(pixels), "raw", mode, 0, 1)


def _last_row(image: Any) -> Any:
    width, height = image.size
    return image.crop((0, height - 1, width, height))


def factor_of(picture: Picture, crop: Crop, shape: ImageShape) -> int:
    """The factor by which both sides are divided in decoding; 1 except for JPEGs."""
    if picture.kind != JPEG or shape.resampling == "nearest":
        return 1
    left, upper, right, lower = crop.box
    room = min((right - left) / crop.size[1], (lower - upper) / crop.size[0]) / _MIN_OVERSAMPLING
    return next((factor for factor in (8, 4, 2) if factor <= room), 1)


def _reduced(picture: Picture, crop: Crop, shape: ImageShape, turned: int, factor: int) -> Box:
    """The box in the reduced image."""
    if factor == 1:
        return crop.box
    left, upper, right, lower = crop.box
    # The stored size is divided, but both sides by the same factor.
    height, width = upright_size(picture.size, turned)
    # The last column and row may extend beyond the image; in a mirrored image they come first.
    right_first, lower_first = mirrored(turned)
    across = -(-width // factor) - width / factor if right_first else 0
    down = -(-height // factor) - height / factor if lower_first else 0
    box = (left / factor + across, upper / factor + down, right / factor + across, lower / factor + down)
    # A crop may begin up to a pixel earlier or later, and whole pixels are resized faster.
    return whole_pixels(*box) if shape.resize in ("crop", "random_crop") else box


def is_direct(picture: Picture, shape: ImageShape) -> bool:
    """Whether a faster library than Pillow decodes the image to the requested values."""
    return picture.plain and (picture.mode == shape.mode or (picture.mode == "L" and shape.mode in ("RGB", INDICES)))


def _directly(picture: Picture, shape: ImageShape, factor: int, out: Bytes | None = None) -> Bytes | None:
    """The pixels by a faster library than Pillow, with the same values; None if Pillow must decode them.

    Pillow decodes other modes, files that are not plain, and PNGs that the library refuses. Pixels are written to
    ``out`` if given.

    Raises:
        DamageError: A JPEG is damaged.
    """
    if not is_direct(picture, shape):
        return None
    if picture.kind == JPEG:  # 0.6 of Pillow's time
        return jpeg_pixels(picture.data, picture.mode, picture.size, factor, out)
    width, height = picture.size
    try:  # 0.4 to 0.6 of Pillow's time
        return png_pixels(picture.data, picture.parts, (height, width, CHANNELS[picture.mode]), out, imagecodecs())
    except (ValueError, RuntimeError):
        return None


def wants_codecs(picture: Picture) -> bool:
    """Whether imagecodecs decodes a large image in less memory than Pillow.

    Pillow decodes a WebP as an animation. Of a TIFF, Pillow holds a strip besides the pixels; imagecodecs decodes the
    strip in place.
    """
    if picture.kind == WEBP:
        return not has_frames(picture.data)
    width, height = picture.size
    return picture.kind == TIFF and strip_bytes(picture.pillow) > width * height // 8 and is_plain(picture.pillow)


def codecs_for(picture: Picture) -> Any:
    """The library imagecodecs if `wants_codecs` and it is installed with the codec; else None."""
    codecs = imagecodecs() if picture.kind in (WEBP, TIFF) else None
    if codecs is None or not wants_codecs(picture):
        return None
    return codecs if (codecs.WEBP if picture.kind == WEBP else codecs.TIFF).available else None


def _by_codecs(picture: Picture) -> Array | None:
    """The pixels of a WebP or TIFF in the mode of the file; None if Pillow must decode them."""
    codecs = codecs_for(picture)
    if codecs is None:
        return None
    try:
        if picture.kind == WEBP:
            pixels: Array = codecs.webp_decode(picture.data, hasalpha=picture.mode == "RGBA")
        else:
            pixels = codecs.tiff_decode(picture.data, index=picture.pillow.tell())
    except (ValueError, RuntimeError):
        return None  # Pillow will raise the error
    (width, height), channels = picture.size, CHANNELS[picture.mode]
    fits = pixels.size == height * width * channels and pixels.dtype.itemsize * 8 == picture.bits
    return pixels.reshape(height, width, channels) if fits and pixels.shape[:2] == (height, width) else None


def _values(image: Any, shape: ImageShape, bits: int) -> Array:
    """The values of an image in a mode that can be resized: the requested one, or grey that becomes colours later."""
    if shape.mode == DEEP:
        return np.asarray(image, np.uint16)[..., None]
    converted = _numbers(image) if shape.mode == INDICES else _converted(image, shape, bits)
    width, height = converted.size
    return np.frombuffer(converted.tobytes(), np.uint8).reshape(height, width, -1)


def _numbers(image: Any) -> Any:
    """An image of one channel with the stored values."""
    if image.mode == "1":
        return image.convert("L").point([0] * 255 + [1])
    return image.getchannel(0) if image.mode == "PA" else image


def _converted(image: Any, shape: ImageShape, bits: int) -> Any:
    """The image in the requested mode, or grey that becomes colours later."""
    if image.mode in SIXTEEN_BITS:
        image = _eight_bits(image, bits)
    if not shape.alpha:
        # Otherwise Pillow would apply it or warn.
        image.info.pop("transparency", None)
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if image.mode == shape.mode or (image.mode == "L" and shape.mode == "RGB"):
        return image
    return image.convert(shape.mode)


def _eight_bits(image: Any, bits: int) -> Any:
    """The upper 8 of the stored bits."""
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
