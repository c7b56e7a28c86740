"""Checks that the requested mode can deliver the stored values; errors name the setting to change."""

from __future__ import annotations

from typing import Any

from lit_async_data.errors import FormatError
from lit_async_data.sources.manifest.images.formats.image_bytes import JPEG, PNG, TIFF
from lit_async_data.sources.manifest.images.geometry.image_shape import DEEP, INDICES, ImageShape

# Pillow's modes with values of more than 8 bits, and those with palette indices.
SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
_PALETTES = ("P", "PA")
_GREYS = ("1", "L", *SIXTEEN_BITS)
# TIFF tags of bits per value and of their meaning; and the meaning in which 0 is white.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def bits_of(image: Any, data: bytes, kind: str) -> int:
    """Bits per stored value.

    Args:
        image: The Pillow image.
        data: All bytes of the file.
        kind: Format.
    """
    if kind == PNG:
        return data[24]
    if kind == TIFF:
        return int(max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,))))
    return 8


def white_is_zero(image: Any, kind: str) -> bool:
    """Whether the image is a TIFF in which 0 is white."""
    return kind == TIFF and image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO


def check_mode(kind: str, mode: str, bits: int, shape: ImageShape, where: str, *, inverted: bool = False) -> None:
    """Refuse an image whose values the requested mode would change.

    Args:
        kind: Format of the image.
        mode: Pillow's mode.
        bits: Bits per stored value.
        shape: Gives the requested mode.
        where: The image in messages.
        inverted: Whether 0 is white.

    Raises:
        FormatError: The mode would change values; names the setting to change.
    """
    if shape.mode == DEEP:
        reason = _not_deep(kind, mode, bits)
    elif shape.mode == INDICES:
        reason = _not_numbers(kind, mode, bits, inverted=inverted)
    else:
        reason = _not_eight_bits(kind, mode, bits, shape)
    if reason:
        raise FormatError(f"{where}: {reason}")


def _not_deep(kind: str, mode: str, bits: int) -> str:
    if bits <= 8:
        return (
            f"a {kind} of {bits} bits, but mode I;16 delivers more than 8, and the scale of "
            "its values is unknown; set mode: L, or convert the file to 16 bits"
        )
    if mode not in SIXTEEN_BITS:
        return (
            f"a {kind} of {bits} bits with several channels, but mode I;16 delivers one; set depth: 8 and mode: RGB, "
            "or store it as .npy"
        )
    return ""


def _not_numbers(kind: str, mode: str, bits: int, *, inverted: bool) -> str:
    if bits > 8 and mode in SIXTEEN_BITS:
        return f"a {kind} of {bits} bits, but mode P delivers numbers of 8; set mode: I;16 and interpolation: nearest"
    if kind == JPEG:
        return "a JPEG, whose compression changes class numbers; store masks as PNG, or set mode: L"
    if mode not in (*_PALETTES, *_GREYS):
        return (
            f"a {kind} of colours without a palette, but mode P delivers the numbers of a palette image or of a grey "
            "one; set mode: RGB, or convert the file"
        )
    if mode in _GREYS and (inverted or bits in (2, 4)):
        stored = "upside down (0 is white)" if inverted else f"in {bits} bits, which Pillow multiplies"
        return (
            f"a {kind} whose grey values are stored {stored}, so the class numbers are unknown; set "
            "mode: L for 0 (black) to 255, or convert the file to 8 bits"
        )
    return ""


def _not_eight_bits(kind: str, mode: str, bits: int, shape: ImageShape) -> str:
    if bits > 8 and shape.depth is None:
        all_ = ", or mode: I;16 to get all of them" if mode in SIXTEEN_BITS else ""
        return f"a {kind} of {bits} bits, but mode {shape.mode} delivers 8; set depth: 8 to get the upper 8{all_}"
    if mode in _PALETTES and shape.mode in ("L", "LA") and shape.resampling == "nearest":
        return (
            f"a {kind} with a palette, but mode {shape.mode} makes grey tones of its colours; set mode: P to get the "
            "stored class numbers (for grey tones set another interpolation)"
        )
    return ""
