"""`HDF5Source`: the samples of one or more HDF5 files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec, contradict
from lit_async_data.errors import ConfigError, FormatError, MissingError, few
from lit_async_data.options import OF_SOURCE, ArrayLike, explains_names, flag, one_of, whole
from lit_async_data.order.chunk_order import ChunkExtents, ChunkRun
from lit_async_data.order.permutation import Indices, Words, derived_keys
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources.contract import source as contract
from lit_async_data.sources.contract.checks import fields_by_key
from lit_async_data.sources.contract.source import Source, hashed, renumbered
from lit_async_data.sources.contract.user_code import digest
from lit_async_data.sources.files.files import WHOLE_BYTES, Files
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.hdf5.index.index import IndexCache
from lit_async_data.sources.hdf5.parts import samples as part_samples
from lit_async_data.sources.hdf5.parts.groups import inspect_files, with_lengths
from lit_async_data.sources.hdf5.parts.part import (
    ChunkGrouping,
    PartRequest,
    StoredPart,
    common_fields,
    group_samples,
    span_of,
)
from lit_async_data.sources.hdf5.parts.samples import JoinedTable, On, Unmatched
from lit_async_data.sources.hdf5.readers.part_reader import PartReaders, with_categories
from lit_async_data.sources.hdf5.schema.field import OF_FIELD, Field, FieldLike, PathLike, chosen_files, chosen_layouts
from lit_async_data.sources.hdf5.storage.handles import refuse_external
from lit_async_data.sources.local_files import Exclude

# Of remote samples that are stored one by one, a shuffle by chunks keeps as many together as have these bytes.
BLOCK_BYTES = 192 * 2**10


@dataclasses.dataclass(frozen=True)
class _Opened:
    names: Mapping[str, str]  # of the files, by absolute path: the same when files are added, or all are moved
    identities: Mapping[str, FileIdentity]
    parts: Sequence[StoredPart]
    spec: BatchSpec
    joined: JoinedTable | None
    left_out: str
    memory_map: bool
    allow_external: bool
    files: Files

    def reader(self, parts: Sequence[StoredPart], grouping: ChunkGrouping | None = None) -> PartReaders:
        return PartReaders(parts, self.identities, self.files, grouping or group_samples(parts), mapped=self.memory_map)

    def with_values(self, exclude: Exclude | None, name: str) -> list[StoredPart]:
        """The parts without samples that are to be left out; an error where another lacks a value."""
        kept = part_samples.with_samples(list(map(part_samples.with_values, self.parts)))
        kept = with_categories(kept, self.reader, drop=True)
        if exclude is not None:
            kept = part_samples.without(kept, exclude, name)
        with_categories(kept, self.reader, drop=False)
        part_samples.warn_of_lacking(kept, name)
        return kept


@explains_names(OF_FIELD, OF_SOURCE)
class HDF5Source(Source):
    """Samples from datasets of HDF5 files. Thread-safe.

    Args:
        path: A file, a glob such as ``"scans/**/*.h5"`` (in natural order), or a list of these. Several files form one
            dataset, one after the other.
        fields: What a batch holds. A mapping from batch key to dataset name or `Field` gives dicts; a sequence of these
            gives tuples, with the names as keys. Some groups stand for a dataset: sparse rows (AnnData's
            ``csr_matrix``) come out dense; ``categorical`` columns as codes, with classes; ``values`` and ``offsets``,
            like datasets of ``h5py.vlen_dtype``, as samples of variable length, padded, with their lengths in an extra
            field ``KEY_length`` (see ``LoaderOptions.batch_by``). Padded windows have a mask, ``KEY_mask``.
        layout: Letters of the stored axes, ``N`` for samples and ``C`` for channels: a string for the first field, or a
            mapping by batch key. Batches come out as N, then C, then the rest as stored. A field without a layout has
            its samples on axis 0, and no axis moves.
        group: The group of the datasets, or a pattern of groups of one level (``"patient_*"``), or a list of these.
            Each group is a part; groups of a pattern come in natural order. Parts without rows are left out.
        sample: What a sample is: ``"row"`` of datasets, or ``"group"``: each group that ``group`` matches, or each file
            without ``group``. A field is then a whole dataset, of one type and shape in all groups but for their
            lengths, or an encoded image; or an attribute (`Field`). ``layout`` has no ``N``. ``"dataset"``: each that
            the name of the first field matches, such as ``"images/*"``; fields have one ``*``, for the same name. With
            ``Field(patch=)`` or ``points``, each of these datasets is a volume.
        rows: The rows to take as samples, or as anchors of windows: row numbers, or a mask. An array counts over the
            rows of all parts, put end to end. By part, rows count from 0 in each: a mapping from the file or group to
            them, by any end of its path that only one has (parts that it lacks have no samples), or a list of them,
            one for each part. Or the name of a dataset of them in each part; those whose windows leave it are left out.
        rate: Rows per second, if ``rows`` are seconds, for the nearest row: a number, a dataset in each part that holds
            it, or an attribute (`Field`); if that is of a single number (NWB's ``starting_time``), row 0 is then.
        time: In place of ``rate``, a dataset with the time of each row, in seconds, ascending in each part.
        episodes: How each part is divided into episodes, which windows never cross, and beyond which ``pad`` fills
            them: the name of a dataset with an id for each row; or ``{"flags": NAME}``, 0, and 1 in the last row of
            each (several names: if one of them is), ``{"ends": NAME}``, ``{"lengths": NAME}``, or ``{"starts": NAME,
            "lengths": NAME}``. Or ``{"axis": 0}``: datasets have an axis of episodes beside that of their T rows, which
            ``layout`` may name N; row e·T + t is step t of episode e. With ``"lengths": NAME`` too, episodes are padded
            to T. `column` and ``split(groups=)`` know them as ``"episode"``. None: a part is one.
        stride: Rows from one sample to the next; 1 by default. Sample k has row ``first + k·stride`` of its part, or
            episode, as long as its windows without ``pad`` lie inside; ``first`` is the first row where they do.
        patches_per_volume: With `Field(patch=)`, the number of patches that an epoch draws at random from each volume:
            new ones in each epoch, at the same places of all fields; without ``augment``, always the same. None:
            patches lie on a grid that covers the volume (``Field(stride=)``).
        foreground: Shares of drawn patches that have a class in their middle, by batch key of the classes:
            ``{"mask": {1: 0.33}}``; others lie anywhere. At borders, patches are moved into the volume. The classes of
            all volumes are read when the source is built; ``cache_dir`` keeps what was found.
        table: A table with one row for each file, group or subject, of any kind that `ManifestSource` takes. Fields
            with the name of a column take its values: numbers as they are, text as classes (`Field`).
        on: Whose rows the table has: ``"file"`` (a path, or an end of it that no other file has, with its ending or
            without), ``"group"`` (or the dataset that is a sample), or a dataset, or attribute (`Field`), of ids of
            subjects, which are compared as text. Its column has the same name, or is named: ``{"column": "file"}``.
        unmatched: ``"error"`` if the table has no row for a sample, or ``"skip"`` it. Rows without samples are logged.
        filters: Conditions that rows of the table must meet, as for `ManifestSource`; samples of others are left out.
        exclude: Samples to leave out: a list of bad ones, as ``inspect --check-all`` and ``on_error`` write it, or a
            pattern of several, where files that have moved are found by name, and which may name other files too, but
            not only others; or sample numbers or a mask, as they are without ``exclude``, but with ``filters``.
        cache_dir: A folder of yours to which only you may write. It keeps lists of groups, and the indexes of datasets
            with `FEWEST_CHUNKS` chunks or more, and their references if lengths vary, so that opening them again takes
            no time; it is made if it does not exist. None: an index is built at each opening, 1 to 2 µs per chunk.
        cache: A folder on a fast disk, where what was read of remote files and of slow mounts (NFS) is kept for later
            epochs, processes and jobs. None: parts of remote files are kept in memory.
        cache_limit: Most bytes there, such as ``"400GB"``; None: what the disk has free; in memory, an eighth of it.
        storage_options: Credentials and options of the store, as pandas and xarray name them: ``{"anon": True}``,
            ``{"key": …, "secret": …, "endpoint_url": …}``. None: as its environment variables say.
        storage: A store of obstore, or a filesystem of fsspec, that reads the files; None: one made for the address.
        memory_map: Whether to map files into memory. Without maps, ``pread`` is slower for small samples, and h5py
            reads scattered values; but a file that another process truncates is an error, not the end of this process.
        allow_external: Whether other files may hold values of a dataset (virtual datasets, links into other files,
            external storage). They must hold all of them, and are read through h5py.

    Values are delivered as stored: uint8 stays uint8. Only integer fields with no axis but N become int64, which
    torch's losses take. Channels-last data is delivered as a view in that memory format; no byte is moved.

    Raises:
        MissingError: A file or dataset does not exist.
        FormatError: A file is not HDF5, or a dataset cannot be a field.
        ManifestError: The table lacks a row, or has two for one file, group or subject.
        ConfigError: An option does not fit the files, or ``cache_dir`` is not a folder of yours alone.

    Example:
        >>> import h5py, numpy, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with h5py.File(folder.name + "/scan.h5", "w") as file:
        ...     file["data"] = numpy.zeros((10, 8, 8, 3), "u1")
        ...     file["labels"] = numpy.arange(10)
        >>> source = HDF5Source(folder.name + "/*.h5", fields={"x": "data", "y": "labels"}, layout={"x": "NHWC"})
        >>> len(source), source.spec["x"].shape, source.spec["y"].shape
        (10, (3, 8, 8), ())
        >>> source.locate([7])[0].row
        7
        >>> source  # doctest: +ELLIPSIS
        <HDF5Source of 10 samples from ...scan.h5: x uint8 (3, 8, 8), y int64; read by copying>
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: Sequence[PathLike] | PathLike,  # jsonargparse makes text of a list, if it may be a path
        fields: Mapping[str, FieldLike] | Sequence[FieldLike] = ("data", "labels"),
        *,
        layout: str | Mapping[str, str] | None = None,
        group: str | Sequence[str] | None = None,
        sample: Literal["row", "group", "dataset"] = "row",
        rows: Mapping[str, Any] | str | ArrayLike | None = None,
        rate: float | FieldLike | None = None,
        time: str | None = None,
        episodes: str | Mapping[str, int | str | Sequence[str]] | None = None,
        stride: int | None = None,
        patches_per_volume: int | None = None,
        foreground: Mapping[str, Mapping[int, float]] | None = None,
        table: Any = None,
        on: On | None = None,
        unmatched: Unmatched = "error",
        filters: Sequence[Sequence[Any]] | None = None,
        exclude: Exclude | None = None,
        cache_dir: PathLike | None = None,
        cache: PathLike | None = None,
        cache_limit: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        storage: Any = None,
        memory_map: bool = True,
        allow_external: bool = False,
    ) -> None:
        flag("memory_map", memory_map)
        flag("allow_external", allow_external)
        of_rows = {"stride": stride, "rate": rate, "time": time, "episodes": episodes}
        _check_rows(sample, rows, of_rows, allow_external=allow_external)
        chosen, as_mapping = fields_by_key(fields, Field.of, lambda each: each.attr or each.dataset, "dataset")
        _check_patches(chosen, patches_per_volume, {"sample": sample == "group" or None, **of_rows})
        self._shares = {} if foreground is None else _checked_shares(chosen, patches_per_volume, foreground)
        files = Files(cache, cache_limit, storage_options, storage)
        with files.closed_after_an_error():
            if table is None and (on or filters):
                what = "goes with table=, and chooses its rows; rows of datasets are chosen by rows="
                raise ConfigError(what, "on" if on else "filters")
            joined = None if table is None else JoinedTable(table, on, unmatched, filters, chosen, files=files)
            names = chosen_files(path, files)
            if allow_external:
                refuse_external(names, files)
            request = PartRequest(
                fields=_stored_fields(chosen, joined, episodes),
                layouts=chosen_layouts(layout, list(chosen)),
                group=group,
                sample=sample,
                rows=rows if isinstance(rows, str) else None,
                stride=1 if stride is None else whole("stride", stride, 1, 2**53),
                allow_external=allow_external,
                alone=len(names) == 1,
                rate=rate,
                time=time,
                episodes=episodes,
                patches_per_volume=patches_per_volume,
                foreground=self._shares,
                files=files,
            )
            index = IndexCache(cache if cache_dir is None else cache_dir)
            identities, found = inspect_files(list(names), request, index)
            parts = with_lengths(part_samples.named_alike(part_samples.with_rows(found)), request)
            part_samples.check_null(parts, request.fields)
            parts = part_samples.with_longest(parts if joined is None else joined.join(parts, list(chosen)))
            spec = BatchSpec(common_fields(parts), as_mapping=as_mapping)
            part_samples.log_warnings(parts, spec, request)
            parts = parts if request.rows or rows is None else part_samples.select_rows(parts, rows, found)
            left_out = part_samples.rows_left_out(parts) if rows is None else part_samples.parts_left_out(parts)
            parts = part_samples.drop_empty(parts)
            part_samples.check_centres(parts, self._shares)
            self._opened = _Opened(names, identities, parts, spec, joined, left_out, memory_map, allow_external, files)
            kept = self._opened.with_values(exclude, self.name)
            gone = renumbered(*(sum(part.anchors.count for part in some) for some in (kept, parts)))
            left_out = "; ".join(filter(None, [left_out, gone]))
            self._opened = dataclasses.replace(self._opened, parts=kept, left_out=left_out)
            self._grouping = group_samples(self._opened.parts)
            self._reader = self._opened.reader(self._opened.parts, self._grouping)
            self._reader.check_first(self.spec)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_reader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reader = self._opened.reader(self._opened.parts, self._grouping)

    def __len__(self) -> int:
        return int(self._reader.starts[-1])

    @property
    def paths(self) -> list[str]:
        """The files, as absolute paths."""
        return list(self._opened.names)

    @property
    def name(self) -> str:
        """The first file and the number of others, for messages."""
        first, *others = self._opened.names
        return first + (f" and {len(others)} more" if others else "")

    @property
    def spec(self) -> BatchSpec:
        return self._opened.spec

    @functools.cached_property
    def chunks(self) -> contract.StorageLayout:  # pyright: ignore[reportIncompatibleMethodOverride]  # read once, as a property
        grouping, files, remote, fields = self._grouping, self._opened.files, None, self._opened.parts[0].fields
        runs = grouping.runs if any(run.rows > 1 for run in grouping.runs) else ()
        compressed = any(part.fields[grouping.key].values.filtered for part in self._opened.parts)
        if not all(map(files.is_local, self._opened.names)):
            sizes = [each.size for each in self._opened.identities.values()]
            nbytes = sum(sizes)
            if not runs:  # blocks of samples that are stored one by one
                compressed, rows = False, max(BLOCK_BYTES * len(self) // nbytes, 1)
                runs = tuple(ChunkRun(part.anchors.count, rows) for part in self._opened.parts)
            blocks = 0 if max(sizes) <= WHOLE_BYTES else sum(-(-run.samples // run.rows) for run in runs)
            remote = contract.Remote(nbytes, max(blocks, nbytes >> 20, len(sizes)), files.options["cache"], files.room)
        amplification, alone = map(float, _amplification(self._opened.parts))
        drawn = any(each.patches and each.patches.drawn is not None for each in fields.values())
        return contract.StorageLayout(
            runs,
            compressed=compressed,
            remote=remote,
            reading=self._reader.reading,
            spread=grouping.spread,
            chunks_per_run=grouping.chunks_per_run,
            amplification=amplification,
            alone=alone,
            chunks_per_sample=fields[grouping.key].chunks_per_sample,
            largest=all(_fits(part, grouping.key) for part in self._opened.parts),
            overlap=max(part.overlap for part in self._opened.parts),
            drawn=drawn,
            random=drawn or any(each.images and each.images.decoder.is_random for each in fields.values()),
            ahead=True,
            left_out=self._opened.left_out,
        )

    @functools.cached_property
    def _blocks(self) -> ChunkExtents | None:
        """The samples that are fetched together although each is stored alone."""
        layout = self.chunks
        return ChunkExtents(layout.runs) if layout.remote and not layout.compressed else None

    @functools.cached_property
    def _fixed_keys(self) -> Words | None:
        """The keys of patches whose places are the same in each epoch; None if none are drawn."""
        parts = self._opened.parts
        if not self.chunks.drawn:
            return None
        volumes = hashed([part.name for part in self.parts])
        return np.concatenate([derived_keys(key, each.own_rows) for key, each in zip(volumes, parts, strict=True)])

    @property
    def parts(self) -> tuple[contract.Part, ...]:
        found = list[contract.Part]()
        for part in self._opened.parts:
            name = self._opened.names[part.path] + ("" if part.group == "/" else f":/{part.group}")
            rows = part.anchors.fingerprint(part.rows)
            found.append(contract.Part(part.path, part.group, name, part.anchors.count, rows, part.datasets))
        return tuple(found)

    def places(self) -> contract.Places:
        """The part and row of each sample; rows of episodes, and of patches, that share no values are far apart."""
        places, parts = super().places(), self._opened.parts
        grids = [next((each.patches for each in part.fields.values() if each.patches), None) for part in parts]
        if all(each and each.drawn is None for each in grids):
            sets = np.concatenate([each.sets[part.own_rows] for each, part in zip(grids, parts, strict=True) if each])
            rows = places.rows + sets * 2 * max(part.anchors.count for part in parts)
            return dataclasses.replace(places, rows=rows)
        if parts[0].given_episodes is None:
            return places
        own = [part.episodes.number(part.own_rows) for part in parts]
        rows = places.rows + np.concatenate([each * len(each) for each in own])
        ids = [part.episode_ids[each] for part, each in zip(parts, own, strict=True) if part.episode_ids is not None]
        return dataclasses.replace(places, rows=rows, episodes=np.concatenate(ids) if len(ids) == len(parts) else None)

    def ranges_read(self, samples: Indices) -> Iterator[Any]:
        for number, which in self._reader.by_part(samples):
            part = self._opened.parts[number]
            of = self._opened.identities[part.path][:2], None if part.names is None else part.names.tobytes()
            rows = part.anchors.rows(samples[which] - self._reader.starts[number])
            bounds = part.episodes.of(rows)
            for field in part.fields.values():
                column = field.conversion and field.conversion.column
                names = frozenset((of, each.name, each.axis, column) for each in field.datasets if each.kept is None)
                if names:
                    yield which, names, *(np.clip(rows + each, *bounds) for each in span_of([field]))

    @property
    def stored_parts(self) -> tuple[StoredPart, ...]:
        """How each part stores each field: for tools that describe or copy files."""
        return tuple(self._opened.parts)

    @property
    def files(self) -> Files:
        """How its files are reached: for tools that open them."""
        return self._opened.files

    def fingerprint(self) -> dict[str, int | str]:
        """Number of samples, fields, number of files and their bytes, and which rows of them are samples."""
        sizes = {path: identity.size for path, identity in self._opened.identities.items()}
        parts = [
            f"{os.path.basename(part.file)} {part.group} {part.samples} {part.rows} {sizes[part.file]}"
            for part in self.parts
        ]
        labels = {} if self._opened.joined is None else self._opened.joined.labels
        found = super().fingerprint() | {f"values of {key}": digest(each.values) for key, each in labels.items()}
        for key, field in self._opened.parts[0].fields.items():
            if own := field.patches:
                found[f"patches of {key}"] = str((own.stride, own.drawn, own.pad, self._shares))
        return found | {"files": len(sizes), "bytes": sum(sizes.values()), "names and rows of files": digest(parts)}

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        if not part_samples.found_names(self._opened.parts[0]):
            return self
        cure = "give all classes: classes=[…]; or kind='text', if it only says whose samples these are"
        stored = [part_samples.renamed(part, classes, cure) for part in self._opened.parts]
        spec = BatchSpec(common_fields(stored), as_mapping=self.spec.as_mapping)
        changed = copy.copy(self)
        changed.__setstate__({"_opened": dataclasses.replace(self._opened, parts=stored, spec=spec)})
        return changed

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample: a field of single numbers, a column of the table, or a dataset in each part.

        Where groups are parts or samples, and have no dataset of that name, ``"group"`` is the file and name of the
        group. With ``episodes``, ``"episode"`` is the id of the episode in the file, else its number there; behind the
        name of its part, as ``"a.h5:0"``, if another part has the same.
        """
        if name == "episode" and (of_parts := self.places()).episodes is not None:
            return of_parts.named_episodes()
        if name == "group" and self._opened.parts[0].names is not None:
            places = self.locate(range(len(self)))
            return np.array([f"{self._opened.names[place.file]}:{place.group}" for place in places], object)
        fields = self._opened.spec.fields
        if name in fields and (self._opened.parts[0].fields[name].patches or math.prod(fields[name].shape) == 1):
            return super().column(name)
        opened = self._opened
        if opened.joined and (found := opened.joined.column(name, opened.parts)) is not None:
            return found
        try:
            columns = [each.column(name, opened.files, allow_external=opened.allow_external) for each in opened.parts]
        except MissingError:
            if name != "group" or opened.parts[0].group == "/":
                raise
            return np.array([part.name for part in self.parts for _ in range(part.samples)], object)
        for part, (values, coded) in zip(opened.parts, columns, strict=True):
            if values.dtype.kind in "iu" and contradict(coded.names, columns[0][1].names):
                what = f"has other names for the numbers of {name!r} than {opened.parts[0]}"
                cure = f"make it a field, Field({name!r}, classes=[…]), which numbers them by name, and give its key"
                raise FormatError(f"{part}: {what}; {cure}", file=part.path, dataset=name)
        return contract.end_to_end(name, [values for values, _ in columns], [*map(str, opened.parts)])

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        self.read_random(samples, out, None)

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words | None) -> None:
        contract.check_range(samples, self)
        if samples.size:
            if self.chunks.remote and len(samples) > 1:
                self.fetch(samples)  # all at once, and not field by field
            if keys is None and self._fixed_keys is not None:
                keys = self._fixed_keys[samples]
            self._reader.read(samples, out, keys)

    def fetch(self, samples: Indices) -> bool:
        contract.check_range(samples, self)
        if samples.size and self._blocks is not None:
            samples = self._blocks.whole(samples)
        return self._reader.fetch(samples)

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        contract.check_range(samples, self)
        self._reader.decode(samples, chunk_group)

    def locate(self, ids: Sequence[int] | Indices) -> list[contract.Location]:
        samples = contract.whole_numbers(ids, self)
        contract.check_range(samples, self)
        places = np.empty(samples.shape, object)
        for number, where in self._reader.by_part(samples):
            part = self._opened.parts[number]
            rows = part.anchors.rows(samples[where] - self._reader.starts[number])
            for place, row in zip(where.tolist(), rows.tolist(), strict=True):
                places[place] = contract.Location(part.path, "/" + part.group_of(row).strip("/"), row)
        return list(places)

    def memory(self, chunks: int = 0) -> contract.MemoryNeeds:
        return self._reader.memory(chunks)

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        return self._reader.reserve(chunks, cache_bytes)

    def close(self) -> None:
        """Close every file and drop what was decoded. Reading opens the files again."""
        self._reader.close()
        self._opened.files.close()


def _check_rows(sample: Any, rows: Any, of_rows: Mapping[str, Any], *, allow_external: bool) -> None:
    one_of("sample", sample, ("row", "group", "dataset"))
    stride, rate, time, episodes = of_rows.values()
    if sample != "row" and (allow_external or isinstance(rows, str) or episodes is not None):
        raise ConfigError(f"{sample!r} goes neither with allow_external nor episodes, nor with rows=NAME", "sample")
    if stride is not None and rows is not None:
        raise ConfigError("cannot be combined with rows, which place the samples; give one of the two", "stride")
    if option := "rate" if rate is not None else "time" if time is not None else "":
        if rows is None or sample != "row":
            raise ConfigError("goes with rows=, which hold seconds, and samples that are rows; leave it out", option)
        if not (time is None or (rate is None and isinstance(time, str))):
            what = f"{of_rows[option]!r}: give the rows per second, rate=, or the dataset of their times, time="
            raise ConfigError(what, option)


def _amplification(parts: Sequence[StoredPart]) -> npt.NDArray[Any]:
    every = [field for part in parts for each in part.fields.values() for field in each.channels or (each,)]
    patches = [each.patches for each in every if each.patches and each.values.filtered]
    compressed = [each for each in patches if each.holds == "values"]
    used = sum(each.rows * each.spec.nbytes for each in compressed)
    return sum((each.decoded() for each in compressed), np.zeros(2)) / max(used, 1)


def _check_patches(fields: Mapping[str, Field], patches_per_volume: Any, of_rows: Mapping[str, Any]) -> None:
    if patches_per_volume is not None:
        whole("patches_per_volume", patches_per_volume, 1)
    what = "needs a field with patch= or points=, such as Field('volume', patch=(32, 64, 64))"
    if patches := [field for field in fields.values() if field.places]:
        of = "patches of volumes, which Field(stride=…) places" if patches[0].patch else "points of clouds"
        what = f"is for rows, but samples are {of}; leave it out"
    for option, value in (of_rows if patches else {"patches_per_volume": patches_per_volume}).items():
        if value is not None:
            raise ConfigError(what, option)


def _checked_shares(fields: Mapping[str, Field], patches_per_volume: Any, given: Any) -> dict[str, dict[int, float]]:
    key, shares = next(iter(given.items())) if isinstance(given, Mapping) and len(given) == 1 else ("", None)
    keys = [key for key, field in fields.items() if field.patch]
    if patches_per_volume is None or not keys:
        raise ConfigError(f"{given!r} needs patches_per_volume=, and a field with patch=", "foreground")
    if key not in keys:
        what = f"does not name one of {few(keys)}, the keys of patches; write {{{keys[-1]!r}: {{1: 0.33}}}}"
        raise ConfigError(f"{given!r} {what}", "foreground")
    pairs: Any = shares.items() if isinstance(shares, Mapping) else ()
    fits = (isinstance(each, Integral) and isinstance(share, Real) and float(share) > 0 for each, share in pairs)
    if not pairs or any(share is True for _, share in pairs) or not all(fits) or sum(dict(pairs).values()) > 1:
        what = f"{shares!r} are not shares above 0 of class numbers, together at most 1, such as {{1: 0.33}}"
        raise ConfigError(what, f"foreground.{key}")
    return {key: {int(each): float(share) for each, share in pairs}}


def _stored_fields(chosen: Mapping[str, Field], joined: JoinedTable | None, episodes: Any) -> dict[str, Field]:
    stored = {key: field for key, field in chosen.items() if not joined or key not in joined.fields}
    if episodes is not None and "episode" in chosen:
        own, rules = stored.get("episode"), episodes if isinstance(episodes, Mapping) else {"ids": episodes}
        if own is None or ("ids" in rules and (own.dataset != rules["ids"] or own.attr or own.lookup)):
            what = "names the ids of episodes=, as in split(groups='episode'), and this field holds other values"
            raise ConfigError(f"{what}; give it another key", "fields.episode")
    for key, field in stored.items():
        if option := "separator" if field.separator else "null" * (field.null == "zero"):
            what = f"{field.dataset!r} is no column of a table, whose cells hold several classes; leave it out"
            raise ConfigError(what, f"fields.{key}.{option}")
    return stored | (joined.keys if joined else {})


def _fits(part: StoredPart, largest: str) -> bool:
    """Whether samples of one chunk of the grouping field never read several chunks of another compressed field."""
    rows = part.fields[largest].values.chunk_rows
    others = (field for key, field in part.fields.items() if key != largest and field.values.filtered)
    fits = (field.values.chunk_rows <= rows and field.regular and field.window.length == 1 for field in others)
    return bool(part.fields[largest].patches) or all(fits)
