from __future__ import annotations

import errno
import logging

import numpy as np
import pytest
import torch

from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.resources import memory
from lit_async_data.host.resources.memory import allocated, default_budget, machine_memory, readable


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


def test_the_budget_is_shared_by_the_ranks_of_a_node(monkeypatch):
    alone = default_budget()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_budget() == pytest.approx(alone / 4, abs=1)


@pytest.mark.parametrize(("text", "limit"), [("1000000\n", 1_000_000), ("max\n", None), (None, None)])
def test_a_control_group_limits_the_memory(monkeypatch, tmp_path, text, limit):
    if text is not None:
        (tmp_path / "_sys_fs_cgroup_memory.max").write_text(text)
    whole = machine_memory.__globals__["os"].sysconf("SC_PAGE_SIZE") * machine_memory.__globals__["os"].sysconf(
        "SC_PHYS_PAGES"
    )
    monkeypatch.setattr(memory, "open", lambda name: (tmp_path / name.replace("/", "_")).open(), raising=False)
    assert machine_memory() == (limit or whole)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/step_0/memory.max": "max", "slurm/job_7/memory.max": "3000"}),
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/step_0/memory.max": "3000", "slurm/memory.max": "9000"}),
        (
            "5:cpu:/elsewhere\n4:hugetlb,memory:/slurm/job_7\n",
            {"memory/slurm/job_7/memory.limit_in_bytes": "3000", "memory/elsewhere/memory.limit_in_bytes": "5"},
        ),
    ],
)
def test_the_groups_around_that_of_a_job_limit_its_memory_too(monkeypatch, tmp_path, groups, files):
    for name, text in (
        {"/proc/self/cgroup": groups} | {f"/sys/fs/cgroup/{name}": files[name] for name in files}
    ).items():
        (tmp_path / name.replace("/", "_")).write_text(text)
    monkeypatch.setattr(memory, "open", lambda name: (tmp_path / name.replace("/", "_")).open(), raising=False)
    assert machine_memory() == 3000


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (3_300_000, "3.1 MiB"), (5 * 2**40, "5.0 TiB")]
)
def test_bytes_are_readable(nbytes, text):
    assert readable(nbytes) == text


def test_memory_is_bytes():
    assert allocated(512, pinned=False).dtype == np.uint8
