"""Loaders with host hooks, and what they hand out."""

import numpy as np
import torch

from lit_async_data import AsyncLoader
from lit_async_data.testing import ArraySource
from support.sources.hooks import LENGTH, cropped, mixed

IMAGES = np.random.default_rng(0).integers(0, 255, (LENGTH, 3, 10, 8), np.uint8)


def source(length=LENGTH):
    return ArraySource({"x": IMAGES[:length], "y": np.arange(length)})


def hooked(of=None, *, sample=None, batch=None, device=None, depth=2, **options):
    """In the order of the source, and read in the loop, unless ``options`` say otherwise."""
    return AsyncLoader(
        source() if of is None else of,
        {"batch_size": 4, "shuffle": False, "workers": 0} | options,
        device_depth=depth,
        sample_transform=sample,
        batch_transform=batch,
        device_transform=device,
    )


def drawing(of=None, *, sample=cropped, batch=mixed, **options):
    """With random numbers for the hooks, in a random order, and read in threads."""
    chosen = {"shuffle": True, "seed": 5, "return_indices": True, "workers": "auto", "worker_kind": "thread"} | options
    return hooked(of, sample=sample, batch=batch, **chosen)


def copied(batch):
    return {key: value.clone() for key, value in batch.items()}


def read(loader, epochs=2):
    with loader:
        return [copied(batch) for _ in range(epochs) for batch in loader]


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        assert list(left) == list(right)
        assert all(torch.equal(left[key], right[key]) for key in left)


WANTED = read(drawing(workers=0))
STEPS = len(WANTED) // 2
