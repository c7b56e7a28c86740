"""`SampleReader` reads samples, `AroundBadSamples` chooses others for bad ones, `Ahead` fetches; `ReaderSetup` has all.

A batch leaves out its bad samples, or has a substitute for each, drawn by the epoch's plan. The choice is a pure
function of the order and of the samples that can be read, so ranks, workers and a resume agree on it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from lit_async_data.batch.spec import MASK, RUN_BYTES, Array, length_key, offsets_key
from lit_async_data.engine.hooks import FIXED, INDEX, Transformation, failure
from lit_async_data.engine.resources import ResourcePlan
from lit_async_data.engine.supervisor import PREPARING, report_once
from lit_async_data.errors import AsyncDataError, ChangedError, ReadError, SourceError, TransformError, batch_error, few
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices, derived_key, derived_keys
from lit_async_data.order.plan import ALL, BatchIndex, EpochPlan, KeyedSamples, Schedule, Share, Shares, due
from lit_async_data.sources.contract.source import Source, fill
from lit_async_data.sources.contract.user_code import READING, seed_generators

log = logging.getLogger(__name__)

# Separate the keys of samples, of batches and of sources' global draws from the keys of the order. 3 and 4 are for host
# hooks: see `engine/hooks.py`.
SAMPLE_KEYS, BATCH_KEYS, SOURCE_KEYS = 1, 2, 5


class EndToEnd:
    """Concatenated samples of variable length, to which callers write padded ones."""

    def __init__(self, values: Array, offsets: Indices, width: int) -> None:
        self._values, self._firsts, self.lengths = values, offsets[:-1], np.diff(offsets)
        self.shape, self.dtype = (len(self.lengths), width, *values.shape[1:]), values.dtype

    def __setitem__(self, rows: Any, padded: Array) -> None:
        if isinstance(rows, int):
            rows, padded = slice(rows, rows + 1), padded[None]
        places = zip(self._firsts[rows].tolist(), self.lengths[rows].tolist(), padded, strict=True)
        for first, length, sample in places:
            self._values[first : first + length] = sample[:length]

    def padded(self, rows: slice | Indices) -> Array:
        """Memory for the samples of some rows, padded to the longest of them."""
        lengths = self.lengths[rows]
        return np.empty((len(lengths), max(int(lengths.max()), 1), *self.shape[2:]), self.dtype)


def padded_runs(joined: Sequence[EndToEnd], rows: slice | Indices) -> Iterator[slice]:
    """Runs of samples to read together: padded, a run takes at most the bytes of all unpadded, or `RUN_BYTES`."""
    lengths = np.array([each.lengths[rows] for each in joined])
    nbytes = np.array([math.prod(each.shape[2:]) * each.dtype.itemsize for each in joined])
    most, first = max(int(nbytes @ lengths.sum(axis=1)), RUN_BYTES), 0
    while first < lengths.shape[1]:
        longest = nbytes @ np.maximum.accumulate(lengths[:, first:], axis=1)
        end = first + int(np.searchsorted(longest * np.arange(1, len(longest) + 1), most, side="right"))
        yield slice(first, end)
        first = end


@dataclasses.dataclass(frozen=True)
class SampleReader:
    """Safe to call from any thread."""

    source: Source
    return_indices: bool  # whether to add the sample numbers as field ``index``
    seed: int | None  # keys the draws of the source; None if it draws nothing
    transformation: Transformation | None = None  # the host hooks; None without any
    concat: Sequence[str] = ()  # the fields whose samples are concatenated in a batch
    buckets: Buckets | None = None  # the lengths to which these are padded for the host hooks
    masks: bool = False  # whether to mark samples as real, in field ``mask``
    global_seed: int | None = None  # seeds the global random generators; None to leave them alone
    alike: bool = False  # whether all epochs are the same, as in evaluation

    def __call__(self, keyed: KeyedSamples, out: Mapping[str, Array], rows: Indices | None = None) -> None:
        """Read into these rows of ``out``; without ``rows``, into the first ones."""
        samples = keyed.samples
        own: dict[str, Any] = {INDEX: self.source.ids(samples)} if self.return_indices else {}
        own |= {MASK: True} if self.masks else {}
        for key, values in own.items():
            out[key][... if rows is None else rows] = values
        into: dict[str, Any] = {key: array for key, array in out.items() if key not in own}
        for key in self.concat:
            width = self.source.spec[key].shape[0] if self.buckets is None else self.buckets.width(samples)
            into[key] = EndToEnd(out[key], into.pop(offsets_key(key)), width)
        with READING.of(keyed.epoch, self.global_seed, alike=self.alike):
            if self.transformation is not None:
                self._transform(keyed, into, range(len(samples)) if rows is None else rows.tolist())
            elif self.concat:
                for run in padded_runs([into[key] for key in self.concat], slice(None) if rows is None else rows):
                    self._read_rows(keyed[run], into, run if rows is None else rows[run])
            elif rows is not None:
                self._read_rows(keyed, into, rows)
            else:
                self._read(keyed, into)

    def _read_rows(self, keyed: KeyedSamples, into: Mapping[str, Any], rows: slice | Indices) -> None:
        """Read by way of other memory if rows are scattered, or samples are padded first."""
        apart = into.keys() if isinstance(rows, np.ndarray) else self.concat
        values = {key: array[rows] for key, array in into.items() if key not in apart}
        for key in apart:
            array, shape = into[key], (len(keyed.samples), *into[key].shape[1:])
            values[key] = array.padded(rows) if key in self.concat else np.empty(shape, array.dtype)
        self._read(keyed, values)
        for key in apart:
            into[key][rows] = values[key]

    def _transform(self, keyed: KeyedSamples, into: Mapping[str, Any], rows: Sequence[int]) -> None:
        hooks, samples = self.transformation, keyed.samples
        assert hooks is not None
        for first in range(0, len(samples), hooks.capacity):
            run = slice(first, first + hooks.capacity)
            part = keyed[run]
            hooks(part, functools.partial(self._read, part), into, rows[run])
        for key in self.concat:
            for place, row in enumerate(rows if length_key(key) in into else ()):
                length, made = into[key].lengths[row], into[length_key(key)][row]
                if made != length:
                    what = f"changed {length_key(key)} of {{}} from {length} to {made}; {FIXED}"
                    raise failure("transform", self.source, samples[place : place + 1], what)

    def check(self, keyed: KeyedSamples) -> None:
        """Read a sample by itself, and call ``sample_transform``."""
        with READING.of(keyed.epoch, self.global_seed, alike=self.alike):
            if self.transformation is None:
                self._read(keyed, self.source.spec.empty(1))
            else:
                self.transformation.check(keyed, functools.partial(self._read, keyed))

    def _read(self, keyed: KeyedSamples, out: Mapping[str, Array]) -> None:
        samples, ids = keyed.samples, self.source.ids
        if READING.key is not None:
            READING.drawing = samples, keyed.keys(ids)
            seed_generators(*READING.keys(SOURCE_KEYS, READING.drawing[1][:1]))
        epoch_key = None if self.seed is None else derived_key(self.seed, keyed.epoch, SAMPLE_KEYS)
        fill(self.source, samples, out, None if epoch_key is None else derived_keys(epoch_key, keyed.keys(ids)))


# Substitutes that are tried for one sample. If none can be read, the source itself has a problem.
ATTEMPTS = 64
# Errors of the system, not of one file.
_OF_THE_SYSTEM = {
    getattr(errno, name) for name in ("EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "ENODEV", "ENXIO", "ESTALE", "ENOTCONN")
}


class BadSample(NamedTuple):
    position: int  # the place of the sample, or of the sample that it was to replace, in the epoch over all ranks
    sample: int
    error: Exception
    lasting: bool  # whether it is bad in all epochs


class ReadAround(NamedTuple):
    samples: tuple[int, ...]  # the samples of the batch
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
    """Frames refer to the memory of slots."""
    chain: BaseException | None = error
    while chain is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__


class AroundBadSamples:
    """Leaves bad samples out, or chooses substitutes. Any thread may call it."""

    def __init__(self, read: SampleReader, policy: Literal["skip", "substitute"], known: Iterable[int] = ()) -> None:
        self._read, self._policy = read, policy
        self._bad: dict[int, Exception] = {sample: SourceError("bad before the run was resumed") for sample in known}
        self._deadly, self._trying = np.empty(0, np.int64), np.zeros(1, np.int64)

    def share(self, deadly: Indices, trying: Indices) -> None:
        """Use memory that processes share: the samples that ended some, and the tried one; from 1 on, 0 is none."""
        self._deadly, self._trying = deadly, trying

    def knows(self, samples: Indices) -> bool:
        for sample in (self._deadly[self._deadly > 0] - 1).tolist():
            self._bad.setdefault(sample, SourceError("reader processes ended while they read it", sample_id=sample))
        return bool(self._bad) and not self._bad.keys().isdisjoint(samples.tolist())

    def choice(self, plan: EpochPlan, step: int) -> tuple[KeyedSamples, list[BadSample]]:
        """The samples of a batch after each was tried by itself, and the bad ones.

        A substitute has a number below 0, since its sample also comes in its own place. Raises an error that is no
        sample's fault, and a SourceError if no substitute can be read.
        """
        bad, found, stand_in = list[BadSample](), list[tuple[int, int]](), self._policy == "substitute"

        def take(position: int, candidates: Iterable[tuple[int, int]]) -> bool:
            """Take the first one that can be read."""
            for sample, number in candidates:
                if (error := self._tried(plan, step, sample, number)) is None:
                    found.append((sample, number))
                    return True
                bad.append(BadSample(position, sample, error, sample in self._bad))
            return False

        def substitutes(position: int, *, alone: bool = False) -> Iterator[tuple[int, int]]:
            for attempt in range(ATTEMPTS):
                yield plan.deck.substitute(position, attempt, alone=alone), -1 - position

        planned, positions = plan.stretch(step, 1)[0], plan.positions(step).tolist()
        keys = planned.keys(self._read.source.ids).tolist()
        for position, *own in zip(positions, zip(planned.samples.tolist(), keys, strict=True), strict=True):
            if not take(position, own) and stand_in:
                stand_in = take(position, substitutes(position))  # without one, the other bad samples are left out
        if found or take(positions[0], substitutes(positions[0], alone=True)):
            samples, numbers = np.array(found, np.int64).T.copy()
            return KeyedSamples(plan.epoch, samples, numbers), bad
        tried = {each.sample: each.error for each in bad}
        ids = self._read.source.ids(np.array(list(tried), np.int64)).tolist()
        raise SourceError(
            f"on_error: none of {ATTEMPTS} samples that were tried can stand in for sample {ids[0]}; bad are "
            f"{few(ids)}; the last: {bad[-1].error}; check the data: python -m lit_async_data inspect --check-all",
            sample_id=ids[0],
            errors=[error for error in tried.values() if isinstance(error, SourceError)],
        ) from bad[-1].error

    def _tried(self, plan: EpochPlan, step: int, sample: int, number: int) -> Exception | None:
        if sample in self._bad:
            return self._bad[sample]
        keyed = KeyedSamples(plan.epoch, np.array([sample], np.int64), np.array([number], np.int64))
        self._trying[0] = sample + 1
        try:
            self._read.check(keyed)
        except Exception as caught:
            if not is_of_a_sample(caught):
                raise
            ids = self._read.source.ids(keyed.samples).tolist()
            error = batch_error(caught, *BatchIndex(plan.epoch, step), ids, None)
            error.sample_id = ids[0] if error.sample_id is None else error.sample_id
            _forget_frames(error)
        else:
            return None
        finally:
            self._trying[0] = 0
        # Another epoch may draw what a transform can take, or an intact part of the sample.
        if self._read.seed is None and not isinstance(error, TransformError):
            self._bad[sample] = error
        return error


# Reads between two checks whether files must be fetched, while none had to be.
LOOKS = 8


class Ahead:
    """Fetches and decodes for later batches. Called by several workers at once."""

    def __init__(self, source: Source, batches: int, shares: Shares) -> None:
        self._source = source
        self._batches = batches
        self._shares = shares
        self._walked: BatchIndex | None = None  # the first batch whose chunks have not fallen due yet
        self._idle = 0
        self._fetching = False

    def __call__(self, schedule: Schedule, keys: Sequence[BatchIndex], unread: BatchIndex, share: Share = ALL) -> None:
        """Prepare the batches after ``keys``, as far as ``share`` has their samples. Raises nothing."""
        # Without a lock: if two workers take the same chunks, the source decodes them once.
        begin, self._walked = min(self._walked or keys[0], unread), unread
        try:
            for chunk_group, samples in due(schedule, begin, unread, self._shares, share):
                self._source.decode(samples, chunk_group)
            self._fetch(schedule, keys, share)
        except Exception as error:  # noqa: BLE001  # an error of the source recurs when the batch is read
            report_once(log, PREPARING, error)

    def _fetch(self, schedule: Schedule, keys: Sequence[BatchIndex], share: Share) -> None:
        if self._idle > 0:
            self._idle -= 1  # without a lock: two workers may count as one
            return
        coming = [schedule.following(keys[-1])]
        while len(coming) < self._batches:
            coming.append(schedule.following(coming[-1]))
        # While everything seems to be in memory, only the last batches are asked for.
        asked = max(len(coming) - len(keys), 0)
        found = self._source.fetch(self._samples(schedule, coming[asked:], share))
        if found and not self._fetching and asked:
            self._source.fetch(self._samples(schedule, coming[:asked], share))
        self._fetching = found
        if not found:
            self._idle = LOOKS

    def _samples(self, schedule: Schedule, keys: Sequence[BatchIndex], share: Share) -> Indices:
        found = []
        for epoch, step in keys:
            plan = schedule.plan(epoch)
            samples = plan.batch(step)
            found.append(samples[self._shares.own(plan, plan.bounds(step)[0], samples, share)])
        return np.concatenate(found)


@dataclasses.dataclass(frozen=True)
class ReaderSetup:
    """The reader, the order and the resources of a pipeline, in this process or in reader processes."""

    read: SampleReader
    schedule: Schedule
    plan: ResourcePlan
    ahead: Ahead | None
    around: AroundBadSamples | None = None
    number: int = 0  # counts the setups of a pipeline
    # Log records below this level are not sent.
    level: int = dataclasses.field(default_factory=lambda: logging.getLogger("lit_async_data").getEffectiveLevel())
