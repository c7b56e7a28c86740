"""`Groups`: which samples belong together, and the side of a split that each group goes to.

Group names do not change when files are added.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, ConfigError, MissingError, counted, few
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.weights import IGNORED, SampleClasses
from lit_async_data.sources.contract.source import EACH, Places, Source, numbered
from lit_async_data.sources.table.labels import note_names, trim

# Words that are rules; the prefixes tell a rule from a column of the same name.
RULES = ("file", "group", "time")
RULE, COLUMN = "rule:", "column:"
UNUSED = -1  # in place of a side, for groups and samples on no side


class Groups(NamedTuple):
    codes: Indices  # the group number of each sample; int64, shape (n,)
    names: Sequence[str]  # the name of each group; all different
    what: str  # what a group is, for messages


def groups_of(source: Source, given: Any, places: Places, option: str = "groups") -> Groups:
    if not isinstance(given, str):
        return _of_values(source, given, "the given array", option)
    if given.startswith(COLUMN):
        return _of_column(source, given.removeprefix(COLUMN), option)
    found = _of_rule(source, given.removeprefix(RULE), places, option)
    if found is not None:
        check_rule(source, given, option)
    return found or _of_column(source, given, option)


def stored_values(source: Source, by: Any, places: Places) -> Groups:
    """Groups of stored folds or sides, by the name of the class if there is one; −100 has an empty name."""
    found = groups_of(source, by, places, "by")
    field = source.spec.fields.get(by.removeprefix(COLUMN)) if isinstance(by, str) else None
    texts = field and field.classes
    names = [n if n != str(IGNORED) else "" for n in found.names]
    names = [texts[int(n)] if n else "" for n in names] if texts else names
    whole = [re.sub(r"^(-?[0-9]+)\.0$", r"\1", name) for name in names]  # as pandas writes numbers beside empty cells
    return found._replace(names=whole if len({*whole}) == len(whole) else names)


def check_rule(source: Source, given: str, option: str = "groups") -> None:
    """Refuse a word that is both a rule and a column, unless both mean the same, as where each sample is a group."""
    if given not in RULES or (given == "group" and EACH in source.parts[0].group):
        return
    try:
        source.column(given)
    except AsyncDataError:
        return
    what = f"is a rule, and {source.name} also has a column {given!r}; write '{COLUMN}{given}' or '{RULE}{given}'"
    raise ConfigError(f"{given!r} {what}", option)


def _of_rule(source: Source, given: str, places: Places, option: str) -> Groups | None:
    if given == "file" or given.startswith("file:"):
        by_path = source.grouped_by_path(str if given == "file" else _matcher(given, option))
        if by_path is not None:
            present, dense = np.unique(by_path[0], return_inverse=True)
            return Groups(dense, [by_path[1][code] for code in present.tolist()], "file")
    if given in ("file", "group") or given.startswith("file:"):
        if not any(part.name for part in places.parts):
            what = f"needs a source that knows its files, and {source.name} does not"
            raise ConfigError(f"{given!r} {what}; name a column, as with {option}='column:NAME'", option)
        if given == "group" and EACH in places.parts[0].group:  # each sample is one
            return Groups(np.arange(len(source)), source.column(given).tolist(), given)
        return _of_parts(places, given, option)
    return None


def _of_column(source: Source, given: str, option: str) -> Groups:
    try:
        values = source.column(given)
    except MissingError as error:
        if error.row is not None:  # a sample lacks its value
            raise
        what = f"file, file:REGEX, group, {'time, ' * (option == 'groups')}nor a dataset or column with one value per "
        what += f"sample ({error}); give one of these, or an array of {len(source)} values"
        raise ConfigError(f"{given!r} is neither {what}", option) from error
    if given in source.spec and source.spec[given].texts:
        values = source.spec.names(given, values)  # numbers of texts change when files are added
    return _of_values(source, values, given, option)


def hashed(names: Sequence[str]) -> Words:
    """A 64-bit hash of each name, the same on every machine; uint64, shape (n,)."""
    # Names that are not UTF-8 hold surrogates.
    texts = (name.encode("utf-8", "surrogateescape") for name in names)
    words = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in texts)
    return np.fromiter(words, np.uint64, len(names))


def _of_parts(places: Places, given: str, option: str) -> Groups:
    parts, rule = places.parts, given.partition(":")[0]
    if given == rule:
        names = [part.name.partition(":/")[0] if rule == "file" else part.name for part in parts]
        files: dict[str, set[str]] = {}
        for name, part in zip(names, parts, strict=True):
            files.setdefault(name, set()).add(part.file)
        # With the path if files of several sources have one name.
        pairs = zip(names, parts, strict=True)
        names = [name if len(files[name]) == 1 else f"{name} of {part.file}" for name, part in pairs]
    else:
        names = list(map(_matcher(given, option), (part.file for part in parts)))
    codes, distinct = _factorized(np.array(names, object))
    # A subset may have no samples of some parts.
    present, dense = np.unique(codes[places.which], return_inverse=True)
    return Groups(dense, [distinct[code] for code in present.tolist()], rule)


def _matcher(given: str, option: str) -> Callable[[str], str]:
    try:
        pattern = re.compile(given.removeprefix("file:"))
    except re.error as error:
        raise ConfigError(f"{given.removeprefix('file:')!r} is not a regular expression: {error}", option) from error

    def naming(path: str) -> str:
        match = pattern.search(path)
        name = match and match[1 if pattern.groups else 0]
        if name is None:
            raise ConfigError(f"{pattern.pattern!r} does not match {path}; every path must match", option, file=path)
        return trim(name)

    return naming


def _of_values(source: Source, given: Any, what: str, option: str) -> Groups:
    values = np.asanyarray(given)  # masked arrays stay masked
    if values.ndim == 2 and 1 in values.shape:  # MATLAB has no arrays of one axis
        values = values.reshape(-1)
    if values.ndim != 1:
        raise ConfigError(f"{what} has shape {values.shape}; give one value per sample", option)
    if len(values) != len(source):
        counts = f"{len(values)} values for {len(source)} samples"
        raise ConfigError(f"{what} has {counts}; give one value per sample", option)
    if option == "by" and (missing := _is_missing(values)).any():  # as with empty text, these samples are on no side
        texts = np.full(len(values), "", object)
        texts[~missing] = _comparable(np.ma.getdata(values)[~missing], what, option).tolist()
    else:
        texts = _comparable(complete(source, values, what, option), what, option)
    codes, stored = _factorized(texts, option)
    trimmed, names = numbered(map(trim, stored))
    if len(names) < len(stored):
        note_names(f"{source.name}: {what}", tuple(stored))
    return Groups(trimmed[codes], names, what)


def complete(source: Source, values: npt.NDArray[Any], what: str, option: str) -> npt.NDArray[Any]:
    missing = np.flatnonzero(_is_missing(values))
    if missing.size:
        first = int(missing[0])
        value = values[first : first + 1].tolist()[0]
        more = f", nor for {counted(missing.size - 1, 'other')}" if missing.size > 1 else ""
        number = int(source.ids(missing[:1])[0])
        place = source.locate([number])[0]
        where = f"sample {number} (row {place.row} of {place.file}){more}"
        message = f"{what} has no value ({value!r}) for {where}; add a value, or leave the sample out by a SubsetSource"
        raise ConfigError(message, option, file=place.file, row=place.row, sample_id=number)
    return values


def _is_missing(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    missing = np.array(np.ma.getmaskarray(values))
    if values.dtype.kind in "fc":
        missing |= np.isnan(np.ma.getdata(values))
    elif values.dtype.kind in "mM":
        missing |= np.isnat(np.ma.getdata(values))
    elif values.dtype.kind in "OT":
        missing |= np.fromiter(map(_is_nothing, values.tolist()), bool)
    return missing


def _is_nothing(value: Any) -> bool:
    # pandas has types of its own for missing values.
    return type(value).__name__ in ("NoneType", "NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))


def _comparable(values: npt.NDArray[Any], what: str, option: str = "groups") -> npt.NDArray[Any]:
    plain = np.ma.getdata(values)
    if plain.dtype.kind == "T":
        return plain.astype(object)
    if plain.dtype.kind == "f" and (plain == np.rint(plain)).all() and (np.abs(plain) < 2**53).all():
        return plain.astype(np.int64)  # tables hold whole numbers as floats if any row has none
    if plain.dtype.kind not in "iubUSO":
        raise ConfigError(f"{what} has type {plain.dtype}; give whole numbers or text", option)
    return plain


def _factorized(values: npt.NDArray[Any], option: str = "groups") -> tuple[Indices, list[str]]:
    if values.dtype.kind != "O":
        distinct, codes = np.unique(values, return_inverse=True)
        return codes, [text_of(value) for value in distinct.tolist()]
    return numbered(text_of(value, option) for value in values.tolist())


def text_of(value: Any, option: str = "groups") -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return value
    if isinstance(value, int | np.integer | np.bool_):
        return str(int(value))
    raise ConfigError(f"{value!r} is neither a whole number nor text; convert it", option)


# -- the side of each group of a split ---------------------------------------------------------------------------------


def drawn_sides(groups: Groups, shares: Sequence[float], keys: Words, labels: SampleClasses | None = None) -> Indices:
    """The side of each group, or `UNUSED`: sides hold their shares of samples as nearly as groups allow.

    Large groups are dealt first, groups of about the same size (a power of two) in the order of their keys, and the
    last ones to empty sides. A group goes to the side where Σ (share filled)² grows least, summed over classes and all
    samples.
    """
    if len(groups.names) < len(shares):
        what = f"need as many groups, and the number of groups ({groups.what}) is {len(groups.names)}"
        raise ConfigError(f"{len(shares)} sides or folds {what}; ask for fewer, or choose smaller groups", "split")
    codes, classes = groups.codes, np.zeros_like(groups.codes)
    if labels is not None:  # class 0 stands for all samples
        codes, classes = np.append(codes, codes[labels.samples]), np.append(classes, labels.classes + 1)
    pairs, counts = np.unique(codes * (classes.max() + 1) + classes, return_counts=True)
    group, which = np.divmod(pairs, classes.max() + 1)
    totals = np.bincount(classes)
    weights = counts if labels is None else np.bincount(group, (counts / totals[which]) ** 2)
    parts = list(zip(which.tolist(), counts.tolist(), (counts / totals[which] ** 2.0).tolist(), strict=True))
    first = np.searchsorted(group, np.arange(len(groups.names) + 1)).tolist()
    rest = 1 - sum(shares)
    wanted = [*shares, rest] if rest > 0 else list(shares)
    held, sides = [[0.0] * len(wanted) for _ in totals], np.full(len(groups.names), UNUSED)
    empty = set(range(len(shares)))
    order = np.lexsort((keys, -np.frexp(weights)[1])).tolist()
    for turn, number in enumerate(order):
        own = parts[first[number] : first[number + 1]]
        among = sorted(empty) if len(order) - turn == len(empty) else range(len(wanted))
        side = min(among, key=lambda side: sum([(held[c][side] + n / 2) * f for c, n, f in own]) / wanted[side])
        for c, n, _ in own:
            held[c][side] += n
        empty.discard(side)
        sides[number] = side if side < len(shares) else UNUSED
    return sides


def dealt(keys: Words, turns: Indices, shares: Sequence[float], labels: SampleClasses | None) -> Indices:
    """The side of each sample, drawn without groups: in turn, one class after the other.

    Within a class, a side takes neighbours in the order of their keys, so that few samples change sides when others are
    added. Samples that occur twice or have several labels are drawn as groups.
    """
    distinct, codes = np.unique(keys, return_inverse=True)
    if len(distinct) < len(keys) or (labels is not None and labels.several):
        return drawn_sides(Groups(codes, list(map(str, distinct)), "sample"), shares, distinct, labels)[codes]
    classes = np.zeros_like(codes)
    if labels is not None:
        classes[labels.samples] = labels.classes + 1
    order, sides = np.lexsort((codes, classes)), np.empty_like(codes)
    sides[order] = turns[np.lexsort((turns, classes[order]))]
    return sides


def named_sides(groups: Groups, given: Mapping[str, Sequence[Any]]) -> Indices:
    numbers = {trim(name): number for number, name in enumerate(groups.names)}
    sides, taken = np.full(len(numbers), UNUSED), dict[str, str]()
    for side, (key, values) in enumerate(given.items()):
        names = [trim(text_of(value, "split")) for value in values]
        if not names:
            raise ConfigError(f"{key} = {values!r} names no group ({groups.what}); leave it out, or name one", "split")
        if unknown := [name for name in names if name not in numbers]:
            whole = [name for name in groups.names if name.endswith(f"/{unknown[0]}")]
            hint = f"write the whole path, as in {few(whole)}" if whole else f"there are {few(list(groups.names))}"
            what = f"{key} names {few(unknown)}, but there is no such group ({groups.what}); {hint}"
            raise ConfigError(what, "split")
        for name in names:
            if name in taken:
                what = f"the group {name} ({groups.what}) is in {taken[name]} and in {key}; name it once"
                raise ConfigError(what, "split")
            taken[name] = key
            sides[numbers[name]] = side
    return sides
