"""Whether the order of a DataLoader can be dealt again, from the middle on; and whether ranks share its samples."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lit_async_data.errors import ConfigError

# Packages whose samplers draw from their generator, and from nothing else.
KNOWN = ("torch", "torchdata")


class DealtOrder(NamedTuple):
    """What the order of a pass follows from."""

    # The state of the sampler's generator before the pass, uint8; None if it draws nothing.
    generator: torch.Tensor | None
    begun: int  # what the consumer counted as done when the pass began


class SampledOrder:
    """The order of a DataLoader over a map-style dataset; of any other loader it is `unknown`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.generator: torch.Generator | None = None  # what the sampler draws from; None if it draws nothing
        self.is_global = False  # whether each batch may draw from the generator that all code of the process shares
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            self.unknown = f"{type(loader).__name__} keeps no place in its data"
            return
        batches: Any = loader.batch_sampler
        samplers: list[Any] = [loader.sampler] if batches is None else [batches, getattr(batches, "sampler", None)]
        foreign = [type(each).__name__ for each in samplers if type(each).__module__.partition(".")[0] not in KNOWN]
        # Why the order cannot be dealt again; empty if it can.
        self.unknown = f"{foreign[0]} is not one of torch's samplers" if foreign else ""
        sampler = samplers[-1]
        if not (foreign or isinstance(sampler, SequentialSampler | DistributedSampler)):
            given = getattr(sampler, "generator", None)
            self.generator = torch.default_generator if given is None else given
            self.is_global = given is torch.default_generator

    def now(self) -> torch.Tensor | None:
        """The state of the generator when the sampler begins the next pass: uint8."""
        if self.generator is None:
            return None
        state = self.generator.get_state()
        seeds = self._loader.generator or torch.default_generator
        if self.generator is seeds and self._loader._iterator is None:  # noqa: SLF001  # only iterators that persist
            # A new iterator of torch draws the seed of its workers before its sampler draws.
            own = torch.Generator()
            own.set_state(state)
            torch.empty((), dtype=torch.int64).random_(generator=own)
            state = own.get_state()
        return state

    def continued(self, state: torch.Tensor | None, skip: int) -> Callable[[], Iterator[Any]]:
        """What begins a pass in the order of a state of `now`, without reading its first ``skip`` batches."""
        loader = copy.copy(self._loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # Past `__setattr__`, which forbids it: the copy has not begun.
        vars(loader).update({"_iterator": None, name: _Behind(getattr(loader, name), skip, self.generator, state)})
        return functools.partial(iter, loader)


class _Behind:
    def __init__(self, sampler: Any, skip: int, generator: torch.Generator | None, state: torch.Tensor | None) -> None:
        self._sampler, self._skip, self._generator, self._state = sampler, skip, generator, state

    def __iter__(self) -> Iterator[Any]:
        dealt = iter(self._sampler)
        # A sampler without a generator of its own draws from the global one only now; then the loop goes on with that.
        with torch.random.fork_rng(devices=[]):
            if self._generator is not None and self._state is not None:
                self._generator.set_state(self._state)
            for _ in range(self._skip):
                next(dealt, None)
        yield from dealt

    def __len__(self) -> int:
        return len(self._sampler) - self._skip


# Names that samplers give their rank and their world size; Accelerate says process_index.
SIGNS = ("rank", "process_index", "num_replicas", "world_size", "_rank", "_num_replicas", "_world_size")


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
    known = [getattr(sampler, name, None) for sampler in samplers for name in SIGNS]
    if not any(isinstance(each, DistributedSampler) for each in samplers) and not any(
        isinstance(n, int) for n in known
    ):
        raise ConfigError(
            f"prefetched(loader): {ranks} ranks would all read the same samples; build the loader with "
            "DataLoader(dataset, sampler=DistributedSampler(dataset), ...) and call loader.sampler.set_epoch(epoch) "
            "before each epoch. If each rank has its own dataset, write "
            "sampler=DistributedSampler(dataset, num_replicas=1, rank=0)"
        )
