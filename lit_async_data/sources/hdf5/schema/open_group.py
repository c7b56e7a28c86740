"""`OpenGroup`: a group of an open file, whose datasets become fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import h5py
import numpy.typing as npt

from lit_async_data.errors import SourceError
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, inspect_dataset, open_dataset
from lit_async_data.sources.hdf5.storage.external_files import external_files
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS
from lit_async_data.sources.hdf5.storage.index_cache import IndexCache

#: Values that are looked up, by name, column and axis.
Tables = dict[tuple[str, int | None, int], npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """A group of a file that is open, to look at fields in.

    Attributes:
        file: The file.
        path: Its path, for messages.
        group: The group; ``"/"`` for the root.
        cache: Where indices of chunks are kept.
        allow_external: Whether values may lie in other files.
        tables: Values that are looked up, as far as they have been read.
    """

    file: h5py.File
    path: str
    group: str
    cache: IndexCache
    allow_external: bool
    tables: Tables = dataclasses.field(default_factory=dict)

    def name(self, given: str) -> str:
        """The name of a dataset from the root of the file."""
        return given if given.startswith("/") or self.group == "/" else f"{self.group.strip('/')}/{given}"

    def node(self, name: str) -> Any:
        """What has this name, if that can be said; `inspect_dataset` says what is wrong with it."""
        try:
            return self.file.get(name)
        except LIBRARY_ERRORS:
            return None

    def whole(self, name: str, what: str) -> h5py.Dataset:
        """A dataset that is read as a whole, beside the fields; in other files only where they are allowed.

        Args:
            name: Of the dataset, as given.
            what: What it is for, for messages.

        Raises:
            MissingError: There is no such dataset.
            FormatError: It is no dataset, or its values lie in another file, which is not allowed.
            CorruptError: It is damaged.
        """
        name = self.name(name)
        try:
            dataset = open_dataset(self.file, self.path, name)
        except SourceError as error:
            raise type(error)(f"{what}{error}", file=self.path, dataset=name) from error.__cause__
        external_files(dataset, self.file, name, allowed=self.allow_external)
        return dataset

    def inspect_dataset(self, name: str, layout: str | None = None) -> StoredDataset:
        return inspect_dataset(self.file, self.path, name, layout, cache=self.cache, allow_external=self.allow_external)
