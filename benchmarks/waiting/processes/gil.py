"""What loaders take of the steps of a training loop, which share the GIL with them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from loading.hdf5 import Run
from measuring.program import Figures
from readers.hdf5 import by_dataloader

from lit_async_data import HDF5Source
from waiting import beside
from waiting.processes import contenders as loaders
from waiting.processes.contenders import Transformed
from waiting.processes.transforms import summed


def loop(run: Run) -> Figures:
    """A loop that launches many kernels, beside a transform in pure Python."""
    layout = dataclasses.replace(run.layouts["A"], batch=beside.BATCH)
    path = run.path(layout)
    step = beside.launches()
    with contextlib.closing(HDF5Source(path)) as source:
        chosen = [loaders.ours(source, layout.batch, summed, 1, kind) for kind in ("thread", "process", "auto")]
        chosen.append(by_dataloader("DataLoader", Transformed(path, summed), 1, layout.batch))
        with chosen[0].opened() as opened:
            batches: list[Any] = [tuple(t.clone() for t in next(opened)) for _ in range(beside.MEMORY_BATCHES)]
        kept = beside.in_turns(run, step, 2 * run.seconds / beside.LEAST_STEPS, batches, chosen)
    print(f"\n{layout}, batch {layout.batch}, a transform in pure Python, launches\n{'':40}  of the steps  waiting")
    rows = []
    for contender in chosen:
        share, wait = kept[contender.name]
        print(f"{contender.name:<40} {share:>13.3f} {wait:>8.3f}")
        rows.append({"contender": contender.name, "ours": contender.ours, "steps": share, "waiting": wait})
    return rows
