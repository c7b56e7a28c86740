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
    """A member: the names on the way to it, its stored type, the stored type of the record, and the values of a row."""

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
    """The names on the way to a member, and its type in libhdf5; without a name, the type of whole values."""
    found = members(dataset.dtype if name else np.dtype(bool))
    if name not in found:
        where = f"{context['file']}:/{context['dataset'].strip('/')}"
        what = f"has no member {name!r}; its members are {', '.join(found)}"
        raise MissingError(what, **dict(context, place=where))
    kind = dataset.id.get_type()
    for each in found[name]:
        kind = kind.get_member_type(kind.get_member_index(each.encode(errors="surrogateescape")))
    return found[name], kind


def members(dtype: np.dtype[Any]) -> dict[str, tuple[str, ...]]:
    """The names on the way to each member, by these with dots; a type that is not compound is one without a name.

    Example:
        >>> members(np.dtype([("onset", "i8"), ("pos", [("x", "f4"), ("y", "f4")])]))
        {'onset': ('onset',), 'pos.x': ('pos', 'x'), 'pos.y': ('pos', 'y')}
    """
    paths = [(name, *inner) for name in dtype.names or () for inner in members(dtype[name]).values()] or [()]
    return {".".join(path): path for path in paths}


def member_of(records: Array, path: tuple[str, ...]) -> Array:
    for name in path:
        records = records[name]
    return records
