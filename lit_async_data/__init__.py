"""lit_async_data keeps a training loop from waiting for data.

Names are loaded on first use (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_async_data.batch.spec import BatchSpec as BatchSpec
    from lit_async_data.batch.spec import FieldSpec as FieldSpec
    from lit_async_data.batch.transforms import FieldStatistics as FieldStatistics
    from lit_async_data.batch.transforms import Normalize as Normalize
    from lit_async_data.batch.transforms import ToFloat as ToFloat
    from lit_async_data.engine.loader.async_loader import AsyncLoader as AsyncLoader
    from lit_async_data.engine.loader.statistics import statistics as statistics
    from lit_async_data.engine.prefetch.loader import prefetched as prefetched
    from lit_async_data.errors import AsyncDataError as AsyncDataError
    from lit_async_data.errors import ChangedError as ChangedError
    from lit_async_data.errors import ClosedError as ClosedError
    from lit_async_data.errors import ConfigError as ConfigError
    from lit_async_data.errors import CorruptError as CorruptError
    from lit_async_data.errors import FormatError as FormatError
    from lit_async_data.errors import ManifestError as ManifestError
    from lit_async_data.errors import MemoryBudgetError as MemoryBudgetError
    from lit_async_data.errors import MissingError as MissingError
    from lit_async_data.errors import ReadError as ReadError
    from lit_async_data.errors import ResumeError as ResumeError
    from lit_async_data.errors import SourceError as SourceError
    from lit_async_data.errors import StalledError as StalledError
    from lit_async_data.errors import StoreError as StoreError
    from lit_async_data.errors import TransformError as TransformError
    from lit_async_data.errors import WorkerError as WorkerError
    from lit_async_data.lightning.datamodule import AsyncDataModule as AsyncDataModule
    from lit_async_data.lightning.predictions import PredictionWriter as PredictionWriter
    from lit_async_data.lightning.prefetcher import DevicePrefetcher as DevicePrefetcher
    from lit_async_data.options import Balanced as Balanced
    from lit_async_data.options import LoaderOptions as LoaderOptions
    from lit_async_data.sources.composed.composed import ConcatSource as ConcatSource
    from lit_async_data.sources.composed.composed import MixtureSource as MixtureSource
    from lit_async_data.sources.composed.composed import SubsetSource as SubsetSource
    from lit_async_data.sources.composed.split import folds as folds
    from lit_async_data.sources.composed.split import split as split
    from lit_async_data.sources.contract.source import Source as Source
    from lit_async_data.sources.contract.source import StorageLayout as StorageLayout
    from lit_async_data.sources.hdf5.merge import merge_patches as merge_patches
    from lit_async_data.sources.hdf5.schema.field import Field as Field
    from lit_async_data.sources.hdf5.source import HDF5Source as HDF5Source
    from lit_async_data.sources.manifest.columns import Column as Column
    from lit_async_data.sources.manifest.source import ManifestSource as ManifestSource
    from lit_async_data.sources.torch_dataset import DatasetSource as DatasetSource

__version__ = "0.1.0"

_NAMES = {
    "batch.spec": "BatchSpec FieldSpec",
    "batch.transforms": "FieldStatistics Normalize ToFloat",
    "engine.loader.async_loader": "AsyncLoader",
    "engine.loader.statistics": "statistics",
    "engine.prefetch.loader": "prefetched",
    "errors": "AsyncDataError ChangedError ClosedError ConfigError CorruptError FormatError ManifestError "
    "MemoryBudgetError MissingError ReadError ResumeError SourceError StalledError StoreError TransformError "
    "WorkerError",
    "lightning.datamodule": "AsyncDataModule",
    "lightning.predictions": "PredictionWriter",
    "lightning.prefetcher": "DevicePrefetcher",
    "options": "Balanced LoaderOptions",
    "sources.composed.composed": "ConcatSource MixtureSource SubsetSource",
    "sources.composed.split": "folds split",
    "sources.contract.source": "Source StorageLayout",
    "sources.hdf5.merge": "merge_patches",
    "sources.hdf5.schema.field": "Field",
    "sources.hdf5.source": "HDF5Source",
    "sources.manifest.columns": "Column",
    "sources.manifest.source": "ManifestSource",
    "sources.torch_dataset": "DatasetSource",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  # imported above, for type checkers


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
