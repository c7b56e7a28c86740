"""Memory that a loader may take; pinned memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_async_data import system
from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import MemoryBudgetError

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

# The share of the machine's memory that one loader may take by default.
DEFAULT_SHARE = 0.25


def allocated(nbytes: int, *, pinned: bool) -> Bytes:
    """Memory for one slot: uint8, page-aligned, not touched yet; a warning is logged if it cannot be pinned."""
    if pinned:
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            _say_pageable(nbytes, str(error))
    # An anonymous map rather than np.empty: its memory returns to the system at once.
    # Private, so that a forked child cannot write to it.
    try:
        return np.frombuffer(system.private_memory(nbytes), np.uint8)
    except OSError as error:
        raise MemoryBudgetError(
            f"the system refuses {readable(nbytes)} for a slot ({error.strerror}); set a smaller "
            "batch_size or queue_depth, or a higher limit (ulimit -v)",
            "memory_budget",
        ) from error


def pinned_bytes(nbytes: int) -> int:
    """Bytes that torch pins for a request: the next power of two."""
    return 1 << (nbytes - 1).bit_length()


def register(memory: Bytes, device: torch.device) -> None:
    """Pin memory for a CUDA device until the array is freed; a warning is logged if that fails."""
    address = memory.ctypes.data
    if code := _called(device, "cudaHostRegister", address, memory.nbytes, 0):
        _say_pageable(memory.nbytes, f"CUDA error {code}")
    else:
        weakref.finalize(memory, _unregister, device, address, os.getpid()).atexit = False


def _unregister(device: torch.device, address: int, process: int) -> None:
    if os.getpid() == process:  # a fork has the array, and no CUDA
        _called(device, "cudaHostUnregister", address)


def _called(device: torch.device, name: str, *arguments: int) -> int:
    """The error code of a call of the CUDA runtime; 0 for success."""
    import torch

    with torch.cuda.device(device):  # CUDA would open a context on the current device, of some hundred MB
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(getattr(runtime, name)(*arguments)):
            # CUDA keeps the error until the next kernel is launched, where torch raises it: so one is launched here.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code


@functools.cache
def _say_pageable(nbytes: int, why: str) -> None:  # once, and not for each slot
    log.warning("pinning %d bytes failed, copies to the device will be slower: %s", nbytes, why)


def pinned(value: Any) -> Any:
    """A pinned copy; the object itself if it has no ``pin_memory``, or cannot be pinned."""
    try:
        there = value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value
    except RuntimeError as error:
        log.debug("pinning a %s failed, its copy to the device will be slower: %s", type(value).__name__, error)
        return value
    return value if there is None else there  # it was pinned in place


@dataclasses.dataclass(frozen=True)
class Budget:
    slots: int  # slots before the first batch: to be filled, filled, and one for the batch handed out
    slot_bytes: int  # bytes of one slot
    limit: int  # the most bytes that the loader may hold
    decoded: int = 0  # bytes of decoded chunks that are in use
    cache: int = 0  # bytes of decoded chunks that are kept for good
    scratch: int = 0  # bytes of all workers for samples that are yet to be transformed or copied to a slot

    @property
    def total(self) -> int:
        return self.slots * self.slot_bytes + self._beside

    @property
    def _beside(self) -> int:
        return self.decoded + self.cache + self.scratch

    @property
    def most_slots(self) -> int:
        return (self.limit - self._beside) // self.slot_bytes

    @property
    def _parts(self) -> str:
        named = {"decoded": self.decoded, "cache": self.cache, "scratch": self.scratch}
        parts = [f"{readable(nbytes)} {name}" for name, nbytes in named.items() if nbytes]
        return " + ".join([f"{self.slots} slots of {readable(self.slot_bytes)}", *parts])

    def check(self) -> None:
        if self.total > self.limit:
            smaller = ["batch_size or queue_depth"] + ["shuffle_chunks"] * (self.decoded > 0)
            smaller += ["cache_bytes"] * (self.cache > 0)
            raise MemoryBudgetError(
                f"{self._parts} need {self.total} bytes ({readable(self.total)}), over the budget of "
                f"{self.limit} ({readable(self.limit)}); set a smaller {', '.join(smaller)}, or raise it",
                "memory_budget",
            )

    def __str__(self) -> str:
        return f"{self._parts} = {readable(self.total)}, of at most {readable(self.limit)}"


def default_budget(ranks: int | None = None) -> int:
    return int(DEFAULT_SHARE * system.memory() / system.ranks_here(ranks))


def readable(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
