"""The values of a mode from those of a file; an error names the setting to change where the mode would change them."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array, Bytes
from lit_async_data.errors import FormatError
from lit_async_data.sources.images.formats import Head
from lit_async_data.sources.images.image_shape import DEEP, INDICES, ImageShape

_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
PALETTES = ("P", "PA")
GREYS = ("1", "L", *_SIXTEEN_BITS)
# Modes of Pillow that can be converted; others have more than 8 bits, or colours that Pillow does not convert.
_SUPPORTED = (*PALETTES, *GREYS, "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


def check_mode(kind: str, head: Head, shape: ImageShape, where: str) -> None:
    """Refuse an image of a kind of format whose values the requested mode would change."""
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
        reason = (
            f"of {head.bits} bits, but mode {shape.target_mode} delivers 8; set upper_8_bits: true to get the upper "
            f"8{all_}"
        )
    elif head.mode in PALETTES and shape.target_mode in ("L", "LA") and shape.resampling == "nearest":
        reason = (
            f"with a palette, but mode {shape.target_mode} makes grey tones of its colours; set mode: P to get the "
            "stored class numbers (for grey tones set another interpolation)"
        )
    else:
        return
    if reason:
        raise FormatError(f"{where}: a {kind} {reason}")


def _not_deep(head: Head) -> str:
    if head.bits <= 8:
        return (
            f"of {head.bits} bits, but mode uint16 delivers more than 8, and the scale of its values is unknown; set "
            "mode: L, or convert the file to 16 bits"
        )
    if head.mode in _SIXTEEN_BITS:
        return ""
    return (
        f"of {head.bits} bits with several channels, but mode uint16 delivers one; set upper_8_bits: true and mode: "
        "RGB, or store it as .npy"
    )


def _not_numbers(kind: str, head: Head) -> str:
    if head.mode in _SIXTEEN_BITS:
        return f"of {head.bits} bits, but mode P delivers numbers of 8; set mode: uint16 and interpolation: nearest"
    if kind == "JPEG":
        return "whose compression changes class numbers; store masks as PNG, or set mode: L"
    if head.mode not in (*PALETTES, *GREYS):
        return (
            "of colours without a palette, but mode P delivers the numbers of a palette image or of a grey one; set "
            "mode: RGB, or convert the file"
        )
    if head.mode in GREYS and (head.white_is_zero or head.bits in (2, 4)):
        stored = "upside down (0 is white)" if head.white_is_zero else f"in {head.bits} bits, which Pillow multiplies"
        return (
            f"whose grey values are stored {stored}, so the class numbers are unknown; set mode: L for 0 (black) to "
            "255, or convert the file to 8 bits"
        )
    return ""


def values_of(decoded: Any, head: Head, shape: ImageShape) -> Array:
    """The values of the requested mode, or grey that becomes colours later; shape (height, width, channels).

    ``decoded`` is an array in the mode of the file, or the image in Pillow.
    """
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
    """The image in the requested mode, or grey that becomes colours later."""
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
