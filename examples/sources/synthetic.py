"""A source of your own: data that are computed, not stored."""

from __future__ import annotations

import numpy as np

from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source, StorageLayout
from lit_async_data.testing import check_contract


class Waves(Source):
    def __len__(self):
        return 10_000

    @property
    def spec(self):
        return BatchSpec(
            {"x": FieldSpec((256,), np.dtype("f4")), "hertz": FieldSpec((), np.dtype("f4"))}, as_mapping=True
        )

    @property
    def chunks(self):  # numpy releases the GIL, so a thread may read ahead; by default the loop would read each batch
        return StorageLayout(reading="copied")

    def read_into(self, samples, out):
        hertz = 1 + samples % 97 / 10
        if "x" in out:
            np.sin(hertz[:, None] * np.linspace(0, 6.28, 256), out=out["x"], casting="same_kind")
        if "hertz" in out:
            out["hertz"][...] = hertz


if __name__ == "__main__":
    source = Waves()
    check_contract(source)
    with AsyncLoader(source, {"batch_size": 64, "shuffle": True}) as loader:
        batches = list(loader)
        print(source, len(batches), "batches; the loop waited", f"{loader.stats().wait_s:.3f} s")
