"""A source of your own: rows of Zarr arrays."""

from __future__ import annotations

import numpy as np
import zarr

from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source
from lit_async_data.testing import check_contract


class ZarrSource(Source):
    def __init__(self, path, keys):
        self.arrays = {key: zarr.open_array(path, path=key, mode="r") for key in keys}
        fields = {key: FieldSpec(array.shape[1:], array.dtype) for key, array in self.arrays.items()}
        self._spec = BatchSpec(fields, as_mapping=True)

    def __len__(self):
        return min(array.shape[0] for array in self.arrays.values())

    @property
    def spec(self):
        return self._spec

    def read_into(self, samples, out):
        for key, array in out.items():
            array[...] = self.arrays[key].oindex[samples]


if __name__ == "__main__":
    group = zarr.open_group("images.zarr", mode="w")
    group.create_array("image", data=np.random.default_rng(0).random((1000, 3, 8, 8), np.float32), chunks=(50, 3, 8, 8))
    group.create_array("label", data=np.arange(1000) % 10, chunks=(1000,))
    source = ZarrSource("images.zarr", ["image", "label"])
    check_contract(source)
    with AsyncLoader(source, {"batch_size": 64, "shuffle": True}) as loader:
        batches = list(loader)
        print(source, len(batches), "batches; the loop waited", f"{loader.stats().wait_s:.3f} s")
