"""Sources of stages that a configuration may leave empty, for `data/hdf5.yaml` and `data/manifest_stages.yaml`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_async_data.sources.hdf5.source import HDF5Source
    from lit_async_data.sources.manifest.source import ManifestSource


def hdf5(path: str | os.PathLike[str] | Sequence[str] | None = None, **options: Any) -> HDF5Source | None:
    from lit_async_data.sources.hdf5.source import HDF5Source

    return None if path is None else HDF5Source(path, **options)


def manifest(table: Any = None, **options: Any) -> ManifestSource | None:
    from lit_async_data.sources.manifest.source import ManifestSource

    return None if table is None else ManifestSource(table, **options)
