"""`Alignment`: whether the images of a sample show the same places, as an image and its mask do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lit_async_data.errors import ConfigError
from lit_async_data.sources.images.formats import GREYS, PALETTES, UPRIGHT
from lit_async_data.sources.images.image_shape import INDICES, ImageShape


class Shown(NamedTuple):
    """What an image shows before it is cropped and resized."""

    size: tuple[int, int]  # (height, width), after it is turned
    turned: int  # the orientation by which it is turned
    mode: str  # of the file, as Pillow calls it


#: The images of a field, by places that the fields of a sample have in common.
Places = Mapping[Any, Shown]


class Alignment:
    """The image fields that share their draw, and so show the same places. Immutable and thread-safe."""

    def __init__(self, shapes: Mapping[str, ImageShape]) -> None:
        self._shapes, by_draw = shapes, dict[str | None, list[str]]()
        for key, shape in shapes.items():
            by_draw.setdefault(shape.draw, []).append(key)
        self._pairs = [pair for keys in by_draw.values() for pair in itertools.combinations(keys, 2)]
        self.keys = frozenset(itertools.chain(*self._pairs))

    def mismatches(self, shown: Mapping[str, Places]) -> Iterator[tuple[str, Any, str]]:
        """Images that do not fit an image of another field: the field, the place, and the reason."""
        for one, other in self._pairs if len(shown) > 1 else ():
            seconds = shown.get(other, {})
            for place, first in shown.get(one, {}).items():
                second = seconds.get(place, first)
                if first[:2] != second[:2] and (what := self._mismatch({one: first, other: second})):
                    yield other, place, f"{what}; if {one} and {other} show different things, set draw: for one"

    def _mismatch(self, pair: Mapping[str, Shown]) -> str:
        for (key, image), (mate, other) in itertools.permutations(pair.items()):
            stored = (image.size[1], image.size[0]) if image.turned > 4 else image.size
            if image.turned != UPRIGHT == other.turned and _alike(stored, other.size):
                return (
                    f"{key} is turned by the orientation in its file ({image.turned}), but {mate}, whose shape is that "
                    f"of the stored pixels, is not: turn {mate} too if it was made from the stored pixels, or write "
                    f"{key} as it looks: ImageOps.exif_transpose(image).save(…)"
                )
        masks = [key for key in pair if self._shapes[key].target_mode == INDICES]
        if len(masks) == 1 and not _alike(*(each.size for each in pair.values())):
            sizes = " and ".join("{} has {}×{}".format(key, *each.size) for key, each in pair.items())
            return f"{sizes} pixels (height × width), so mask and image differ in shape: cut the mask as the image is"
        return ""

    def check_modes(self, shown: Mapping[str, Places]) -> None:
        """Refuse grey and palettes without a mode in the first images, since resizing mixes the numbers of masks."""
        for key in sorted(self.keys & shown.keys()):
            shape, modes = self._shapes[key], {each.mode for each in shown[key].values()}
            mixes = shape.mode is None and shape.image_size is not None and shape.resampling != "nearest"
            if mixes and modes & {*GREYS, *PALETTES}:
                what = "missing: the first image is grey or has a palette, beside another image, and resizing would mix"
                ways = "P for the numbers of a mask, L for grey tones, or RGB for colours"
                raise ConfigError(f"{what} the numbers of a mask; set {ways}", f"fields.{key}.mode")


def _alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two images have one shape, up to a scale and the rounding of sides."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= max(*one, *other)
