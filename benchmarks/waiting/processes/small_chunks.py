"""Samples per second where samples are small, or libhdf5 decodes under its lock: threads against worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import torch
from files.layouts import Layout
from loading.hdf5 import Run
from readers import hdf5 as readers

from lit_async_data import AsyncLoader, HDF5Source
from waiting.processes.rates import in_turns

Figures = list[dict[str, Any]]
KINDS, WORKERS = ("thread", "process"), (1, 2)
LAYOUTS = (
    Layout("512 B", (2, 16, 16), "u1", 200_000, chunk=1, packed=True),
    Layout("8 × 64 B", (1, 8, 8), "u1", 400_000, chunk=8, packed=True),
    Layout("8 × 512 B", (2, 16, 16), "u1", 200_000, chunk=8, packed=True),
    Layout("4 KiB", (1, 64, 64), "u1", 25_600, chunk=1, packed=True),
    Layout("8 × 4 KiB", (1, 64, 64), "u1", 25_600, chunk=8, packed=True),
    Layout("12 KiB", (3, 64, 64), "u1", 20_000, chunk=1, packed=True),
    Layout("64 × 12 KiB", (3, 64, 64), "u1", 20_480, chunk=64, packed=True),
    Layout("8 × 512 B, szip", (2, 16, 16), "u1", 50_000, chunk=8, packed=True, codec="szip"),
    Layout("12 KiB, szip", (3, 64, 64), "u1", 10_000, chunk=1, packed=True, codec="szip"),
)


def small_chunks(run: Run) -> Figures:
    """A loop that counts batches of 256, with the shuffle that ``auto`` picks."""
    rows: Figures = []
    names = " ".join(f"{workers} {kind}".rjust(10) for kind in KINDS for workers in WORKERS)
    print(f"\n{'Samples per second, by the samples of a chunk':<46} {names} DataLoader, 2")
    for layout in LAYOUTS:
        path = run.path(layout)
        with contextlib.closing(HDF5Source(path)) as source:
            check(source, path)
            chosen = {
                (kind, workers): dataclasses.replace(
                    readers.ours(layout, source, workers, "auto", worker_kind=kind), family=f"{readers.OURS}, {kind}"
                )
                for kind in KINDS
                for workers in WORKERS
            }
            sorted_rows = readers.dataloaders(layout, path, 2)[1]
            found = [rate for _, rate in in_turns(run, [*chosen.values(), sorted_rows], 0.5 if run.quick else 3.0)]
            with AsyncLoader(source, {"batch_size": layout.batch, "workers": 2, "worker_kind": "process"}) as loader:
                shared = loader.footprint.workers.shared
        rates = [rate.samples_per_s for rate in found]
        print(f"{layout!s:<46} {' '.join(f'{rate:>10,.0f}' for rate in rates[:-1])} {rates[-1]:>13,.0f}")
        row: dict[str, Any] = {"data": layout.name, "stored": str(layout), "processes": shared}
        row |= {f"{kind} {workers}": rate for (kind, workers), rate in zip(chosen, rates, strict=False)}
        rows.append(row | {"dataloader": rates[-1], "times": rates[3] / max(rates[:3])})
    return rows


def check(source: HDF5Source, path: str) -> None:
    """Compare the first epoch's batches of two worker processes with what h5py reads.

    Raises:
        ValueError: A value differs.
    """
    rows = readers.SortedRows(path)
    options = {"batch_size": 256, "workers": 2, "worker_kind": "process", "return_indices": True}
    with AsyncLoader(source, options) as loader:
        for _, (data, _, index) in zip(range(20), loader, strict=False):
            numbers, back = np.unique(index.numpy(), return_inverse=True)
            if not torch.equal(rows.batch(numbers)[0][back], data):
                raise ValueError(f"{path}: samples {index.tolist()} differ from those of h5py")
