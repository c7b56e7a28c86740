"""Memory of all processes that read a table of many rows."""

from __future__ import annotations

import gc
import time
from typing import Any

import pyarrow as pa
from files import tables
from loading.hdf5 import Run
from measuring.memory import in_fresh_process
from measuring.program import Figures
from pyarrow import parquet
from readers.hdf5 import OURS, endless_epochs
from torch.utils.data import DataLoader, Dataset

from lit_async_data import AsyncLoader, ManifestSource
from waiting.processes.process_tree import descendants, shared_out_memory
from waiting.processes.transforms import remainder

BATCH = 1024
DATALOADER = "DataLoader, Python lists"
# Seconds that processes are waited for.
PATIENCE_S = 20.0


class Lists(Dataset[Any]):
    """A table as Python lists. A process that looks at an object writes its reference count, which copies the page."""

    def __init__(self, path: str) -> None:
        table = parquet.read_table(path, columns=["id", "label"])
        self.ids, self.labels = table["id"].to_pylist(), table["label"].to_pylist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Any:
        return remainder({"id": self.ids[row], "label": self.labels[row]})


def memory(run: Run) -> Figures:
    """Our source of ids and labels, and lists of them behind a DataLoader, each in a fresh process."""
    number, batches = (200_000, 60) if run.quick else (5_000_000, 600)
    path = tables.large_table(run.folder, "parquet", number)
    print(f"\nA table of {number:,} rows, columns id and label, after {batches} shuffled batches of {BATCH}")
    print(f"{'':<40}  PSS of all processes, MiB  beyond imports  processes")
    rows = []
    for workers in (1, 2, 4):
        for name in (OURS, DATALOADER):
            found = in_fresh_process(after_batches, name, path, workers, batches)
            rows.append({"contender": name, "workers": workers, "rows": number, **found})
            label = f"{name}, {workers} worker{'s' if workers != 1 else ''}"
            print(f"{label:<40} {found['pss_mib']:>26,.0f} {found['grown_mib']:>15,.0f} {found['processes']:>10}")
    return rows


def after_batches(name: str, path: str, workers: int, batches: int) -> dict[str, float]:
    """Memory of this process and its descendants while a loader is open. Run it in a fresh process."""
    gc.collect()
    before = shared_out_memory()
    if name == OURS:
        source = ManifestSource(path, ("label",), id="id", check_files="none")
        options = {"batch_size": BATCH, "shuffle": True, "workers": workers, "worker_kind": "process"}
        with AsyncLoader(source, options, sample_transform=remainder) as loader:
            return _taken(loader, workers, batches, before)
    dataset = Lists(path)
    pa.default_memory_pool().release_unused()
    loader_of_lists: DataLoader[Any] = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    return _taken(loader_of_lists, workers, batches, before)


def _taken(loader: Any, processes: int, batches: int, before: float) -> dict[str, float]:
    endless, started = endless_epochs(loader), time.perf_counter()
    # As many batches again once all processes are there.
    while len(descendants()) < processes and time.perf_counter() - started < PATIENCE_S:
        next(endless)
    for _ in range(batches):
        next(endless)
    after = shared_out_memory()
    return {"pss_mib": after, "grown_mib": after - before, "processes": 1 + len(descendants())}
