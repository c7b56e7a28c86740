"""`PartReaders`: read the fields of samples from all parts; samples without a value."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import Array, BatchSpec
from lit_async_data.errors import AsyncDataError, FormatError, SourceError
from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources.contract.checks import first_good
from lit_async_data.sources.contract.source import MemoryNeeds, Reading, slowest
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import ASKED_FOR
from lit_async_data.sources.hdf5.parts.part import MAX_DECODED_TWICE, ChunkGrouping, StoredPart
from lit_async_data.sources.hdf5.parts.samples import with_samples
from lit_async_data.sources.hdf5.parts.stored_field import Kind, StoredField
from lit_async_data.sources.hdf5.readers import readers
from lit_async_data.sources.hdf5.readers.chunk_cache import ChunkCache, ChunkedReader
from lit_async_data.sources.hdf5.readers.patches import ChunkedPatchReader, PatchReader, PointsReader
from lit_async_data.sources.hdf5.readers.readers import BLOCK_BYTES, Reader
from lit_async_data.sources.hdf5.readers.slabs import H5pySlabDecoder, IndexedSlabDecoder, RawReader, is_raw
from lit_async_data.sources.hdf5.schema.categories import MISSING, UNLISTED
from lit_async_data.sources.hdf5.schema.encoded import StoredImages, StoredRanges, StoredSequences
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset
from lit_async_data.sources.hdf5.schema.patches import StoredPatches
from lit_async_data.sources.hdf5.select import Select, count_distinct, grouped
from lit_async_data.sources.hdf5.storage.failures import source_error
from lit_async_data.sources.hdf5.storage.open_file import OpenFile, OpenFiles
from lit_async_data.sources.images.image import Alignment, Places

T = TypeVar("T")


def choice(stored: StoredDataset, *, mapped: bool) -> str:
    """The fastest way to read a dataset: as it is stored, piece by piece, chunks without libhdf5, or by libhdf5."""
    if stored.kept is not None:
        return "kept"
    if is_raw(stored):
        return "raw"
    if stored.offset is not None and mapped:
        return "strided"
    if stored.index is not None:
        return "chunks"
    return "h5py groups" if stored.names is not None else "h5py chunks" if stored.filtered else "h5py rows"


def fastest_reader(
    stored: StoredDataset, file: OpenFile, cache: ChunkCache, name: str, *, repeats: bool = False
) -> Reader:
    """It caches chunks by ``name``, which groups of several files may share."""
    way, index = choice(stored, mapped=file.mapped), stored.index
    if "chunks" in way:
        decoder = H5pySlabDecoder(stored, file) if index is None else IndexedSlabDecoder(stored, index, file)
        return ChunkedReader(stored, decoder, cache, name, repeats=repeats)
    of = {
        "raw": RawReader,
        "strided": readers.StridedReader,
        "h5py rows": readers.H5pyReader,
        "h5py groups": readers.GroupsReader,
    }
    return of[way](stored, file)


class PartReader:
    def __init__(self, part: StoredPart, file: OpenFile, cache: ChunkCache) -> None:
        self._part, self._file, self._cache = part, file, cache
        # The reader of each dataset. Fields of one dataset share it, so that it is decoded once.
        self.datasets: dict[str, Reader] = {}
        # Of each field, its readers, and the channels that they fill, if there are several.
        self.fields: dict[str, list[tuple[Any, Reader]]] = {}
        for key, field in part.fields.items():
            before = (slice(None),) * (1 + field.window.axis)
            channels = [((*before, number), self._field_reader(each)) for number, each in enumerate(field.channels)]
            self.fields[key] = channels or [((), self._field_reader(field))]
        images = {key: field.images.decoder.shape for key, field in part.fields.items() if field.images}
        arrays = {key: field.spec.shape for key, field in part.fields.items() if key not in images}
        self.alignment = Alignment(images, arrays, {key: part.fields[key].values.name for key in images})

    def read(self, samples: Indices, out: Mapping[str, Array], keys: Words | None) -> dict[str, Places]:
        """Fill arrays with samples, counted from the start of the part; the keys select random crops.

        Returns what images that share their draw show, by sample and row of its window.
        """
        if self._file.cold:
            self.fetch(samples, out)
        rows, shown = self._part.anchors.rows(samples), dict[str, Places]()
        for key, array in out.items():
            window = self._part.fields[key].window
            own = window.own(rows)
            if key in self._part.lacking and len(lost := self._part.lacks(key, rows)):
                raise self._part.lack(key, int(lost[0]))
            for channel, reader in self.fields[key]:
                places = array[channel] if channel else array
                apart = places.strides[-1] != places.itemsize  # single numbers
                values = np.empty(places.shape, places.dtype) if apart else places
                images = reader.read(Select(own), values, keys)
                if apart:
                    places[...] = values
                if key in self.alignment.keys:
                    places = itertools.product(range(len(own)), window.offsets)
                    shown[key] = dict(zip(places, images or (), strict=True))
        for key, (sample, offset), what in self.alignment.mismatches(shown):
            field = self._part.fields[key]
            window = dataclasses.replace(field.window, offsets=(offset,))
            row = int(window.rows(window.own(rows)[[sample]])[0, 0])
            raise field.values.error(FormatError, what, row)
        return shown

    def fetch(self, samples: Indices, keys: Iterable[str] | None = None) -> bool:
        found = [reader.fetch(Select(own)) for reader, own in self._with_rows(samples, keys)]
        self._file.cold = any(found)
        return self._file.cold

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        if self._file.remote:
            self.fetch(samples)  # all at once
        for reader, own in self._with_rows(samples):
            reader.decode(Select(own), chunk_group)

    def _with_rows(self, samples: Indices, keys: Iterable[str] | None = None) -> Iterator[tuple[Reader, Indices]]:
        rows = self._part.anchors.rows(samples)
        for key in self.fields if keys is None else keys:
            own = self._part.fields[key].window.own(rows)
            if key in self._part.lacking:
                own = np.setdiff1d(own, self._part.lacking[key].rows)
            yield from ((reader, own) for _, reader in self.fields[key] if len(own))

    def add_row(self, error: AsyncDataError, samples: Indices) -> None:
        """Name the first row that needs the bytes which did not come; none if its reader does not fetch."""
        for sample, key in itertools.product(samples, self.fields):
            one, field = np.array([sample]), self._part.fields[key]
            if any(_needs(reader, own, error.span) for reader, own in self._with_rows(one, [key])):
                values, row = field.values, int(field.window.own(self._part.anchors.rows(one))[0])
                error.message = str(error).replace(self._part.path, values.at(row), 1)
                error.args, error.dataset, error.row = (error.message,), values.dataset(row), row
                return

    def _field_reader(self, field: StoredField) -> Reader:
        if field.mask:
            return readers.KeptReader(lambda rows, _: field.window.real(rows))
        reader = self._reader(field.stored)
        return reader if field.plain else readers.FieldReader(field, reader)

    def _reader(self, stored: Kind) -> Reader:
        match stored:
            case StoredDataset(steps=steps):
                reader = self._dataset_reader(stored)
                return readers.PlacedReader(steps.stored, reader) if steps and not steps.in_order else reader
            case StoredRanges(columns=StoredDataset() as columns):
                return readers.SparseReader(stored, self._dataset_reader(stored.values), self._dataset_reader(columns))
            case StoredRanges():
                return readers.PaddedReader(stored, self._dataset_reader(stored.values))
            case StoredSequences():
                of_kind = readers.SequenceReader if stored.heap else readers.GroupSequenceReader
                return of_kind(stored, self._file)
            case StoredImages():
                rows = None if stored.alone else self._reader(stored.ranges or stored.values)
                return readers.ImageReader(stored, rows, self._file)
            case StoredPatches():
                return self._patch_reader(stored)

    def _patch_reader(self, stored: StoredPatches) -> Reader:
        name = f"patches {len(self.datasets)}"  # the same in each part
        if stored.holds != "values":
            of = {"origin": stored.origins, "points": stored.points, "mask": lambda *_: stored.real()}
            return readers.KeptReader(of[stored.holds])
        if stored.block:
            self.datasets[name] = reader = fastest_reader(stored.values, self._file, self._cache, name)
            return PointsReader(stored, reader)
        if stored.values.index is None:
            return PatchReader(stored, self._file)
        self.datasets[name] = ChunkedPatchReader(stored, stored.values.index, self._file, self._cache, name)
        return self.datasets[name]

    def _dataset_reader(self, stored: StoredDataset) -> Reader:
        name = self._part.dataset_key(stored)
        if stored.kept is not None:
            values = stored.kept  # two fields may number one text in different ways
            return readers.KeptReader(lambda rows, _: values[rows] if len(values) > 1 else values)
        if name not in self.datasets:
            repeats = stored.filtered and stored.chunk_rows == 1 and self._repeats(name)
            self.datasets[name] = fastest_reader(stored, self._file, self._cache, name, repeats=repeats)
        return self.datasets[name]

    def _repeats(self, name: str) -> bool:
        """Whether several samples, or fields, read the rows of a dataset, and not only `MAX_DECODED_TWICE` of them."""
        firsts, lasts = self._part.chunks(name).reshape(2, -1)
        return int((lasts - firsts + 1).sum()) > (1 + MAX_DECODED_TWICE) * count_distinct(firsts, lasts)


def _needs(reader: Reader, rows: Indices, span: tuple[int, int] | None) -> bool:
    token = ASKED_FOR.set(span)
    try:
        return reader.fetch(Select(rows))
    except AsyncDataError as error:  # bytes that tell where others are
        return error.span is not None
    finally:
        ASKED_FOR.reset(token)


# Decoded bytes that are cached for each dataset between batches, or two slabs if those are larger, so that batches
# smaller than a slab, read in order, decode it once.
RECENT_BYTES = 16 * 2**20


class PartReaders:
    def __init__(
        self,
        stored: Sequence[StoredPart],
        identities: Mapping[str, FileIdentity],
        files: Files,
        grouping: ChunkGrouping,
        *,
        mapped: bool,
    ) -> None:
        self._stored, self._grouping, self._grouping_key = stored, grouping, grouping.key
        # The first sample of each part, and the end of the last.
        self.starts = np.cumsum([0] + [part.anchors.count for part in stored])
        external: dict[str, set[Any]] = {path: set() for path in identities}
        for part in stored:
            external[part.path].update(part.external)
        numbers = {path: number for number, path in enumerate(identities)}
        self._file_of = [numbers[part.path] for part in stored]
        opened = functools.partial(OpenFile, files=files, mapped=mapped)
        self._files = OpenFiles([opened(path, of, external=tuple(external[path])) for path, of in identities.items()])
        self.cache = ChunkCache()
        of_parts = map(self._files.files.__getitem__, self._file_of)
        self.parts = [PartReader(part, file, self.cache) for part, file in zip(stored, of_parts, strict=True)]
        self._datasets = dict[str, list[Reader]]()
        for name, reader in itertools.chain(*(part.datasets.items() for part in self.parts)):
            self._datasets.setdefault(name, []).append(reader)
        self._layout = None if grouping.max_slabs == 1 else ChunkExtents(grouping.runs)

    @property
    def reading(self) -> Reading:
        fields = (each for part in self.parts for each in itertools.chain(*part.fields.values()))
        return slowest(reader.reading for _, reader in fields)

    def read(self, samples: Indices, out: Mapping[str, Array], keys: Words | None = None) -> None:
        if len(self._stored) == 1:
            self._read_part(0, samples, out, keys)
            return
        sample_bytes = sum(array.nbytes for array in out.values()) // len(samples)
        block = max(BLOCK_BYTES // max(sample_bytes, 1), 1)
        blocks: dict[str, Array] = {}
        for part, where in self.by_part(samples):
            if len(where) == len(samples):
                self._read_part(part, samples, out, keys)
                return
            # Allocated once for all parts: the kernel clears new pages, which takes longer than the copy.
            if not blocks:
                blocks = {key: np.empty_like(array[:block]) for key, array in out.items()}
            # Several blocks are read in storage order: a chunk that samples share is then decoded once.
            order = where[np.argsort(samples[where], kind="stable")] if len(where) > block else where
            for first in range(0, len(order), block):
                places = order[first : first + block]
                views = {key: array[: len(places)] for key, array in blocks.items()}
                self._read_part(part, samples[places], views, None if keys is None else keys[places])
                for key, view in views.items():
                    out[key][places] = view

    def by_part(self, samples: Indices) -> list[tuple[int, Indices]]:
        return grouped(np.searchsorted(self.starts, samples, side="right") - 1)

    def check_first(self, spec: BatchSpec) -> None:
        """Check the images of the first good sample that belong together."""
        alignment = self.parts[0].alignment
        read = functools.partial(PartReader.read, out=spec.empty(1, alignment.keys), keys=None)
        if alignment.keys:
            found = first_good(int(self.starts[-1]), lambda sample: self._of_each_part(np.array([sample]), read))
            alignment.check_modes(found[0])
            self.close()

    def _read_part(self, part: int, samples: Indices, out: Mapping[str, Array], keys: Words | None) -> None:
        self._during(part, samples, functools.partial(PartReader.read, out=out, keys=keys))

    def _during(self, part: int, samples: Indices, call: Callable[[PartReader, Indices], T]) -> T:
        """Call a method of the reader of a part, whose file is open and checked meanwhile."""
        file, own = self._files.use(self._file_of[part]), samples - self.starts[part]
        try:
            return file.during(functools.partial(call, self.parts[part], own))
        except AsyncDataError as error:  # some are also an OSError
            if error.row is None and error.span is not None:
                self.parts[part].add_row(error, own)
            if error.row is not None and error.sample_id is None:
                sample = self._stored[part].sample(error.dataset, error.row, own)
                error.sample_id = None if sample is None else int(self.starts[part]) + sample
            raise
        except (OSError, MemoryError) as error:
            raise source_error(error, file.path, "cannot be read", file=file.path) from error

    def fetch(self, samples: Indices) -> bool:
        return any(self._of_each_part(samples, PartReader.fetch))

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        if self._layout is not None and samples.size:  # a group may read several chunks
            samples = self._layout.whole(samples)
        self._of_each_part(samples, functools.partial(PartReader.decode, chunk_group=chunk_group))

    def _of_each_part(self, samples: Indices, call: Callable[[PartReader, Indices], T]) -> list[T]:
        return [self._during(part, samples[where], call) for part, where in self.by_part(samples)]

    def memory(self, chunks: int) -> MemoryNeeds:
        every = list(itertools.chain(*self._datasets.values()))
        return MemoryNeeds(
            sum(self._room(name, chunks) for name in self._datasets),
            max((reader.thread_bytes for reader in every), default=0),
            sum(reader.cacheable_bytes for reader in every),
        )

    def _room(self, name: str, chunks: int) -> int:
        """Bytes of decoded chunks of a dataset that stay between batches."""
        cached = [reader for reader in self._datasets[name] if reader.slab_bytes]
        if not cached:
            return 0
        slab, whole = max(each.slab_bytes for each in cached), sum(each.cacheable_bytes for each in cached)
        if not chunks:
            return min(max(2 * slab, RECENT_BYTES), whole)
        patches = self._stored[0].fields[self._grouping_key].patches
        rows = min(each.rows for each in cached)
        slabs = patches.slabs(rows) if patches else self._slabs(name, rows)
        return whole if slabs is None else min(chunks * slabs * slab, whole)

    def _slabs(self, name: str, rows: int) -> int | None:
        """The largest number of slabs of a dataset that the samples of one group read; None if unknown."""
        grouping, first, span = self._grouping, self._stored[0], self._stored[0].spans().get(name)
        fields = [part.fields[self._grouping_key] for part in self._stored]
        own_span = fields[0].window.reach if fields[0].regular else None
        if span == own_span and name in map(first.dataset_key, fields[0].datasets):
            return grouping.max_slabs
        if span is None:
            return self._irregular.get(name)
        reach = grouping.max_slabs * max(field.values.chunk_rows for field in fields)
        if own_span is None:
            reach = max((run.rows for run in grouping.runs), default=1) * max(p.anchors.stride for p in self._stored)
        extra = span[1] - span[0] - 1
        if not extra and rows % reach == 0:
            return 1  # groups of samples never cross the borders of its slabs
        return -(-(reach + extra) // rows) + 1

    @functools.cached_property
    def _irregular(self) -> dict[str, int]:
        """As `_slabs`, for datasets without a row per anchor."""
        part, layout, found = self._stored[0], ChunkExtents(self._grouping.runs), dict[str, int]()
        begins = layout.extents(np.arange(layout.chunks))[0]
        flat = {key for key, field in part.fields.items() if field.images and field.images.ranges}  # bytes, not rows
        fields = [field for key, field in part.fields.items() if not field.regular and key not in flat]
        names = {part.dataset_key(each) for field in fields for each in field.datasets} & self._datasets.keys()
        for part, first, end in zip(self._stored, self.starts, self.starts[1:], strict=False):
            groups = begins[np.searchsorted(begins, first) : np.searchsorted(begins, end)] - first
            for name in names:
                firsts, lasts = part.chunks(name, min(reader.rows for reader in self._datasets[name]))
                slabs = np.maximum.reduceat(lasts.max(0), groups) - np.minimum.reduceat(firsts.min(0), groups) + 1
                found[name] = max(found.get(name, 1), int(slabs.max()))
        return found

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        for file in self._files.files:  # before taking a lock, which a thread may have held when this process forked
            file.check_process()
        return self.cache.reserve({name: self._room(name, chunks) for name in self._datasets}, cache_bytes)

    def close(self) -> None:
        if any(file.forked for file in self._files.files):
            return  # handles belong to the parent, and a lock may have been held when it forked
        for file in self._files.files:
            file.close()
        self.cache.clear()


# Larger fields are read at building only to drop samples; else a missing value is an error at its batch.
MOST_BYTES, MARKED_BYTES = 256 * 2**20, 2**22
# Whether sources look; no if each sample is to raise its own error when it is read.
LOOKS = contextvars.ContextVar("LOOKS", default=True)
NewReader = Callable[[Sequence[StoredPart]], PartReaders]


def with_categories(parts: Sequence[StoredPart], new_reader: NewReader, *, drop: bool) -> list[StoredPart]:
    """The parts without samples to ``drop``; else an error where a sample has no value, or a name that is no class."""
    found = list(parts)
    for key in parts[0].fields if LOOKS.get() else ():
        fields = [part.fields[key] for part in found]
        marking = list(map(_marking, fields))
        every = itertools.chain(*(field.channels or (field,) for field in fields))
        nulls = {each.conversion.null for each in every if each.conversion}
        pairs = list(zip(found, fields, marking, strict=True))
        shape = fields[0].spec.stored_shape
        size = sum(part.anchors.count * math.prod(shape) * each.values.dtype.itemsize for part, each, _ in pairs)
        if ("drop" in nulls) != drop or all(map(operator.is_, fields, marking)) or (size > MOST_BYTES and not drop):
            continue
        of = [dataclasses.replace(part, fields={**part.fields, key: each}) for part, _, each in pairs]
        with contextlib.closing(new_reader(of)) as reader:
            missing, unlisted = _marked(reader, key, shape)
        wrong = np.flatnonzero(unlisted if drop or "error" not in nulls else unlisted | missing)
        if wrong.size:
            with contextlib.closing(new_reader(found)) as reader:
                reader.read(wrong[:1], {key: np.empty((1, *shape), fields[0].spec.dtype)})
        lost = zip(found, np.split(missing, reader.starts[1:-1]), strict=True)
        found = with_samples([part.at(part.own_rows[~own]) if own.any() else part for part, own in lost])
    return found


def _marking(field: StoredField) -> StoredField:
    """A field that delivers marks where something may be wrong; itself if nothing can be."""
    channels = tuple(map(_marking, field.channels))
    if not all(map(operator.is_, channels, field.channels)):
        return dataclasses.replace(field, channels=channels)
    if field.conversion is None or not field.conversion.doubtful:
        return field
    return dataclasses.replace(field, conversion=dataclasses.replace(field.conversion, null="mark"))


def _marked(reader: PartReaders, key: str, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Which samples have no value, and which a name that is no class; shape (2, samples)."""
    count = int(reader.starts[-1])
    marks, step = np.zeros((2, count), np.bool_), max(MARKED_BYTES // (8 * math.prod(shape)), 1)
    blocks = [np.arange(first, min(first + step, count)) for first in range(0, count, step)]
    while blocks:
        samples = blocks.pop()
        values = np.zeros((len(samples), *shape), np.int64)
        try:
            reader.read(samples, {key: values})
        except SourceError:
            blocks += np.array_split(samples, 2) if len(samples) > 1 else []
            continue
        for which, mark in enumerate((MISSING, UNLISTED)):
            marks[which, samples] = (values == mark).reshape(len(samples), -1).any(axis=1)
    return marks
