"""`prefetched(loader)`: reads any loader ahead, and copies its batches ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lit_async_data.errors import ConfigError
from lit_async_data.hooks.callables import Function, check_callable
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.prefetch.loader import PrefetchedLoader, StatefulPrefetchedLoader
from lit_async_data.sources.contract.source import Source


def prefetched(
    loader: Iterable[Any],
    device_depth: int = 2,
    device: torch.device | str | None = None,
    device_transform: Function | None = None,
) -> PrefetchedLoader:
    """Read any loader ahead in a thread, and have its batches on the device when they are wanted.

    The loader is anything that can be iterated over: a DataLoader, sized or not, a list, a generator. A batch is
    anything: nested mappings, sequences, named tuples and dataclasses of tensors. Objects with a method ``to`` move
    themselves; everything else is handed on unchanged. Tensors are packed into pinned memory that is allocated once,
    unless they are pinned already, copied on a side stream while the step before is computed, and handed out on the
    device. On CPU and MPS batches are read ahead and handed out unchanged.

    Iterate over the result as over the loader. ``iter(loader)`` is called in your thread, with the first batch of a
    pass, and ``next`` in a reader thread; an error is raised unchanged in place of its batch. A DataLoader with
    ``num_workers=0`` is read in your thread when a batch is asked for, since its Python code would keep the training
    loop from running; its copies overlap all the same. A loader that fills the same memory again for each batch must
    hand out copies, or be read with ``device_depth=0``.

    Args:
        loader: What to read.
        device_depth: Batches read ahead on the host, and as many copied ahead. 0 does neither, for comparison.
        device: Where batches are handed out; None for the accelerator of this machine, or the CPU if there is none.
        device_transform: Called with each batch on its device, on the side stream; returns the batch to hand out.
            If it takes random numbers, as in `AsyncLoader`, they are seeded by rank, pass and batch.

    Returns:
        The loader, read ahead. All its other attributes are the loader's.

    Raises:
        ConfigError: The loader cannot be iterated over, or prefetches by itself; an option is wrong.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(5), batch_size=2, num_workers=1)
        >>> with prefetched(loader, device="cpu") as batches:
        ...     len(batches), [batch.tolist() for batch in batches]
        (3, [[0, 1], [2, 3], [4]])
        >>> batches
        <closed PrefetchedLoader of 3 batches from DataLoader of range, device=cpu, device_depth=2>
    """
    if isinstance(loader, AsyncLoader | PrefetchedLoader):
        raise ConfigError(
            f"prefetched(loader): {type(loader).__name__} prefetches by itself; set its device and device_depth"
        )
    given: object = loader  # a source is no iterable, and is given all the same
    if isinstance(given, Source):
        raise ConfigError(
            f"prefetched(loader): {loader!r} is a source, not a loader; write AsyncLoader(source, "
            "LoaderOptions(batch_size=64)), which reads batches of its samples ahead"
        )
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise ConfigError(f"prefetched(loader): {loader!r} cannot be iterated over; give it a DataLoader, for instance")
    check_callable("device_transform", device_transform)
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return (StatefulPrefetchedLoader if stateful else PrefetchedLoader)(
        loader, device_depth=device_depth, device=device, device_transform=device_transform
    )
