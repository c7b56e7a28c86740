"""`Strips`: the pixels of a large image, converted a few rows at a time to save a second copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lit_async_data.batch.spec import Array
from lit_async_data.sources.manifest.images.geometry.orientation import Part, stored_part, upright, upright_size

# From this number of pixels on, images are converted and resized in strips.
LARGE = 2**19
# Bytes of a strip, at 4 per pixel.
_STRIP_BYTES = 2**20


class Strips:
    """The pixels of an upright image, converted one part at a time.

    Args:
        read: Returns a part of the stored pixels, shape (height, width, channels).
        size: (width, height) as stored.
        turned: The orientation, 1 to 8.

    Attributes:
        size: (height, width) of the upright image.
    """

    def __init__(self, read: Callable[[Part], Array], size: tuple[int, int], turned: int) -> None:
        self._read, self._turned = read, turned
        self.size = upright_size(size, turned)

    def part(self, part: Part) -> Array:
        """The pixels between left, upper, right and lower edge."""
        return upright(self._read(stored_part(part, self.size, self._turned)), self._turned)


# Decoded pixels: an array of shape (height, width, channels), or strips that are converted on demand.
Pixels = Array | Strips


def size_of(pixels: Pixels) -> tuple[int, int]:
    """(height, width) of an image."""
    return pixels.size if isinstance(pixels, Strips) else (pixels.shape[0], pixels.shape[1])


def part_of(pixels: Pixels, part: Part) -> Array:
    """The pixels between left, upper, right and lower edge; a view of an array."""
    if isinstance(pixels, Strips):
        return pixels.part(part)
    left, upper, right, lower = part
    return pixels[upper:lower, left:right]


def strips_of(pixels: Pixels, part: Part) -> Iterator[tuple[int, int, Array]]:
    """A part of an image in strips: first row, last row (exclusive), both relative to the part, and pixels."""
    left, upper, right, lower = part
    rows = max(_STRIP_BYTES // (4 * (right - left)), 1)
    for first in range(upper, lower, rows):
        last = min(first + rows, lower)
        yield first - upper, last - upper, part_of(pixels, (left, first, right, last))
