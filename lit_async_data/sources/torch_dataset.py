"""`DatasetSource`: the samples of a map-style dataset of torch, read by its own Python code."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from lit_async_data.batch.spec import Array, BatchSpec, FieldSpec
from lit_async_data.errors import ConfigError, FormatError, ReadError, SourceError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.base import Location, StorageLayout, shown
from lit_async_data.sources.torch_values import ELSEWHERE, UnfitError, as_array, filled_at_once

# Samples are collected up to this many bytes before they are copied: what they take no budget has counted.
TOGETHER_BYTES = 4 * 2**20


class DatasetSource:
    """Samples of a map-style dataset: whatever has ``__len__`` and ``__getitem__`` or ``__getitems__``.

    Sample 0 is read once when the source is built, and says what all of them look like. A sample is one of these:

    * a dict: batches are dicts of its keys;
    * a tuple or a list: batches are tuples, and the keys are ``"0"``, ``"1"``, …; those of a namedtuple are the names
      of its fields, and batches are plain tuples all the same;
    * a single value: batches are tuples of one, and its key is ``"0"``.

    Values are tensors on the CPU, numpy arrays and numbers, and Python's bool (bool), int (int64) and float (float64).
    They come as they are, in native byte order; whole numbers without an axis come as int64. All samples have the
    shapes of sample 0. Another type is cast where numpy calls that safe, so that nothing is lost.

    The dataset's code is called under a lock, by one thread at a time, since few datasets are made for more. Being
    Python, it would keep a training loop from running beside it: with ``workers="auto"`` batches are read by the loop
    itself, when they are wanted. Where the dataset lets go of Python's lock (it reads files, or decodes them in C),
    ``workers=1`` moves it to a thread. As for a DataLoader, samples of a batch may not be made in the same memory, one
    over the other: several are collected before they are copied.

    Args:
        dataset: A `torch.utils.data.Dataset`, or anything that is used like one. ``__getitems__`` is called with the
            numbers of a batch where there is one, else ``__getitem__`` with each.

    Raises:
        ConfigError: ``dataset`` has no length or is empty, or its samples cannot be had by number.
        FormatError: Sample 0 cannot become part of a batch.
        SourceError: The dataset raised an error when it was asked for sample 0.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> source = DatasetSource(TensorDataset(torch.zeros(10, 3, 8, 8), torch.arange(10)))
        >>> len(source), source.spec["0"].shape, source.spec["1"].dtype
        (10, (3, 8, 8), dtype('int64'))
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._length = _length(dataset)
        self._locks: dict[int, threading.Lock] = {}
        try:
            with self._lock:
                first = next(self._asked([0]))
        except ReadError as error:
            said = f"{error}; its first sample is read to learn what batches look like"
            raise SourceError(said, sample_id=0) from error.__cause__
        fields = {key: self._field(key, value) for key, value in _by_key(first).items()}
        if not fields:
            raise FormatError(f"{self.name}[0] holds no value; a sample needs at least one", sample_id=0)
        self._spec = BatchSpec(fields, as_mapping=isinstance(first, Mapping))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_locks": {}}

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return shown(self, self.name)

    @property
    def name(self) -> str:
        """The class of the dataset, for messages."""
        return type(self.dataset).__name__

    @property
    def spec(self) -> BatchSpec:
        """Keys, shapes and dtypes of the fields, as those of sample 0."""
        return self._spec

    @property
    def chunks(self) -> StorageLayout:
        """Each sample lies alone, and takes Python to read."""
        return StorageLayout(reading="python")

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays; see `Source.read_into`.

        Raises:
            IndexError: A sample is not in ``range(len(self))``.
            FormatError: A sample has other keys, shapes or types than sample 0.
            ReadError: The dataset raised an error, which is chained.
        """
        numbers = self._checked(samples)
        most = max(TOGETHER_BYTES // max(self._spec.nbytes, 1), 1)
        # Values are copied under the lock too: a dataset may use the same memory again for what it is asked next.
        with self._lock:
            asked = self._asked(numbers)
            for first in range(0, len(numbers), most):
                some = numbers[first : first + most]
                values = self._by_key(some, asked)
                for key, array in out.items():
                    self._fill(array[first : first + most], key, some, [sample[key] for sample in values])

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """The dataset's class in place of a file, and the samples' numbers in it.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        return [Location(self.name, "/", number) for number in self._checked(ids)]

    def close(self) -> None:
        """Nothing to close: the dataset is yours."""

    @property
    def _lock(self) -> threading.Lock:
        # One for each process: in a fork nobody would let go of a lock that a thread of its parent holds.
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _checked(self, ids: Sequence[int] | Indices) -> list[int]:
        numbers: list[Any] = np.asarray(ids).tolist()
        for number in numbers:
            # A list counts negative numbers from its end, and so do datasets over one.
            if type(number) is not int or not 0 <= number < self._length:
                raise IndexError(f"sample {number!r} of {self._length} in {self.name}")
        return numbers

    # -- the dataset's own code -----------------------------------------------------------------------------------

    def _asked(self, numbers: list[int]) -> Iterator[Any]:
        """The samples as the dataset returns them, one by one where it has no ``__getitems__``."""
        if not numbers:
            return iter(())
        if callable(getattr(self.dataset, "__getitems__", None)):
            return iter(self._many(numbers))
        return map(self._one, numbers)

    def _one(self, number: int) -> Any:
        try:
            return _plain(self.dataset[number])
        except Exception as error:
            raise _failed(f"{self.name}[{number}]", number, error) from error

    def _many(self, numbers: list[int]) -> list[Any]:
        call = f"{self.name}.__getitems__([{few(numbers)}])"
        try:
            found = self.dataset.__getitems__(list(numbers))
            samples = [_plain(sample) for sample in found]
        except Exception as error:
            raise _failed(call, numbers[0], error) from error
        if isinstance(found, Mapping | str) or len(samples) != len(numbers):
            raise FormatError(
                f"{call} returned a {type(found).__name__} of {len(samples)}; it must be a list of as many samples as "
                f"were asked for, {len(numbers)}, in that order",
                sample_id=numbers[0],
            )
        return samples

    # -- what it returned -----------------------------------------------------------------------------------------

    def _by_key(self, numbers: list[int], asked: Iterator[Any]) -> list[Mapping[str, Any]]:
        """The next samples, each with its values by key."""
        keys, found = self._spec.fields.keys(), []
        for number, sample in zip(numbers, asked, strict=False):  # the rest of them are for later
            values = _by_key(sample)
            if values.keys() != keys:
                raise self._other_keys(number, values)
            found.append(values)
        return found

    def _fill(self, array: Array, key: str, numbers: list[int], values: list[Any]) -> None:
        if filled_at_once(array, values):
            return
        for place, (number, value) in enumerate(zip(numbers, values, strict=True)):
            array[place] = self._fitting(number, key, value)

    def _field(self, key: Any, value: Any) -> FieldSpec:
        if not isinstance(key, str):
            raise FormatError(f"{self.name}[0]: the key {key!r} is no text; name the fields of a sample", sample_id=0)
        array = self._array(0, key, value)
        return FieldSpec(array.shape, array.dtype.newbyteorder("="))

    def _array(self, number: int, key: str, value: Any) -> Array:
        try:
            return as_array(value)
        except UnfitError as error:
            raise FormatError(f"{self.name}[{number}], field {key!r}: {error}", sample_id=number) from None

    def _fitting(self, number: int, key: str, value: Any) -> Array:
        """A value as an array of the shape of sample 0, and of a type that casts to that of sample 0."""
        array, field = self._array(number, key, value), self._spec[key]
        if array.shape != field.shape:
            raise FormatError(
                f"{self.name}[{number}], field {key!r}: its shape is {array.shape}, that of sample 0 is {field.shape}; "
                f"pad or crop in the dataset, or else: {ELSEWHERE}",
                sample_id=number,
            )
        if array.dtype != field.dtype and not np.can_cast(array.dtype, field.dtype, "safe"):
            raise FormatError(
                f"{self.name}[{number}], field {key!r}: its type is {array.dtype}, that of sample 0 is {field.dtype}, "
                "which cannot hold all of its values; make all samples of one type in the dataset",
                sample_id=number,
            )
        return array

    def _other_keys(self, number: int, values: Mapping[Any, Any]) -> FormatError:
        return FormatError(
            f"{self.name}[{number}] has the fields {list(values)}, sample 0 has {list(self._spec.fields)}; return "
            "the same ones for every sample",
            sample_id=number,
        )


def _length(dataset: Any) -> int:
    """How many samples there are, ≥ 1."""
    name = type(dataset).__name__
    if isinstance(dataset, type):
        raise ConfigError(f"dataset: {dataset.__name__} is a class; build one of it")
    if isinstance(dataset, IterableDataset):
        raise ConfigError(f"dataset: {name} is an iterable dataset, which has no samples by number; {ELSEWHERE}")
    if not hasattr(dataset, "__getitem__") and not callable(getattr(dataset, "__getitems__", None)):
        raise ConfigError(f"dataset: {name} has no __getitem__, to have its samples by number; {ELSEWHERE}")
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"dataset: {name} has no __len__; give it one that returns the number of its samples")
    try:
        length = len(dataset)
    except Exception as error:
        raise ConfigError(f"dataset: the __len__ of {name} raised {type(error).__name__}: {error}") from error
    if not length:
        raise ConfigError(f"dataset: {name} has no samples; what a batch looks like is found from the first one")
    return length


def _failed(call: str, number: int, cause: Exception) -> ReadError:
    return ReadError(f"{call} raised {type(cause).__name__}: {cause}", sample_id=number, stage="read")


def _plain(sample: Any) -> Any:
    """A mapping of another kind as a dict: some do their work only when a value is asked for."""
    return dict(sample) if isinstance(sample, Mapping) else sample


def _by_key(sample: Any) -> Mapping[Any, Any]:
    if isinstance(sample, dict):
        return sample
    if isinstance(sample, tuple | list):
        return dict(zip(getattr(sample, "_fields", None) or _names(len(sample)), sample, strict=True))
    return {"0": sample}


@functools.cache
def _names(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
