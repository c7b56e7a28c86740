"""Host hooks that travel to reader processes, which import only this module, as they would a user's."""

import numpy as np

from lit_async_data import BatchSpec, FieldSpec, Source, StorageLayout

LENGTH = 23


def cropped(sample, rng):
    """Draws in all ways in which a generator keeps something back."""
    x = sample["x"]
    if rng is not None:
        top, left = rng.integers(0, 3, 2, dtype=np.int8)
        x = x[:, top : top + 8, left : left + 6]
        x = x[..., ::-1] if rng.random() < 0.5 else x
    else:
        x = x[:, 1:9, 1:7]
    return {"x": x, "y": sample["y"], "drawn": -1 if rng is None else int(rng.integers(2**62))}


def mixed(batch, rng):
    if rng is not None:
        batch["x"] = batch["x"][rng.permutation(len(batch["x"]))]
    batch["batch"] = np.full(len(batch["y"]), -1 if rng is None else rng.integers(2**62))


def explode(sample):
    raise ZeroDivisionError("no light")


AGES = np.arange(LENGTH) * 10


class Rows(Source):
    """An `ArraySource` that is unpickled without torch, of dicts or tuples."""

    spec = chunks = None  # of each source

    def __init__(self, arrays, reading="locked", *, as_tuple=False):
        fields = {key: FieldSpec(each.shape[1:], each.dtype) for key, each in arrays.items()}
        self.spec, self.chunks = BatchSpec(fields, as_mapping=not as_tuple), StorageLayout(reading=reading)
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays["y"])

    def read_into(self, samples, out):
        for key, array in out.items():
            array[...] = self.arrays[key][samples]


def aged(sample):
    return {"y": sample["y"], "age": AGES[sample["index"]]}


def older(batch):
    batch["older"] = AGES[batch["index"]] + 1
