"""`Workers`: who reads the batches of a loader, how many at a time, and why."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from lit_async_data.errors import ConfigError
from lit_async_data.host.gil import has_gil
from lit_async_data.host.memory import ranks_here
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.source import Source

# Two were measured (1.5 to 1.9 times one); more share less, since what they do between chunks holds the GIL.
MOST_WORKERS = 4
# What costs the training loop the GIL, by `StorageLayout.reading`.
_COSTS = {
    "locked": "reading holds a lock",
    "decoded": "chunks are decoded",
    "python": "Python code reads the samples",
}


class Workers(NamedTuple):
    """Who reads.

    Attributes:
        kind: ``"caller"``: the loop itself, when it asks for a batch. ``"thread"``: threads of this process.
            ``"process"``: threads of a reader process, which take nothing of this process's GIL.
        threads: Number of threads; 0 for the caller.
        why: The reason for the kind, for people.
        processes: Worker processes that the reader process starts, one for each thread, so that Python code runs side
            by side; 0 if its threads read.
    """

    kind: Literal["caller", "thread", "process"]
    threads: int
    why: str
    processes: int = 0

    @classmethod
    def of(cls, source: Source, options: LoaderOptions, *, ahead: bool, refusal: str = "") -> Workers:
        """The workers of a loader.

        Args:
            source: Where samples come from.
            options: Of the loader.
            ahead: Whether anything is read ahead.
            refusal: Why no reader process can be used; empty if one can.

        Raises:
            ConfigError: ``worker_kind=process`` is not possible here.
        """
        if not ahead or options.workers == 0:
            return cls("caller", 0, "nothing is read ahead" if not ahead else "workers=0")
        kind, why = _kind(source, options, refusal or system_refusal())
        reading = source.chunks.reading
        if options.workers != "auto":
            several = kind == "process" and reading == "python" and options.workers > 1
            return cls(kind, options.workers, why, options.workers if several else 0)
        if reading == "python" and kind == "thread" and options.worker_kind == "auto" and has_gil():
            return cls("caller", 0, why)
        return cls(kind, min(cores(), MOST_WORKERS) if reading == "decoded" else 1, why)

    def __str__(self) -> str:
        threads = f"{self.threads} reader thread{'s' if self.threads > 1 else ''}"
        if self.kind == "caller":
            return f"no workers ({self.why}): the training loop reads"
        if self.kind == "thread":
            return f"{threads} ({self.why})"
        if self.processes:
            return f"a reader process with {self.processes} worker processes ({self.why})"
        return f"a reader process with {threads} ({self.why})"


def cores() -> int:
    """Cores that this process may use, of which each rank of the node has its share; at least 1."""
    return max(len(os.sched_getaffinity(0)) // ranks_here(), 1)


def _kind(source: Source, options: LoaderOptions, refusal: str) -> tuple[Literal["thread", "process"], str]:
    if options.worker_kind == "process":
        if refusal:
            raise ConfigError(f"worker_kind: process is not possible here: {refusal}; set worker_kind=thread")
        return "process", "worker_kind=process"
    if options.worker_kind == "thread":
        return "thread", "worker_kind=thread"
    reading = source.chunks.reading
    against = {
        "reading is a copy": reading == "copied",
        "there is no GIL": not has_gil(),
        refusal: bool(refusal),
        "no core is free": cores() < 2,
    }
    why = next((reason for reason, holds in against.items() if holds), None)
    return ("process", _COSTS[reading]) if why is None else ("thread", why)


def system_refusal() -> str:
    return "" if hasattr(os, "memfd_create") else "this system has no memfd"
