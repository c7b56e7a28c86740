from __future__ import annotations

import errno
import logging

import numpy as np
import pytest
import torch

from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.resources.memory import allocated, default_budget, readable, register


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


class Runtime:
    """The functions of the CUDA runtime that lock memory.

    Args:
        code: What they return; 0 for success.
    """

    def __init__(self, code=0):
        self.code, self.locked = code, {}

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802  # as torch names it
        assert flags == 0
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]
        return self.code


def test_memory_that_a_gpu_copies_from_is_locked_until_it_is_freed(monkeypatch, caplog):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slot = np.zeros(1000, np.uint8)
    register(slot)
    assert runtime.locked == {slot.ctypes.data: 1000}
    del slot
    assert runtime.locked == {}
    assert not caplog.messages


def test_memory_that_cannot_be_locked_is_used_all_the_same(monkeypatch, caplog):
    runtime = Runtime(code=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    register(np.zeros(1000, np.uint8))
    assert "pinning 1000 bytes failed, copies to the device will be slower: CUDA error 2" in caplog.text


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
