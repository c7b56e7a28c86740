"""`merge_patches`: volumes from the predictions of their patches."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.composed.composed import SubsetSource
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.schema.patches import StoredPatches
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.failures import h5py


def merge_patches(predictions: Any, source: Source, path: str | os.PathLike[str]) -> None:
    """Put predictions of patches together to volumes, and write them into an HDF5 file. One volume is held at a time.

    Where patches overlap, the mean of their predictions counts; padding counts nowhere. An element of no patch, or of
    one whose prediction is missing, is NaN.

    Args:
        predictions: The prediction for each sample of ``source``, in order, of shape (len(source), *channels, *patch):
            a dataset of h5py, as `PredictionWriter` writes it, or an array.
        source: An `HDF5Source` whose fields have patches on a grid, or a side of its `split`.
        path: The file to write. Each volume is a dataset, float32 of shape (*channels, *volume), with the name of its
            file and group: ``"scan_1.h5"``, ``"scans.h5/patient_1"``.

    Raises:
        ConfigError: The source has no patches on a grid; the predictions have another number or shape; or the file
            exists.

    Example:
        >>> with h5py.File("predictions/predictions.h5") as file:  # doctest: +SKIP
        ...     merge_patches(file["prediction"], source, "volumes.h5")
    """
    whole: Any = source
    while isinstance(whole, SubsetSource):
        whole = whole.source
    parts: Any = whole.stored_parts if isinstance(whole, HDF5Source) else ()
    volumes: Any = [next((each.patches for each in part.fields.values() if each.patches), None) for part in parts]
    if not volumes or volumes[0] is None or volumes[0].drawn is not None:
        raise ConfigError(f"{source.name} has no patches on a grid; give the source that was predicted", "source")
    if len(predictions) != len(source):
        what = f"{len(predictions)} for {len(source)} samples; predict each sample once, in order, with shuffle=False"
        raise ConfigError(what, "predictions")
    size = volumes[0].size
    if (shape := predictions[0].shape)[-len(size) :] != size:
        raise ConfigError(f"one has shape {shape}, but a patch has {size}", "predictions")
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; move or delete it, or give another path", "path")
    places, partial = source.places(), f"{os.fspath(path)}.partial"
    with h5py.File(partial, "w") as file:
        for number in np.unique(places.which).tolist():
            own, name = np.flatnonzero(places.which == number), places.parts[number].name
            origins = volumes[number].origins(parts[number].anchors.rows(places.rows[own]), None)
            file[name.replace(":/", "/")] = _merged(predictions, own, origins, volumes[number])
    os.replace(partial, path)


def _merged(predictions: Any, samples: Indices, origins: Indices, volume: StoredPatches) -> Array:
    total: Any = np.zeros((*predictions[0].shape[: -len(volume.size)], *volume.shape), np.float32)
    count: Any = np.zeros(volume.shape, np.float32)
    inside = tuple(map(slice, volume.extent))
    for sample, origin in zip(samples.tolist(), origins.tolist(), strict=True):
        box = tuple(slice(first, first + n) for first, n in zip(origin, volume.extent, strict=True))
        total[..., *box] += predictions[sample][..., *inside]
        count[box] += 1
    with np.errstate(invalid="ignore"):
        return np.divide(total, count, out=total)  # type: ignore[no-any-return]
