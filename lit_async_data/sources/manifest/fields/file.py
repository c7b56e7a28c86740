"""`FileField`: a field with one file per sample."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np

from lit_async_data.batch.spec import Array, FieldSpec
from lit_async_data.errors import SourceError
from lit_async_data.order.permutation import Indices, Words
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.manifest.fields.rows import Paths
from lit_async_data.sources.manifest.files.decoders import Decoder
from lit_async_data.sources.manifest.files.prefetcher import FilePrefetcher

# Larger files are refused unread: by mistake, a table can name a film.
MOST_BYTES = 2**32


class FileField:
    """One file per sample, decoded into one shape. Thread-safe.

    Args:
        paths: The files.
        decoder: Decodes a file into a sample.
        prefetcher: Reads files ahead.
    """

    def __init__(self, paths: Paths, decoder: Decoder, prefetcher: FilePrefetcher) -> None:
        self.paths, self.decoder, self._prefetcher = paths, decoder, prefetcher

    @property
    def spec(self) -> FieldSpec:
        """Shape and dtype of the samples."""
        return self.decoder.spec

    def read(self, samples: Indices, out: Array, keys: Words | None) -> None:
        """Decode the files of samples.

        Args:
            samples: int64, shape (n,).
            out: Shape (n, ...), overwritten.
            keys: Select random parts; None for the middle.
        """
        drawn = [None] * len(samples) if keys is None else keys.tolist()
        paths, known = self.paths.of(samples), self.decoder.head
        if out.dtype != self.spec.dtype or not out.flags.c_contiguous:
            known = None  # the decoder raises, or copies
        head = bytearray(known or b"")
        nbytes = len(head) + self.spec.nbytes
        decode_s, stored = 0.0, 0
        for place, (path, key) in enumerate(zip(paths, drawn, strict=True)):
            try:
                if known is not None and self._prefetcher.fill(path, (head, out[place, ...]), nbytes) and head == known:
                    continue  # takes half the time: the file holds the sample as the batch does
                data = self._prefetcher.read(path, MOST_BYTES)
                began = time.perf_counter()
                self.decoder.decode(data, out[place, ...], key, path)
                decode_s += time.perf_counter() - began
                stored += len(data)
            except SourceError as error:
                raise self.paths.failed(error, int(samples[place]), path) from error.__cause__
        if stored:
            CLOCK.decoded(decode_s, stored, out.nbytes)

    def fetch(self, samples: Indices) -> bool:
        """Read the files of samples ahead if that helps; returns whether it does."""
        if self._prefetcher.wanted:
            self._prefetcher.fetch(self.paths.of(samples), MOST_BYTES)
            return True
        return False

    def mean_bytes(self, samples: Indices) -> float:
        """Mean size of the files of samples, without missing files, which raise when they are read."""
        sizes = []
        for sample in samples:
            with contextlib.suppress(SourceError, OSError):
                sizes.append(os.stat(self.paths.of(np.array([sample]))[0]).st_size)
        return sum(sizes) / max(len(sizes), 1)

    def shape_of(self, sample: int) -> tuple[int, ...]:
        """The stored shape of one sample's file; raises as `read`."""
        (path,) = self.paths.of(np.array([sample]))
        try:
            return self.decoder.shape_of(self._prefetcher.read(path, MOST_BYTES), path)
        except SourceError as error:
            raise self.paths.failed(error, sample, path) from error.__cause__
