"""`Decoder` of a file: `ImageDecoder`, or `NpyDecoder`.

``.npy`` files of Python objects are refused, because unpickling them can run any code.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from lit_async_data.batch.spec import TENSOR_TYPES, Array, FieldSpec
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.order.permutation import Words
from lit_async_data.sources.images.image import ImageDecoder
from lit_async_data.sources.images.image_shape import Draw

# Most characters of a header: numpy parses it as Python, and a longer one could crash the parser.
_MAX_HEADER = 10_000


@dataclasses.dataclass(frozen=True)
class NpyDecoder:
    """Arrays of one shape and dtype, stored by ``numpy.save``. The members are those of `ImageDecoder`."""

    spec: FieldSpec
    stored: np.dtype[Any]
    head: bytes | None = None
    images = is_random = fits_all = False
    advice = "store arrays of one shape, padded or cropped"

    @staticmethod
    def of(data: bytes, where: str) -> NpyDecoder:
        header = npy_header(data, where)
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

    def draws(self, keys: Words | None, count: int) -> Sequence[None]:  # noqa: ARG002  # nothing is drawn
        return [None] * count

    def decode(self, data: bytes, out: Array, draw: Draw, where: str) -> None:  # noqa: ARG002
        if out.dtype == self.stored:
            decode_npy(data, out, where)
        else:
            value = np.empty((), self.stored)
            decode_npy(data, value, where)
            out[...] = value

    def shape_of(self, data: bytes, where: str) -> tuple[int, ...]:
        return npy_header(data, where).shape


Decoder = ImageDecoder | NpyDecoder


class NpyHeader(NamedTuple):
    """Shape, dtype in the byte order of the file, whether the first axis varies fastest, and offset of the values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def npy_header(data: Any, where: str) -> NpyHeader:
    if bytes(data[: len(npy_format.MAGIC_PREFIX)]) != npy_format.MAGIC_PREFIX:
        raise FormatError(f"{where}: not a .npy file; write it with numpy.save")
    width = 2 if bytes(data[len(npy_format.MAGIC_PREFIX) : npy_format.MAGIC_LEN]) == b"\x01\x00" else 4
    length = int.from_bytes(data[npy_format.MAGIC_LEN : npy_format.MAGIC_LEN + width], "little")
    try:
        header = _parsed(bytes(data[: npy_format.MAGIC_LEN + width + min(length, _MAX_HEADER + 1)]))
    except Exception as error:  # numpy raises many types of errors for damaged headers
        raise CorruptError(
            f"{where}: the header of the .npy file cannot be read ({error}); fetch the file again"
        ) from error
    if header.dtype.hasobject:
        raise FormatError(f"{where}: holds Python objects, and pickle can run any code; store numbers")
    expected, actual = math.prod(header.shape) * header.dtype.itemsize, len(data) - header.start
    if actual != expected:
        raise CorruptError(
            f"{where}: {actual} bytes follow the header, but {header.dtype} of shape {header.shape} has {expected}; "
            "fetch the file again"
        )
    return header


# Cached, since files of one field share a header: without the cache, parsing took 25 of 30 µs per file.
@functools.lru_cache(maxsize=64)
def _parsed(head: bytes) -> NpyHeader:
    stream = io.BytesIO(head)
    # Version 3 differs from 2 only in the encoding of field names, and tensors cannot hold records.
    first = npy_format.read_magic(stream) == (1, 0)
    read = npy_format.read_array_header_1_0 if first else npy_format.read_array_header_2_0
    shape, fortran, dtype = read(stream, max_header_size=_MAX_HEADER)
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {shape}")
    return NpyHeader(shape, dtype, fortran, stream.tell())


def decode_npy(data: Any, out: Array, where: str) -> None:
    """Read the values of a ``.npy`` file into an array of the same shape and dtype, in any byte order."""
    header = npy_header(data, where)
    if header.shape != out.shape or header.dtype.newbyteorder("=") != out.dtype:
        raise FormatError(
            f"{where}: holds {header.dtype} of shape {header.shape}, but {out.dtype} of shape {out.shape} is "
            "expected; store all files of a field alike"
        )
    values = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start)
    out[...] = values.reshape(header.shape, order="F" if header.fortran else "C")
