"""`Deck`: all samples of an epoch, by position; `Decks`, the inputs of the order, makes one for each epoch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkOrder, ChunkRun, distinct_of
from lit_async_data.order.permutation import Indices, Permutation, derived_key
from lit_async_data.order.weights import WeightedChunkOrder, Weights, uniform

# Separate the keys of substitutes, and of the sources of a mixture, from the keys of the order.
SUBSTITUTES, MIXED = 6, 8
# Attempts to draw a substitute from the same group of chunks. One damaged chunk can make a whole group bad.
WITHIN_GROUP = 32
# Passes of a source of a mixture whose decks are kept.
KEPT_PASSES = 4

Order = Literal["none", "chunk", "global"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decks:
    """The inputs of the order, except for those of its dealing."""

    length: int  # samples of the epoch: all in the source, or the number to draw or to mix
    shuffle: Order
    seed: int = 0
    runs: tuple[ChunkRun, ...] = ()  # the samples of each file in chunks, for ``"chunk"``
    # Sample numbers in storage order, int64; None if samples are numbered in storage order.
    order: Indices | None = dataclasses.field(default=None, compare=False, repr=False)
    shuffle_chunks: int = 64  # chunks of a group, for ``"chunk"``
    # Weights for drawing with replacement; None to take each sample once.
    weights: Weights | None = dataclasses.field(default=None, compare=False)
    # The samples that may share a batch, for batches by length; None if all may.
    buckets: Buckets | None = dataclasses.field(default=None, compare=False)
    mixture: Mixture | None = dataclasses.field(default=None, compare=False)
    sources: tuple[Decks, ...] = ()  # the inputs of the order of each source of the mixture
    alike: bool = False  # whether all epochs have the order of epoch 0

    @property
    def as_stored(self) -> bool:
        return self.shuffle == "none" and self.buckets is None and self.mixture is None

    @property
    def counts(self) -> list[int]:
        """The samples of each source in an epoch."""
        return [self.length] if self.mixture is None else self.mixture.counts(self.length)

    def deck(self, epoch: int) -> Deck:
        return self.keyed(derived_key(self.seed, 0 if self.alike or self.shuffle == "none" else epoch))

    def keyed(self, key: int) -> Deck:
        if self.mixture is not None:
            return MixtureDeck(self, key, self.mixture)
        return Deck(self, key) if self.buckets is None else LengthDeck(self, key, self.buckets)


class Deck:
    """The samples of one epoch over all ranks. A position counts them. Safe to use from any thread."""

    def __init__(self, inputs: Decks, key: int) -> None:
        self.length, self.key, self._inputs = inputs.length, key, inputs
        # The order of samples in storage order; None if the epoch does not go by chunks, or is a mixture.
        self.chunk_order: ChunkOrder | WeightedChunkOrder | None = None
        if inputs.shuffle == "chunk" and inputs.runs:  # without chunks, "chunk" is the global shuffle
            given = inputs.runs, inputs.shuffle_chunks
            if inputs.weights is None:
                self.chunk_order = ChunkOrder(*given, key)
            else:
                self.chunk_order = WeightedChunkOrder(*given, inputs.weights, self.length, key)
        # The orders of chunks from which the epoch takes samples side by side: one for each source of a mixture.
        self.chunk_orders: tuple[ChunkOrder | WeightedChunkOrder | Passes, ...] = (
            () if self.chunk_order is None else (self.chunk_order,)
        )

    def samples(self, positions: Indices) -> Indices:
        """The sample numbers in the source."""
        if self._inputs.shuffle == "none":
            return positions
        if self.chunk_order is not None:
            return self._numbered(self.chunk_order.samples(positions))
        if self._inputs.weights is not None:
            return self._inputs.weights.drawn(uniform(derived_key(self.key, 0), positions))
        return Permutation(self.length, self.key)(positions)

    def first_samples(self, places: Indices, which: int = 0) -> Indices:
        """One sample of each chunk at places in an order of chunks."""
        return self._numbered(self.chunk_orders[which].first_of(places))

    def _numbered(self, stored: Indices) -> Indices:
        return stored if self._inputs.order is None else self._inputs.order[stored]

    def reached(self, position: int, which: int = 0) -> int:  # noqa: ARG002
        """The position in an order of chunks that has been reached before a batch that begins at a position."""
        return position

    def chunk_places(self, positions: Indices) -> Indices:
        """The place of each sample's chunk in the order of chunks."""
        assert self.chunk_order is not None
        return self.chunk_order.located(positions)[0]

    def substitute(self, position: int, attempt: int, *, alone: bool = False) -> int:  # noqa: ARG002
        """The sample that replaces an unreadable one at a position.

        Each attempt draws another sample: from the same group of chunks, or from the whole epoch if the order has no
        groups or all attempts within the group failed; in a mixture, from the same source. The draw does not depend on
        the rank or on a resume. If the batch has no other sample (``alone``), a `LengthDeck` draws one of any length.
        """
        among = range(self.length)
        if self.chunk_order is not None and attempt < WITHIN_GROUP:
            among = self.chunk_order.group(self.chunk_order.group_of(position))
        drawn = among[derived_key(self.key, SUBSTITUTES, position, attempt) % len(among)]
        return int(self.samples(np.array([drawn]))[0])


class LengthDeck(Deck):
    """The samples of one epoch, batch after batch, each batch of samples of like length."""

    def __init__(self, inputs: Decks, key: int, buckets: Buckets) -> None:
        super().__init__(inputs, key)
        self.buckets = buckets
        order = None if self.chunk_order is None else super().samples(np.arange(self.length))
        self._samples, self.edges = buckets.batches(None if inputs.shuffle == "none" else key, order)
        self._places = None if order is None else np.argsort(order)  # of each sample in the order by chunks

    def samples(self, positions: Indices) -> Indices:
        return self._samples[positions]

    def reached(self, position: int, which: int = 0) -> int:  # noqa: ARG002
        if self._places is None or position in (0, self.length):
            return position
        return int(self._places[self._samples[position - 1]])

    def chunk_places(self, positions: Indices) -> Indices:
        assert self._places is not None
        return super().chunk_places(self._places[self._samples[positions]])

    def substitute(self, position: int, attempt: int, *, alone: bool = False) -> int:
        """A sample of the same bucket; every second attempt also accepts shorter ones: a bucket may hold only one."""
        numbers, own = self.buckets.numbers, self.buckets.numbers[self._samples[position]]
        alike = np.flatnonzero((numbers <= own) | alone if attempt % 2 else numbers == own)
        return int(alike[derived_key(self.key, SUBSTITUTES, position, attempt) % len(alike)])


class MixtureDeck(Deck):
    """The samples of one epoch of a mixture, batch after batch. They go on after its end, for a last whole step."""

    def __init__(self, inputs: Decks, key: int, mixture: Mixture) -> None:
        super().__init__(inputs, key)
        self._mixture = mixture
        firsts = itertools.accumulate((source.length for source in inputs.sources), initial=0)
        self._passes = [
            Passes(source, derived_key(key, MIXED, number), first, count)
            for number, (source, first, count) in enumerate(zip(inputs.sources, firsts, inputs.counts, strict=False))
        ]
        self._chunked = [number for number, passes in enumerate(self._passes) if passes.groups]
        self.chunk_orders = tuple(self._passes[number] for number in self._chunked)

    def samples(self, positions: Indices) -> Indices:
        return _joined(*self._mixture.located(positions), self._passes.__getitem__)

    def reached(self, position: int, which: int = 0) -> int:
        return int(self._mixture.counts(position)[self._chunked[which]])

    def substitute(self, position: int, attempt: int, *, alone: bool = False) -> int:  # noqa: ARG002
        which, places = self._mixture.located(np.array([position]))
        return self._passes[int(which[0])].substitute(int(places[0]), attempt)


class Passes:
    """The samples of one source of a mixture, pass after pass, each in another order. Safe to use from any thread.

    Groups of chunks, and places in the order of chunks, count through all passes. Methods as in `ChunkOrder`; they
    return numbers of samples in the whole mixture.
    """

    def __init__(self, inputs: Decks, key: int, first: int, length: int) -> None:
        self.length, self._size, self._first = length, inputs.length, first
        self._deck = functools.lru_cache(KEPT_PASSES)(lambda number: inputs.keyed(derived_key(key, number)))
        self.groups = 0
        if (order := self._deck(0).chunk_order) is not None and length:
            self.width, self.rows, self.chunks, self._of_pass = order.width, order.rows, order.chunks, order.groups
            self.groups = self.group_of(length - 1) + 1

    def samples(self, positions: Indices) -> Indices:
        return self._first + _joined(*np.divmod(positions, self._size), self._deck)

    def substitute(self, position: int, attempt: int) -> int:
        number, row = divmod(position, self._size)
        return self._first + self._deck(number).substitute(row, attempt)

    def group_of(self, position: int) -> int:
        number, row = divmod(min(position, self.length - 1), self._size)
        return number * self._of_pass + self._deck(number).chunk_orders[0].group_of(row)

    def group(self, number: int) -> range:
        passed, group = divmod(number, self._of_pass)
        positions, before = self._deck(passed).chunk_orders[0].group(group), passed * self._size
        return range(before + positions.start, min(before + positions.stop, self.length))

    def places_of(self, group: int, begin: int = 0, step: int = 1) -> Indices:
        passed, number = divmod(group, self._of_pass)
        return self._deck(passed).chunk_orders[0].places_of(number, begin, step) + passed * self.chunks

    def first_of(self, places: Indices) -> Indices:
        """One sample of each chunk at places of one pass."""
        passed = int(places[0]) // self.chunks
        return self._deck(passed).first_samples(places - passed * self.chunks) + self._first


def _joined(which: Indices, positions: Indices, part: Callable[[int], Deck | Passes]) -> Indices:
    """The samples at positions of several parts, which have numbers."""
    found = np.empty_like(positions)
    for number in distinct_of(which).tolist():
        chosen = np.flatnonzero(which == number)
        found[chosen] = part(number).samples(positions[chosen])
    return found


# Batches after which the offsets repeat; from one to the next they grow by STEP / PERIOD = 0.618, the golden ratio.
PERIOD, STEP = 2**16, 40503


class Mixture:
    """How many samples of each source a batch has, in exact shares. Immutable; safe to use from any thread.

    The samples of a batch are sorted by source; the first row of each, with an offset that evens out the rounding, is a
    function of the number of the batch: see docs/design/order.md.
    """

    def __init__(self, shares: Sequence[float], batch_size: int) -> None:
        self.batch_size = batch_size
        self._edges = np.rint(np.append(0.0, np.cumsum(shares)) * (batch_size * PERIOD / sum(shares))).astype(np.int64)
        period = np.diff(self._cuts(np.arange(PERIOD)), axis=1)
        self._before = np.concatenate([np.zeros_like(period[:1]), np.cumsum(period, axis=0)])

    def _cuts(self, batches: Indices) -> Indices:
        """The first row of each source in each batch, and the end of the batch; shape (batches, sources + 1)."""
        return (self._edges + (batches * STEP % PERIOD)[:, None]) // PERIOD

    def _counts(self, batches: Indices) -> Indices:
        periods, rest = np.divmod(batches, PERIOD)
        counts: Indices = periods[:, None] * self._before[-1] + self._before[rest]
        return counts

    def counts(self, length: int) -> list[int]:
        """The samples of each source in the batches that begin before a position."""
        counts: list[int] = self._counts(np.array([-(-length // self.batch_size)]))[0].tolist()
        return counts

    def length_with(self, source: int, samples: int) -> int:
        """The samples of the first batches that have a number of samples of a source; 0 if no batch has any."""
        if not (of_period := int(self._before[-1, source])):
            return 0
        periods, rest = divmod(samples - 1, of_period)
        return (periods * PERIOD + int(np.searchsorted(self._before[:, source], rest + 1))) * self.batch_size

    def located(self, positions: Indices) -> tuple[Indices, Indices]:
        """The source of each position, and the number of samples of this source before the position."""
        batches, rows = np.divmod(positions, self.batch_size)
        cuts = self._cuts(batches)
        which = (rows[:, None] >= cuts[:, 1:]).sum(axis=1)
        begun = self._counts(batches) - cuts[:, :-1]
        return which, rows + np.take_along_axis(begun, which[:, None], axis=1)[:, 0]
