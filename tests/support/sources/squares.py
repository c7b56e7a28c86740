"""`Squares`, the smallest source."""

import numpy as np

from lit_async_data import BatchSpec, FieldSpec, Source

ROWS = 300


class Squares(Source):
    spec = BatchSpec({"y": FieldSpec((), np.dtype("i8")), "x": FieldSpec((3,), np.dtype("f4"))}, as_mapping=True)

    def __len__(self):
        return ROWS

    def read_into(self, samples, out):
        if "y" in out:
            out["y"][...] = samples**2
        if "x" in out:
            out["x"][...] = samples[:, None] + np.arange(3)
