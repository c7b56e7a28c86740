"""Two threads inside ``next`` of one loader: the second one gets an error, and no batch is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import lit_async_data as lad
from lit_async_data.errors import WorkerError
from lit_async_data.testing import ArraySource


class Held(ArraySource):
    """Blocks while it reads, until the test goes on."""

    def __init__(self):
        super().__init__({"x": np.arange(6)})
        self.inside, self.go_on = threading.Event(), threading.Event()

    def read_into(self, samples, out, **options):
        self.inside.set()
        assert self.go_on.wait(30)
        super().read_into(samples, out, **options)


class HeldDataset(torch.utils.data.Dataset):
    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __len__(self):
        return 6

    def __getitem__(self, number):
        self.inside.set()
        assert self.go_on.wait(30)
        return number


def of_a_source():
    source = Held()
    options = lad.LoaderOptions(batch_size=2, workers=0, shuffle="none")
    return source, lad.AsyncLoader(source, options, device_depth=0), lambda batch: batch["x"].tolist()


def of_a_data_loader():
    data = HeldDataset()
    loader = lad.prefetched(DataLoader(data, batch_size=2), device_depth=0, device="cpu")
    return data, loader, torch.Tensor.tolist


@pytest.mark.parametrize("make", [of_a_source, of_a_data_loader])
def test_a_second_thread_inside_next_is_an_error_and_the_first_goes_on(make):
    held, loader, values = make()
    with loader, ThreadPoolExecutor(1) as threads:
        batches = iter(loader)
        first = threads.submit(next, batches)
        try:
            assert held.inside.wait(30)
            with pytest.raises(WorkerError, match="two threads called next of this loader at once"):
                next(batches)
        finally:
            held.go_on.set()
        assert values(first.result()) == [0, 1]
        assert [values(next(batches)) for _ in range(2)] == [[2, 3], [4, 5]]
