"""What is written for the samples of a batch: the values that ``predict_step`` returned, and where the samples are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source

# The columns of locations, in order, and those that are left out if all samples have this value.
LOCATION_COLUMNS = ("sample", "file", "group", "row", "id", "path")
ABSENT = {"group": "/", "id": None, "path": None}
WANTED = "return a tensor or array whose first axis is the samples of the batch, or a dict of these and of lists of str"
# Numbers with the samples on axis 0, or a text for each sample.
Values = npt.NDArray[Any] | list[Any]


class Field(NamedTuple):
    """What is written for each sample under one name."""

    dtype: np.dtype[Any] | None  # None for text
    shape: tuple[int, ...]  # of one sample

    @property
    def is_array(self) -> bool:
        return len(self.shape) > 1  # as a mask; others fit into a column of a table

    def __str__(self) -> str:
        return "text" if self.dtype is None else f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)


def fields_of(values: Mapping[str, Values]) -> dict[str, Field]:
    return {name: Field(None, ()) if isinstance(v, list) else Field(v.dtype, v.shape[1:]) for name, v in values.items()}


def predicted(outputs: Any, samples: int, where: str) -> dict[str, Values]:
    """The values that ``predict_step`` returned for a batch, by name, in host memory, as they are stored."""
    named = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
    if not named:
        raise ConfigError(f"{where}: an empty dict; {WANTED}")
    for name in named:
        if not isinstance(name, str) or not name or name in LOCATION_COLUMNS:
            raise ConfigError(f"{where}: {name!r} cannot be the name of a prediction; give it another one")
    found = {name: _stored(value, f"{where}: {name}") for name, value in named.items()}
    for name, field in fields_of(found).items():
        if (found_samples := len(found[name])) != samples or 0 in field.shape:
            what = f"{found_samples} values of shape {field.shape} for a batch of {samples} samples"
            raise ConfigError(f"{where}: {name} has {what}; {WANTED}")
        if field.is_array and ("/" in name or name == "."):
            raise ConfigError(f"{where}: {name!r} cannot be a dataset of HDF5; leave out the slash or the dot")
    return found


def _stored(value: Any, where: str) -> Values:
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return list(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
            value = value.float()  # of bfloat16 and smaller ones, which numpy does not have
        value = value.numpy(force=True)
    if not isinstance(value, np.ndarray) or not value.ndim:
        what = "a single number" if isinstance(value, np.ndarray) else f"of type {type(value).__name__}"
        raise ConfigError(f"{where} is {what}; {WANTED}")
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise ConfigError(f"{where} is of type {value.dtype}; return bools, whole numbers or floats of at most 64 bits")
    # Many readers of Parquet do not know float16.
    in_table = value.dtype == np.float16 and value.ndim < 3
    return np.ascontiguousarray(value, np.float32 if in_table else value.dtype.newbyteorder("="))


class LocationColumns:
    """The columns that say which samples of a source these are, and where they are stored."""

    def __init__(self, source: Source) -> None:
        self._source = source
        ends = np.cumsum([part.samples for part in source.parts])
        firsts = [int(end) - part.samples for end, part in zip(ends, source.parts, strict=True) if part.samples]
        located = source.locate(source.ids(np.array(firsts, np.int64)))
        self._absent = {name for name, value in ABSENT.items() if all(_of(each, name) == value for each in located)}

    def of(self, positions: Indices) -> dict[str, Values]:
        """The columns of the samples at these positions, by name."""
        ids = self._source.ids(positions)
        located = self._source.locate(ids)
        names = [name for name in LOCATION_COLUMNS[1:] if name not in self._absent]
        columns: dict[str, Any] = {name: [_of(each, name) for each in located] for name in names}
        return {"sample": ids, **columns, "row": np.array(columns["row"], np.int64)}


def _of(location: Any, name: str) -> Any:
    value = getattr(location, name, None)  # only locations in tables have an id and a path
    # Parquet and HDF5 store text as UTF-8. The name of a file may be any bytes: others are written as \xe4.
    return value.encode(errors="surrogateescape").decode(errors="backslashreplace") if isinstance(value, str) else value
