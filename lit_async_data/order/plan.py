"""The order: which samples make which batch, as pure functions of integers. See docs/design/order.md.

`due` says which chunks a reader decodes ahead while it reads batches. `Shares` divides the samples of a batch among
several readers, so that only one of them decodes each chunk.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.order.decks import Deck, Decks, LengthDeck
from lit_async_data.order.permutation import Indices

# Positions computed at a time: a permutation costs 100 to 400 µs per call, even for one position.
BLOCK = 16384
# Cached blocks. The loader asks for a batch twice: to fetch its files ahead, and later to read it.
CACHED_BLOCKS = 4


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class KeyedSamples:
    """Samples of an epoch, int64, and the number that keys the random draws for each of them."""

    epoch: int
    samples: Indices
    numbers: Indices | None = None  # None for the ids of the samples

    def __getitem__(self, rows: slice | Indices) -> KeyedSamples:
        numbers = self.numbers if self.numbers is None else self.numbers[rows]
        return KeyedSamples(self.epoch, self.samples[rows], numbers)

    def keys(self, ids: Callable[[Indices], Indices]) -> Indices:
        return ids(self.samples) if self.numbers is None else self.numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """Deals the deck of one epoch: the batches of one rank. Safe to use from any thread."""

    decks: Decks
    batch_size: int  # samples per batch and rank
    epoch: int  # number of the epoch; irrelevant without a shuffle
    rank: int = 0  # rank of this process, from 0 to ``world_size - 1``
    world_size: int = 1  # processes that share each step
    drop_last: bool = False  # drop the samples that do not fill a step
    start: int = 0  # position at which the epoch begins (after a resume)
    repeats: bool = False  # whether a sample may come several times: its position then keys its random draws
    # The last blocks computed, each with its first index among this rank's positions. Two threads may compute the same
    # block at once; both get the same values, and the assignment is atomic.
    _cache: list[tuple[int, Indices]] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_ranks()
        step = self.batch_size * self.world_size
        if self.drop_last and self.remaining < step:
            ranks = f" × {self.world_size} ranks = {step}" if self.world_size > 1 else ""
            what = "and drop_last drops samples that do not fill a step; set drop_last=false or a smaller batch_size"
            more = f"{self.batch_size}{ranks} is more than the {self.remaining} samples"
            raise ConfigError(f"{more}, {what}", "batch_size")

    def _check_ranks(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"{self.world_size} is not a number of ranks from 1 on", "world_size")
        if not 0 <= self.rank < self.world_size:
            what = f"{self.rank} is not one of {self.world_size} ranks"
            raise ConfigError(f"{what}; give one from 0 to {self.world_size - 1}", "rank")
        if self.remaining < self.world_size:
            what = f"{self.remaining} samples cannot be shared by {self.world_size} ranks: each needs at least one"
            raise ConfigError(f"{what}; start at most {max(self.remaining, 1)} ranks")

    @functools.cached_property
    def deck(self) -> Deck:
        return self.decks.deck(self.epoch)

    @property
    def length(self) -> int:
        return self.decks.length

    @functools.cached_property
    def remaining(self) -> int:
        """Samples over all ranks, from ``start`` on. The last step of a mixture is completed."""
        samples, step = self.length - self.start, self.batch_size * self.world_size
        return samples if self.decks.mixture is None or self.drop_last else -(-samples // step) * step

    @property
    def capacity(self) -> int:
        """The most samples of a batch: ``batch_size``, or 2 if a short last step joins batches of 1."""
        return max(self.batch_size, 2) if self.world_size > 1 else self.batch_size

    @property
    def _rank_positions(self) -> int:
        return -(-(self.remaining - self.rank) // self.world_size)

    def __len__(self) -> int:
        full, rest = divmod(self.remaining, self.batch_size * self.world_size)
        return full + (rest > 0 and self.batch_size > 1 and not self.drop_last)

    def bounds(self, step: int) -> tuple[int, int]:
        """``[first, end)`` of this rank's positions in the batch of a step.

        A last step of m < W samples would give some ranks an empty batch. So it is joined to the step before, and the
        two are split again: ⌈B/2⌉ samples per rank in the first, the rest in the second. With B = 1 they stay one step.
        """
        steps = len(self)
        if not 0 <= step < steps:
            raise IndexError(f"step {step} of {steps}")
        return self._begin(step, steps), self._begin(step + 1, steps)

    def _begin(self, step: int, steps: int) -> int:
        size = self.batch_size
        if step == steps and not self.drop_last:
            return self._rank_positions
        joined = 0 < self.remaining % (size * self.world_size) < self.world_size and not self.drop_last
        if joined and size > 1 and step == steps - 1:
            return (step - 1) * size + -(-size // 2)
        return step * size

    @functools.cached_property
    def whole_steps(self) -> int:
        """Steps with ``batch_size`` samples on every rank, for callers that save a call; 0 for batches by length."""
        return 0 if self.decks.buckets is not None else self.remaining // (self.batch_size * self.world_size) - 1

    def count(self, step: int) -> int:
        first, end = self.bounds(step)
        return end - first

    def position(self, steps: int) -> int:
        """The position after the first steps, over all ranks; after all steps, the end of the epoch."""
        if steps == (every := len(self)):
            return self.length
        if not 0 <= steps < every:
            raise IndexError(f"step {steps} of {every}")
        return self.start + self._begin(steps, every) * self.world_size

    def steps_to(self, position: int) -> int:
        return min(len(self), -(-(position - self.start) // (self.batch_size * self.world_size)))

    def drops_all(self, position: int) -> bool:
        """Whether ``drop_last`` drops all samples after a position."""
        return self.drop_last and self.length - position < self.batch_size * self.world_size

    def batch(self, step: int) -> Indices:
        """The sample numbers in the source, in the order of the batch."""
        return self.stretch(step, 1)[0].samples

    def positions(self, step: int) -> Indices:
        """The positions of this rank's samples of a step in the whole order, over all ranks."""
        return self.dealt(*self.bounds(step))

    def dealt(self, first: int, end: int) -> Indices:
        """The positions in the whole order of this rank's positions from ``first`` up to ``end``."""
        own = np.arange(first, end)
        if self.decks.mixture is None:
            return own * self.world_size + self.rank + self.start
        batches, rows = np.divmod(own, self.batch_size)
        return (batches * self.world_size + self.rank) * self.batch_size + rows + self.start

    def stretch(self, step: int, count: int) -> tuple[KeyedSamples, list[int]]:
        """The samples of ``count`` batches, and their edges: batch i is ``samples[edges[i]:edges[i + 1]]``."""
        bounds = [self.bounds(number) for number in range(step, step + count)]
        first, end = bounds[0][0], bounds[-1][1]
        numbers = self.dealt(first, end) if self.repeats else None
        keyed = KeyedSamples(self.epoch, self._block(first, end), numbers)
        return keyed, [begin - first for begin, _ in bounds] + [end - first]

    def _block(self, first: int, end: int) -> Indices:
        for begin, block in self._cache:
            if begin <= first and end <= begin + len(block):
                return block[first - begin : end - begin]
        stop = min(max(end, first + BLOCK), self._rank_positions)
        block = self.deck.samples(self.dealt(first, stop))
        self._cache[:] = [(first, block), *self._cache[: CACHED_BLOCKS - 1]]
        return block[: end - first]

    def places_begun(self, group: int, which: int = 0) -> Indices:
        """The places of the chunks of a group that this rank begins, in the order of their first samples."""
        order, decks = self.deck.chunk_orders[which], self.decks
        if decks.buckets is not None or decks.mixture is not None:  # each rank has samples of each chunk
            return order.places_of(group)
        begin = (self.rank + self.start - order.group(group).start) % self.world_size
        return order.places_of(group, begin, self.world_size)


class BatchIndex(NamedTuple):
    epoch: int
    step: int


class Share(NamedTuple):
    """The part of each batch that one of several readers reads; see `Shares`."""

    reader: int
    readers: int


ALL = Share(0, 1)


# More steps than an epoch has.
UNLIMITED = 2**62


class Limits(NamedTuple):
    """The part of each epoch that the consumer takes: fewer steps in a sanity check, a later start after a resume."""

    epoch: int = 0  # epoch of the current pass
    steps: int = UNLIMITED  # most steps of this epoch
    later: int = UNLIMITED  # most steps of the epochs after it
    start: int = 0  # position at which this epoch begins; other epochs begin at 0


class Schedule:
    """The endless order of batches: the first step of an epoch follows the last step of the one before. Thread-safe.

    Epochs that are not ``shuffled`` are only counted: batches read ahead for the next epoch serve any other epoch.
    """

    def __init__(self, plan: Callable[..., EpochPlan], *, shuffled: bool) -> None:
        self._build = plan
        self._plans: dict[tuple[int, int], EpochPlan] = {}
        self.shuffled = shuffled
        self.limits = Limits()
        first = self.plan(0)
        self.steps, self.capacity = len(first), first.capacity
        self.buckets, self.seed = first.decks.buckets, first.decks.seed

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plans": {}}  # built again when needed

    def limited(self, limits: Limits) -> Schedule:
        if limits == self.limits:
            return self
        limited = copy.copy(self)
        vars(limited).update(limits=limits, _plans=self._plans)
        return limited

    def keyed(self, seed: int) -> Schedule:
        """The order of the same samples with another seed, without limits."""
        decks = dataclasses.replace(self.plan(0).decks, seed=seed)
        return Schedule(functools.partial(self._build, decks=decks), shuffled=self.shuffled)

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch from its start on. The plans of neighbouring epochs are cached."""
        start = self.limits.start if epoch == self.limits.epoch else 0
        plan = self._plans.get((epoch, start))
        if plan is None:
            plan = self._plans[epoch, start] = self._build(epoch=epoch, start=start)
            for far in [each for each in list(self._plans) if abs(each[0] - epoch) > 1]:
                self._plans.pop(far, None)  # another thread may do the same
        return plan

    def steps_of(self, epoch: int) -> int:
        resumed = self.limits.start and epoch == self.limits.epoch
        return len(self.plan(epoch)) if resumed else self.steps

    def following(self, key: BatchIndex) -> BatchIndex:
        epoch, step = key
        current, steps, later, start = self.limits
        last, limit = self.steps, steps if epoch <= current else later  # without calls: this runs for each batch
        if start and epoch == current:
            last = self.steps_of(epoch)
        if step < limit < last:  # a step beyond the limit proves the limit wrong
            last = limit
        return BatchIndex(epoch, step + 1) if step + 1 < last else BatchIndex(epoch + 1, 0)


def amplification(length: int, chunk_rows: float, batch_size: int, chunks_per_sample: float = 1.0) -> float:
    """Samples decoded per sample used, under a global shuffle.

    A batch that reads B times from C chunks needs ``C·(1 − (1 − 1/C)^B)`` chunks on average, each decoded completely.
    """
    chunks = math.ceil(length / chunk_rows)
    needed = chunks * (1 - (1 - 1 / chunks) ** (batch_size * chunks_per_sample)) if chunks > 1 else 1.0
    return max(needed * min(chunk_rows, length) / min(batch_size, length), 1.0)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Divides each batch among readers. All samples of a chunk go to the same reader. Safe to use from any thread.

    * If the order goes by chunks, the readers take the chunks of a group in turn, and so the samples of a batch.
    * If readers keep chunks, or the order goes by samples, the readers take the chunks in storage order: each reader
      has the same chunks in each epoch.
    """

    chunks: ChunkExtents | None  # the samples of each chunk; None if each sample is stored alone, for a single reader
    kept: bool = False  # whether readers keep chunks from epoch to epoch
    # Sample numbers in storage order, which ``chunks`` count; None if samples are numbered in storage order.
    order: Indices | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def rows(self) -> int:
        return 1 if self.chunks is None else self.chunks.usual_rows

    def readers(self, plan: EpochPlan, first: int, samples: Indices, readers: int) -> Indices:
        """The reader of each sample, from this rank's position ``first`` on."""
        if self.kept or plan.deck.chunk_order is None:
            return self._stored(samples) % readers
        return plan.deck.chunk_places(plan.dealt(first, first + len(samples))) // plan.world_size % readers

    def readers_of(self, plan: EpochPlan, places: Indices, readers: int, which: int = 0) -> Indices:
        """The readers of the chunks at places in an order of chunks.

        If ``world_size`` divides the chunks of a group, a rank reads every ``world_size``-th chunk, and only those are
        shared among its readers.
        """
        if self.kept or plan.deck.chunk_order is None:  # a mixture
            return self._stored(plan.deck.first_samples(places, which)) % readers
        return places // plan.world_size % readers

    def _stored(self, samples: Indices) -> Indices:
        """The chunk of each sample, in storage order."""
        assert self.chunks is not None
        return self.chunks.chunks_of(samples if self._places is None else self._places[samples])

    @functools.cached_property
    def _places(self) -> Indices | None:
        return None if self.order is None else np.argsort(self.order)

    def own(self, plan: EpochPlan, first: int, samples: Indices, share: Share) -> Indices:
        """The indices of the samples of one reader, ascending."""
        if share.readers == 1:
            return np.arange(len(samples))
        return np.flatnonzero(self.readers(plan, first, samples, share.readers) == share.reader)

    def end_with(self, schedule: Schedule, batch: BatchIndex) -> bool:
        """Whether a batch shares no chunk with the next one. True in storage order only."""
        plan, following = schedule.plan(batch.epoch), schedule.following(batch)
        if self.chunks is None or not plan.decks.as_stored or plan.decks.order is not None:
            return False
        ends = plan.batch(batch.step)[-1], schedule.plan(following.epoch).batch(following.step)[0]
        before, after = self.chunks.chunks_of(np.array(ends))
        return bool(before != after)


# The epoch and the number of a group of chunks that a chunk shuffle deals from.
ChunkGroup = tuple[int, int]


def due(
    schedule: Schedule, begin: BatchIndex, end: BatchIndex, shares: Shares, share: Share = ALL
) -> list[tuple[ChunkGroup | None, Indices]]:
    """The chunks to decode once the batches from ``begin`` up to ``end`` have been read.

    If the order goes by chunks, the chunks of a group fall due while the group before it is dealt, evenly over its
    positions. Memory holds two groups, so a chunk falls due after the last group but one has been read, and before its
    own group is. In storage order, the next chunk that begins at or after ``end`` falls due.

    Returns, by group, one sample of each chunk that this rank begins and ``share`` has. Without groups, the group is
    None.
    """
    plan = schedule.plan(end.epoch)
    position = _position(plan, end)
    if not plan.deck.chunk_orders:
        if not plan.decks.as_stored or shares.rows == 1:
            return []
        following = np.minimum(position + shares.rows * np.arange(1, share.readers + 1), plan.length) - 1
        return [(None, following[shares.own(plan, 0, following, share)][:1])]
    found = list[tuple[ChunkGroup | None, Indices]]()
    for which, order in enumerate(plan.deck.chunk_orders):
        group = order.group_of(plan.deck.reached(position, which))
        reading = [(end.epoch, number) for number in (group - 1, group) if number >= 0]
        if not group and begin.epoch < end.epoch:
            before = schedule.plan(end.epoch - 1).deck.chunk_orders[which]
            reading.insert(0, (end.epoch - 1, before.groups - 1))
        found += (_due_of(schedule, (which, *each), (begin, end), shares, share) for each in reading)
    return [(group, chunks) for group, chunks in found if len(chunks)]


def _due_of(
    schedule: Schedule, group: tuple[int, int, int], batches: Sequence[BatchIndex], shares: Shares, share: Share
) -> tuple[ChunkGroup | None, Indices]:
    """The group after this one, and its chunks that fall due while these batches are read from this group."""
    which, epoch, number = group
    plan = schedule.plan(epoch)
    order = plan.deck.chunk_orders[which]
    first, stop = order.group(number).start, order.group(number).stop
    following = (epoch, number + 1) if number + 1 < order.groups else (epoch + 1, 0)
    coming = schedule.plan(following[0])
    places = coming.places_begun(following[1], which)
    if share.readers > 1:
        places = places[shares.readers_of(coming, places, share.readers, which) == share.reader]
    dealt = (min(max(plan.deck.reached(_position(plan, key), which), first), stop) - first for key in batches)
    low, high = (math.ceil(positions / (stop - first) * len(places)) for positions in dealt)
    places = places[low:high]
    return following, coming.deck.first_samples(places, which) if len(places) else places


def _position(plan: EpochPlan, key: BatchIndex) -> int:
    """The position of a batch in this epoch; for a batch of another epoch, the start or end of this one."""
    if key.epoch != plan.epoch:
        return 0 if key.epoch < plan.epoch else plan.length
    return plan.position(key.step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthPlan(EpochPlan):
    """The batches of a `LengthDeck` for one rank; otherwise as `EpochPlan`.

    Rank r takes batch ``j·W + r`` of the deck at step j, for W ranks. A batch has at most ``batch_size`` samples.
    ``drop_last`` drops the batches that do not fill a step; otherwise the last ones are split until each rank has one.
    """

    def __post_init__(self) -> None:
        self._check_ranks()
        if not len(self):
            what = "drop_last drops batches that do not fill a step; set drop_last=false, or smaller batches"
            raise ConfigError(f"there are too few batches for {self.world_size} ranks, and {what}", "batch_by")

    @functools.cached_property
    def _edges(self) -> Indices:
        """The first positions of the batches of all ranks, from ``start`` on, and the end of the last batch."""
        assert isinstance(self.deck, LengthDeck)
        edges, longest = self.deck.edges, int(self.deck.buckets.bounds[-1])
        edges = np.append(self.start, edges[edges > self.start])
        return _shared(edges, self.world_size, drop_last=self.drop_last, longest=longest)

    @functools.cached_property
    def _own(self) -> tuple[Indices, Indices]:
        """The first position of each batch of this rank; its first index among this rank's positions, and the end."""
        begins, ends = self._edges[self.rank : -1 : self.world_size], self._edges[self.rank + 1 :: self.world_size]
        return begins, np.append(0, np.cumsum(ends - begins))

    @property
    def capacity(self) -> int:
        assert self.decks.buckets is not None
        return int(self.decks.buckets.sizes.max())

    @property
    def _rank_positions(self) -> int:
        return int(self._own[1][-1])

    def __len__(self) -> int:
        return (len(self._edges) - 1) // self.world_size

    def bounds(self, step: int) -> tuple[int, int]:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        first, end = self._own[1][step : step + 2].tolist()
        return first, end

    def dealt(self, first: int, end: int) -> Indices:
        (begins, firsts), own = self._own, np.arange(first, end)
        batches = np.searchsorted(firsts, own, side="right") - 1
        return begins[batches] + own - firsts[batches]

    def position(self, steps: int) -> int:
        return self.length if steps == len(self) else int(self._edges[steps * self.world_size])

    def steps_to(self, position: int) -> int:
        return min(len(self), int(np.searchsorted(self._edges[:: self.world_size], position)))

    def drops_all(self, position: int) -> bool:
        assert isinstance(self.deck, LengthDeck)
        return self.drop_last and bool(np.count_nonzero(self.deck.edges > position) < self.world_size)


def _shared(edges: Indices, ranks: int, *, drop_last: bool, longest: int = 0) -> Indices:
    """Splits the last batches until each step has one for every rank; takes and returns the edges of batches."""
    steps, rest = divmod(len(edges) - 1, ranks)
    if not rest:
        return edges
    if drop_last:
        return edges[: steps * ranks + 1]
    for kept in range(steps, -1, -1):  # as few batches as possible change
        last, count = edges[kept * ranks :], (steps + 1 - kept) * ranks
        if last[-1] - last[0] >= count:
            return np.concatenate([edges[: kept * ranks], _halved(last, count)])
    raise ConfigError(
        f"{edges[-1] - edges[0]} samples in {len(edges) - 1} batches cannot be shared by {ranks} ranks, with equally "
        f"many batches each: let two samples share a batch, by batch_elements={2 * longest} and a batch_size above 1, "
        "or drop the last batches, by drop_last=True (in evaluation val_loader={'drop_last': True})",
        "batch_by",
    )


def _halved(edges: Indices, count: int) -> Indices:
    batches = [(first - end, first) for first, end in itertools.pairwise(edges.tolist())]
    heapq.heapify(batches)
    while len(batches) < count:
        size, first = batches[0]
        half = -size // 2
        heapq.heapreplace(batches, (-half, first))
        heapq.heappush(batches, (size + half, first + half))
    return np.append(np.sort([first for _, first in batches]), edges[-1])
