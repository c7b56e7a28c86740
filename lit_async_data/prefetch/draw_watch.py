"""`DrawWatch`: detects loaders that draw random numbers for each batch from a generator that training uses, too.

All code of a process shares the global generators. If a sampler draws from one for each batch, and dropout draws from
it in each step, the order of these draws decides the results of both. A thread that read such a loader ahead would draw
at random times, and a seeded run would differ from day to day. So such a loader is read in the consumer's thread, when
a batch is asked for: then all draws come in the same order as without this package.

The watch compares the states of the generators before and after a ``next`` during which nobody else draws: in the
consumer's thread, in the first batches of a loader. The first batch of a pass may draw: many samplers draw the whole
order there, and the consumer waits for it anyway. The watch misses loaders that draw less often than every `SAMPLERS`
batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_async_data.hooks.randomness import drawn, states

log = logging.getLogger(__name__)

T = TypeVar("T")
# Batches in a row without a draw after which a loader is trusted. A DataLoader with workers can be watched for longer,
# since its workers read ahead all the same; and its sampler may draw for several batches at once.
ANY, SAMPLERS = 1, 8
# Packages whose samplers draw when a pass begins, or from a generator that they seed at that time.
KNOWN = frozenset({"torch", "torchdata"})


class DrawWatch:
    """Watches one loader, over all its passes, until the answer is known.

    Args:
        loader: Any iterable.

    Attributes:
        over: Whether the answer is known.
        is_random: Whether the loader draws for each batch.
    """

    def __init__(self, loader: Any) -> None:
        self.over = _known(loader)
        self.is_random = False
        self._wanted = SAMPLERS if isinstance(loader, DataLoader) else ANY
        self._quiet = 0

    def watched(self, read: Callable[[], T], *, first: bool) -> T:
        """Read a batch in this thread, and compare the generators.

        Args:
            read: Reads the next batch.
            first: Whether it is the first of a pass.
        """
        before = states()
        result = read()
        found = drawn(before, states())
        if not found:
            self._quiet += 1
            self.over = self._quiet >= self._wanted
        elif not first:
            self.over = self.is_random = True
            log.warning(
                "the loader draws random numbers from %s for its batches, as your training loop may do: each batch is "
                "read when it is asked for, so that a seeded run stays the same; give the sampler its own generator, "
                "such as torch.Generator().manual_seed(0), to have it read ahead",
                " and ".join(f"the global generator of {name}" for name in found),
            )
        return result


def _known(loader: Any) -> bool:
    """Whether a loader is one of torch's, whose samplers draw only when a pass begins."""
    if isinstance(loader, list | tuple | dict):
        return True
    if not (isinstance(loader, DataLoader) and _is_theirs(loader)):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return True  # its workers draw in their own processes
    batches = loader.batch_sampler
    samplers = [loader.sampler] if batches is None else [batches, getattr(batches, "sampler", None)]
    return all(
        _is_theirs(sampler) and getattr(sampler, "generator", None) is not torch.default_generator
        for sampler in samplers
    )


def _is_theirs(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in KNOWN
