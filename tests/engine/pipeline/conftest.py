"""Files of sequences, of which batches by length are made."""

import h5py
import numpy as np
import pytest

from lit_async_data import HDF5Source


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Two files of sequences of two columns, whose longest have 180 and 97 rows."""
    folder = tmp_path_factory.mktemp("sequences")
    generator = np.random.default_rng(0)
    for name, count, longest in (("a.h5", 230, 180), ("b.h5", 77, 97)):
        lengths = np.minimum(generator.lognormal(3, 1, count).astype(int), longest)
        lengths[count // 2] = longest
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        with h5py.File(folder / name, "w") as file:
            values = generator.integers(1, 2**15, (offsets[-1], 2), np.int16)
            file.create_dataset("x/values", data=values, chunks=(64, 2), compression="gzip")
            file["x/offsets"] = offsets
            file["y"] = np.arange(count)
    return folder


@pytest.fixture
def source(folder):
    source = HDF5Source(folder / "*.h5", {"x": "x", "y": "y"})
    yield source
    source.close()
