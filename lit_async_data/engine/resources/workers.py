"""`Workers`: who reads the batches of a loader, how many at a time, and why."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

from lit_async_data.engine.resources import control_groups
from lit_async_data.engine.resources.memory import ranks_here
from lit_async_data.engine.resources.worker_tuner import WorkerTuner
from lit_async_data.errors import ConfigError
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.system import usable_cores

if TYPE_CHECKING:  # no reader process needs it
    from lit_async_data.options import LoaderOptions

# Two were measured (1.5 to 1.9 times one); more share less, since what they do between chunks holds the GIL.
MOST_THREADS = 4
# Seconds after which it is judged whether another worker helps. A process takes a part of the first to start.
THREAD_S, PROCESS_S = 0.25, 1.0
# Reasons to read in another process, by `StorageLayout.reading`.
_COSTS = {
    "opened": "a file is opened for each sample",
    "locked": "reading holds a lock",
    "decoded": "samples are decoded",
    "python": "Python code reads the samples",
}


class Workers(NamedTuple):
    # ``"caller"``: the loop itself, when it asks for a batch. ``"thread"``: threads of this process. ``"process"``:
    # threads of a reader process, or several processes, which take nothing of this process's GIL.
    kind: Literal["caller", "thread", "process"]
    threads: int  # number of threads, or processes, to begin with; 0 for the caller
    why: str  # the reason for the kind, for people
    most: int = 0  # the number that there may be later, if the loop waits for batches
    # Whether each reads in a process of its own, since one GIL would let only one of them work.
    apart: bool = False
    # Whether these processes share each slot, since only one of them should decode a chunk; else each fills whole ones.
    shared: bool = False
    by_auto: int = 1  # the number that ``workers=auto`` may reach

    @classmethod
    def of(
        cls,
        source: Source,
        options: LoaderOptions,
        *,
        ahead: bool,
        hooks: bool = False,
        refusal: str = "",
        ranks: int | None = None,
    ) -> Workers:
        """The workers of a loader, of which ``ranks`` share this machine; see `ResourcePlan.of`."""
        if not ahead or options.workers == 0:
            return cls("caller", 0, "nothing is read ahead" if not ahead else "workers=0")
        reading, free = source.chunks.reading, cores(ranks)
        python = hooks or reading == "python"
        kind, why = _kind("python" if python else reading, options, refusal or system_refusal(), free)
        if hooks and why == _COSTS["python"]:
            why = "Python code transforms the samples"
        apart = kind == "process" and python
        chunks = source.chunks
        shared = apart and chunks.compressed and bool(chunks.runs) and (chunks.rows > 1 or options.cache_bytes > 0)
        most = free if apart else min(free, MOST_THREADS) if reading == "decoded" and not python else 1
        if options.workers != "auto":
            return cls(kind, options.workers, why, options.workers, apart, shared and options.workers > 1, most)
        if python and kind == "thread" and options.worker_kind == "auto" and has_gil():
            return cls("caller", 0, why)
        return cls(kind, 1, why, most, apart, shared and most > 1, most)

    @property
    def most_threads(self) -> int:
        """Threads that there may be in a process."""
        return 1 if self.apart else self.most

    def seeds(self, reading: Reading | None = None) -> bool:
        """Whether code of the user has the global random generators for itself, in the same calls in each run.

        That of hooks, or that of a source that reads in some way.
        """
        return self.kind == "process" and self.most_threads == 1 and reading in (None, "python", "locked")

    def tuner(self) -> WorkerTuner | None:
        """What changes the number of threads; None if it stays."""
        if self.most == self.threads:
            return None
        return WorkerTuner(self.threads, self.most, PROCESS_S if self.apart else THREAD_S)

    def __str__(self) -> str:
        if self.kind == "caller":
            return f"no workers ({self.why}): the training loop reads"
        what = "reader process" if self.apart else "reader thread"
        several = f"{self.threads} {what}{'es' if self.apart else 's'}" if self.threads > 1 else f"1 {what}"
        text = several if self.most == self.threads else f"{several}, at most {self.most}"
        inside = self.kind == "thread" or self.apart
        return f"{text} ({self.why})" if inside else f"a reader process with {text} ({self.why})"


def _kind(
    reading: Reading, options: LoaderOptions, refusal: str, cores: int
) -> tuple[Literal["thread", "process"], str]:
    if options.worker_kind == "process":
        if refusal:
            raise ConfigError(f"process is not possible here: {refusal}; set worker_kind=thread", "worker_kind")
        return "process", "worker_kind=process"
    if options.worker_kind == "thread":
        return "thread", "worker_kind=thread"
    against = {
        "reading is a copy": reading == "copied",
        "there is no GIL": not has_gil(),
        refusal: bool(refusal),
        "no core is free": cores < 2,
    }
    why = next((reason for reason, holds in against.items() if holds), None)
    return ("process", _COSTS[reading]) if why is None else ("thread", why)


def system_refusal() -> str:
    # Nor is there select.poll, which waits for pipes.
    return "" if os.name == "posix" else f"{sys.platform} passes no descriptors to a new process"


def cores(ranks: int | None = None) -> int:
    """Cores that this process may use, of which each rank of the machine has its share; at least 1."""
    limit = control_groups.core_limit()
    here = usable_cores() if limit is None else min(usable_cores(), int(limit))
    return max(here // _sharing(ranks), 1)


def _sharing(ranks: int | None) -> int:
    """Ranks that share the cores which this process may use. One, if SLURM has given each task cores of its own."""
    tasks, own = (os.environ.get(f"SLURM_{name}", "") for name in ("NTASKS", "CPUS_PER_TASK"))
    by_slurm = "LOCAL_WORLD_SIZE" not in os.environ and tasks.isdigit() and int(tasks) > 1
    return 1 if by_slurm and own.isdigit() and usable_cores() <= int(own) else ranks_here(ranks)


def has_gil() -> bool:
    """Whether one thread at a time runs Python code in this process at present."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
