"""`Codec`: compresses chunks as HDF5's filters do, without libhdf5 and its lock."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, Literal, Self, get_args

import numpy as np

from lit_async_data.batch.spec import Array
from lit_async_data.errors import ConfigError
from lit_async_data.sources.hdf5.storage.codecs import DEFLATE
from lit_async_data.sources.hdf5.storage.extra_codecs import LZ4, ZSTD

Name = Literal["none", "deflate", "zstd", "lz4"]
NAMES: tuple[Name, ...] = get_args(Name)
# The lowest, the usual and the highest level of each. lz4 has none.
LEVELS = {"deflate": (1, 6, 12), "zstd": (1, 3, 22)}


@dataclasses.dataclass(frozen=True)
class Codec:
    """A compression. Thread-safe; releases the GIL.

    Attributes:
        name: ``none``, ``deflate``, ``zstd`` or ``lz4``.
        level: How hard it tries; None where there is no choice.

    Raises:
        ConfigError: It has no such level, or its library is not installed.

    Example:
        >>> Codec.of("deflate").level
        6
        >>> Codec.of("lz4", 3)
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: level: lz4 has no levels; leave it out
    """

    name: Name
    level: int | None = None

    @classmethod
    def of(cls, name: Any, level: int | None = None) -> Self:
        """A codec with a level of its own, or the usual one."""
        if name not in NAMES:
            raise ConfigError(f"codec: {name!r} is not one of auto, {', '.join(NAMES)}")
        if name not in LEVELS:
            if level is not None:
                raise ConfigError(f"level: {name} has no levels; leave it out")
        else:
            least, usual, most = LEVELS[name]
            level = usual if level is None else level
            if not least <= level <= most:
                raise ConfigError(f"level: {level} is not a level of {name}; give {least} to {most}")
        if name in ("zstd", "lz4"):
            _check_installed(name)
        return cls(name, level)

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name} {self.level}"

    @property
    def filter(self) -> tuple[int, tuple[int, ...]]:
        """The number and the parameters of the HDF5 filter that undoes it."""
        filters = {
            "deflate": (DEFLATE, (min(self.level or 0, 9),)),
            "zstd": (ZSTD, (self.level or 0,)),
            "lz4": (LZ4, (0,)),
        }
        return filters[self.name]

    def encode(self, values: Array, *, shuffle: bool) -> bytes:
        """The stored bytes of a chunk.

        Args:
            values: The chunk, C-contiguous.
            shuffle: Whether to store the first bytes of all values first, then the second ones, and so on.
        """
        data: Any = values.reshape(-1).view(np.uint8)
        if shuffle:
            data = np.ascontiguousarray(data.reshape(-1, values.itemsize).T).reshape(-1)
        return bytes(_ENCODERS[self.name](data, self.level))


def _check_installed(name: str) -> None:
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        raise ConfigError(f"codec: {name} needs a library: pip install 'lit-async-data[codecs]'") from None


def _deflate(data: Any, level: int | None) -> Any:
    try:
        import deflate
    except ImportError:
        return zlib.compress(data, min(level or 6, 9))
    return deflate.zlib_compress(data, level or 6)


def _zstd(data: Any, level: int | None) -> Any:
    import imagecodecs

    return imagecodecs.zstd_encode(data, level=level)


def _lz4(data: Any, _level: int | None) -> Any:
    import imagecodecs

    return imagecodecs.lz4h5_encode(data)


_ENCODERS: dict[str, Callable[[Any, int | None], Any]] = {"deflate": _deflate, "zstd": _zstd, "lz4": _lz4}
