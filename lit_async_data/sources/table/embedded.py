"""`EmbeddedFiles`: files whose bytes a column of a table holds, such as images in Parquet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import ChangedError, CorruptError, FormatError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import MemoryNeeds, Reservation, StorageLayout, starts
from lit_async_data.sources.local_files import opening_errors
from lit_async_data.sources.table.formats import arrow, booleans_of, printable_path, quoted, values_of
from lit_async_data.system import ProcessGuard

# Groups that stay in memory where nobody has reserved room: the next sample is mostly of one of them.
_FEW = 2
State = tuple[int, int, int]  # inode, bytes and time of a file


def storage_type(kind: Any) -> Any:
    return storage_type(kind.storage_type) if isinstance(kind, arrow().BaseExtensionType) else kind


def holds_bytes(kind: Any) -> bool:
    """Whether values are bytes, or records of bytes and a path, as Hugging Face writes images and sounds."""
    types, kind = arrow("types"), storage_type(kind)
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and holds_bytes(kind.field("bytes").type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


class EmbeddedFiles:
    """Files in rows of a table, with the members of an Arrow array that `Table` uses. Immutable and thread-safe.

    Attributes:
        groups: Where the bytes are.
        rows: The row of each file, counted over all groups; int64.
    """

    def __init__(self, groups: Groups, rows: Indices) -> None:
        self.type, self.groups, self.rows = groups.type, groups, rows

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: Any) -> Self:
        return type(self)(self.groups, self.rows[values_of(numbers)])

    def is_valid(self) -> Any:
        return arrow().array(self.groups.valid()[self.rows])

    def is_null(self, **_: Any) -> Any:
        return arrow().array(~self.groups.valid()[self.rows])

    @property
    def null_count(self) -> int:
        return int(self.is_null().true_count)

    def __getitem__(self, number: int) -> Any:
        """The bytes, as an Arrow scalar."""
        return self.groups.values(int(self.rows[number]))[0]

    def path(self, number: int) -> str | None:
        """What the row names as the path of its bytes."""
        return self.groups.values(int(self.rows[number]))[1]

    def numbers(self) -> Indices:
        """The group of each file; int64."""
        return np.searchsorted(self.groups.starts, self.rows, side="right") - 1

    @property
    def chunks(self) -> StorageLayout:
        counts = np.bincount(self.numbers())
        counts = counts[counts > 0]
        first = np.flatnonzero(np.diff(counts, prepend=-1))  # of each run of groups of one size
        sums = np.add.reduceat(counts, first).tolist()
        runs = tuple(map(ChunkRun, sums, counts[first].tolist()))
        return StorageLayout(runs, compressed=True, reading="decoded")

    def decode(self, samples: Indices) -> None:
        for group in np.unique(self.numbers()[samples]).tolist():
            self.groups.array(group)


class Groups:
    """Groups of rows that decode as a whole: the row groups of Parquet files, or the chunks of a column in memory.

    Args:
        kind: The Arrow type of the column.
        counts: Rows of each group.
        nbytes: Bytes of each group, decoded; 0 in memory.
        load: Returns the Arrow array of a group.
        complete: For each group, whether all rows are known to have bytes.
    """

    def __init__(
        self, kind: Any, counts: Sequence[int], nbytes: Sequence[int], load: Any, complete: Sequence[bool]
    ) -> None:
        self.type, self.starts, self.nbytes, self._load, self._complete = kind, starts(counts), nbytes, load, complete
        self._valid: npt.NDArray[np.bool_] | None = None
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = ProcessGuard(), threading.Lock()
        # Guarded by the lock; the groups used last come last.
        self._held, self._loading = dict[int, Any](), dict[int, threading.Lock]()
        self._room = dict[object, int]()  # without the lock: garbage collection can release inside it

    def __reduce__(self) -> tuple[Any, ...]:
        return Groups, (self.type, np.diff(self.starts), self.nbytes, self._load, self._complete)

    def values(self, row: int) -> tuple[Any, str | None]:
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        value = self.array(group)[row - int(self.starts[group])]
        if not arrow("types").is_struct(value.type):
            return value, None
        path = value["path"].as_py() if value.is_valid and value.type.get_field_index("path") >= 0 else None
        return value["bytes"], path

    def valid(self) -> npt.NDArray[np.bool_]:
        """Which rows have bytes. Reads groups whose statistics do not say it."""
        if self._valid is None:
            parts = [np.ones(count, np.bool_) for count in np.diff(self.starts).tolist()]
            for group in np.flatnonzero(~np.asarray(self._complete, np.bool_)).tolist():
                array = self.array(group)
                if arrow("types").is_struct(array.type):  # also null where the record is, unlike `StructArray.field`
                    array = arrow("compute").struct_field(array, ["bytes"])
                parts[group] = booleans_of(array.is_valid())
            self._valid = np.concatenate(parts)
        return self._valid

    def memory(self, chunks: int) -> MemoryNeeds:
        largest, total = max(self.nbytes), sum(self.nbytes)
        return MemoryNeeds(min(max(chunks, _FEW) * largest, total), largest, total)

    def reserve(self, chunks: int, cache_bytes: int) -> Callable[[], None]:
        if self._process.forked:
            self._begin()  # the owner of the lock is in another process
        key = object()

        def release() -> None:
            self._room.pop(key, None)

        reservation = Reservation(release)
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
        with loading:  # others that want the same group wait for it
            if (found := self._held.get(group)) is None:
                found = self._load(group)
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


class Loaded:
    """The chunks of a column in memory."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks

    def __call__(self, group: int) -> Any:
        return self._chunks[group]

    @classmethod
    def files(cls, column: Any) -> EmbeddedFiles:
        chunks = [_storage(chunk) for chunk in column.chunks]
        counts = list(map(len, chunks))
        groups = Groups(column.type, counts, [0] * len(counts), cls(chunks), [False] * len(counts))
        return EmbeddedFiles(groups, np.arange(sum(counts)))


class ParquetGroups:
    """The row groups of Parquet files. The column is read as a whole: the paths beside the bytes are short."""

    def __init__(self, name: str, files: Sequence[str], open_file: Callable[[str], Any]) -> None:
        self._name, self._files, self._open = name, files, open_file
        self._states, self._places, self._nbytes = list[State](), list[tuple[int, int]](), list[int]()

    @classmethod
    def files(
        cls, name: str, kind: Any, files: Sequence[str], rows: Indices, open_file: Callable[[str], Any]
    ) -> EmbeddedFiles:
        load, counts, complete = cls(name, files, open_file), list[int](), list[bool]()
        for number, file in enumerate(files):
            load._states.append(_state(file))
            with open_file(file) as parquet:
                for group in map(parquet.metadata.row_group, range(parquet.num_row_groups)):
                    leaves = [group.column(place) for place in range(group.num_columns)]
                    leaves = [leaf for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{name}.")]
                    own = [leaf.statistics for leaf in leaves if leaf.path_in_schema in (name, f"{name}.bytes")]
                    complete.append(all(each is not None and each.null_count == 0 for each in own))
                    counts.append(group.num_rows)
                    load._nbytes.append(sum(leaf.total_uncompressed_size for leaf in leaves))
                load._places += [(number, group) for group in range(parquet.num_row_groups)]
        return EmbeddedFiles(Groups(kind, counts, load._nbytes, load, complete), rows)

    def __call__(self, group: int) -> Any:
        number, place = self._places[group]
        file, own = self._files[number], f"row group {place} of column {quoted(self._name)}"
        changed = ChangedError(f"{printable_path(file)}: changed since the source was built; build it again", file=file)
        if _state(file) != self._states[number]:
            raise changed
        try:
            with self._open(file) as parquet:
                column = parquet.read_row_group(place, columns=[self._name], use_threads=False).column(self._name)
            chunks = list(map(_storage, column.chunks))
            array = chunks[0] if len(chunks) == 1 else arrow().concat_arrays(chunks)
        except (arrow().ArrowException, OSError) as error:
            if self._nbytes[group] >= 2**31:
                what = f"{printable_path(file)}: {own} has more than 2 GiB; write it with row_group_size=100"
                raise FormatError(what, file=file, dataset=self._name) from error
            what = f"{printable_path(file)}: {own} does not decode: {quoted(str(error))}; write it again"
            raise CorruptError(what, file=file, dataset=self._name) from error
        if _state(file) != self._states[number]:
            raise changed
        return array


def _storage(array: Any) -> Any:
    return _storage(array.storage) if isinstance(array.type, arrow().BaseExtensionType) else array


def _state(file: str) -> State:
    with opening_errors(file):
        status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns
