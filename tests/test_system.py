"""What a process has of its system, and a gate to wait at."""

import errno
import mmap
import os
import sys

import numpy as np
import pytest

from lit_async_data import system

PAGE = mmap.PAGESIZE


def second_of_three_pages():
    """Memory of which only the second page has been written to."""
    mapped = np.frombuffer(mmap.mmap(-1, 3 * PAGE), np.uint8)
    mapped[PAGE] = 1
    return mapped


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say what is in memory")
@pytest.mark.parametrize(
    ("begin", "nbytes", "expected"),
    [
        (0, 1, [False]),
        (PAGE + 7, 1, [True]),
        (PAGE - 1, 2, [False, True]),
        (PAGE - 1, PAGE + 2, [False, True, False]),
    ],
)
def test_only_pages_that_were_touched_are_in_memory(begin, nbytes, expected):
    assert system.resident(second_of_three_pages(), begin, nbytes).tolist() == expected


def test_where_the_system_does_not_say_it_all_may_be_in_memory(monkeypatch):
    monkeypatch.setattr(system, "_mincore", lambda: None)
    assert system.resident(second_of_three_pages(), 0, 3 * PAGE).tolist() == [True] * 3


def test_a_refusal_of_the_system_is_an_error(monkeypatch):
    monkeypatch.setattr(system, "_mincore", lambda: lambda *_: -1)
    with pytest.raises(OSError, match="mincore failed"):
        system.resident(second_of_three_pages(), 0, 1)


def test_a_page_of_a_file_in_memory_is_not_cold(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(2**20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        assert system.is_cold(file.fileno(), 2**19) is False


def test_a_system_that_cannot_tell_calls_nothing_cold(monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert system.is_cold(0, 0) is None


def test_a_gate_lets_all_pass_from_the_moment_that_it_opens():
    gate = system.Gate()
    assert not gate.wait(0)
    gate.open()
    gate.open()
    assert gate.wait(0)
    gate._opened = False  # as two threads saw it that began to wait before
    gate.wait(0)
    assert not gate._closed.locked()  # the first one lets the second pass
