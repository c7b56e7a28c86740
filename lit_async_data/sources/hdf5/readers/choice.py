"""Which reader fits a dataset. Looks at its description only, so that tools can ask without opening a file."""

from __future__ import annotations

from typing import Literal

from lit_async_data.sources.hdf5.readers.raw import is_raw
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset

Choice = Literal["raw", "strided", "chunks", "h5py chunks", "h5py rows"]


def choice(stored: StoredDataset, *, mapped: bool) -> Choice:
    """The fastest reader that fits a dataset, in a file that may be ``mapped`` into memory or not.

    ``"raw"``: rows are copied as they are stored. ``"strided"``: they are copied piece by piece, since the first axis
    does not count samples. ``"chunks"``: chunks are read and decoded without libhdf5. ``"h5py chunks"``, ``"h5py
    rows"``: libhdf5 reads them under its lock.
    """
    if is_raw(stored):
        return "raw"
    if stored.offset is not None and mapped:
        return "strided"
    if stored.index is not None:
        return "chunks"
    return "h5py chunks" if stored.filtered else "h5py rows"
