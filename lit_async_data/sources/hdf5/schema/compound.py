"""`Member`: one member of compound values, as in `Field("events.label")`. Readers copy records as bytes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec
from lit_async_data.errors import MissingError

if TYPE_CHECKING:
    import h5py

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Member:
    """A member: the names on the way to it, its type and that of the record as stored, and the values of a row."""

    path: tuple[str, ...]
    dtype: np.dtype[Any]
    record: np.dtype[Any]
    spec: FieldSpec

    def __str__(self) -> str:
        return f".{'.'.join(self.path)}"

    def of(self, records: Array) -> Array:
        """The member of records, or of their bytes on the last axis; in native byte order."""
        values = member_of(records if records.dtype.names else records.view(self.record)[..., 0], self.path)
        return values.astype(self.dtype.newbyteorder("="), copy=False)


def find_member(dataset: h5py.Dataset, name: str, context: dict[str, Any]) -> tuple[tuple[str, ...], Any]:
    """The names on the way to a member, and its type, as libhdf5 has it; without a name, those of all values."""
    paths = member_paths(dataset.dtype) if name else []
    path = next((path for path in paths if ".".join(path) == name), ())
    if name and not path:
        where, listed = f"{context['file']}:/{context['dataset'].strip('/')}", ", ".join(member_names(dataset.dtype))
        raise MissingError(f"{where}: has no member {name!r}; its members are {listed}", **context)
    kind = dataset.id.get_type()
    for each in path:
        kind = kind.get_member_type(kind.get_member_index(each.encode(errors="surrogateescape")))
    return path, kind


def member_paths(dtype: np.dtype[Any]) -> list[tuple[str, ...]]:
    """The names on the way to each member; none of a type that is not compound.

    Example:
        >>> member_paths(np.dtype([("onset", "i8"), ("pos", [("x", "f4"), ("y", "f4")])]))
        [('onset',), ('pos', 'x'), ('pos', 'y')]
    """
    return [(name, *inner) for name in dtype.names or () for inner in member_paths(dtype[name])] or [()]


def member_names(dtype: np.dtype[Any]) -> list[str]:
    return [".".join(path) for path in member_paths(dtype)]


def member_of(records: Array, path: tuple[str, ...]) -> Array:
    for name in path:
        records = records[name]
    return records
