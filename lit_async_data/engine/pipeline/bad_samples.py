"""`AroundBadSamples`: chooses the samples of a batch that has bad ones.

The choice is a pure function of the order and of what can be read, so ranks, workers and a resume agree on it: a batch
leaves out its bad samples, or another sample stands in for each, drawn by the epoch's plan.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from lit_async_data.engine.pipeline.sample_reader import SampleReader
from lit_async_data.errors import AsyncDataError, ChangedError, ReadError, SourceError, TransformError, batch_error, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import BatchIndex, EpochPlan

# How many substitutes are tried for one sample. If none of so many can be read, the source itself has a problem.
ATTEMPTS = 64
# What the system says of itself and not of one file.
_OF_THE_SYSTEM = {
    getattr(errno, name) for name in ("EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "ENODEV", "ENXIO", "ESTALE", "ENOTCONN")
}


class BadSample(NamedTuple):
    """A sample that could not be read or transformed."""

    position: int  # the place in the order of the epoch, over all ranks, that it, or one in its place, was to take
    sample: int
    error: Exception


class ReadAround(NamedTuple):
    """A batch that was read around bad samples."""

    samples: tuple[int, ...]  # what it has
    bad: tuple[BadSample, ...]


def is_of_a_sample(error: BaseException) -> bool:
    """Whether an error may be the fault of a sample, and not of an option, the system or this package."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) in _OF_THE_SYSTEM:
            return False
        cause = cause.__cause__
    if isinstance(error, AsyncDataError):
        return isinstance(error, SourceError | ReadError | TransformError) and not isinstance(error, ChangedError)
    return isinstance(error, Exception)


def _forget_frames(error: BaseException) -> None:
    """Let go of the frames that an error and its causes have passed, which refer to the memory of slots."""
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__


class AroundBadSamples:
    """Reads around bad samples: leaves them out, or has others stand in. Any thread may call it.

    Args:
        read: Reads and transforms samples.
        policy: What becomes of a bad sample.
        known: Samples that are known to be bad, which are not read again.
    """

    def __init__(self, read: SampleReader, policy: Literal["skip", "substitute"], known: Iterable[int] = ()) -> None:
        self._read, self._policy = read, policy
        self._bad: dict[int, Exception] = {sample: SourceError("bad before the run was resumed") for sample in known}
        self._deadly, self._trying = np.empty(0, np.int64), np.zeros(1, np.int64)

    def share(self, deadly: Indices, trying: Indices) -> None:
        """Read none of the ``deadly`` samples, and say in ``trying`` which one is read; both count from 1, 0 is none.

        Both are in memory that processes share: what a process tried when it ended is known.
        """
        self._deadly, self._trying = deadly, trying

    def knows(self, samples: Indices) -> bool:
        """Whether some of these samples are known to be bad."""
        for sample in (self._deadly[self._deadly > 0] - 1).tolist():
            self._bad.setdefault(sample, SourceError("reader processes ended while they read it", sample_id=sample))
        return bool(self._bad) and not self._bad.keys().isdisjoint(samples.tolist())

    def choice(self, plan: EpochPlan, step: int) -> ReadAround:
        """The good samples of a batch, with substitutes if the policy says so, each tried by itself; and the bad ones.

        Raises:
            AsyncDataError: What is the fault of no sample; or none can be read in place of a bad one.
        """
        planned, found, bad = plan.batch(step), list[int](), list[BadSample]()
        positions, stand_in = plan.positions(step).tolist(), self._policy == "substitute"
        for position, sample in zip(positions, planned.tolist(), strict=True):
            if (error := self._tried(plan.epoch, step, sample)) is None:
                found.append(sample)
                continue
            bad.append(BadSample(position, sample, error))
            if stand_in:
                others = self._substitutes(plan, step, position, bad)
                found, stand_in = found + others, bool(others)  # where none can stand in, the rest is left out
        if found or (found := self._substitutes(plan, step, positions[0], bad, alone=True)):
            return ReadAround(tuple(found), tuple(bad))
        tried = {each.sample: each.error for each in bad}
        numbers = self._read.source.ids(np.array(list(tried), np.int64)).tolist()
        raise SourceError(
            f"on_error: none of {ATTEMPTS} samples that were tried can stand in for sample {numbers[0]}; bad are "
            f"{few(numbers)}; the last: {bad[-1].error}; check the data: python -m lit_async_data inspect --check-all",
            sample_id=numbers[0],
            errors=[error for error in tried.values() if isinstance(error, SourceError)],
        ) from bad[-1].error

    def _substitutes(
        self, plan: EpochPlan, step: int, position: int, bad: list[BadSample], *, alone: bool = False
    ) -> list[int]:
        """A sample that stands in for a bad one, perhaps ``alone`` in its batch; none if all that are tried fail."""
        for attempt in range(ATTEMPTS):
            sample = plan.substitute(position, attempt, alone=alone)
            if (error := self._tried(plan.epoch, step, sample)) is None:
                return [sample]
            bad.append(BadSample(position, sample, error))
        return []

    def _tried(self, epoch: int, step: int, sample: int) -> Exception | None:
        if sample in self._bad:
            return self._bad[sample]
        number = np.array([sample], np.int64)
        self._trying[0] = sample + 1
        try:
            self._read.check(epoch, number)
        except Exception as caught:
            if not is_of_a_sample(caught):
                raise
            ids = self._read.source.ids(number).tolist()
            error = batch_error(caught, *BatchIndex(epoch, step), ids, None)
            error.sample_id = ids[0] if error.sample_id is None else error.sample_id
            _forget_frames(error)
        else:
            return None
        finally:
            self._trying[0] = 0
        # What a transform draws, and so its error, may differ in another epoch.
        if not isinstance(error, TransformError):
            self._bad[sample] = error
        return error
