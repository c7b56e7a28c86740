"""`split` divides a source into sides for training, validation and test that share no data; `folds` into folds.

`Groups` says which samples belong together. Group names do not change when files are added.
"""

from __future__ import annotations

import collections
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import AsyncDataError, ConfigError, MissingError, counted, few
from lit_async_data.options import MAX_SEED, explains_names, whole
from lit_async_data.order.permutation import Indices, Words, derived_keys
from lit_async_data.order.weights import IGNORED, SampleClasses
from lit_async_data.sources.composed.composed import SubsetSource, check_whole
from lit_async_data.sources.contract.checks import is_real, values_of
from lit_async_data.sources.contract.source import EACH, Places, Source, hashed, numbered, starts
from lit_async_data.sources.local_files import ends_of
from lit_async_data.sources.table.labels import note_names, trim

# Words that are rules; the prefixes tell a rule from a column of the same name.
RULES = ("file", "group", "time")
WHOLE_PARTS = "groups='file' or groups='group'"
RULE, COLUMN = "rule:", "column:"
UNUSED = -1  # in place of a side, for groups and samples on no side
ROUNDING = 1e-9  # a sum of fractions that is this close to 1 counts as 1
BY_TIME = "by time"
# Half the golden ratio of 2^64: its consecutive odd multiples, from any of them on, fill [0, 2^64) evenly.
GOLDEN = 0x4F1BBCDCBFA53E0B

log = logging.getLogger(__name__)


class Groups(NamedTuple):
    codes: Indices  # the group number of each sample; int64, shape (n,)
    names: Sequence[str]  # the name of each group; all different
    what: str  # what a group is, for messages


def groups_of(source: Source, given: Any, places: Places, option: str = "groups") -> Groups:
    if not isinstance(given, str):
        return _of_values(source, given, "the given array", option)
    if given.removeprefix(COLUMN) == "episode" and places.episodes is not None:  # ids, also if they are a field
        _of_values(source, places.episodes, "episode", option)  # `column` puts names of parts before ids
        return _of_values(source, source.column("episode"), "episode", option)
    if given.startswith(COLUMN):
        return _of_column(source, given.removeprefix(COLUMN), option)
    found = _of_rule(source, given.removeprefix(RULE), places, option)
    if found is not None:
        check_rule(source, given, option)
    return found or _of_column(source, given, option)


def stored_values(source: Source, by: Any, places: Places) -> Groups:
    """Groups of stored folds or sides, by the name of the class if there is one; −100 has an empty name."""
    found = groups_of(source, by, places, "by")
    if found.what == "episode" and places.episodes is not None:  # ids, which are no numbers of classes
        return found
    field = source.spec.fields.get(by.removeprefix(COLUMN)) if isinstance(by, str) else None
    texts = field and field.classes
    names = [name if name != str(IGNORED) else "" for name in found.names]
    names = [texts[int(name)] if name else "" for name in names] if texts else names
    whole = [re.sub(r"^(-?[0-9]+)\.0$", r"\1", name) for name in names]  # as pandas writes numbers beside empty cells
    return found._replace(names=whole if len({*whole}) == len(whole) else names)


def check_rule(source: Source, given: str, option: str = "groups") -> None:
    """Refuse a word that is both a rule and a column, unless both mean the same, as where each sample is a group."""
    if given not in RULES or (given == "group" and EACH in source.parts[0].group):
        return
    try:
        values = {*source.column(given).tolist()}
    except AsyncDataError:
        return
    if not values <= {part.name for part in source.parts}:
        what = f"is a rule, and {source.name} also has a column {given!r}; write '{COLUMN}{given}' or '{RULE}{given}'"
        raise ConfigError(f"{given!r} {what}", option)


def _of_rule(source: Source, given: str, places: Places, option: str) -> Groups | None:
    """Groups by file or group; None if the text is no such rule."""
    rule, colon, _ = given.partition(":")
    if not (rule == "file" or given == "group"):
        return None
    naming, parts = _matcher(given, option) if colon else str, places.parts
    if rule == "file" and (by_path := source.grouped_by_path(naming)) is not None:
        return _present(*by_path, given)
    if not any(part.name for part in parts):
        what = f"needs a source that knows its files, and {source.name} does not"
        raise ConfigError(f"{given!r} {what}; name a column, as with {option}='column:NAME'", option)
    if given == "group" and EACH in parts[0].group:  # each sample is one
        return Groups(np.arange(len(source)), source.column(given).tolist(), given)
    if colon:
        names = [naming(part.file) for part in parts]
    else:
        names = [part.name.partition(":/")[0] if given == "file" else part.name for part in parts]
        files = collections.Counter(name for name, _ in {*zip(names, (part.file for part in parts), strict=True)})
        # With the path if files of several sources have one name.
        pairs = zip(names, parts, strict=True)
        names = [name if files[name] == 1 else f"{name} of {part.file}" for name, part in pairs]
    codes, distinct = numbered(names)
    return _present(codes[places.which], distinct, given)


def _present(codes: Indices, names: Sequence[str], what: str) -> Groups:
    """Groups without those that no sample has, as in a subset."""
    present, dense = np.unique(codes, return_inverse=True)
    left: list[int] = present.tolist()
    return Groups(dense, [names[code] for code in left], what)


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


def _matcher(given: str, option: str) -> Callable[[str], str]:
    try:
        pattern = re.compile(given.removeprefix("file:"))
    except re.error as error:
        raise ConfigError(f"{given.removeprefix('file:')!r} is not a regular expression: {error}", option) from error

    def naming(path: str) -> str:
        match = pattern.search(path)
        name = match and match[1 if pattern.groups else 0]
        if name is None or not name.strip():  # empty text is the name of no group
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
    if texts.dtype.kind == "O":
        codes, stored = numbered(text_of(value, option) for value in texts.tolist())
    else:
        distinct, codes = np.unique(texts, return_inverse=True)
        stored = list(map(text_of, distinct.tolist()))
    trimmed, names = numbered(map(trim, stored))
    if len(names) < len(stored):
        note_names(f"{source.name}: {what}", tuple(stored))
    if option == "groups" and (blank := [number for number, name in enumerate(names) if not name.strip()]):
        complete(source, values, what, option, np.flatnonzero(np.isin(trimmed[codes], blank)))
    return Groups(trimmed[codes], names, what)


def complete(source: Source, values: npt.NDArray[Any], what: str, option: str, empty: Any = ()) -> npt.NDArray[Any]:
    missing = np.union1d(np.flatnonzero(_is_missing(values)), empty).astype(np.int64)
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
    plain = np.ma.getdata(values)
    if plain.dtype.kind == "V":  # compound values, which are no groups
        return np.zeros(len(plain), bool)
    named = "NoneType", "NAType", "NaTType"  # pandas has types of its own
    if plain.dtype.kind in "OT":
        each = (type(one).__name__ in named or (isinstance(one, float) and math.isnan(one)) for one in plain.tolist())
        missing = np.fromiter(each, bool)
    else:
        missing = plain != plain  # noqa: PLR0124  # NaN and NaT
    return np.asarray(np.ma.getmaskarray(values) | missing)


def _comparable(values: npt.NDArray[Any], what: str, option: str) -> npt.NDArray[Any]:
    plain = np.ma.getdata(values)
    if plain.dtype.kind == "T":
        return plain.astype(object)
    if plain.dtype.kind == "f" and (plain == np.rint(plain)).all() and (np.abs(plain) < 2**53).all():
        return plain.astype(np.int64)  # tables hold whole numbers as floats if any row has none
    if plain.dtype.kind not in "iubUSO":
        raise ConfigError(f"{what} has type {plain.dtype}; give whole numbers or text", option)
    return plain


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
    sides, taken = np.full(len(numbers), UNUSED), dict[int, str]()
    if groups.what in RULES:  # any end of a path that only one has, as in rows=
        ends = [(end, number) for number, name in enumerate(groups.names) for end in {*ends_of(f"/{name}")}]
        times = collections.Counter(end for end, _ in ends)
        numbers = {end: number for end, number in ends if times[end] == 1} | numbers
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
            if (number := numbers[name]) in taken:
                what = f"the group {name} ({groups.what}) is in {taken[number]} and in {key}; name it once"
                raise ConfigError(what, "split")
            taken[number] = key
            sides[number] = side
    return sides


class Split(dict[str, SubsetSource]):
    """The sides of a split by name, in the order of the fractions.

    Attributes:
        described: One line for people: actual fractions, unused samples, and overlap between sides.
        overlap: Groups on two sides, plus samples that share values with one on another side; 0 if nothing leaks.
    """

    described: str = ""
    overlap: int = 0


@explains_names()
def split(
    source: Source,
    fractions: Mapping[str, float | Sequence[int | str]] | None = None,
    *,
    groups: str | npt.ArrayLike | None = None,
    by: str | npt.ArrayLike | None = None,
    balance: str | npt.ArrayLike | None = None,
    seed: int = 0,
) -> Split:
    """Divide a source into sides.

    Samples keep their order. Without groups, the side of a sample depends only on its file and row, the seed and the
    fractions: files that are added later do not move it, and fractions are met on average. Groups are drawn so that the
    sides come as near to their shares of the samples as the groups allow; more groups give other sides.

    Args:
        source: The source to split.
        fractions: The share of each side, by name: ``{"train": 0.8, "val": 0.2}``. Each is above 0; the sum is at most
            1, and the rest of the samples stays unused. Or the groups of each side, as a list of their values:
            ``{"train": [0, 1, 2], "val": [3]}`` with ``groups="fold"``; groups on no list stay unused.
        groups: Which samples stay together on one side:

            * None: each sample is drawn alone. Refused if windows overlap, and for several patches of one volume.
            * ``"file"``: the samples of a file. ``"file:REGEX"``: of all files whose path gives the same match, or the
              same first group of the match: ``"file:(subject-[0-9]+)"``. ``"group"``: of each group in each file.
            * ``"time"``: nothing is drawn. Each file or group is cut into consecutive blocks in the order of the
              fractions, with gaps between them, so that windows of two sides share no values.
            * Any other text, or an array of whole numbers or text, shape (len(source),): samples with the same value in
              the dataset, column or batch key of that name. ``"column:file"`` is a column with the name of a rule, and
              ``"rule:file"`` the rule.
        by: The column, dataset, batch key or array with the side of each sample. Text such as train and val names the
            sides; other values, such as the numbers of folds, are listed for each side in ``fractions``:
            ``{"train": [0, 1, 2], "val": [3]}``. ``groups`` then only checks that no group is on two sides.
        balance: The classes of which each side gets its share, too: a field, also of several labels per sample, a
            column, or an array of classes, shape (n,), or of 1 for each label, shape (n, classes). Groups, and samples
            of several labels, go to the side that lacks their classes most, rare classes first.
        seed: Another seed draws other sides; 0 to 2**63 − 1.

    Returns:
        The sides by name; ``described`` summarizes them. With groups, ``group_codes`` of each side has those of its
        samples.

    Raises:
        ConfigError: An argument is invalid, and the message begins with its name, or with ``split:``; a side would be
            empty; windows overlap and no groups keep them together; a part is too short for ``"time"``.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.zeros((100, 3)), "dog": np.arange(100) // 5})
        >>> sides = split(source, {"train": 0.7, "val": 0.3}, groups="dog")
        >>> print(sides.described)
        split by dog, seed 0: train 0.70 (14 of 20 groups, 70 samples), val 0.30 (6 of 20 groups, 30 samples); overlap 0
    """
    drawn = draw(source, fractions, groups, by, balance, seed=seed)
    if fractions is None and any(name.isdecimal() for name in drawn.names):
        ways = f"list values for each side, as in {{'train': {drawn.names[1:3]}, 'val': {drawn.names[:1]}}}"
        raise ConfigError(f"the values of by, {few(drawn.names)}, name no sides; {ways}, or ask for folds", "split")
    return parted(source, drawn)


class Drawn(NamedTuple):
    names: list[str]
    sides: Indices  # of each sample: a place in ``names``, or `UNUSED`
    how: str
    places: Places
    groups: Groups | None = None


def draw(source: Source, fractions: Any, groups: Any, by: Any, balance: Any, *, seed: int, k: int = 0) -> Drawn:
    """The side of each sample; with ``k``, there are k sides, equally large also where samples are drawn alone."""
    check_whole("source", source)
    if _is_time(by):
        raise ConfigError("to cut by time, write groups='time'; for a column of that name, by='column:time'", "by")
    given = _listed_groups(fractions, groups, by)
    key, places = whole("seed", seed, 0, MAX_SEED), source.places()
    if balance is not None and (by is not None or given is not None or _is_time(groups)):
        raise ConfigError("only where sides are drawn, not where they are stored, listed or cut by time", "balance")
    if by is not None or given is not None:
        values = groups_of(source, groups, places) if by is None else stored_values(source, by, places)
        number = re.compile("-?[0-9]+")
        names = sorted(filter(None, values.names), key=lambda name: (len(name), name))
        names.sort(key=lambda name: int(name) if number.fullmatch(name) else math.inf)
        if not (given := given or {name: [name] for name in names}):
            raise ConfigError(f"no sample has a value in {values.what}; name another column", "by")
        sides, how = named_sides(values, given)[values.codes], f"by {values.what}"
        empty = np.array([not name for name in values.names])[values.codes] & (sides == UNUSED)
        if empty.any():
            lost = counted(int(empty.sum()), "sample")
            log.warning("%s: no value in %s, so left out: %s", source.name, values.what, lost)
        kept = values if by is None or groups is None else _kept_whole(groups_of(source, groups, places), values, sides)
        return Drawn(list(given), sides, how if by is not None else f"{how}, groups by name", places, kept)
    edges, names = upper_edges(fractions), list(fractions)
    if _is_time(groups):
        check_rule(source, groups)
        return Drawn(names, _by_time(places, edges, names, source.chunks.overlap), BY_TIME, places)
    labels = None if balance is None else _labels_of(source, balance)
    shares = np.diff(edges, prepend=0).tolist()
    if groups is not None:
        kept = groups_of(source, groups, places)
        sides = drawn_sides(kept, shares, derived_keys(key, hashed(kept.names)), labels)[kept.codes]
        return Drawn(names, sides, f"by {kept.what}, seed {seed}", places, kept)
    keys = _sample_keys(source, places, key)
    if k or labels is not None:
        turns = np.arange(1, 2 * len(keys), 2).astype(np.uint64) * np.uint64(2**63 // k if k else GOLDEN)
        sides = dealt(keys, sides_of_keys(edges, turns), shares, labels)
    else:
        sides = sides_of_keys(edges, keys)
    return Drawn(names, sides, f"by sample, seed {seed}", places)


def parted(source: Source, drawn: Drawn) -> Split:
    result, groups = Split(), drawn.groups
    for side, name in enumerate(drawn.names):
        samples = np.flatnonzero(drawn.sides == side)
        if not samples.size:
            ways = "try larger fractions, or another seed, as in AsyncDataModule(**split(source, …, seed=1))"
            raise ConfigError(f"{name!r} gets none of {counted(len(source), 'sample')}; {ways}", "split")
        result[name] = SubsetSource(source, samples, group_codes=None if groups is None else groups.codes[samples])
    describe(result, source, drawn)
    if result.overlap:
        advice = "windows stay apart by groups='time', or by rows= without those at borders"
        if _belong_together(source, drawn.places):
            advice = f"patches of one volume, like windows that all share values, stay together by {WHOLE_PARTS}"
        log.warning("%s: %s; %s", source.name, result.described, advice)
    return result


def _labels_of(source: Source, balance: Any) -> SampleClasses:
    what = "the given array"
    if isinstance(balance, str):
        what, own = balance, balance in source.spec.fields
        balance = values_of(source, balance, "balance", several=True) if own else source.column(balance)
    if len(balance) != len(source):
        raise ConfigError(f"{len(balance)} labels for {len(source)} samples; give one per sample", "balance")
    if np.ndim(balance) == 1:
        balance = complete(source, np.asanyarray(balance), what, "balance")
    return SampleClasses.of(balance, "balance")


def _kept_whole(groups: Groups, values: Groups, sides: Indices) -> Groups:
    pairs = np.unique(np.stack([groups.codes, sides])[:, sides != UNUSED], axis=1)
    torn = pairs[0, :-1][np.diff(pairs[0]) == 0]
    if torn.size:
        own = [values.names[int(code)] for code in np.unique(values.codes[groups.codes == torn[0]])]
        what = f"is in {few(own)} ({values.what}), so on two sides; give all its samples one, or leave groups out"
        raise ConfigError(f"{groups.names[torn[0]]} ({groups.what}) {what}", "groups")
    return groups


def _listed_groups(given: Any, groups: Any, by: Any) -> dict[str, Sequence[Any]] | None:
    """The groups of each side; None if sides are fractions."""
    sides = given if isinstance(given, Mapping) else {}
    if wrong := [name for name in sides if not isinstance(name, str) or not name]:
        raise ConfigError(f"{wrong[0]!r} is not the name of a side; use text", "split")
    lists: dict[str, Sequence[Any]] = {
        name: np.asarray(each, object).ravel().tolist()
        for name, each in sides.items()
        if isinstance(each, Sequence | np.ndarray) and not isinstance(each, str | bytes)
    }
    if not lists:
        if by is not None and sides:
            what = "by says the sides, so give none here, or its values: {'train': [0, 1, 2], 'val': [3]}"
            raise ConfigError(what, "split")
        return None
    first = next(iter(lists))
    if by is None and (groups is None or _is_time(groups)):
        what = f"{first} lists groups ({few(lists[first])}), so say with groups= what they are: the name of a column, "
        what += "or an array of one value per sample. To list sample numbers, write SubsetSource(source, numbers)"
        raise ConfigError(what, "split")
    if other := [name for name in sides if name not in lists]:
        what = f"{first} lists groups, but {other[0]} = {sides[other[0]]!r} is no list; give lists for all sides"
        raise ConfigError(what, "split")
    return lists


def _is_time(groups: Any) -> TypeGuard[str]:
    return isinstance(groups, str) and groups.removeprefix(RULE) == "time"


def upper_edges(fractions: Any) -> npt.NDArray[np.float64]:
    if not isinstance(fractions, Mapping) or not fractions:
        what = "is not a mapping of names to fractions; write {'train': 0.8, 'val': 0.2}"
        raise ConfigError(f"{fractions!r} {what}", "split")
    for name, share in fractions.items():
        if not is_real(share) or not 0 < float(share) <= 1:
            what = "is not a fraction; give a number above 0 and up to 1, or for each side the list of its groups"
            raise ConfigError(f"{name} = {share!r} {what}", "split")
    edges = np.cumsum([float(share) for share in fractions.values()])
    if edges[-1] > 1 + ROUNDING:
        raise ConfigError(f"the fractions add up to {edges[-1]:.6g}, which is more than 1; make them smaller", "split")
    edges[edges > 1 - ROUNDING] = 1.0  # so that rounding leaves no sample unused
    return edges


def sides_of_keys(edges: npt.NDArray[np.float64], keys: Words) -> Indices:
    # A float holds 53 bits; with one more, a key could round to 1, which is on no side.
    side = np.searchsorted(edges, (keys >> np.uint64(11)) * 2.0**-53, side="right")
    return np.where(side < len(edges), side, UNUSED)


def _sample_keys(source: Source, places: Places, seed: int) -> Words:
    overlap = source.chunks.overlap
    if _belong_together(source, places):
        what = "patches of one volume, like windows that all share values, belong on one side"
        raise ConfigError(f"{what}; {WHOLE_PARTS} keeps those of a file or group together", "groups")
    if overlap > 0 and np.bincount(places.which).max() > 1:
        what = f"each sample is a window that shares values with the next {overlap}, so the sides would share values; "
        if len(places.parts) > 1:
            what += f"{WHOLE_PARTS} keeps the windows of a file or group together, "
        if places.episodes is not None:
            what += "groups='episode' the samples of an episode, "
        raise ConfigError(f"{what}groups='time' cuts with a gap", "groups")
    parts = derived_keys(seed, hashed([part.name for part in places.parts]))
    return derived_keys(parts[places.which], places.rows)


def _belong_together(source: Source, places: Places) -> bool:
    """Whether all samples of a part do, so that no gap keeps some apart."""
    return 0 < int(np.bincount(places.which).max()) - 1 <= source.chunks.overlap


def _by_time(places: Places, edges: npt.NDArray[np.float64], names: list[str], overlap: int) -> Indices:
    """Cut each part into consecutive blocks with ``overlap`` unused rows between them."""
    order = places.order()
    which, rows = places.which[order], places.rows[order]
    # A row that occurs twice counts once, so that both go to the same side.
    new = np.append(True, (np.diff(which) != 0) | (np.diff(rows) != 0))
    counts = np.bincount(which[new], minlength=len(places.parts))
    turn = np.cumsum(new) - 1 - starts(counts)[which]
    gaps = np.arange(len(edges)) * overlap
    left = np.maximum(counts - gaps[-1], 0)
    ends = np.floor(edges * left[:, None] + 0.5).astype(np.int64)
    begins = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    short = np.flatnonzero((ends <= begins).any(axis=1) & (counts > 0)).tolist()
    if short:
        parts = [f"{places.parts[n].name or 'the source'} ({counted(int(counts[n]), 'sample')})" for n in short]
        what = f"too short to cut into {', '.join(names)} with gaps of {counted(overlap, 'sample')}: {few(parts)}"
        ways = "leave these parts out, choose other fractions, or keep parts whole with groups='file'"
        raise ConfigError(f"{what}; {ways}", "split")
    sides = np.full(which.size, UNUSED)
    for side, gap in enumerate(gaps.tolist()):
        inside = (turn >= begins[which, side] + gap) & (turn < ends[which, side] + gap)
        sides[order[inside]] = side
    return sides


def describe(result: Split, source: Source, drawn: Drawn) -> None:
    total, listed = len(source), []
    for name, side in result.items():
        own = "" if side.group_codes is None else f"{np.unique(side.group_codes).size} of "
        own += f"{counted(len(drawn.groups.names), 'group')}, " if drawn.groups else ""
        listed.append(f"{name} {len(side) / total:.2f} ({own}{counted(len(side), 'sample')})")
    unused = total - sum(map(len, result.values()))
    if unused:
        cut = drawn.how.startswith(BY_TIME) and source.chunks.overlap
        gaps = ", gaps between the sides of each part included" if cut else ""
        listed.append(f"unused {unused / total:.2f} ({counted(unused, 'sample')}{gaps})")
    codes = [np.unique(side.group_codes) for side in result.values() if side.group_codes is not None]
    torn = int((np.unique(np.concatenate(codes), return_counts=True)[1] > 1).sum()) if codes else 0
    near = _near_others(result, drawn.places, source.chunks.overlap)
    result.overlap = torn + near
    two = [f"{counted(torn, 'group')} on two sides"] if torn else []
    two += [f"{counted(near, 'sample')} with values of another side"] if near else []
    result.described = f"split {drawn.how}: {', '.join(listed)}; overlap {', '.join(two) or 0}"


def _near_others(result: Split, places: Places, overlap: int) -> int:
    taken = places.taken(np.concatenate([side.samples for side in result.values()]))
    order = taken.order()
    sides = np.repeat(np.arange(len(result)), [len(side) for side in result.values()])[order]
    rows = taken.which[order] * (taken.rows.max() + overlap + 1) + taken.rows[order]
    edges = np.flatnonzero(np.diff(sides)) + 1
    before, after = np.append(-np.inf, rows[edges - 1]), np.append(rows[edges], np.inf)
    run = np.searchsorted(edges, np.arange(len(rows)), side="right")
    return int(((rows - before[run] <= overlap) | (after[run] - rows <= overlap)).sum())


# -- folds -------------------------------------------------------------------------------------------------------------


@explains_names()
def folds(
    source: Source,
    k: int | None = None,
    *,
    groups: str | npt.ArrayLike | None = None,
    by: str | npt.ArrayLike | None = None,
    balance: str | npt.ArrayLike | None = None,
    seed: int = 0,
) -> list[Split]:
    """Cut a source into k folds for cross-validation.

    The fold of a sample depends on its file and row, or on its group, and on the seed, not on the order of the source.
    Folds differ by one sample; by the largest group at most if there are groups. Samples that are added move few of the
    others; groups that are added give other folds.

    Args:
        source: The source to cut: a side of a `split`, to keep a test set apart.
        k: Number of folds, from 2 on. None: 5, or those of ``by``.
        groups: As for `split`. With ``"time"``, a fold is a block of each file or group.
        by: Where the fold of each sample is stored, as for `split`: a fold for each value, in the order of numbers.
            Samples whose text or cell is empty are in no fold; a warning counts them.
        balance: As for `split`; groups then make folds less equal in size.
        seed: Another seed gives other folds; 0 to 2**63 − 1.

    Returns:
        One split for each fold, whose ``"val"`` is the fold and ``"train"`` the others.

    Raises:
        ConfigError: As `split`; there are fewer samples or groups than folds; a group is in two stored folds.

    Example:
        >>> from lit_async_data.testing import ArraySource
        >>> source = ArraySource({"x": np.zeros((100, 3)), "dog": np.arange(100) // 5})
        >>> [(len(fold["train"]), len(fold["val"])) for fold in folds(source, 4, groups="dog")]
        [(75, 25), (75, 25), (75, 25), (75, 25)]
    """
    if by is not None and k is not None:
        raise ConfigError(f"{k!r}, but by says the folds; leave k out", "k")
    drawn = draw_folds(source, 5 if k is None else k, "k", groups=groups, by=by, balance=balance, seed=seed)
    return [fold_of(source, drawn, name) for name in drawn.names]


def draw_folds(source: Source, k: Any, option: str, *, groups: Any, by: Any, balance: Any, seed: int = 0) -> Drawn:
    check_whole("source", source)
    if by is not None:
        drawn = draw(source, None, groups, by, balance, seed=seed)
        if len(drawn.names) < 2:
            raise ConfigError(f"all samples are in fold {drawn.names[0]}, which leaves none to train", "by")
        return drawn
    k = whole(option, k, 2, len(source))
    drawn = draw(source, {str(fold): 1 / k for fold in range(k)}, groups, None, balance, seed=seed, k=k)
    return drawn._replace(how=f"{drawn.how}, {k} folds")


def fold_of(source: Source, drawn: Drawn, fold: int | str) -> Split:
    if str(fold) not in drawn.names:
        raise ConfigError(f"{fold!r} is not one of the folds {few(drawn.names)}", "fold")
    sides = np.array([0] * len(drawn.names) + [UNUSED])  # UNUSED is -1: the last entry
    sides[drawn.names.index(str(fold))] = 1
    how = f"{drawn.how}, val is fold {fold}"
    return parted(source, drawn._replace(names=["train", "val"], sides=sides[drawn.sides], how=how))
