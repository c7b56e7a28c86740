"""`LoaderOptions`: what can be chosen about loading, as a frozen dataclass that validates itself."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError

SHUFFLES = ("none", "chunk", "global", "auto")
Shuffle = Literal["none", "chunk", "global", "auto"]

# Names that people bring along from torch.utils.data.DataLoader, and what they mean here.
TORCH_NAMES = {
    "num_workers": "use workers",
    "prefetch_factor": "use queue_depth (batches ready on the host, over all workers)",
    "pin_memory": "leave it out: slots are pinned by themselves where the device is a GPU",
    "persistent_workers": "leave it out: workers always live on from epoch to epoch",
    "timeout": "use timeout_s",
    "generator": "use seed",
    "sampler": "use shuffle and seed, or balance or weights where it draws by weight",
    "batch_sampler": "use batch_size, shuffle and drop_last",
    "collate_fn": "leave it out: a source writes its samples straight into the batch",
    "multiprocessing_context": "leave it out: workers are threads that hold no lock",
    "pin_memory_device": "leave it out: the loader knows its device",
    "worker_init_fn": "leave it out: workers run no code of yours",
    "in_order": "leave it out: the order is always kept",
    "dataset": "give the source to the loader itself",
}

MAX_WORKERS = 256
MAX_SECONDS = 1e6
MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How batches are made and kept ready. Immutable, so it may be shared between threads.

    Attributes:
        batch_size: Samples per batch and device, ≥ 1. Under several ranks one step takes
            ``batch_size × ranks`` samples.
        shuffle: ``"none"``: as stored. ``"global"``: a fresh permutation of all samples each epoch. ``"chunk"``: a
            fresh order of chunks, dealt from ``shuffle_chunks`` of them at a time, so that each is decoded once per
            epoch. ``"auto"`` (or True): ``"chunk"`` where chunks of several samples are compressed, else
            ``"global"``. False is ``"none"``.
        shuffle_chunks: Chunks that samples are mixed from at a time, ≥ 1. More mix better and take more memory:
            twice as many decoded chunks. Part of the order.
        seed: Key of every permutation, 0 to 2**63 − 1. The same seed gives the same order, whatever the
            other options are.
        drop_last: Drop the samples that do not fill a whole step of all ranks.
        workers: Reader threads. 0 reads in the caller's thread, so that a debugger stops there. ``"auto"``
            is one per core, of at most 4 and shared by the ranks of the node, where chunks are decoded; 0 where samples
            are read by Python code (`DatasetSource`), which in a thread would keep the training loop from running; else
            1: one thread gathers at 0.6 of the speed of memory, and h5py's lock lets a second only wait
            (``benchmarks/first.py``, ``benchmarks/hdf5.py``).
        queue_depth: Slots of memory being filled or ready on the host, ≥ 1; there is one more. A slot holds a
            batch, or several small ones (up to 12 MiB) where reading is no more than a copy.
        cache_bytes: Bytes of decoded chunks that are kept for good: a dataset that fits is decoded once.
        memory_budget: Bytes this loader may hold: slots, decoded chunks, files read ahead and cache. None: a quarter of
            the memory this machine or its container has, shared by the ranks of the node.
        timeout_s: Seconds without a batch after which `StalledError` is raised.
        balance: Key of a field of classes. Samples are drawn, with replacement, so that each class comes as often as
            any other. Training only.
        weights: Key of a field of numbers, or an array with one for each sample: samples are drawn, with replacement,
            in proportion to them. Training only.
        epoch_size: Samples of an epoch where they are drawn so; None: as many as there are.
        augment: Whether what a source can draw is drawn, another one in each epoch: a random part of each image
            (``resize="random_crop"``), or else the middle. ``"auto"``: where the order is random, too. Never in
            evaluation.
        return_indices: Add the samples' numbers (int64) to each batch, as key ``index`` or last element.

    Raises:
        ConfigError: A name is unknown or a value is wrong; the message begins with the name.

    Example:
        >>> LoaderOptions(batch_size=256, shuffle=True).shuffle
        'auto'
        >>> LoaderOptions(batch_size=0)
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: batch_size: 0 is not a whole number from 1 on
    """

    batch_size: int
    shuffle: Shuffle | bool = "auto"
    shuffle_chunks: int = 64
    seed: int = 0
    drop_last: bool = False
    workers: int | Literal["auto"] = "auto"
    queue_depth: int = 4
    cache_bytes: int = 0
    memory_budget: int | None = None
    timeout_s: float = 300.0
    balance: str | None = None
    # Not compared: arrays have no single answer.
    weights: str | npt.NDArray[Any] | Sequence[float] | None = dataclasses.field(default=None, compare=False)
    epoch_size: int | None = None
    augment: bool | Literal["auto"] = "auto"
    return_indices: bool = False

    def __new__(cls, **values: object) -> Self:
        # Here rather than in __init__, which dataclass writes: names are checked before it sees them.
        check_names(values, [field.name for field in dataclasses.fields(cls)])
        if "batch_size" not in values:
            raise ConfigError(
                "batch_size: missing; say how many samples a batch has, as in LoaderOptions(batch_size=64)"
            )
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        # Without it, a copy or pickle would be made by a call without names.
        return (), {"batch_size": self.batch_size}

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", "auto" if self.shuffle else "none")
        if self.shuffle not in SHUFFLES:
            raise ConfigError(f"shuffle: {self.shuffle!r} is not one of {', '.join(SHUFFLES)}, true, false")
        if self.workers != "auto":
            self._whole("workers", 0, MAX_WORKERS, also="'auto'")
        self._whole("batch_size", 1)
        self._whole("queue_depth", 1)
        self._whole("shuffle_chunks", 1)
        self._whole("cache_bytes", 0, unit="bytes")
        self._whole("seed", 0, MAX_SEED)
        if self.memory_budget is not None:
            self._whole("memory_budget", 1, also="null", unit="bytes")
        if self.epoch_size is not None:
            self._whole("epoch_size", 1, also="null")
        self._check_drawing()
        if self.augment != "auto" and not isinstance(self.augment, bool):
            raise ConfigError(f"augment: {self.augment!r} is not true, false or 'auto'")
        for name in ("drop_last", "return_indices"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not true or false")
        seconds: Any = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
            raise ConfigError(
                f"timeout_s: {seconds!r} is not a number of seconds above 0, and at most {MAX_SECONDS:.0f}"
            )

    def _check_drawing(self) -> None:
        if self.balance is not None and not (isinstance(self.balance, str) and self.balance):
            own = isinstance(self.balance, Sequence | np.ndarray) and not isinstance(self.balance, str)
            hint = "; for labels of your own, give weights=class_weights(labels), from lit_async_data.order.weights"
            raise ConfigError(f"balance: {reprlib.repr(self.balance)} is not the key of a field{hint if own else ''}")
        if self.weights is not None and not _is_key_or_numbers(self.weights):
            raise ConfigError(f"weights: {self.weights!r} is neither the key of a field nor a number for each sample")
        if self.balance is not None and self.weights is not None:
            raise ConfigError("weights: not together with balance, which gives each sample a weight; give one of them")
        if not self.drawn and self.epoch_size is not None:
            raise ConfigError(
                "epoch_size: only with balance or weights, where samples are drawn with replacement; for part of an "
                "epoch use the Trainer's limit_train_batches"
            )
        if self.drawn and self.shuffle == "none":
            name = "weights" if self.balance is None else "balance"
            raise ConfigError(f"{name}: samples are drawn at random, which shuffle=none forbids; leave shuffle out")

    @property
    def drawn(self) -> bool:
        """Whether samples are drawn with replacement."""
        return self.balance is not None or self.weights is not None

    @property
    def augments(self) -> bool:
        """Whether what can be drawn is."""
        return self.shuffle != "none" if self.augment == "auto" else self.augment

    def _whole(self, name: str, least: int, most: int | None = None, *, also: str = "", unit: str = "") -> None:
        value: Any = getattr(self, name)
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        number = int(value) if whole else least - 1
        if number < least or (most is not None and number > most):
            span = f"from {least} on" if most is None else f"from {least} to {most}"
            wanted = f"a whole number{' of ' + unit if unit else ''} {span}{' or ' + also if also else ''}"
            raise ConfigError(f"{name}: {value!r} is not {wanted}")
        object.__setattr__(self, name, number)

    @classmethod
    def of(cls, given: LoaderOptions | Mapping[str, Any] | None, where: str = "") -> LoaderOptions:
        """Options from options or from a mapping of their names.

        Args:
            given: Either; nothing is an error, since ``batch_size`` has no default.
            where: Put before the names in messages: ``"loader."``.

        Raises:
            ConfigError: As in the constructor.
        """
        if isinstance(given, LoaderOptions):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f"{where.rstrip('.') or 'options'}: {given!r} is neither LoaderOptions nor a mapping")
        values = dict(given or {})
        try:
            check_names(values, [field.name for field in dataclasses.fields(cls)])  # some may be no text
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None

    def merged(self, overrides: Mapping[str, Any] | None, where: str = "") -> LoaderOptions:
        """These options with some replaced; a value of None inherits.

        Args:
            overrides: New values by option name, or None for no change.
            where: As in `of`.

        Raises:
            ConfigError: As in the constructor.
        """
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return LoaderOptions.of(own | given, where)

    def as_stored(self) -> LoaderOptions:
        """These options with the samples as they are stored, each once."""
        return dataclasses.replace(self, shuffle="none", balance=None, weights=None, epoch_size=None)

    def for_evaluation(self) -> LoaderOptions:
        """These options as validation, test and prediction use them: as stored, nothing dropped, nothing drawn."""
        return dataclasses.replace(self.as_stored(), drop_last=False, augment=False)


def _is_key_or_numbers(given: object) -> bool:
    if isinstance(given, str):
        return bool(given)
    return isinstance(given, Sequence | np.ndarray) and np.ndim(given) == 1 and len(given) > 0


def check_names(given: Mapping[Any, object], known: list[str]) -> None:
    """Refuse names that are not options, with a pointer to what was probably meant.

    Raises:
        ConfigError: Names the first unknown option.
    """
    for name in given:
        if name in known:
            continue
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} is not the name of an option")
        if name in TORCH_NAMES:
            raise ConfigError(f"{name}: no such option; {TORCH_NAMES[name]}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"{name}: no such option; {hint}")


def non_negative_int(name: str, given: int) -> int:
    """A whole number from 0 on.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ConfigError(f"{name}: {given!r} is not a whole number from 0 on")
    return given
