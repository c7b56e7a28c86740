"""Worker processes read side by side, in order; the end of one is an error at its batch, and no more than that."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.processes import children, patience, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import FailsToStart, KilledOnce, ManyNumbers, NeverStarts, PythonNumbers

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.errors import ReadError, TransformError, WorkerError
from lit_async_data.host.resources.worker_tuner import WorkerTuner

pytestmark = pytest.mark.processes
ORDER = list(range(0, 100, 10))


def loader_of(source, **options):
    return AsyncLoader(source, {"batch_size": 10, "shuffle": False, "worker_kind": "process", "workers": 2, **options})


def in_worker_processes(loader):
    """Take passes until both worker processes read; returns their ids."""
    for _ in patience():
        found = {pid for batch in loader for pid in batch["process"].tolist()}
        workers = children(loader.machinery.engine.feed.pipeline.process_id)
        if len(workers) == 2 and found == workers:
            return workers
    raise AssertionError("the worker processes never started")


@pytest.mark.parametrize("shuffle", [False, "global"])
def test_several_processes_deliver_the_batches_of_one(shuffle):
    def passes(workers):
        with loader_of(PythonNumbers(), workers=workers, shuffle=shuffle, seed=4, return_indices=True) as loader:
            return [[(batch["y"].tolist(), batch["index"].tolist()) for batch in loader] for _ in range(4)]

    assert passes(3) == passes(1)


def test_worker_processes_read_the_rest_of_a_resumed_epoch():
    source = ManyNumbers()
    with loader_of(source, workers=0, worker_kind="thread") as loader:
        next(loader)
        place = loader.state_dict()
    with loader_of(source) as loader:
        loader.load_state_dict(place)
        for step, batch in enumerate(loader, 1):
            assert batch["y"].tolist() == list(range(10 * step, 10 * step + 10))
            if batch["process"][0].item() != loader.machinery.engine.feed.pipeline.process_id:
                return
    raise AssertionError("the worker processes never started")


def test_each_worker_has_a_process_and_all_end_with_the_loader():
    with loader_of(PythonNumbers()) as loader:
        assert loader.footprint.workers.processes == 2
        assert "a reader process with 2 worker processes" in str(loader.footprint.workers)
        workers = in_worker_processes(loader)
        reader = loader.machinery.engine.feed.pipeline.process_id
        names = {(Path("/proc") / str(pid) / "comm").read_text() for pid in workers}
        assert names == {"lit_data worker\n"}
        assert (Path("/proc") / str(reader) / "comm").read_text() == "lit_data reader\n"
    for pid in workers:
        wait_for_the_end_of(pid)


def test_worker_processes_end_with_a_reader_process_that_is_killed():
    with loader_of(PythonNumbers()) as loader:
        workers = in_worker_processes(loader)
        os.kill(loader.machinery.engine.feed.pipeline.process_id, signal.SIGKILL)
        for pid in workers:
            wait_for_the_end_of(pid)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            list(loader)


def test_one_worker_reads_in_the_reader_process_itself():
    with loader_of(PythonNumbers(), workers=1) as loader:
        assert loader.footprint.workers.processes == 0
        reader = {batch["process"][0].item() for batch in loader}
        assert reader == {loader.machinery.engine.feed.pipeline.process_id}


def test_an_error_comes_at_its_place_with_type_and_traceback():
    source = PythonNumbers(33, acts.fail_strangely)
    with loader_of(source) as loader:
        for _ in range(5):
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == ORDER[:3]
            with pytest.raises(ReadError, match=r"batch 3 of epoch \d+ .*UnpicklableError: odd and even") as caught:
                next(batches)
            assert "in fail_strangely" in "\n".join(caught.value.__notes__)
            assert [next(batches)["y"][0].item() for _ in range(6)] == ORDER[4:]
            assert next(batches, None) is None


def test_a_worker_that_is_killed_while_it_reads_is_an_error_and_its_batch_is_read_again(tmp_path):
    flag = tmp_path / "flag"
    with loader_of(KilledOnce(str(flag))) as loader:
        in_worker_processes(loader)
        flag.touch()
        seen, lost = [], []
        while flag.exists() or len(seen) < 100:
            try:
                seen.append(loader.next()["y"][0].item())
            except WorkerError as error:
                lost.append(str(error))
                assert seen[-1] == 20
        assert seen == [10 * ((number + seen[0] // 10) % 10) for number in range(len(seen))]
        assert all("was killed by SIGKILL" in text and "while it read batch 3 of" in text for text in lost)
        assert all("its first sample was 30, row 30 of KilledOnce" in text for text in lost)
        assert len(lost) == 1


def test_a_killed_worker_is_an_error_at_most_and_is_replaced():
    with loader_of(PythonNumbers()) as loader:
        workers = in_worker_processes(loader)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        seen, lost = [], []
        for _ in range(5 * len(ORDER)):
            try:
                seen.append(loader.next()["y"][0].item())
            except WorkerError as error:
                lost.append(str(error))
        assert all("was killed by SIGKILL" in text and "while it read batch" in text for text in lost)
        assert len(lost) <= 2  # if it was reading
        assert set(seen) == set(ORDER)
        assert not in_worker_processes(loader) & workers


def test_workers_that_are_killed_while_they_wait_are_named_once_and_cost_nothing(caplog):
    with loader_of(PythonNumbers()) as loader:
        workers = in_worker_processes(loader)
        pipeline = loader.machinery.engine.feed.pipeline
        while pipeline.ready < len(pipeline.pool):  # until all slots are filled, and nobody reads
            pipeline.poll(None)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            wait_for_the_end_of(pid)
        in_worker_processes(loader)
    for pid in workers:
        line = f"worker process {pid} was killed by SIGKILL (out of memory?); a new one starts when one is needed"
        assert caplog.messages.count(line) == 1


def test_workers_are_added_where_the_loop_waits(monkeypatch, caplog):
    caplog.set_level("INFO")
    counts = [2]
    monkeypatch.setattr(WorkerTuner, "settled", property(lambda tuner: not counts))
    monkeypatch.setattr(WorkerTuner, "waited", lambda tuner, *_: counts.pop())
    monkeypatch.setattr("lit_async_data.host.resources.workers.cores", lambda ranks=None: 4)
    with loader_of(PythonNumbers(), workers="auto", worker_kind="auto") as loader:
        assert str(loader.footprint.workers) == (
            "a reader process with 1 worker process, at most 4 (Python code reads the samples)"
        )
        assert [batch["y"][0].item() for batch in loader] == ORDER
        in_worker_processes(loader)
    assert "workers=auto: 2 workers now, since the loop waited for batches; workers=2 begins so" in caplog.text


def test_processes_that_never_start_are_given_up(caplog):
    with loader_of(NeverStarts("")) as loader:
        while "ImportError: no such library, while it started; the reader process reads itself from" not in caplog.text:
            assert [batch["y"][0].item() for batch in loader] == ORDER
        while children(loader.machinery.engine.feed.pipeline.process_id):
            list(loader)


def test_processes_that_can_not_start_again_leave_their_work_to_the_reader_process(tmp_path, caplog):
    flag = tmp_path / "flag"
    with loader_of(FailsToStart(str(flag))) as loader:
        in_worker_processes(loader)
        reader = loader.machinery.engine.feed.pipeline.process_id
        flag.touch()
        for pid in children(reader):
            with contextlib.suppress(ProcessLookupError):  # after three that fail to start, the other one ends
                os.kill(pid, signal.SIGKILL)
        seen, lost = [], 0
        while "the reader process reads itself from now on" not in caplog.text:
            try:
                seen.append(loader.next()["y"][0].item())
            except WorkerError:
                lost += 1
        assert lost <= 2
        assert seen == [10 * ((number + seen[0] // 10) % 10) for number in range(len(seen))]
        # Each process counts once, however many threads waited for it.
        failed = re.findall(r"worker process (\d+) failed: ImportError", caplog.text)
        assert len(failed) == len(set(failed)) >= 3
        assert {pid for batch in loader for pid in batch["process"].tolist()} == {reader}


def test_fewer_workers_end_processes_and_one_reads_in_the_reader_process():
    with loader_of(PythonNumbers()) as loader:
        workers = in_worker_processes(loader)
        pipeline = loader.machinery.engine.feed.pipeline
        pipeline.set_workers(1)
        while any(pid != pipeline.process_id for batch in loader for pid in batch["process"].tolist()):
            pass
        for pid in workers:
            wait_for_the_end_of(pid)


# -- transforms of samples that share compressed chunks ----------------------------------------------------------------


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


def mapped(pid):
    links = [os.readlink(link) for link in (Path("/proc") / str(pid) / "fd").iterdir()]
    return (Path("/proc") / str(pid) / "maps").read_text() + "\n".join(links)


def test_worker_processes_transform_what_the_reader_process_has_decoded(file, stored):
    def passes(**options):
        options = {"batch_size": 10, "shuffle": "chunk", "shuffle_chunks": 3, "seed": 2, **options}
        with AsyncLoader(stored, options, sample_transform=acts.with_process) as loader:
            found = [
                {key: value.tolist() for key, value in batch.items() if key != "process"}
                for _ in range(3)
                for batch in loader
            ]
            if options.get("workers") == 2:
                workers = in_worker_processes(loader)
                assert not any(str(file) in mapped(pid) for pid in workers)
                assert str(file) in mapped(loader.machinery.engine.feed.pipeline.process_id)
        return found

    assert passes(workers=2, worker_kind="process") == passes(workers=0)


@pytest.mark.parametrize("storage", [{"chunks": (16, 8, 8), "compression": "gzip"}, {}])
def test_an_error_of_a_transform_in_a_worker_process_names_its_sample(stored, file):
    """Once batches are read together, each is read again by itself: the others are delivered."""
    with AsyncLoader(
        stored,
        {"batch_size": 10, "shuffle": False, "worker_kind": "process", "workers": 2},
        sample_transform=acts.fail_at_33,
    ) as loader:
        by_workers = 0
        for _ in patience():  # while the processes start, and 20 when they read
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == ORDER[:3]
            with pytest.raises(TransformError, match=r"(?s)33.*ValueError: 33 is too much") as caught:
                next(batches)
            assert (caught.value.sample_id, caught.value.file) == (33, str(file))
            rest = [next(batches) for _ in range(6)]
            assert [batch["y"][0].item() for batch in rest] == ORDER[4:]
            reader = loader.machinery.engine.feed.pipeline.process_id
            by_workers += all(batch["process"][0].item() != reader for batch in rest)
            if by_workers == 20:
                break
        assert by_workers == 20
