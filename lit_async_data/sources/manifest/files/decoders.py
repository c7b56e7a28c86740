"""What makes a sample of the bytes of a file: `ImageDecoder` and `NpyDecoder`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np

from lit_async_data.batch.spec import TENSOR_TYPES, Array, FieldSpec
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.sources.manifest.files.npy import decode as decode_npy
from lit_async_data.sources.manifest.files.npy import header_of
from lit_async_data.sources.manifest.images.image import decode as decode_image
from lit_async_data.sources.manifest.images.image import size_of
from lit_async_data.sources.manifest.images.image_shape import ImageShape


class Decoder(Protocol):
    """Makes samples of files. Nothing in it changes; it may be used from any thread, and can be pickled."""

    @property
    def spec(self) -> FieldSpec:
        """What samples look like."""
        ...

    @property
    def is_random(self) -> bool:
        """Whether a key makes a difference."""
        ...

    @property
    def head(self) -> bytes | None:
        """What a file begins with, if the rest of it is a sample as it lies; None where samples must be decoded."""
        ...

    @property
    def images(self) -> bool:
        """Whether files are images."""
        ...

    @property
    def fits_all(self) -> bool:
        """Whether files of any shape are made to fit."""
        ...

    @property
    def advice(self) -> str:
        """What to do where files are of different shapes."""
        ...

    def decode(self, data: bytes, out: Array, key: int | None, where: str) -> None:
        """Write a sample.

        Args:
            data: All bytes of the file.
            out: Of ``spec``'s stored shape and type.
            key: 64 bits, for what is drawn; None for the middle.
            where: What the file is called in messages.

        Raises:
            CorruptError: It does not decode.
            FormatError: It is something else, or of another shape.
        """
        ...

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        """The stored shape that a file has by itself, without decoding it; raises as `decode`."""
        ...


@dataclasses.dataclass(frozen=True)
class ImageDecoder:
    """Images of any size, as arrays of one shape: (H, W, C) as they lie, delivered as (C, H, W)."""

    shape: ImageShape
    size: tuple[int, int]

    @property
    def images(self) -> bool:
        return True

    @property
    def head(self) -> None:
        """Samples must be decoded."""

    @staticmethod
    def of(shape: ImageShape, data: bytes, where: str) -> ImageDecoder:
        """The decoder of a field, by its first file, or by the size alone where one is given."""
        size: Any = shape.image_size or size_of(data, shape, where)
        return ImageDecoder(shape, size)

    @property
    def spec(self) -> FieldSpec:
        """uint8, or uint16 in mode I;16; channels first."""
        return FieldSpec((self.shape.channels, *self.size), self.shape.dtype, channel=2)

    @property
    def is_random(self) -> bool:
        """Whether a random part of each is taken."""
        return self.shape.resize == "random_crop"

    @property
    def fits_all(self) -> bool:
        """Whether images are resized."""
        return self.shape.image_size is not None

    @property
    def advice(self) -> str:
        return "give image_size, to which images are resized"

    def decode(self, data: bytes, out: Array, key: int | None, where: str) -> None:
        decode_image(data, self.shape, out, key, where)

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        size = size_of(data, self.shape, where)
        return (*(self.size if self.shape.image_size else size), self.shape.channels)


@dataclasses.dataclass(frozen=True)
class NpyDecoder:
    """Arrays of one shape and type, as ``numpy.save`` stores them."""

    field: FieldSpec
    stored: np.dtype[Any]
    head: bytes | None = None

    @staticmethod
    def of(data: bytes, where: str) -> NpyDecoder:
        """The decoder of a field, by its first file.

        Raises:
            FormatError: Its values are nothing that a tensor holds, or there are none.
        """
        header = header_of(data, where)
        dtype = header.dtype.newbyteorder("=")
        if (dtype.kind, dtype.itemsize) not in TENSOR_TYPES:
            raise FormatError(f"{where}: holds {header.dtype}, which no tensor holds; store it as another type")
        if math.prod(header.shape) * dtype.itemsize != len(data) - header.start:
            raise CorruptError(
                f"{where}: {len(data) - header.start} bytes follow the header, which promises {header.dtype} of shape "
                f"{header.shape}; was the file cut short?"
            )
        if not math.prod(header.shape):
            raise FormatError(f"{where}: an array of shape {header.shape}, which holds nothing")
        # As everywhere: single whole numbers are what losses take.
        delivered = np.dtype(np.int64) if not header.shape and dtype.kind in "iu" else dtype
        as_it_lies = header.dtype == delivered and header.dtype.isnative and not header.fortran
        head = bytes(data[: header.start]) if as_it_lies else None
        return NpyDecoder(FieldSpec(header.shape, delivered), dtype, head)

    @property
    def spec(self) -> FieldSpec:
        """As the first file has it, in native byte order."""
        return self.field

    @property
    def images(self) -> bool:
        return False

    @property
    def is_random(self) -> bool:
        return False

    @property
    def fits_all(self) -> bool:
        """Arrays are never changed."""
        return False

    @property
    def advice(self) -> str:
        return "store arrays of one shape, padded or cropped"

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
    """The decoder of a field from its first file.

    Args:
        kind: ``"image"`` or ``"npy"``.
        shape: How images become arrays of one shape.
        data: All bytes of the file.
        where: What it is called in messages.
    """
    if kind == "image":
        return ImageDecoder.of(shape, data, where)
    return NpyDecoder.of(data, where)
