"""`MirroredFile`: a file or an object whose bytes are read from its mirror, and fetched into it, each block once."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Mapping

import numpy as np

from lit_async_data.errors import AsyncDataError, StoreError
from lit_async_data.order.chunk_order import distinct_of
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.stage_clock import CLOCK
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.files.mirror import BLOCK, Mirror, runs
from lit_async_data.sources.files.transport import Started, Transport

# Ranges that are nearer than this are one request, of at most this size.
GAP_BLOCKS, MOST_BLOCKS = 4, 2**20 // BLOCK
# Small pieces come by whole blocks if these have at most as many times the bytes.
_DENSE = 4

Get = Callable[[int, int], memoryview]
# While it is set, `MirroredFile.fetch` only tells whether it would ask for some of these bytes.
ASKED_FOR = contextvars.ContextVar[tuple[int, int] | None]("ASKED_FOR", default=None)


class MirroredFile:
    """Thread-safe. Threads of the transport call ``get``, which returns the bytes of a range."""

    def __init__(self, name: str, identity: FileIdentity, mirror: Mirror, get: Get, transport: Transport) -> None:
        self.name, self.identity, self.mirror, self._get, self._transport = name, identity, mirror, get, transport
        self._lock, self._last, self._coming = threading.Lock(), 0, dict[int, Started[None]]()
        self._asked = np.zeros(mirror.blocks, np.int64)  # which fetch will bring each block, by number; 0: none

    def fetch(self, begins: Indices, ends: Indices, *, urgent: bool = False) -> bool:
        """Start to fetch the blocks that are missing; returns whether any is."""
        begins, ends = self._inside(begins, ends)
        if span := ASKED_FOR.get():
            return bool(((begins < span[1]) & (ends > span[0])).any())
        blocks = self.mirror.missing(begins, ends)
        if urgent or not self._asked[blocks].all():
            self._started(begins, ends, urgent=urgent)
        return len(blocks) > 0

    def _inside(self, begins: Indices, ends: Indices) -> tuple[Indices, Indices]:
        """The ranges as far as they are in the file; damaged references may lead anywhere."""
        ends = np.minimum(ends, self.mirror.size)
        inside = begins < ends
        return begins[inside], ends[inside]

    def _started(self, begins: Indices, ends: Indices, *, urgent: bool) -> list[Started[None]]:
        """The fetches that will bring the blocks that are missing."""
        with self._lock:
            blocks = self.mirror.missing(begins, ends)
            asked = runs(blocks[self._asked[blocks] == 0], GAP_BLOCKS, MOST_BLOCKS)
            CLOCK.fetched(len(asked), BLOCK * sum(end - first for first, end in asked))
            for run in asked:
                number = self._last + 1
                started = self._transport.start(functools.partial(self._load, run, number), urgent=urgent)
                started.add_done_callback(functools.partial(self._forget, run, number))  # it may be dropped
                self._asked[slice(*run)], self._coming[number], self._last = number, started, number
            coming = [self._coming[number] for number in distinct_of(self._asked[blocks]).tolist()]
        if urgent:
            self._transport.hurry(coming)
        return coming

    def need(self, begins: Indices, ends: Indices) -> None:
        """Wait until the bytes of these ranges are there. Raises as ``get`` and `Transport.result_of`."""
        begins, ends = self._inside(begins, ends)
        while len(self.mirror.missing(begins, ends)):
            if span := ASKED_FOR.get():
                error = StoreError(f"{self.name}: has not come", file=self.name)
                error.span = span if self.fetch(begins, ends) else None
                raise error
            for started in reversed(self._started(begins, ends, urgent=True)):  # the last to come first: one wake
                self._transport.result_of(started, self.name)

    def scattered(self, places: Mapping[int, int]) -> dict[int, Callable[[], bytes]]:
        """Start to fetch small pieces, by where they begin. Returns functions that wait for the bytes of each.

        A mirror in memory does not get them if their blocks are far larger. One in a folder does, for the next start.
        """
        begins = np.fromiter(places, np.int64)
        ends = np.minimum(begins + np.fromiter(places.values(), np.int64), self.mirror.size)
        with self._lock:
            missing = self.mirror.missing(begins, ends)
            dense = len(missing) * BLOCK <= _DENSE * int((ends - begins).sum())
            alone = not dense and self.mirror.ring is not None and not self._asked[missing].any()
        if not alone:
            self.fetch(begins, ends, urgent=True)
            return {begin: functools.partial(self.bytes_at, begin, size) for begin, size in places.items()}
        CLOCK.fetched(len(places), sum(places.values()))
        start, wait = self._transport.start, self._transport.result_of
        return {
            begin: functools.partial(wait, start(functools.partial(self._piece, begin, end)), self.name)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        }

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Fewer at the end."""
        end = min(offset + size, self.mirror.size)
        with self.mirror.reading():
            if end > offset:
                self.need(np.array([offset]), np.array([end]))
            return self.mirror.map[offset:end].tobytes()

    def store(self, begin: int, data: memoryview) -> None:
        try:
            self.mirror.store(begin, data)
        except OSError as error:
            what = f"its mirror cannot be written: {error.strerror}; make room, or give another folder as cache"
            raise StoreError(f"{self.name}: {what}", file=self.name) from error

    def _answer(self, begin: int, end: int) -> memoryview:
        try:
            return self._get(begin, end)
        except AsyncDataError as error:
            error.span = begin, end
            raise

    def _piece(self, begin: int, end: int) -> bytes:
        return bytes(self._answer(begin, end))  # not a part of a larger buffer

    def _load(self, run: tuple[int, int], number: int) -> None:
        begin, end = run[0] * BLOCK, min(run[1] * BLOCK, self.mirror.size)
        try:
            self.store(begin, self._answer(begin, end))
        finally:
            self._forget(run, number)  # before anybody who waits goes on

    def _forget(self, run: tuple[int, int], number: int, _: object = None) -> None:
        with self._lock:
            own = self._asked[slice(*run)]
            own[own == number] = 0
            self._coming.pop(number, None)
