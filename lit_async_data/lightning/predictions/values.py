"""What ``predict_step`` returned for a batch: named fields, and their values on the way to host memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lit_async_data.device import streams as device_streams
from lit_async_data.errors import ConfigError
from lit_async_data.host.resources import memory
from lit_async_data.lightning.predictions.locations import LOCATION_COLUMNS

# The name of predictions that come without one.
UNNAMED = "prediction"
WANTED = (
    "return a tensor or array whose first axis is the samples of the batch, or a dict of such tensors and arrays and "
    "of lists of str"
)

# Gives the streams of a device, or None if it has none.
StreamsOf = Callable[[torch.device], device_streams.Streams | None]
# Values in host memory: numbers with the samples on axis 0, or a text for each sample.
Values = npt.NDArray[Any] | list[str]


@dataclasses.dataclass(frozen=True)
class PredictedField:
    """What is predicted for each sample under one name.

    Attributes:
        dtype: Type of the numbers as stored; None for text.
        shape: Shape for one sample; ``()`` for text.

    Example:
        >>> print(PredictedField(np.dtype("u1"), (64, 48)), PredictedField(None), sep=", ")
        uint8 (64, 48), text
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether a sample has at least two axes, as a mask has; if not, it fits into a column of a table."""
        return len(self.shape) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of one sample; 0 for text, which has no fixed size."""
        return 0 if self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return "text" if self.dtype is None else f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)


def named(outputs: Any, where: str) -> dict[str, Any]:
    """The values that ``predict_step`` returned, by name.

    Args:
        outputs: What it returned.
        where: Says which batch, for messages.

    Raises:
        ConfigError: It returned an empty dict, or a name cannot be that of a column.
    """
    if not isinstance(outputs, Mapping):
        return {UNNAMED: outputs}
    if not outputs:
        raise ConfigError(f"{where}: an empty dict; {WANTED}")
    for name in outputs:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: {name!r} is not a name; the keys of the dict are the names of columns")
        if name in LOCATION_COLUMNS:
            raise ConfigError(f"{where}: {name!r} is a column that PredictionWriter adds; give it another name")
    return dict(outputs)


def field_of(name: str, value: Any, samples: int, where: str) -> PredictedField:
    """The field of the values of a batch. Looks at no value, so that it does not wait for a device.

    Args:
        name: Their name.
        value: The values.
        samples: Samples of the batch.
        where: Says which batch, for messages.

    Raises:
        ConfigError: The value cannot be stored, or is not one value for each sample.
    """
    where = f"{where}: {name}"
    if _is_text(value):
        shape, dtype = (len(value),), None
        for number, text in enumerate(value):
            if not _is_unicode(text):
                raise ConfigError(f"{where}: text {number} of the batch, {text!a}, cannot be stored as UTF-8")
    elif isinstance(value, torch.Tensor | np.ndarray):
        shape, dtype = tuple(value.shape), _stored_type(value, where)
    else:
        raise ConfigError(f"{where} is {_described(value)}; {WANTED}")
    if shape[:1] != (samples,):
        what = "a single number" if not shape else f"{shape[0]} values on its first axis"
        raise ConfigError(f"{where} has {what} for a batch of {samples} samples; {WANTED}")
    if 0 in shape:
        raise ConfigError(f"{where} has shape {shape}, which holds no value; leave it out")
    field = PredictedField(dtype, shape[1:])
    if field.is_array and ("/" in name or name == "."):
        raise ConfigError(f"{where}: a dataset of HDF5 cannot have this name; leave out the slash, or the dot")
    if dtype == np.float16 and not field.is_array:  # which many readers of Parquet do not know
        return dataclasses.replace(field, dtype=np.dtype(np.float32))
    return field


def _is_text(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "U" and value.ndim == 1
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str) for each in value)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it; half of a surrogate pair it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stored_type(value: torch.Tensor | npt.NDArray[Any], where: str) -> np.dtype[Any]:
    if isinstance(value, np.ndarray):
        dtype: Any = value.dtype.newbyteorder("=")
    elif value.layout != torch.strided:
        raise ConfigError(f"{where} is a tensor of layout {value.layout}; return its to_dense()")
    else:
        try:
            dtype = np.dtype(str(_host_type(value.dtype)).removeprefix("torch."))
        except TypeError:  # a type of torch that numpy does not have
            dtype = value.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ConfigError(f"{where} is of type {value.dtype}; return bools, whole numbers or floats of at most 64 bits")
    return dtype


def _host_type(dtype: torch.dtype) -> torch.dtype:
    """The type in host memory: float32 for floats that numpy does not have, which holds all of their values."""
    known = (torch.float16, torch.float32, torch.float64)
    return torch.float32 if dtype.is_floating_point and dtype not in known else dtype


def _described(value: Any) -> str:
    if isinstance(value, list | tuple) and value:
        kinds = sorted({type(each).__name__ for each in value})
        return f"a {type(value).__name__} of {len(value)} {' and '.join(kinds)}"
    return "None" if value is None else f"of type {type(value).__name__}"


class HostCopies:
    """The values of a batch on their way to host memory. The copies from devices with streams have begun.

    Args:
        values: By name.
        fields: The field of each.
        streams_of: Gives the streams of a device, the same each time.
    """

    def __init__(self, values: Mapping[str, Any], fields: Mapping[str, PredictedField], streams_of: StreamsOf) -> None:
        self._fields = fields
        self._values: dict[str, Any] = {}
        used: dict[torch.device, device_streams.Streams] = {}
        for name, value in values.items():
            self._values[name] = value
            if isinstance(value, torch.Tensor):
                tensor = value.detach().to(_host_type(value.dtype))
                streams = streams_of(tensor.device)
                if streams is None:
                    self._values[name] = tensor.cpu()
                    continue
                used[tensor.device] = streams
                host = memory.allocated(tensor.numel() * tensor.element_size(), pinned=True)
                self._values[name] = torch.from_numpy(host).view(tensor.dtype).reshape(tensor.shape)
                # On the compute stream: the copy begins when the values are there, and what computes next may use
                # their memory again.
                streams.copy(self._values[name], tensor.contiguous())
        self._events = [(streams, streams.record(streams.compute())) for streams in used.values()]

    @property
    def under_way(self) -> bool:
        """Whether a device may still be computing or copying the values."""
        return bool(self._events)

    def values(self) -> dict[str, Values]:
        """The values in host memory, by name; waits until they are there.

        Arrays may be memory of whoever returned them: copy what must not change.
        """
        for streams, event in self._events:
            streams.happened(event, block=True)
        return {name: _as_stored(value, self._fields[name]) for name, value in self._values.items()}


def _as_stored(value: Any, field: PredictedField) -> Values:
    if field.dtype is None:
        return [str(each) for each in value]
    array = value.numpy() if isinstance(value, torch.Tensor) else value
    return np.ascontiguousarray(array, field.dtype)
