"""The order: which samples make which batch, as pure functions of integers.

`EpochPlan` answers for one epoch and one rank; it reads nothing, starts nothing and keeps nothing but a memo.

The order of an epoch depends on (length, chunks, seed, epoch, shuffle, shuffle_chunks) alone. Counted from where the
epoch (or what is left of it after a resume) begins, position q belongs to step ``q // (W·B)`` and to rank ``q % W`` for
W ranks and B samples per rank. So a rank's positions are ``r, r + W, r + 2W, …``, and step s takes its elements
``[s·B, (s + 1)·B)``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun
from lit_async_data.order.permutation import Indices, Permutation, derived_key
from lit_async_data.order.weighted import WeightedChunkOrder, WeightedOrder
from lit_async_data.order.weights import Weights

# A permutation costs 100 to 400 µs per call however few positions it is asked for; from here on it is per position.
BLOCK = 16384
# Blocks that are kept: batches are asked for when they are read, and before that to have them fetched from the disk.
MEMO = 4

Order = Literal["none", "chunk", "global"]


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """What one batch of one rank holds.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the batch in it.
        samples: int64, shape (n,): sample numbers in the source, in the order of the batch.
    """

    epoch: int
    step: int
    samples: Indices


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The batches of one epoch for one rank. Safe to use from any thread.

    Args:
        length: Samples of the epoch: those in the source, or, with ``weights``, as many as are to be drawn.
        batch_size: Samples per batch and rank.
        shuffle: ``"none"``, ``"chunk"`` or ``"global"``.
        seed: Key of the order.
        epoch: Number of the epoch; counts only where there is a shuffle.
        rank: This process, of ``world_size``.
        world_size: Processes that share each step.
        drop_last: Drop the samples that do not fill a step.
        start: Position at which the epoch begins (after a resume).
        runs: How samples lie in chunks, for ``"chunk"``; see `ChunkRun`.
        order: The samples in the order in which they lie there, int64; None: their own.
        shuffle_chunks: Chunks that samples are mixed from at a time, for ``"chunk"``.
        weights: How likely each sample of the source is drawn, with replacement; None for each of them once.

    Raises:
        ConfigError: There are too few samples for the ranks, or for one whole step with ``drop_last``.

    Example:
        >>> plan = EpochPlan(length=10, batch_size=4, shuffle="none", seed=0, epoch=0)
        >>> [plan.batch(step).samples.tolist() for step in range(len(plan))]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    length: int
    batch_size: int
    shuffle: Order
    seed: int
    epoch: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0
    runs: tuple[ChunkRun, ...] = ()
    order: Indices | None = dataclasses.field(default=None, compare=False, repr=False)
    shuffle_chunks: int = 64
    weights: Weights | None = dataclasses.field(default=None, compare=False)
    # The blocks of samples computed last, with the first of their local indices. Two threads may compute the same block
    # at once; both get the same values, and the assignment is atomic.
    _memo: list[tuple[int, Indices]] = dataclasses.field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size: {self.world_size} is not a number of ranks from 1 on")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank: {self.rank} is not one of {self.world_size} ranks")
        step = self.batch_size * self.world_size
        if self.left < self.world_size:
            raise ConfigError(
                f"{self.left} samples cannot be shared by {self.world_size} ranks: each needs at least one; "
                f"start at most {max(self.left, 1)} ranks"
            )
        if self.drop_last and self.left < step:
            ranks = f" × {self.world_size} ranks = {step}" if self.world_size > 1 else ""
            raise ConfigError(
                f"batch_size: {self.batch_size}{ranks} is more than the {self.left} samples, and drop_last drops "
                "what does not fill a step; set drop_last=false or a smaller batch_size"
            )

    @property
    def left(self) -> int:
        """Samples of the epoch over all ranks, from ``start`` on."""
        return self.length - self.start

    @property
    def capacity(self) -> int:
        """The most samples that a batch can have: ``batch_size``, but 2 where single samples are joined."""
        return max(self.batch_size, 2) if self.world_size > 1 else self.batch_size

    def __len__(self) -> int:
        """Batches of the epoch, the same on every rank."""
        full, rest = divmod(self.left, self.batch_size * self.world_size)
        if self.drop_last or not rest or (rest < self.world_size and self.batch_size == 1):
            return full
        return full + 1

    def bounds(self, step: int) -> tuple[int, int]:
        """The part ``[first, end)`` of this rank's own positions that makes the batch of a step.

        A last step of m < W samples would leave ranks with nothing: it is joined to the step before, and both are
        dealt again as ⌈B/2⌉ samples per rank and the rest. With B = 1 the two stay one step.
        """
        steps, size = len(self), self.batch_size
        if not 0 <= step < steps:
            raise IndexError(f"step {step} of {steps}")
        rest = self.left % (size * self.world_size)
        joined = 0 < rest < self.world_size and not self.drop_last
        own = -(-(self.left - self.rank) // self.world_size)
        first, end = step * size, (step + 1) * size
        if joined and size > 1 and step == steps - 2:
            end = first + -(-size // 2)
        if step == steps - 1 and not self.drop_last:
            if joined and size > 1:
                first = (step - 1) * size + -(-size // 2)
            end = own
        return first, end

    def count(self, step: int) -> int:
        """Samples in the batch of a step on this rank, ≥ 1."""
        first, end = self.bounds(step)
        return end - first

    def batch(self, step: int) -> BatchPlan:
        """The batch of a step.

        Args:
            step: From 0 to ``len(self) - 1``.

        Raises:
            IndexError: There is no such step.
        """
        return BatchPlan(self.epoch, step, self.stretch(step, 1)[0])

    def stretch(self, step: int, count: int) -> tuple[Indices, list[int]]:
        """The batches of several steps at once.

        Args:
            step: The first.
            count: How many, ≥ 1.

        Returns:
            Their samples, one batch after the other, and where in them each begins, with the end of the last.

        Raises:
            IndexError: There is no such step.
        """
        bounds = [self.bounds(each) for each in range(step, step + count)]
        first, end = bounds[0][0], bounds[-1][1]
        return self._block(first, end), [begin - first for begin, _ in bounds] + [end - first]

    def _block(self, first: int, end: int) -> Indices:
        """The samples at this rank's own positions from ``first`` to ``end - 1``."""
        for begin, block in self._memo:
            if begin <= first and end <= begin + len(block):
                return block[first - begin : end - begin]
        own = -(-(self.left - self.rank) // self.world_size)
        block = self.samples(np.arange(first, min(max(end, first + BLOCK), own)) * self.world_size + self.rank)
        self._memo[:] = [(first, block), *self._memo[: MEMO - 1]]
        return block[: end - first]

    def samples(self, positions: Indices) -> Indices:
        """The samples at positions of the whole order, over all ranks, counted from ``start``."""
        if self.shuffle == "none":
            return positions + self.start
        if self.chunk_order is not None:
            return self.numbered(self.chunk_order.samples(positions + self.start))
        key = derived_key(self.seed, self.epoch)
        if self.weights is not None:
            return WeightedOrder(self.weights, self.length, key).samples(positions + self.start)
        return Permutation(self.length, key)(positions + self.start)

    def numbered(self, lying: Indices) -> Indices:
        """The samples at these places in the order in which samples lie."""
        return lying if self.order is None else self.order[lying]

    @functools.cached_property
    def chunk_order(self) -> ChunkOrder | WeightedChunkOrder | None:
        """The order of this epoch, if it goes by chunks, over the places at which samples lie."""
        if self.shuffle != "chunk" or not self.runs:  # where each sample lies alone, that is the global shuffle
            return None
        key = derived_key(self.seed, self.epoch)
        if self.weights is not None:
            return WeightedChunkOrder(self.runs, self.shuffle_chunks, self.weights, self.length, key)
        return ChunkOrder(self.runs, self.shuffle_chunks, key)


class BatchIndex(NamedTuple):
    """The place of a batch in the endless order."""

    epoch: int
    step: int


class Limits(NamedTuple):
    """How many steps of its epochs a pass will take, None for all; a sanity check takes fewer than later validations.

    Attributes:
        epoch: The epoch of the current pass.
        steps: Steps of that epoch.
        later: Steps of each epoch after it.
    """

    epoch: int = 0
    steps: int | None = None
    later: int | None = None

    def of(self, epoch: int) -> int | None:
        """The limit of an epoch."""
        return self.later if epoch > self.epoch else self.steps


class _Plans:
    """The plans of the last few epochs."""

    def __init__(self, make: Callable[..., EpochPlan]) -> None:
        self._make = make
        self.kept: dict[int, EpochPlan] = {}

    def add(self, epoch: int) -> EpochPlan:
        plan = self._make(epoch=epoch)
        # Replaced, not changed: another thread may be reading it.
        self.kept = {e: p for e, p in self.kept.items() if abs(e - epoch) <= 1} | {epoch: plan}
        return plan


class Schedule:
    """The endless order of batches: after the last step of an epoch comes the first of the next.

    Nothing of it changes but a memo, so any thread may read it.

    Args:
        plan: Makes the plan of an epoch from its number, the keyword ``epoch``.
        shuffled: Whether epochs differ. Where they do not, they are only counted, and nobody can choose one: batches
            that were read ahead for the next epoch serve as any.

    Attributes:
        steps: Steps of each epoch.
        capacity: The most samples that a batch can have.
        limits: Steps of epochs that will be asked for, where fewer than all.
    """

    def __init__(self, plan: Callable[..., EpochPlan], *, shuffled: bool) -> None:
        self._plans = _Plans(plan)
        self.shuffled = shuffled
        self.limits = Limits()
        self.steps, self.capacity = len(self.plan(0)), self.plan(0).capacity

    def limited(self, limits: Limits) -> Schedule:
        """The same order, of which these steps will be asked for; they share the memo."""
        if limits == self.limits:
            return self
        limited = copy.copy(self)
        limited.limits = limits
        return limited

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; those of the last few are kept."""
        return self._plans.kept.get(epoch) or self._plans.add(epoch)

    def following(self, key: BatchIndex) -> BatchIndex:
        """The index of the batch after this one."""
        last, limit = self.steps, self.limits.of(key.epoch)
        if limit is not None and key.step < limit:  # a step beyond the limit shows that the limit was wrong
            last = min(limit, last)
        return BatchIndex(key.epoch, key.step + 1) if key.step + 1 < last else BatchIndex(key.epoch + 1, 0)


def amplification(length: int, chunk_rows: int, batch_size: int) -> float:
    """Samples that must be decoded for each sample that is used, under a global shuffle.

    A batch of B samples drawn from C chunks touches ``C·(1 − (1 − 1/C)^B)`` of them on average, and each is decoded
    whole.

    Args:
        length: Samples in all.
        chunk_rows: Samples in one compressed chunk; 1 where samples can be read one by one.
        batch_size: Samples that one read asks for.
    """
    chunks = -(-length // chunk_rows)
    touched = chunks * (1 - (1 - 1 / chunks) ** batch_size) if chunks > 1 else 1.0
    return max(touched * min(chunk_rows, length) / min(batch_size, length), 1.0)
