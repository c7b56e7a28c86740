"""A table of twelve arrays, and sources of a single column."""

import numpy as np
import pyarrow as pa

from lit_async_data import ManifestSource
from support.sources.oracle import read

COUNT = 12
IDS = [f"{number:03d}" for number in range(COUNT)]
SPECIES = ["owl", "auk", "emu"] * 4
QUALITY = [number / 8 for number in range(COUNT)]
COLUMNS = {
    "id": IDS,
    "path": [f"a/{number}.npy" for number in range(COUNT)],
    "species": SPECIES,
    "even": [number % 2 for number in range(COUNT)],
    "quality": QUALITY,
}
FIELDS = {"x": "path", "y": "species", "q": "quality"}


def given(**changed):
    return pa.table({**COLUMNS, **changed})


def of_paths(folder, paths, **options):
    return ManifestSource(pa.table({"path": paths}), {"x": "path"}, root=folder, **options)


def labels(values, **column):
    """The source of one column of labels, and what a batch of all samples has there."""
    source = ManifestSource(pa.table({"y": values}), {"y": {"name": "y", **column}})
    return source, read(source, np.arange(len(source)))["y"]
