"""`Conversion`: what is made of the values of stored rows before they are delivered."""

from __future__ import annotations

import dataclasses
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from lit_async_data.errors import FormatError
from lit_async_data.order.permutation import Indices

Array = npt.NDArray[Any]
# Attributes by which NetCDF packs values.
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """How NetCDF packed values: ``stored · scale + offset``, and those that stand for none.

    Attributes:
        scale: Factor.
        offset: Summand.
        missing: Stored values, in the stored type, that mean that there is none.
        unsigned: Whether stored integers are meant without a sign.
        dtype: Element type of what comes out.
    """

    scale: float
    offset: float
    missing: tuple[Any, ...]
    unsigned: bool
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: h5py.Dataset, dtype: npt.DTypeLike | None = None) -> Packing:
        """What the attributes of a dataset say; source: the NetCDF users' guide, appendix on attribute conventions.

        Args:
            dataset: Open.
            dtype: What is to be delivered, if that was said.
        """
        stored = dataset.dtype.newbyteorder("=")
        wide = (stored.kind in "iu" and stored.itemsize > 2) or stored == np.float64
        wanted = np.dtype(dtype or bool)
        missing = [attribute(dataset, name) for name in ("_FillValue", "missing_value") if name in dataset.attrs]
        return cls(
            scale=float(attribute(dataset, "scale_factor", 1.0)),
            offset=float(attribute(dataset, "add_offset", 0.0)),
            missing=tuple(value for value in (_as_stored(each, stored) for each in missing) if value is not None),
            unsigned=stored.kind == "i" and str(attribute(dataset, "_Unsigned", "")).lower() == "true",
            dtype=wanted if wanted.kind == "f" else np.dtype(np.float64 if wide else np.float32),
        )

    def unpack(self, values: Array) -> Array:
        """Values as they are meant."""
        missing = np.zeros(values.shape, np.bool_)
        for value in self.missing:  # one by one, in the stored type: several make floats of large integers
            missing |= values == value
        if self.unsigned:
            values = values.view(values.dtype.str.replace("i", "u"))
        # In two bytes less than the result holds, no rounding shows; one more rounding in float64 would.
        meant = values.astype(self.dtype) if (self.scale, self.offset) == (1.0, 0.0) else self._scaled(values)
        meant[missing] = np.nan
        return meant

    def _scaled(self, values: Array) -> Array:
        return (values.astype(np.float64) * self.scale + self.offset).astype(self.dtype)


def _as_stored(value: Any, stored: np.dtype[Any]) -> Any:
    """A value in the stored type; None if no stored value can be equal to it. NaN stays NaN without it."""
    given = np.asarray(value)
    with np.errstate(invalid="ignore", over="ignore"):
        if stored.kind == "i" and value > np.iinfo(stored).max:
            unsigned = given.astype(stored.str.replace("i", "u"))
            return unsigned.view(stored)[()] if unsigned == value else None
        cast = given.astype(stored)
    return cast[()] if cast == value else None


def attribute(dataset: h5py.Dataset, name: str, otherwise: Any = None) -> Any:
    """The single value of an attribute, which NetCDF stores as an array of one."""
    if name not in dataset.attrs:
        return otherwise
    value = np.asarray(dataset.attrs[name]).reshape(-1)
    if value.size != 1 or (name != "_Unsigned" and value.dtype.kind not in "iuf"):
        raise FormatError(f"{dataset.file.filename}:{dataset.name}: its attribute {name} is {dataset.attrs[name]!r}")
    found = value[0]
    return found.decode() if isinstance(found, bytes) else found


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """From stored values to delivered ones. Immutable; safe to call from any thread.

    Attributes:
        file: The file, and
        dataset: the dataset, for messages.
        column: Which column of each row, or None for all.
        table: Where values are looked up, or None where they are what is wanted.
        packing: How they are packed, or None.
        classes: How many values there may be: 0, 1, …; None for any.
        windowed: Whether each sample takes rows that follow each other, on axis 1 of its values.
    """

    file: str
    dataset: str
    column: int | None = None
    table: Array | None = None
    packing: Packing | None = None
    classes: int | None = None
    windowed: bool = False

    def __call__(self, values: Array, rows: Indices, dtype: np.dtype[Any]) -> Array:
        """Convert the values of some samples.

        Args:
            values: As stored, in native byte order; shape (n, …).
            rows: The first row of each sample, for messages; int64, shape (n,).
            dtype: Of what is to come out.

        Raises:
            FormatError: A value is outside the table or the classes, or cannot be cast; names its row.
        """
        if self.column is not None:
            values = values[..., self.column]
        if self.table is not None:
            count = len(self.table)
            self._check((values < 0) | (values >= count), values, rows, f"is no row of a table of {count}")
            values = self.table[values]
        if self.packing is not None:
            values = self.packing.unpack(values)
        if self.classes is not None:
            why = f"is none of its {self.classes} classes"
            self._check((values < 0) | (values >= self.classes), values, rows, why)
        return self._cast(values, rows, dtype)

    def _cast(self, values: Array, rows: Indices, dtype: np.dtype[Any]) -> Array:
        if values.dtype == dtype or np.can_cast(values.dtype, dtype, "safe"):
            return values
        with np.errstate(invalid="ignore", over="ignore"):
            cast = values.astype(dtype)
            if dtype.kind in "fc":
                self._check(np.isinf(cast) & ~np.isinf(values), values, rows, f"is beyond what {dtype} holds")
            else:
                self._check(self._lossy(values, cast), values, rows, f"is nothing that {dtype} holds")
        return cast

    @staticmethod
    def _lossy(values: Array, cast: Array) -> Array:
        """Where a cast to integers has not kept the value; NaN is unequal to all."""
        changed: Array = cast.astype(values.dtype) != values
        if values.dtype.kind in "iu" and cast.dtype.kind in "iu":
            changed |= (values < 0) != (cast < 0)  # −1 as an unsigned number and back is −1 again
        elif cast.dtype.kind in "iu":
            limits = np.iinfo(cast.dtype)  # out of range, the result is whatever the processor makes of it
            changed |= ~((values >= float(limits.min)) & (values < float(limits.max) + 1))
        return changed

    def _check(self, wrong: Array, values: Array, rows: Indices, why: str) -> None:
        if not wrong.any():
            return
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        row = int(rows[place[0]]) + (int(place[1]) if self.windowed else 0)
        raise FormatError(
            f"{self.file}:/{self.dataset.strip('/')}, row {row}: {values[place]} {why}; correct the file, or leave "
            "such rows out with rows=",
            file=self.file,
            dataset=self.dataset,
            row=row,
        )
