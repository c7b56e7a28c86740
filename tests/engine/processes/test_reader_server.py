"""What a reader process does for one loader: its tasks, its share of each batch, what it logs, what it imports."""

import contextlib
import itertools
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from support.plans import plan_of
from support.processes import loader_of, running
from support.sources import reader_sources as acts
from support.sources.reader_sources import Deadly, Numbers

from lit_async_data import AsyncLoader, DatasetSource, HDF5Source, ManifestSource, SubsetSource
from lit_async_data.engine.processes.reader_server import ReaderServer
from lit_async_data.engine.processes.shared_memory import THREADS, ReportKind
from lit_async_data.errors import TransformError, WorkerError

pytestmark = pytest.mark.processes


# Two processes that share nothing; that share batches; and that read whole ones, since a hook takes those.
@pytest.mark.parametrize(
    ("workers", "chunk", "hooks"),
    [(2, 1, {}), (2, 4, {}), (2, 4, {"sample_transform": acts.kill_at_33, "batch_transform": acts.counted})],
)
def test_a_sample_that_ends_processes_is_read_around_and_never_read_again(workers, chunk, hooks, caplog):
    source = Deadly(-1 if "sample_transform" in hooks else 33, chunk)
    with loader_of(source, hooks, workers=workers, on_error="skip", max_bad=9) as loader:
        for _ in range(2):
            assert [row for batch in loader for row in batch["y"].tolist()] == [*range(33), *range(34, 100)]
        assert loader._wiring.quarantine.known == {33}
    assert sum("a new one takes its place" in line for line in caplog.messages) == 2


@pytest.fixture
def server(monkeypatch):
    """A server that starts no threads; ``server.sent`` is what it had reported when it was to start some."""
    sent, started = [], []
    monkeypatch.setattr(ReaderServer, "_start_threads", lambda server: started.extend(sent))
    reports = types.SimpleNamespace(send=lambda report: sent.append(report.kind))
    setup = types.SimpleNamespace(plan=loader_of(Numbers()).footprint, around=None)
    server = ReaderServer(setup, None, None, reports, process=0)
    server.sent = started
    return server


def test_a_process_says_that_it_takes_tasks_before_a_thread_takes_one(server):
    """1. A thread takes a task, which ends the process. 2. Nobody has said that it had begun: no task is blamed."""
    assert server.sent == [ReportKind.READY]


def test_no_thread_leaves_while_all_are_checked(server):
    """1. The main thread has the list. 2. A thread, one too many, leaves it and ends. 3. It is found dead."""
    server._threads = [types.SimpleNamespace(check=lambda: held.append(server._lock._is_owned()))]
    held = []
    server.check()
    assert held == [True]


def test_which_of_several_threads_ends_a_process_shows_as_one_of_them_reads_alone(caplog):
    with loader_of(Deadly(33, 1, reading="decoded"), workers=3, on_error="skip", max_bad=9) as loader:
        for _ in range(3):
            assert [row for batch in loader for row in batch["y"].tolist()] == [*range(33), *range(34, 100)]
        assert loader._wiring.quarantine.known == {33}
        assert running(loader)._memory.now[THREADS] == 3
    assert sum("a new one takes its place" in line for line in caplog.messages) == 2


def test_a_sample_of_a_dataset_that_reads_whole_batches_is_known_too():
    source, hooks = DatasetSource(acts.DeadlyItems()), {"batch_transform": acts.counted}
    with loader_of(source, hooks, workers=1, on_error="skip") as loader:
        assert [row for batch in loader for row in batch["y"].tolist()] == [*range(33), *range(34, 100)]


@pytest.mark.parametrize(("workers", "chunk"), [(1, 1), (2, 4)])
def test_a_sample_that_ends_processes_is_no_substitute(workers, chunk):
    plan = plan_of(length=100, batch_size=10, shuffle="none", seed=0, epoch=0)
    first, second = (plan.deck.substitute(33, attempt) for attempt in range(2))
    with loader_of(Deadly(first, chunk, {33}), workers=workers, on_error="substitute", max_bad=9) as loader:
        assert next(itertools.islice(loader, 3, None))["y"].tolist() == [30, 31, 32, second, *range(34, 40)]
        assert loader._wiring.quarantine.known == {33, first}


@pytest.mark.parametrize(
    ("act", "level", "wanted"),
    [
        (acts.warn, "WARNING", {("row 33 is odd", "WARNING")}),
        (acts.inform, "INFO", {("row 34 is even", "INFO")}),
        (acts.warn_oddly, "WARNING", {("row 33: why?", "WARNING")}),
    ],
)
def test_what_the_process_logs_is_logged_here_without_objects_that_cannot_be_sent(act, level, wanted, caplog):
    caplog.set_level(level, "lit_async_data")
    with loader_of(Numbers(33, act)) as loader:
        assert [batch["y"][0].item() for batch in loader] == list(range(0, 100, 10))
    # Once for each epoch that was begun.
    assert {(record.getMessage(), record.levelname) for record in caplog.records if record.name == "mine"} == wanted


def test_a_reader_thread_that_has_ended_is_an_error_soon():
    """Nobody in the reader process waits for a batch, and would find out."""
    failed = pytest.raises(WorkerError, match=r"reader process \d+ failed: WorkerError: .* its thread has ended")
    with loader_of(Numbers(64, acts.break_the_next_task), timeout_s=60) as loader, failed:
        list(loader)


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
def test_processes_share_each_batch_or_read_whole_ones_and_deliver_what_one_would(stored, options, hooks):
    def passes(**given):
        with loader_of(stored, hooks, seed=2, return_indices=True, **options, **given) as loader:
            shared = given["workers"] == 2 and "batch_transform" not in hooks
            assert loader.footprint.workers.shared == shared
            return [
                {key: value.tolist() for key, value in batch.items() if key != "process"}
                for _ in range(3)
                for batch in loader
            ]

    assert passes(workers=2) == passes(workers=0, worker_kind="thread")


def test_processes_that_read_whole_batches_have_room_for_decoded_chunks_each(stored):
    options = CHUNKS | {"return_indices": True}
    loaders = [loader_of(stored, BATCH, workers=workers, **options) for workers in (1, 2)]
    one, two = (loader.footprint.budget.decoded for loader in loaders)
    assert two >= 2 * one > 0


@pytest.mark.parametrize(("workers", "cache_bytes"), [(3, 0), (2, 2**20)])
def test_each_chunk_is_decoded_once_in_an_epoch_or_at_all_if_they_fit_into_the_cache(h5, workers, cache_bytes):
    rows, epochs = 3200, 3
    path = h5(x={"data": np.zeros((rows, 64), np.uint8), "chunks": (16, 64), "compression": "gzip"})
    options = {"shuffle": "chunk", "shuffle_chunks": 4, "workers": workers, "cache_bytes": cache_bytes}
    with contextlib.closing(HDF5Source(path, ["x"])) as source, loader_of(source, SAMPLE, **options) as loader:
        for _ in range(epochs):
            list(loader)
        decoded = loader.stats().read.decoded / (64 * rows)
    # The next epoch has been begun. If all processes decoded each chunk, it would be twice as much, or more.
    assert decoded == 1 if cache_bytes else decoded < epochs + 1


@pytest.mark.parametrize("storage", [{"chunks": (16, 8, 8), "compression": "gzip"}, {}])
def test_an_error_of_a_transform_names_its_sample(stored):
    """Once batches are read together, each is read again by itself: the others are delivered."""
    with loader_of(stored, {"sample_transform": acts.fail_at_33}, workers=2) as loader:
        for _ in range(20):
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == [0, 10, 20]
            with pytest.raises(TransformError, match=r"(?s)33.*ValueError: 33 is too much") as caught:
                next(batches)
            assert (caught.value.sample_id, caught.value.file) == (33, stored.paths[0])
            assert [next(batches)["y"][0].item() for _ in range(6)] == list(range(40, 100, 10))


# -- a reader process imports only what its source needs: torch takes a second, h5py a tenth of one --------------------


ROWS = 64


@pytest.fixture
def file(h5):
    images = np.random.default_rng(0).integers(0, 9, (ROWS, 6, 20), np.uint8)
    chunked = {"data": images, "chunks": (8, 6, 20)}
    packed = {"gzip": chunked | {"compression": "gzip"}, "nbit": chunked | {"scaleoffset": 0}}
    return h5(contiguous=images, chunked=chunked, **packed)


def libraries_of(source, options=()):
    """Which of the libraries that are slow to import a reader process has loaded after the first batches."""
    options = {"batch_size": 8, "worker_kind": "process", **dict(options)}
    with contextlib.closing(source), AsyncLoader(source, options) as loader:
        next(loader)  # may be read by a thread of this process
        batch = next(loader)
        maps = Path(f"/proc/{loader._run.engine.feed.pipeline._readers[0].channel.pid}/maps").read_text()
    if "y" in batch:
        assert (batch["x"].flatten(1) == batch["y"][:, None]).all()
    return {name for name in ("libtorch", "h5py") if f"/{name}" in maps}


@pytest.mark.parametrize(
    ("name", "shuffle", "needed"),
    [("contiguous", "global", set()), ("chunked", False, set()), ("gzip", "chunk", set()), ("nbit", False, {"h5py"})],
)
def test_hdf5_needs_h5py_only_where_libhdf5_decodes(file, name, shuffle, needed):
    source = HDF5Source(file, {"x": name})
    assert libraries_of(SubsetSource(source, np.arange(32)), {"shuffle": shuffle}) == needed


def test_a_reader_process_imports_nothing_that_only_builds_orders():
    program = "import lit_async_data.engine.processes.reader_server, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in found if "lit_async_data.sources.composed" in name}


def table_of(folder, names):
    table = folder / "t.csv"
    table.write_text("path,y\n" + "".join(f"{name},{number}\n" for number, name in enumerate(names)))
    return table


def test_arrays_of_a_table_need_neither_torch_nor_h5py(tmp_path):
    for number in range(16):
        np.save(tmp_path / f"{number}.npy", np.full((3, 4), number))
    source = ManifestSource(table_of(tmp_path, [f"{n}.npy" for n in range(16)]), {"x": "path", "y": "y"})
    assert libraries_of(source) == set()


@pytest.mark.parametrize(("size", "needed"), [(32, set()), (16, {"libtorch"})], ids=["as stored", "resized"])
def test_images_need_torch_only_to_be_resized(tmp_path, size, needed):
    image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
    pytest.importorskip("simplejpeg", reason="pip install 'lit-async-data[manifest]'")
    for number in range(16):
        image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(tmp_path / f"{number}.jpg")
    column = {"name": "path", "image_size": size}
    source = ManifestSource(table_of(tmp_path, [f"{n}.jpg" for n in range(16)]), {"x": column, "y": "y"})
    assert libraries_of(source) == needed
