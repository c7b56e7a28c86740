"""Batches of every form, and a step that checks them."""

from __future__ import annotations

import numpy as np
import torch

from lit_async_data.batch.tensor_layout import dense, raw_bytes
from lit_async_data.batch.tree import flatten
from lit_async_data.testing import raw


def numbers(shape, seed=0, dtype=torch.int16):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 100, shape)).to(dtype)


def detection(step):
    """As ``tuple(zip(*batch))`` of images of different sizes and what is to be found in them."""
    images = [numbers((3, 100 + 40 * step, 90 + number), seed=step + number) for number in range(2)]
    targets = [
        {"boxes": numbers((step % 3, 4), seed=step), "labels": numbers((step % 3,), seed=step), "name": f"{step}.jpg"}
        for _ in images
    ]
    return tuple(zip(*zip(images, targets)))


class Shipped:
    """An object that moves itself, as kernels would do it: into memory of the stream it is moved on."""

    def __init__(self, streams, tensor):
        self.streams, self.tensor = streams, tensor

    def to(self, device, non_blocking=False):
        assert non_blocking
        there = self.streams.empty(tuple(self.tensor.shape), self.tensor.dtype)
        self.streams.copy(there, self.tensor)
        return Shipped(self.streams, there)


class Step:
    """A training step: kernels that read the batch when their turn comes, and say whether they saw what they should."""

    def __init__(self, streams):
        self._streams = streams
        self.wrong = []
        self.seen = 0

    def __call__(self, batch, wanted):
        tensors, expected = tensors_of(batch), tensors_of(wanted)
        assert list(tensors) == list(expected)
        for place, tensor in tensors.items():
            there, host = unshipped(tensor), dense(unshipped(expected[place]))
            assert (there.shape, there.dtype, there.stride()) == (host.shape, host.dtype, host.stride()), place
            if not there.numel():
                continue
            content, values = raw(there), raw_bytes(host).copy()

            def kernel(content=content, values=values, place=place):
                self.seen += 1
                if not np.array_equal(content(), values):
                    self.wrong.append(place)

            self._streams.launch("step", kernel)


def tensors_of(batch):
    return flatten(batch, lambda value: isinstance(value, torch.Tensor | Shipped))[0]


def unshipped(value):
    return value.tensor if isinstance(value, Shipped) else value
