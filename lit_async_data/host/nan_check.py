"""`NanCheck`: whether the first batch of a loader holds NaN, which makes a loss NaN, and a model after it.

The thread that reads the first batch checks it. Nothing is refused: a NaN may stand for a label that is
missing.
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Mapping

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import Schedule
from lit_async_data.sources.base import Source, ids_of

log = logging.getLogger(__name__)


class NanCheck:
    """Looks at the first batch of the first pass. Safe to call from any thread.

    Args:
        source: Where samples come from.
        schedule: Which of them make the first batch.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        self._source = source
        self._schedule = schedule
        # Taken by whoever meets that batch. No lock: a loader that has not been used can be copied.
        self._pending = collections.deque([True])

    def __call__(self, epoch: int, samples: Indices, arrays: Mapping[str, Array]) -> None:
        """Look at what has been read, if the first batch is in it, and log one line for each field with NaN.

        Args:
            epoch: Number of the epoch.
            samples: Those that were read.
            arrays: What they hold, by field.
        """
        if not self._pending:
            return
        first = self._schedule.plan(epoch).batch(0).samples
        if not np.array_equal(samples[: len(first)], first):
            return
        try:
            self._pending.pop()
        except IndexError:  # another thread has met it, too
            return
        for key, array in arrays.items():
            found = np.flatnonzero(with_nan(array[: len(first)]))
            if len(found):
                where = self._source.locate(ids_of(self._source, first[found[:1]]))[0]
                log.warning(
                    "%s: %d of the %d samples of the first batch hold NaN, the first of them row %d of %s, and so will "
                    "the loss: leave such samples out, or replace the values in device_transform (torch.nan_to_num); "
                    "where NaN stands for a missing label, leave it out of the loss",
                    *(key, len(found), len(first), where.row, where.file),
                )


def with_nan(values: Array) -> Array:
    """Which samples hold NaN.

    Args:
        values: Shape (n, ...).

    Returns:
        bool, shape (n,).

    Example:
        >>> with_nan(np.array([[1.0, np.nan], [np.inf, -np.inf], [1.0, 2.0]])).tolist()
        [True, False, False]
    """
    rows = values.reshape(len(values), math.prod(values.shape[1:]))
    if values.dtype.kind not in "fc":
        return np.zeros(len(rows), bool)
    with np.errstate(all="ignore"):
        suspects = np.isnan(rows.sum(axis=1))  # no array of the batch's size; infinities can make NaN, too
    suspects[suspects] = np.isnan(rows[suspects]).any(axis=1)
    found: Array = suspects
    return found
