"""What a process has of its system, and a gate to wait at."""

import errno
import os

from support.failures import raising

from lit_async_data import system


def test_a_page_of_a_file_in_memory_is_not_cold(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(2**20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        assert system.is_cold(file.fileno(), 2**19) is False


def test_a_system_that_cannot_tell_calls_nothing_cold(monkeypatch):
    monkeypatch.setattr(os, "preadv", raising(OSError(errno.EOPNOTSUPP, "Operation not supported")))
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
