"""lit_async_data keeps a training loop from waiting for data.

Names are loaded on first use (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_async_data.batch.spec import BatchSpec as BatchSpec
    from lit_async_data.batch.spec import FieldSpec as FieldSpec
    from lit_async_data.batch.transforms import Normalize as Normalize
    from lit_async_data.batch.transforms import ToFloat as ToFloat
    from lit_async_data.lightning.datamodule import AsyncDataModule as AsyncDataModule
    from lit_async_data.lightning.predictions.writer import PredictionWriter as PredictionWriter
    from lit_async_data.lightning.prefetcher import DevicePrefetcher as DevicePrefetcher
    from lit_async_data.loader.async_loader import AsyncLoader as AsyncLoader
    from lit_async_data.options import LoaderOptions as LoaderOptions
    from lit_async_data.prefetch.wrap import prefetched as prefetched
    from lit_async_data.sources.composed.concat import ConcatSource as ConcatSource
    from lit_async_data.sources.composed.split import split as split
    from lit_async_data.sources.composed.subset import SubsetSource as SubsetSource
    from lit_async_data.sources.contract.source import Source as Source
    from lit_async_data.sources.contract.storage_layout import StorageLayout as StorageLayout
    from lit_async_data.sources.hdf5.schema.field import Field as Field
    from lit_async_data.sources.hdf5.source import HDF5Source as HDF5Source
    from lit_async_data.sources.manifest.column import Column as Column
    from lit_async_data.sources.manifest.source import ManifestSource as ManifestSource
    from lit_async_data.sources.torch_dataset.source import DatasetSource as DatasetSource

__version__ = "0.1.0"

_HOMES = {
    "AsyncDataModule": "lightning.datamodule",
    "AsyncLoader": "loader.async_loader",
    "BatchSpec": "batch.spec",
    "Column": "sources.manifest.column",
    "DatasetSource": "sources.torch_dataset.source",
    "ConcatSource": "sources.composed.concat",
    "DevicePrefetcher": "lightning.prefetcher",
    "FieldSpec": "batch.spec",
    "Field": "sources.hdf5.schema.field",
    "HDF5Source": "sources.hdf5.source",
    "LoaderOptions": "options",
    "ManifestSource": "sources.manifest.source",
    "Normalize": "batch.transforms",
    "PredictionWriter": "lightning.predictions.writer",
    "Source": "sources.contract.source",
    "StorageLayout": "sources.contract.storage_layout",
    "SubsetSource": "sources.composed.subset",
    "ToFloat": "batch.transforms",
    "prefetched": "prefetch.wrap",
    "split": "sources.composed.split",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  # the names that are imported above for type checkers


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
