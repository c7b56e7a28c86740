"""`Groups`: which samples belong together, as names of groups that stay the same when files are added."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.base import Part, Source, ids_of
from lit_async_data.sources.concat import ConcatSource
from lit_async_data.sources.places import Places, column_of, name_of
from lit_async_data.sources.subset import SubsetSource


class Groups(NamedTuple):
    """The group of each sample.

    Attributes:
        codes: Number of each sample's group; int64, shape (n,).
        names: By number; all different.
        what: What a group is, for messages.
    """

    codes: Indices
    names: Sequence[str]
    what: str


def groups_of(source: Source, given: Any, places: Places) -> Groups:
    """The groups that a user asked for.

    Args:
        source: Whose samples.
        given: ``"file"``, ``"file:REGEX"``, ``"group"``, the name of a column, or one value per sample; see `split`.
        places: Of its samples.

    Raises:
        ConfigError: It is nothing of these, fits the source badly, or says nothing of some sample; begins with
            ``groups:``.
    """
    if not isinstance(given, str):
        return _of_values(source, given, "the array given")
    if given == "file" or given.startswith("file:"):
        found = _by_path(source, {"file": _itself}.get(given) or _found_in(given))
        if found is not None:
            present, dense = np.unique(found[0], return_inverse=True)
            return Groups(dense, [found[1][code] for code in present.tolist()], "file")
    if given in ("file", "group") or given.startswith("file:"):
        if not any(part.name for part in places.parts):
            raise ConfigError(f"groups: {given!r} needs a source that knows its files, and {name_of(source)} does not")
        return _of_parts(places, given)
    try:
        values = column_of(source, given)
    except MissingError as error:
        raise ConfigError(
            f"groups: {given!r} is neither file, file:REGEX, group, time, nor a dataset or column of one value per "
            f"sample; an array of {len(source)} values will do too ({error})"
        ) from error
    return _of_values(source, values, given)


def hashed(names: Sequence[str]) -> Words:
    """64 bits of each name, the same on every machine; uint64, shape (n,)."""
    # What was no UTF-8 when it was read comes with surrogates, and must not be an error here.
    texts = (name.encode("utf-8", "surrogateescape") for name in names)
    words = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
    return np.fromiter(words, np.uint64, len(names))


def _by_path(source: Source, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
    """A number for each sample, by what a function makes of the path of its file, and what that is.

    None where samples have no files of their own: those of an HDF5 file are in one of its parts.
    """
    if isinstance(source, SubsetSource):
        whole = _by_path(source.source, naming)
        return None if whole is None else (whole[0][source.samples], whole[1])
    if isinstance(source, ConcatSource):
        several = [_by_path(each, naming) for each in source.sources]
        numbers: dict[str, int] = {}
        codes = []
        for found in several:
            if found is None:
                return None
            of_each = [numbers.setdefault(name, len(numbers)) for name in found[1]]
            codes.append(np.array(of_each, np.int64)[found[0]])
        return np.concatenate(codes), list(numbers)
    grouped: Any = getattr(source, "grouped_by_path", None)
    return None if grouped is None else grouped(naming)


def _itself(path: str) -> str:
    return path


def _of_parts(places: Places, given: str) -> Groups:
    naming: Callable[[Part], str] = {"file": _file, "group": _name}.get(given) or _by_regex(given)
    names = np.array(
        _told_apart(places.parts, naming) if given in ("file", "group") else list(map(naming, places.parts)), object
    )
    codes, distinct = _numbered(names)
    # Parts of which a subset has nothing left are no groups of it.
    present, dense = np.unique(codes[places.which], return_inverse=True)
    return Groups(dense, [distinct[code] for code in present.tolist()], given.partition(":")[0])


def _told_apart(parts: Sequence[Part], naming: Callable[[Part], str]) -> list[str]:
    """The names of parts, with their paths where files have the same name: in several sources put together."""
    files: dict[str, set[str]] = {}
    for part in parts:
        files.setdefault(naming(part), set()).add(part.file)
    return [name if len(files[name]) == 1 else f"{name} of {part.file}" for part in parts for name in [naming(part)]]


def _file(part: Part) -> str:
    return part.name.partition(":/")[0]


def _name(part: Part) -> str:
    return part.name


def _by_regex(given: str) -> Callable[[Part], str]:
    found = _found_in(given)
    return lambda part: found(part.file)


def _found_in(given: str) -> Callable[[str], str]:
    """What a regular expression finds in a path."""
    try:
        pattern = re.compile(given.removeprefix("file:"))
    except re.error as error:
        raise ConfigError(f"groups: {given.removeprefix('file:')!r} is no regular expression: {error}") from error

    def naming(path: str) -> str:
        found = pattern.search(path)
        name = found and found[1 if pattern.groups else 0]
        if name is None:
            raise ConfigError(f"groups: {pattern.pattern!r} is not found in {path}", file=path)
        return name

    return naming


def _of_values(source: Source, given: Any, what: str) -> Groups:
    values = np.asanyarray(given)  # masked arrays stay masked
    if values.ndim != 1:
        raise ConfigError(f"groups: {what} has the shape {values.shape}; give one value per sample")
    if len(values) != len(source):
        raise ConfigError(f"groups: {what} has {len(values)} values for {len(source)} samples; give one for each")
    missing = np.flatnonzero(_missing(values))
    if missing.size:
        first = int(missing[0])
        value = values[first : first + 1].tolist()[0]
        more = f", nor for {missing.size - 1} more" if missing.size > 1 else ""
        number = int(ids_of(source, missing[:1])[0])
        place = source.locate([number])[0]
        raise ConfigError(
            f"groups: {what} has no value ({value!r}) for sample {number} (row {place.row} of {place.file}){more}; "
            "give it one, or leave the sample out",
            file=place.file,
            row=place.row,
            sample_id=number,
        )
    return Groups(*_numbered(_plain(values, what)), what)


def _missing(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where there is no value: masked, NaN, None."""
    missing = np.array(np.ma.getmaskarray(values))
    if values.dtype.kind in "fc":
        missing |= np.isnan(np.ma.getdata(values))
    elif values.dtype.kind in "mM":
        missing |= np.isnat(np.ma.getdata(values))
    elif values.dtype.kind in "OT":
        # pandas has words of its own for it.
        nothing = [
            value is None
            or type(value).__name__ in ("NAType", "NaTType")
            or (isinstance(value, float) and math.isnan(value))
            for value in values.tolist()
        ]
        missing |= np.array(nothing, bool)
    return missing


def _plain(values: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Values as whole numbers, text, bytes, or objects that are one of these."""
    plain = np.ma.getdata(values)
    if plain.dtype.kind == "T":
        return plain.astype(object)
    if plain.dtype.kind == "f" and (plain == np.rint(plain)).all() and (np.abs(plain) < 2**53).all():
        return plain.astype(np.int64)  # whole numbers come so where some other row of their table has none
    if plain.dtype.kind not in "iubUSO":
        raise ConfigError(f"groups: {what} is of type {plain.dtype}; groups are told apart by whole numbers or text")
    return plain


def _numbered(values: npt.NDArray[Any]) -> tuple[Indices, list[str]]:
    """A number for each distinct value, and what those values are as text."""
    if values.dtype.kind != "O":
        distinct, codes = np.unique(values, return_inverse=True)
        return codes, [_text(value) for value in distinct.tolist()]
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(_text(value), len(numbers)) for value in values.tolist()], np.int64)
    return codes, list(numbers)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer | np.bool_):
        return str(int(value))
    raise ConfigError(f"groups: {value!r} is neither a whole number nor text")
