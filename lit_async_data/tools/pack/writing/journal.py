"""`Journal`: what of a pack is done, line by line, so that the next run can go on after it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from lit_async_data import system
from lit_async_data.errors import SourceError
from lit_async_data.tools.pack.writing import writes


@dataclasses.dataclass(frozen=True)
class Commit:
    """A state of the part file to which a crash goes back.

    Attributes:
        samples: Samples that are packed.
        end: Bytes of the file.
        pages: Bytes that this commit changes in place, by offset. They are in the journal first, and then in the file:
            whoever finds the commit writes them again.
    """

    samples: int
    end: int
    pages: Mapping[int, bytes]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        pages = {str(at): base64.b85encode(page).decode() for at, page in self.pages.items()}
        return {"samples": self.samples, "end": self.end, "pages": pages}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """From plain values."""
        pages = {int(at): base64.b85decode(page) for at, page in values["pages"].items()}
        return cls(values["samples"], values["end"], pages)


class Journal:
    """A file of lines, each with its checksum: first the plan, then the commits. One process has it open at a time.

    A line that a crash cut short, and what follows it, is dropped.

    Args:
        path: The file; made if it does not exist.

    Attributes:
        plan: The plan; None in a new journal.
        last: The last commit, or None.

    Raises:
        OSError: It cannot be opened or written.
        SourceError: Another process is packing into the same file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  # closed by `close`
        try:
            _lock(self._file.fileno(), path)
            self.plan: dict[str, Any] | None = None
            self.last: Commit | None = None
            self._load()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which also unlocks it."""
        self._file.close()

    def _load(self) -> None:
        self._file.seek(0)
        self._end = 0
        for line in self._file.readall().splitlines(keepends=True):
            sum_, _, text = line.partition(b" ")
            if not line.endswith(b"\n") or sum_ != _sum_of(text):
                break
            values = json.loads(text)
            if self.plan is None:
                self.plan = values
            else:
                self.last = Commit.of_json(values)
            self._end += len(line)

    def clear(self) -> None:
        """Forget everything."""
        writes.cut(self._file.fileno(), 0)
        self.plan, self.last, self._end = None, None, 0

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Write the plan to a new journal."""
        self._append(plan)
        self.plan = dict(plan)

    def add(self, commit: Commit) -> None:
        """Write a commit. When this returns, it is on the disk."""
        self._append(commit.to_json())
        self.last = commit

    def _append(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(values).encode() + b"\n"
        writes.cut(self._file.fileno(), self._end)
        line = _sum_of(text) + b" " + text
        writes.append(self._file.fileno(), line)
        writes.sync(self._file.fileno())
        self._end += len(line)


def _sum_of(text: bytes) -> bytes:
    return b"%08x" % binascii.crc32(text)


def _lock(descriptor: int, path: str) -> None:
    try:
        system.lock(descriptor)
    except BlockingIOError as error:
        raise SourceError(
            f"{path}: another process is packing into the same file; wait for it, or give another output", file=path
        ) from error
