"""`check_sharded`: refuses a DataLoader that gives every rank the same samples."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lit_async_data.errors import ConfigError

# Names that samplers give their rank and their world size.
SIGNS = ("rank", "num_replicas", "world_size", "_rank", "_num_replicas", "_world_size")


def check_sharded(loader: Any) -> None:
    """Refuse a DataLoader over a map-style dataset that would give every rank the same samples.

    It trusts a sampler that has a rank under one of the usual names.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ranks = torch.distributed.get_world_size()
    if ranks < 2 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    batches = loader.batch_sampler
    samplers = (loader.sampler, batches, getattr(batches, "sampler", None))
    if not any(isinstance(sampler, DistributedSampler) or _knows_its_rank(sampler) for sampler in samplers):
        raise ConfigError(
            f"prefetched(loader): {ranks} ranks would all read the same samples; build the loader with "
            "DataLoader(dataset, sampler=DistributedSampler(dataset), ...) and call loader.sampler.set_epoch(epoch) "
            "before each epoch. If each rank has its own dataset, write "
            "sampler=DistributedSampler(dataset, num_replicas=1, rank=0)"
        )


def _knows_its_rank(sampler: Any) -> bool:
    return any(isinstance(getattr(sampler, name, None), int) for name in SIGNS)
