"""Lists of bad samples: ``inspect --check-all`` and ``on_error`` write them, ``exclude`` of a source reads them."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ConfigError, few
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.local_files.patterns import files_matching, is_pattern

#: What a line says, in CSV and in JSON lines.
COLUMNS = ("source", "file", "dataset", "row", "id", "path", "cause")
#: A list of bad samples, or their numbers in the source.
Exclude = Sequence[int] | str | os.PathLike[str] | Indices  # jsonargparse makes text of a list, if it may be a path


def bad_sample(source: Source, sample: int, error: BaseException) -> dict[str, str | int | None]:
    """The line on a sample, whose number is as for `Source.locate`.

    ``dataset`` is its group in the file, ``id`` its id in the table or its number, ``cause`` the error.
    """
    place: Any = source.locate([sample])[0]
    name, path = getattr(place, "id", None), getattr(place, "path", None)
    name, cause = int(sample) if name is None else name, " ".join(str(error).split())
    return dict(zip(COLUMNS, (source.name, place.file, place.group, place.row, name, path, cause), strict=True))


class StoredSamples(NamedTuple):
    """Consecutive samples of a source: their file and group, the number of rows there, and the row of each sample.

    If each row is a group or dataset of its own, ``names`` has what the ``*`` in ``group`` stands for, as bytes.
    """

    file: str
    group: str
    rows: int
    row_of: Indices
    names: npt.NDArray[np.bytes_] | None = None


def kept_samples(
    exclude: Exclude, parts: Sequence[StoredSamples], name: str, paths_of: Callable[[int], Sequence[str]] = lambda _: ()
) -> npt.NDArray[np.bool_]:
    """Whether each sample of the source ``name`` stays; ``paths_of`` tells which files belong to a sample."""
    starts = np.cumsum([0, *(len(part.row_of) for part in parts)])
    kept = np.ones(int(starts[-1]), np.bool_)
    if isinstance(exclude, str | os.PathLike):
        absent = []
        for number, path_of in _listed(exclude, parts, name).items():
            file, _, rows, row_of, _ = parts[number]
            absent += [f"row {row} of {file}" for row in path_of if not 0 <= row < rows]
            for place in np.flatnonzero(np.isin(row_of, list(path_of))).tolist():
                sample, row = int(starts[number]) + place, int(row_of[place])
                names = list(map(os.path.basename, paths_of(sample) if path_of[row] else ()))
                if names and os.path.basename(path_of[row]) not in names:
                    absent.append(f"{path_of[row]} in row {row} of {file}")
                kept[sample] = False
        if absent:
            raise _error(f"{name} has no {few(absent)}; if it has changed, check it again for a new list")
    else:
        numbers = np.asarray(exclude)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise _error(f"{exclude!r} is neither the path of a list nor a list of sample numbers")
        if wrong := numbers[(numbers < 0) | (numbers >= len(kept))].tolist():
            raise _error(f"without it, {name} has samples 0 to {len(kept) - 1}, not {few(wrong)}")
        kept[numbers.astype(np.int64)] = False
    if not kept.any():
        raise _error(f"leaves out all samples of {name}")
    return kept


def _listed(exclude: str | os.PathLike[str], parts: Sequence[StoredSamples], name: str) -> dict[int, dict[int, str]]:
    """The listed rows of each part, with the path of each."""
    given = os.path.abspath(os.path.expanduser(exclude))
    lines = [line for path in (files_matching(given) if is_pattern(given) else [given]) for line in _lines_of(path)]
    same = _same_files({file for file, *_ in lines}, {part.file for part in parts})
    places: dict[tuple[str, str], tuple[int, int | None]] = {}
    for number, part in enumerate(parts):
        places[part.file, part.group.strip("/")] = number, None
        for row, group in enumerate(() if part.names is None else part.names.tolist()):
            places[part.file, part.group.replace("*", group.decode(errors="surrogateescape"))] = number, row
    found: dict[int, dict[int, str]] = {}
    for file, group, row, path in lines:
        if (place := places.get((same.get(file, ""), group.strip("/")))) is not None:
            found.setdefault(place[0], {})[row if place[1] is None else place[1]] = path
    if lines and not found:
        raise _error(f"{given} names no sample of {name}, but of {lines[0][0]}; is it the list of another source?")
    return found


def _lines_of(path: str) -> list[tuple[str, str, int, str]]:
    """File, group, row and path of each line."""
    found: list[tuple[str, str, int, str]] = []
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines: Iterable[Any] = map(json.loads, file)
            if not path.endswith(".jsonl"):
                header = dict.fromkeys(next(csv.reader(file), ()))
                lines = csv.DictReader(file, [*header]) if header.keys() >= {*COLUMNS[1:4], "path"} else [header]
            found.extend((str(at["file"]), str(at["dataset"]), int(at["row"]), at["path"] or "") for at in lines)
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, csv.Error) as error:
        why = f"after {len(found)} lines: {type(error).__name__}: {error}"
        raise _error(f"{path} is no list of bad samples ({why}); inspect --check-all writes one") from error
    return found


def _same_files(listed: Collection[str], files: Collection[str]) -> dict[str, str]:
    """The file of a source for each listed path. Files that have moved are found by name.

    If several files have that name, two belong together if each is most like the other, by the folders above it.
    """
    real = {os.path.realpath(file): file for file in files}
    same = {each: real[path] for each in listed if (path := os.path.realpath(each)) in real}
    gone = [each for each in listed if not os.path.exists(each)]
    near = {each: file for each in gone if (file := _most_like(each, files)) and _most_like(file, gone) == each}
    return near | same


def _most_like(path: str, others: Iterable[str]) -> str:
    """The path with the same name and the most folders above it alike; empty if there is none, or several are."""
    named = [each for each in others if os.path.basename(each) == os.path.basename(path)]
    turned = ["/".join(each.split("/")[::-1]) for each in (path, *named)]
    alike = [len(os.path.commonpath([turned[0], each])) for each in turned[1:]]
    return named[alike.index(max(alike))] if alike and alike.count(max(alike)) == 1 else ""


def _error(message: str) -> ConfigError:
    return ConfigError(f"{message}", "exclude")
