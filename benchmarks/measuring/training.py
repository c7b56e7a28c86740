"""Two small models, and a training loop whose steps are counted."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from files.layouts import Layout
from readers.hdf5 import Batch


class SmallModel(torch.nn.Module):
    """A step of well under a millisecond: a linear layer over every 16th pixel each contender."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.linear(images[:, :, ::16, ::16].flatten(1).float() / 255)
        return seen


class Training:
    """A three-layer perceptron, one batch per step."""

    def __init__(self, layout: Layout) -> None:
        inputs = layout.sample_bytes // (1 if layout.dtype == "u1" else 4)
        linear, relu = torch.nn.Linear, torch.nn.ReLU
        self.model = torch.nn.Sequential(linear(inputs, 256), relu(), linear(256, 256), relu(), linear(256, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)

    def step(self, batch: Batch) -> None:
        data, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(data.flatten(1).float()), labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def rate(self, batches: Iterator[Batch], warm_up: int, seconds: float) -> float:
        """Steps per second, after some steps that are not counted."""
        self.steps(batches, warm_up, seconds / 5)
        return self.steps(batches, 1, seconds)

    def steps(self, batches: Iterator[Batch], least: int, seconds: float) -> float:
        """Take some steps at least, for some seconds at least; how many there were per second."""
        steps, started = 0, time.perf_counter()
        while steps < least or time.perf_counter() - started < seconds:
            self.step(next(batches))
            steps += 1
        return steps / (time.perf_counter() - started)


def in_memory(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
