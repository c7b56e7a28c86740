"""The memory for decoding an image: computed in advance, limited, and large images decode one at a time."""

from __future__ import annotations

import contextlib
import math
import threading

from lit_async_data.batch.spec import Array
from lit_async_data.errors import FormatError
from lit_async_data.sources.manifest.images.formats.image_bytes import BMP, JPEG, PNG, TIFF, WEBP, is_lossless
from lit_async_data.sources.manifest.images.formats.png import copied_bytes
from lit_async_data.sources.manifest.images.formats.tiff import strip_bytes
from lit_async_data.sources.manifest.images.geometry.cropping import Crop
from lit_async_data.sources.manifest.images.geometry.image_shape import DEEP, ImageShape
from lit_async_data.sources.manifest.images.picture import Picture
from lit_async_data.sources.manifest.images.pixels import codecs_for, factor_of, is_direct, wants_codecs
from lit_async_data.system import after_fork_in_child

# Decoding in at most this many bytes is always allowed and never waits.
LARGE = 2**26
# Bytes per pixel that Pillow keeps, by mode; 4 for other modes. Other libraries keep one per channel.
_PILLOW_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
# This many pixels take far less than `LARGE`.
_SMALL_PIXELS = 2**20
# Most bytes for decoding, as a multiple of what Pillow keeps of an ordinary image of ``max_pixels``.
_LIMIT_FACTOR = 1.2
# Extra bytes per pixel: two frames that Pillow's WebP decoder for animations keeps, and one that it returns; the planes
# of a lossless or transparent WebP in libwebp; an RLE-compressed BMP in Pillow.
_FRAMES, _FRAME, _PLANES, _RLE = 8, 4, 5, 2

_turn = threading.Lock()
after_fork_in_child(_turn._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


def decode_bytes(picture: Picture, crop: Crop, shape: ImageShape) -> int:
    """Peak bytes for decoding an image, besides the file and the output; 0 for a small image.

    Args:
        picture: The image.
        crop: The part to deliver.
        shape: How it becomes an array.
    """
    width, height = picture.size
    if max(width, crop.size[1]) * max(width, height) <= _SMALL_PIXELS:
        return 0
    factor = factor_of(picture, crop, shape)
    kept = width * height * _pixel_bytes(picture, shape) // factor**2
    return kept + max(_decoder_bytes(picture, shape), _narrow_bytes(picture, crop, shape, factor))


def check_memory(taken: int, picture: Picture, shape: ImageShape, out: Array, where: str) -> None:
    """Refuse an image that takes much more memory to decode than an ordinary one of ``max_pixels``.

    Args:
        taken: From `decode_bytes`.
        picture: The image.
        shape: Gives ``max_pixels``.
        out: The output.
        where: The image in messages.

    Raises:
        FormatError: Decoding takes too much memory.
    """
    if taken <= LARGE:
        return
    most = _LIMIT_FACTOR * _PILLOW_BYTES.get(picture.mode, 4)
    limit = int(most * shape.max_pixels) + out.nbytes
    if taken <= limit:
        return
    width, height = picture.size
    install = (
        "install lit-async-data[codecs], which takes less; or "
        if wants_codecs(picture) and codecs_for(picture) is None
        else ""
    )
    raise FormatError(
        f"{where}: decoding this {picture.kind} of {height}×{width} pixels (height × width) takes {taken} bytes, more "
        f"than the {limit} that follow from max_pixels ({shape.max_pixels}); {install}raise max_pixels to "
        f"{math.ceil((taken - out.nbytes) / most)}, or store the image in another format"
    )


def turn_for(taken: int) -> contextlib.AbstractContextManager[object]:
    """The context in which an image is decoded: images that take more than `LARGE` bytes share a lock.

    Args:
        taken: From `decode_bytes`.
    """
    return _turn if taken > LARGE else contextlib.nullcontext()


def _pixel_bytes(picture: Picture, shape: ImageShape) -> int:
    """Bytes per pixel that are held until the image has been resized."""
    by_pillow = _PILLOW_BYTES.get(picture.mode, 4)
    if picture.kind == JPEG or is_direct(picture, shape) or codecs_for(picture) is not None:
        return min(by_pillow, len(picture.mode))
    return by_pillow + (_FRAMES if picture.kind == WEBP else 0)


def _decoder_bytes(picture: Picture, shape: ImageShape) -> int:
    """Extra bytes that are held until the image has been decoded."""
    pixels, by_pillow = picture.size[0] * picture.size[1], codecs_for(picture) is None
    if picture.kind == PNG:
        return copied_bytes(picture.data, picture.parts, by_pillow=not is_direct(picture, shape))
    if picture.kind == TIFF:
        return strip_bytes(picture.pillow) if by_pillow else 0
    if picture.kind == BMP:
        return _RLE * pixels if picture.pillow.tile[0].codec_name == "bmp_rle" else 0
    if picture.kind == WEBP:
        planes = _PLANES if is_lossless(picture.data) or picture.mode == "RGBA" else 0
        return pixels * (_FRAME if by_pillow else planes)
    return picture.coefficient_bytes


def _narrow_bytes(picture: Picture, crop: Crop, shape: ImageShape, factor: int) -> int:
    """Bytes of all rows resized to the new width, which are held until the columns are resized."""
    (left, upper, right, lower), (tall, wide) = crop.box, crop.size
    if lower - upper == tall and right - left == wide:
        return 0
    rows = math.ceil((lower - upper) / factor)
    channels = 1 if picture.mode == "L" else shape.channels
    return rows * wide * channels * (4 if shape.mode == DEEP else 1)
