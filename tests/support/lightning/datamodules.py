"""`AsyncDataModule` over arrays, without a Trainer."""

import numpy as np

from lit_async_data import AsyncDataModule
from lit_async_data.testing import ArraySource


def source(length=1000, **arrays):
    return ArraySource({"x": np.zeros((length, 3), np.float32), **arrays})


def dm_of(**options):
    return AsyncDataModule(**{"train": source(), "val": source(100), "loader": {"batch_size": 10}} | options)
