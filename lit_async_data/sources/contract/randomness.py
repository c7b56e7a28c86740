"""The global random generators of a process: which of them have changed, and how a reader process seeds them.

`READING` tells code below a loader, at whatever depth, which epoch its thread reads. Imports no torch: where nobody
has, nobody draws from it.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_async_data.order.permutation import Indices, derived_key, derived_keys

if TYPE_CHECKING:
    import torch as of_torch

# Separates these keys from those of sources, hooks and batches: see `sample_reader.py`.
GLOBAL_KEYS = 6


class _Reading(threading.local):
    """What the calling thread reads.

    Attributes:
        epoch: The epoch; None for no epoch of a loader, and in evaluation, whose passes are alike.
        key: What the seeds of the global generators follow from, in a thread that has them for itself; else None.
    """

    epoch: int | None = None
    key: int | None = None

    @contextlib.contextmanager
    def of(self, epoch: int, seed: int | None, *, alike: bool) -> Iterator[None]:
        self.epoch = None if alike else epoch
        self.key = None if seed is None else derived_key(seed, 0 if alike else epoch, GLOBAL_KEYS)
        try:
            yield
        finally:
            self.epoch = self.key = None  # not as before: an interrupt may have left that

    def keys(self, kind: int, numbers: Indices) -> list[int]:
        """A key for each sample, or batch, of a kind, for `seed_generators`; where there is a `key`."""
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
    """The states of the global generators of torch, numpy and `random`, and that of a device, by name."""
    torch: Any = sys.modules.get("torch")
    found: dict[str, object] = {} if torch is None else {"torch": torch.get_rng_state().numpy().tobytes()}
    # As bytes: numpy's state has another form for each kind of generator.
    found["numpy"] = pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002  # it is the global one that is watched
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
    """Put the global generators back when the ``with`` block ends; yields the names of those that it drew from."""
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
