"""`ManifestSource`: samples of a table, or of a folder for each class."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import ConfigError, ManifestError, MissingError, few
from lit_async_data.options import OF_SOURCE, check_names, flag, one_of
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.order.plan import ChunkGroup
from lit_async_data.sources import local_files
from lit_async_data.sources.contract import source as contract
from lit_async_data.sources.contract.checks import fields_by_key
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.user_code import digest, probes
from lit_async_data.sources.files.files import Files
from lit_async_data.sources.images.formats import ImageShape
from lit_async_data.sources.local_files import Exclude, is_address, local_path, raise_if_none_left
from lit_async_data.sources.manifest.columns import SUFFIXES, Column, Given
from lit_async_data.sources.manifest.fields import Fields
from lit_async_data.sources.manifest.files import RootDirectory
from lit_async_data.sources.table.embedded import EmbeddedFiles
from lit_async_data.sources.table.formats import TextFormat, arrow, numpy_values, quoted
from lit_async_data.sources.table.table import FolderTable, TableReader

PATH, LABEL = "path", "label"
# Names of folders for stages, each of which holds all classes.
_STAGES = ("train", "training", "trn", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation")

# The rows of a table whose paths may be compared with those of other tables; of more, the rows are.
_FEW = 2**18

_log = logging.getLogger(__name__)


def class_folders(root: str, *, links: bool = False) -> FolderTable:
    """A table of the images and ``.npy`` files in a tree of class folders: their paths in it, and the labels."""
    if not os.path.isdir(root):
        raise ConfigError(f"{root} is not a folder; give one with a folder per class", "from_folder")
    folders = [entry for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
    if not links:
        _check_no_links([entry.path for entry in folders])
    classes = sorted(_utf8_path(entry.name) for entry in folders)
    if not classes:
        ways = "without classes, list the images: ManifestSource({'path': [...]}, {'x': 'path'})"
        raise ConfigError(f"{root} has no folders; it needs one for each class; {ways}", "from_folder")
    _check_no_stages(root, classes)
    library = arrow()
    chunks, others = [], Counter[str]()
    for name in classes:
        # One class at a time, so that only its paths are Python strings.
        skipped = Counter[str]()
        chunks.append(library.array(list(_files(root, name, skipped, links=links)), library.large_string()))
        others += skipped
        if not len(chunks[-1]):
            folder = os.path.join(root, name)
            what = f", but {_counted(skipped)}; convert those" if skipped else "; add some"
            message = f"{folder} has no images or .npy files{what}, or move the folder away if it is not a class"
            raise MissingError(f"from_folder: {message}", file=folder)
    if others:
        _log.warning("from_folder: %s: skipped files that are neither images nor .npy: %s", root, _counted(others))
    codes = np.repeat(np.arange(len(classes), dtype=np.int32), list(map(len, chunks)))
    labels = library.DictionaryArray.from_arrays(codes, library.array(classes, library.large_string()))
    return FolderTable(root, library.table({PATH: library.chunked_array(chunks), LABEL: labels}))


def _check_no_stages(root: str, folders: list[str]) -> None:
    """Refuse folders such as ``train`` and ``val`` that hold class folders; a class may have such a name."""
    if not all(name.lower() in _STAGES for name in folders):
        return
    for name in folders:
        _, below, files = next(os.walk(os.path.join(root, name), onerror=raise_if_none_left), ("", [], []))
        shown = [each for each in (*below, *files) if not each.startswith(".")]
        if any(each in shown for each in below) and not any(map(_is_readable, shown)):
            sources = " and ".join(f"from_folder({os.path.join(root, each)!r})" for each in folders)
            what = f"has folders of stages ({', '.join(folders)}) that hold the folders of classes"
            ways = f"give each stage its own source, {sources}; or rename one if these are the classes"
            raise ConfigError(f"{root} {what}; {ways}", "from_folder")


def _is_readable(name: str) -> bool:
    return SUFFIXES.get(os.path.splitext(name)[1].lower()) in ("image", "npy")


def _counted(suffixes: Counter[str]) -> str:
    return few([f"{count} {suffix}" for suffix, count in suffixes.most_common()])


def _check_no_links(folders: list[str]) -> None:
    for folder in filter(os.path.islink, folders):
        what = "is a link to a folder; set allow_external=True to follow it, or remove it"
        raise ConfigError(f"{quoted(folder)} {what}", "from_folder", file=folder)


def _files(root: str, name: str, skipped: Counter[str], *, links: bool) -> Iterator[str]:
    """Paths of readable files, relative to the root. Counts other files by suffix, without hidden files."""
    seen: set[str] = set()  # visited folders: links may form a cycle
    for folder, below, files in os.walk(os.path.join(root, name), onerror=raise_if_none_left, followlinks=links):
        if os.path.realpath(folder) in seen:
            below.clear()
            continue
        seen.add(os.path.realpath(folder))
        below[:] = sorted(each for each in below if not each.startswith("."))
        if not links:
            _check_no_links([os.path.join(folder, each) for each in below])
        relative = os.path.relpath(folder, root)
        for file in sorted(each for each in files if not each.startswith(".")):
            if _is_readable(file):
                yield _utf8_path(os.path.join(relative, file))
            else:
                skipped[os.path.splitext(file)[1].lower() or "without a suffix"] += 1


def _utf8_path(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"{quoted(path)}: the name is not UTF-8; rename the file", file=path) from None
    return path


OPTIONS = ["root", "id", "filters", "exclude", "check_files", "allow_external", "delimiter", "encoding"]
OPTIONS += ["cache", "cache_limit", "storage_options", "storage"]
OPTIONS += [field.name for field in dataclasses.fields(ImageShape)]
# Advice for names that are no options of a table.
ELSEWHERE = OF_SOURCE | {
    each.name: f'give it to a column: {{"name": COLUMN, "{each.name}": …}}'
    for each in dataclasses.fields(Column)
    if each.name not in ("name", "image", "given")
}

Check = Literal["first", "none"]
FOLDER_ROWS = 256  # most files of a folder in one chunk of ``shuffle="chunk"``


def root_of(table: Any) -> str:
    """The folder of a table; for a pattern, the last folder without a wildcard."""
    if not isinstance(table, str | os.PathLike):
        return os.getcwd()
    path = str(table) if isinstance(table, str) and is_address(table) else local_path(table)
    if os.path.isdir(path):
        return str(path)
    return local_files.folder_of(path) if local_files.is_pattern(path) else os.path.dirname(path)


class ManifestSource(Source):
    """Samples that a table names: labels in the table, and files that it gives the paths of. Thread-safe.

    Each row is a sample. The table is read once, column by column, and held by pyarrow: about 50 bytes per row, and no
    Python object per row. Threads read and decode files without a lock.

    Args:
        table: A CSV, TSV, Parquet or JSON lines file (CSV, TSV and JSON lines also with ``.gz``), a pattern for several
            files, or a folder of Parquet files; a DataFrame of pandas or polars, a dict of columns, a ``pyarrow.Table``
            or another object with ``__arrow_c_stream__``. Only columns in use are read, bytes of files by row group.
        fields: The fields of a batch. A mapping from batch key to column gives dicts; a sequence of columns gives
            tuples, with the column names as keys. A column is a name; a list of names of numeric columns, which become
            one vector; or a mapping of the options of `Column`: ``{"name": "tags", "separator": ";"}``. The kind of a
            column is inferred from its first value: paths of images (JPEG, PNG, TIFF, WebP, BMP, GIF), of ``.npy``
            files, or of HDF5 files, with the columns ``row`` and ``dataset``; bytes of images or of ``.npy`` files, or
            records of ``bytes`` and ``path``; numbers; or text, which becomes a class number.
        root: The folder that relative paths start from. None: the folder of the table; for a table in memory, the
            working directory.
        id: Column of sample ids, read as text; ids must be unique. Errors and `locate` name them.
        filters: Conditions that rows must all meet, as in ``[["quality", ">", 0.5], ["site", "in", ["a", "b"]]]``.
        exclude: Samples to leave out, as for `HDF5Source`. A list from a file counts rows without ``filters``, and its
            rows must still name the listed files; sample numbers count the rows that ``filters`` keep.
        check_files: Files to check now: ``"first"``, the files of the first good sample of 16, or ``"none"``. A bad
            file raises its error when it is read; ``inspect --check-all`` reads all. HDF5 files are always opened.
        cache: As for `HDF5Source`; other files are kept there whole.
        cache_limit: As for `HDF5Source`.
        storage_options: As for `HDF5Source`.
        storage: As for `HDF5Source`.
        allow_external: Whether paths, links on them, and addresses may leave ``root``.
        delimiter: Separates cells of CSV and TSV files: ``";"``, ``"|"``. None: a comma, and a tab in TSV.
        encoding: Encoding of CSV and TSV files: ``"cp1252"``, ``"latin-1"``, ``"utf-16"``. None: UTF-8.
        **image: How images become arrays of one shape: ``image_size`` (height and width, or one number for both) and
            the other options of `ImageOptions`. A field that is a mapping can have other values:
            ``{"name": "mask", "mode": "P"}``.

    Images are uint8 (uint16 in that mode) of shape (C, H, W), a channels-last view of decoded pixels. ``.npy`` files
    and rows of HDF5 files keep their dtype. Whole numbers are int64, other numbers keep their dtype (float64 from CSV),
    and classes are int64 from 0 on, in the order of their names.

    Raises:
        ConfigError: An option is invalid or does not fit the table; or pyarrow or Pillow is missing.
        MissingError: The table, or a checked file, does not exist.
        ManifestError: A row of the table is invalid; names file and row.
        SourceError: A checked file cannot be read; names row, id and path.

    Example:
        >>> import numpy, pyarrow, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> numpy.save(folder.name + "/a.npy", numpy.zeros((3, 4), "f4"))
        >>> table = pyarrow.table({"id": ["007", "008"], "path": ["a.npy", "a.npy"], "species": ["owl", "auk"]})
        >>> source = ManifestSource(table, {"x": "path", "y": "species"}, root=folder.name, id="id")
        >>> len(source), source.spec["x"].shape, source.spec["y"].classes
        (2, (3, 4), ('auk', 'owl'))
        >>> source.locate([0])[0].id
        '007'
        >>> source
        <ManifestSource of 2 samples from the table given: x float32 (3, 4), y int64; read from a file for each sample>
        >>> ManifestSource(table, {"x": "path"}, root=folder.name, id="id", exclude=[0]).locate([0])[0].id
        '008'
        >>> folder.cleanup()
    """

    def __init__(
        self,
        table: Any,
        fields: Mapping[str, Given] | Sequence[Given],
        *,
        root: str | os.PathLike[str] | None = None,
        id: str | None = None,  # noqa: A002  # a public name
        filters: Sequence[Sequence[Any]] | None = None,
        exclude: Exclude | None = None,
        check_files: Check = "first",
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        storage: Any = None,
        allow_external: bool = False,
        delimiter: str | None = None,
        encoding: str | None = None,
        **image: Any,
    ) -> None:
        if not (id is None or (isinstance(id, str) and id)):
            raise ConfigError(f"{id!r} is not the name of a column", "id")
        flag("allow_external", allow_external)
        one_of("check_files", check_files, get_args(Check))
        check_names(image, OPTIONS, ELSEWHERE)
        shape = ImageShape(**image)
        of = functools.partial(Column.of, image=shape)
        columns, as_mapping = fields_by_key(fields, of, lambda column: "_".join(column.names), "column")
        text_format = TextFormat.of(delimiter, encoding)
        files = Files(cache, cache_limit, storage_options, storage)
        with files.closed_after_an_error():
            self._reader = TableReader(files.copied(table), filters, text_format)
            place = root_of(table) if root is None else os.fspath(root)
            folder = RootDirectory(place, allow_external=allow_external, files=files)
            self._fields = Fields(columns, self._reader, folder, id, exclude)
            if shape.image_size is not None and not any(field.decoder.images for field in self._fields.files.values()):
                given = ", ".join(f"{key} (column {', '.join(column.names)!r})" for key, column in columns.items())
                hint = "set kind: image, or suffix: .jpg, for paths without an image suffix, or leave out image_size"
                raise ConfigError(f"no field holds paths of images: {given}; {hint}", "image_size")
            self._spec = BatchSpec(self._fields.specs, as_mapping=as_mapping)
            if check_files == "first":
                self._fields.check_first(self._spec)

    @classmethod
    def from_folder(
        cls, root: str | os.PathLike[str], fields: Mapping[str, Given] | Sequence[Given] | None = None, **options: Any
    ) -> Self:
        """The images, or ``.npy`` files, in a tree with one folder per class.

        Args:
            root: A folder with one folder per class. Hidden files are skipped; other files are skipped with a warning
                that counts them.
            fields: As for the class, with the columns ``path`` and ``label``; None: ``{"x": "path", "y": "label"}``.
            **options: As for the class; with ``allow_external``, links to folders are followed.

        Raises:
            ConfigError: ``root`` is not a folder, has no folders, or its folders are stages (``train``, ``val``), not
                classes.
            MissingError: A class has no files.

        Example:
            >>> import tempfile, os
            >>> from PIL import Image
            >>> folder = tempfile.TemporaryDirectory()
            >>> for name in ("auk", "owl"):
            ...     os.mkdir(f"{folder.name}/{name}")
            ...     Image.new("RGB", (40, 30)).save(f"{folder.name}/{name}/1.png")
            >>> source = ManifestSource.from_folder(folder.name, image_size=32)
            >>> source.spec["x"].shape, source.spec["y"].classes
            ((3, 32, 32), ('auk', 'owl'))
            >>> folder.cleanup()
        """
        check_names(options, OPTIONS, ELSEWHERE)
        path = local_path(root)
        with local_files.opening_errors(path, "listed"):
            table = class_folders(path, links=bool(options.get("allow_external")))
        return cls(table, {"x": PATH, "y": LABEL} if fields is None else fields, root=path, **options)

    def __len__(self) -> int:
        return len(self._fields.rows)

    @property
    def name(self) -> str:
        return self._fields.rows.table.origin.name

    @property
    def spec(self) -> BatchSpec:
        return self._spec

    def fingerprint(self) -> dict[str, int | str]:
        """Number of samples and fields; file names and labels of evenly spaced samples."""
        fields, fingerprint = self._fields, super().fingerprint()
        if fields.paths is not None:
            files = itertools.chain(*fields.paths.texts(probes(len(self), most=256)))
            fingerprint["names of files"] = digest(map(os.path.basename, files))
        for key, file in fields.files.items():
            if file.paths.lengths is not None:
                fingerprint[f"lengths of {key}"] = digest(file.paths.lengths)
        for each in fields.embedded:
            fingerprint["sizes of row groups"] = digest(np.asarray(each.groups.nbytes))
        if fields.excluded.size:
            fingerprint["left out by exclude"] = f"{len(fields.excluded)} samples, {digest(fields.excluded)}"
        return fingerprint | {f"values of {key}": digest(labels.values) for key, labels in fields.labels.items()}

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        contract.check_range(samples, self)
        self._fields.read(samples, out, None)

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        contract.check_range(samples, self)
        self._fields.read(samples, out, keys)

    def locate(self, ids: Sequence[int] | Indices) -> list[contract.Location]:
        """Find samples: file of the table, row, and the attributes ``id`` and ``path`` (of the first file)."""
        samples = contract.whole_numbers(ids, self)
        contract.check_range(samples, self)
        paths = self._fields.paths
        return self._fields.rows.locations(samples, [None] * len(samples) if paths is None else paths.named(samples))

    def close(self) -> None:
        """Close all HDF5 files; other files are open only while they are read."""
        for fields in self._fields.hdf5:
            fields.source.close()
        for each in self._fields.embedded:
            each.groups.clear()
        self._fields.prefetcher.close()

    # -- classes and columns -----------------------------------------------------------------------------------------

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        changed, fields = copy.copy(self), self._fields.with_classes(classes)
        vars(changed).update(_fields=fields, _spec=BatchSpec(fields.specs, as_mapping=self._spec.as_mapping))
        return changed

    def column(self, name: str) -> npt.NDArray[Any]:
        """As `Source.column`, also of any column of the table, which is read now if no field uses it."""
        labels = self._fields.labels.get(name)
        if labels is not None and labels.values.ndim == 1:
            return labels.values
        table = self._fields.rows.table
        if name not in table.names:
            table = table.with_columns_of(self._reader.columns([name]))
        if isinstance(table.array(name), EmbeddedFiles):
            what = f"column {quoted(name)} holds the bytes of files; name another"
            raise MissingError(f"{self.name}: {what}", dataset=name)
        return numpy_values(table.array(name))

    # -- how samples belong together ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[contract.Part, ...]:
        return self._fields.rows.parts()

    def places(self) -> contract.Places:
        return self._fields.rows.places()

    def ranges_read(self, samples: Indices) -> Iterator[Any]:
        fields, places, real = self._fields, self.places().taken(samples), contract.without_links()
        yield from (reads for each in fields.hdf5 for reads in each.source.ranges_read(samples))
        of = [hash(real(each.file)) >> 2 if each.name else id(fields.rows.table.origin) for each in places.parts]
        by_path = [each for each in fields.files.values() if each.embedded is None and len(self) <= _FEW]
        codes = np.array(of)[places.which] + places.rows
        if by_path:  # all files of a row together: rows may have one of them in common, such as a reference
            rows = zip(*(each.paths.named(samples) for each in by_path), strict=True)
            codes = np.array([hash(each) >> 1 for each in rows])
        yield np.arange(len(samples)), frozenset([bool(by_path)]), codes, codes + 1

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]]:
        """The group number of each sample, and the names of groups, which ``naming`` makes of its first path."""
        if self._fields.paths is None:
            what = "no field holds paths of files; group by a column, as with groups='column:NAME'"
            raise ConfigError(what, "groups")
        return self._fields.paths.grouped(naming)

    @functools.cached_property
    def chunks(self) -> contract.StorageLayout:  # pyright: ignore[reportIncompatibleMethodOverride]  # read once, as a property
        """The largest chunks of an HDF5 field, and the most expensive way of reading."""
        layouts, files = [fields.chunks for fields in self._fields.hdf5], self._fields.files.values()
        layouts += [each.chunks for each in self._fields.embedded]
        largest = max(layouts, key=lambda layout: layout.rows, default=contract.StorageLayout(reading="copied"))
        readings: list[contract.Reading] = ["copied", *(layout.reading for layout in layouts)]
        readings.extend("decoded" if field.decoder.images else "opened" for field in files)
        crops, ahead = any(field.decoder.is_random for field in files), bool(layouts or files)
        root, remote = self._fields.root, largest.remote
        if files and not root.files.is_local(root.root):
            remote = contract.Remote.joined([remote, contract.Remote(0, len(self), root.files.options["cache"])])
        reading = contract.slowest(readings)
        layout = dataclasses.replace(largest, reading=reading, random=crops, ahead=ahead, remote=remote)
        return dataclasses.replace(layout, left_out=self._fields.left_out)

    def layout(self) -> contract.StorageLayout:
        """As `chunks`; without HDF5 files, the files of one folder form chunks."""
        return self._layout

    @functools.cached_property
    def _layout(self) -> contract.StorageLayout:
        paths = self._fields.paths
        if paths is None or self.chunks.runs or self._fields.hdf5:
            return self.chunks
        folders = paths.folders()
        order = np.argsort(folders, kind="stable")
        runs = tuple(ChunkRun(count, FOLDER_ROWS) for count in np.bincount(folders).tolist())
        return dataclasses.replace(self.chunks, runs=runs, order=None if (np.diff(order) == 1).all() else order)

    # -- reading ahead -----------------------------------------------------------------------------------------------

    def fetch(self, samples: Indices) -> bool:
        cold = [fields.source.fetch(samples) for fields in self._fields.hdf5]
        cold += [file.fetch(samples) for file in self._fields.files.values()]
        return any(cold)

    def decode(self, samples: Indices, chunk_group: ChunkGroup | None) -> None:
        for fields in self._fields.hdf5:
            fields.source.decode(samples, chunk_group)
        for each in self._fields.embedded:
            each.decode(samples)

    def memory(self, chunks: int = 0) -> contract.MemoryNeeds:
        needs = [fields.source.memory(chunks) for fields in self._fields.hdf5]
        return contract.MemoryNeeds.together([*needs, *(each.groups.memory(chunks) for each in self._fields.embedded)])

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        held: list[Any] = [fields.source for fields in self._fields.hdf5]
        held += [each.groups for each in self._fields.embedded]
        with contract.reserve_shares(held, chunks, cache_bytes) as reserved:
            if self._fields.files:
                reserved.callback(self._fields.prefetcher.reserve())
            return reserved.pop_all().close
