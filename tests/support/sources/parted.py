"""Sources whose samples are numbers, and the sides and folds that these come to."""

import numpy as np

from lit_async_data import AsyncLoader, StorageLayout
from lit_async_data.errors import CorruptError
from lit_async_data.testing import ArraySource

HALVES = {"train": 0.5, "val": 0.5}


def numbered(length=10, first=0, **arrays):
    return ArraySource({"y": first + np.arange(length), **arrays})


def parted(parts=None, *, first=0, runs=(), overlap=0, **columns):
    parts, layout = parts or {"a.h5": 4, "b.h5": 6}, StorageLayout(tuple(runs), overlap=overlap)
    values = first + np.arange(sum(parts.values()))
    return ArraySource({"y": values}, parts=parts, columns=columns or None, chunks=layout)


def read(source, samples):
    out = np.full(len(samples), -1)
    source.read_into(np.asarray(samples, np.int64), {"y": out})
    return out.tolist()


class Failing(ArraySource):
    def __init__(self, length, bad, error=None):
        super().__init__({"y": np.arange(length)})
        self.bad, self.error = bad, error

    def read_into(self, samples, out):
        if self.bad in samples:
            raise self.error or CorruptError(f"row {self.bad}: bad", row=self.bad, sample_id=self.bad)
        super().read_into(samples, out)


def files(count, samples=3):
    return {f"{number:03}.h5": samples for number in range(count)}


def side_of(sides, length):
    """The side of each sample; None where it is unused, an error where there are two."""
    side = [None] * length
    for name, subset in sides.items():
        for sample in subset.samples.tolist():
            assert side[sample] is None
            side[sample] = name
    return side


def folds_of(cut, length):
    """The fold of each sample, which is in val of one split and in train of the others."""
    fold = np.full(length, -1)
    for number, sides in enumerate(cut):
        assert (fold[sides["val"].samples] == -1).all()
        fold[sides["val"].samples] = number
        assert np.array_equal(np.setdiff1d(np.arange(length), sides["val"].samples), sides["train"].samples)
        assert sides.overlap == 0
    assert (fold >= 0).all()
    return fold


def held(fold, k, classes):
    return np.array([np.bincount(classes[fold == number], minlength=classes.max() + 1) for number in range(k)])


def batches_of(source, **options):
    with AsyncLoader(source, {"batch_size": 4, "shuffle": True, **options}) as loader:
        return [batch for _ in range(2) for batch in loader]
