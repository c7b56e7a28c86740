from __future__ import annotations

import errno
import logging

import numpy as np
import pytest
import torch

from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.resources.memory import allocated, default_budget, readable


def test_memory_is_page_aligned_and_writable():
    made = allocated(1000, pinned=False)
    assert made.ctypes.data % 4096 == 0
    made[:] = 7
    assert (made == 7).all()


def test_memory_that_the_system_refuses_is_an_error_with_its_size_and_advice(monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refused)
    with pytest.raises(MemoryBudgetError, match=r"^memory_budget: the system refuses 2.0 MiB for a slot .*ulimit -v"):
        allocated(2**21, pinned=False)


def test_memory_that_cannot_be_pinned_is_pageable_and_said(monkeypatch, caplog):
    def refused(*_, **__):
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(torch, "empty", refused)
    with caplog.at_level(logging.WARNING):
        made = allocated(1000, pinned=True)
    assert made.nbytes == 1000
    assert "pinning" in caplog.text


def test_the_budget_is_shared_by_the_ranks_of_a_machine(monkeypatch):
    alone = default_budget()
    assert default_budget(2) == pytest.approx(alone / 2, abs=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_budget() == pytest.approx(alone / 4, abs=1)
    assert default_budget(1) == alone


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (3_300_000, "3.1 MiB"), (5 * 2**40, "5.0 TiB")]
)
def test_bytes_are_readable(nbytes, text):
    assert readable(nbytes) == text


def test_memory_is_bytes():
    assert allocated(512, pinned=False).dtype == np.uint8
