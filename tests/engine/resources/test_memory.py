"""Memory that a loader may take, of the machine and of its control group; pinned memory; the memory of mirrors."""

import contextlib
import errno
import logging
import os

import numpy as np
import pytest
import torch
from support.device.pretended import MACHINES
from support.failures import raising

from lit_async_data import system
from lit_async_data.engine import resources
from lit_async_data.engine.resources import allocated, cores, default_budget, readable, register
from lit_async_data.errors import MemoryBudgetError
from lit_async_data.sources.files.files import Files


@pytest.fixture(autouse=True)
def nothing_said():
    resources._say_pageable.cache_clear()


def test_memory_is_page_aligned_bytes_that_can_be_written():
    made = allocated(1000, pinned=False)
    assert made.dtype == np.uint8
    assert made.ctypes.data % 4096 == 0
    made[:] = 7
    assert (made == 7).all()


def test_memory_that_the_system_refuses_is_an_error_with_its_size_and_advice(monkeypatch):
    monkeypatch.setattr("mmap.mmap", raising(OSError(errno.ENOMEM, "Cannot allocate memory")))
    with pytest.raises(MemoryBudgetError, match=r"^memory_budget: the system refuses 2.0 MiB for a slot .*ulimit -v"):
        allocated(2**21, pinned=False)


def test_memory_that_cannot_be_pinned_is_pageable_and_said(monkeypatch, caplog):
    monkeypatch.setattr(torch, "empty", raising(RuntimeError("out of pinned memory")))
    with caplog.at_level(logging.WARNING):
        made = allocated(1000, pinned=True)
        allocated(1000, pinned=True)
    assert made.nbytes == 1000
    (line,) = caplog.messages  # and not one for each slot
    assert line == "pinning 1000 bytes failed, copies to the device will be slower: out of pinned memory"


class Runtime:
    """The functions of the CUDA runtime that lock memory; ``code`` is what they return, 0 for success."""

    def __init__(self):
        self.code, self.locked, self.current = 0, {}, []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802  # as torch names it
        assert flags == 0
        if address in self.locked:
            return 712
        if not self.code:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        assert self.current == [GPU]  # else CUDA opens a context on another device
        del self.locked[address]
        return self.code


GPU = torch.device("cuda:1")


@pytest.fixture
def runtime(monkeypatch):
    """A pretended runtime of CUDA, which may be called while `GPU` is the current device."""
    made = Runtime()
    current = made.current

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    def cudart():
        assert current == [GPU]
        return made

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    return made


def test_memory_that_a_gpu_copies_from_is_locked_until_it_is_freed(runtime, caplog):
    slot = np.zeros(1000, np.uint8)
    register(slot, GPU)
    assert runtime.locked == {slot.ctypes.data: 1000}
    del slot
    assert runtime.locked == {}
    assert not caplog.messages


def test_an_error_of_unlocking_meets_nobody_else(runtime, monkeypatch):
    launched = []
    monkeypatch.setattr(torch, "zeros", lambda size, *, device: launched.append(device))
    slot = np.zeros(1000, np.uint8)
    register(slot, GPU)
    runtime.code = 1
    del slot
    assert launched == [GPU]


def test_a_fork_that_drops_the_memory_does_not_unlock_it(runtime, monkeypatch):
    slot = np.zeros(1000, np.uint8)
    register(slot, GPU)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del slot
    assert len(runtime.locked) == 1


@pytest.mark.parametrize("real", MACHINES)
def test_memory_that_is_locked_already_leaves_no_error_to_the_next_kernel(real, request, monkeypatch, caplog):
    slot, device, launched = np.zeros(2**20, np.uint8), GPU, []
    if real:
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        request.getfixturevalue("runtime")
        monkeypatch.setattr(torch, "zeros", lambda size, *, device: launched.append(device))
    for _ in range(2):
        register(slot, device)
    assert len(caplog.messages) == 1
    assert torch.ones(3, device=device).sum().item() == 3 if real else launched == [GPU]


def test_the_budget_is_shared_by_the_ranks_of_a_machine(monkeypatch):
    alone = default_budget()
    assert default_budget(2) == pytest.approx(alone / 2, abs=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_budget() == pytest.approx(alone / 4, abs=1)
    assert default_budget(1) == alone


@pytest.mark.parametrize(("nbytes", "text"), [(1023, "1023 B"), (3_300_000, "3.1 MiB"), (5 * 2**40, "5.0 TiB")])
def test_bytes_are_readable(nbytes, text):
    assert readable(nbytes) == text


NESTED = "0::/slurm/job_7/step_0\n"
OLD = "5:cpu,cpuacct:/slurm/job_7\n4:hugetlb,memory:/slurm/job_7\n"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes this process see some files, by their names below /sys/fs/cgroup."""

    def given(files, own="0::/\n"):
        texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()} | {"/proc/self/cgroup": own}
        for name, text in texts.items():
            (tmp_path / name.replace("/", "_")).write_text(text)

    monkeypatch.setattr(system, "open", lambda name: (tmp_path / name.replace("/", "_")).open(), raising=False)
    monkeypatch.setattr(resources, "usable_cores", lambda: 32)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return given


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("", {"memory.max": "max\n"}, None),
        ("", {}, None),
        (NESTED, {"slurm/job_7/step_0/memory.max": "max", "slurm/job_7/memory.max": "3000"}, 3000),
        (OLD, {f"memory/{of}/memory.limit_in_bytes": limit for of, limit in (("slurm/job_7", "3"), ("other", "1"))}, 3),
    ],
)
def test_control_groups_and_those_around_them_limit_the_memory(groups, own, files, limit):
    groups(files, own)
    assert system.memory() == (limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def test_mirrors_of_a_source_take_an_eighth_of_the_memory_of_a_rank(groups, monkeypatch):
    groups({"memory.max": f"{2**30}"})
    assert Files()._ring.nbytes == 2**27
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Files()._ring.nbytes == 2**25
    assert Files(cache_limit="1GiB")._ring.nbytes == 2**30


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("", {"cpu.max": "450000 100000\n"}, 4),
        ("", {"cpu.max": "50000 100000\n"}, 1),
        ("", {}, 32),
        (NESTED, {"slurm/job_7/step_0/cpu.max": "max 100000", "slurm/job_7/cpu.max": "800000 100000"}, 8),
        (OLD, {"cpu/slurm/job_7/cpu.cfs_quota_us": "200000", "cpu/slurm/job_7/cpu.cfs_period_us": "100000"}, 2),
        (OLD, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 32),
    ],
)
def test_control_groups_and_those_around_them_limit_the_cores(groups, own, files, limit):
    groups(files, own)
    assert cores() == limit
