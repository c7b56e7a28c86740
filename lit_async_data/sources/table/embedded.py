"""`EmbeddedFiles`: files whose bytes a column of a table holds, such as images in Parquet."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.order.chunk_order import runs_of
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import MemoryNeeds, Reservation, StorageLayout, starts
from lit_async_data.sources.local_files import changed_error, file_state
from lit_async_data.sources.table import formats
from lit_async_data.sources.table.formats import RowOrigin, arrow, booleans_of, is_list, quoted, values_of
from lit_async_data.system import ProcessGuard

_FEW = 2  # groups that stay in memory without a reservation


def storage_type(kind: Any) -> Any:
    return storage_type(kind.storage_type) if isinstance(kind, arrow().BaseExtensionType) else kind


def holds_bytes(kind: Any, *, lists: bool = True) -> bool:
    """Whether values are bytes, records of bytes and a path (as Hugging Face writes them), or lists of either."""
    types, kind = arrow("types"), storage_type(kind)
    if is_list(kind):
        return lists and holds_bytes(kind.value_type, lists=False)
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and holds_bytes(kind.field("bytes").type, lists=False)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


class EmbeddedFiles:
    """Files in rows of a table; has the members of an Arrow array that `Table` uses. Immutable and thread-safe.

    ``rows`` is the row of each file, counted over all groups; int64.
    """

    def __init__(self, groups: Groups, rows: Indices) -> None:
        self.type, self.groups, self.rows = groups.type, groups, rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: Any) -> Self:
        return type(self)(self.groups, self.rows[values_of(numbers)])

    def counts(self) -> Indices:
        """Number of files in each row; −1 without a value."""
        return self.groups.counts()[self.rows]

    def is_null(self, **_: Any) -> Any:
        return arrow().array(self.counts() < 0)

    def file(self, number: int, item: int = 0) -> tuple[bytes | None, str | None]:
        """The bytes of a file of a row, and the path that the row names beside them."""
        return self.groups.file(int(self.rows[number]), item)

    def numbers(self) -> Indices:
        """The group of each file; int64."""
        return np.searchsorted(self.groups.starts, self.rows, side="right") - 1

    @property
    def chunks(self) -> StorageLayout:
        counts = np.bincount(self.numbers())
        return StorageLayout(runs_of(counts[counts > 0]), compressed=True, reading="decoded")

    def decode(self, samples: Indices) -> None:
        for group in np.unique(self.numbers()[samples]).tolist():
            self.groups.array(group)


class Groups:
    """Groups of rows that decode as a whole: the row groups of Parquet files, or the chunks of a column in memory.

    ``counts`` are the rows of each, ``nbytes`` the decoded bytes (0 in memory), and ``complete`` whether statistics say
    that each row has one file. ``load`` returns the Arrow array of a group; with ``counted``, any array with the same
    nulls and lengths of lists.
    """

    def __init__(
        self, kind: Any, counts: Sequence[int], nbytes: Sequence[int], load: Any, complete: Sequence[bool]
    ) -> None:
        self.type, self.starts, self.nbytes, self._load, self._complete = kind, starts(counts), nbytes, load, complete
        self._counts: Indices | None = None
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = ProcessGuard(), threading.Lock()
        # Guarded by the lock; the groups used last come last.
        self._held, self._loading = dict[int, Any](), dict[int, threading.Lock]()
        self._room = dict[object, int]()  # without the lock: garbage collection can release inside it

    def __reduce__(self) -> tuple[Any, ...]:
        return Groups, (self.type, np.diff(self.starts), self.nbytes, self._load, self._complete)

    def file(self, row: int, item: int) -> tuple[bytes | None, str | None]:
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        value = self.array(group)[row - int(self.starts[group])]
        value = _storage(value.values)[item] if value.is_valid and is_list(value.type) else value
        if not arrow("types").is_struct(value.type):
            return value.as_py(), None
        path = value["path"] if value.is_valid and value.type.get_field_index("path") >= 0 else None
        named = None if path is None or not path.is_valid else path.as_buffer().to_pybytes().decode(errors="replace")
        return value["bytes"].as_py() if value.is_valid else None, named

    def counts(self) -> Indices:
        """As `EmbeddedFiles.counts`, of all rows. Reads groups that are not ``complete``."""
        if self._counts is None:
            parts = [np.ones(count, np.int64) for count in np.diff(self.starts).tolist()]
            for group in np.flatnonzero(~np.asarray(self._complete, np.bool_)).tolist():
                array = self._load(group, counted=True)
                lengths: Any = np.ones(len(array), np.int64)
                if is_list(array.type):
                    lengths = values_of(arrow("compute").list_value_length(array))
                elif arrow("types").is_struct(array.type):  # null where the record is, unlike `StructArray.field`
                    array = arrow("compute").struct_field(array, ["bytes"])
                parts[group] = np.where(booleans_of(array.is_valid()), lengths, -1)
            self._counts = np.concatenate(parts)
        return self._counts

    def memory(self, chunks: int = 0) -> MemoryNeeds:
        largest, total = max(self.nbytes), sum(self.nbytes)
        return MemoryNeeds(min(max(chunks, _FEW) * largest, total), largest, total)

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        if self._process.forked:
            self._begin()  # the owner of the lock is in another process
        key = object()
        reservation = Reservation(functools.partial(self._room.pop, key, None))
        self._room[key] = max(chunks, _FEW) + cache_bytes // max(*self.nbytes, 1)
        return reservation

    def array(self, group: int) -> Any:
        if self._process.forked:
            self._begin()
        with self._lock:
            if (found := self._held.pop(group, None)) is not None:
                self._held[group] = found
                return found
            loading = self._loading.setdefault(group, threading.Lock())
        with loading:  # other threads that need the same group wait
            if (found := self._held.get(group)) is None:
                found = self._load(group, counted=False)
                with self._lock:
                    self._held[group] = found
                    self._loading.pop(group, None)
                    most = max([_FEW, *self._room.values()])
                    for oldest in list(self._held)[:-most]:
                        del self._held[oldest]
        return found

    def clear(self) -> None:
        if not self._process.forked:
            with self._lock:
                self._held.clear()


def files_in(column: Any, name: str, origin: RowOrigin) -> EmbeddedFiles:
    """The files in a column of a table, which are read later unless it is in memory."""
    if origin.files:
        rows = np.arange(len(column)) if origin.kept is None else origin.kept
        return EmbeddedFiles(ParquetGroups.of(name, column.type, origin.opened), rows)
    chunks = [_storage(chunk) for chunk in column.chunks]
    counts, load = list(map(len, chunks)), functools.partial(_chunk, chunks)
    groups = Groups(column.type, counts, [0] * len(counts), load, [False] * len(counts))
    return EmbeddedFiles(groups, np.arange(len(column)))


def _chunk(chunks: Sequence[Any], group: int, **_: Any) -> Any:
    return chunks[group]


def parquet_file(path: str, *, memory_map: bool = True, read_dictionary: Sequence[str] = ()) -> Any:
    options: dict[str, Any] = {"memory_map": memory_map, "read_dictionary": read_dictionary}
    try:
        return arrow("parquet").ParquetFile(path, page_checksum_verification=True, **options)
    except (arrow().ArrowException, OSError) as error:
        origin = RowOrigin.of_file(path)
        raise origin.error(f"is not a readable Parquet file: {quoted(str(error))}; write it again") from error


class ParquetGroups:
    """Loads row groups of Parquet files. Repeated bytes are held once, as the file holds them.

    Without a memory map: a file that becomes shorter would end the process.
    """

    def __init__(self, name: str, files: Sequence[str]) -> None:
        self._name, self._files = name, files
        self._states, self._places, self._nbytes = list[Any](), list[tuple[int, int]](), list[int]()
        self._leaves = list[tuple[str, str]]()  # of each file: the leaf to read as a dictionary, the one to count by

    @classmethod
    def of(cls, name: str, kind: Any, files: Sequence[str]) -> Groups:
        load, counts, complete = cls(name, files), list[int](), list[bool]()
        lists = is_list(storage_type(kind))
        for number, file in enumerate(files):
            load._states.append(file_state(file))
            with parquet_file(file, memory_map=False) as parquet:
                places = {parquet.schema.column(place).path: place for place in range(len(parquet.schema))}
                own = [leaf for leaf in places if f"{leaf}.".startswith(f"{name}.")]
                held = next((leaf for leaf in own if leaf.endswith(".bytes")), own[0])
                load._leaves.append((held, next((leaf for leaf in own if leaf.endswith(".path") and lists), name)))
                for group in map(parquet.metadata.row_group, range(parquet.num_row_groups)):
                    known = group.column(places[held]).statistics
                    complete.append(not lists and known is not None and known.null_count == 0)
                    counts.append(group.num_rows)
                    leaves = [group.column(places[leaf]) for leaf in own]
                    load._nbytes.append(sum(leaf.total_uncompressed_size + 4 * leaf.num_values for leaf in leaves))
                load._places += [(number, group) for group in range(parquet.num_row_groups)]
        return Groups(kind, counts, load._nbytes, load, complete)

    def __call__(self, group: int, *, counted: bool) -> Any:
        number, place = self._places[group]
        file, own = self._files[number], f"row group {place} of column {quoted(self._name)}"
        held, short = self._leaves[number]
        if file_state(file) != self._states[number]:
            raise changed_error(file)
        try:
            with parquet_file(file, memory_map=False, read_dictionary=[held]) as parquet:
                names = [short if counted else self._name]
                column = parquet.read_row_group(place, columns=names, use_threads=False).column(self._name)
            chunks = list(map(_storage, column.chunks))
            array = chunks[0] if len(chunks) == 1 else arrow().concat_arrays(chunks)
        except (arrow().ArrowException, OSError) as error:
            if self._nbytes[group] >= 2**31:
                what = f"{formats.printable_path(file)}: {own} has more than 2 GiB; write it with row_group_size=100"
                raise FormatError(what, file=formats.named(file), dataset=self._name) from error
            what = f"{formats.printable_path(file)}: {own} does not decode: {quoted(str(error))}; write it again"
            raise CorruptError(what, file=formats.named(file), dataset=self._name) from error
        if file_state(file) != self._states[number]:
            raise changed_error(file)
        return array


def _storage(array: Any) -> Any:
    return _storage(array.storage) if isinstance(array.type, arrow().BaseExtensionType) else array
