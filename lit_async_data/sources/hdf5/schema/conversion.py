"""`Conversion`: turns stored values into delivered ones: column, lookup, unpacking, classes, cast."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import FormatError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED
from lit_async_data.sources.hdf5.schema.categories import MISSING, UNLISTED, UNNAMED, Numbering, did_you_mean
from lit_async_data.sources.hdf5.schema.compound import Member
from lit_async_data.sources.hdf5.schema.inspect import in_group

if TYPE_CHECKING:
    import h5py

Array = npt.NDArray[Any]
# NetCDF attributes of packed values.
PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """How NetCDF packed values: ``stored · scale + offset``, with markers for missing values."""

    scale: float
    offset: float
    missing: tuple[Any, ...]  # markers for missing values, in the stored type
    unsigned: bool  # whether signed storage holds unsigned integers
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, dataset: h5py.Dataset, dtype: npt.DTypeLike | None = None) -> Packing:
        """The packing that the attributes of a dataset describe (NetCDF users' guide), for the wanted element type."""
        stored = dataset.dtype.newbyteorder("=")
        wide = (stored.kind in "iu" and stored.itemsize > 2) or stored == np.float64
        requested = np.dtype(dtype or bool)
        missing = [attribute(dataset, name) for name in ("_FillValue", "missing_value") if name in dataset.attrs]
        return cls(
            scale=float(attribute(dataset, "scale_factor", 1.0)),
            offset=float(attribute(dataset, "add_offset", 0.0)),
            missing=tuple(value for value in (_as_stored(each, stored) for each in missing) if value is not None),
            unsigned=stored.kind == "i" and str(attribute(dataset, "_Unsigned", "")).lower() == "true",
            dtype=requested if requested.kind == "f" else np.dtype(np.float64 if wide else np.float32),
        )

    def unpack(self, values: Array) -> Array:
        """The unpacked values; NaN where missing."""
        missing = np.zeros(values.shape, np.bool_)
        for value in self.missing:  # one by one, in the stored type: an array of markers could become floats
            missing |= values == value
        if self.unsigned:
            values = values.view(values.dtype.str.replace("i", "u"))
        # Stored values of two bytes less than the result need no rounding; scaling in float64 would add one.
        unpacked = values.astype(self.dtype) if (self.scale, self.offset) == (1.0, 0.0) else self._scaled(values)
        unpacked[missing] = np.nan
        return unpacked

    def _scaled(self, values: Array) -> Array:
        return (values.astype(np.float64) * self.scale + self.offset).astype(self.dtype)


def _as_stored(value: Any, stored: np.dtype[Any]) -> Any:
    """A value in the stored type; None if no stored value can equal it, as for NaN, which needs no marker."""
    given = np.asarray(value)
    with np.errstate(invalid="ignore", over="ignore"):
        if stored.kind == "i" and value > np.iinfo(stored).max:
            unsigned = given.astype(stored.str.replace("i", "u"))
            return unsigned.view(stored)[()] if unsigned == value else None
        cast = given.astype(stored)
    return cast[()] if cast == value else None


def attribute(dataset: h5py.Dataset, name: str, default: Any = None) -> Any:
    """The value of an attribute. NetCDF stores a single value as an array of one."""
    if name not in dataset.attrs:
        return default
    value = np.asarray(dataset.attrs[name]).reshape(-1)
    if value.size != 1 or (name != "_Unsigned" and value.dtype.kind not in "iuf"):
        path, what = dataset.file.filename, f"its attribute {name} is {dataset.attrs[name]!r}, not one number"
        what = f"{path}:{dataset.name}: {what}; correct it, or leave out mask_and_scale"
        raise FormatError(what, file=path, dataset=dataset.name)
    single = value[0]
    return single.decode() if isinstance(single, bytes) else single


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
    """Turns stored values into delivered ones. Immutable; thread-safe."""

    file: str
    dataset: str
    member: Member | None = None  # the member of compound values; None if values are not compound
    column: int | None = None  # the column of each row; None for all
    table: Array | None = None  # table to look values up in; None if the values themselves are delivered
    packing: Packing | None = None  # how values are packed; None if they are not unpacked
    numbering: Numbering | None = None  # the numbers of classes, and of no value; None if values are no such numbers
    mask: npt.NDArray[np.bool_] | None = None  # which rows (of the table) have no value; None if all have one
    # Of rows without a value: "ignore" delivers −100, "mark" the marks of `Numbering`; "error" and "drop" are an error.
    null: str = "error"
    last_row: int | None = None  # the last row of the dataset, if a sample is a window of rows, on axis 1; else None
    step: int = 1  # rows from one row of a window to the next
    names: Any = None  # as of `StoredDataset`

    @property
    def doubtful(self) -> bool:
        """Whether a value may be missing without −100 to stand for it, or have a name that is no class."""
        found = {self.numbering.unnamed, *self.numbering.targets.values()} if self.numbering else set[int | None]()
        masked = self.mask is not None and bool(self.mask.any())
        return UNLISTED in found or (self.null != "ignore" and (masked or MISSING in found))

    def __call__(self, values: Array, rows: Indices, dtype: np.dtype[Any]) -> Array:
        """Convert the values of samples, shape (n, …) in native byte order, to a dtype.

        ``rows`` has the first row of each sample, for `FormatError` to name a row whose value is outside the table or
        the classes, is missing, or would be changed by the cast.
        """
        places: Array | None = None
        if self.member is not None:
            values = self.member.of(values)
        if self.column is not None:
            values = values[..., self.column]
        if self.table is not None:
            count = len(self.table)
            self._check((values < 0) | (values >= count), values, rows, f"is not a row of a table of {count}")
            places, values = values, self.table[values]
        if self.packing is not None:
            values = self.packing.unpack(values)
        if self.numbering is not None:
            values = self._numbered(self.numbering, values, rows, places)
        return self._cast(values, rows, dtype)

    def _numbered(self, numbering: Numbering, values: Array, rows: Indices, places: Array | None) -> Array:
        found = numbering(values)
        if self.mask is not None:
            if places is None:
                places = rows if self.last_row is None else rows[:, None] + np.arange(values.shape[1]) * self.step
            lost = self.mask[places.clip(0, len(self.mask) - 1)]
            found = np.where(lost, MISSING, found.astype(np.int64)) if lost.any() else found
        if found is values or self.null == "mark" or found.min() > UNNAMED:
            return found
        self._check(found == UNNAMED, values, rows, f"is not one of its {len(numbering.classes)} classes")
        if (unlisted := found == UNLISTED).any():
            name, classes = numbering.names[values[unlisted][0].item()], numbering.classes
            what = f"is {name!r}, not one of {few(classes)}{did_you_mean(name, classes)}"
            self._check(unlisted, values, rows, what, "add it to classes, ")
        missing = found == MISSING
        if self.null != "ignore":
            ways = "set null='ignore' (−100), or leave such samples out (null='drop'; for rows of a table: filters=), "
            self._check(missing, values, rows, "is a missing value", ways)
        found[missing] = IGNORED
        return found

    def _cast(self, values: Array, rows: Indices, dtype: np.dtype[Any]) -> Array:
        if values.dtype == dtype or np.can_cast(values.dtype, dtype, "safe"):
            return values
        with np.errstate(invalid="ignore", over="ignore"):
            cast = values.astype(dtype)
            if dtype.kind in "fc":
                wrong, problem = np.isinf(cast) & ~np.isinf(values), f"is beyond the range of {dtype}"
            else:
                wrong, problem = self._lossy(values, cast), f"is not a value of {dtype}"
        self._check(wrong, values, rows, problem, "choose another dtype, ")
        return cast

    @staticmethod
    def _lossy(values: Array, cast: Array) -> Array:
        """Where a cast to integers changes a value, NaN included."""
        changed: Array = cast.astype(values.dtype) != values
        if values.dtype.kind in "iu" and cast.dtype.kind in "iu":
            changed |= (values < 0) != (cast < 0)  # −1 survives a cast to unsigned and back
        elif cast.dtype.kind in "iu":
            limits = np.iinfo(cast.dtype)  # beyond them the result depends on the processor
            changed |= ~((values >= float(limits.min)) & (values < float(limits.max) + 1))
        return changed

    def _check(self, wrong: Array, values: Array, rows: Indices, problem: str, cure: str = "") -> None:
        if not wrong.any():
            return
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        row = int(rows[place[0]])
        if self.last_row is not None:  # windows may be padded
            row = min(max(row + int(place[1]) * self.step, 0), self.last_row)
        name = f"{self.dataset.strip('/')}{self.member or ''}, row {row}"
        where = f"{self.file}:/{name if self.names is None else in_group(self.dataset, self.names, row)}"
        what = f"{values[place]} {problem}; {cure}correct the file, or leave such rows out with rows="
        raise FormatError(what, place=where, file=self.file, dataset=self.dataset, row=row)
