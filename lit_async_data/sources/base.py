"""The contract between data and loader: the `Source` protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt

from lit_async_data.permutation import Indices
from lit_async_data.spec import BatchSpec


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """How samples lie together in storage.

    Attributes:
        rows: Samples that can only be decoded together; 1 where each can be read alone.
        plain: Whether reading is no more than a copy from memory: then several small batches are read in one go.
    """

    rows: int = 1
    plain: bool = False


class Location(NamedTuple):
    """Where a sample lies.

    Attributes:
        file: Path of the file.
        group: Group inside the file, ``"/"`` for its root.
        row: Row of the datasets there, counted from 0.
    """

    file: str
    group: str
    row: int


@runtime_checkable
class Source(Protocol):
    """Samples that can be read by number, in any order, from any thread.

    A sample is what ``len`` counts: a row, a window of rows, a line of a table. Sample numbers are int64 from 0 on and
    never change while the source lives. All samples have the shapes and dtypes of ``spec``.

    What an implementation promises:

    * Building it checks what can be checked without reading samples, and raises `SourceError` or `ConfigError`. It
      starts no thread. It can be pickled; handles are opened where they are used.
    * `read_into` fills exactly the arrays given, for any samples in any order, repeated ones too; it may be called from
      several threads at once. It holds no lock while it waits for storage or decodes, where the format allows.
    * It returns right values or raises: never fill values for something missing, never a partly filled batch without
      an error. Errors name file, dataset, row and sample.
    * After `close` everything it opened is closed; a later `read_into` may open it again.
    """

    def __len__(self) -> int:
        """Number of samples, ≥ 1."""
        ...

    @property
    def spec(self) -> BatchSpec:
        """Keys, shapes and dtypes of the fields, and whether batches are dicts or tuples."""
        ...

    @property
    def chunks(self) -> ChunkLayout:
        """Which samples lie together."""
        ...

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays.

        Args:
            samples: int64, shape (n,).
            out: For the wanted keys of ``spec`` a C-contiguous array of shape ``(n, *stored_shape)`` to be overwritten.

        Raises:
            SourceError: The data are not what they were when the source was built.
        """
        ...

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """Where these samples lie.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        ...

    def close(self) -> None:
        """Close every handle. Idempotent."""
        ...
