"""Code of users that reads samples: attributes that change between passes, random draws, pickles, digests.

Numbers, text and small arrays are compared by value, other objects by identity. Short containers and the names in a
function are examined; items that a container gains or loses are ignored, since reading may use it as a cache.

`READING` tells code below a loader which epoch its thread reads. This module imports no torch: a program without torch
draws no numbers from it.

Classes and functions of ``__main__``, of a script started by spawn (``__mp_main__``), and of modules loaded by path are
pickled by value.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from lit_async_data.order.permutation import Indices, derived_key, derived_keys

if TYPE_CHECKING:
    import torch as of_torch


PROBES = 2**14  # most values of an array that go into a digest
# Guards cloudpickle's list of modules, which is global. Reentrant: an object may pickle a part of itself.
_LOCK = threading.RLock()
# Limits: values per comparison, items of a container that is examined, elements of an array that is compared by value.
MOST, MOST_ITEMS, MOST_ELEMENTS = 4096, 64, 16
PLAIN = (bool, int, str, bytes, type(None))
CONTAINERS = (list, tuple, dict)
HOLDERS = (types.MethodType, functools.partial)
# Packages whose objects change while they work.
OURS, LIBRARIES = ("lit_async_data",), ("pytorch_lightning", "lightning", "h5py", "zarr")
INSIDE = ("dataset", "inside", "function")  # attributes of this package's objects that are examined
OF_MODULES = ("_modules", "_buffers", "_parameters")  # private attributes of torch's modules that are examined
KEPT = ("_watched", "_reader_in_fork")  # attributes of a source with the state of reading
_GONE = object()
# Separates these keys from the keys of sources, hooks and batches: see `sample_reader.py`.
GLOBAL_KEYS = 6

Path = tuple[Any, ...]  # the names that lead to a value


def probes(length: int, most: int = PROBES) -> Indices:
    """At most ``most`` evenly spaced numbers from 0 to ``length - 1``, both included."""
    return np.arange(length) if length <= most else np.arange(most) * (length - 1) // (most - 1)


def digest(*pieces: str | npt.NDArray[Any] | Iterable[str]) -> str:
    """A short text that almost surely differs if texts or probed values differ."""
    made = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            text = f"{piece.dtype} {piece.shape}"
            made.update(text.encode() + np.ascontiguousarray(piece[probes(len(piece))]).tobytes())
        else:
            texts = [piece] if isinstance(piece, str) else list(piece)
            made.update(repr(texts).encode("utf-8", "surrogatepass"))
    return made.hexdigest()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles by value the classes and functions that another process could not import."""

    def __init__(self, file: Any, buffer_callback: Callable[[Any], object]) -> None:
        super().__init__(file, 5, buffer_callback)
        self._known: set[str] = set()
        self._registered = contextlib.ExitStack()

    def dump(self, obj: Any) -> None:
        with _LOCK, self._registered:
            super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType | types.ModuleType):
            name = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
            if isinstance(name, str) and name not in self._known:
                self._known.add(name)
                listed = cloudpickle.list_registry_pickle_by_value()
                if name in sys.modules and name != "__main__" and not importable(name) and name not in listed:
                    cloudpickle.register_pickle_by_value(module := sys.modules[name])
                    self._registered.callback(cloudpickle.unregister_pickle_by_value, module)
        return super().reducer_override(obj)


def dumps(value: Any, buffer_callback: Callable[[Any], object]) -> bytes:
    """The pickle of a value without its arrays; ``buffer_callback`` gets a `pickle.PickleBuffer` of each."""
    Pickler(memory := io.BytesIO(), buffer_callback).dump(value)
    return memory.getvalue()


def importable(name: str) -> bool:
    """Whether another process with this module path would import the same module by this name."""
    parent, _, _ = name.rpartition(".")
    if parent and not (parent in sys.modules and importable(parent)):
        return False
    spec, path = getattr(sys.modules[name], "__spec__", None), getattr(sys.modules.get(parent), "__path__", None)
    if spec is None or (parent and path is None):  # made by C code of its parent, or by hand
        return bool(parent)
    found = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
    return found is not None and found.origin == spec.origin


def why_not_pickled(value: Any) -> str:
    """The reason why a value cannot be pickled; empty if it can."""
    try:
        dumps(value, [].append)
    except Exception as error:  # noqa: BLE001  # whatever the user's objects raise
        return f"cannot be pickled ({type(error).__name__}: {error})"
    return ""


class Watch:
    """Compares an object with its state at the last look. A copy or pickle of this begins anew."""

    def __init__(self) -> None:
        self._seen: dict[Path, Any] | None = None
        self._of_reading: set[Path] = set()

    def __reduce__(self) -> Any:
        return Watch, ()

    def look(self, value: Any, *, keep: bool = True) -> list[Path]:
        """The places of changes since the last look with ``keep``; none at the first look."""
        now = {path: _mark(part) for path, part in values_in(value)}
        before = now if self._seen is None else self._seen
        if keep:
            self._seen = now
        changed = [path for path in {**before, **now} if before.get(path, _GONE) != now.get(path, _GONE)]
        return [path for path in changed if path not in self._of_reading and not _is_gained(path, before, now)]

    def has_been_read(self, value: Any) -> None:
        """Ignore places that have changed since the last look: reading changes them, as counters and open files."""
        self._of_reading.update(self.look(value))


def values_in(value: Any) -> Iterator[tuple[Path, Any]]:
    """An object and the objects in it, each once, in order of depth."""
    left, known, count = collections.deque[tuple[Path, Any]]([((), value)]), set[int](), 0
    while left and count < MOST:
        path, value = left.popleft()
        count += 1
        yield path, value
        if type(value) not in PLAIN and id(value) not in known:
            known.add(id(value))
            left.extend(((*path, name), part) for name, part in _parts(value))


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    kind = type(value)
    if kind in CONTAINERS:
        items = value.items() if kind is dict else enumerate(value)
        return list(items) if len(value) <= MOST_ITEMS else ()
    if isinstance(value, HOLDERS):
        names = "__self__", "func", "args", "keywords"
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        enclosed = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        used = value.__globals__
        return enclosed + [(name, used[name]) for name in value.__code__.co_names if name in used]
    if isinstance(value, type | types.ModuleType) or _is_of(kind, LIBRARIES):
        return ()
    slots = {name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if name[:2] != "__"}
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    named |= getattr(value, "__dict__", {})
    if _is_of(kind, OURS):
        return [(name, named[name]) for name in INSIDE if name in named]
    # Private names are left out in torch's modules, in classes that extend a source of this package, and in objects
    # that are neither datasets nor transforms, such as events and locks.
    torch = sys.modules.get("torch")
    extends = any(_is_of(each, OURS) and each.__name__ != "Source" for each in kind.__mro__)
    users = callable(value) or hasattr(kind, "__getitem__")
    public = extends or not users or (torch is not None and isinstance(value, torch.nn.Module))
    return [
        (name, part)
        for name, part in named.items()
        if not (name in KEPT or (public and name[:1] == "_" and name not in OF_MODULES))
        and not isinstance(getattr(kind, name, None), functools.cached_property)
    ]


def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    return kind.__module__.partition(".")[0] in packages


def _mark(value: Any) -> Any:
    """Represents a value in comparisons, and keeps it alive, so that no other value gets its `id`."""
    kind, torch = type(value), sys.modules.get("torch")
    if kind in PLAIN:
        return kind, value
    if isinstance(value, HOLDERS):
        return kind  # its parts are compared
    if kind in CONTAINERS:
        return kind, id(value), value
    is_array = isinstance(value, np.ndarray | np.generic)
    if torch is not None and isinstance(value, torch.Tensor):
        is_array = value.device.type == "cpu" and value.layout is torch.strided
    if is_array and value.dtype != object and np.prod(value.shape) <= MOST_ELEMENTS:
        return kind, str(value.dtype), repr(value.tolist())
    return (kind, repr(value)) if kind in (float, complex) else (id(value), value)  # NaN is not equal to itself


def _is_gained(path: Path, before: dict[Path, Any], now: dict[Path, Any]) -> bool:
    if path in before and path in now:
        return False
    there, other = (now, before) if path in now else (before, now)
    while path[:-1] not in other:
        path = path[:-1]
    container = there[path[:-1]]
    return isinstance(container, tuple) and container[0] in CONTAINERS


class _Reading(threading.local):
    epoch: int | None = None  # that the thread reads; None outside of loaders, and in evaluation: its passes are alike
    key: int | None = None  # of the seeds of the global generators, if no other thread draws from them
    drawing: tuple[Indices, Indices] | None = None  # the samples of a read, and the numbers that give their seeds

    @contextlib.contextmanager
    def of(self, epoch: int, seed: int | None, *, alike: bool) -> Iterator[None]:
        self.epoch = None if alike else epoch
        self.key = None if seed is None else derived_key(seed, 0 if alike else epoch, GLOBAL_KEYS)
        try:
            yield
        finally:
            self.epoch = self.key = self.drawing = None  # not the values before, which may be left by an interrupt

    def numbers(self, samples: Indices) -> Indices:
        """The numbers for these samples' seeds; for another array, which a source reads meanwhile, its own values."""
        return self.drawing[1] if self.drawing is not None and self.drawing[0] is samples else samples

    def keys(self, kind: int, numbers: Indices) -> list[int]:
        """A key for each sample or batch; needs `key`."""
        assert self.key is not None
        keys: list[int] = derived_keys(derived_key(self.key, kind), numbers).tolist()
        return keys


READING = _Reading()


def seed_generators(key: int) -> None:
    """Seed the global generators of `random`, numpy and torch (CPU) by a key of 64 bits; takes 8 µs."""
    random.seed(key)
    np.random.seed(key >> 32)  # noqa: NPY002  # other bits than torch's, whose generator is of the same kind
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(key)  # `torch.manual_seed` seeds accelerators, too


def states(device: of_torch.device | None = None) -> dict[str, object]:
    torch: Any = sys.modules.get("torch")
    found: dict[str, object] = {} if torch is None else {"torch": torch.get_rng_state().numpy().tobytes()}
    # As bytes: numpy's state has another form for each kind of generator.
    found["numpy"] = pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002  # the global one is watched
    found["random"] = random.getstate()
    get = None if device is None else getattr(getattr(torch, device.type, None), "get_rng_state", None)
    if device is not None and get is not None:
        state = get() if device.type == "mps" else get(device)
        found[f"torch on {device}"] = state.numpy().tobytes()
    return found


def drawn(before: dict[str, object], after: dict[str, object]) -> list[str]:
    return [name for name, state in before.items() if state != after[name]]


@contextlib.contextmanager
def put_back() -> Iterator[list[str]]:
    """Restore the global generators at the end; yields a list for the names of generators that were drawn from."""
    found: list[str] = []
    before, torch = states(), sys.modules.get("torch")
    kept = torch and torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  # as above
    try:
        yield found
    finally:
        found += drawn(before, states())
        if found:
            if torch is not None:
                torch.set_rng_state(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002
            random.setstate(kept[2])
