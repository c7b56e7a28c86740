"""Sources of stages that a configuration may leave empty, for `data/hdf5.yaml` and `data/manifest_stages.yaml`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lit_async_data


def hdf5(path: str | os.PathLike[str] | Sequence[str] | None = None, **options: Any) -> lit_async_data.Source | None:
    return None if path is None else lit_async_data.HDF5Source(path, **options)


def manifest(table: Any = None, **options: Any) -> lit_async_data.Source | None:
    return None if table is None else lit_async_data.ManifestSource(table, **options)
