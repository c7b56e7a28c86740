"""`Holding`: how much memory decoded chunks of a source take, those of the batches to come, and all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lit_async_data.sources.hdf5.locality import Locality
from lit_async_data.sources.hdf5.part import StoredPart
from lit_async_data.sources.hdf5.part_reader import PartReader
from lit_async_data.sources.hdf5.readers import Reader

# Bytes of decoded bands that are kept for each dataset between batches, or two bands if those are larger: so that
# batches smaller than a band, read in order, decode it once.
RECENT_BYTES = 16 * 2**20


class Holding:
    """What the decoded chunks of all parts take. Immutable.

    Args:
        readers: Of the parts.
        lies: How the samples of the widest field lie; chunks are counted by it.
        parts: The parts.
        widest: The key of that field.
    """

    def __init__(self, readers: Sequence[PartReader], lies: Locality, parts: Sequence[StoredPart], widest: str) -> None:
        self._lies = lies
        self._rows = max(part.fields[widest].values.chunk_rows for part in parts)
        # The datasets of that field, where they hold elements and not rows.
        self._elements = {name for each in readers for name in each.elements_of(widest)}
        self._datasets: dict[str, list[Reader]] = {}
        for part in readers:
            for name, reader in part.datasets.items():
                self._datasets.setdefault(name, []).append(reader)

    def decoded_bytes(self, chunks: int) -> int:
        """As `KeepingSource.decoded_bytes`."""
        return sum(self.room(chunks).values())

    def room(self, chunks: int) -> dict[str, int]:
        """These bytes by the name of each dataset."""
        return {name: self._room(name, chunks) for name in self._datasets}

    def _room(self, name: str, chunks: int) -> int:
        held = [reader for reader in self._datasets[name] if reader.band_bytes]
        if not held:
            return 0
        band, whole = max(each.band_bytes for each in held), sum(each.decodable_bytes for each in held)
        if not chunks:
            return min(max(2 * band, RECENT_BYTES), whole)
        return min(chunks * self._bands(name, min(each.rows for each in held)) * band, whole)

    def _bands(self, name: str, rows: int) -> int:
        """Bands of a dataset that the samples of a chunk take, at most."""
        bands, reach = self._lies.bands, self._lies.bands * self._rows
        if self._elements and name not in self._elements:
            reach = max(run.rows for run in self._lies.runs)
        elif rows >= self._rows:
            return bands  # its borders are borders there too, or it is the same
        return -(-reach // rows) + 1

    @property
    def band_bytes(self) -> int:
        """As `KeepingSource.band_bytes`."""
        return max((reader.band_bytes for reader in self._readers), default=0)

    @property
    def decodable_bytes(self) -> int:
        """As `KeepingSource.decodable_bytes`."""
        return sum(reader.decodable_bytes for reader in self._readers)

    @property
    def _readers(self) -> Iterator[Reader]:
        return itertools.chain.from_iterable(self._datasets.values())
