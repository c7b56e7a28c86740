"""Datasets that are read as a whole when a source is built."""

import zlib

import h5py
import numpy as np
import pytest

from lit_async_data import HDF5Source
from lit_async_data.errors import CorruptError


@pytest.mark.parametrize("short", [False, True])
def test_a_short_chunk_of_a_dataset_that_is_read_whole_is_damage(tmp_path, short):
    """Rows are chosen when the source is built, by h5py: it would take memory that was never written."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(20)
        kept = file.create_dataset("kept", data=np.arange(10), chunks=(5,), compression="gzip")
        content = np.arange(5, 10).tobytes()
        kept.id.write_direct_chunk((5,), zlib.compress(content[:8] if short else content))
    if short:
        with pytest.raises(CorruptError, match=r"^rows: .*x.h5:/kept, chunk \(5,\) .*8 bytes instead of 40"):
            HDF5Source(path, ["data"], rows="kept")
    else:
        assert len(HDF5Source(path, ["data"], rows="kept")) == 10
