"""Which readers a loader takes, and how many batches they read together, by what reading costs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import AsyncLoader, ManifestSource
from lit_async_data.host.resources import workers
from lit_async_data.host.resources.plan import COALESCED_BATCHES, COALESCED_BYTES
from lit_async_data.sources.contract.storage_layout import ChunkRun, StorageLayout
from lit_async_data.testing import PartedArrays

LENGTH, BATCH = 4096, 16


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(workers, "system_refusal", lambda: "")
    monkeypatch.setattr(workers, "has_gil", lambda: True)
    monkeypatch.setattr(workers, "cores", lambda ranks=None: 2)


def plan_of(reading, shape=(8,), **options):
    arrays = {"x": np.zeros((LENGTH, *shape), np.uint8), "y": np.zeros(LENGTH, np.int64)}
    source = PartedArrays(arrays, parts={"a": LENGTH}, chunks=StorageLayout(reading=reading))
    return AsyncLoader(source, {"batch_size": BATCH, **options}).footprint


@pytest.mark.parametrize(
    ("reading", "kind", "why"),
    [
        ("copied", "thread", "reading is a copy"),
        ("opened", "process", "a file is opened for each sample"),
        ("locked", "process", "reading holds a lock"),
        ("decoded", "process", "chunks are decoded"),
        ("python", "process", "Python code reads the samples"),
    ],
)
def test_what_would_take_the_gil_is_read_in_a_process(reading, kind, why):
    found = plan_of(reading).workers
    assert (found.kind, found.threads, found.why) == (kind, 1, why)


@pytest.mark.parametrize(
    ("reading", "most"), [("copied", 1), ("opened", 1), ("locked", 1), ("decoded", 2), ("python", 2)]
)
def test_more_workers_come_later_only_where_they_can_help(reading, most):
    assert plan_of(reading).workers.most == most


@pytest.mark.parametrize(
    ("reading", "together"),
    [("copied", True), ("opened", True), ("locked", False), ("decoded", True), ("python", False)],
)
@pytest.mark.parametrize("kind", ["auto", "thread", "process"])
def test_small_batches_are_read_together_but_for_python_code_and_locks(reading, together, kind):
    found = plan_of(reading, worker_kind=kind)
    assert found.layout.batches == (COALESCED_BATCHES if together else 1)
    assert found.budget.slot_bytes == found.layout.nbytes


@pytest.mark.parametrize(
    ("reading", "together"),
    [("copied", COALESCED_BATCHES), ("opened", 1), ("locked", 1), ("decoded", 1), ("python", 1)],
)
def test_a_loop_that_reads_itself_copies_several_batches_together_and_decodes_one(reading, together):
    assert plan_of(reading, workers=0).layout.batches == together


@pytest.mark.parametrize("reading", ["copied", "opened", "decoded"])
def test_batches_that_are_read_together_take_no_more_than_a_few_megabytes(reading):
    shape = (COALESCED_BYTES // BATCH // 3,)
    assert plan_of(reading, shape).layout.batches == 2  # three with the labels are too large
    assert plan_of(reading, (COALESCED_BYTES // BATCH + 1,)).layout.batches == 1


@pytest.mark.parametrize("reading", ["copied", "opened", "decoded"])
def test_a_small_budget_is_no_reason_to_refuse_what_can_be_read_batch_by_batch(reading):
    found = plan_of(reading, (1000,), memory_budget=5 * 17_000)
    assert found.layout.batches == 1


@pytest.mark.parametrize("reading", ["copied", "opened", "decoded"])
def test_batches_that_are_read_together_leave_most_of_a_small_budget(reading):
    """For users who keep batches, and for files that are read ahead."""
    alone = plan_of(reading, (1000,), memory_budget=5 * 17_000).budget.slot_bytes
    found = plan_of(reading, (1000,), memory_budget=5 * 4 * 3 * alone)
    assert found.layout.batches == 3
    assert found.budget.most_slots == 4 * found.budget.slots == 20


def test_an_epoch_of_one_step_has_nothing_to_read_together():
    assert plan_of("copied", batch_size=LENGTH).layout.batches == 1


@pytest.mark.parametrize(
    ("rows", "options", "together"),
    [
        (16, {"shuffle_chunks": 8}, 2),  # 64 of 128 samples; two workers have 32 in hand
        (16, {"shuffle_chunks": 8, "worker_kind": "thread", "workers": 1}, 4),
        (16, {"shuffle_chunks": 1}, 1),
        (16, {"shuffle_chunks": 8, "shuffle": "none"}, COALESCED_BATCHES),
        (1, {"shuffle_chunks": 8}, COALESCED_BATCHES),
    ],
)
def test_what_is_read_together_is_at_most_half_of_the_chunks_that_are_mixed(rows, options, together):
    """Else a chunk would be decoded for several slots anew."""
    chunks = StorageLayout((ChunkRun(LENGTH, rows),), compressed=True, reading="decoded")
    arrays = {"x": np.zeros((LENGTH, 8), np.uint8), "y": np.zeros(LENGTH, np.int64)}
    source = PartedArrays(arrays, parts={"a": LENGTH}, chunks=chunks)
    loader = AsyncLoader(source, {"batch_size": BATCH, "shuffle": "chunk", **options})
    assert loader.footprint.layout.batches == together


def test_a_table_of_npy_files_opens_them(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.zeros((2, 3), np.float32))
    table = pa.table({"path": [f"{number}.npy" for number in range(4)], "label": [0, 1, 0, 1]})
    source = ManifestSource(table, root=tmp_path, fields={"x": "path", "y": "label"})
    assert source.reading == "opened"
    assert AsyncLoader(source, {"batch_size": 2}).footprint.workers.kind == "process"
    assert ManifestSource(table, root=tmp_path, fields={"y": "label"}).reading == "copied"
