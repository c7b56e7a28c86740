"""`FileField`: a field that has a file of its own for each sample."""

from __future__ import annotations

import contextlib
import os

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import SourceError
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.manifest.files.decoders import Decoder
from lit_async_data.sources.manifest.files.prefetcher import FilePrefetcher
from lit_async_data.sources.manifest.rows import Paths

# Larger files are refused before they are read: a slip in a table can name a film.
MOST_BYTES = 2**32


class FileField:
    """One file for each sample, decoded into one shape. Safe to read from several threads.

    Args:
        paths: The files.
        decoder: Makes samples of them.
        fetching: Reads files ahead, where reading takes time.
    """

    def __init__(self, paths: Paths, decoder: Decoder, fetching: FilePrefetcher) -> None:
        self.paths, self.decoder, self._fetching = paths, decoder, fetching

    @property
    def spec(self) -> FieldSpec:
        """What samples look like."""
        return self.decoder.spec

    def read(self, samples: Indices, out: Array, keys: Words | None) -> None:
        """Decode the files of samples.

        Args:
            samples: int64, shape (n,).
            out: Shape (n, ...), overwritten.
            keys: For what is drawn; None for the middle.

        Raises:
            SourceError: A file cannot be read or decoded; names row, id and path.
        """
        drawn = [None] * len(samples) if keys is None else keys.tolist()
        paths, known = self.paths.of(samples), self.decoder.head
        if out.dtype != self.spec.dtype or not out.flags.c_contiguous:
            known = None  # the decoder says what is wrong, or copies
        head = bytearray(known or b"")
        nbytes = len(head) + self.spec.nbytes
        for place, (path, key) in enumerate(zip(paths, drawn, strict=True)):
            try:
                if known is not None and self._fetching.fill(path, (head, out[place, ...]), nbytes) and head == known:
                    continue  # half the time: the file has what goes into the batch, as it goes there
                self.decoder.decode(self._fetching.read(path, MOST_BYTES), out[place, ...], key, path)
            except SourceError as error:
                raise self.paths.rows.with_row(error, int(samples[place]), path) from error.__cause__

    def fetch(self, samples: Indices) -> bool:
        """Have the files of samples read ahead, if that would help; returns whether it would."""
        if self._fetching.wanted:
            self._fetching.fetch(self.paths.of(samples), MOST_BYTES)
            return True
        return False

    def mean_bytes(self, samples: Indices) -> float:
        """Mean size of the files of samples; those that cannot be found are left out, since reading them says so."""
        sizes = []
        for sample in samples:
            with contextlib.suppress(SourceError, OSError):
                sizes.append(os.stat(self.paths.of(np.array([sample]))[0]).st_size)
        return sum(sizes) / max(len(sizes), 1)

    def shape_of(self, sample: int) -> tuple[int, ...]:
        """The stored shape that a sample's file has by itself; raises as `read`."""
        (path,) = self.paths.of(np.array([sample]))
        try:
            return self.decoder.shape_of(self._fetching.read(path, MOST_BYTES), path)
        except SourceError as error:
            raise self.paths.rows.with_row(error, sample, path) from error.__cause__
