"""A loop that only counts batches: what a reader process delivers, against threads and the limit."""

from __future__ import annotations

import statistics

from files import layouts
from loading.hdf5 import Run
from measuring.program import Figures
from measuring.rates import measured
from readers import hdf5 as readers

from lit_async_data import AsyncLoader, HDF5Source

KINDS, WORKERS = ("thread", "process"), (1, 2)


def counting(run: Run) -> Figures:
    """Samples per second of each layout, as stored on the disk, with the shuffle that ``auto`` picks."""
    rows: Figures = []
    print(f"\n{'Samples per second of a loop that counts':<52} 1 thread 2 threads 1, process 2, process      limit")
    for layout in run.layouts.values():
        path = run.path(layout)
        source = HDF5Source(path)
        with AsyncLoader(source, {"batch_size": layout.batch, "shuffle": False, "workers": 1}) as loader:
            auto = loader.footprint.workers.kind
            nbytes = loader.footprint.layout.nbytes // loader.footprint.layout.batches
            for _ in loader:  # reads every page of the file, and maps it
                pass
        limit = layouts.limit_of(layout, path, nbytes)
        contenders = {
            (kind, workers): readers.ours(layout, source, workers, "auto", worker_kind=kind)
            for kind in KINDS
            for workers in WORKERS
        }
        rates: dict[tuple[str, int], list[float]] = {key: [] for key in contenders}
        limits = []
        for _ in range(run.rounds + (0 if run.quick else 2)):
            limits.append(limit(run.seconds))
            for key, contender in contenders.items():
                rates[key].append(measured(contender, run).samples_per_s)
        source.close()
        found = {key: statistics.median(values) for key, values in rates.items()}
        shown = " ".join(f"{rate:>9,.0f}" for rate in found.values())
        print(f"{layout!s:<50} {shown}  {statistics.median(limits):>9,.0f}")
        for workers in WORKERS:
            pairs = zip(rates["process", workers], rates["thread", workers], strict=True)
            row = {"data": layout.name, "stored": str(layout), "workers": workers, "auto": auto}
            row |= {kind: found[kind, workers] for kind in KINDS} | {"limit": statistics.median(limits)}
            rows.append(row | {"of_threads": statistics.median(process / thread for process, thread in pairs)})
    return rows
