"""`DatasetSource`: the samples of a map-style torch dataset, read by its Python code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import math
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from lit_async_data.batch.spec import Array, BatchSpec, FieldSpec
from lit_async_data.errors import ChangedError, ConfigError, FormatError, ReadError, SourceError, few
from lit_async_data.options import OF_SOURCE, explains_names
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import UnfitError, as_array
from lit_async_data.sources.contract.source import Source, check_range
from lit_async_data.sources.contract.user_code import (
    READING,
    Path,
    Pickler,
    Watch,
    put_back,
    seed_generators,
    values_in,
)

log = logging.getLogger(__name__)

COLLECTED_BYTES = 4 * 2**20  # of samples that are collected before they are copied; no memory budget counts these
MOST_BYTES = 2**28  # of a pickle that is kept; arrays and tensors are not copied, and do not count
GRAIN = 32768  # elements from which on torch copies in its thread pool, which the training step needs
ALTERNATIVE = "prefetched(loader) takes a DataLoader of your own for such batches"
# Separate the random numbers of samples and of ``set_epoch``; other keys follow in `engine/hooks.py`.
SAMPLE_KEYS, EPOCH_KEYS = 0, 1
_LABELS = "classes", "targets", "target_transform"  # attributes


@explains_names(OF_SOURCE)
class DatasetSource(Source):
    """Samples of a map-style dataset: any object with ``__len__`` and ``__getitem__`` or ``__getitems__``.

    The constructor reads sample 0 to learn the fields. A sample is one of these:

    * a dict: batches are dicts with its keys;
    * a tuple or a list: batches are tuples with the keys ``"0"``, ``"1"``, …; a namedtuple gives its field names as
      keys, and batches are plain tuples too;
    * a single value: batches are tuples of one, with the key ``"0"``.

    Values are CPU tensors, numpy arrays and numbers, and Python's bool (bool), int (int64) and float (float64). They
    keep their dtype, in native byte order; whole-number scalars become int64. All samples must have the shapes of
    sample 0. Other dtypes are cast if numpy calls the cast safe, so no value changes.

    One thread at a time calls the dataset's code, under a lock. With ``workers="auto"``, a reader process does, or the
    loop itself if the dataset cannot be pickled; for code that releases the GIL, ``worker_kind="thread"`` with
    ``workers=1`` moves it to a thread. As for a DataLoader, the dataset must not return the same memory for two samples
    of a batch.

    Attributes that you set between two passes, also in a dataset inside, hold from the next pass on. The source calls a
    method ``set_epoch`` with the epoch of the next samples, until you set the attributes that it sets. In a reader
    process, the global random generators are seeded before each sample. See ``docs/data/any_loader.md``.

    Args:
        dataset: A `torch.utils.data.Dataset` or an object with the same interface. ``__getitems__`` is called with the
            sample numbers of a batch if it exists, otherwise ``__getitem__`` with each number.

    Raises:
        ConfigError: ``dataset`` has no length, is empty, or is not indexable by sample number.
        FormatError: Sample 0 cannot become part of a batch.
        SourceError: The dataset raised an error for sample 0.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> source = DatasetSource(TensorDataset(torch.zeros(10, 3, 8, 8), torch.arange(10)))
        >>> len(source), source.spec["0"].shape, source.spec["1"].dtype
        (10, (3, 8, 8), dtype('int64'))
        >>> source
        <DatasetSource of 10 samples from TensorDataset: 0 float32 (3, 8, 8), 1 int64; read by Python code>
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._length = _length(dataset)
        self._locks: dict[int, threading.Lock] = {}
        self._changes, self._is_driven = 0, False
        self._epoch: int | None = None
        self._of_epoch = set[Path]()  # where ``set_epoch`` changes the dataset
        self._followers: list[Any] | None = None
        unread = Unread(dataset)
        self._watch = Watch()
        self._watch.look(dataset)
        try:
            with self._lock, put_back():
                first = next(self._returned([0], np.zeros(1, np.int64)))
        except ReadError as error:
            message = f"{error}; the source reads this sample to learn the fields, so it must be readable"
            raise SourceError(message, sample_id=0) from error.__cause__
        self._unread = unread.if_needed(dataset)
        self._watch.has_been_read(dataset)
        fields = {key: self._field(key, value) for key, value in _by_key(first).items()}
        whole = [key for key, field in fields.items() if field.dtype == np.int64 and not field.shape]
        if len(whole) == 1:
            fields[whole[0]] = FieldSpec((), np.dtype(np.int64), meanings=tuple(enumerate(_class_names(dataset))))
        if not fields:
            raise FormatError(f"{self.name}[0] holds no value; return at least one", sample_id=0)
        self._spec = BatchSpec(fields, as_mapping=isinstance(first, Mapping))

    def __getstate__(self) -> dict[str, Any]:
        dataset = self.dataset if self._unread is None else self._unread.with_changes(self.dataset)
        return {**vars(self), "dataset": dataset, "_unread": None, "_locks": {}, "_followers": None, "_epoch": None}

    def __len__(self) -> int:
        return self._length

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """As `Source.read_into`; an error that the dataset raises is the cause of a `ReadError`."""
        check_range(samples, self)  # lists, and datasets over lists, would count negative numbers from the end
        numbers = samples.tolist()
        block = max(COLLECTED_BYTES // max(self._spec.nbytes, 1), 1)
        # Values are copied under the lock, too: the next call of the dataset may reuse their memory.
        with self._lock:
            self._follow_epoch()
            returned = self._returned(numbers, READING.numbers(samples))
            for first in range(0, len(numbers), block):
                chosen = numbers[first : first + block]
                values = self._by_key(chosen, returned)
                for key, array in out.items():
                    self._fill(array[first : first + block], key, chosen, [sample[key] for sample in values])

    @property
    def _lock(self) -> threading.Lock:
        # One lock per process: in a forked child, a thread of the parent could hold the lock forever.
        return self._locks.setdefault(os.getpid(), threading.Lock())

    # -- a dataset that changes -------------------------------------------------------------------------------------

    @property
    def runs_user_code(self) -> bool:
        return True

    def count_changes(self) -> int:
        """How often the dataset was found changed; a `ChangedError` if its length is another one now."""
        with self._lock:
            self._look()
            if self._changes and (length := len(self.dataset)) != self._length:
                what = f"{self.name} has {length} samples now, and had {self._length} when the source was built; build "
                what += "a new source and a new loader (with Lightning: reload_dataloaders_every_n_epochs=1)"
                raise ChangedError(what)
        return self._changes

    def _look(self) -> None:
        if not (paths := self._watch.look(self.dataset)):
            return
        self._changes += 1
        followers, self._followers = self._found_followers(), None
        named = {path for path in paths if "epoch" in str(path[-1:])}
        if followers and not self._is_driven and (self._of_epoch & set(paths) if self._of_epoch else named):
            self._is_driven = True
            log.info("%s: set_epoch is yours to call from now on, since you have set its epoch", self.name)

    def _follow_epoch(self) -> None:
        """Call ``set_epoch`` of the dataset if the thread reads another epoch than the last one did."""
        epoch = READING.epoch
        if epoch in (None, self._epoch) or self._is_driven or not (followers := self._found_followers()):
            return
        self._look()  # the user's changes are not those of `set_epoch`
        if READING.key is not None:
            seed_generators(*READING.keys(EPOCH_KEYS, np.array([epoch])))
        for each in () if self._is_driven else followers:
            try:
                each.set_epoch(epoch)
            except Exception as error:
                raise _read_error(f"{type(each).__name__}.set_epoch({epoch})", 0, error) from error
        self._epoch = epoch
        self._of_epoch.update(self._watch.look(self.dataset))

    def _found_followers(self) -> list[Any]:
        """The outermost datasets with a method ``set_epoch``."""
        if self._followers is None:
            found: dict[Path, Any] = {}
            for path, value in values_in(self.dataset):
                readable = any(hasattr(type(value), name) for name in ("__getitem__", "__getitems__"))
                inside = any(path[: len(each)] == each for each in found)
                if readable and not inside and callable(getattr(value, "set_epoch", None)):
                    found[path] = value
            self._followers = list(found.values())
        return self._followers

    # -- calls of the dataset's code ---------------------------------------------------------------------------------

    def _returned(self, numbers: list[int], drawn: Indices) -> Iterator[Any]:
        if not numbers:
            return iter(())
        keys = None if READING.key is None else READING.keys(SAMPLE_KEYS, drawn)
        if callable(getattr(self.dataset, "__getitems__", None)):
            if keys is not None:
                seed_generators(keys[0])
            return iter(self._get_items(numbers))
        return map(self._get_item, numbers) if keys is None else map(self._get_item, numbers, keys)

    def _get_item(self, number: int, key: int | None = None) -> Any:
        if key is not None:
            seed_generators(key)
        try:
            return _plain(self.dataset[number])
        except Exception as error:
            raise _read_error(f"{self.name}[{number}]", number, error) from error

    def _get_items(self, numbers: list[int]) -> list[Any]:
        call = f"{self.name}.__getitems__([{few(numbers)}])"
        try:
            returned = self.dataset.__getitems__(list(numbers))
            samples = [_plain(sample) for sample in returned]
        except Exception as error:
            raise _read_error(call, numbers[0], error) from error
        if isinstance(returned, Mapping | str) or len(samples) != len(numbers):
            what = f"returned a {type(returned).__name__} of {len(samples)} for {len(numbers)} sample numbers"
            ways = "return a list of one sample per number, in their order"
            raise FormatError(f"{call} {what}; {ways}", sample_id=numbers[0])
        return samples

    # -- returned samples -----------------------------------------------------------------------------------------

    def _by_key(self, numbers: list[int], returned: Iterator[Any]) -> list[Mapping[str, Any]]:
        keys, samples = self._spec.fields.keys(), []
        for number, sample in zip(numbers, returned, strict=False):  # takes no further samples
            values = _by_key(sample)
            if values.keys() != keys:
                what = "is None" if sample is None else f"has the fields {list(values)}"
                what += f", but sample 0 has {list(keys)}; return the same fields for all"
                raise FormatError(f"{self.name}[{number}] {what}", sample_id=number)
            samples.append(values)
        return samples

    def _fill(self, array: Array, key: str, numbers: list[int], values: list[Any]) -> None:
        if _fill_from_equal(array, values):
            return
        for place, (number, value) in enumerate(zip(numbers, values, strict=True)):
            array[place] = self._checked_array(number, key, value)

    def _field(self, key: Any, value: Any) -> FieldSpec:
        if not isinstance(key, str):
            raise FormatError(f"{self.name}[0]: the key {key!r} is not text; name each field by text", sample_id=0)
        array = self._array(0, key, value)
        return FieldSpec(array.shape, array.dtype.newbyteorder("="))

    def _array(self, number: int, key: str, value: Any) -> Array:
        try:
            array = as_array(value)
            return array if array.ndim or array.dtype.kind not in "iu" else as_array(array.item())
        except UnfitError as error:
            raise self._unfit(number, key, f"{error}, or: {ALTERNATIVE}") from None

    def _unfit(self, number: int, key: str, what: str) -> FormatError:
        return FormatError(f"{self.name}[{number}], field {key!r}: {what}", sample_id=number)

    def _checked_array(self, number: int, key: str, value: Any) -> Array:
        array, field = self._array(number, key, value), self._spec[key]
        if array.shape != field.shape:
            what = f"shape {array.shape}, but sample 0 has shape {field.shape}"
            raise self._unfit(number, key, f"{what}; pad or crop in the dataset, or: {ALTERNATIVE}")
        if array.dtype != field.dtype and not np.can_cast(array.dtype, field.dtype, "safe"):
            what = f"dtype {array.dtype}, but sample 0 has {field.dtype}, which cannot hold all values of it"
            raise self._unfit(number, key, f"{what}; return one dtype for all samples")
        return array


def _length(dataset: Any) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, type):
        raise ConfigError(f"{dataset.__name__} is a class; pass an instance", "dataset")
    if isinstance(dataset, Source):
        raise ConfigError(f"{name} is a source already; give it to the loader itself", "dataset")
    if isinstance(dataset, IterableDataset):
        raise ConfigError(f"{name} is an iterable dataset, which cannot be indexed; {ALTERNATIVE}", "dataset")
    if not hasattr(dataset, "__getitem__") and not callable(getattr(dataset, "__getitems__", None)):
        raise ConfigError(f"{name} has no __getitem__, so it cannot be indexed; {ALTERNATIVE}", "dataset")
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"{name} has no __len__; add one that returns the number of samples", "dataset")
    if not (length := len(dataset)):
        raise ConfigError(f"{name} is empty; it needs at least one sample", "dataset")
    return length


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The ``classes`` of a dataset like torchvision's, if its ``targets`` are their numbers."""
    names, targets, change = (inspect.getattr_static(dataset, name, None) for name in _LABELS)
    numbers = targets.tolist() if isinstance(targets, torch.Tensor | np.ndarray) else targets
    if change or not (isinstance(names, list | tuple) and isinstance(numbers, list) and len(numbers) == len(dataset)):
        return ()
    named = [{*map(type, names)}, {*map(type, numbers)}] == [{str}, {int}] and {*numbers} <= {*range(len(names))}
    return tuple(names) if named else ()


def _read_error(call: str, number: int, cause: Exception) -> ReadError:
    return ReadError(f"{call} raised {type(cause).__name__}: {cause}", sample_id=number, stage="read")


def _plain(sample: Any) -> Any:
    """A mapping as a dict, since some mappings compute values when these are accessed."""
    return dict(sample) if isinstance(sample, Mapping) else sample


def _by_key(sample: Any) -> Mapping[Any, Any]:
    if isinstance(sample, dict):
        return sample
    if isinstance(sample, tuple | list):
        names = getattr(sample, "_fields", None) or map(str, range(len(sample)))
        return dict(zip(names, sample, strict=True))
    return {"0": sample}


_EQUAL = {np.dtype(np.int64): {int}, np.dtype(np.float64): {float}}  # numbers of Python that become these


def _fill_from_equal(array: Array, values: list[Any]) -> bool:
    """Copy values at once, if all have the dtype and shape of the array; returns whether they have."""
    kinds = set(map(type, values))
    if kinds == {torch.Tensor}:
        return _stack(torch.from_numpy(array), values)
    if array.ndim > 1 or kinds != _EQUAL.get(array.dtype):
        return False
    try:
        array[...] = values
    except OverflowError:
        return False
    return True


def _stack(target: torch.Tensor, tensors: list[Any]) -> bool:
    dtype, shape = target.dtype, target.shape[1:]
    if math.prod(shape) >= GRAIN:
        return False
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_cpu or tensor.layout != torch.strided:
            return False
    with torch.no_grad():
        torch.stack(tensors, out=target)
    return True


# -- a dataset before its first sample is read, for other processes ----------------------------------------------------


class Unread:
    """A pickle of a dataset that is not read yet: many open files when they are read, and then cannot be pickled."""

    def __init__(self, dataset: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._data = _pickled(dataset, self._buffers)
        self._after = Watch()

    def if_needed(self, dataset: Any) -> Self | None:
        """This pickle, if the dataset cannot be pickled any more; else None."""
        self._after.look(dataset)
        return self if self._data and _pickled(dataset, []) is None else None

    def with_changes(self, dataset: Any) -> Any:
        """The unread dataset with the attributes that the user has set since."""
        unread = pickle.loads(self._data or b"", buffers=self._buffers)  # noqa: S301  # of this process
        for *names, last in self._after.look(dataset, keep=False):
            # Parts that cannot be set, as in a tuple, stay unchanged.
            with contextlib.suppress(AttributeError, LookupError, TypeError):
                value = _part(functools.reduce(_part, names, dataset), last)
                there = functools.reduce(_part, names, unread)
                if _pickled(value, []) is None:
                    continue
                if isinstance(there, list | dict):
                    there[last] = value
                else:
                    setattr(there, last, value)
        return unread


def _part(value: Any, name: Any) -> Any:
    return value[name] if isinstance(value, list | tuple | dict) else getattr(value, name)


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise OverflowError
        return super().write(data)


def _shared(tensor: torch.Tensor) -> Any:
    """Reduces a tensor to a numpy array, which is pickled without a copy, if numpy can hold it."""
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):
        reduced: Any = tensor
        return reduced.__reduce_ex__(5)


_table: Any = Pickler.dispatch_table


class _Pickler(Pickler):
    dispatch_table: ClassVar[Any] = _table.new_child({torch.Tensor: _shared})


def _pickled(value: Any, buffers: list[pickle.PickleBuffer]) -> bytes | None:
    """A pickle; empty if it has more than `MOST_BYTES`, None if the value cannot be pickled."""
    memory = _Limited()
    try:
        _Pickler(memory, buffers.append).dump(value)
    except OverflowError:
        return b""
    except Exception:  # noqa: BLE001  # whatever the user's objects raise
        return None
    return memory.getvalue()
