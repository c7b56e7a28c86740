"""Bytes and images per second, and per CPU second of all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile

import torch
from files import tables
from files.layouts import Layout
from files.tables import BATCH, Files
from loading.hdf5 import Run
from measuring.program import Figures
from measuring.rates import in_turns
from readers.hdf5 import by_dataloader

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource
from waiting.processes import contenders as loaders
from waiting.processes.contenders import PILLOW, SIMPLEJPEG, Photographs, Transformed
from waiting.processes.transforms import SIDE, augmented, cheap

GB = 1e9
# 256 samples are 38.5 MB.
LARGE = Layout("large", (3, 224, 224), "u1", 1024)
WORKERS = (1, 2)
# Mean difference of normalised pixels that two decoders and two ways of shrinking may have.
DECODERS_DIFFER = 0.15


# -- large batches -----------------------------------------------------------------------------------------------------


def slots(run: Run) -> Figures:
    """Batches of 38.5 MB with a cheap transform."""
    layout = dataclasses.replace(LARGE, rows=512) if run.quick else LARGE
    path = run.path(layout)
    with contextlib.closing(HDF5Source(path)) as source:
        check_large(source, path, layout)
        chosen = [loaders.ours(source, layout.batch, cheap, workers) for workers in WORKERS]
        for family, mapped in (("DataLoader, h5py rows", False), ("DataLoader, memory map", True)):
            dataset = Transformed(path, cheap, mapped=mapped)
            chosen += [by_dataloader(family, dataset, workers, layout.batch) for workers in WORKERS]
        print(f"\nBatches of {layout.batch} × {layout.sample_bytes:,} bytes, contiguous, a transform of no work")
        print(f"{'':<40}    GB/s  CPU s/GB")
        rows = []
        rates = in_turns(dataclasses.replace(run, length=2.0), chosen, touch=True)
        for contender in chosen:
            rate = rates[contender.name]
            rows.append(
                {
                    "contender": contender.name,
                    "workers": contender.workers,
                    "ours": contender.ours,
                    "gb_per_s": rate.samples_per_s * layout.sample_bytes / GB,
                    "cpu_s_per_gb": GB / (rate.samples_per_cpu_s * layout.sample_bytes),
                }
            )
            print(f"{contender.name:<40} {rows[-1]['gb_per_s']:>7.2f} {rows[-1]['cpu_s_per_gb']:>9.2f}")
    return rows


def check_large(source: HDF5Source, path: str, layout: Layout) -> None:
    """Compare a batch with that of the other datasets.

    Raises:
        ValueError: A value differs.
    """
    with AsyncLoader(source, {"batch_size": 16, "shuffle": False, "workers": 2}, sample_transform=cheap) as loader:
        data, labels = loader.next()
    for mapped in (False, True):
        dataset = Transformed(path, cheap, mapped=mapped)
        for row in range(16):
            theirs, label = dataset[row]
            if label != labels[row] or not torch.equal(theirs, data[row]):
                raise ValueError(f"{layout}: row {row} differs from that of h5py")


# -- images ------------------------------------------------------------------------------------------------------------


def images(run: Run) -> Figures:
    """Photographs, decoded, and augmented in numpy."""
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        files = tables.photographs(folder, 256 if run.quick else 3_000)
        source = ManifestSource(files.table, ("path", "label"), image_size=SIDE, resize="stretch")
        with contextlib.closing(source):
            return _augmented(run, files, source)


def _augmented(run: Run, files: Files, source: ManifestSource) -> Figures:
    check_images(source, files)
    chosen = [loaders.ours(source, BATCH, augmented, workers) for workers in WORKERS]
    left_out = ""
    for decoder in (PILLOW, SIMPLEJPEG):
        dataset = Photographs(files, augmented, decoder)
        chosen += [by_dataloader(f"DataLoader, {decoder}", dataset, workers, BATCH) for workers in WORKERS]
        for workers in WORKERS:
            pool = loaders.spdl_pool(f"SPDL, pool of processes, {decoder}", dataset, BATCH, workers)
            chosen += [] if pool is None else [pool]
            left_out = "left out: SPDL: not installed" if pool is None else ""
    print(f"\n{len(files.paths):,} JPEGs, stretched to {SIDE}², cropped, flipped, brighter, normalised; batch {BATCH}")
    print(f"{'':<50}  images/s  images/CPU s")
    rows = []
    rates = in_turns(dataclasses.replace(run, length=4.0), chosen, touch=True)
    for contender in chosen:
        rate = rates[contender.name]
        row = {"contender": contender.name, "workers": contender.workers, "ours": contender.ours}
        rows.append(row | {"images_per_s": rate.samples_per_s, "images_per_cpu_s": rate.samples_per_cpu_s})
        print(f"{contender.name:<50} {rate.samples_per_s:>9,.0f} {rate.samples_per_cpu_s:>13,.0f}")
    if left_out:
        print(left_out)
    return rows


def check_images(source: ManifestSource, files: Files) -> None:
    """Compare a batch, with nothing drawn, with those of the other decoders.

    Raises:
        ValueError: A label differs, or the picture.
    """
    options = {"batch_size": 8, "shuffle": False, "augment": False, "workers": 2, "worker_kind": "process"}
    with AsyncLoader(source, options, sample_transform=augmented) as loader:
        mine, labels = loader.next()
    for decoder in (PILLOW, SIMPLEJPEG):
        dataset = Photographs(files, augmented, decoder, still=True)
        for number in range(8):
            theirs, label = dataset[number]
            if label != labels[number] or (theirs - mine[number]).abs().mean() > DECODERS_DIFFER:
                raise ValueError(f"{decoder} makes something else of {files.paths[number]}")
