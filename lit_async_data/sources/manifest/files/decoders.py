"""`ImageDecoder` and `NpyDecoder`: decode the bytes of a file into a sample."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np

from lit_async_data.batch.spec import TENSOR_TYPES, Array, FieldSpec
from lit_async_data.errors import FormatError
from lit_async_data.sources.manifest.files.npy import decode as decode_npy
from lit_async_data.sources.manifest.files.npy import header_of
from lit_async_data.sources.manifest.images.image import decode as decode_image
from lit_async_data.sources.manifest.images.image import size_of
from lit_async_data.sources.manifest.images.image_shape import ImageShape


class Decoder(Protocol):
    """Decodes files into samples. Immutable, thread-safe and picklable.

    Attributes:
        spec: Shape and dtype of the samples.
        is_random: Whether the key selects a part of the sample.
        head: The first bytes of each file, if the rest of it is a stored sample; None if samples must be decoded.
        images: Whether files are images.
        fits_all: Whether files of all shapes become samples of one shape.
        advice: What to do if files have different shapes.
    """

    @property
    def spec(self) -> FieldSpec: ...
    @property
    def is_random(self) -> bool: ...
    @property
    def head(self) -> bytes | None: ...
    @property
    def images(self) -> bool: ...
    @property
    def fits_all(self) -> bool: ...
    @property
    def advice(self) -> str: ...

    def decode(self, data: bytes, out: Array, key: int | None, where: str) -> None:
        """Decode a file into an array.

        Args:
            data: All bytes of the file.
            out: An array of the stored shape and dtype of ``spec``.
            key: 64 bits that select a random part; None for the middle.
            where: The file in messages.

        Raises:
            CorruptError: The file does not decode.
            FormatError: The file has another format or shape.
        """
        ...

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        """The stored shape of one file, without decoding it; raises as `decode`."""
        ...


@dataclasses.dataclass(frozen=True)
class ImageDecoder:
    """Images of any size as arrays of one shape, stored as (H, W, C) and delivered as (C, H, W)."""

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
        """Whether images are cropped at random."""
        return self.shape.resize == "random_crop"

    @property
    def fits_all(self) -> bool:
        """Whether images are resized."""
        return self.shape.image_size is not None

    def decode(self, data: bytes, out: Array, key: int | None, where: str) -> None:
        decode_image(data, self.shape, out, key, where)

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        size = size_of(data, self.shape, where)
        return (*(self.size if self.shape.image_size else size), self.shape.channels)


@dataclasses.dataclass(frozen=True)
class NpyDecoder:
    """Arrays of one shape and dtype, stored by ``numpy.save``."""

    field: FieldSpec
    stored: np.dtype[Any]
    head: bytes | None = None
    images = is_random = fits_all = False
    advice = "store arrays of one shape, padded or cropped"

    @staticmethod
    def of(data: bytes, where: str) -> NpyDecoder:
        """The decoder of a field, from its first file."""
        header = header_of(data, where)
        dtype = header.dtype.newbyteorder("=")
        if (dtype.kind, dtype.itemsize) not in TENSOR_TYPES:
            raise FormatError(f"{where}: holds {header.dtype}, which no tensor can hold; store another dtype")
        if not math.prod(header.shape):
            raise FormatError(f"{where}: an empty array of shape {header.shape}; leave it out")
        # Whole-number scalars are int64 in all sources, as losses need them.
        delivered = np.dtype(np.int64) if not header.shape and dtype.kind in "iu" else dtype
        is_stored_sample = header.dtype == delivered and header.dtype.isnative and not header.fortran
        head = bytes(data[: header.start]) if is_stored_sample else None
        return NpyDecoder(FieldSpec(header.shape, delivered), dtype, head)

    @property
    def spec(self) -> FieldSpec:
        """Shape and dtype of the first file, in native byte order."""
        return self.field

    def decode(self, data: bytes, out: Array, key: int | None, where: str) -> None:  # noqa: ARG002  # nothing is drawn
        if out.dtype == self.stored:
            decode_npy(data, out, where)
        else:
            value = np.empty((), self.stored)
            decode_npy(data, value, where)
            out[...] = value

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        return header_of(data, where).shape


def decoder_of(kind: str, shape: ImageShape, data: Any, where: str) -> Decoder:
    """The decoder of a field, from its first file.

    Args:
        kind: ``"image"`` or ``"npy"``.
        shape: How images become arrays of one shape.
        data: All bytes of the file.
        where: The file in messages.
    """
    if kind == "image":
        return ImageDecoder.of(shape, data, where)
    return NpyDecoder.of(data, where)
