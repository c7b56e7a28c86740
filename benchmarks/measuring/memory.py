"""How much memory the loader holds, each figure in a process of its own: see `apart`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from lit_async_data import AsyncLoader, HDF5Source
from measuring.page_cache import Bounded, Pages, memory
from measuring.training import SmallModel

MIB = 2**20


def apart(work: Callable[..., Any], *given: Any) -> Any:
    """The result of a function in a fresh process, where nothing else has grown."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *given).result()


def grown(path: str, options: dict[str, Any], batches: int, seconds: float) -> dict[str, float]:
    """MiB that this process grows by while batches are read, beside what the loader said it would hold.

    Args:
        path: The file.
        options: Of the loader.
        batches: How many, or as many as there are in some seconds.
        seconds: So many.
    """
    source = HDF5Source(path)
    with AsyncLoader(source, options | {"workers": 0}) as loader:
        loader.next()  # what is loaded once, by whoever reads first
    before = memory()["RssAnon"]
    most = 0.0
    with AsyncLoader(source, options) as loader:
        budget = loader.footprint.budget.total / MIB
        started = time.perf_counter()
        for number in range(batches):
            if time.perf_counter() - started > seconds:
                break
            loader.next()
            if number % 8 == 0:
                most = max(most, memory()["RssAnon"])
    return {"grown_mib": most - before, "budget_mib": budget}


def larger(path: str, most: int | None, seconds: float) -> dict[str, Any]:
    """Train on a file larger than the memory there is for it.

    Args:
        path: A file of layout A.
        most: Bytes of it that may be in memory: kept so by dropping pages. None: the control group sees to it.
        seconds: When to stop.
    """
    model, pages = SmallModel(), Pages(path)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {"batch_size": 256, "shuffle": "global", "workers": 1}
    samples = 0
    over_time: list[dict[str, float]] = []
    bound: Any = Bounded(path, most) if most else contextlib.nullcontext()
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
                over_time.append({"seconds": now, "cached_mib": pages.resident() / MIB, **memory()})
    pages.close()
    return {"samples_per_s": samples / now, "samples": samples, "over_time": over_time}
