"""What host hooks make of batches is the same however they are read."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sources.hooked_loaders import IMAGES, STEPS, WANTED, assert_same, copied, drawing, hooked, read
from support.sources.hooks import LENGTH, Rows, explode, wrong_at
from support.sources.reader_sources import Numbers

from lit_async_data import AsyncDataModule, ConcatSource, HDF5Source, Normalize, StorageLayout
from lit_async_data.errors import MemoryBudgetError, ReadError, TransformError
from lit_async_data.testing import ArraySource


@settings(max_examples=25)
@given(
    workers=st.integers(0, 3),
    queue_depth=st.integers(1, 5),
    depth=st.integers(0, 3),
    start=st.integers(0, STEPS - 1),
    epoch=st.integers(0, 1),
)
def test_workers_depths_and_earlier_passes_change_nothing(workers, queue_depth, depth, start, epoch):
    with drawing(workers=workers, queue_depth=queue_depth, depth=depth) as loader:
        for _ in range(start):  # a pass that is left
            next(loader)
        loader.set_epoch(epoch)
        again = [copied(batch) for batch in loader]
    assert_same(again, WANTED[epoch * STEPS : (epoch + 1) * STEPS])


@pytest.mark.processes
@pytest.mark.parametrize(("reading", "workers"), [("copied", 1), ("copied", 2), ("decoded", 3)])
def test_reader_processes_change_nothing(reading, workers):
    of = Rows({"x": IMAGES, "y": np.arange(LENGTH)}, reading)
    with drawing(of, workers=workers, worker_kind="process") as loader:
        assert loader.footprint.workers[:3] == ("process", workers, "worker_kind=process")
        one = drawing(of, workers=0).footprint.budget.scratch
        assert loader.footprint.budget.scratch == one * workers
        assert_same([copied(batch) for _ in range(2) for batch in loader], WANTED)


@pytest.mark.processes
def test_an_error_in_one_of_two_processes_is_that_of_its_batch():
    hooks = {"sample": wrong_at(9, explode), "batch": None}
    of = Rows({"y": np.arange(40)}, "copied")
    with drawing(of, **hooks, workers=2, worker_kind="process", shuffle=False) as loader:
        for _ in range(2):
            assert [loader.next()["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(TransformError, match=r"^sample_transform: failed on sample 9 \(row 9 of") as caught:
                loader.next()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert (caught.value.sample_id, caught.value.row) == (9, 9)
            assert len([loader.next() for _ in range(7)]) == 7


def test_one_thread_at_a_time_calls_hooks_while_others_read():
    """A worker is inside the hook until another has read, which shows that reading goes on; and nobody joins it."""
    inside, reads = [], threading.Semaphore(0)
    readers = set()

    class Counted(ArraySource):
        def read_into(self, samples, out):
            super().read_into(samples, out)
            if threading.current_thread() is not threading.main_thread():
                readers.add(threading.get_ident())
                reads.release()

    def hook(sample):
        inside.append(threading.get_ident())
        if waiting:
            waiting.pop()
            for _ in range(2):  # this worker's read and another's
                assert reads.acquire(timeout=60)
        assert set(inside) == {threading.get_ident()}
        inside.pop()

    waiting = []
    with drawing(Counted({"y": np.arange(200)}), sample=hook, batch=None, workers=3, shuffle=False) as loader:
        loader.spec
        waiting.append(True)
        assert [batch["y"].tolist() for batch in loader] == np.arange(200).reshape(50, 4).tolist()
    assert len(readers) > 1


@pytest.mark.processes
def test_lambdas_and_errors_travel_to_a_reader_process_and_back():
    offset = 100

    def hook(sample):
        if sample["y"] == 9:
            raise ZeroDivisionError("no light")
        sample["y"][...] += offset

    with drawing(sample=hook, batch=lambda batch: batch, worker_kind="auto", shuffle=False) as loader:
        assert loader.footprint.workers[:3] == ("process", 1, "Python code transforms the samples")
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[100, 101, 102, 103], [104, 105, 106, 107]]
        with pytest.raises(TransformError, match=r"^sample_transform: failed on sample 9 \(row 9 of") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [112, 113, 114, 115]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.processes
def test_a_reader_process_imports_no_torch_for_a_hook_of_numpy():
    def hook(sample):  # a function in a function travels by value, without this module, which imports torch
        import sys

        return {"torch": "torch" in sys.modules}

    with drawing(Numbers(), sample=hook, batch=None, worker_kind="process", workers=1) as loader:
        assert not any(batch["torch"].any() for batch in loader)


def test_a_device_transform_gets_what_the_host_hooks_return():
    found = read(drawing(device=Normalize(0.5, 0.5, scale="type", fields="x")))
    for batch, wanted in zip(found, WANTED, strict=True):
        assert torch.allclose(batch["x"], wanted["x"] / 127.5 - 1, atol=1e-6)


def test_fields_of_hdf5_files_come_with_the_axes_of_a_batch_and_errors_name_the_file(h5):
    images = np.arange(10 * 6 * 4 * 3, dtype=np.uint8).reshape(10, 6, 4, 3)
    paths = [h5(f"{n}.h5", x=images, y=np.arange(10)) for n in "ab"]
    fields = {"x": "x", "y": "y"}
    of = ConcatSource([HDF5Source(path, fields, layout={"x": "NHWC"}) for path in paths])

    def hook(sample):
        assert sample["x"].shape == (3, 6, 4)
        return {"x": sample["x"] if sample["x"][0, 0, 0] != images[7, 0, 0, 0] else sample["x"][:1]}

    with drawing(of, sample=hook, batch=None, workers=0, shuffle=False) as loader:
        assert np.array_equal(next(loader)["x"].numpy(), images[:4].transpose(0, 3, 1, 2))
        with pytest.raises(TransformError, match=rf"sample 7 \(row 7 of {paths[0]}\) has shape \(1, 6, 4\)"):
            next(loader)
    of.close()


class Panic(BaseException):
    """As libraries that are written in Rust raise it."""


def panics(sample):
    if sample["y"] == 33:
        raise Panic
    return sample


def test_a_hook_that_panics_fails_its_batch_and_no_other():
    of = ArraySource({"y": np.arange(100)}, parts={"a": 100}, chunks=StorageLayout(reading="copied"))
    with hooked(of, batch_size=10, workers=2, sample=panics) as loader:
        for _ in range(5):  # batches are read together after the first
            batches = iter(loader)
            assert [next(batches)["y"][0].item() for _ in range(3)] == [0, 10, 20]
            with pytest.raises(ReadError, match=r"batch 3 .*Panic"):
                next(batches)
            assert [next(batches)["y"][0].item() for _ in range(6)] == [40, 50, 60, 70, 80, 90]


def same(values):
    return values


def test_memory_for_the_transform_is_part_of_the_budget():
    def tiny(sample):
        return {"y": sample["y"]}

    of = ArraySource({"x": np.zeros((400, 3, 8, 6), np.uint8), "y": np.arange(400)})
    raw = 3 * 8 * 6 * 400
    with hooked(sample=tiny, batch_size=400, workers=3, of=of) as loader:
        budget = loader.footprint.budget
        assert raw <= budget.scratch / 3 <= raw + 8 * 400 + 1024
        assert " scratch" in str(budget)
        assert budget.total == 5 * budget.slot_bytes + budget.scratch
    limited = hooked(sample=tiny, batch_size=400, workers=3, of=of, memory_budget=raw)
    with pytest.raises(MemoryBudgetError, match="scratch need"):
        next(limited)
    dm = AsyncDataModule(
        train=of, loader={"batch_size": 400, "workers": 3, "memory_budget": raw}, sample_transform=tiny
    )
    with pytest.raises(MemoryBudgetError, match="scratch need"):
        dm.describe()
    with hooked(sample=tiny, batch=tiny, batch_size=400, workers=0, of=of) as loader:
        assert loader.footprint.budget.scratch > raw + 8 * 400


@pytest.mark.parametrize(
    ("reading", "workers", "hooks", "together"),
    [
        ("copied", 1, {}, True),
        ("copied", 1, {"sample": same}, True),
        ("decoded", 1, {"sample": same}, True),
        ("copied", 1, {"batch": same}, False),
        ("copied", 1, {"sample": same, "batch": same}, False),
        ("copied", 0, {}, True),
        ("copied", 0, {"sample": same}, False),  # the loop would wait for all of them
        ("python", 1, {"sample": same}, False),
    ],
)
def test_small_batches_are_read_together_unless_a_transform_takes_a_batch(reading, workers, hooks, together):
    of = ArraySource({"y": np.arange(100)}, parts={"a": 100}, chunks=StorageLayout(reading=reading))
    found = hooked(of, workers=workers, **hooks).footprint
    assert (found.layout.batches > 1) == together
    assert found.budget.scratch >= bool(hooks) * found.layout.batches * 4 * found.layout.spec.nbytes


def test_samples_that_are_large_before_the_transform_are_not_read_together():
    """Their memory is bounded as that of the slots is."""
    of = ArraySource({"x": np.zeros((8, 2**22), np.uint8)}, parts={"a": 8}, chunks=StorageLayout(reading="copied"))
    found = hooked(of, workers=1, sample=lambda sample: {"y": sample["x"][0]}).footprint
    assert (found.layout.batches, found.layout.spec.nbytes) == (1, 1)
