"""What a reader keeps of a mirror in memory stays what it was when the ring frees its blocks."""

import contextlib

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, HDF5Source

pytest.importorskip("obstore")
ROWS, WIDTH = 4096, 256


@pytest.mark.parametrize("kind", ["fletcher", "skipped filters"])
def test_chunks_that_are_cached_as_they_are_stored_outlive_their_blocks(server, tmp_path, kind):
    values = np.random.default_rng(0).integers(1, 1 << 30, (ROWS, WIDTH), "i4")
    with h5py.File(tmp_path / "bucket" / "x.h5", "w") as file:
        options = {"fletcher32": True} if kind == "fletcher" else {"compression": "gzip"}
        data = file.create_dataset("x", values.shape, "i4", chunks=(4, WIDTH), **options)
        if kind == "fletcher":
            data[...] = values
        for first in range(0, ROWS, 4) if kind != "fletcher" else ():
            data.id.write_direct_chunk((first, 0), values[first : first + 4].tobytes(), filter_mask=1)
    options = {"batch_size": 32, "shuffle": "chunk", "workers": 2, "worker_kind": "thread", "seed": 1}
    source = HDF5Source(f"{server.url}/bucket/x.h5", {"x": "x"}, cache_limit=2**19)
    with contextlib.closing(source), AsyncLoader(source, {**options, "return_indices": True}) as loader:
        for batch in loader:
            assert np.array_equal(batch["x"].numpy(), values[batch["index"].numpy()])
