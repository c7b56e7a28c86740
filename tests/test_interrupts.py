"""Ctrl-C and then on, as in a notebook: wherever it comes, every batch is handed out once, in order, as it was read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from interrupts import interrupted

from lit_async_data import AsyncLoader, HDF5Source, engine, memory
from lit_async_data import loader as loader_module
from lit_async_data.plan import EpochPlan
from lit_async_data.testing import ArraySource, FakeStreams

LENGTH, BATCH, WIDTH = 22, 4, 20_000  # over 64 KiB per batch, so that x is handed out as the slot itself
STEPS = 6


def values():
    return np.repeat(np.arange(LENGTH, dtype=np.float32), WIDTH).reshape(LENGTH, WIDTH)


def arrays(workers, **options):
    source = ArraySource({"x": values(), "y": np.arange(LENGTH)})
    return AsyncLoader(source, {"batch_size": BATCH, "workers": workers, "shuffle": "global"}, **options)


def hdf5(workers, h5, *, packed):
    data = {"data": values(), "chunks": (3, WIDTH), "compression": "gzip"} if packed else values()
    source = HDF5Source(h5(x=data, y=np.arange(LENGTH)), fields={"x": "x", "y": "y"})
    options = {"batch_size": BATCH, "workers": workers, "shuffle": "chunk" if packed else "global", "shuffle_chunks": 2}
    return AsyncLoader(source, options)


def half(batch):
    batch["x"] /= 2
    return batch | {"x": batch["x"] * 2}


KINDS = {
    "in the caller's thread": lambda h5: arrays(0),
    "one worker": lambda h5: arrays(1),
    "two workers": lambda h5: arrays(2),
    "nothing ahead": lambda h5: arrays(1, device_depth=0),
    "a transform in place": lambda h5: arrays(1, device_transform=half),
    "HDF5 in the caller's thread": lambda h5: hdf5(0, h5, packed=False),
    "HDF5, two workers": lambda h5: hdf5(2, h5, packed=False),
    "gzip in the caller's thread": lambda h5: hdf5(0, h5, packed=True),
    "gzip, two workers": lambda h5: hdf5(2, h5, packed=True),
    "a device, copies late": lambda h5: arrays(1),
    "a device, kernels late": lambda h5: arrays(2),
    "a device, a transform": lambda h5: arrays(1, device_transform=dict),
}


@pytest.fixture
def loader(request, monkeypatch, h5):
    kind = request.param
    if "device" in kind:
        streams = FakeStreams("compute" if "kernels" in kind else "side")
        monkeypatch.setattr(engine, "TorchStreams", lambda device: streams)
        monkeypatch.setattr(engine, "has_streams", lambda device: True)
        monkeypatch.setattr(loader_module, "has_streams", lambda device: True)
        monkeypatch.setattr(memory, "allocated", lambda nbytes, pinned: np.zeros(nbytes, np.uint8))
    with KINDS[kind](h5) as made:
        made.settle = streams.synchronize if "device" in kind else lambda: None
        yield made
    made.source.close()


def used_on(loader, interrupts, seed):
    """Take epoch after epoch with interrupts at random places, then one and a half in peace; every batch is checked."""
    drawn = random.Random(seed)
    with interrupted(None) as passed:
        next(loader)
    first = len(passed)
    at, left, kept = 1, interrupts, []
    while left or at < 3 * STEPS:
        # Every third comes soon after another: into what clears up behind that.
        after = (drawn.randrange(2 * first) if drawn.random() < 0.7 else drawn.randrange(60)) if left else None
        try:
            with interrupted(after):
                if at % STEPS == 0:
                    iter(loader)
                batch = next(loader)
        except KeyboardInterrupt:
            left -= 1
            continue
        loader.settle()
        wanted = loader._schedule.plan(at // STEPS).batch(at % STEPS).samples
        assert batch["y"].tolist() == wanted.tolist()
        kept = [*kept[-3:], (batch, wanted)]
        for held, numbers in kept:
            assert torch.equal(held["x"], torch.from_numpy(values()[numbers]))
            assert held["y"].tolist() == numbers.tolist()
        at += 1


@pytest.mark.parametrize("loader", KINDS, indirect=True)
def test_every_batch_comes_once_whatever_is_interrupted(loader):
    used_on(loader, interrupts=12, seed=0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loader", KINDS, indirect=True)
def test_every_batch_comes_once_over_hundreds_of_interrupts(loader, seed):
    used_on(loader, interrupts=100, seed=seed)
