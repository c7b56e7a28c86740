"""`DrawWatch`: whether somebody else's loader draws random numbers for each batch that a training loop draws, too.

Everybody in a process shares the global generators. Where a sampler draws from one for each batch, and dropout draws
from it in each step, the order of these draws decides about both. Read ahead in a thread, a loader would draw whenever
that thread comes to it, and a seeded run would be another one with each machine and each day. Such a loader is read in
the consumer's thread, when a batch is asked for: then all draws come in the order in which they come without us.

It shows by the states of the generators before and after a ``next`` during which nobody else draws: in the consumer's
thread, in the first batches of a loader. The first batch of a pass may draw: an order is often drawn there, as a whole;
the consumer waits for it in any case. What draws more seldom than `SAMPLERS` batches is not noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_async_data.device.randomness import drawn, states

log = logging.getLogger(__name__)

T = TypeVar("T")
# Batches in a row without a draw after which a loader is trusted. Of a DataLoader with workers more can be watched:
# those read ahead all the same, and a sampler may draw for several batches at a time.
ANY, SAMPLERS = 1, 8
# Packages whose samplers draw when a pass begins, or from a generator that they seed then.
KNOWN = frozenset({"torch", "torchdata"})


class DrawWatch:
    """Watches one loader, over all its passes, until it is known.

    Args:
        loader: Any iterable.

    Attributes:
        over: Whether it is known whether the loader draws for each batch.
        draws: Whether it does.
    """

    def __init__(self, loader: Any) -> None:
        self.over = _known(loader)
        self.is_random = False
        self._wanted = SAMPLERS if isinstance(loader, DataLoader) else ANY
        self._quiet = 0

    def watched(self, read: Callable[[], T], *, first: bool) -> T:
        """What ``read`` gives.

        Args:
            read: Reads the next batch in this thread.
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
                "read when it is asked for, so that a run with a seed stays the same; a sampler that draws from a "
                "generator of its own, such as torch.Generator().manual_seed(0), is read ahead",
                " and ".join(f"the global generator of {name}" for name in found),
            )
        return result


def _known(loader: Any) -> bool:
    """Whether a loader is one of torch's own, whose samplers draw nothing later than a pass begins."""
    if isinstance(loader, list | tuple | dict):
        return True
    if not (isinstance(loader, DataLoader) and _is_theirs(loader)):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return True  # its workers draw, in their own processes
    batches = loader.batch_sampler
    samplers = [loader.sampler] if batches is None else [batches, getattr(batches, "sampler", None)]
    return all(
        _is_theirs(sampler) and getattr(sampler, "generator", None) is not torch.default_generator
        for sampler in samplers
    )


def _is_theirs(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in KNOWN
