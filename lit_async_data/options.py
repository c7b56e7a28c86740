"""`LoaderOptions`: the options of a loader, as a frozen dataclass that validates itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError

# Numbers as an option. Of npt.ArrayLike alone, jsonargparse takes no list, and makes complex numbers of others.
ArrayLike = float | Sequence[Any] | npt.ArrayLike

SHUFFLES = ("none", "chunk", "global", "auto")
Shuffle = Literal["none", "chunk", "global", "auto"]
WORKER_KINDS = ("auto", "thread", "process")
WorkerKind = Literal["auto", "thread", "process"]
ON_ERROR = ("raise", "skip", "substitute")
OnError = Literal["raise", "skip", "substitute"]

# Options of other loaders, mostly of torch.utils.data.DataLoader, and what to do instead.
INSTEAD = {
    "balance": "use weights=Balanced(…), or weights={balanced: …} in a configuration",
    "num_workers": "use workers",
    "prefetch_factor": "use queue_depth (batches ready on the host, over all workers)",
    "pin_memory": "leave it out: slots are pinned by themselves where the device is a GPU",
    "persistent_workers": "leave it out: workers always live on from epoch to epoch",
    "timeout": "use timeout_s",
    "generator": "use seed",
    "sampler": "use shuffle and seed, or weights where it draws by weight",
    "batch_sampler": "use batch_size, shuffle and drop_last, and batch_by for samples of like length",
    "collate_fn": "leave it out: samples are written straight into the batch, which batch_transform can change",
    "multiprocessing_context": "use worker_kind",
    "pin_memory_device": "leave it out: the loader knows its device",
    "worker_init_fn": "leave it out: transforms get their random numbers as rng",
    "in_order": "leave it out: the order is always kept",
    "dataset": "give the source to the loader itself",
}

MAX_WORKERS = 256
MAX_SECONDS = 1e6
MAX_SEED = 2**63 - 1

T = TypeVar("T")


def explains_names(*elsewhere: Mapping[str, str], **required: str) -> Callable[[type[T]], type[T]]:
    """A class whose constructor refuses an unknown name as `check_names` does, in place of Python's bare `TypeError`.

    Args:
        *elsewhere: What to do instead, by names that belong elsewhere.
        **required: What to do without an option that must be given.
    """
    instead = dict(itertools.chain(*(each.items() for each in reversed(elsewhere))))

    def decorated(kind: type[T]) -> type[T]:
        init: Any = kind.__init__
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def checked(self: T, *args: Any, **options: Any) -> None:
            check_names(options, known, instead)
            for name, what in required.items():
                if name not in options:
                    raise ConfigError(f"missing; {what}", name)
            init(self, *args, **options)

        kind.__init__ = checked  # type: ignore[assignment]
        return kind

    return decorated


def check_names(given: Mapping[Any, object], known: list[str], instead: Mapping[str, str] = INSTEAD) -> None:
    """Refuses a name that is no option; the message says what to write instead, or suggests the probable one."""
    import difflib

    for name in given:
        if name in known:
            continue
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} is not the name of an option")
        if name in instead:
            raise ConfigError(f"no such option; {instead[name]}", name)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
        raise ConfigError(f"no such option; {hint}", name)


@dataclasses.dataclass(frozen=True)
class Balanced:
    """Weights with which each class of a field is drawn equally often, for `LoaderOptions`.

    Args:
        field: Key of a field of classes, or of several labels per sample: 1 for each and 0 else, shape (classes,). Then
            none is a class, too. Samples of class −100, which losses ignore, are never drawn.

    Raises:
        ConfigError: It is no key.

    Example:
        >>> LoaderOptions(batch_size=256, weights=Balanced("y")).weights
        Balanced(field='y')
    """

    field: str

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise ConfigError(
                f"{reprlib.repr(self.field)} is not the key of a field to balance; for labels of your own, "
                "give weights=class_weights(labels), from lit_async_data.order.weights",
                "weights",
            )


@explains_names(INSTEAD, batch_size="say how many samples a batch has, for example LoaderOptions(batch_size=64)")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of a loader. Immutable; safe to share between threads.

    Attributes:
        batch_size: Samples per batch and device, ≥ 1. One step of all ranks takes ``batch_size × ranks`` samples.
        shuffle: ``"none"``: as stored. ``"global"``: a new permutation of all samples each epoch. ``"chunk"``: a new
            order of chunks each epoch, with samples mixed from ``shuffle_chunks`` of them at a time, so that each chunk
            is decoded once per epoch. ``"auto"`` (or True): ``"chunk"`` if compressed chunks hold several samples,
            otherwise ``"global"``. False is ``"none"``. None: ``"auto"`` for the training stage of an
            `AsyncDataModule` and where ``weights`` draw, else ``"none"``, as in a ``DataLoader``. The evaluation stages
            of a DataModule do not inherit it; their own options can name it.
        shuffle_chunks: Chunks that are mixed at a time, ≥ 1. A larger number mixes better and takes more memory: twice
            as many decoded chunks. Changes the order.
        seed: Key of every permutation and of all random numbers of transforms, draws and substitutes, 0 to 2**63 − 1.
            Workers and queue depth never change the order of a seed. None: that of the place from which the loader
            resumes; else that of Lightning's ``seed_everything``, in an `AsyncDataModule` of rank 0; else 0. An
            `AsyncLoader` that you build with several ranks takes 0, since ranks may have seeds of their own.
        drop_last: Drop the samples that do not fill a step of all ranks.
        pad_last: Fill batches that are short up to ``batch_size``, or with ``batch_by`` to the size of their bucket, by
            repeating their last sample, so that all shapes are known to ``torch.compile`` and CUDA graphs. Each batch
            then has a field ``mask``, bool of shape (B,), which is False for what was filled in. ``batch_transform``
            gets batches without it. Evaluation fills nothing, unless ``val_loader`` or another says so.
        workers: Reader threads, or reader processes if Python code reads or transforms samples in them. 0 reads in the
            caller's thread, so that a debugger stops there. ``"auto"`` starts with 1. If samples are decoded (by 4
            threads at most) or the workers are processes, it adds one while the loop waits for batches, as long as each
            helps; never more than the cores that this rank may use. If Python code reads the samples (`DatasetSource`)
            or transforms them, and no reader process can, 0: such a thread would hold the GIL (without the GIL 1).
        worker_kind: Where workers run. ``"thread"``: in this process. ``"process"``: in reader processes, which take
            nothing of this process's GIL; batches come through shared memory. ``"auto"``: in processes if samples are
            decoded, read under a lock, read from a file each, or read or transformed by Python code, and a core is
            free; in threads if reading is a copy, and on Python without the GIL.
        queue_depth: Slots being filled or ready on the host, ≥ 1; there is at least one for each worker, and one more
            holds the batch in use. A slot holds one batch, or several small ones that are read together: up to 12 MiB,
            and as many as can be read in 0.02 s.
        cache_bytes: Bytes of decoded chunks to cache for the loader's lifetime. A dataset that fits is decoded once.
        memory_budget: Most bytes that this loader may hold: slots, decoded chunks and cache. None: a
            quarter of the memory of this machine or container, shared by the ranks of the node.
        timeout_s: Seconds without a batch after which the loader writes the stacks of all threads, also of reader
            processes, to standard error, and raises `StalledError`.
        warn_after_s: Seconds without a batch after which a warning says what each worker is at; said again whenever the
            wait has doubled.
        restarts: How often a batch during which a reader process died is read again, by a new process, before it is a
            `WorkerError` in its place; 0: at the first death. The order never changes.
        on_error: What becomes of a sample that is missing or damaged, or on which ``sample_transform`` fails.
            ``"raise"``: an error in place of its batch. ``"skip"``: its batch has a sample less, and the epoch as many
            steps. ``"substitute"``: another sample of the epoch stands in for it; in the evaluation stages of an
            `AsyncDataModule`, it is left out. Ranks, workers and a resume do not change which. What is no sample's
            fault, such as a disk that is gone, is an error under each of them.
        max_bad: Bad samples of an epoch, on this rank, above which the run ends with an error: a number, or a share of
            the rank's samples (at least 1) as a float.
        quarantine: File to which each bad sample is appended once, as a line of JSON. None: the folder of the Trainer's
            log has one for each rank; without a Trainer they are only counted.
        weights: Draws samples with replacement, in proportion to these numbers: an array with one for each sample, the
            key of a field of numbers, or ``Balanced("y")`` (in a configuration ``{balanced: y}``), with which all
            classes of field ``y`` are equally frequent. Training only.
        epoch_size: Samples per epoch with ``weights``; None: as many as the source has.
        batch_by: Puts samples of like length together: the key of a field of variable length, or of one with the
            length of each sample, or an array of these. Fields of variable length are then padded to the bucket of
            their batch instead of to the longest sample. All epochs and all ranks have the same number of batches.
            Not for prediction, which keeps the order of the dataset, unless ``predict_loader`` has it too.
        batch_elements: Most elements (such as tokens) of a batch with ``batch_by``, padding included. None: only
            ``batch_size`` limits it.
        buckets: With ``batch_by``, the lengths to which samples are padded, ascending; or how many there are, which are
            chosen for the least padding.
        augment: Whether training draws random numbers, differently in each epoch: a source that can, such as a random
            part of each image (``resize="random_crop"``) instead of the middle; and for transforms as ``rng``, which is
            None otherwise. Evaluation stages of an `AsyncDataModule` never draw any.
        return_indices: Add the sample numbers (int64) to each batch, as key ``index`` or last element.

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
    shuffle: Shuffle | bool | None = None
    shuffle_chunks: int = 64
    seed: int | None = None
    drop_last: bool = False
    pad_last: bool = False
    workers: int | Literal["auto"] = "auto"
    worker_kind: WorkerKind = "auto"
    queue_depth: int = 4
    cache_bytes: int = 0
    memory_budget: int | None = None
    timeout_s: float = 300.0
    warn_after_s: float = 30.0
    restarts: int = 1
    on_error: OnError = "raise"
    max_bad: int | float = 0.001  # jsonargparse makes floats of whole numbers for float
    quarantine: str | None = None
    # Not compared: comparing arrays gives no single truth value.
    weights: Balanced | str | npt.NDArray[Any] | Sequence[float] | None = dataclasses.field(default=None, compare=False)
    epoch_size: int | None = None
    batch_by: str | npt.NDArray[Any] | Sequence[int] | None = dataclasses.field(default=None, compare=False)
    batch_elements: int | None = None
    buckets: int | Sequence[int] = 16
    augment: bool = True
    return_indices: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", "auto" if self.shuffle else "none")
        if self.shuffle not in (*SHUFFLES, None):
            raise ConfigError(f"{self.shuffle!r} is not one of {', '.join(SHUFFLES)}, true, false, null", "shuffle")
        one_of("worker_kind", self.worker_kind, WORKER_KINDS)
        if self.workers != "auto":
            self._check_int("workers", 0, MAX_WORKERS, also="'auto'")
        self._check_int("batch_size", 1)
        self._check_int("queue_depth", 1)
        self._check_int("shuffle_chunks", 1)
        self._check_int("cache_bytes", 0, unit="bytes")
        if self.seed is not None:
            self._check_int("seed", 0, MAX_SEED, also="null")
        if self.memory_budget is not None:
            self._check_int("memory_budget", 1, also="null", unit="bytes")
        if self.epoch_size is not None:
            self._check_int("epoch_size", 1, also="null")
        self._check_drawing()
        self._check_lengths()
        self._check_bad_samples()
        for name in ("drop_last", "pad_last", "augment", "return_indices"):
            flag(name, getattr(self, name))
        self._check_int("restarts", 0)
        for name in ("timeout_s", "warn_after_s"):
            seconds: Any = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
                what = f"{seconds!r} is not a number of seconds above 0, and at most {MAX_SECONDS:.0f}"
                raise ConfigError(what, name)

    def _check_lengths(self) -> None:
        bounds: Any = self.buckets
        if not isinstance(bounds, int):
            bounds = np.asarray(bounds)
            if bounds.ndim != 1 or bounds.dtype.kind not in "iu" or not bounds.size or (np.diff(bounds) <= 0).any():
                raise ConfigError(f"{self.buckets!r} is neither a number nor ascending lengths", "buckets")
            object.__setattr__(self, "buckets", tuple(bounds.tolist()))
        else:
            self._check_int("buckets", 1)
        if self.batch_elements is not None:
            self._check_int("batch_elements", 1, also="null")
        if self.batch_by is None:
            for name in ("batch_elements", "buckets"):
                if (given := getattr(self, name)) != getattr(LoaderOptions, name):
                    what = f"{given!r} needs batch_by, which says what the length of a sample is"
                    raise ConfigError(what, name)
            return
        if not _is_key_or_numbers(self.batch_by):
            what = f"{self.batch_by!r} is neither the key of a field nor a length for each sample"
            raise ConfigError(what, "batch_by")
        if self.weights is not None:
            raise ConfigError("cannot be combined with batch_by; leave it out", "weights")

    def _check_bad_samples(self) -> None:
        most: Any = self.max_bad
        one_of("on_error", self.on_error, ON_ERROR)
        whole = isinstance(most, int) and not isinstance(most, bool) and most >= 0
        if not whole and not (isinstance(most, float) and 0 <= most <= 1):
            what = f"{most!r} is neither a number of samples, such as 10, nor a share from 0.0 to 1.0"
            raise ConfigError(what, "max_bad")
        if not (self.quarantine is None or (isinstance(self.quarantine, str | os.PathLike) and self.quarantine)):
            raise ConfigError(f"{self.quarantine!r} is not the path of a file", "quarantine")

    def _check_drawing(self) -> None:
        given: Any = self.weights
        if isinstance(given, Mapping) and given.keys() == {"balanced"}:
            object.__setattr__(self, "weights", Balanced(given["balanced"]))
        elif not (given is None or isinstance(given, Balanced) or _is_key_or_numbers(given)):
            what = f"{given!r} is neither Balanced(…), the key of a field nor a number for each sample"
            raise ConfigError(what, "weights")
        if not self.drawn and self.epoch_size is not None:
            raise ConfigError(
                "needs weights, which draw samples with replacement; for part of an epoch use the "
                "Trainer's limit_train_batches",
                "epoch_size",
            )
        if self.drawn and self.shuffle == "none":
            raise ConfigError("they draw samples at random, which shuffle=none forbids; leave shuffle out", "weights")

    @property
    def drawn(self) -> bool:
        """Whether samples are drawn with replacement."""
        return self.weights is not None

    def _check_int(self, name: str, least: int, most: int | None = None, *, also: str = "", unit: str = "") -> None:
        value: Any = getattr(self, name)
        is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        number = int(value) if is_int else least - 1
        if number < least or (most is not None and number > most):
            span = f"from {least} on" if most is None else f"from {least} to {most}"
            expected = f"a whole number{' of ' + unit if unit else ''} {span}{' or ' + also if also else ''}"
            raise ConfigError(f"{value!r} is not {expected}", name)
        object.__setattr__(self, name, number)

    @classmethod
    def of(cls, given: LoaderOptions | Mapping[str, Any] | None, where: str = "") -> LoaderOptions:
        """Returns options from options or from a mapping of option names to values.

        Args:
            given: Options or a mapping; None is an error, since ``batch_size`` has no default.
            where: Prefix of option names in messages, such as ``"loader."``.

        Raises:
            ConfigError: As in the constructor.
        """
        if isinstance(given, LoaderOptions):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                f'{given!r} is neither LoaderOptions nor a mapping; write {{"batch_size": 64}}',
                where.rstrip(".") or "options",
            )
        values = dict(given or {})
        try:
            check_names(values, [field.name for field in dataclasses.fields(cls)])  # before **, which needs str keys
            return cls(**values)
        except ConfigError as error:
            raise error.within(where) from None

    def merged(self, overrides: Mapping[str, Any] | None, where: str = "") -> LoaderOptions:
        """Returns these options with some replaced.

        Args:
            overrides: New values by option name, or None for no change. A value of None keeps the option.
            where: As in `of`.

        Raises:
            ConfigError: As in the constructor.
        """
        changes = {name: value for name, value in (overrides or {}).items() if value is not None}
        current = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return LoaderOptions.of(current | changes, where)

    def as_stored(self) -> LoaderOptions:
        """Returns these options with each sample once, in storage order, and nothing random."""
        return dataclasses.replace(
            self, shuffle="none", weights=None, epoch_size=None, augment=False, on_error=self._without_substitutes
        )

    @property
    def _without_substitutes(self) -> OnError:
        return "skip" if self.on_error == "substitute" else self.on_error

    def for_evaluation(self) -> LoaderOptions:
        """Returns these options for evaluation: in storage order, nothing dropped, filled or random."""
        return dataclasses.replace(self.as_stored(), drop_last=False, pad_last=False)

    def evaluated(self) -> LoaderOptions:
        """Returns these options for a loader that is used in evaluation: the same order, and nothing else random."""
        return dataclasses.replace(self, augment=False, on_error=self._without_substitutes)


_HOOKS = "use sample_transform (one sample), batch_transform (a batch on the host) or device_transform (on the device)"
# What to do with the names of a loader's options where they are given to what holds a loader; and in a source.
OF_LOADER = {
    **{name: f"in LoaderOptions, {text}" for name, text in INSTEAD.items()},
    **{each.name: f"give LoaderOptions({each.name}=…)" for each in dataclasses.fields(LoaderOptions)},
    **dict.fromkeys(("transform", "transforms", "preprocess", "augmentation"), _HOOKS),
}
OF_SOURCE = {name: f"a loader does this, not a source: {text}" for name, text in OF_LOADER.items()}


def lightning_seed() -> int:
    """That of ``seed_everything``, which Lightning leaves in the environment; 0 if it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return min(int(seed), MAX_SEED) if seed.isdecimal() else 0


def _is_key_or_numbers(given: object) -> bool:
    if isinstance(given, str):
        return bool(given)
    return isinstance(given, Sequence | np.ndarray) and np.ndim(given) == 1 and len(given) > 0


def one_of(name: str, given: object, known: Iterable[str]) -> None:
    if given not in (known := tuple(known)):
        raise ConfigError(f"{given!r} is not one of {', '.join(known)}", name)


def flag(name: str, given: object) -> None:
    if not isinstance(given, bool):
        raise ConfigError(f"{given!r} is not true or false", name)


def whole(name: str, given: Any, least: int, most: int | None = None) -> int:
    is_whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    number = int(given) if is_whole else least - 1
    if number < least or (most is not None and number > most):
        raise ConfigError(
            f"{given!r} is not a whole number from {least} {'on' if most is None else f'to {most}'}", name
        )
    return number
