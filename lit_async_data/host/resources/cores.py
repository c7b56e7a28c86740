"""How many cores a loader may use."""

from __future__ import annotations

import os

from lit_async_data.host.resources import control_groups
from lit_async_data.host.resources.memory import ranks_here
from lit_async_data.system import usable_cores


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
