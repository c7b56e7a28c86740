"""`read_chunk`, `is_found` and `write_chunk`: chunks as they are stored, under h5py's lock.

Before version 3.16, h5py does not take its lock for these. Another thread may then be inside libhdf5 at the same
time, which makes reads fail, and can end the process: https://github.com/h5py/h5py/pull/2764.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS, REMEDIES
from lit_async_data.sources.local_files.retrying import errno_of

if TYPE_CHECKING:
    import h5py


def read_chunk(dataset: h5py.Dataset, corner: tuple[int, ...]) -> tuple[int, bytes]:
    """The filter mask and the stored bytes of the chunk at a corner. Bit i of the mask means a skipped filter i."""
    from h5py._objects import phil

    with phil:
        return cast("tuple[int, bytes]", dataset.id.read_direct_chunk(corner))


def is_found(dataset: h5py.Dataset, corner: tuple[int, ...]) -> bool:
    """Whether libhdf5 finds the chunk at a corner. Reads only its index, unless the chunk has a single byte."""
    from h5py._objects import phil

    try:
        with phil:
            dataset.id.read_direct_chunk(corner, out=bytearray(1))
    except ValueError:  # h5py has found it, and it does not fit
        return True
    except LIBRARY_ERRORS as error:
        if errno_of(error) in REMEDIES:
            raise
        return False
    return True


def write_chunk(dataset: h5py.Dataset, corner: tuple[int, ...], mask: int, data: bytes) -> None:
    """Write what `read_chunk` has read from another dataset with the same filters."""
    from h5py._objects import phil

    with phil:
        dataset.id.write_direct_chunk(corner, data, mask)
