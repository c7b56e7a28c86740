"""What host hooks make of batches: the same however they are read; and errors at their place in the order."""

import contextlib
import copy
import logging
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sources.hooks import LENGTH, Rows, aged, cropped, explode, mixed, older, wrong_at
from support.sources.reader_sources import Numbers

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    ConcatSource,
    HDF5Source,
    LoaderOptions,
    Normalize,
    SubsetSource,
)
from lit_async_data.engine.hooks.calls import BATCH_HOOK_KEYS, SAMPLE_HOOK_KEYS
from lit_async_data.engine.hooks.host_hooks import HostHooks
from lit_async_data.errors import ConfigError, TransformError
from lit_async_data.order.permutation import derived_key
from lit_async_data.testing import ArraySource

IMAGES = np.random.default_rng(0).integers(0, 255, (LENGTH, 3, 10, 8), np.uint8)


def source():
    return ArraySource({"x": IMAGES, "y": np.arange(LENGTH)})


def loader_of(of=None, *, sample=cropped, batch=mixed, device=None, depth=2, **options):
    chosen = {"batch_size": 4, "shuffle": True, "seed": 5, "return_indices": True, "worker_kind": "thread"} | options
    return AsyncLoader(
        of or source(),
        LoaderOptions(**chosen),
        device_depth=depth,
        sample_transform=sample,
        batch_transform=batch,
        device_transform=device,
    )


def copied(batch):
    return {key: value.clone() for key, value in batch.items()}


def read(loader, epochs=2):
    with loader:
        return [copied(batch) for _ in range(epochs) for batch in loader]


def assert_same(one, other):
    for left, right in zip(one, other, strict=True):
        assert list(left) == list(right)
        assert all(torch.equal(left[key], right[key]) for key in left)


WANTED = read(loader_of(workers=0))
STEPS = len(WANTED) // 2


@settings(max_examples=25)
@given(
    workers=st.integers(0, 3),
    queue_depth=st.integers(1, 5),
    depth=st.integers(0, 3),
    start=st.integers(0, STEPS - 1),
    epoch=st.integers(0, 1),
)
def test_workers_depths_and_earlier_passes_change_nothing(workers, queue_depth, depth, start, epoch):
    with loader_of(workers=workers, queue_depth=queue_depth, depth=depth) as loader:
        for _ in range(start):  # a pass that is left
            next(loader)
        loader.set_epoch(epoch)
        again = [copied(batch) for batch in loader]
    assert_same(again, WANTED[epoch * STEPS : (epoch + 1) * STEPS])


@pytest.mark.processes
@pytest.mark.parametrize(("reading", "workers"), [("copied", 1), ("copied", 2), ("decoded", 3)])
def test_reader_processes_change_nothing(reading, workers):
    of = Rows({"x": IMAGES, "y": np.arange(LENGTH)}, reading)
    with loader_of(of, workers=workers, worker_kind="process") as loader:
        assert loader.footprint.workers[:3] == ("process", workers, "worker_kind=process")
        one = loader_of(of, workers=0).footprint.budget.scratch
        assert loader.footprint.budget.scratch == one * workers
        assert_same([copied(batch) for _ in range(2) for batch in loader], WANTED)


@pytest.mark.processes
def test_an_error_in_one_of_two_processes_is_that_of_its_batch():
    hooks = {"sample": wrong_at(9, explode), "batch": None}
    of = Rows({"y": np.arange(40)}, "copied")
    with loader_of(of, **hooks, workers=2, worker_kind="process", shuffle=False) as loader:
        for _ in range(2):
            assert [loader.next()["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            with pytest.raises(TransformError, match=r"^sample_transform: failed on sample 9 \(row 9 of") as caught:
                loader.next()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert (caught.value.sample_id, caught.value.row) == (9, 9)
            assert len([loader.next() for _ in range(7)]) == 7


def test_numbers_go_by_seed_epoch_and_sample():
    """So they are the same for all batch sizes and ranks."""

    def rng_of(*words):
        return np.random.Generator(np.random.Philox(key=derived_key(*words)))

    def raw(sample, rng):
        return {"drawn": rng.integers(2**62)}

    def whole(batch, rng):
        return {**batch, "batch": rng.integers(2**62, size=len(batch["drawn"]))}

    options = {"batch_size": 4, "shuffle": True, "seed": 5, "return_indices": True}
    for rank in range(2):
        loader = AsyncLoader(source(), options, rank=rank, world_size=2, sample_transform=raw, batch_transform=whole)
        found = read(loader)
        for number, batch in enumerate(found):
            epoch, ids = number // (len(found) // 2), batch["index"].tolist()
            for value, each in zip(batch["drawn"].tolist(), ids, strict=True):
                assert value == rng_of(derived_key(5, epoch, SAMPLE_HOOK_KEYS), each).integers(2**62)
            assert batch["batch"][0] == rng_of(5, epoch, BATCH_HOOK_KEYS, ids[0]).integers(2**62)
        drawn = np.concatenate([batch["drawn"] for batch in found])
        assert len(np.unique(drawn)) == len(drawn)


def test_samples_of_a_subset_go_by_their_numbers_in_the_whole():
    whole = {int(i): int(d) for batch in WANTED[:STEPS] for i, d in zip(batch["index"], batch["drawn"], strict=True)}
    for batch in read(loader_of(SubsetSource(source(), range(11, LENGTH))), epochs=1):
        assert [whole[i] for i in batch["index"].tolist()] == batch["drawn"].tolist()


def test_there_are_no_random_numbers_where_the_options_say_so():
    assert {
        n for batch in read(loader_of(augment=False)) for key in ("drawn", "batch") for n in batch[key].tolist()
    } == {-1}


def test_evaluation_gets_no_random_numbers_and_stages_get_their_hooks():
    def marked(value):
        def mark(batch):
            return {**batch, "mark": np.full(len(batch["y"]), value)}

        return mark

    dm = AsyncDataModule(
        train=source(),
        val=source(),
        test=source(),
        loader={"batch_size": 4, "seed": 5, "return_indices": True, "workers": 0},
        sample_transform=cropped,
        batch_transform={"train": mixed, "eval": marked(1), "test": marked(2)},
    )
    with contextlib.closing(dm):
        assert list(dm.spec) == ["x", "y", "drawn", "batch"]
        assert_same([copied(batch) for batch in dm.train_dataloader()], WANTED[:STEPS])
        for loader, mark in ((dm.val_dataloader()[0], 1), (dm.test_dataloader()[0], 2)):
            batches = list(loader)
            assert {n for batch in batches for n in batch["mark"].tolist()} == {mark}
            assert {n for batch in batches for n in batch["drawn"].tolist()} == {-1}
        assert "x uint8 (3, 8, 6)" in dm.describe()


WRONG = {
    "error": (explode, r"failed on sample 9 \(row 9 of ArraySource\): ZeroDivisionError: no light"),
    "shape": (
        lambda s: {**s, "x": s["x"][:, 1:]},
        r"field 'x' of sample 9 \(row 9 .*\) has shape \(3, 9, 8\), but \(3, 10, 8\) .*: resize, crop or pad",
    ),
    "dtype": (
        lambda s: {**s, "x": s["x"] / 2},
        r"field 'x' of sample 9 .* has dtype float64, but uint8 .* one dtype for all samples, as .astype\('uint8'\)",
    ),
    "missing": (
        lambda s: {"x": s["x"]},
        r"returned the keys x for sample 9 \(.*\), but x, y for the first sample; .* same keys",
    ),
    "list": (list, r"returned a list for sample 9 \(row 9 of ArraySource\); return a dict"),
}


@pytest.mark.parametrize(("result", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_sample_is_the_error_of_its_batch_alone(result, message):
    with loader_of(sample=wrong_at(9, result), batch=None, workers=2, shuffle=False) as loader:
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(TransformError, match=f"^sample_transform: {message}") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [12, 13, 14, 15]
    error = caught.value
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", 9, 9, "ArraySource")
    assert error.__notes__ == ["in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)"]
    if result is explode:
        assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            explode,
            r"failed on the batch of samples 8, 9, 10, … \(4 in all\) \(the first is row 8 of ArraySource\): Zero",
        ),
        (
            lambda b: {**b, "x": b["x"][:, :1]},
            r"field 'x' of the batch .* has shape \(1, 10, 8\), but \(3, 10, 8\) for",
        ),
        (
            lambda b: {**b, "x": b["x"][:3]},
            r"field 'x' of the batch .* has shape \(3, 3, 10, 8\), but .* each of the 4",
        ),
        (lambda b: {**b, "y": b["y"] * 0.5}, r"field 'y' of the batch .* has dtype float64, but int64 for the first"),
        (lambda b: {"y": b["y"]}, r"returned the keys y for the batch .*, but x, y for the first sample"),
    ],
)
def test_a_wrong_batch_is_an_error_at_its_place(result, message):
    def hook(batch):
        return result(batch) if 9 in batch["y"] else batch

    with loader_of(sample=None, batch=hook, shuffle=False, workers=1) as loader:
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(TransformError, match=f"^batch_transform: {message}") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [12, 13, 14, 15]
    assert (caught.value.sample_id, caught.value.row) == (8, 8)


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
    with loader_of(Counted({"y": np.arange(200)}), sample=hook, batch=None, workers=3, shuffle=False) as loader:
        loader.spec
        waiting.append(True)
        assert [batch["y"].tolist() for batch in loader] == np.arange(200).reshape(50, 4).tolist()
    assert len(readers) > 1


def test_whoever_calls_the_hooks_of_a_loader_holds_their_lock_an_iterator_beside_too(monkeypatch):
    made, held = [], []
    of = HostHooks.of
    monkeypatch.setattr(HostHooks, "of", lambda *given: made.append(of(*given)) or made[-1])

    def hook(sample):
        held.append(made[0].lock.locked())

    with loader_of(ArraySource({"y": np.arange(8)}), sample=hook, batch=None, workers=0) as loader:
        loader.spec
        held.clear()
        passing = iter(loader)
        next(passing), next(iter(loader))
    assert set(held) == {True}
    assert not copy.deepcopy(made[0]).lock.locked()


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, value):
        return value


@pytest.mark.processes
@pytest.mark.parametrize("name", ["sample", "batch"])
def test_a_hook_that_cannot_be_pickled_stays_here_or_is_refused(caplog, name):
    caplog.set_level(logging.INFO)
    hooks = {"sample": None, "batch": None, name: Unpicklable()}
    with loader_of(**hooks, worker_kind="auto", shuffle=False) as loader:
        assert next(loader)["y"].tolist() == [0, 1, 2, 3]
        assert loader.footprint.workers.kind == "caller"
    why = f"{name}_transform cannot be pickled (TypeError: "
    assert f"ArraySource: no workers ({why}" in caplog.text
    assert f"no reader process can be used ({why}" in caplog.text
    with (
        loader_of(**hooks, worker_kind="process") as loader,
        pytest.raises(
            ConfigError, match=rf"^worker_kind: .*: {name}_transform cannot .* its lock; .*, or set worker_kind=thread"
        ),
    ):
        next(loader)


@pytest.mark.processes
def test_lambdas_and_errors_travel_to_a_reader_process_and_back():
    offset = 100

    def hook(sample):
        if sample["y"] == 9:
            raise ZeroDivisionError("no light")
        sample["y"][...] += offset

    with loader_of(sample=hook, batch=lambda batch: batch, worker_kind="auto", shuffle=False) as loader:
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

    with loader_of(Numbers(), sample=hook, batch=None, worker_kind="process", workers=1) as loader:
        assert not any(batch["torch"].any() for batch in loader)


def test_without_a_process_the_loop_calls_hooks_and_says_why(caplog):
    with loader_of(worker_kind="auto") as loader:
        assert_same([copied(batch) for _ in range(2) for batch in loader], WANTED)
        assert loader.footprint.workers[:3] == ("caller", 0, "a test of threads")
    assert "workers=auto reads each batch of ArraySource when it is asked for" in caplog.text
    assert pickle.loads(pickle.dumps(loader.spec)) == loader.spec


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "workers", "as_tuple"),
    [("thread", 1, False), ("thread", 1, True), ("process", 1, True), ("process", 2, False)],
)
def test_hooks_get_the_numbers_of_samples_in_the_whole_source(kind, workers, as_tuple):
    taken = np.arange(LENGTH - 1, 4, -2)
    of = SubsetSource(Rows({"y": np.arange(LENGTH)}, as_tuple=as_tuple), taken)
    with loader_of(of, sample=aged, batch=older, worker_kind=kind, workers=workers) as loader:
        keys = [*loader.spec]
        assert keys == ["y", "age", "older", "index"]
        batches = [dict(zip(keys, batch, strict=True)) if as_tuple else copied(batch) for batch in loader]
    index = torch.cat([batch["index"] for batch in batches])
    assert sorted(index.tolist()) == sorted(taken.tolist())
    for key, wanted in {"y": index, "age": 10 * index, "older": 10 * index + 1}.items():
        assert torch.equal(torch.cat([batch[key] for batch in batches]), wanted)


def test_without_return_indices_hooks_get_no_numbers():
    seen = []
    with loader_of(sample=lambda sample: seen.append("index" in sample), batch=None, return_indices=False) as loader:
        next(loader)
    assert set(seen) == {False}


def test_a_device_transform_gets_what_the_host_hooks_return():
    found = read(loader_of(device=Normalize(0.5, 0.5, scale="type", fields="x")))
    for batch, wanted in zip(found, WANTED, strict=True):
        assert torch.allclose(batch["x"], wanted["x"] / 127.5 - 1, atol=1e-6)


def test_batches_that_are_kept_never_change():
    with loader_of(workers=2, batch_size=2, queue_depth=1) as loader:
        kept = [(batch, copied(batch)) for _ in range(10) for batch in loader]
    for batch, at_first in kept:
        assert all(torch.equal(batch[key], at_first[key]) for key in batch)


def test_fields_of_hdf5_files_come_with_the_axes_of_a_batch_and_errors_name_the_file(h5):
    images = np.arange(10 * 6 * 4 * 3, dtype=np.uint8).reshape(10, 6, 4, 3)
    paths = [h5(f"{n}.h5", x=images, y=np.arange(10)) for n in "ab"]
    fields = {"x": "x", "y": "y"}
    of = ConcatSource([HDF5Source(path, fields, layout={"x": "NHWC"}) for path in paths])

    def hook(sample):
        assert sample["x"].shape == (3, 6, 4)
        return {"x": sample["x"] if sample["x"][0, 0, 0] != images[7, 0, 0, 0] else sample["x"][:1]}

    with loader_of(of, sample=hook, batch=None, workers=0, shuffle=False) as loader:
        assert np.array_equal(next(loader)["x"].numpy(), images[:4].transpose(0, 3, 1, 2))
        with pytest.raises(TransformError, match=rf"sample 7 \(row 7 of {paths[0]}\) has shape \(1, 6, 4\)"):
            next(loader)
    of.close()
