"""`Strips`: the pixels of a large image, converted a few rows at a time, as a second copy would double the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lit_async_data.batch.spec import Array
from lit_async_data.sources.manifest.images.orientation import Part, stored_part, upright, upright_size

# Images of at least this many pixels are converted and resized by strips; what lies between takes a few MiB otherwise.
LARGE = 2**19
# Bytes of the pixels of a strip, at four for each.
_STRIP_BYTES = 2**20


class Strips:
    """The pixels of an image as they are seen, of which a part is converted when it is asked for.

    Args:
        read: Returns a part of the stored pixels, shape (height, width, channels).
        size: (width, height) of the image as it is stored.
        turned: How the camera was held, 1 to 8.

    Attributes:
        size: (height, width) as it is seen.
    """

    def __init__(self, read: Callable[[Part], Array], size: tuple[int, int], turned: int) -> None:
        self._read, self._turned = read, turned
        self.size = upright_size(size, turned)

    def part(self, part: Part) -> Array:
        """Pixels between left, upper, right and lower edge."""
        return upright(self._read(stored_part(part, self.size, self._turned)), self._turned)


# What has been decoded: an array of shape (height, width, channels), or one that is made as it is resized.
Pixels = Array | Strips


def size_of(pixels: Pixels) -> tuple[int, int]:
    """(height, width) of an image."""
    return pixels.size if isinstance(pixels, Strips) else (pixels.shape[0], pixels.shape[1])


def part_of(pixels: Pixels, part: Part) -> Array:
    """Pixels between left, upper, right and lower edge: a view, where they are an array."""
    if isinstance(pixels, Strips):
        return pixels.part(part)
    left, upper, right, lower = part
    return pixels[upper:lower, left:right]


def strips_of(pixels: Pixels, part: Part) -> Iterator[tuple[int, int, Array]]:
    """A part of an image by strips: of each the first row and the one behind it, within the part, and its pixels."""
    left, upper, right, lower = part
    rows = max(_STRIP_BYTES // (4 * (right - left)), 1)
    for first in range(upper, lower, rows):
        last = min(first + rows, lower)
        yield first - upper, last - upper, part_of(pixels, (left, first, right, last))
