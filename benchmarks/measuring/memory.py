"""How much memory a loader holds. Run each function with `in_fresh_process`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from lit_async_data import AsyncLoader, HDF5Source
from measuring.page_cache import BoundedCache, Pages, process_memory

MIB = 2**20


class SmallModel(torch.nn.Module):
    """A step of well under a millisecond: a linear layer over every 16th pixel each contender."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = self.linear(images[:, :, ::16, ::16].flatten(1).float() / 255)
        return seen


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """The result of a function in a fresh process, whose memory nothing else has grown."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args).result()


def memory_growth(path: str, options: dict[str, Any], batches: int, seconds: float) -> dict[str, float]:
    """MiB that this process grows by while it reads batches, and the loader's budget.

    Args:
        path: The file.
        options: Options of the loader.
        batches: Batches to read at most.
        seconds: Seconds to read at most.
    """
    source = HDF5Source(path)
    with AsyncLoader(source, options | {"workers": 0}) as loader:
        loader.next()  # loads what the first read of a process loads
    before = process_memory()["RssAnon"]
    most = 0.0
    with AsyncLoader(source, options) as loader:
        budget = loader.footprint.budget.total / MIB
        started = time.perf_counter()
        for number in range(batches):
            if time.perf_counter() - started > seconds:
                break
            loader.next()
            if number % 8 == 0:
                most = max(most, process_memory()["RssAnon"])
    return {"grown_mib": most - before, "budget_mib": budget}


def train_on_large_file(path: str, most: int | None, seconds: float) -> dict[str, Any]:
    """Train on a file that is larger than its page cache.

    Args:
        path: A file of layout A.
        most: Bytes of the file that may be in the page cache. None: the control group limits them.
        seconds: How long to train.
    """
    model, pages = SmallModel(), Pages(path)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"batch_size": 256, "shuffle": "global", "workers": 1, "worker_kind": "thread"}
    samples = 0
    over_time: list[dict[str, float]] = []
    bound: Any = BoundedCache(path, most) if most else contextlib.nullcontext()
    with bound, AsyncLoader(HDF5Source(path), options) as loader:
        data, labels = loader.next()
        started = time.perf_counter()
        while (now := time.perf_counter() - started) < seconds:
            loss = torch.nn.functional.cross_entropy(model(data), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            data, labels = loader.next()
            samples += len(labels)
            if now >= len(over_time) * seconds / 40:
                over_time.append({"seconds": now, "cached_mib": pages.resident() / MIB, **process_memory()})
    pages.close()
    return {"samples_per_s": samples / now, "samples": samples, "over_time": over_time}
