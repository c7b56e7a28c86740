from __future__ import annotations

import os

from lit_async_data.threads import ProcessGuard


def test_a_process_guard_detects_a_fork(monkeypatch):
    guard = ProcessGuard()
    parent = os.getpid()
    assert not guard.forked
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a fork
    assert guard.forked
    error = guard.error("x.h5 was opened", "open it again", file="x.h5")
    assert str(error) == f"x.h5 was opened in process {parent} and cannot be used in its fork -1: open it again"
    assert error.file == "x.h5"
