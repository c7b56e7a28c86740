"""Batches of many forms, and a training step that checks them."""

import numpy as np
import torch
from waiting.on_device.fake_streams import raw

from lit_async_data.batch.tree import flatten
from lit_async_data.engine.prefetch.iterator_feed import dense, raw_bytes


def numbers(shape, seed=0, dtype=torch.int16):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 100, shape)).to(dtype)


def detection(step):
    """A batch of object detection, as ``tuple(zip(*batch))`` collates it: images of different sizes, and targets."""
    images = [numbers((3, 100 + 40 * step, 90 + number), seed=step + number) for number in range(2)]
    targets = [
        {"boxes": numbers((step % 3, 4), seed=step), "labels": numbers((step % 3,), seed=step), "name": f"{step}.jpg"}
        for _ in images
    ]
    return tuple(zip(*zip(images, targets)))


class Step:
    """A training step: kernels that read the batch when they run and record the paths of wrong tensors."""

    def __init__(self, streams):
        self._streams = streams
        self.wrong = []
        self.seen = 0

    def __call__(self, batch, expected_batch):
        tensors, expected = (
            flatten(each, lambda value: isinstance(value, torch.Tensor))[0] for each in (batch, expected_batch)
        )
        assert list(tensors) == list(expected)
        for path, tensor in tensors.items():
            host = dense(expected[path])
            assert (tensor.shape, tensor.dtype, tensor.stride()) == (host.shape, host.dtype, host.stride()), path
            if not tensor.numel():
                continue
            content, values = raw(tensor), raw_bytes(host).copy()

            def kernel(content=content, values=values, path=path):
                self.seen += 1
                if not np.array_equal(content(), values):
                    self.wrong.append(path)

            self._streams.launch("step", kernel)
