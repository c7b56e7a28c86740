"""The three basic claims: the loop does not wait, files are read fast, memory does not grow.

    python benchmarks/waiting/first.py [--quick] [--json FILE] [overlap | throughput | memory ...]

Figures are ratios of measurements of one run, interleaved, and medians over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lit_async_data import AsyncDataModule, AsyncLoader, DevicePrefetcher, HDF5Source
from lit_async_data.testing import ArraySource

# Seconds per sample of loading (T1) and training (T2) by batch size, measured in 2020 on Mask R-CNN with a loader that
# copies on a side stream (from its table: "T1+T2 sequential" less "T1 loading"). This benchmark runs a tenth of that.
TABLE = {1: (0.6390, 0.7473), 2: (0.4363, 0.6710), 3: (0.4501, 0.6725), 4: (0.5326, 0.6792)}
SCALE = 0.1

Work = Callable[[float], None]


# -- (a) max(T1, T2) ---------------------------------------------------------------------------------------------------


def hashing() -> Work:
    """Work without the GIL that takes a given time on an idle core."""
    data = np.random.default_rng(0).bytes(2**20)
    pieces = 16

    def rate() -> float:
        started = time.perf_counter()
        for _ in range(pieces):
            hashlib.sha256(data)
        return pieces / (time.perf_counter() - started)

    per_second = statistics.median(rate() for _ in range(9))

    def work(seconds: float) -> None:
        for _ in range(round(seconds * per_second)):
            hashlib.sha256(data)

    return work


class SlowSource(ArraySource):
    """Each sample takes a given time to load."""

    def __init__(self, length: int, seconds: float, work: Work) -> None:
        super().__init__({"x": np.zeros((length, 1), np.float32)})
        self._seconds, self._work = seconds, work

    def read_into(self, samples: npt.NDArray[np.int64], out: Any) -> None:
        self._work(self._seconds * len(samples))
        super().read_into(samples, out)


class InMemory(Dataset[Any]):
    """Batches in memory."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        return self.batches[number]


class SlowStep(pl.LightningModule):
    """A step that takes a given time per sample."""

    def __init__(self, seconds: float, work: Work) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seconds, self.work = seconds, work
        self.ends: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.work(self.seconds * len(batch["x"]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> None:
        return None

    @property
    def per_step(self) -> float:
        """Seconds per step, the first batch excluded."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


def trained(model: SlowStep, data: Any, callbacks: list[Any]) -> float:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(model, datamodule=data)
    else:
        trainer.fit(model, data)
    return model.per_step


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def together(first: Callable[[], None], second: Callable[[], None]) -> float:
    """Seconds that two unrelated threads take."""
    threads = [threading.Thread(target=work) for work in (first, second)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return timed(run)


def overlap_round(batch: int, steps: int, work: Work) -> dict[str, float]:
    t1, t2 = (seconds * SCALE for seconds in TABLE[batch])

    def loads() -> None:
        for _ in range(steps):
            work(t1 * batch)

    def trains() -> None:
        for _ in range(steps):
            work(t2 * batch)

    def source() -> SlowSource:
        return SlowSource(batch * steps, t1, work)

    def data() -> AsyncDataModule:
        return AsyncDataModule(train=source(), loader={"batch_size": batch, "workers": 1, "worker_kind": "thread"})

    loading = timed(loads) / steps
    in_memory = DataLoader(InMemory([{"x": torch.zeros(batch, 1)} for _ in range(steps)]), batch_size=None)
    training = trained(SlowStep(t2, work), in_memory, [])
    callback = DevicePrefetcher()
    asynchronous = trained(SlowStep(t2, work), data(), [callback])
    sequential = trained(SlowStep(t2, work), data(), [DevicePrefetcher(device_depth=0)])
    alone = max(loading, timed(trains) / steps)
    threads = alone / (together(loads, trains) / steps)
    return {
        "sequential": sequential / batch,
        "loading": loading / batch,
        "training": training / batch,
        "asynchronous": asynchronous / batch,
        "left": callback.waited.wait_s / (steps - 1) / asynchronous,
        "ratio": max(loading, training) / asynchronous,
        "threads": threads,
    }


def overlap(quick: bool) -> list[dict[str, Any]]:
    rounds, samples = (1, 24) if quick else (3, 36)
    rows: list[dict[str, Any]] = []
    for kind, work in (("waits", time.sleep), ("work", hashing())):
        by_batch: dict[int, list[dict[str, float]]] = {batch: [] for batch in TABLE}
        for _ in range(rounds):
            for batch in TABLE:
                by_batch[batch].append(overlap_round(batch, samples // batch, work))
        for batch, results in by_batch.items():
            rows.append({"kind": kind, "batch": batch} | medians(results))
    print("\n(a) seconds per sample, first batch excluded; ratio = max(T1, T2) / asynchronous")
    print("kind   batch  T1+T2 seq.  T1 loading  T2 training  asynchr.  loading left   ratio  two threads  of them")
    for row in rows:
        print(
            f"{row['kind']:<6} {row['batch']:>5}  {row['sequential']:>10.4f}  {row['loading']:>10.4f}  "
            f"{row['training']:>11.4f}  {row['asynchronous']:>8.4f}  {row['left']:>11.2%}  {row['ratio']:>7.3f}  "
            f"{row['threads']:>11.3f}  {row['ratio'] / row['threads']:>7.3f}"
        )
    return rows


# -- (b) samples per second --------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """A careful handwritten Dataset: one h5py row per sample, the file opened once per worker, labels in memory."""

    def __init__(self, path: str, length: int) -> None:
        self.path, self.length = path, length
        self.data: Any = None
        with h5py.File(path) as file:
            self.labels = file["labels"][...]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if self.data is None:
            self.data = h5py.File(self.path, "r")["data"]
        return torch.from_numpy(self.data[row]), int(self.labels[row])


# Epochs per measurement. AsyncLoader has a few batches ready at the start: over ten epochs, one in a hundred.
EPOCHS = {"AsyncLoader": 10, "DataLoader": 1}


def counted(loader: Any, epochs: int) -> int:
    return sum(len(labels) for _ in range(epochs) for _, labels in loader)


def throughput(quick: bool) -> list[dict[str, Any]]:
    rounds, length, batch = (2, 4_000, 256) if quick else (7, 20_000, 256)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "x.h5"))
        with h5py.File(path, "w") as file:
            file["data"] = np.random.default_rng(0).integers(0, 255, (length, 3, 64, 64), dtype=np.uint8)
            file["labels"] = np.arange(length) % 10
        loaders: dict[str, Any] = {
            f"AsyncLoader, workers={workers}": AsyncLoader(
                HDF5Source(path), {"batch_size": batch, "shuffle": "global", "workers": workers}
            )
            for workers in (0, 1, 2)
        }
        for workers in (0, 1, 2):
            loaders[f"DataLoader over h5py rows, num_workers={workers}"] = DataLoader(
                Rows(path, length), batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
            )
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for number in range(rounds + 1):
            for name, loader in loaders.items():
                epochs = EPOCHS[type(loader).__name__]
                seconds = timed(functools.partial(counted, loader, epochs))
                if number:  # the first round warms caches and workers
                    rates[name].append(epochs * length / seconds)
        for loader in loaders.values():
            if isinstance(loader, AsyncLoader):
                loader.close()
    best = max(statistics.median(rate) for name, rate in rates.items() if name.startswith("DataLoader"))
    rows = [
        {"loader": name, "samples_per_s": statistics.median(rate), "times_best": statistics.median(rate) / best}
        for name, rate in rates.items()
    ]
    print(f"\n(b) {length} samples uint8 3×64×64, contiguous, batch {batch}, global shuffle, warm page cache")
    for row in rows:
        rate, times = row["samples_per_s"], row["times_best"]
        print(f"{row['loader']:<42} {rate:>10,.0f} samples/s  {times:>6.2f} × best DataLoader")
    return rows


# -- (c) resident memory -----------------------------------------------------------------------------------------------


def resident() -> dict[str, float]:
    """MiB of this process: private memory, and pages of mapped files, which the system can reclaim."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(status[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile")}


def memory(quick: bool) -> list[dict[str, Any]]:
    epochs, length, batch = (4, 2_000, 256) if quick else (20, 20_000, 256)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "x.h5"))
        with h5py.File(path, "w") as file:
            file["data"] = np.zeros((length, 3, 64, 64), np.uint8)
            file["labels"] = np.arange(length) % 10
        with AsyncLoader(HDF5Source(path), {"batch_size": batch, "shuffle": "global", "workers": 2}) as loader:
            for epoch in range(epochs):
                for data, _ in loader:
                    data[:, 0, 0, 0].sum()
                rows.append({"epoch": epoch, **resident()})
    first, last = rows[0], rows[-1]
    print(f"\n(c) resident memory over {epochs} epochs of {length} samples, MiB")
    for key in ("RssAnon", "RssFile"):
        print(f"{key}: after the first epoch {first[key]:.1f}, after the last {last[key]:.1f}")
    return rows


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="overlap, throughput, memory; all of them unless named")
    parser.add_argument("--quick", action="store_true", help="under a minute, to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel("ERROR")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, h5py {h5py.__version__}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {versions}"
    print(machine)
    parts = {"overlap": overlap, "throughput": throughput, "memory": memory}
    figures = {name: part(args.quick) for name, part in parts.items() if name in (args.parts or parts)}
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine, **figures}, indent=1))


if __name__ == "__main__":
    main()
