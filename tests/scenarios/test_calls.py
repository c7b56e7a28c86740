"""How many Python calls one batch takes inside the package: each takes the GIL from the training loop."""

import collections
import contextlib
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from support.device.training_loop import pretend
from support.threads.waits import until
from waiting.on_device.fake_streams import FakeStreams

import lit_async_data
from lit_async_data import AsyncLoader, HDF5Source, ManifestSource, prefetched
from lit_async_data.testing import ArraySource

PACKAGE = Path(lit_async_data.__file__).parent
ROWS, BATCH, WARM_UP, BATCHES = 20_000, 256, 8, 32


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("calls") / "x.h5"
    with h5py.File(path, "w") as file:
        images = np.random.default_rng(0).integers(0, 9, (ROWS, 8, 8), np.uint8)
        file.create_dataset("gzip", data=images, chunks=(64, 8, 8), compression="gzip")
        file["contiguous"] = images
        file["label"] = np.arange(ROWS) % 7
    return path


def calls_of_batches(loader, settle=lambda: None):
    """Calls of functions of this package, in this thread, during `BATCHES` of ``next``, by module and function."""
    calls = collections.Counter()

    def profile(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            calls[f"{path.relative_to(PACKAGE)} {frame.f_code.co_name}"] += 1

    for number in range(WARM_UP + BATCHES):
        sys.setprofile(profile if number >= WARM_UP else None)
        try:
            next(loader)
        finally:
            sys.setprofile(None)
        settle()
    return calls


def check(calls, most):
    where = "\n".join(f"{count / BATCHES:7.1f} {name}" for name, count in calls.most_common(70))
    assert calls.total() / BATCHES <= most, f"{calls.total() / BATCHES:.0f} calls per batch:\n{where}"


# A batch of 256 gzip samples from 64 chunks takes 210 calls, with the decoding of chunks. It took 717 when each slab
# was looked up by a call of its own, and a cache that is off was asked for each.
@pytest.mark.parametrize(("field", "most"), [("gzip", 212), ("contiguous", 29)])
def test_a_batch_takes_few_calls(file, field, most, monkeypatch):
    # However slow the machine is, batches that are copied share their slots.
    monkeypatch.setattr("lit_async_data.engine.pipeline.pipeline.COALESCED_S", 1e9)
    options = {"batch_size": BATCH, "workers": 0, "shuffle_chunks": 64, "shuffle": "chunk"}
    source = HDF5Source(file, {"x": field, "y": "label"})
    with contextlib.closing(source), AsyncLoader(source, options) as loader:
        check(calls_of_batches(loader), most)


def test_a_batch_of_cropped_jpegs_takes_few_calls(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8))
    for number in range(64):
        image.save(tmp_path / f"{number}.jpg")
    table = pa.table({"path": [f"{number}.jpg" for number in range(64)] * 25, "y": list(range(1600))})
    crop = {"image_size": 32, "resize": "random_crop"}
    source = ManifestSource(table, {"x": "path", "y": "y"}, root=tmp_path, **crop)
    with AsyncLoader(source, {"batch_size": 32, "workers": 0}) as loader:
        check(calls_of_batches(loader), 1200)  # up to two reads of each file, as the page cache has it


# Of a process, each batch has a task and a report besides.
@pytest.mark.parametrize(
    ("on_device", "kind", "values", "most"),
    [
        (False, "thread", 16, 18),  # handed out as copies
        (False, "thread", 80, 19),  # lent
        (True, "thread", 80, 37),
        pytest.param(True, "process", 80, 50, marks=pytest.mark.processes),
    ],
)
@pytest.mark.usefixtures("one_batch_per_slot")
def test_a_batch_takes_few_calls_of_the_loops_thread(on_device, kind, values, most, monkeypatch):
    streams = FakeStreams("side")
    if on_device:
        pretend(monkeypatch, lambda device: streams)
    source = ArraySource({"x": np.zeros((20_000, values), np.float32), "y": np.arange(20_000)})
    with AsyncLoader(source, {"batch_size": BATCH, "workers": 1, "worker_kind": kind}) as loader:

        def settle():
            streams.synchronize()
            pipeline = loader._run.engine.feed.pipeline
            while kind == "process" and not pipeline.ready:
                pipeline.poll(None)
            until(pipeline, lambda: pipeline.ready)

        calls = calls_of_batches(loader, settle)
    if on_device:
        calls.pop("engine/pipeline/pipeline.py __init__")  # leases of the fake device
    check(calls, most)


def test_a_batch_of_somebody_elses_loader_takes_few_calls_of_the_loops_thread_on_its_way_to_a_device(monkeypatch):
    streams = FakeStreams("side")
    pretend(monkeypatch, lambda device: streams)
    batch = {"x": torch.zeros(BATCH, 80), "y": torch.arange(BATCH)}
    with prefetched([batch] * 100) as loader:

        def settle():
            streams.synchronize()
            reader = loader._run.engine.feed.reader
            until(reader, lambda: reader.wake() or reader.pulled)

        calls = calls_of_batches(iter(loader), settle)
    calls.pop("engine/pipeline/pipeline.py __init__")  # leases of the fake device
    check(calls, 40)
