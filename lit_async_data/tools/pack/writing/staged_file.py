"""`StagedFile`: what libhdf5 writes between two commits, kept from the part of a file that is already committed."""

from __future__ import annotations

import io
import os
from typing import Any

from lit_async_data import system
from lit_async_data.tools.pack.writing import writes

# Committed bytes change in memory, in pages of this size: nodes of chunk indexes, and the head of the file.
PAGE = 4096


class StagedFile(io.RawIOBase):
    """A file for h5py's driver ``fileobj``, in which the committed bytes stay as they are.

    libhdf5 appends chunks, and changes its indexes in place. What it appends goes to the file at once; what it changes
    stays here until the commit. A program that is killed meanwhile has changed no committed byte. One thread at a time.

    Args:
        descriptor: The file, open for reading and writing.
        committed: Bytes that are committed.

    Attributes:
        size: Bytes of the file as libhdf5 sees it.
        failed: Whether a write failed. No further one is tried, so that libhdf5 can close the file.
    """

    def __init__(self, descriptor: int, committed: int) -> None:
        super().__init__()
        self._descriptor, self._committed = descriptor, committed
        self.size, self.failed = committed, False
        self._position = 0
        self._pages: dict[int, bytearray] = {}

    def pages(self) -> dict[int, bytes]:
        """The changed pages, by offset, without bytes behind the committed ones."""
        return {at: bytes(page[: self._committed - at]) for at, page in sorted(self._pages.items())}

    # -- what h5py calls ---------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        if self.size >= self._committed and not self.failed:
            with _Watch(self):
                writes.cut(self._descriptor, self.size)
        return self.size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start, end = self._position, min(self._position + len(view), self.size)
        if start >= end:
            return 0
        view = view[: end - start]
        got = system.preadv(self._descriptor, [view], start)
        view[got:] = bytes(len(view) - got)  # bytes that were never written
        for at in range(start // PAGE * PAGE, end, PAGE):
            first, last = max(at, start), min(at + PAGE, end, self._committed)
            if at in self._pages and first < last:
                view[first - start : last - start] = self._pages[at][first - at : last - at]
        self._position = end
        return end - start

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        start, end = self._position, self._position + len(view)
        inside = max(min(end, self._committed) - start, 0)  # bytes that are committed
        for at in range(start // PAGE * PAGE if inside else start, start + inside, PAGE):
            first, last = max(at, start), min(at + PAGE, start + inside)
            self._page(at)[first - at : last - at] = view[first - start : last - start]
        if inside < len(view) and not self.failed:
            with _Watch(self):
                writes.write_at(self._descriptor, view[inside:], start + inside)
        self._position, self.size = end, max(self.size, end)
        return len(view)

    def _page(self, at: int) -> bytearray:
        if at not in self._pages:
            self._pages[at] = bytearray(system.pread(self._descriptor, PAGE, at).ljust(PAGE, b"\0"))
        return self._pages[at]


class _Watch:
    """Marks a file as failed if the code inside ``with`` raises."""

    def __init__(self, file: StagedFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        self._file.failed |= kind is not None
