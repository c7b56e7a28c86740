"""Loaders of sequences in HDF5 files, padded or one after the other, and their samples."""

import itertools

import h5py
import numpy as np
import pytest
import torch

from lit_async_data import AsyncLoader, Field, HDF5Source
from support.sources import reader_sources as acts

ELEMENTS = 600

READERS = [
    pytest.param({"workers": 0}, {}, id="caller"),
    pytest.param({"workers": 2}, {}, id="threads"),
    pytest.param({"workers": 1}, {"sample_transform": acts.copied}, id="sample_transform"),
    pytest.param({"workers": 1}, {"batch_transform": acts.copied}, id="batch_transform"),
    pytest.param({"workers": 1, "worker_kind": "process"}, {}, id="process", marks=pytest.mark.processes),
    pytest.param(
        {"workers": 2, "worker_kind": "process"},
        {"sample_transform": acts.copied, "batch_transform": acts.copied},
        id="shares and both",
        marks=pytest.mark.processes,
    ),
]


def loader_of(source, *, rank=0, ranks=1, hooks=None, **options):
    options = {"batch_size": 16, "batch_by": "x", "batch_elements": ELEMENTS, "seed": 4, **options}
    options = {"return_indices": True, "shuffle": True, **options}
    return AsyncLoader(source, options, rank=rank, world_size=ranks, **(hooks or {}))


def concat(source, **options):
    return HDF5Source(source.paths, {"x": Field("x", ragged="concat", **options), "y": "y"})


def samples_of(batch):
    """The samples of a batch by number, without padding, which must be zeros."""
    x, lengths = batch["x"], batch["x_length"]
    assert x.shape[0] * x.shape[1] <= ELEMENTS
    found = {}
    for number, values, length in zip(batch["index"].tolist(), x.cpu(), lengths.tolist(), strict=True):
        assert not values[length:].any()
        found[number] = values[:length]
    return found


def joined_samples_of(batch):
    x, edges = batch["x"].cpu(), batch["x_offsets"].tolist()
    assert (edges[0], edges[-1], len(edges)) == (0, len(x), len(batch["index"]) + 1)
    assert np.diff(edges).tolist() == batch["x_length"].tolist()
    return {n: x[a:b] for n, (a, b) in zip(batch["index"].tolist(), itertools.pairwise(edges), strict=True)}


def stored(source):
    found = []
    for path in source.paths:
        with h5py.File(path) as file:
            edges, values = file["x/offsets"][...], file["x/values"][...]
        found += [torch.from_numpy(values[a:b]) for a, b in itertools.pairwise(edges)]
    return dict(enumerate(found))


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for number, values in wanted.items():
        assert torch.equal(found[number], values)
