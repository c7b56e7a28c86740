"""`Columns`: where the chunks of a dataset are; and `IndexKey`: whose chunks, and in which state of its file."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import h5py


class Columns(NamedTuple):
    """Where the chunks of a dataset are: 16 bytes per chunk, in grid order (last axis fastest)."""

    offsets: npt.NDArray[np.int64]  # of each chunk in the file; -1 if it was never written
    sizes: npt.NDArray[np.uint32]  # stored bytes of each chunk
    masks: npt.NDArray[np.uint32]  # bit i means that filter i was skipped


@dataclasses.dataclass(frozen=True)
class IndexKey:
    """Identifies an index: a dataset (or the choice of groups, without shapes), and the state of its file."""

    path: str = dataclasses.field(compare=False)
    name: str
    inode: int  # the device number differs between machines and mounts, so it is left out
    size: int
    mtime_ns: int
    ctime_ns: int
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    filters: tuple[int, ...]  # by number, in the order of the mask bits

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> IndexKey:
        """The key of an open chunked dataset, with the current state of its file."""
        now = os.fstat(dataset.file.id.get_vfd_handle())
        properties = dataset.id.get_create_plist()
        return cls(
            dataset.file.filename,
            dataset.name or "",
            now.st_ino,
            now.st_size,
            now.st_mtime_ns,
            now.st_ctime_ns,
            dataset.dtype.str,
            tuple(int(n) for n in dataset.shape),
            tuple(int(n) for n in dataset.chunks or ()),
            tuple(int(properties.get_filter(number)[0]) for number in range(properties.get_nfilters())),
        )

    @property
    def chunks(self) -> int:
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def __str__(self) -> str:
        return f"{self.path}:/{self.name.strip('/')}"
