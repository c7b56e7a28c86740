"""`DecodeMemory`: how much memory the decoded chunks of a source take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lit_async_data.sources.contract.source import MemoryNeeds
from lit_async_data.sources.hdf5.readers.base import Reader
from lit_async_data.sources.hdf5.schema.chunk_grouping import ChunkGrouping
from lit_async_data.sources.hdf5.schema.encoded import StoredRanges
from lit_async_data.sources.hdf5.schema.part import StoredPart

# Decoded bytes that are cached for each dataset between batches, or two slabs if those are larger, so that batches
# smaller than a slab, read in order, decode it once.
RECENT_BYTES = 16 * 2**20


class DecodeMemory:
    """The memory of decoded chunks, over all parts. Immutable."""

    def __init__(
        self,
        readers: Sequence[Mapping[str, Reader]],
        grouping: ChunkGrouping,
        parts: Sequence[StoredPart],
        grouping_key: str,
    ) -> None:
        field = parts[0].fields[grouping_key]
        self._grouping = grouping
        self._spans = parts[0].spans()
        # The datasets of that field, and the rows around an anchor that it reads.
        self._own = {parts[0].dataset_key(dataset) for dataset in field.datasets}
        self._own_span = None if isinstance(field.stored, StoredRanges) else field.reach
        if self._own_span is None:
            self._reach = max((run.rows for run in grouping.runs), default=1) * max(
                part.anchors.stride for part in parts
            )
        else:
            self._reach = grouping.max_slabs * max(part.fields[grouping_key].values.chunk_rows for part in parts)
        self._datasets: dict[str, list[Reader]] = {}
        for part in readers:
            for name, reader in part.items():
                self._datasets.setdefault(name, []).append(reader)

    def needs(self, chunks: int) -> MemoryNeeds:
        readers = [reader for readers in self._datasets.values() for reader in readers]
        return MemoryNeeds(
            sum(self.room(chunks).values()),
            max((reader.thread_bytes for reader in readers), default=0),
            sum(reader.cacheable_bytes for reader in readers),
        )

    def room(self, chunks: int) -> dict[str, int]:
        """Bytes of decoded chunks of each dataset that stay between batches."""
        return {name: self._room(name, chunks) for name in self._datasets}

    def _room(self, name: str, chunks: int) -> int:
        cached = [reader for reader in self._datasets[name] if reader.slab_bytes]
        if not cached:
            return 0
        slab, whole = max(each.slab_bytes for each in cached), sum(each.cacheable_bytes for each in cached)
        if not chunks:
            return min(max(2 * slab, RECENT_BYTES), whole)
        slabs = self._slabs(name, min(each.rows for each in cached))
        return whole if slabs is None else min(chunks * slabs * slab, whole)

    def _slabs(self, name: str, rows: int) -> int | None:
        """The largest number of slabs of a dataset that the samples of one group read; None if unknown."""
        span = self._spans[name]
        if name in self._own and span == self._own_span:
            return self._grouping.max_slabs
        if span is None:
            return None
        extra = span[1] - span[0] - 1
        if not extra and rows % self._reach == 0:
            return 1  # groups of samples never cross the borders of its slabs
        return -(-(self._reach + extra) // rows) + 1
