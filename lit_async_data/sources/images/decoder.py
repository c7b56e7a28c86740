"""`ImageDecoder`: decodes the bytes of an image into a sample."""

from __future__ import annotations

import dataclasses
from typing import Any

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.sources.images.alignment import Shown
from lit_async_data.sources.images.image import decode as decode_image
from lit_async_data.sources.images.image import size_of
from lit_async_data.sources.images.image_shape import ImageShape


@dataclasses.dataclass(frozen=True)
class ImageDecoder:
    """Images of any size as arrays of one shape, stored as (H, W, C) and delivered as (C, H, W).

    Attributes:
        head: The first bytes of each file, if the rest of it is a stored sample; None if samples must be decoded.
        advice: What to do if files have different shapes.
    """

    shape: ImageShape
    size: tuple[int, int]
    head = None
    images = True
    advice = (
        "give image_size to resize all images, or deliver them as they are by a DataLoader with a collate_fn under "
        "prefetched(...)"
    )

    @staticmethod
    def of(shape: ImageShape, data: bytes, where: str) -> ImageDecoder:
        """The decoder of a field: the size is given, or that of the first file."""
        size: Any = shape.image_size or size_of(data, shape, where)
        return ImageDecoder(shape, size)

    @property
    def spec(self) -> FieldSpec:
        """uint8, or uint16 in that mode; channels first."""
        return FieldSpec((self.shape.channels, *self.size), self.shape.dtype, channel=2)

    @property
    def is_random(self) -> bool:
        return self.shape.resize == "random_crop"

    @property
    def fits_all(self) -> bool:
        """Whether images of all sizes become samples of one shape."""
        return self.shape.image_size is not None

    def decode(self, data: bytes, out: Array, key: int | None, where: str) -> Shown:
        """Decode a file into an array of the stored shape; the key selects a random part, None the middle."""
        return decode_image(data, self.shape, out, key, where)

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        size = size_of(data, self.shape, where)
        return (*(self.size if self.fits_all else size), self.shape.channels)
