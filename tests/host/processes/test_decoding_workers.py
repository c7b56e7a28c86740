"""Worker processes share each batch: the order stays, each chunk has one reader, and faults stay where they are."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import h5py
import numpy as np
import pytest
from support.processes import children, patience, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import FailsToStart, LoggedSource, ManyShared, NeverStarts, SharedNumbers

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.errors import CorruptError, WorkerError
from lit_async_data.order.chunk_order import ChunkExtents

pytestmark = pytest.mark.processes


def loader_of(source, **options):
    return AsyncLoader(source, {"batch_size": 10, "worker_kind": "process", "workers": 2, "seed": 3, **options})


def pipeline_of(loader):
    return loader.machinery.engine.feed.pipeline


def passes_in_processes(loader, count=2):
    """Take passes until `count` worker processes share all batches; returns the batches of the next pass.

    One shared pass does not show that the next one is shared:
    1. A thread claims a pass and is suspended before it asks for processes.
    2. While these still start, other threads read the following passes in the reader process, a pass into each slot.
    3. The processes are ready, and read the first pass.
    """
    in_a_row = 0
    for _ in patience():
        batches = list(loader)
        readers = {pid for batch in batches for pid in batch["process"].tolist()}
        shared = len(readers) == count and readers == children(pipeline_of(loader).process_id)
        in_a_row = in_a_row + 1 if shared else 0
        if in_a_row > len(pipeline_of(loader).pool):
            return list(loader)
    raise AssertionError("the worker processes never started")


def test_they_share_each_batch():
    with loader_of(SharedNumbers(), shuffle=False) as loader:
        assert str(loader.footprint.workers) == "a reader process with 2 worker processes (worker_kind=process)"
        for batch in passes_in_processes(loader):
            first, *_, last = batch["process"].tolist()
            assert batch["process"].tolist() == [first] * 5 + [last] * 5
            assert first != last


@pytest.mark.parametrize("shuffle", ["none", "chunk", "global"])
def test_one_of_them_reads_a_chunk(shuffle):
    source = SharedNumbers(rows=8)
    chunks = ChunkExtents(source.chunks.runs)
    with loader_of(source, shuffle=shuffle, shuffle_chunks=4, workers=3) as loader:
        batches = passes_in_processes(loader, 3)
        readers = {}
        for batch in batches:
            numbers = chunks.chunks_of(batch["y"].numpy()).tolist()
            for chunk, process in zip(numbers, batch["process"].tolist(), strict=True):
                readers.setdefault(chunk, set()).add(process)
        assert len(readers) == 13
        assert all(len(found) == 1 for found in readers.values())


@pytest.fixture(params=["one file", "two files"])
def files(request, tmp_path):
    """Samples in small chunks, of which the last of each file is short; and labels in larger ones."""
    paths = [tmp_path / f"{number}.h5" for number in range(2 if request.param == "two files" else 1)]
    for number, path in enumerate(paths):
        rng = np.random.default_rng(number)
        with h5py.File(path, "w") as file:
            images = rng.integers(0, 99, (333, 4, 3, 3), np.uint8)
            file.create_dataset("x", data=images, chunks=(7, 4, 3, 3), compression="gzip")
            file.create_dataset("alone", data=images[:, :1, 0, 0], chunks=(1, 1), compression="gzip")
            file.create_dataset("y", data=1000 * number + np.arange(333), chunks=(20,), compression="gzip")
    return [str(path) for path in paths]


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["x", "y"], {"shuffle": "chunk", "shuffle_chunks": 5}),
        (["x", "y"], {"shuffle": "chunk", "shuffle_chunks": 5, "balance": "y", "epoch_size": 200}),
        (["x", "y"], {"shuffle": "none", "drop_last": True}),
        (["x", "y"], {"shuffle": "global"}),
        (["alone"], {"shuffle": "global"}),
        (["alone"], {"shuffle": "none"}),
    ],
    ids=str,
)
def test_they_deliver_the_batches_of_one_loop(files, names, options, tmp_path):
    options = {"batch_size": 6, "return_indices": True, "seed": 5, **options}
    workers = 1 + len(files)
    log = tmp_path / "readers"
    log.touch()

    def values(loader):
        return [[value.tolist() for value in batch] for batch in loader]

    source = LoggedSource(files, names, index_cache=False, log=str(log))
    given = options | {"workers": workers, "worker_kind": "process"}
    passes, shared = [], 0
    with contextlib.closing(source), AsyncLoader(source, given, rank=1, world_size=2) as loader:
        while shared < 3:
            passes.append(values(loader))
            readers = set(map(int, log.read_text().split()))
            log.write_text("")
            shared += len(readers) == workers and pipeline_of(loader).process_id not in readers
    source = HDF5Source(files, names, index_cache=False)
    alone = AsyncLoader(source, options | {"workers": 0}, rank=1, world_size=2)
    with contextlib.closing(source), alone as loader:
        assert passes == [values(loader) for _ in passes]


def test_each_chunk_is_decoded_once_an_epoch(files):
    """The budget has room for one batch in a slot: several together would decode few chunks ahead."""
    source = HDF5Source(files, ["x"], index_cache=False)
    options = {"shuffle": "chunk", "shuffle_chunks": 5, "memory_budget": 2**14}
    with contextlib.closing(source), loader_of(source, **options) as loader:
        assert loader.footprint.layout.batches == 1
        next(loader)
        while len(children(pipeline_of(loader).process_id)) < 2:
            list(loader)
        for _ in range(20):
            list(loader)
        before = loader.stats().read.stages.decode.bytes
        for _ in range(40):
            list(loader)
        decoded = loader.stats().read.stages.decode.bytes - before
    # The last chunk of each file is short, and is decoded as a whole one.
    assert decoded <= 1.2 * 40 * len(source) * source.spec.nbytes


def test_they_read_the_rest_of_a_resumed_epoch():
    source = ManyShared()
    with loader_of(source, workers=0, worker_kind="thread", shuffle=False) as loader:
        next(loader)
        place = loader.state_dict()
    with loader_of(source, shuffle=False) as loader:
        loader.load_state_dict(place)
        shared = 0
        for step, batch in enumerate(loader, 1):
            assert batch["y"].tolist() == list(range(10 * step, 10 * step + 10))
            shared += pipeline_of(loader).process_id not in batch["process"].tolist()
            if shared == 20:
                return
    raise AssertionError("the worker processes never started")


@pytest.mark.parametrize("reading", ["python", "locked"])
def test_processes_that_never_start_are_given_up(reading, caplog):
    with loader_of(NeverStarts("", reading), shuffle=False) as loader:
        while "ImportError: no such library, while it started; the reader process reads itself from" not in caplog.text:
            assert [batch["y"][0].item() for batch in loader] == list(range(0, 100, 10))
        while children(pipeline_of(loader).process_id):
            list(loader)


@pytest.mark.parametrize("reading", ["python", "locked"])
def test_processes_that_can_not_start_again_leave_their_work_to_the_reader_process(reading, tmp_path, caplog):
    flag = tmp_path / "flag"
    with loader_of(FailsToStart(str(flag), reading), shuffle=False) as loader:
        passes_in_processes(loader)
        flag.touch()
        for pid in children(pipeline_of(loader).process_id):
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
        batches = list(loader)
        assert {pid for batch in batches for pid in batch["process"].tolist()} == {pipeline_of(loader).process_id}


def test_an_error_comes_at_its_place_with_its_sample():
    """The batches that were to be read together with it are read one by one, each to its rows of the slot."""
    with loader_of(SharedNumbers(33, acts.damage), shuffle=False) as loader:
        passes, shared = 0, False
        while not shared or passes < 5:
            batches, readers = iter(loader), set()
            for first in (0, 10, 20, None, 40, 50, 60, 70, 80, 90):
                if first is None:
                    with pytest.raises(CorruptError, match="row 33: bad") as caught:
                        next(batches)
                    assert caught.value.sample_id == 33
                    continue
                batch = next(batches)
                assert batch["y"].tolist() == list(range(first, first + 10))
                readers.update(batch["process"].tolist())
            passes, shared = passes + 1, pipeline_of(loader).process_id not in readers


def test_a_killed_one_costs_no_more_than_what_was_read_and_is_replaced():
    with loader_of(SharedNumbers(), shuffle=False) as loader:
        killed = {pid for batch in passes_in_processes(loader) for pid in batch["process"].tolist()}
        os.kill(min(killed), signal.SIGKILL)
        seen, lost = [], []
        for _ in range(500):
            try:
                seen.append(loader.next()["y"][0].item())
            except WorkerError as error:
                lost.append(str(error))
        assert [text for text in lost if "was killed by SIGKILL" not in text or "while it read" not in text] == []
        assert len(lost) <= 1  # batches that it had not begun to read are read by another one
        assert set(seen) == set(range(0, 100, 10))
        readers = {pid for batch in passes_in_processes(loader) for pid in batch["process"].tolist()}
        assert min(killed) not in readers
        assert max(killed) in readers


def test_one_that_is_killed_while_it_reads_ahead_costs_nothing(tmp_path, caplog):
    flag = tmp_path / "flag"
    source = SharedNumbers(rows=8, act_ahead=acts.kill, flag=str(flag))
    with loader_of(source, shuffle="chunk", shuffle_chunks=2) as loader:
        passes_in_processes(loader)
        flag.touch()
        while flag.exists():
            list(loader)
        passes_in_processes(loader)
    assert "was killed by SIGKILL (out of memory?); a new one starts when one is needed" in caplog.text
    assert "bug" not in caplog.text


def test_fewer_workers_end_processes_and_one_reads_in_the_reader_process():
    with loader_of(SharedNumbers(), workers=3, shuffle=False) as loader:
        passes_in_processes(loader, 3)
        pipeline = pipeline_of(loader)
        before = children(pipeline.process_id)
        pipeline.set_workers(2)
        list(loader)
        passes_in_processes(loader, 2)
        (ended,) = before - children(pipeline.process_id)
        wait_for_the_end_of(ended)
        pipeline.set_workers(1)
        while any(pid != pipeline.process_id for batch in loader for pid in batch["process"].tolist()):
            pass
        for pid in before:
            wait_for_the_end_of(pid)


def test_they_end_with_the_loader_and_with_a_reader_process_that_is_killed():
    with loader_of(SharedNumbers()) as loader:
        passes_in_processes(loader)
        workers = children(pipeline_of(loader).process_id)
    for pid in workers:
        wait_for_the_end_of(pid)
    with loader_of(SharedNumbers()) as loader:
        passes_in_processes(loader)
        workers = children(pipeline_of(loader).process_id)
        os.kill(pipeline_of(loader).process_id, signal.SIGKILL)
        for pid in workers:
            wait_for_the_end_of(pid)
