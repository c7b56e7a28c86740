"""`StoredPart`: the samples of a file or group; groups of samples that share chunks."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import FieldSpec, contradict, listed_names
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.options import whole
from lit_async_data.order.chunk_order import ChunkRun, runs_of
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.checks import column_clash, refuse_flags
from lit_async_data.sources.files.files import LOCAL, Files
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.parts import stored_field
from lit_async_data.sources.hdf5.parts.stored_field import Fields, Lacking, StoredField
from lit_async_data.sources.hdf5.schema.categories import Coded, as_texts, find_coded, names_of
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges, one_of_each, times_of
from lit_async_data.sources.hdf5.schema.field import Field, chosen_groups
from lit_async_data.sources.hdf5.schema.inspect import OpenGroup, StoredDataset, in_group, member_of, members
from lit_async_data.sources.hdf5.select import Episodes, Span, Steps, TimedWindow, WindowStarts, count_distinct
from lit_async_data.sources.hdf5.storage.failures import NoSamplesError, as_source_errors, h5py
from lit_async_data.sources.hdf5.storage.handles import identity_of, open_h5py
from lit_async_data.sources.hdf5.storage.open_file import ExternalFiles
from lit_async_data.sources.table.labels import INEXACT

# The dataset with the names of the input's parts, in a file that `pack` wrote without keeping them apart.
PACKED_PARTS = "origin/parts"
# Chunks of a group for each further chunk that a sample reads. A quarter of the chunks is then decoded twice.
CHUNKS_PER_RUN = 4
# Every chunk is a group if at most this share of the chunks is decoded twice.
MAX_DECODED_TWICE = 0.05
# A compressed field with at least this share of the bytes of the largest field determines the grouping.
MIN_SHARE = 0.1

log = logging.getLogger(__name__)


class ChunkGrouping(NamedTuple):
    """Groups of samples that share chunks. ``runs``, ``spread`` and ``chunks_per_run`` are as in `StorageLayout`."""

    key: str  # of the field whose chunks group the samples
    runs: tuple[ChunkRun, ...]
    spread: float = 1.0
    chunks_per_run: int = 1
    max_slabs: int = 1  # the largest number of stored chunks that the samples of one group read


def _grouping_key(part: StoredPart) -> str:
    """The largest compressed field with several samples per chunk and `MIN_SHARE`; else the largest field of a file."""
    sizes = {key: field.spec.nbytes * (field.values.kept is None) for key, field in part.fields.items()}
    several = {key for key, field in part.fields.items() if field.values.filtered and field.values.chunk_rows > 1}
    decoded = [key for key in sizes if key in several and sizes[key] >= MIN_SHARE * max(sizes.values())]
    return max(decoded or sizes, key=sizes.__getitem__)


def group_samples(parts: Sequence[StoredPart]) -> ChunkGrouping:
    key = _grouping_key(parts[0])
    fields, counts = [part.fields[key] for part in parts], [part.anchors.count for part in parts]
    if fields[0].patches:  # the patches of a volume
        return ChunkGrouping(key, tuple(ChunkRun(count, count) for count in counts))
    # Windows of other fields may exclude rows at either end.
    every = not any(part.anchors.fingerprint(part.rows) for part in parts)
    if every and all(field.regular and field.window.span == (0, 1) for field in fields):
        return ChunkGrouping(key, tuple(map(ChunkRun, counts, (field.values.chunk_rows for field in fields))))
    if not any(field.values.filtered for field in fields):
        # Nothing is decoded, so groups save nothing, and there may be very many chunks.
        return ChunkGrouping(key, (ChunkRun(sum(counts), 1),))
    alone = _grouping(parts, key, 1)
    reach = alone.max_slabs - 1
    few = not reach or alone.spread <= 1 + MAX_DECODED_TWICE
    return alone if few else _grouping(parts, key, CHUNKS_PER_RUN * reach)


def _grouping(parts: Sequence[StoredPart], key: str, chunks_per_run: int) -> ChunkGrouping:
    extents = [_grouped_extents(part, key, chunks_per_run) for part in parts]
    runs = tuple(run for counts, _, _ in extents for run in runs_of(counts))
    touched = np.concatenate([lasts - firsts + 1 for _, firsts, lasts in extents])
    distinct = sum(count_distinct(firsts, lasts) for _, firsts, lasts in extents)
    return ChunkGrouping(key, runs, max(int(touched.sum()) / distinct, 1.0), chunks_per_run, int(touched.max()))


def _grouped_extents(part: StoredPart, key: str, chunks_per_run: int) -> tuple[Indices, Indices, Indices]:
    """For each group of samples that begin in the same chunks: its samples, and its first and last chunk."""
    field, anchors = part.fields[key], part.anchors
    rows = field.values.chunk_rows
    if anchors.chosen is None and field.regular:
        # By arithmetic, since there may be very many samples: the first sample whose window begins in the next chunks.
        first = anchors.first + field.window.span[0]
        last, run = first + (anchors.count - 1) * anchors.stride, rows * chunks_per_run
        borders = np.arange(first // run + 1, last // run + 1) * run
        begins = np.append(0, -((first - borders) // anchors.stride))
        begins = begins[np.append(True, np.diff(begins) > 0)]
        counts = np.diff(np.append(begins, anchors.count))
        ends = anchors.rows(begins + counts - 1)
        return counts, field.extent(anchors.rows(begins))[0] // rows, field.extent(ends)[1] // rows
    firsts, lasts = field.chunks(part.own_rows, rows)
    together = chunks_per_run * (field.steps.chunks_together if field.steps else 1)
    begins = np.append(0, np.flatnonzero(np.diff(firsts // together)) + 1)
    counts = np.diff(np.append(begins, anchors.count))
    return counts, np.minimum.reduceat(firsts, begins), np.maximum.reduceat(lasts, begins)


@dataclasses.dataclass(frozen=True)
class PartRequest:
    fields: Mapping[str, Field]
    layouts: Mapping[str, str]  # letters of the axes, by the batch keys that have some
    group: str | Sequence[str] | None
    sample: str  # ``row``, ``group`` or ``dataset``
    rows: str | None  # name of a dataset with row numbers or a mask, or None
    stride: int
    allow_external: bool
    alone: bool = True  # whether there is one file
    files: Files = LOCAL
    episodes: Any = None  # the datasets that bound episodes, as the user gave them; None if each part is one
    rate: Any = None  # rows per second, or the field that holds this number, if ``rows`` are seconds
    time: str | None = None  # or the dataset of the times of rows
    foreground: Mapping[str, Mapping[int, float]] = dataclasses.field(default_factory=dict)  # by batch key and class
    patches_per_volume: int | None = None  # patches that are drawn from each volume; None for a grid

    @property
    def axis(self) -> int | None:
        """The axis of episodes, if they have one."""
        axis = self.episodes.get("axis") if isinstance(self.episodes, Mapping) else None
        return None if axis is None else whole("episodes.axis", axis, 0)


class Clock(NamedTuple):
    rate: float  # rows per second
    start: float = 0.0  # the time of row 0, in seconds
    times: Any = None  # of the rows, ascending, if they have no rate

    def rows(self, times: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
        seconds, what = times.astype(np.float64), "is no time"
        rows = np.rint((seconds - self.start) * self.rate)
        known = np.abs(rows) < INEXACT
        if self.times is not None:
            rows = np.searchsorted((self.times[1:] + self.times[:-1]) / 2, seconds)
            known = np.abs(self.times[rows] - seconds) * self.rate <= 1
            what = f"is further than {1 / self.rate:.6g} s, the median interval, from the time of any row"
        if not known.all():
            place = int(known.argmin())
            raise ConfigError(f"{where} holds {times.flat[place]} at {place}, which {what}; leave it out", "rows")
        return rows.ravel() if 1 in rows.shape else rows  # MATLAB's vectors have two axes


@dataclasses.dataclass(frozen=True, eq=False)
class StoredPart:
    path: str
    group: str  # ``"/"`` for the root; with a ``*`` if each group or dataset is a sample
    fields: Mapping[str, StoredField]
    anchors: WindowStarts  # the row of each sample
    empty: AsyncDataError | None = None  # why the part has no fields; None if it has
    names: npt.NDArray[np.bytes_] | None = None  # the name in place of ``*`` for each row, as bytes
    # The row of the table for each row of the part, or one for all; −1 for none. None without a table.
    table_rows: Indices | None = None
    lacking: Mapping[str, Lacking] = dataclasses.field(default_factory=dict)  # by batch key
    absent: Mapping[str, SourceError] = dataclasses.field(default_factory=dict)  # why no row has a field, by batch key
    given_episodes: Episodes | None = None  # None if the part is one
    # Of each episode, as the file gives them, or by number. None if a field or dataset has the name ``episode``.
    episode_ids: npt.NDArray[Any] | None = None
    clock: Clock | None = None  # turns seconds into rows, if the user chose rows by seconds
    steps: Steps | None = None  # if episodes have an axis
    dropped: int = 0  # rows that a dataset chooses, and whose windows leave the part

    @property
    def rows(self) -> int:
        return 0 if self.empty else _anchored(self.fields)[0]

    @property
    def own_rows(self) -> Indices:
        return self.anchors.rows(np.arange(self.anchors.count))

    @property
    def episodes(self) -> Episodes:
        return self.given_episodes or Episodes.whole(self.rows)

    @property
    def inside(self) -> Span:
        """The rows around an anchor that must lie inside its episode."""
        begins, ends = zip((0, 1), *(field.window.inside for field in self.fields.values()), strict=True)
        return min(begins), max(ends)

    @property
    def datasets(self) -> frozenset[int]:
        """Where values of its datasets begin in the file; empty if a place is unknown, or episodes divide the part."""
        every = [each for field in self.fields.values() for each in field.datasets if each.kept is None]
        begins = [each.offset if each.index is None else int(each.index.offsets.max(initial=0)) for each in every]
        return frozenset(begin for begin in begins if begin) if all(begins) and not self.given_episodes else frozenset()

    @property
    def external(self) -> ExternalFiles:
        return tuple(file for field in self.fields.values() for each in field.datasets for file in each.external)

    @property
    def overlap(self) -> int:
        """The largest number of later samples that share rows, or the volume, with a sample."""
        begin, end = span_of(self.fields.values())
        return self.anchors.overlap(end - begin)

    @property
    def timed(self) -> list[TimedWindow]:
        """Windows whose times may lack a row."""
        windows = [field.window for field in self.fields.values()]
        return [each for each in windows if isinstance(each, TimedWindow) and not each.pad]

    def complete(self, rows: Indices) -> npt.NDArray[np.bool_]:
        """Whether all windows without ``pad`` around these rows are complete."""
        firsts, lasts = self.episodes.of(rows).anchors(self.inside)
        whole = np.asarray((rows >= firsts) & (rows <= lasts))
        for each in self.timed:
            whole[whole] = each.real(rows[whole]).all(axis=1)
        return whole

    def dataset_key(self, stored: StoredDataset) -> str:
        """The name of a dataset within its group, the same for all groups, and the sample axis, which fields choose."""
        return f"{stored.name.strip('/').removeprefix(self.group.strip('/') + '/')} {stored.axis}"

    def spans(self) -> dict[str, Span | None]:
        """The rows that are read around an anchor, by `dataset_key`; None for datasets without a row per anchor."""
        spans: dict[str, Span | None] = {}
        for field in self.fields.values():
            for key in map(self.dataset_key, field.datasets):
                reach = field.window.reach
                known = spans.get(key, reach) if field.regular else None
                spans[key] = known and (min(known[0], reach[0]), max(known[1], reach[1]))
        return spans

    def chunks(self, name: str, rows: int = 1) -> Indices:
        """The first and the last chunk of ``rows`` rows that each sample reads of a dataset; (2, fields, samples)."""
        reading = [(field, each) for field in self.fields.values() if not field.mask for each in field.datasets]
        of = [field.chunks(self.own_rows, rows) for field, each in reading if self.dataset_key(each) == name]
        return np.array(of).swapaxes(0, 1)

    def sample(self, dataset: str | None, row: int, among: Indices) -> int | None:
        """The first sample ``among`` these that reads a row (or an element) of a dataset; None if none does."""
        anchors = self.anchors.rows(among)
        names: dict[str, Any] = {} if self.names is None else {"names": self.names}
        for field in self.fields.values():
            first, last = field.extent(anchors)
            own = [dataclasses.replace(each, **names).dataset(row) for each in field.datasets]
            if isinstance(field.stored, StoredRanges) and dataset == field.located.name:
                first = last = field.window.own(anchors)  # rows of the sparse matrix itself
            elif dataset not in own:
                continue
            reads = (first <= row) & (row <= last)
            if not field.window.consecutive:
                reads &= (field.window.rows(field.window.own(anchors)) == row).any(axis=1)
            if reads.any():
                return int(among[reads.argmax()])
        return None

    def lacks(self, key: str, anchors: Indices) -> Indices:
        rows = self.fields[key].window.own(anchors)
        return rows[np.isin(rows, self.lacking[key].rows if key in self.lacking else [])]

    def lack(self, key: str, row: int) -> SourceError:
        stored, (rows, why) = self.fields[key].values, self.lacking[key]
        what = why[np.searchsorted(rows, row)].decode()
        kind = CorruptError if self.names is None else FormatError if what else MissingError
        whole = dataclasses.replace(stored, names=self.names)  # the field repeats a name where a sample lacks it
        return whole.error(kind, what or "is missing; write it", row)

    def group_of(self, row: int) -> str:
        return self.group if self.names is None else in_group(self.group, self.names, row)

    def rows_of_table(self) -> Indices:
        assert self.table_rows is not None
        rows = self.own_rows
        return self.table_rows[rows if len(self.table_rows) > 1 else np.zeros_like(rows)]

    def column(self, name: str, files: Files, *, allow_external: bool) -> tuple[npt.NDArray[Any], Coded]:
        """The value of a dataset with one axis for each sample; None where a category is missing."""
        at, path = f"{self.path}:/{name.strip('/')}", self.path
        with as_source_errors(at, "cannot be read", file=path, dataset=name), open_h5py(path, files) as file:
            group = OpenGroup(file, path, self.group, IndexCache(None), allow_external, steps=self.steps)
            coded = find_coded(group, group.name(name))
            values = one_of_each(group, f"/{coded.name.strip('/')}", self.rows)
        if h5py.check_string_dtype(values.dtype) is not None:
            stored = StoredDataset(path, coded.name, values.shape, values.dtype, 0, FieldSpec((), values.dtype))
            values = np.array(as_texts(values.tolist(), stored), object)
        if coded.place or coded.mask is not None:
            values = coded.texts(values, path)
        return values[self.own_rows], coded

    def __str__(self) -> str:
        is_file = self.group == "/" or (self.names is not None and not self.names[0])
        return self.path if is_file else f"{self.path}:/{self.group}"

    def named(self, row: int) -> str:
        at = self.clock
        if at and at.times is not None:
            return f"{at.times[row]:.9g} s, row {row},"
        return f"{row / at.rate + at.start:.9g} s at {at.rate:.9g} Hz, row {row}," if at else f"{row}"

    def at(self, rows: Indices) -> StoredPart:
        fit = self.complete(rows)
        if not fit.all():
            raise self.unfit(rows[~fit])
        return dataclasses.replace(self, anchors=WindowStarts.at(rows))

    def unfit(self, rows: Indices) -> ConfigError:
        row = rows[:1]
        first, last = (int(each[0]) for each in self.episodes.of(row).anchors(self.inside))
        where = f"one of the {self.rows} rows of {self}"
        need = f"; windows inside them need rows {first} to {last}"
        what, cure = f"is {where}, but its window leaves them", f"{need}, others Field(pad='last')"
        if not 0 <= row[0] < self.rows:
            what, cure = f"is not {where}", need * ((first, last) != (0, self.rows - 1)) + "; leave it out"
        elif first <= row[0] <= last:
            lacks = next(each for each in self.timed if not each.real(row).all())
            what, cure = f"is {where}, without {lacks}", "; leave it out, or write Field(pad='last')"
        if last < first:
            cure = "; no row has its windows inside: shorten them, or name the axis of the rows N in layout="
        return ConfigError(f"{self.named(int(row[0]))} {what}{cure}", "rows")


def inspect_file(path: str, request: PartRequest, cache: IndexCache) -> tuple[FileIdentity, list[StoredPart]]:
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path, request.files) as file:
        first = OpenGroup(file, path, "/", cache, request.allow_external)
        groups = chosen_groups(file, path, request.group, allow_external=request.allow_external)
        return identity_of(file), [inspect_part(first.beside(group), request) for group in groups]


def inspect_part(group: OpenGroup, request: PartRequest) -> StoredPart:
    per, empty = _inspect_fields(group, request)
    fields, of_anchors = per["row"], per["anchor"]
    where, given = f"{group.path}:/{group.name(request.rows or '').strip('/')}", _given_rows(group, request.rows)
    if given is not None and not of_anchors and not (given.any() if given.dtype.kind == "b" else given.size):
        what = "chooses no row; leave the file out"
        empty, fields = [FormatError(what, place=f"rows: {where}", file=group.path, dataset=request.rows)], {}
    if empty and not fields:
        return StoredPart(group.path, group.group, {}, WindowStarts(0, 1, 0), empty[0])
    if empty:
        raise empty[0]
    if not fields and not per["episode"]:
        raise ConfigError("none is a dataset, so there are no rows; give a dataset too, or sample='group'", "fields")
    _check_per(per, request)
    rows, anchored = _anchored(fields)
    group = dataclasses.replace(group, steps=stored_field.steps_of(group.path, fields, request.axis))
    fields = stored_field.with_centres(group, stored_field.at_same_places(fields), request.foreground)
    _check_lengths(group.path, anchored, chosen=request.rows is not None, episodic=request.episodes is not None)
    episodes, ids = stored_field.named_episodes(group, request.fields, request.episodes, rows)
    fields = stored_field.placed(group, request.fields, fields, rows, episodes)
    fields |= {key: _at_episodes(field, episodes) for key, field in per["episode"].items() if episodes}
    packed = group.node(PACKED_PARTS) if any(field.rows is not None for field in request.fields.values()) else None
    if isinstance(packed, h5py.Dataset) and len(packed) > 1 and request.rows is None:
        what = "were packed end to end, and windows cross them; pack again with --keep-parts"
        log.warning("%s: the %d parts that %s names %s", group.path, len(packed), packed.name, what)
    for key, field in request.fields.items():
        if field.attr:
            name, _, value = _attribute(group, field)
            stored = stored_field.in_memory(group.path, f"{name.strip('/')}@{field.attr}", value[None], rows=rows)
            names = names_of(group, field, name, f"fields.{key}") if field.names else None
            fields[key] = stored_field.kept_field(stored, field, f"fields.{key}", names=names)
    lost = {key: of.sequences.lost for key, of in (fields | of_anchors).items() if of.sequences}
    outside = b"refers to a place outside of the file; restore the file"
    lacking = {key: Lacking(own, np.array([outside] * len(own))) for key, own in lost.items() if len(own)}
    part = StoredPart(group.path, group.group, fields, WindowStarts(0, 1, rows), lacking=lacking)
    part = dataclasses.replace(part, given_episodes=episodes, episode_ids=ids, steps=group.steps)
    part = dataclasses.replace(part, clock=_clock(group, request.rate, request.time, rows))
    part = dataclasses.replace(part, anchors=WindowStarts.within(part.episodes, part.inside, request.stride))
    if part.timed and not (there := part.complete(part.own_rows)).all():
        anchors = WindowStarts.at(part.own_rows[there]) if there.any() else WindowStarts(0, 1, 0)
        part = dataclasses.replace(part, anchors=anchors)
    if given is not None:
        given = group.steps.flat(given) if group.steps and given.shape == group.steps.shape else given
        chosen = row_numbers(given, part.rows, where, request.rows or "", none=True, clock=part.clock)
        part = _at_chosen(part, chosen, of_anchors)
        if part.empty:
            return part
    if any(field.attr or field.per in ("anchor", "episode") for field in request.fields.values()):
        part = dataclasses.replace(part, fields={key: part.fields[key] for key in [*request.fields, *part.fields]})
    return part


def _check_per(per: Mapping[str, Mapping[str, StoredField]], request: PartRequest) -> None:
    if per["anchor"] and request.rows is None:
        what = "'anchor' needs rows=NAME, a dataset; if rows are an array, write it into the file, or leave this field "
        what += "out and take labels[batch['index']], with return_indices=True"
        raise ConfigError(what, f"fields.{next(iter(per['anchor']))}.per")
    if per["episode"] and request.episodes is None:
        what = "'episode' needs episodes=, which says where each begins; for one value in a file or group, attr="
        raise ConfigError(what, f"fields.{next(iter(per['episode']))}.per")


def _at_chosen(part: StoredPart, rows: Indices, of_anchors: Mapping[str, StoredField]) -> StoredPart:
    """The part with the rows whose windows lie inside it, and fields with a value for each row; empty if none does."""
    fields = {**part.fields, **{key: _at_anchors(field, rows) for key, field in of_anchors.items()}}
    fit = part.complete(rows) | (rows < 0) | (rows >= part.rows)  # `at` refuses rows outside of the part
    if not fit.any():
        return StoredPart(part.path, part.group, {}, WindowStarts(0, 1, 0), part.unfit(rows))
    return dataclasses.replace(part.at(rows[fit]), fields=fields, dropped=int((~fit).sum()))


def _given_rows(group: OpenGroup, name: str | None) -> npt.NDArray[Any] | None:
    if name is None:
        return None
    try:
        dataset, member = group.whole_member(name, "rows: ")
    except NoSamplesError:  # an empty array of MATLAB
        return np.empty(0)
    return member_of(dataset[...], member)


def _inspect_fields(group: OpenGroup, request: PartRequest) -> tuple[dict[str, Fields], list[FormatError]]:
    """The fields with a value for each "row", "anchor" or "episode", and errors of empty fields."""
    found, empty = {each: Fields() for each in ("row", "anchor", "episode")}, list[FormatError]()
    for key, field in request.fields.items():
        if field.attr:
            continue
        name = group.name(field.dataset)
        where = f"{group.path}:/{name.strip('/')}"
        try:
            with as_source_errors(where, "cannot be read", file=group.path, dataset=name):
                layout, drawn = request.layouts.get(key), request.patches_per_volume
                own = dataclasses.replace(group, episodes=None if field.per in found else request.axis)
                inspected = stored_field.inspect_field(own, key, field, layout, drawn)
        except NoSamplesError as error:
            empty.append(FormatError(str(error), file=error.file, dataset=error.dataset))
            continue
        twice = set(inspected) & ({each for of in found.values() for each in of} | set(request.fields) - {key})
        if twice:
            what = f"{twice.pop()} is the key of the lengths, the origin or the mask of {key}"
            raise ConfigError(f"{what}; give that field another key", "fields")
        found[field.per if field.per in found else "row"].update(inspected)
    return found, empty


def _anchored(fields: Mapping[str, StoredField]) -> tuple[int, Fields]:
    """The number of rows, and the fields that have them: all without seconds, if there are such; else the first."""
    own = [(key, field) for key, field in fields.items() if field.window.at is None and not field.window.edge]
    if not own:
        raise ConfigError("all have a value per edge or episode; the rows need a field with a value for each", "fields")
    found = dict([pair for pair in own if not isinstance(pair[1].window, TimedWindow)] or own[:1])
    return next(iter(found.values())).rows, found


def _check_lengths(path: str, fields: Mapping[str, StoredField], *, chosen: bool, episodic: bool) -> None:
    lengths = {field.located: field.rows for field in fields.values()}
    if len(set(lengths.values())) > 1:
        pairs, least = sorted(lengths.items(), key=lambda each: each[1]), min(lengths.values())
        listed = ", ".join(f"{stored.name} has {n}" + f" ({n - least} more)" * (n > least) for stored, n in pairs)
        advice = _advice(fields, chosen=chosen, episodic=episodic)
        raise FormatError(f"{path}: the fields have different lengths: {listed}; {advice}", file=path)


def value_of(node: Any, field: Field, path: str, name: str) -> npt.NDArray[Any]:
    """The attribute of an object of libhdf5: numbers, or the bytes of one text. One value has no axes."""
    where = f"{path}:/{name}: its attribute {field.attr!r}"
    context: dict[str, Any] = {"file": path, "dataset": name}
    try:
        stored = h5py.h5a.open(node, str(field.attr).encode())
    except KeyError:
        cure = "write it, or choose only groups that have it, by their names"
        raise MissingError(f"{where} is missing; {cure}", **context) from None
    shape, dtype = (0,) if stored.shape is None else stored.shape, stored.dtype
    values = np.empty(shape, dtype)
    if not dtype.subdtype and values.size:
        stored.read(values)
    value: Any = values.reshape(-1)[0] if values.size == 1 else None
    if isinstance(value, bytes | str):
        return np.array(value if isinstance(value, bytes) else value.encode(errors="surrogateescape"))
    if not values.size or not field.takes(dtype):
        raise FormatError(f"{where} holds {dtype} {shape}, not numbers, nor one text; leave it out", **context)
    return values if value is None else values.reshape(())


def _attribute(group: OpenGroup, field: Field) -> tuple[str, Any, npt.NDArray[Any]]:
    name = group.name(field.dataset) if field.dataset else group.group
    node = group.node(name)
    if node is None:
        raise MissingError(f"{group.path}: has no {name!r}; check the name", file=group.path, dataset=name)
    return name, node, value_of(node.id, field, group.path, name.strip("/"))


def _clock(group: OpenGroup, given: Any, time: str | None, rows: int) -> Clock | None:
    """The clock of a part from its rows per second: a number, a dataset or an attribute; or from the times of rows."""
    if time is not None:
        times = times_of(group, None, time, rows)
        return Clock(1 / float(np.median(np.diff(times))) if rows > 1 else math.inf, times=times)
    if given is None:
        return None
    number, start = np.asarray(given), 0.0
    if number.dtype.kind not in "iufb":
        field = Field.of(given, "rate.")
        node, number = _attribute(group, field)[1:] if field.attr else (None, group.whole(field.dataset, "rate: ")[...])
        if isinstance(node, h5py.Dataset) and node.size == 1 and node.dtype.kind in "iuf":
            start = float(np.ravel(node[...])[0])  # NWB's starting_time, whose attribute is the rate
    if number.size != 1 or number.dtype.kind not in "iuf" or not 0 < number.item() < math.inf:
        what = f"{number.item() if number.size == 1 else given!r}, of {group.path}, is not one number above 0"
        raise ConfigError(f"{what}: how many rows there are per second", "rate")
    return Clock(float(number.item()), start)


def _at_episodes(field: StoredField, episodes: Episodes) -> StoredField:
    rows, count = field.located.rows, len(episodes.begins)
    if rows != count:
        what = f"has {rows} values, but per='episode' needs one for each of {count} episodes"
        raise field.located.error(FormatError, f"{what}; leave per out if it has one for each row")
    return dataclasses.replace(field, window=dataclasses.replace(field.window, at=(episodes.begins, np.arange(count))))


def _at_anchors(field: StoredField, anchors: Indices) -> StoredField:
    rows, numbers, times = np.unique(anchors, return_index=True, return_counts=True)
    if field.located.rows != len(anchors) or len(rows) < len(anchors):
        what = f"has {field.located.rows} values for {len(anchors)} anchors, at {len(rows)} different rows"
        what += f" ({rows[times > 1].tolist()[0]} comes again)" if (times > 1).any() else ""
        raise FormatError(f"{field.located}: {what}; per='anchor' needs a value and a row of its own for each")
    return dataclasses.replace(field, window=dataclasses.replace(field.window, at=(rows, numbers)))


def _advice(fields: Mapping[str, StoredField], *, chosen: bool, episodic: bool) -> str:
    for key, field in fields.items():
        shape = field.values.shape
        same = [each for each in fields.values() if len(shape) > 1 and each.values.shape[1:][-len(shape) :] == shape]
        if same:
            what = f"{field.located.name} has the shape of one row of {same[0].located.name}, or of its last axes: "
            return f"{what}if all samples share it, leave {key!r} out, read it once and add it in device_transform"
    key, field = min(fields.items(), key=lambda item: item[1].located.rows)
    name = str(field.located).removeprefix(f"{field.located.path}:/")
    if chosen and not field.spec.shape:
        what = f"rows= chooses rows that all fields have; if {name} has one value for each chosen row, write"
        return f"{what} fields={{{key!r}: Field({name!r}, per='anchor')}}"
    question = next(filter(None, (_other_axis(key, field, fields) for key, field in fields.items())), "")
    many, longest = max(fields.items(), key=lambda item: item[1].located.rows)
    if episodic or longest.located.rows == field.located.rows + 1:
        what = f"if {longest.located.name} has a value before each row of {name} and one behind the last"
        question += f"{what}, write {many!r}: Field(…, per='edge'). Else: "
    ends = f"If a sample is several rows of {longest.located.name}, write {many!r}: Field(…, lengths=NAME), or ends=, "
    ends += "starts= or offsets=, with a dataset of their numbers, or places. If each has a rate of its own, give each "
    ends += "time=NAME, a dataset of times, and all but one offsets= in seconds. "
    return (
        f"{question}a sample takes the same row of each, or a window around it, and rows= chooses among these rows. "
        f"{ends}If one row of {name} belongs to several of the {longest.located.rows}, store its row number for each "
        f"of them in a dataset, and write fields={{{key!r}: Field({name!r}, lookup=NAME)}} with the name of that "
        f"dataset; {name} is then kept in memory. If all samples share it, leave {key!r} out and add it in a transform"
    )


def _other_axis(key: str, field: StoredField, fields: Mapping[str, StoredField]) -> str:
    """A question to the user if a later axis of a field is as long as another field; else empty."""
    others = {each.located.rows for each in fields.values()} - {field.located.rows}
    shape = field.values.shape
    axes = [axis for axis, n in enumerate(shape) if n in others]
    if field.values is not field.located or not axes:
        return ""
    letters = iter("HWDTABEFGIJKLMOPQRSUVXYZ")
    thin = [axis for axis, n in enumerate(shape) if axis != axes[-1] and n in (1, 3, 4)] if len(shape) == 4 else []
    known = {axis: "C" for axis in thin if len(thin) == 1} | {axes[-1]: "N"}  # images: channels come first
    layout = "".join(known.get(axis) or next(letters, "?") for axis in range(len(shape)))
    name, single = field.values.name, sorted(shape)[:-1] == [1]
    column = f", and for class numbers Field({name!r}, column=0, dtype='int64')" if single else ""
    asked = f"are the samples of {name}, of shape {shape}, on axis {axes[-1]}?"
    return f"{asked} Then write layout={{{key!r}: {layout!r}}}{column}. Else: "


def row_numbers(
    given: Any, rows: int, where: str = "it", name: str = "", *, none: bool = False, clock: Clock | None = None
) -> Indices:
    """Row numbers from the user's numbers, times or mask, which messages call ``where``. ``none`` allows no rows."""
    numbers: npt.NDArray[Any] = np.asarray(given)
    if none and not numbers.size:
        return np.empty(0, np.int64)
    if name and numbers.dtype.names:
        names = ", ".join(f"{name}.{each}" for each in members(numbers.dtype))
        raise ConfigError(f"{where} holds records, so name a member of them: {names}", "rows")
    if clock and numbers.dtype.kind in "iuf":
        numbers = clock.rows(numbers, where).astype(np.int64)
    if numbers.ndim != 1 or not numbers.size or numbers.dtype.kind not in "iub":
        what = f"{where} holds neither row numbers nor a mask, but {numbers.dtype}, shape {numbers.shape}; "
        what += "if they are seconds, give rate=, the rows per second, or time=; else " * (numbers.dtype.kind == "f")
        raise ConfigError(f"{what}give row numbers: an array, or by part, a mapping from each to an array", "rows")
    if numbers.dtype.kind == "b":
        if len(numbers) != rows:
            raise ConfigError(f"{where} is a mask of {len(numbers)} values, but there are {rows} rows", "rows")
        numbers = np.flatnonzero(numbers)
        if not numbers.size and not none:
            raise ConfigError(f"{where} is a mask that chooses no row", "rows")
    elif not clock:
        refuse_flags(numbers, rows, where, "rows")
    return numbers.astype(np.int64)


def span_of(fields: Collection[StoredField]) -> Span:
    """The rows around an anchor that a sample reads; of patches, all."""
    if any(field.patches for field in fields):
        return -(2**61), 2**61
    spans = [field.window.span for field in fields]
    # Padding repeats rows between a window and the anchor.
    spans += [(0, 1)] if any(field.window.pad for field in fields) else []
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def common_fields(parts: Sequence[StoredPart]) -> dict[str, FieldSpec]:
    known = {key: field.spec for key, field in parts[0].fields.items()}
    for part in parts:
        _check_compatible(part, parts[0], known)
        for key, spec in known.items():
            own = part.fields[key].spec
            if more := {*own.meanings}.difference(spec.meanings):
                known[key] = dataclasses.replace(spec, meanings=tuple(sorted(more.union(spec.meanings))))
            narrow = spec.narrow if own.narrow == spec.narrow else None
            known[key] = dataclasses.replace(known[key], narrow=narrow, columns=spec.columns or own.columns)
    return known


def _check_compatible(part: StoredPart, first: StoredPart, known: Mapping[str, FieldSpec]) -> None:
    where = f"/{first.group.strip('/')}" if part.path == first.path else first
    if list(part.fields) != list(first.fields):
        has = f"has the fields {', '.join(part.fields)}, but {where} has {', '.join(first.fields)}"
        raise FormatError(f"{part}: {has}; parts of one source must agree")
    for key, field in part.fields.items():
        mine, other = field.spec, known[key]
        alike = mine == other or dataclasses.replace(mine, narrow=other.narrow) == other
        if alike and (clash := column_clash(mine.columns, other.columns, where)):
            clash += ", or name the column: Field(…, column=NAME)" * (not mine.shape)
            raise FormatError(f"{field.located}: {clash}", file=part.path, dataset=field.located.name)
        if alike and (mine.meanings == other.meanings or not contradict(mine.named, other.named)):
            continue
        one, two = (f"{'rows of ' * each.ragged}{each.dtype} {each.shape[each.ragged :]}" for each in (mine, other))
        cure = ""
        if one == two:
            one, two = (f"{one} of {listed_names(each.named)}" for each in (mine, other))
            every = list(dict.fromkeys([*other.named.values(), *mine.named.values()]))
            cure = f"; Field(…, classes={every}) numbers them by name" if every and not mine.texts else ""
        cure = "; give image_size to resize all images" if field.images else cure
        must = f"{'parts' if part.group != '/' else 'files'} of one source must agree{cure}"
        what = f"{field.located}: has samples of {one}, but in {where} they are {two}; {must}"
        raise FormatError(what, file=part.path, dataset=field.located.name)
