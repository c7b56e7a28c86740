"""Reads ``.npy`` files into arrays. Refuses Python objects, because unpickling them can run any code."""

from __future__ import annotations

import functools
import io
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from lit_async_data.batch.spec import Array
from lit_async_data.errors import CorruptError, FormatError

# Most characters of a header: numpy parses it as Python, and a longer one could crash the parser.
_MAX_HEADER = 10_000
# Version 3 differs from 2 only in the encoding of field names, and tensors cannot hold records.
_READERS: dict[tuple[int, ...], Any] = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
    (3, 0): npy_format.read_array_header_2_0,
}


class NpyHeader(NamedTuple):
    """The header of a ``.npy`` file.

    Attributes:
        shape: Shape of the array.
        dtype: Its dtype, in the byte order of the file.
        fortran: Whether the first axis varies fastest.
        start: Offset of the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def header_of(data: Any, where: str) -> NpyHeader:
    """Read the header of a ``.npy`` file of version 1 to 3.

    Args:
        data: The bytes of the file, at least those of the header.
        where: The file; messages begin with it.

    Raises:
        FormatError: Not a ``.npy`` file, or it holds Python objects.
        CorruptError: The header cannot be read.

    Example:
        >>> stream = io.BytesIO()
        >>> np.save(stream, np.zeros((2, 3), "f4"))
        >>> header_of(stream.getvalue(), "x.npy").shape
        (2, 3)
    """
    if bytes(data[: len(npy_format.MAGIC_PREFIX)]) != npy_format.MAGIC_PREFIX:
        raise FormatError(f"{where}: not a .npy file; write it with numpy.save")
    version = tuple(data[len(npy_format.MAGIC_PREFIX) : npy_format.MAGIC_LEN])
    if len(version) == 2 and version not in _READERS:
        raise FormatError(f"{where}: a .npy file of version {version[0]}.{version[1]}; write it with numpy.save")
    try:
        shape, fortran, dtype, start = _parsed(_head(data, version))
    except Exception as error:  # numpy raises many types of errors for damaged headers
        raise CorruptError(
            f"{where}: the header of the .npy file cannot be read ({error}); fetch the file again"
        ) from error
    if dtype.hasobject:
        raise FormatError(f"{where}: holds Python objects, and pickle can run any code; store numbers")
    if any(length < 0 for length in shape):
        raise CorruptError(f"{where}: the header of the .npy file has the shape {shape}; fetch the file again")
    return NpyHeader(shape, dtype, fortran, start)


def _head(data: Any, version: tuple[int, ...]) -> bytes:
    """The bytes before the values, as far as they exist; they begin with their own length."""
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(data[npy_format.MAGIC_LEN : npy_format.MAGIC_LEN + width], "little")
    return bytes(data[: npy_format.MAGIC_LEN + width + min(length, _MAX_HEADER + 1)])


# Cached, since files of one field share a header: without the cache, parsing took 25 of 30 µs per file.
@functools.lru_cache(maxsize=64)
def _parsed(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    stream = io.BytesIO(head)
    version = npy_format.read_magic(stream)
    shape, fortran, dtype = _READERS[version](stream, max_header_size=_MAX_HEADER)
    return shape, fortran, dtype, stream.tell()


def decode(data: Any, out: Array, where: str) -> None:
    """Read the values of a ``.npy`` file into an array.

    Args:
        data: All bytes of the file.
        out: Array of the same shape and dtype, in any byte order; overwritten.
        where: The file; messages begin with it.

    Raises:
        FormatError: The file has another shape or dtype, or as in `header_of`.
        CorruptError: The file has more or fewer bytes than its header says.
    """
    header = header_of(data, where)
    if header.shape != out.shape or header.dtype.newbyteorder("=") != out.dtype:
        raise FormatError(
            f"{where}: holds {header.dtype} of shape {header.shape}, but {out.dtype} of shape {out.shape} is "
            "expected; store all files of a field alike"
        )
    expected, actual = math.prod(header.shape) * header.dtype.itemsize, len(data) - header.start
    if actual != expected:
        raise CorruptError(
            f"{where}: {actual} bytes follow the header, but the array has {expected}; fetch the file again"
        )
    values = np.frombuffer(data, header.dtype, math.prod(header.shape), header.start)
    out[...] = values.reshape(header.shape, order="F" if header.fortran else "C")
