"""Decodes images into arrays by libraries that release the GIL.

Pillow is part of the extra ``manifest`` and is imported with the first image. Its settings hold for the whole process
and are not changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.manifest.images.cropping import Box, Crop, crop_of, whole_pixels
from lit_async_data.sources.manifest.images.formats import Format, Head, format_of
from lit_async_data.sources.manifest.images.image_shape import ImageShape
from lit_async_data.sources.manifest.images.modes import check_mode, values_of
from lit_async_data.sources.manifest.images.orientation import UPRIGHT, mirrored, upright, upright_size
from lit_async_data.sources.manifest.images.resizing import write_resized
from lit_async_data.system import after_fork_in_child

# An image is decoded at half, a quarter or an eighth of its size, where its format can, if this many times the output
# pixels remain in each direction. On photographs this changes values about as much as JPEG compression itself (0.4 to
# 0.9 of 255 on average); a value of 1 would change them three times as much.
_MIN_OVERSAMPLING = 2
# Images that are decoded to more pixels are decoded one at a time: each takes up to 20 bytes per pixel.
_LARGE = 2**24

_turn = threading.Lock()
after_fork_in_child(_turn._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


def decode(data: Any, shape: ImageShape, out: Array, key: int | None, where: str) -> None:
    """Decode an image, resize it, and write it.

    Supports the formats in `FORMATS`, recognized by their first bytes. Applies the orientation in EXIF or XMP. CMYK and
    palettes become colours, and a grey image has equal R, G and B; mode P delivers the stored numbers of a palette
    instead. Values of more than 8 bits need mode uint16, or ``upper_8_bits`` for their upper 8 bits.

    A file that ends too soon is an error, and so are a changed byte in a PNG and a JPEG that libjpeg warns of. The
    other formats have no checksums: changed bytes can become changed pixels, in most JPEGs too.

    Args:
        data: All bytes of the file.
        shape: How the image becomes an array.
        out: Array of ``shape.dtype``, shape (H, W, ``shape.channels``), overwritten; undefined after an error.
        key: 64 bits that select a random crop; None for the middle.
        where: The image; messages begin with it.

    Raises:
        CorruptError: The image cannot be decoded, or is incomplete.
        FormatError: It has another or an unsupported format, several images, too many pixels, or values that the mode
            cannot deliver; or its size differs from ``out`` and ``shape`` has no size.
        ConfigError: Pillow or simplejpeg is missing.
    """
    if out.dtype != shape.dtype or out.ndim != 3 or out.shape[2] != shape.channels:
        raise ValueError(f"an array of {out.dtype} {out.shape} for an image of {shape.channels} channels")
    stored = bytes(data)  # no copy of bytes
    kind = format_of(stored, where)
    with _damage_named(kind, where):
        head = _checked_head(kind, stored, shape, where)
        height, width = upright_size(head.size, head.turned)
        if shape.image_size is None and out.shape[:2] != (height, width):
            raise FormatError(
                f"{where}: {height}×{width} pixels (height × width), but {out.shape[0]}×{out.shape[1]} are expected; "
                "give image_size to resize all images"
            )
        crop = crop_of(shape, height, width, (out.shape[0], out.shape[1]), key)
        factor = _factor(kind, crop, shape)
        with _turn if height * width > _LARGE * factor**2 else contextlib.nullcontext():
            out = _filled(out, crop, shape)
            decoded = kind.decode(stored, head, factor, out if _as_stored(head, crop, shape, out) else None)
            if decoded is not out:
                pixels = upright(values_of(decoded, head, shape), head.turned)
                write_resized(pixels, _reduced(head, crop, factor, shape), shape, out)


def size_of(data: Any, shape: ImageShape, where: str) -> tuple[int, int]:
    """(height, width) of an image after orientation, without decoding it.

    Args:
        data: All bytes of the file.
        shape: Gives ``max_pixels``.
        where: The image in messages.

    Raises:
        CorruptError: The header of the image cannot be read.
        FormatError: As in `decode`.
    """
    stored = bytes(data)
    kind = format_of(stored, where)
    with _damage_named(kind, where):
        head = _checked_head(kind, stored, shape, where)
    return upright_size(head.size, head.turned)


@contextlib.contextmanager
def _damage_named(kind: Format, where: str) -> Iterator[None]:
    """Raise any error of a decoder as one that names the image."""
    try:
        yield
    except (MemoryError, ConfigError, FormatError):
        raise
    except ImportError:
        raise ConfigError("image: Pillow is missing; install it by pip install 'lit-async-data[manifest]'") from None
    except Exception as error:  # Pillow raises many types of errors for damaged data
        said = isinstance(error, ValueError | OSError | SyntaxError)  # other types name internals of a decoder
        reason = str(error) if said else "its data are inconsistent or end too soon"
        raise CorruptError(
            f"{where}: the {kind.name} cannot be decoded ({reason}); fetch the file again, or convert it if it is whole"
        ) from error


def _checked_head(kind: Format, data: bytes, shape: ImageShape, where: str) -> Head:
    """The header, after all checks that are possible without pixels."""
    head = kind.head(data, where)
    width, height = head.size
    if width < 1 or height < 1:
        raise ValueError(f"it has {height}×{width} pixels")
    if width * height > shape.max_pixels:
        raise FormatError(
            f"{where}: {height}×{width} pixels (height × width) are more than max_pixels ({shape.max_pixels}), and "
            "decoding may take all memory; raise max_pixels if the image really has this size"
        )
    check_mode(kind.name, head, shape, where)
    return head


def _factor(kind: Format, crop: Crop, shape: ImageShape) -> int:
    """The factor by which both sides are divided in decoding."""
    if shape.resampling == "nearest":
        return 1
    left, upper, right, lower = crop.box
    room = min((right - left) / crop.size[1], (lower - upper) / crop.size[0]) / _MIN_OVERSAMPLING
    return next((factor for factor in kind.factors if factor <= room), 1)


def _filled(out: Array, crop: Crop, shape: ImageShape) -> Array:
    """The part of the output that the image becomes, after filling the rest."""
    if crop.size == out.shape[:2]:
        return out
    (row, column), (height, width) = crop.corner, crop.size
    out[...] = shape.fill
    return out[row : row + height, column : column + width]


def _as_stored(head: Head, crop: Crop, shape: ImageShape, out: Array) -> bool:
    """Whether the decoded pixels are those to deliver, and a decoder can write them where they belong."""
    width, height = head.size
    fits = out.shape[:2] == (height, width) and out.flags.c_contiguous
    return fits and head.turned == UPRIGHT and head.mode == shape.mode and crop.box == (0, 0, width, height)


def _reduced(head: Head, crop: Crop, factor: int, shape: ImageShape) -> Box:
    """The box to deliver, in the upright pixels of the reduced image."""
    if factor == 1:
        return crop.box
    left, upper, right, lower = crop.box
    # The stored size is divided, but both sides by the same factor.
    height, width = upright_size(head.size, head.turned)
    # The last column and row may extend beyond the image; in a mirrored image they come first.
    right_first, lower_first = mirrored(head.turned)
    across = -(-width // factor) - width / factor if right_first else 0
    down = -(-height // factor) - height / factor if lower_first else 0
    box = (left / factor + across, upper / factor + down, right / factor + across, lower / factor + down)
    # A crop may begin up to a pixel earlier or later, and whole pixels are resized faster.
    return whole_pixels(*box) if shape.resize in ("crop", "random_crop") else box
