"""`Mixture`: how many samples of each source a batch has, in exact shares.

A batch of B samples has ``⌊B·S_j + u⌋ − ⌊B·S_(j−1) + u⌋`` samples of source j, where S_j sums the first j shares. An
offset u from 0 to 1, the same for all sources, makes that B in all and less than one from ``B·share``. It differs from
batch to batch so that rounding evens out. The samples of a batch are sorted by source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_async_data.order.permutation import Indices

# Batches after which the offsets repeat; from one to the next they grow by STEP / PERIOD = 0.618, the golden ratio.
PERIOD, STEP = 2**16, 40503


class Mixture:
    """The number of samples of each source in each batch. Immutable; safe to use from any thread."""

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
