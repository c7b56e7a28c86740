"""Several reader processes read side by side, in order; one that ends is named, and another one takes its place."""

import collections
import contextlib
import os
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.processes import patience, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.cut_while_read import CutWhileRead
from support.sources.reader_sources import (
    FailsToStart,
    KilledAtStart,
    KilledOnce,
    ManyNumbers,
    PythonNumbers,
)

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.engine.resources.worker_tuner import WorkerTuner
from lit_async_data.errors import ChangedError, TransformError, WorkerError

pytestmark = pytest.mark.processes
ORDER = list(range(0, 100, 10))


def loader_of(source, **options):
    return AsyncLoader(source, {"batch_size": 10, "shuffle": False, "worker_kind": "process", "workers": 2, **options})


def pipeline_of(loader):
    return loader.machinery.engine.feed.pipeline


def process_ids(loader):
    return {each.channel.pid for each in pipeline_of(loader)._readers}


def in_two_processes(loader):
    """Take passes until two processes read; returns their ids."""
    for _ in patience():
        found = {pid for batch in loader for pid in batch["process"].tolist()}
        if len(found) == 2 and found == process_ids(loader):
            return found
    raise AssertionError("the second process never started")


def test_several_processes_deliver_the_batches_of_one():
    def passes(workers):
        with loader_of(PythonNumbers(), workers=workers, shuffle="global", seed=4, return_indices=True) as loader:
            return [[(batch["y"].tolist(), batch["index"].tolist()) for batch in loader] for _ in range(4)]

    assert passes(3) == passes(1)


def test_processes_read_the_rest_of_a_resumed_epoch():
    source = ManyNumbers()
    with loader_of(source, workers=0, worker_kind="thread") as loader:
        next(loader)
        place = loader.state_dict()
    with loader_of(source) as loader:
        loader.load_state_dict(place)
        seen = set()
        for step, batch in enumerate(loader, 1):
            assert batch["y"].tolist() == list(range(10 * step, 10 * step + 10))
            seen |= set(batch["process"].tolist())
            if len(seen) == 2:
                return
    raise AssertionError("the second process never started")


def test_each_worker_has_a_process_and_all_end_with_the_loader():
    with loader_of(PythonNumbers()) as loader:
        assert str(loader.footprint.workers).startswith("2 reader processes (")
        processes = in_two_processes(loader)
        names = {(Path("/proc") / str(pid) / "comm").read_text() for pid in processes}
        assert names == {"lit_data reader\n"}
    for pid in processes:
        wait_for_the_end_of(pid)


def test_what_a_killed_process_was_reading_is_read_again(tmp_path, caplog):
    flag = tmp_path / "flag"
    with loader_of(KilledOnce(str(flag))) as loader:
        in_two_processes(loader)
        flag.touch()
        seen = []
        while flag.exists() or len(seen) < 100:
            seen.append(loader.next()["y"][0].item())
        assert seen == [10 * (number % 10) for number in range(len(seen))]
    (line,) = (line for line in caplog.messages if "was killed by SIGKILL" in line)
    assert "while it read samples 30, 31, 32, … (10 in all) of epoch" in line
    assert "(the first is row 30 of KilledOnce); a new one takes its place" in line


def test_a_file_that_is_cut_while_its_map_is_read_is_named(tmp_path, caplog):
    """1. The file is checked. 2. It is cut. 3. The kernel ends the process that reads its map. 4. The next checks."""
    with h5py.File(path := str(tmp_path / "x.h5"), "w") as file:
        file["data"] = np.zeros((100, 1024), "f4")
    with loader_of(CutWhileRead(path)) as loader, pytest.raises(ChangedError, match=f"{path}: shrank from") as caught:
        list(loader)
    assert caught.value.file == path
    (line,) = (line for line in caplog.messages if "was killed by SIGBUS" in line)
    assert f"(the first is row 50 of {path})" in line


@pytest.mark.parametrize("rest", [False, True])
def test_processes_that_are_killed_are_each_named_once_and_cost_nothing(rest, caplog):
    with loader_of(PythonNumbers()) as loader:
        killed, seen = in_two_processes(loader), []
        pipeline = pipeline_of(loader)
        while rest and pipeline.ready < len(pipeline.pool):  # until all slots are filled, and nobody reads
            pipeline.poll(None)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        while killed & process_ids(loader):
            seen += [batch["y"][0].item() for batch in loader]
        assert seen == ORDER * (len(seen) // len(ORDER))
        in_two_processes(loader)
    for pid in killed:
        assert (
            sum(f"reader process {pid} was killed by SIGKILL (out of memory?)" in line for line in caplog.messages) == 1
        )


def test_workers_are_added_where_the_loop_waits(monkeypatch, caplog):
    caplog.set_level("INFO")
    counts = [2]
    monkeypatch.setattr(WorkerTuner, "settled", property(lambda tuner: not counts))
    monkeypatch.setattr(WorkerTuner, "waited", lambda tuner, *_: counts.pop())
    monkeypatch.setattr("lit_async_data.engine.resources.workers.cores", lambda ranks=None: 4)
    with loader_of(PythonNumbers(), workers="auto", worker_kind="auto") as loader:
        assert str(loader.footprint.workers) == ("1 reader process, at most 4 (Python code reads the samples)")
        assert [batch["y"][0].item() for batch in loader] == ORDER
        in_two_processes(loader)
    assert "workers=auto: 2 workers now, since the loop waited for batches; workers=2 begins so" in caplog.text


def test_a_process_that_is_killed_while_it_starts_is_replaced_like_any_other(tmp_path, caplog):
    (flag := tmp_path / "flag").touch()
    with loader_of(KilledAtStart(str(flag))) as loader:
        assert [batch["y"][0].item() for batch in loader] == ORDER
    assert sum("was killed by SIGKILL (out of memory?); a new one" in line for line in caplog.messages) == 1
    flag.mkdir()  # which none can remove
    with loader_of(KilledAtStart(str(flag))) as loader:
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
            next(loader)
        assert caught.value.worker in {0, 1}


def test_one_more_process_that_cannot_start_is_done_without(tmp_path, caplog):
    with loader_of(FailsToStart(str(tmp_path / "flag"))) as loader:
        in_two_processes(loader)
        (tmp_path / "flag").touch()
        pipeline_of(loader).set_workers(3)
        while "failed: ImportError: no such library; reading goes on with 2" not in caplog.text:
            assert [batch["y"][0].item() for batch in loader] == ORDER
        in_two_processes(loader)


def test_fewer_workers_end_processes():
    with loader_of(PythonNumbers()) as loader:
        in_two_processes(loader)
        pipeline = pipeline_of(loader)
        first, second = (each.channel.pid for each in pipeline._readers)
        pipeline.set_workers(1)
        while second in process_ids(loader):
            assert [batch["y"][0].item() for batch in loader] == ORDER
        wait_for_the_end_of(second)
        assert {pid for batch in loader for pid in batch["process"].tolist()} == {first}


@pytest.fixture
def storage():
    return {"chunks": (16, 8, 8), "compression": "gzip"}


@pytest.fixture
def file(tmp_path, storage):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        images = np.random.default_rng(0).integers(0, 99, (100, 8, 8), np.uint8)
        file.create_dataset("x", data=images, **storage)
        file["y"] = np.arange(100)
    return path


@pytest.fixture
def stored(file):
    with contextlib.closing(HDF5Source(file, {"x": "x", "y": "y"})) as source:
        yield source


SAMPLE, BATCH = {"sample_transform": acts.with_process}, {"batch_transform": acts.centred}


CHUNKS = {"shuffle": "chunk", "shuffle_chunks": 3}


# Each hook alone by chunks, and both in the other orders.
@pytest.mark.parametrize(
    ("options", "hooks"),
    [
        (CHUNKS, SAMPLE),
        (CHUNKS, BATCH),
        ({"shuffle": "none", "augment": True}, SAMPLE | BATCH),
        ({"shuffle": "global"}, SAMPLE | BATCH),
    ],
)
def test_processes_share_each_batch_and_deliver_what_one_would(stored, options, hooks):
    def passes(**given):
        given = {"batch_size": 10, "seed": 2, "return_indices": True, **options, **given}
        with AsyncLoader(stored, given, **hooks) as loader:
            assert loader.footprint.workers.shared == (given["workers"] == 2)
            return [
                {key: value.tolist() for key, value in batch.items() if key != "process"}
                for _ in range(3)
                for batch in loader
            ]

    assert passes(workers=2, worker_kind="process") == passes(workers=0)


def test_a_batch_transform_is_called_once_with_each_whole_batch(stored, tmp_path):
    options = {"batch_size": 10, "shuffle": "chunk", "shuffle_chunks": 3, "workers": 3, "worker_kind": "process"}
    calls = acts.Noted(str(tmp_path / "calls"))
    with AsyncLoader(stored, {**options, "return_indices": True}, batch_transform=calls) as loader:
        seen = [str(batch["index"].tolist()) for _ in range(3) for batch in loader]
    counts = collections.Counter((tmp_path / "calls").read_text().splitlines())
    assert [counts[batch] for batch in seen] == [1] * 30


def test_another_number_of_processes_changes_nothing(stored):
    options = {"batch_size": 10, "shuffle": "chunk", "shuffle_chunks": 3, "seed": 2, "return_indices": True}
    several, one = {**options, "workers": 3, "worker_kind": "process"}, {**options, "workers": 0}
    with AsyncLoader(stored, one, **BATCH) as one, AsyncLoader(stored, several, **BATCH) as loader:
        for count in (3, 1, 2):
            assert loader.next()["x"].tolist() == one.next()["x"].tolist()
            pipeline_of(loader).set_workers(count)
            while pipeline_of(loader)._dealing != count:
                assert loader.next()["x"].tolist() == one.next()["x"].tolist()


def test_a_killed_process_has_its_share_read_again(stored, caplog):
    options = {"batch_size": 10, "shuffle": "chunk", "shuffle_chunks": 3, "seed": 2}
    with AsyncLoader(stored, {**options, "workers": 0}) as loader:
        wanted = [batch["y"].tolist() for _ in range(20) for batch in loader]
    options |= {"workers": 2, "worker_kind": "process"}
    with AsyncLoader(stored, options, sample_transform=acts.with_process) as loader:
        seen = [loader.next()["y"].tolist() for _ in range(15)]
        killed = pipeline_of(loader)._readers[1].channel.pid
        os.kill(killed, signal.SIGKILL)
        seen += [loader.next()["y"].tolist() for _ in range(185)]
        assert seen == wanted
        assert killed not in process_ids(loader)


@pytest.mark.parametrize(("workers", "cache_bytes"), [(3, 0), (2, 2**20)])
def test_each_chunk_is_decoded_once_in_an_epoch_or_at_all_if_they_fit_into_the_cache(tmp_path, workers, cache_bytes):
    rows, epochs = 3200, 3
    with h5py.File(tmp_path / "x.h5", "w") as opened:
        opened.create_dataset("x", data=np.zeros((rows, 64), np.uint8), chunks=(16, 64), compression="gzip")
    options = {"batch_size": 10, "shuffle": "chunk", "shuffle_chunks": 4, "worker_kind": "process"}
    options |= {"workers": workers, "cache_bytes": cache_bytes}
    with (
        contextlib.closing(HDF5Source(tmp_path / "x.h5", ["x"])) as source,
        AsyncLoader(source, options, sample_transform=acts.with_process) as loader,
    ):
        for _ in range(epochs):
            list(loader)
        decoded = loader.stats().read.stages.decode.bytes / (64 * rows)
    # The next epoch has been begun. If all processes decoded each chunk, it would be twice as much, or more.
    assert decoded == 1 if cache_bytes else decoded < epochs + 1


@pytest.mark.parametrize("storage", [{"chunks": (16, 8, 8), "compression": "gzip"}, {}])
def test_an_error_of_a_transform__names_its_sample(stored, file):
    """Once batches are read together, each is read again by itself: the others are delivered."""
    with AsyncLoader(
        stored,
        {"batch_size": 10, "shuffle": False, "worker_kind": "process", "workers": 2},
        sample_transform=acts.fail_at_33,
    ) as loader:
        for _ in range(20):
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == ORDER[:3]
            with pytest.raises(TransformError, match=r"(?s)33.*ValueError: 33 is too much") as caught:
                next(batches)
            assert (caught.value.sample_id, caught.value.file) == (33, str(file))
            assert [next(batches)["y"][0].item() for _ in range(6)] == ORDER[4:]
