"""`merge_patches`: volumes from the predictions of their patches."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.composed.composed import ConcatSource, SubsetSource
from lit_async_data.sources.contract.source import Source, starts
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.failures import h5py
from lit_async_data.sources.local_files import local_path


def merge_patches(predictions: Any, source: Source, path: str | os.PathLike[str]) -> None:
    """Put predictions of patches together to volumes, and write them into an HDF5 file. One volume is held at a time.

    Where patches overlap, the mean of their predictions counts; padding counts nowhere, nor does a sample that is
    marked in the dataset ``missing`` of the same file. An element without any prediction is NaN.

    Args:
        predictions: The prediction for each sample of ``source``, in order, of shape (len(source), *channels, *patch),
            of a cloud also (len(source), *channels, points): a dataset of h5py, as `PredictionWriter` writes it, an
            array or a tensor.
        source: An `HDF5Source` whose fields have patches on a grid, or a side of its `split`.
        path: The file to write. Each volume is a dataset, float32 of shape (*channels, *volume), with the name of its
            file and group: ``"scan_1.h5"``, ``"scans.h5/patient_1"``.

    Raises:
        ConfigError: The source has no patches on a grid; the predictions have another number, shape or type; or the
            file exists.
        SourceError: The file cannot be written.

    Example:
        >>> with h5py.File("predictions/predictions.h5") as file:  # doctest: +SKIP
        ...     merge_patches(file["prediction"], source, "volumes.h5")
    """
    whole: Any = source
    while isinstance(whole, SubsetSource):
        whole = whole.source
    if isinstance(whole, ConcatSource):
        what = f"{whole.name} are sources put end to end; predict and merge each by itself, as with predict=[a, b]"
        raise ConfigError(what, "source")
    parts: Any = whole.stored_parts if isinstance(whole, HDF5Source) else ()
    volumes: Any = [next((each.patches for each in part.fields.values() if each.patches), None) for part in parts]
    if not volumes or volumes[0] is None or volumes[0].drawn is not None:
        raise ConfigError(f"{source.name} has no patches on a grid; give the source that was predicted", "source")
    if (count := operator.length_hint(predictions)) != len(source):
        what = f"{count} for {len(source)} samples; predict each sample once, in order, with shuffle=False"
        raise ConfigError(what, "predictions")
    size, shape = volumes[0].size, _prediction(predictions, 0).shape
    if volumes[0].scattered and shape[-len(size) :] != size:
        size = size[:1]  # such as a label for each point
    if shape[-len(size) :] != size:
        raise ConfigError(f"one has shape {shape}, but a patch has {size}", "predictions")
    path = local_path(path)
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; move or delete it, or give another path", "path")
    places, there = source.places(), np.ones(count, bool)
    begins, ids = starts([len(part.own_rows) for part in parts]), source.ids(np.arange(count))
    beside: Any = predictions.parent if isinstance(predictions, h5py.Dataset) else {}
    marks = beside.get("missing")
    if isinstance(marks, h5py.Dataset) and marks.shape == there.shape and marks.dtype == bool:
        there = ~marks[...]
    partial = f"{path}.{os.getpid()}.partial"
    try:
        with h5py.File(partial, "w") as file:
            for number in np.unique(places.which).tolist():
                own, name = np.flatnonzero((places.which == number) & there), places.parts[number].name
                rows = parts[number].anchors.rows(ids[own] - begins[number])
                origins = volumes[number].origins(rows, None)[:, : len(size)]
                file[name.replace(":/", "/")] = _merged(predictions, own, origins, volumes[number], shape)
        os.replace(partial, path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be written: {error}; check its folder and space", file=path) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def _merged(predictions: Any, samples: Indices, origins: Indices, volume: Any, shape: tuple[int, ...]) -> Array:
    whole, extent = (each[: origins.shape[1]] for each in (volume.shape, volume.extent))
    total: Any = np.zeros((*shape[: -len(whole)], *whole), np.float32)
    count: Any = np.zeros(whole, np.float32)
    inside = tuple(map(slice, extent))
    for sample, origin in zip(samples.tolist(), origins.tolist(), strict=True):
        box = tuple(slice(first, first + n) for first, n in zip(origin, extent, strict=True))
        if (values := _prediction(predictions, sample)).shape != shape:
            raise ConfigError(f"sample {sample} has shape {values.shape}, but the first has {shape}", "predictions")
        total[..., *box] += values[..., *inside]
        count[box] += 1
    with np.errstate(invalid="ignore"):
        return np.divide(total, count, out=total)  # type: ignore[no-any-return]


def _prediction(predictions: Any, sample: int) -> Any:
    try:
        values = predictions[sample]
        if (torch := sys.modules.get("torch")) is not None and isinstance(values, torch.Tensor):
            values = (values.float() if values.is_floating_point() else values).numpy(force=True)  # also bfloat16
        values = np.asarray(values)
    except (TypeError, ValueError, LookupError, RuntimeError, OSError) as error:
        raise ConfigError(f"sample {sample} is no array: {error}; give an array of numbers", "predictions") from error
    if values.dtype.kind not in "biuf":
        raise ConfigError(f"sample {sample} is of type {values.dtype}; give an array of numbers", "predictions")
    return values
