"""A file that lies behind a network, of which little comes before it is needed."""

import h5py
import numpy as np

from lit_async_data.sources.files import files as files_module
from lit_async_data.sources.files.mirror import BLOCK
from support.sources.oracle import read

ROWS = 40
VALUES = np.random.default_rng(1).integers(1, 100, (ROWS, 64, 64)).astype("i2")


def written(path, monkeypatch, **storage):
    """The values as x; and in chunks as z, if ``storage`` says how."""
    monkeypatch.setattr(files_module, "HEAD_BYTES", BLOCK)
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)
    with h5py.File(path, "w") as file:
        file["x"] = VALUES
        if storage:
            file.create_dataset("z", data=VALUES, chunks=(4, 64, 64), **storage)


def assert_right(source):
    samples = np.random.default_rng(0).permutation(len(source))
    for values in read(source, samples).values():
        assert np.array_equal(values, VALUES[samples % ROWS])
