"""`Field`, and the files, groups, fields and layouts that the user chose."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import functools
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import TENSOR_TYPES
from lit_async_data.errors import ConfigError, FormatError, MissingError
from lit_async_data.options import check_names, explains_names, flag, whole, within
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.hdf5.storage.failures import h5py
from lit_async_data.sources.hdf5.storage.open_file import refuse_external_link
from lit_async_data.sources.images.formats import ImageOptions, ImageShape
from lit_async_data.sources.local_files import folder_of, is_pattern, natural


@explains_names()
@dataclasses.dataclass(frozen=True)
class Field(ImageOptions):
    """What a batch takes from a dataset. In YAML, a mapping with the same names.

    Attributes:
        name: The dataset, relative to the source's ``group`` unless the name begins with ``/``; or a member of compound
            values: ``"events.label"``. Several names or fields: channels, of equal shape, type and window, on axis 0 of
            a sample, or 1 behind the rows of a window. Other options apply to names; a field in the list has its own.
        column: A column of a dataset of two axes, whose axis is dropped: counted from 0, or its name among the texts of
            an attribute of the dataset, one for each column (AnnData's ``var``, pandas's items and text axes of NetCDF
            name columns, too).
        dtype: Element type to deliver, such as ``"float32"``. The device casts if that moves fewer bytes to it,
            otherwise the workers do. None: as stored.
        window: The rows of a sample, relative to its own row: ``(start, stop)`` gives ``stop − start`` rows on an axis
            of their own, ``(start, stop, step)`` every step-th of these, a number one row without axis. None: its own.
        pad: How a window is filled beyond either end of its part, so that every row has one: ``"last"`` repeats the
            nearest row, ``"zero"`` gives zeros. Another field, ``KEY_mask``, bool of shape (window,), is True where
            data is real. None: windows lie inside their part. With ``patch``, at the ends of the axes of smaller
            volumes; the mask has the shape of a patch.
        classes: Names of the values 0, 1, 2, … If the file names its numbers (categories, enumerations, flags), each
            number becomes the place of its name. None: the names in the file; for text, all texts of the files, sorted.
        names: Where the file names the numbers 0, 1, 2, …: ``"@NAME"``, an attribute of the dataset, ``"/@NAME"``, one
            of the file, or the name of a dataset. None: in categories, enumerations or flags, if there are any.
        kind: ``"text"``: text or whole numbers that are not classes, such as ids, as numbers whose text
            `BatchSpec.names` gives. ``"class"``: text, or whole numbers such as 10, 20, 30, as 0, 1, 2, …
            ``"number"``: the text in a column of a table is numbers. None: text is classes.
        null: Treatment of empty text that is no class, and of missing values: codes −1 of categories, fill values of
            flags, values that a mask marks, −1 or −100 beside classes. ``"error"``, ``"ignore"`` (−100), or ``"drop"``.
            ``"zero"``: an all-zero row of several classes (only in columns of the source's ``table``).
        lookup: A dataset with one integer per row: row r is ``name[lookup[r]]``, of a small table, kept in memory.
        mask_and_scale: Whether to apply NetCDF's ``scale_factor``, ``add_offset`` and ``_FillValue`` (as NaN). Delivers
            ``dtype`` if given, else float64 for float64 and integers of more than two bytes, else float32.
        max_length: The number of rows to which samples of variable length are padded, with ``fill``. None: the length
            of the longest sample, or of its bucket (``LoaderOptions.batch_by``).
        ragged: The layout of samples of variable length in a batch: padded, or with ``"concat"`` end to end, of shape
            (total, *rest), with the field ``KEY_offsets``, int64 of shape (B + 1,): the begin of each sample, and the
            end of the last. Host transforms get padded samples, and may change no length.
        pad_side: Where samples of variable length are padded: ``"right"``, behind their values, or ``"left"``.
        offsets: The rows of a sample, relative to its own row, as ``[-15, -5, 0]``, in place of ``window``; with
            ``time``, seconds: ``[-0.2, -0.1, 0]``. Or, if ``name`` holds samples of variable length end to end, a
            dataset of integers: the begin of each sample, and in one more value the end of the last.
        time: A dataset with the time of each row, in seconds, ascending. The field may then have another number of rows
            than the fields without seconds, whose rows are the samples; the time of a sample is in the ``time`` of the
            first of these that has one, else in that of the field itself. None: ``offsets`` are rows.
        patch: The shape of a sample that is a part of a volume, an array of any rank, one per file, group or dataset,
            as ``(32, 64, 64)``; 1 for an axis gives slices. See ``patches_per_volume`` of `HDF5Source`. The first
            element of each patch is in another field, ``KEY_origin``, int64 of shape (axes,).
        stride: Elements from one patch to the next along each axis. None: a patch. The last ends with the volume.
        points: The number of points of a sample that is a part of a cloud, a dataset with the points on axis 0, one per
            file or group. ``patches_per_volume`` of `HDF5Source` draws whole chunks of points, the same of all fields;
            else points follow each other. Another field, ``KEY_points``, int64 of shape (points,), has their rows.
        direction: The row for a time: ``"nearest"``, or ``"backward"``, the last one that is not later.
        tolerance: The largest distance to that row, in seconds. Beyond it, ``pad`` fills the row; without ``pad``, the
            sample is left out. None: half the median interval of ``time``, or with ``"backward"`` the whole interval.
        starts: As a dataset of ``offsets``, without the end of the last sample, which ends with ``name``.
        ends: A dataset with the end of each sample, instead of ``offsets``.
        lengths: A dataset with the number of rows of each sample, instead of ``offsets``.
        attr: An attribute with numbers, of any shape, or one text, of the dataset ``name`` or, without a name, of the
            group of the part (``"/"``: of the file): one value for all rows of the part, or for each group or dataset
            that is a sample. A single number has no axis.
        per: ``"anchor"``: the dataset has a value for each row number in the dataset that ``rows`` names, such as the
            label of each event. ``"edge"``: a value before each row and one behind the last, in each part or episode,
            as T + 1 observations beside T actions; ``offsets=[0, 1]`` are both around a row. ``"episode"``: a value for
            each of the source's ``episodes``. None: a value for each row of the part.
        decode: ``"image"``: each row holds the bytes of an image (JPEG, PNG, TIFF, WebP, BMP, GIF), delivered as uint8
            (C, H, W), a window as (window, C, H, W): bytes of variable length, or of one length with zeros at the end.
            If ``name`` is a group, its ``values`` hold images between its ``offsets``, or its datasets are images.
        channels: The order of the channels that an ordinary decoder gives. ``"BGR"``: red and blue change places, since
            RGB arrays were given to an encoder of BGR, as by ``cv2.imencode``. RGB is delivered either way.
        fill: Value of padding, also of samples of variable length, such as −100 for labels that a loss leaves out.
        separator: Text between the classes in a cell of ``table``, which give a vector of 0 and 1, or between numbers.

    The base class `ImageOptions` has the options of images.

    Raises:
        ConfigError: A name is unknown or a value is wrong; the message begins with the name.

    Example:
        >>> Field("labels", column=2).column
        2
        >>> Field("data", window=(0, 512)).rows
        512
        >>> Field("camera", decode="image", image_size=224, window=(-15, 1, 5)).rows
        4
        >>> Field("data", window=(3, 3))
        Traceback (most recent call last):
        lit_async_data.errors.ConfigError: window: (3, 3) is not (start, stop) or (start, stop, step), start below stop
    """

    name: str | Sequence[str | Field | Mapping[str, Any]] = ""
    column: int | str | None = None
    dtype: npt.DTypeLike | None = None
    window: int | tuple[int, int] | tuple[int, int, int] | None = None
    classes: Sequence[str] | None = None
    names: str | None = None
    lookup: str | None = None
    mask_and_scale: bool = False
    max_length: int | None = None
    pad: Literal["last", "zero"] | None = None
    ragged: Literal["pad", "concat"] = "pad"
    pad_side: Literal["left", "right"] = "right"
    offsets: str | Sequence[float] | None = None
    starts: str | None = None
    ends: str | None = None
    lengths: str | None = None
    attr: str | None = None
    per: Literal["anchor", "edge", "episode"] | None = None
    kind: Literal["class", "number", "text"] | None = None
    null: Literal["error", "ignore", "drop", "zero"] = "error"
    decode: Literal["image"] | None = None
    channels: Literal["RGB", "BGR"] = "RGB"
    separator: str | None = None
    time: str | None = None
    direction: Literal["nearest", "backward"] = "nearest"
    tolerance: float | None = None
    patch: Sequence[int] | None = None
    stride: Sequence[int] | None = None
    points: int | None = None

    def __post_init__(self) -> None:
        self._stack(self.name)
        for name in ("name", "lookup", "attr", "time", "names", *BOUNDS)[bool(self.stacked) :]:
            value = getattr(self, name)
            left_out = self.attr and value in ("", "/") if name == "name" else value is None or name == "offsets"
            if not (isinstance(value, str) and value.strip("/")) and not left_out:
                what = f"{value!r} is not the name of a dataset" if value else "missing; which dataset is it?"
                raise ConfigError(what, name)
        for name, least in (("column", 0), ("max_length", 1), ("points", 1)):
            if getattr(self, name) is not None and not (name == "column" and isinstance(self.column, str)):
                self._set(name, whole(name, getattr(self, name), least))
        fill: Any = self.fill
        if not isinstance(fill, numbers.Real):
            raise ConfigError(f"{fill!r} is not a number", "fill")
        self._set("dtype", _tensor_type(self.dtype))
        self._set("window", _window(_listed(self.window)))
        self._set("offsets", _offsets(_listed(self.offsets), seconds=self.time is not None))
        for name in ("patch", "stride"):
            if (given := _listed(getattr(self, name))) is not None:
                listed = given if _is_list(given) and given else [given]
                self._set(name, tuple(whole(name, each, 1) for each in listed))
        _check_combination(self)
        if self.pad and self.rows is None and not self.places:
            raise ConfigError(f"{self.pad!r} needs a window of rows, such as (0, 8), or (-2, -1) for one row", "pad")
        self._set("classes", _class_names(_listed(self.classes)))
        flag("mask_and_scale", self.mask_and_scale)
        for name in changed(self, _VALUES if self.decode else ("channels", *IMAGE)):
            if name != "fill":
                raise ConfigError("does not apply to images" if self.decode else "needs decode: image", name)
        swapped = self.channels == "BGR" and self.image.target_mode.startswith("RGB")
        if self.channels != "RGB" and not swapped:
            raise ConfigError(f"{self.channels!r} is not RGB, nor BGR with mode RGB or RGBA", "channels")
        for name in IMAGE if self.decode else ():
            self._set(name, getattr(self.image, name))

    def __repr__(self) -> str:
        others = [f"{name}={getattr(self, name)!r}" for name in changed(self, _DEFAULTS) if name != "name"]
        return f"Field({', '.join([repr(self.name), *others])})"

    def _stack(self, given: Any) -> None:
        if not _is_list(given) or not given:
            return
        fields = [dataclasses.replace(self, name=each) if isinstance(each, str) else Field.of(each) for each in given]
        for each in fields:
            if each.stacked or each.attr or each.decode:
                raise ConfigError(f"{each.dataset!r} is no dataset of numbers, as channels are; leave it out", "name")
            for option in (name for name in ROWS if getattr(each, name) != getattr(fields[0], name)):
                raise ConfigError(f"{each.dataset} and {fields[0].dataset} have different ones; give them one", option)
        for name, value in {"name": tuple(fields), **{name: getattr(fields[0], name) for name in ROWS}}.items():
            self._set(name, value)

    @property
    def stacked(self) -> tuple[Field, ...]:
        """A field for each channel; empty if the field is one dataset."""
        name: Any = self.name
        return name if isinstance(name, tuple) else ()

    @property
    def dataset(self) -> str:
        """The name of the dataset, or the names of several."""
        return ", ".join(each.dataset for each in self.stacked) or str(self.name)

    @functools.cached_property
    def image(self) -> ImageShape:
        """How images become arrays of one shape."""
        return ImageShape(**{name: getattr(self, name) for name in IMAGE})

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether tensors can hold the type, or the field casts it."""
        return (dtype.kind, dtype.itemsize) in TENSOR_TYPES or (dtype.kind in "fc" and self.dtype is not None)

    @classmethod
    def of(cls, given: str | Field | Mapping[str, Any] | Sequence[Any], where: str = "") -> Field:
        """A field from the name of a dataset, a mapping of attributes, a field, or a list of these.

        Args:
            given: Any of these.
            where: Prefix of names in messages: ``"fields.x."``.

        Raises:
            ConfigError: As the constructor.
        """
        if isinstance(given, Field):
            return given
        if not isinstance(given, str | Mapping | Sequence) or not given:
            raise ConfigError(f"{given!r} is not a dataset name, a Field or a mapping", where.rstrip(".") or "field")
        values: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"name": given}
        if None in values:  # YAML reads null as None
            values["null"] = values.pop(None)  # type: ignore[call-overload]
        with within(where):
            check_names(values, [field.name for field in dataclasses.fields(cls)])
            return cls(**values)

    @property
    def seconds(self) -> bool:
        """Whether ``offsets`` are seconds."""
        return self.time is not None and isinstance(self.offsets, tuple)

    @property
    def places(self) -> bool:
        """Whether samples are places in a volume or a cloud of points."""
        return bool(self.patch or self.points)

    @property
    def steps(self) -> Sequence[float]:
        """The rows of a sample, relative to its own row, or their times."""
        if isinstance(self.offsets, tuple):
            return self.offsets
        first = self.window if isinstance(self.window, int) else 0
        return range(*self.window) if isinstance(self.window, tuple) else range(first, first + 1)

    @property
    def rows(self) -> int | None:
        """Number of rows in a window; None if rows have no axis of their own."""
        return len(self.steps) if isinstance(self.window, tuple) or isinstance(self.offsets, tuple) else None


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Field)}
IMAGE = tuple(field.name for field in dataclasses.fields(ImageShape))
ROWS = ("window", "offsets", "time", "direction", "tolerance", "pad", "per")  # choose rows around a sample's own
MOST_ROWS = 2**53  # no window of rows, or of seconds, reaches further
VARIABLE = ("max_length", "fill", "ragged", "pad_side")  # of samples of variable length; images have a fill, too
BOUNDS = ("offsets", "starts", "ends", "lengths")  # name the dataset of boundaries of such samples
PATCH = {"name", "patch", "stride", "pad", "dtype", "points"}
# Options that do not apply to images, except for the fill.
_VALUES = ("column", "dtype", "classes", "names", "lookup", "mask_and_scale", "kind", "null", *VARIABLE)
_CHOICES = {
    "pad": ("last", "zero", None),
    "decode": ("image", None),
    "ragged": ("pad", "concat"),
    "pad_side": ("left", "right"),
    "kind": ("class", "number", "text", None),
    "null": ("error", "ignore", "drop", "zero"),
    "per": ("anchor", "edge", "episode", None),
    "direction": ("nearest", "backward"),
}


def left_out(option: str) -> str:
    return "leave it out" + ", and unpack in a transform: values come as stored" * (option == "mask_and_scale")


def changed(field: Field, options: Iterable[str]) -> list[str]:
    return [name for name in options if getattr(field, name) != _DEFAULTS[name]]


def _check_combination(field: Field) -> None:
    for name, values in _CHOICES.items():
        if getattr(field, name) not in values:
            raise ConfigError(f"{getattr(field, name)!r} is not one of {', '.join(filter(None, values))}", name)
    for name in changed(field, ("max_length", "pad_side")) if field.ragged == "concat" else ():
        raise ConfigError("nothing is padded with ragged: concat; leave it out", name)
    for name in [name for name in BOUNDS if getattr(field, name)][1:]:
        raise ConfigError(f"one of {', '.join(BOUNDS)} is enough; leave the others out", name)
    for name in () if field.seconds else changed(field, ("direction", "tolerance")):
        raise ConfigError("needs time=NAME, and offsets=[…] in seconds", name)
    not_patch = set(_DEFAULTS) - PATCH | {"points" if field.patch else "stride"}
    if field.places and (wrong := min(changed(field, not_patch), default="")):
        raise ConfigError(f"does not apply to {'patches' if field.patch else 'points'}; {left_out(wrong)}", wrong)
    if field.stride and len(field.stride) != len(field.patch or ()):
        raise ConfigError(f"{field.stride} needs patch=, the shape of a sample, with as many axes", "stride")
    for name, rows in (("window", field.window), ("offsets", field.offsets)):
        if not isinstance(rows, str | None) and np.max(np.abs(np.array(rows, object))) > MOST_ROWS:
            raise ConfigError(f"{rows!r} reaches further than a file has rows", name)
    if field.tolerance is not None and not (_is_number(field.tolerance, numbers.Real) and field.tolerance >= 0):
        raise ConfigError(f"{field.tolerance!r} is not a number of seconds", "tolerance")
    if field.window is not None and isinstance(field.offsets, tuple):
        raise ConfigError("a window and a list of rows are two choices of rows; give one of the two", "offsets")
    refused = ("column", *ROWS[:3], "lookup", "mask_and_scale", "decode", "per", *VARIABLE, *BOUNDS)
    of_per = {"anchor": ROWS[:3], "edge": ("time", *BOUNDS[1:]), "episode": ROWS[:3], None: ()}
    for option in changed(field, refused if field.attr else of_per[field.per]):
        what = "an attribute, which is one value" if field.attr else f"values of {field.per}s"
        raise ConfigError(f"does not apply to {what}; leave it out", option)


def _listed(given: Any) -> Any:
    return given.tolist() if isinstance(given, np.ndarray) else given


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _is_number(value: Any, kind: Any = numbers.Integral) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < math.inf


def _tensor_type(given: Any) -> np.dtype[Any] | None:
    if given is None:
        return None
    dtype = np.dtype(object)
    with contextlib.suppress(TypeError):  # a torch dtype becomes text such as torch.float32
        dtype = np.dtype(str(given).removeprefix("torch.") if type(given).__module__ == "torch" else given)
    if (dtype.kind, dtype.itemsize) not in TENSOR_TYPES:
        raise ConfigError(f"{given!r} is not an element type of tensors; give one such as float32", "dtype")
    return dtype.newbyteorder("=")


def _window(given: Any) -> Any:
    if given is None:
        return None
    if _is_number(given):
        return int(given)
    listed: Any = given if _is_list(given) else ()
    ints = len(listed) in (2, 3) and all(map(_is_number, listed))
    if not ints or listed[0] >= listed[1] or any(step < 1 for step in listed[2:]):
        cure = "; rows are whole numbers, and seconds are offsets=[…] with time=NAME" if listed and not ints else ""
        raise ConfigError(f"{given!r} is not (start, stop) or (start, stop, step), start below stop{cure}", "window")
    return tuple(map(int, given))


def _offsets(given: Any, *, seconds: bool) -> Any:
    if given is None or (isinstance(given, str) and given.strip("/")):
        return given
    kind = numbers.Real if seconds else numbers.Integral
    if not (_is_list(given) and given) or not all(_is_number(each, kind) for each in given):
        what = "is neither the name of a dataset nor a list of whole numbers, such as [-15, -5, 0]"
        raise ConfigError(f"{given!r} {what}{'' if seconds else '; seconds need time=NAME'}", "offsets")
    return tuple(map(float if seconds else int, given))


def _class_names(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not _is_list(given) or not given or not all(isinstance(name, str | int) for name in given):
        raise ConfigError(f"{given!r} is not a list of names", "classes")
    if len(names := dict.fromkeys(map(str, given))) < len(given):
        raise ConfigError(f"{list(given)} holds a name twice", "classes")
    return tuple(names)


PathLike = str | os.PathLike[str]
#: A field as the user may give it.
FieldLike = str | Field | Mapping[str, Any] | Sequence[str | Field | Mapping[str, Any]]


def chosen_files(path: PathLike | Sequence[PathLike], files: Files) -> dict[str, str]:
    """The files of a path, a glob or a list of these: their names by absolute path.

    A name stays the same when files are added, or all are moved: it is the path below the folder of the glob, or the
    file name; the absolute path if two files would have the same name.
    """
    given: Any = [path] if isinstance(path, str | os.PathLike) else path
    if not isinstance(given, Sequence) or not given or not all(p and isinstance(p, str | os.PathLike) for p in given):
        raise ConfigError(f"{path!r} is not a file, a glob or a list of these", "path")
    chosen: dict[str, str] = {}
    for item in map(files.named, given):
        pattern = is_pattern(item)
        folder = folder_of(item) if pattern else os.path.dirname(item)
        for file in files.matching(item) if pattern else [item]:
            if file in chosen:
                raise ConfigError(f"{file} is named twice, so its samples would count twice; name it once", "path")
            chosen[file] = os.path.relpath(file, folder)
    alike = {name for name, times in collections.Counter(chosen.values()).items() if times > 1}
    return {file: file if name in alike else name for file, name in chosen.items()}


def check_options(fields: Mapping[str, Field], options: AbstractSet[str], where: str) -> None:
    for key, field in fields.items():
        if field.stacked:
            raise ConfigError(f"a list of names does not apply {where}; give each a key", f"fields.{key}")
        for option in changed(field, [each for each in _DEFAULTS if each not in options]):
            raise ConfigError(f"does not apply {where}; {left_out(option)}", f"fields.{key}.{option}")


def chosen_groups(file: h5py.File, path: str, group: str | Sequence[str] | None, *, allow_external: bool) -> list[str]:
    """The groups of a file that the user chose; groups of a pattern in natural order. Opens no group."""
    for name in ([group] if isinstance(group, str) else group or ()) if not allow_external else ():
        refuse_external_link(file, str(name))
    given: Any = group if _is_list(group) and group else [group]
    chosen = [name for each in given for name in _matching_groups(file, path, each)]
    name, times = collections.Counter(chosen).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"{name} is named twice, so its samples would count twice; name it once", "group")
    return chosen


def _matching_groups(file: h5py.File, path: str, group: Any) -> list[str]:
    import glob

    if group is None or group == "/":
        return ["/"]
    if not isinstance(group, str) or not group.strip("/"):
        raise ConfigError(f"{group!r} is not the name of a group or a pattern such as patient_* or run_[123]", "group")
    name = group.strip("/")
    above, _, last = name.rpartition("/")
    if glob.has_magic(above):
        rest = f"; write the rest before names: group={above!r}, fields={{KEY: '{last}/NAME'}}"
        rest = "" if glob.has_magic(last) or "/" in above else rest
        raise ConfigError(f"{group!r}: only the last component of a name may have wildcards{rest}", "group")
    if not glob.has_magic(last) or (above or "/") not in file:
        if name not in file:
            raise MissingError(f"{path}: has no group {name!r}; check group=", file=path, dataset=name)
        return [name]
    matches = sorted(fnmatch.filter(names_in(file[above or "/"], path), last), key=natural)
    if not matches:
        raise MissingError(f"{path}: {group!r} matches none of its groups; check group=", file=path)
    return [f"{above}/{each}" if above else each for each in matches]


def names_in(group: Any, path: str) -> list[str]:
    """The names in a group. A name that is not UTF-8 is an error: h5py gives it as bytes, but opens text only."""
    names = list(group)
    for name in names:
        if isinstance(name, bytes):
            what = f"holds the name {name!r}, which is not UTF-8; rename it, as by h5py: group.move(OLD, NEW)"
            raise FormatError(f"{path}:{group.name}: {what}", file=path, dataset=group.name)
    return names


def chosen_layouts(layout: str | Mapping[str, str] | None, keys: list[str]) -> dict[str, str]:
    """The letters of the axes, by the batch keys that have some. A single string belongs to the first key."""
    if not isinstance(layout, str | Mapping | None):
        raise ConfigError(f"{layout!r} is neither letters nor a mapping from batch key to letters", "layout")
    chosen = {keys[0]: layout} if isinstance(layout, str) else dict(layout or {})
    for key in chosen:
        if key not in keys:
            raise ConfigError(f"{key!r} is not one of the fields {', '.join(keys)}", "layout")
    return chosen


# Advice on options of a field that are given to a source.
OF_FIELD = {
    **{each.name: f"give it to a field: Field(NAME, {each.name}=…)" for each in dataclasses.fields(Field)},
    **dict.fromkeys(
        ("name", "key", "keys", "dataset", "datasets", "columns"), "give fields={KEY: NAME of a dataset, …}"
    ),
}
