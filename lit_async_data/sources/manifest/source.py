"""`ManifestSource`: the samples that a table names."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy.typing as npt

from lit_async_data.batch.spec import BatchSpec
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.options import check_names
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.base import Location, Part, StorageLayout, Turn, shown
from lit_async_data.sources.descriptors import listing
from lit_async_data.sources.manifest.class_folders import LABEL, PATH, class_folders
from lit_async_data.sources.manifest.column import Given
from lit_async_data.sources.manifest.fields import Fields
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.images.image_shape import ImageShape
from lit_async_data.sources.manifest.selection import OPTIONS, check_options, chosen_columns, root_of
from lit_async_data.sources.manifest.table.arrow import plain_of
from lit_async_data.sources.manifest.table.delimited import TextForm
from lit_async_data.sources.manifest.table.header import NoColumnError
from lit_async_data.sources.manifest.table.table import Table
from lit_async_data.sources.manifest.table.table_cache import TableCache
from lit_async_data.sources.manifest.table.table_reader import TableReader
from lit_async_data.sources.manifest.validation import Check, check_paths
from lit_async_data.sources.places import Places, check_range, whole_numbers


class ManifestSource:
    """Samples that a table names: labels that stand in it, and files whose paths do. Safe to read from several threads.

    A row is a sample. The table is read once, column by column, and held by pyarrow: about 50 bytes per row, and no
    object for any of them. Files are read and decoded by threads that hold no lock meanwhile.

    Args:
        table: A CSV, TSV, Parquet or JSON lines file (CSV, TSV and JSON lines also with ``.gz``), a pattern for
            several, a folder of Parquet files; or a DataFrame of pandas or polars, a ``pyarrow.Table``, or anything
            with ``__arrow_c_stream__``. Only columns that are used are read.
        fields: What a batch holds. A mapping from batch key to column gives dicts; a sequence of columns gives tuples,
            with their names as keys. A column is a name; a list of names, whose numbers become one vector; or a mapping
            of the names of `Column`: ``{"name": "tags", "separator": ";"}``. What stands in it is found from its first
            value: paths of images (JPEG, PNG, TIFF, WebP, BMP), of ``.npy`` files, or of HDF5 files, of which the
            columns ``row`` and ``dataset`` say more; numbers; or text, which becomes the number of its class.
        root: The folder that paths begin in. None: that of the table; of one that was given in memory, the working
            folder.
        id: Column of what samples are called, as text; no two may be the same. Errors and `locate` say it.
        filters: Conditions that rows must all meet, as in ``[["quality", ">", 0.5], ["site", "in", ["a", "b"]]]``.
        check_files: Which files are checked now: ``"first"`` those of the first sample, and a few others where all
            must have one shape; ``"all"``, with a progress bar; or ``"none"``. A file that is not checked raises its
            error when it is read. HDF5 files are opened in any case.
        allow_outside_root: Whether paths, and links on them, may leave ``root``.
        table_cache: A folder in which the columns that are used are kept as they are held, of tables in files from a
            million rows on: the next source maps them, and all processes of a machine share one copy. They are read
            anew when a file has changed; what nobody needs any more is yours to delete.
        delimiter: Between cells of CSV and TSV files: ``";"``, ``"|"``. None: a comma, and a tab in TSV.
        encoding: Of the text in CSV and TSV files: ``"cp1252"``, ``"latin-1"``, ``"utf-16"``. None: UTF-8.
        **image: How images become arrays of one shape: ``image_size`` (height and width, or one number for both),
            ``mode``, ``resize``, ``scale``, ``ratio``, ``interpolation``, ``fill``, ``max_pixels`` and ``depth``, as in
            `ImageShape`. A field that is a mapping can have others: ``{"name": "mask", "mode": "P"}``.

    Images are delivered as uint8 (mode I;16: uint16) of shape (C, H, W), a channels-last view of decoded pixels;
    ``.npy`` and rows of HDF5 files as they are stored; whole numbers as int64, other numbers as they are (float64 from
    CSV), and classes as int64 from 0 on, in the order of their names.

    Raises:
        ConfigError: An option is wrong, or does not fit the table; or pyarrow or Pillow is missing.
        MissingError: The table, or a file that was looked at, is not there.
        ManifestError: A row of the table is wrong; names file and row.
        SourceError: A file that was looked at cannot be read; names row, id and path.

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
        >>> folder.cleanup()
    """

    def __init__(
        self,
        table: Any,
        fields: Mapping[str, Given] | Sequence[Given],
        *,
        root: str | os.PathLike[str] | None = None,
        id: str | None = None,  # noqa: A002  # what people call it
        filters: Sequence[Sequence[Any]] | None = None,
        check_files: Check = "first",
        allow_outside_root: bool = False,
        table_cache: str | os.PathLike[str] | None = None,
        delimiter: str | None = None,
        encoding: str | None = None,
        **image: Any,
    ) -> None:
        check_options(root, id, check_files, allow_outside_root=allow_outside_root, image=image)
        shape = ImageShape(**image)
        columns, as_mapping = chosen_columns(fields, shape)
        form = TextForm.of(delimiter, encoding)
        self._given, self._name = TableReader(table, filters, TableCache(table_cache), form), ""
        place = RootDirectory(
            root_of(table) if root is None else os.fspath(root), allow_outside_root=allow_outside_root
        )
        self._fields = Fields(columns, self._given, place, id)
        if shape.image_size is not None and not any(field.decoder.images for field in self._fields.files.values()):
            given = ", ".join(f"{key} (column {', '.join(column.names)!r})" for key, column in columns.items())
            hint = "say kind: image of a column of paths that do not end as images do"
            raise ConfigError(f"image_size: none of the fields holds paths of images: {given}; {hint}")
        self._spec = BatchSpec(self._fields.specs, as_mapping=as_mapping)
        check_paths(check_files, self._fields.files, self._fields.stored, self._fields.entries)

    @classmethod
    def from_folder(
        cls, root: str | os.PathLike[str], fields: Mapping[str, Given] | Sequence[Given] | None = None, **options: Any
    ) -> Self:
        """The images, or ``.npy`` files, in a tree of folders, one for each class.

        Args:
            root: A folder that holds a folder for each class. Hidden files are left out, and so are files of other
                kinds, which a warning counts.
            fields: As for the class, over the columns ``path`` and ``label``; None: ``{"x": "path", "y": "label"}``.
            **options: As for the class; with ``allow_outside_root`` links to folders are followed.

        Raises:
            ConfigError: It is no folder, holds none, or those of stages (``train``, ``val``), not of classes.
            MissingError: A class has no files.
            SourceError: No descriptor is left to list a folder with.

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
        check_names(options, OPTIONS)
        path = os.path.abspath(os.path.expanduser(root))
        with listing(path):
            table = class_folders(path, links=bool(options.get("allow_outside_root")))
        made = cls(table, {"x": PATH, "y": LABEL} if fields is None else fields, root=path, **options)
        made._name = path
        return made

    def __len__(self) -> int:
        return len(self._fields.entries)

    def __repr__(self) -> str:
        return shown(self, self.name)

    @property
    def name(self) -> str:
        """The table or folder, for messages."""
        return self._name or self._fields.entries.table.origin.name

    @property
    def spec(self) -> BatchSpec:
        """Keys, shapes and dtypes of the fields, and the names of classes."""
        return self._spec

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_into(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]]) -> None:
        """Read samples into arrays; random crops take the middle. See `Source.read_into`.

        Raises:
            IndexError: A sample is not in ``range(len(self))``.
            SourceError: A file cannot be read or decoded; names row, id and path.
        """
        check_range(samples, self)
        self._fields.read(samples, out, None)

    @property
    def is_random(self) -> bool:
        """Whether a random part of each image is taken; see `RandomizedSource`."""
        return self._fields.is_random

    def read_random(self, samples: Indices, out: Mapping[str, npt.NDArray[Any]], keys: Words) -> None:
        """Read samples into arrays, with the parts of images that the keys say; see `RandomizedSource`."""
        check_range(samples, self)
        self._fields.read(samples, out, keys)

    def locate(self, ids: Sequence[int] | Indices) -> list[Location]:
        """File of the table and row there, and in attributes ``id``, and ``path`` of the first file.

        Raises:
            IndexError: A number is not in ``range(len(self))``.
        """
        samples = whole_numbers(ids, self)
        check_range(samples, self)
        paths = self._fields.paths
        return self._fields.entries.locations(samples, [None] * len(samples) if paths is None else paths.of(samples))

    def close(self) -> None:
        """Close every HDF5 file; others are open only while they are read."""
        for stored in self._fields.stored:
            stored.source.close()

    # -- classes and columns -----------------------------------------------------------------------------------------

    def with_classes(self, classes: Mapping[str, Sequence[str]]) -> Self:
        """The same samples with the numbers that other classes have: those of the training set.

        Args:
            classes: By batch key. Fields whose classes were given, and those that have none, stay as they are.

        Raises:
            ManifestError: A row has a class that is none of them; names it.
        """
        changed, fields = copy.copy(self), self._fields.with_classes(classes)
        vars(changed).update(_fields=fields, _spec=BatchSpec(fields.specs, as_mapping=self._spec.as_mapping))
        return changed

    def column(self, name: str) -> npt.NDArray[Any]:
        """One value for each sample; see `PartedSource.column`.

        Args:
            name: A batch key of single numbers, or a column of the table, also one that is not used otherwise: it is
                read then.

        Raises:
            MissingError: There is none.
        """
        field = self._fields.labels.get(name)
        if field is not None and field.labels.values.ndim == 1:
            found: npt.NDArray[Any] = field.labels.values
        else:
            found = plain_of(self._table_with(name).array(name))
        return found

    def _table_with(self, name: str) -> Table:
        table = self._fields.entries.table
        try:
            return table if name in table else table.beside(self._given.columns([name]))
        except NoColumnError as error:
            raise MissingError(str(error), file=error.file, dataset=name) from None

    # -- how samples belong together ---------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[Part, ...]:
        """The files of the table; see `PartedSource`."""
        return self._fields.entries.parts()

    @property
    def overlap(self) -> int:
        """No sample shares values with another one."""
        return 0

    def places(self) -> Places:
        """File and row of each sample in the table."""
        return self._fields.entries.places()

    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]]:
        """A number for each sample, by what a function makes of the path of its first file, and what that is.

        Raises:
            ConfigError: No field has files.
        """
        if self._fields.paths is None:
            raise ConfigError("groups: none of the fields holds paths of files")
        return self._fields.paths.grouped(naming)

    @property
    def chunks(self) -> StorageLayout:
        """Which rows of HDF5 files lie together, and how all fields are read."""
        return self._chunks

    @functools.cached_property
    def _chunks(self) -> StorageLayout:
        return self._fields.chunks

    def layout(self) -> StorageLayout:
        """As `chunks`, also by folders of files; see `layout_of`."""
        return self._fields.layout

    # -- what a `CachingSource` does ---------------------------------------------------------------------------------

    def prepare(self, samples: Indices, *, decode: Turn) -> bool:
        """Decode the chunks of HDF5 rows, or have files read ahead; see `CachingSource.prepare`."""
        check_range(samples, self)
        return self._fields.prepare(samples, decode=decode)

    def decoded_bytes(self, chunks: int) -> int:
        """Bytes of decoded chunks of HDF5 files; see `CachingSource.decoded_bytes`."""
        return self._fields.held_bytes(chunks)

    def file_bytes(self) -> int:
        """Bytes of the files of one sample; see `FetchingSource.file_bytes`."""
        return self._fields.file_bytes

    def read_ahead(self, nbytes: int) -> Callable[[], None]:
        """Allow to read files ahead; see `FetchingSource.read_ahead`."""
        return self._fields.fetching.reserve(nbytes)

    @property
    def decode_bytes(self) -> int:
        """Bytes that a thread takes to decode a chunk; see `CachingSource.decode_bytes`."""
        return max((stored.source.decode_bytes for stored in self._fields.stored), default=0)

    @property
    def decodable_bytes(self) -> int:
        """Bytes of all chunks that must be decoded; see `CachingSource.decodable_bytes`."""
        return sum(stored.source.decodable_bytes for stored in self._fields.stored)

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        """Make room for decoded chunks of HDF5 files; see `CachingSource.reserve`."""
        return self._fields.reserve(chunks, cache_bytes)
