"""`NanCheck`: warns if the first batch of a loader holds NaN, which makes the loss NaN, and then the model.

The thread that reads the first batch checks it. Nothing is refused: a NaN may stand for a missing label.
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
from lit_async_data.sources.contract.source import Source

log = logging.getLogger(__name__)


class NanCheck:
    """Checks the first batch of the first pass. Safe to call from any thread.

    Args:
        source: Where samples come from.
        schedule: Which samples make the first batch.
    """

    def __init__(self, source: Source, schedule: Schedule) -> None:
        self._source = source
        self._schedule = schedule
        # The thread that reads that batch takes it. No lock: a loader that has not been used can be copied.
        self._pending = collections.deque([True])

    def __call__(self, epoch: int, samples: Indices, arrays: Mapping[str, Array]) -> None:
        """If the first batch has been read, log one line for each of its fields with NaN.

        Args:
            epoch: Number of the epoch.
            samples: The samples that were read.
            arrays: Their values, by field.
        """
        if not self._pending:
            return
        first = self._schedule.plan(epoch).batch(0).samples
        if not np.array_equal(samples[: len(first)], first):
            return
        try:
            self._pending.pop()
        except IndexError:  # another thread has taken it
            return
        for key, array in arrays.items():
            found = np.flatnonzero(with_nan(array[: len(first)]))
            if len(found):
                where = self._source.locate(self._source.ids(first[found[:1]]))[0]
                log.warning(
                    "%s: %d of the %d samples of the first batch hold NaN, the first in row %d of %s; the loss will be "
                    "NaN, too. Leave such samples out, or replace the values in device_transform (torch.nan_to_num); "
                    "where NaN stands for a missing label, leave it out of the loss",
                    *(key, len(found), len(first), where.row, where.file),
                )


def with_nan(values: Array) -> Array:
    """Tell which samples hold NaN.

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
