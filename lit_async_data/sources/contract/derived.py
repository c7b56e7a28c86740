"""`DerivedSource`: a source whose samples lie elsewhere, and what only such a source knows."""

from __future__ import annotations

import abc
from collections.abc import Callable

from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.places import Places
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.contract.storage_layout import StorageLayout


class DerivedSource(Source):
    """A source whose samples lie elsewhere: in files that a table names, or in sources inside."""

    @abc.abstractmethod
    def layout(self) -> StorageLayout:
        """As `chunks`, but may examine every sample to find chunks."""

    @abc.abstractmethod
    def places(self) -> Places:
        """Part and row of each sample."""

    @abc.abstractmethod
    def grouped_by_path(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
        """A group number for each sample, from the name that ``naming`` gives its file; and those names.

        None if samples have no files of their own; they are then grouped by the files of their `parts`.
        """


def layout_of(source: Source) -> StorageLayout:
    """The chunks of a source, also those that take a look at every sample; for an order that goes by chunks."""
    return source.layout() if isinstance(source, DerivedSource) else source.chunks


def places_of(source: Source) -> Places:
    return source.places() if isinstance(source, DerivedSource) else Places.of_parts(source.parts)


def grouped_by_path(source: Source, naming: Callable[[str], str]) -> tuple[Indices, list[str]] | None:
    return source.grouped_by_path(naming) if isinstance(source, DerivedSource) else None
