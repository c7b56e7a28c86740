"""`LoaderOptions`: the options of a loader, as a frozen dataclass that validates itself."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError

# Numbers as an option. For npt.ArrayLike alone, jsonargparse refuses lists and turns single numbers into complex ones.
ArrayLike = float | Sequence[Any] | npt.ArrayLike

Shuffle = Literal["none", "chunk", "global", "auto"]
WorkerKind = Literal["auto", "thread", "process"]
OnError = Literal["raise", "skip", "substitute"]

# Options of other loaders, mostly of torch.utils.data.DataLoader, and their replacements here.
INSTEAD = {
    "balance": "use weights=Balanced(…), or weights={balanced: …} in a configuration",
    "num_workers": "use workers",
    "prefetch_factor": "use queue_depth (batches ready on the host, over all workers)",
    "pin_memory": "leave it out: the loader pins its slots if the device is a GPU",
    "persistent_workers": "leave it out: workers always live on from epoch to epoch",
    "timeout": "use timeout_s",
    "generator": "use seed",
    "sampler": "use shuffle and seed, or weights if the sampler draws by weight",
    "batch_sampler": "use batch_size, shuffle and drop_last, and batch_by for samples of like length",
    "collate_fn": "leave it out: samples are written straight into the batch, which batch_transform can change",
    "multiprocessing_context": "use worker_kind",
    "pin_memory_device": "leave it out: the loader knows its device",
    "in_order": "leave it out: the order is always kept",
    "worker_init_fn": "leave it out: transforms get their random numbers as rng",
    "dataset": "give the source to the loader itself",
}

MAX_WORKERS = 256
MAX_SECONDS = 1e6
MAX_SEED = 2**63 - 1

T = TypeVar("T")


def explains_names(*elsewhere: Mapping[str, str], **required: str) -> Callable[[T], T]:
    """Decorate a class or function, so that unknown, missing or later set options raise an error with advice."""
    instead = dict(itertools.chain(*(each.items() for each in reversed(elsewhere))))

    def decorated(kind: Any) -> Any:
        is_class = issubclass(type(kind), type)
        called = kind.__init__ if is_class else kind
        parameters = list(inspect.signature(called).parameters.values())[is_class:]
        known = [each.name for each in parameters]
        by_name = [f"{each.name}=" for each in parameters if each.kind == each.KEYWORD_ONLY]
        is_open = is_class and kind.__setattr__ is object.__setattr__

        @functools.wraps(called)
        def checked(*args: Any, **options: Any) -> Any:
            check_names(options, known, instead)
            for name, what in required.items():
                if name not in options:
                    raise ConfigError(f"missing; {what}", name)
            if len(args) - is_class > len(known) - len(by_name):
                takes = "further arguments by name: " + ", ".join(by_name[:5]) + ", …" * (len(by_name) > 5)
                one = "[…]" if "Sequence" in str(parameters[0].annotation) else "…"
                takes = takes if by_name else f"only one argument, as in {kind.__name__}({one})"
                raise ConfigError(f"{kind.__name__} takes {takes}")
            made = called(*args, **options)
            if is_open and type(args[0]) is kind:
                vars(args[0])["_is_built"] = True
            return made

        def set_attribute(self: Any, name: str, value: object) -> None:
            if "_is_built" in vars(self) and (name in known or name in instead) and not hasattr(self, name):
                raise ConfigError(f"cannot be set in {kind.__name__}; {instead.get(name, 'build another one')}", name)
            object.__setattr__(self, name, value)

        if not is_class:
            return checked
        kind.__init__ = checked
        kind.__setattr__ = set_attribute if is_open else kind.__setattr__
        return kind

    return decorated


def check_names(given: Mapping[Any, object], known: list[str], instead: Mapping[str, str] = INSTEAD) -> None:
    """Refuses unknown option names; the message names the replacement or the most similar option."""
    import difflib

    for name in given:
        if name in known:
            continue
        if not isinstance(name, str):
            raise ConfigError(f"{name!r} is not the name of an option")
        if name in instead:
            raise ConfigError(f"no such option; {instead[name]}", name)
        near = difflib.get_close_matches(name, [*known, *instead], n=1)
        hint = f"did you mean {near[0]}? {instead.get(near[0], '')}" if near else f"choose from {', '.join(known)}"
        raise ConfigError(f"no such option; {hint.rstrip()}", name)


@contextlib.contextmanager
def within(prefix: str) -> Iterator[None]:
    """Prefix the option that a `ConfigError` names, such as by ``fields.x.``."""
    try:
        yield
    except ConfigError as error:
        raise error.within(prefix) from None


@explains_names()
@dataclasses.dataclass(frozen=True)
class Balanced:
    """Weights with which each class of a field is drawn equally often, for `LoaderOptions`.

    Args:
        field: Key of a field of classes; or of a field of several labels per sample, shape (classes,), 1 for each label
            that a sample has and 0 for the others: then samples without a label form one more class. Samples of class
            −100, which losses ignore, are never drawn.

    Raises:
        ConfigError: ``field`` is not a key.

    Example:
        >>> LoaderOptions(batch_size=256, weights=Balanced("y")).weights
        Balanced(field='y')
    """

    field: str

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            what = f"{reprlib.repr(self.field)} is not the key of a field to balance; for labels of your own, give "
            raise ConfigError(f"{what}weights=class_weights(labels), from lit_async_data.order.weights", "weights")


@explains_names(INSTEAD, batch_size="say how many samples a batch has, for example LoaderOptions(batch_size=64)")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The options of a loader. Immutable; safe to share between threads.

    Attributes:
        batch_size: Samples per batch and device, ≥ 1. One step of all ranks takes ``batch_size × ranks`` samples.
        shuffle: ``"none"`` (or False): storage order. ``"global"``: a new permutation of all samples each epoch.
            ``"chunk"``: a new order of chunks each epoch, which mixes samples of ``shuffle_chunks`` chunks at a time
            and decodes each chunk once, or once in each reader process with a ``batch_transform``. ``"auto"`` (or
            True): ``"chunk"`` if compressed chunks hold several samples or HDF5 files are remote, else ``"global"``.
            None: ``"auto"`` in the training stage of an `AsyncDataModule` and with ``weights``, else ``"none"``.
            Evaluation stages of a DataModule do not inherit this option; their own options can set it.
        shuffle_chunks: Chunks that are mixed at a time, ≥ 1. More mix better, and take the memory of twice as many
            decoded chunks. Changes the order.
        seed: Key of every permutation and of all random numbers of transforms, draws and substitutes, 0 to 2**63 − 1.
            None: the seed of the checkpoint from which the loader resumes; else of Lightning's ``seed_everything`` (on
            rank 0, in an `AsyncDataModule`); else 0. An `AsyncLoader` that you build with several ranks uses 0.
        drop_last: Drop the samples that do not fill a step of all ranks.
        pad_last: Fill short batches to ``batch_size``, or with ``batch_by`` to the size of their bucket, by repeating
            their last sample, so that ``torch.compile`` and CUDA graphs know all shapes. Each batch then has a field
            ``mask``, bool of shape (B,), False for the repeated samples; ``batch_transform`` gets batches without it.
            Evaluation fills no batch, unless its own options (``val_loader``, …) say so.
        workers: Number of reader threads, or of reader processes if Python code reads or transforms samples. 0 reads in
            the caller's thread, so that a debugger stops there. ``"auto"`` starts with 1. If samples are decoded (by at
            most 4 threads) or the workers are processes, it adds workers while the loop waits and each one helps, up to
            the number of cores of this rank. It uses 0 if Python code reads (`DatasetSource`) or transforms the samples
            and no reader process can, because a thread would hold the GIL (1 on Python without the GIL).
        worker_kind: Where workers run. ``"thread"``: in this process. ``"process"``: in reader processes, which do not
            take this process's GIL and pass batches through shared memory. ``"auto"``: in processes if samples are
            decoded, read under a lock, read from one file each, or read or transformed by Python code, and a core is
            free; in threads if reading is a copy, and on Python without the GIL.
        queue_depth: Slots being filled or ready on the host, ≥ 1; one for each worker at least, and one more for the
            batch in use. A slot holds one batch, or small ones that are read together: up to 12 MiB, and as many as can
            be read in 0.02 s.
        cache_bytes: Bytes of decoded chunks to cache for the loader's lifetime. A dataset that fits is decoded once.
            With a ``batch_transform``, each reader process has an equal part, and decodes all chunks that it needs.
        memory_budget: Most bytes of slots, decoded chunks and cache. None: a quarter of the memory of this machine or
            container, shared by the ranks of the node.
        timeout_s: Seconds without a batch after which the loader writes the stacks of all threads and reader processes
            to standard error, and raises `StalledError`.
        warn_after_s: Seconds without a batch after which a warning says what each worker does; again as they double.
        restarts: How many times a new process reads a batch again after a reader process died while reading it; then
            a `WorkerError` takes its place. The order never changes.
        on_error: What happens to a sample that is missing or damaged, or on which ``sample_transform`` fails.
            ``"raise"``: an error takes the place of its batch. ``"skip"``: its batch has one sample less; the number of
            steps stays. ``"substitute"``: another sample of the epoch replaces it, the same one for any number of ranks
            and workers and after a resume; evaluation stages of an `AsyncDataModule` skip it instead. Faults of
            no single sample, such as a lost disk, always raise an error.
        max_bad: Bad samples per epoch on this rank above which the run ends with an error: a number, or a share of the
            rank's samples as a float (at least 1 sample).
        quarantine: File to which each bad sample is appended once, as a line of JSON. None: one file for each rank in
            the folder of the Trainer's log; without a Trainer, bad samples are only counted.
        weights: Draws samples with replacement, in proportion to these numbers: an array with one number per sample,
            the key of a field of numbers, or ``Balanced("y")`` (in a configuration ``{balanced: y}``), which draws all
            classes of field ``y`` equally often. Training only.
        epoch_size: Samples per epoch with ``weights``; None: as many as the source has.
        batch_by: Puts samples of like length into one batch, padded to the length of its bucket instead of the longest
            sample (``Field(ragged="concat")`` is not padded): the key of a field of variable length, the key of a field
            of lengths, or an array of lengths. All epochs and ranks have the same number of batches. Prediction keeps
            the order of the dataset instead, unless ``predict_loader`` sets this option, too.
        batch_elements: Most elements (such as tokens) of a batch with ``batch_by``, padding included. None: only
            ``batch_size`` limits it.
        buckets: With ``batch_by``, the lengths to which samples are padded, ascending; or their number, and the loader
            chooses them for the least padding.
        augment: Augment during training, differently in each epoch: draws of the source, such as random crops
            (``resize="random_crop"``; else the middle of each image), and an ``rng`` for transforms (else None).
            Evaluation stages of an `AsyncDataModule` never augment.
        return_indices: Add the sample numbers (int64) to each batch, as key ``index`` or last element.

    Raises:
        ConfigError: An option is unknown or its value is wrong; the message begins with its name.

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
        if self.shuffle not in (*(known := get_args(Shuffle)), None):
            raise ConfigError(f"{self.shuffle!r} is not one of {', '.join(known)}, true, false, null", "shuffle")
        one_of("worker_kind", self.worker_kind, get_args(WorkerKind))
        if self.workers != "auto":
            self._check_int("workers", 0, MAX_WORKERS, also="'auto'")
        for name in ("batch_size", "queue_depth", "shuffle_chunks"):
            self._check_int(name, 1)
        self._check_int("restarts", 0)
        self._check_int("cache_bytes", 0, unit="bytes")
        self._check_int("seed", 0, MAX_SEED, also="null")
        self._check_int("memory_budget", 1, also="null", unit="bytes")
        self._check_int("epoch_size", 1, also="null")
        self._check_drawing()
        self._check_lengths()
        self._check_bad_samples()
        for name in ("drop_last", "pad_last", "augment", "return_indices"):
            flag(name, getattr(self, name))
        for name in ("timeout_s", "warn_after_s"):
            seconds: Any = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
                raise ConfigError(f"{seconds!r} is not a number of seconds above 0 and up to {MAX_SECONDS:.0f}", name)

    def _check_lengths(self) -> None:
        if isinstance(self.buckets, int):
            self._check_int("buckets", 1)
        else:
            bounds = np.asarray(self.buckets)
            if bounds.ndim != 1 or bounds.dtype.kind not in "iu" or not bounds.size or (np.diff(bounds) <= 0).any():
                raise ConfigError(f"{self.buckets!r} is neither a number nor ascending lengths", "buckets")
            object.__setattr__(self, "buckets", tuple(bounds.tolist()))
        self._check_int("batch_elements", 1, also="null")
        if self.batch_by is None:
            for name in ("batch_elements", "buckets"):
                if (given := getattr(self, name)) != getattr(LoaderOptions, name):
                    raise ConfigError(f"{given!r} needs batch_by, which gives the length of each sample", name)
            return
        if not _is_key_or_numbers(self.batch_by):
            what = f"{self.batch_by!r} is neither the key of a field nor a length for each sample"
            raise ConfigError(what, "batch_by")
        if self.weights is not None:
            raise ConfigError("cannot be combined with batch_by; leave it out", "weights")

    def _check_bad_samples(self) -> None:
        most: Any = self.max_bad
        one_of("on_error", self.on_error, get_args(OnError))
        whole = isinstance(most, int) and not isinstance(most, bool) and most >= 0
        if not whole and not (isinstance(most, float) and 0 <= most <= 1):
            raise ConfigError(f"{most!r} is neither a number of samples nor a share from 0.0 to 1.0", "max_bad")
        if not (self.quarantine is None or (isinstance(self.quarantine, str | os.PathLike) and self.quarantine)):
            raise ConfigError(f"{self.quarantine!r} is not the path of a file", "quarantine")

    def _check_drawing(self) -> None:
        given: Any = self.weights
        if isinstance(given, Mapping) and given.keys() == {"balanced"}:
            object.__setattr__(self, "weights", Balanced(given["balanced"]))
        elif isinstance(given, list | tuple) and any(isinstance(n, Balanced | Mapping | np.ndarray) for n in given):
            what = "a list is one number per sample; multiply weights: class_weights(labels) * numbers, the first from "
            raise ConfigError(f"{what}lit_async_data.order.weights", "weights")
        elif not (given is None or isinstance(given, Balanced) or _is_key_or_numbers(given)):
            what = f"{given!r} is neither the key of a field, {{balanced: KEY}} (in Python Balanced(KEY)) nor a number "
            raise ConfigError(f"{what}for each sample", "weights")
        if not self.drawn and self.epoch_size is not None:
            raise ConfigError("needs weights; for part of an epoch use the Trainer's limit_train_batches", "epoch_size")
        if self.drawn and self.shuffle == "none":
            raise ConfigError("they draw samples at random, which shuffle=none forbids; leave shuffle out", "weights")

    @property
    def drawn(self) -> bool:
        """Whether samples are drawn with replacement."""
        return self.weights is not None

    def _check_int(self, name: str, least: int, most: int | None = None, *, also: str = "", unit: str = "") -> None:
        value: Any = getattr(self, name)
        if value is not None or also != "null":
            object.__setattr__(self, name, whole(name, value, least, most, also=also, unit=unit))

    @classmethod
    def of(cls, given: LoaderOptions | Mapping[str, Any] | None, where: str = "") -> LoaderOptions:
        """Returns options given as such, or by name. ``where`` stands before names in errors: ``"loader."``."""
        if isinstance(given, LoaderOptions):
            return given
        option = where.rstrip(".") or "options"
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(f'{given!r} is neither LoaderOptions nor a mapping; write {{"batch_size": 64}}', option)
        values = dict(given or {})
        with within(where):
            check_names(values, [field.name for field in dataclasses.fields(cls)])  # before **, which needs str keys
            return cls(**values)

    def merged(self, overrides: Mapping[str, Any] | None, where: str = "") -> LoaderOptions:
        """Returns these options with others in their place, by name; None keeps an option. ``where`` is as in `of`."""
        changes = {name: value for name, value in (overrides or {}).items() if value is not None}
        current = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return LoaderOptions.of(current | changes, where)

    def as_stored(self) -> LoaderOptions:
        """Returns these options for reading each sample once, in storage order, without random numbers."""
        return dataclasses.replace(self.evaluated(), shuffle="none", weights=None, epoch_size=None)

    def for_evaluation(self) -> LoaderOptions:
        """Returns these options for evaluation: as stored, without dropping, filling and random numbers."""
        return dataclasses.replace(self.as_stored(), drop_last=False, pad_last=False)

    def evaluated(self) -> LoaderOptions:
        """Returns these options in the same order, but without other random numbers, for a loader in evaluation."""
        on_error: OnError = "skip" if self.on_error == "substitute" else self.on_error
        return dataclasses.replace(self, augment=False, on_error=on_error)


_HOOKS = "use sample_transform (one sample), batch_transform (a batch on the host) or device_transform (on the device)"
# Advice for options of a loader that are given to an object with loaders, and to a source.
OF_LOADER = {
    **{name: f"in LoaderOptions, {text}" for name, text in INSTEAD.items()},
    **{each.name: f"give LoaderOptions({each.name}=…)" for each in dataclasses.fields(LoaderOptions)},
    **dict.fromkeys(("transform", "transforms", "preprocess", "augmentation"), _HOOKS),
}
OF_SOURCE = {name: f"a loader does this, not a source: {text}" for name, text in OF_LOADER.items()}


def lightning_seed() -> int:
    """The seed of ``seed_everything``, which Lightning leaves in the environment; 0 if it was not called."""
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


def whole(name: str, given: Any, least: int, most: int | None = None, *, also: str = "", unit: str = "") -> int:
    is_whole = isinstance(given, numbers.Integral) and not isinstance(given, bool)
    number = int(given) if is_whole else least - 1
    if number < least or (most is not None and number > most):
        of, end = f" of {unit}" if unit else "", "on" if most is None else f"to {most}"
        others = f" or {also}" if also else ""
        raise ConfigError(f"{given!r} is not a whole number{of} from {least} {end}{others}", name)
    return number
