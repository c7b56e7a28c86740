"""Where slots live: pageable or pinned memory; and `Budget`, how much of it there may be.

The only module that knows about pinning.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import MemoryBudgetError

log = logging.getLogger(__name__)

# The part of the machine's memory that the loaders of one process may take unless told otherwise, per loader.
DEFAULT_SHARE = 0.25


def allocated(nbytes: int, *, pinned: bool) -> Bytes:
    """Memory for one slot, page-aligned, not touched yet.

    Args:
        nbytes: Its size.
        pinned: Lock it in place, so that a GPU can copy from it on its own. Where that fails it is pageable, and a
            warning says so.

    Returns:
        A uint8 array; the memory goes when the last array made from it does.
    """
    if pinned:
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            log.warning("%d bytes could not be pinned, copies to the device will be slower: %s", nbytes, error)
    # An anonymous map rather than np.empty: it goes back to the system at once when it is dropped.
    # Private, so that a child made by fork cannot write to it.
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def pinned(value: Any) -> Any:
    """What an object's own ``pin_memory`` makes of it; the object itself, where it has none or cannot be pinned."""
    try:
        there = value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value
    except RuntimeError as error:
        log.debug("a %s could not be pinned, its copy to the device will be slower: %s", type(value).__name__, error)
        return value
    return value if there is None else there  # one that pins itself in place


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a loader will hold, against what it may.

    Attributes:
        slots: Slots that are allocated before the first batch.
        slot_bytes: Bytes of one.
        decoded: Bytes of decoded chunks that are held between batches.
        cache: Bytes of decoded chunks that are kept for good.
        fetched: Bytes of files that are read ahead where that takes time, at most.
        limit: Bytes that the loader may hold in all.

    Example:
        >>> str(Budget(slots=5, slot_bytes=2**20, limit=2**30))
        '5 slots of 1.0 MiB = 5.0 MiB, of at most 1.0 GiB'
        >>> str(Budget(slots=5, slot_bytes=2**20, decoded=2**24, cache=2**28, limit=2**30))
        '5 slots of 1.0 MiB + 16.0 MiB decoded + 256.0 MiB cache = 277.0 MiB, of at most 1.0 GiB'
    """

    slots: int
    slot_bytes: int
    limit: int
    decoded: int = 0
    cache: int = 0
    fetched: int = 0

    @property
    def total(self) -> int:
        """Bytes that are held from the first batch on."""
        return self.slots * self.slot_bytes + self._beside

    @property
    def _beside(self) -> int:
        return self.decoded + self.cache + self.fetched

    @property
    def most_slots(self) -> int:
        """Slots that there may be if the user keeps batches."""
        return (self.limit - self._beside) // self.slot_bytes

    @property
    def _parts(self) -> str:
        parts = [f"{self.slots} slots of {readable(self.slot_bytes)}"]
        parts += [f"{readable(self.decoded)} decoded"] if self.decoded else []
        parts += [f"{readable(self.cache)} cache"] if self.cache else []
        parts += [f"{readable(self.fetched)} of files read ahead"] if self.fetched else []
        return " + ".join(parts)

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            MemoryBudgetError: With the bytes that it needs.
        """
        if self.total > self.limit:
            smaller = ["batch_size or queue_depth"] + ["shuffle_chunks"] * (self.decoded > 0)
            smaller += ["cache_bytes"] * (self.cache > 0)
            raise MemoryBudgetError(
                f"memory_budget: {self._parts} need {self.total} bytes ({readable(self.total)}), over the budget of "
                f"{self.limit} ({readable(self.limit)}); set a smaller {', '.join(smaller)}, or raise it"
            )

    def __str__(self) -> str:
        return f"{self._parts} = {readable(self.total)}, of at most {readable(self.limit)}"


def default_budget(ranks: int | None = None) -> int:
    """Bytes that one loader may hold: a quarter of the memory of this machine or container, shared by its ranks.

    Args:
        ranks: Processes of this job on this machine; None for what torchrun says, else 1.
    """
    return int(DEFAULT_SHARE * machine_memory() / max(ranks_here() if ranks is None else ranks, 1))


def ranks_here() -> int:
    """Processes of this job on this machine, as torchrun says; 1 if it does not."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1), 1)


def machine_memory() -> int:
    """Bytes of memory that this process can hope for: the machine's, or its control group's limit if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def readable(nbytes: float) -> str:
    """Bytes for people: ``readable(3_300_000)`` is ``'3.1 MiB'``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
