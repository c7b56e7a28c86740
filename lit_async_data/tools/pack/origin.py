"""Where each packed sample comes from: datasets in the group ``origin``, one value per sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source

# Number of the part in `PARTS`, and the row in it. Tables also have the texts ``origin/id`` and ``origin/path``.
PART, ROW = "origin/part", "origin/row"
NUMBERS: dict[str, np.dtype[Any]] = {PART: np.dtype(np.int32), ROW: np.dtype(np.int64)}
# The parts of the input, in the root of the packed file: files, or groups in them.
PARTS = "origin/parts"
_TEXTS = ("id", "path")


class Origin:
    """Finds where samples come from. Thread-safe.

    Args:
        source: The input.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        first = source.locate(source.ids(np.zeros(1, np.int64)))[0]
        self.texts = tuple(f"origin/{name}" for name in _TEXTS if getattr(first, name, None) is not None)
        parts = source.parts
        self._numbers: dict[tuple[str, str], int] = {}
        for part in parts:
            self._numbers.setdefault((part.file, part.group.strip("/")), len(self._numbers))
        self.parts = [f"{file}:/{group}" if group else file for file, group in self._numbers]

    def of(self, samples: Indices) -> tuple[dict[str, Array], dict[str, list[str]]]:
        """The numbers and the texts of samples, by dataset."""
        places: Any = self._source.locate(self._source.ids(samples))
        which = [self._numbers.get((place.file, place.group.strip("/")), -1) for place in places]
        numbers: dict[str, Array] = {PART: np.array(which, np.int32)}
        numbers[ROW] = np.array([place.row for place in places], np.int64)
        texts = {name: [_text(getattr(place, name.partition("/")[2])) for place in places] for name in self.texts}
        return numbers, texts


def _text(value: str | None) -> str:
    """A name that UTF-8 can hold: bytes of a file name that are no text are spelled out."""
    return (value or "").encode(errors="backslashreplace").decode()
