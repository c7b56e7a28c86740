"""The states of the global random generators of a process, and which of them have changed."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator

import numpy as np
import torch


def states(device: torch.device | None = None) -> dict[str, object]:
    """The states of the global generators of torch, numpy and `random`, and that of a device, by name."""
    found: dict[str, object] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        # As bytes: numpy's state has another form for each kind of generator.
        "numpy": pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002  # it is the global generator that is watched
        "random": random.getstate(),
    }
    get = getattr(getattr(torch, "cpu" if device is None else device.type, None), "get_rng_state", None)
    if device is not None and get is not None:
        state: torch.Tensor = get() if device.type == "mps" else get(device)
        found[f"torch on {device}"] = state.numpy().tobytes()
    return found


def drawn(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names of the generators whose state has changed."""
    return [name for name, state in before.items() if state != after[name]]


@contextlib.contextmanager
def put_back() -> Iterator[list[str]]:
    """Put the global generators back when the ``with`` block ends; yields the names of those that it drew from."""
    found: list[str] = []
    before = states()
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002  # as above
    try:
        yield found
    finally:
        found += drawn(before, states())
        if found:
            torch.set_rng_state(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002
            random.setstate(kept[2])
