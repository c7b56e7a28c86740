"""Loaders of numbered samples, in a random order unless said otherwise; and the numbers that they hand out."""

import numpy as np

from lit_async_data import AsyncLoader
from lit_async_data.testing import ArraySource
from support.plans import plan_of

LENGTH, BATCH = 18, 4
WIDE = 20_000  # over 64 KiB per batch, so that x is handed out as the slot itself


def numbers(length=LENGTH, width=WIDE):
    first = np.arange(length)
    return ArraySource({"x": np.repeat(first.astype(np.float32), width).reshape(length, width), "y": first})


def loader_of(source=None, **given):
    """``given``: options, and keywords of the loader."""
    others = {"rank", "world_size", "device_depth", "device_transform", "batch_transform"}
    keywords = {name: given.pop(name) for name in others & given.keys()}
    return AsyncLoader(source or numbers(), {"batch_size": BATCH, "shuffle": "global", **given}, **keywords)


def batches(epoch=0, shuffle="global"):
    plan = plan_of(length=LENGTH, batch_size=BATCH, shuffle=shuffle, seed=0, epoch=epoch)
    return [plan.batch(step).tolist() for step in range(len(plan))]


def order(epoch=0):
    return [number for batch in batches(epoch) for number in batch]


def seen(batches):
    return [number for batch in batches for number in batch["y"].tolist()]


class Bad(ArraySource):
    def __init__(self, sample):
        super().__init__({"y": np.arange(LENGTH)})
        self._sample = sample

    def read_into(self, samples, out):
        if self._sample in samples:
            raise OSError(5, "Input/output error")
        super().read_into(samples, out)
