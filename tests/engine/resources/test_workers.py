"""Who reads the batches of a loader, by what reading costs, by the cores that there are, and by the GIL."""

import sys
import types

import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import AsyncLoader, ManifestSource
from lit_async_data.engine import resources
from lit_async_data.engine.resources import Wanted, Workers, cores
from lit_async_data.errors import ConfigError
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.source import StorageLayout
from lit_async_data.testing import ArraySource


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(resources, "system_refusal", lambda: "")
    monkeypatch.setattr(resources, "cores", lambda ranks=None: 2)


def workers_of(reading, *, refusal="", **options):
    source = ArraySource({"x": np.arange(6)}, chunks=StorageLayout(reading=reading))
    options = LoaderOptions(batch_size=2, **options)
    return Workers.of(Wanted(source, source.spec, options, None, ahead=True, refusal=refusal))


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("reading", "kind", "why", "most"),
    [
        ("copied", "thread", "reading is a copy", 1),
        ("opened", "process", "a file is opened for each sample", 1),
        ("locked", "process", "reading holds a lock", 1),
        ("decoded", "process", "samples are decoded", 2),
        ("python", "process", "Python code reads the samples", 2),
    ],
)
def test_what_would_take_the_gil_is_read_in_a_process_and_more_come_later_where_they_can_help(
    monkeypatch, reading, kind, why, most
):
    monkeypatch.setattr(resources, "has_gil", lambda: True)
    assert workers_of(reading)[:4] == (kind, 1, why, most)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("reading", "refusal", "chosen"),
    [
        ("decoded", "", ("process", 1, "samples are decoded")),
        ("python", "", ("process", 1, "Python code reads the samples")),
        ("python", "no memfd", ("caller", 0, "no memfd")),
    ],
)
def test_without_the_gil_threads_read_what_a_process_or_the_loop_would(monkeypatch, reading, refusal, chosen):
    for gil_on, found in zip((True, False), (chosen, ("thread", chosen[1] or 1, "there is no GIL"))):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda gil_on=gil_on: gil_on, raising=False)
        assert workers_of(reading, refusal=refusal)[:3] == found


@pytest.mark.processes
@pytest.mark.usefixtures("two_cores")
def test_who_reads_is_said_and_is_no_process_where_no_core_is_free_or_the_user_chose(monkeypatch):
    assert str(workers_of("decoded")) == "a reader process with 1 reader thread, at most 2 (samples are decoded)"
    for options in ({"workers": 0}, {"worker_kind": "thread"}):
        assert workers_of("decoded", **options).kind != "process"
    monkeypatch.setattr(resources, "cores", lambda ranks=None: 1)
    assert str(workers_of("decoded")) == "1 reader thread (no core is free)"


@pytest.mark.processes
def test_a_table_of_npy_files_opens_them(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.zeros((2, 3), np.float32))
    table = pa.table({"path": [f"{number}.npy" for number in range(4)], "label": [0, 1, 0, 1]})
    source = ManifestSource(table, root=tmp_path, fields={"x": "path", "y": "label"})
    assert source.chunks.reading == "opened"
    assert AsyncLoader(source, {"batch_size": 2}).footprint.workers.kind == "process"
    assert ManifestSource(table, root=tmp_path, fields={"y": "label"}).chunks.reading == "copied"


@pytest.mark.processes
def test_a_system_that_is_not_posix_has_threads_and_says_why(monkeypatch):
    monkeypatch.setattr(resources, "os", types.SimpleNamespace(name="nt", environ={}))
    monkeypatch.setattr(resources, "sys", types.SimpleNamespace(platform="win32"))
    why = "win32 passes no descriptors to a new process"
    assert workers_of("python", workers=1)[:3] == ("thread", 1, why)
    with pytest.raises(ConfigError, match=f"worker_kind: process is not possible here: {why}; set worker_kind=thread"):
        workers_of("python", worker_kind="process")


@pytest.mark.parametrize(
    ("environment", "known", "share"),
    [
        ({}, None, 32),
        ({}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, None, 8),
        ({"LOCAL_WORLD_SIZE": ""}, None, 32),
        ({}, 64, 1),
        # SLURM has given each of its tasks 32 cores.
        ({"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "32"}, 4, 32),
        # All tasks share 32 cores.
        ({"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "8"}, 4, 8),
        # The ranks were not started by SLURM, but within a task.
        ({"SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "32"}, 4, 8),
        ({"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "32", "LOCAL_WORLD_SIZE": "4"}, None, 8),
    ],
)
def test_each_rank_has_its_share_of_the_cores(monkeypatch, environment, known, share):
    monkeypatch.setattr(resources, "usable_cores", lambda: 32)
    monkeypatch.setattr(resources, "core_limit", lambda: None)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cores(known) == share
