"""`OpenGroup`: a group of an open file, whose datasets become fields."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from lit_async_data.batch.spec import TENSOR_TYPES, FieldSpec
from lit_async_data.errors import CorruptError, FormatError, SourceError
from lit_async_data.sources.hdf5.index.cache import IndexCache
from lit_async_data.sources.hdf5.index.index import check_unindexed
from lit_async_data.sources.hdf5.index.short_chunks import check_chunk_lengths
from lit_async_data.sources.hdf5.schema.compound import find_member
from lit_async_data.sources.hdf5.schema.inspect import StoredDataset, inspect_dataset, open_dataset
from lit_async_data.sources.hdf5.storage.external_files import external_files, refuse_external_link
from lit_async_data.sources.hdf5.storage.failures import LIBRARY_ERRORS
from lit_async_data.sources.hdf5.storage.plugins import check_filters

if TYPE_CHECKING:
    import h5py

#: Lookup tables by dataset name, column and axis.
Tables = dict[tuple[str, int | None, int], npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    file: h5py.File
    path: str
    group: str  # name of the group; ``"/"`` for the root
    cache: IndexCache
    allow_external: bool
    tables: Tables = dataclasses.field(default_factory=dict)  # lookup tables that have been read so far

    def name(self, given: str) -> str:
        """The name of a dataset from the root of the file."""
        return given if given.startswith("/") or self.group == "/" else f"{self.group.strip('/')}/{given}"

    def _check_links(self, name: str) -> None:
        if not self.allow_external:
            refuse_external_link(self.file, name)

    def node(self, name: str) -> Any:
        """The object with this name, or None. `inspect_dataset` says what is wrong with a missing one."""
        self._check_links(name)
        try:
            return self.file.get(name)
        except LIBRARY_ERRORS:
            return None

    def whole(self, name: str, what: str) -> h5py.Dataset:
        """A dataset that is read as a whole; messages begin with ``what``: ``"rows: "``."""
        name = self.name(name)
        self._check_links(name)
        try:
            dataset = open_dataset(self.file, self.path, name, "; name one of these")
        except SourceError as error:
            raise type(error)(f"{what}{error}", file=self.path, dataset=name) from error.__cause__
        external_files(dataset, self.file, name, allowed=self.allow_external)
        check_filters(dataset, self.path, name)
        # Of text of any length, libhdf5 stores references, whose size h5py does not tell.
        if dataset.chunks and dataset.shape and dataset.dtype.kind != "O":
            try:
                check_unindexed(dataset)
                check_chunk_lengths(dataset, 0, 0, dataset.shape[0])
            except CorruptError as error:
                raise CorruptError(f"{what}{error}", file=self.path, dataset=name) from error
        return dataset

    def whole_member(self, name: str, what: str) -> tuple[h5py.Dataset, tuple[str, ...]]:
        """A dataset as of `whole`, and the names on the way to a member of its values, if the name says one."""
        of, member = self.split(self.name(name))
        dataset = self.whole(f"/{of.strip('/')}" if member else name, what)
        return dataset, find_member(dataset, member, {"file": self.path, "dataset": of})[0] if member else ()

    def inspect_dataset(
        self, name: str, member: str = "", layout: str | None = None, *, images: bool = False, in_heap: bool = False
    ) -> StoredDataset:
        self._check_links(name)
        options: dict[str, Any] = {"cache": self.cache, "allow_external": self.allow_external, "member": member}
        return inspect_dataset(self.file, self.path, name, layout, **options, images=images, in_heap=in_heap)

    def split(self, name: str) -> tuple[str, str]:
        """The dataset that a name begins with, and a member of its values; none if a dataset has the whole name."""
        import h5py

        end = len(name)
        while self.node(name) is None and (end := name.rfind(".", 0, end)) > 0:
            node = self.node(name[:end])
            if isinstance(node, h5py.Dataset) and node.dtype.names:
                return name[:end], name[end + 1 :]
        return name, ""

    def inspect_any(self, name: str) -> StoredDataset:
        """As `inspect_dataset`; also a dataset that can be no field, such as text or no value at all, for h5py."""
        import h5py

        node = self.node(name)
        if not isinstance(node, h5py.Dataset) or (
            node.size and node.shape and (node.dtype.kind, node.dtype.itemsize) in TENSOR_TYPES
        ):
            return self.inspect_dataset(name)
        dataset = self.whole(name, "")
        if dataset.shape is None:
            raise FormatError(f"{self.path}:{dataset.name}: holds no value", file=self.path, dataset=name)
        external = external_files(dataset, self.file, name, allowed=self.allow_external)
        dtype, inner = dataset.dtype.subdtype or (dataset.dtype, ())
        shape = (*dataset.shape, *inner)
        spec, chunk = FieldSpec(shape[1:], dtype), dataset.chunks[0] if dataset.chunks else 1
        return StoredDataset(self.path, name, shape, dtype, 0, spec, None, chunk, external=external)
