"""What is measured of loaders, and what is known of their readers."""

import contextlib
import time
import types

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

import lit_async_data as lad
from lit_async_data.engine.stats import Wait
from lit_async_data.engine.verdict.watch import Readers, Watch
from lit_async_data.sources.contract.storage_layout import StorageLayout
from lit_async_data.testing import ArraySource


def readers(loader):
    next(iter(loader))
    with contextlib.closing(loader):
        return Readers.of(loader, loader.stats())


class Streaming(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_a_dataset_with_an_index_could_be_read_by_a_source():
    mapped = readers(lad.prefetched(DataLoader(range(10), batch_size=2), device="cpu"))
    assert (mapped.kind, mapped.count, mapped.replaceable) == ("foreign", 0, True)
    assert not readers(lad.prefetched(DataLoader(Streaming(), batch_size=2), device="cpu")).replaceable
    assert readers(lad.prefetched(iter(range(10)), device="cpu")).count == -1


def test_decoding_in_vain_is_seen_in_the_plan_of_the_loader(h5, monkeypatch):
    monkeypatch.setattr("lit_async_data.sources.hdf5.readers.part_reader.RECENT_BYTES", 0)  # more than that is stored
    values = np.arange(256 * 50).reshape(256, 50)
    path = h5("z.h5", labels=np.arange(256), data={"data": values, "chunks": (8, 50), "compression": 1})
    for shuffle in ("global", "chunk"):
        options = {"batch_size": 16, "shuffle": shuffle, "workers": 1, "worker_kind": "thread", "cache_bytes": 0}
        with contextlib.closing(lad.HDF5Source(path)) as source:
            known = readers(lad.AsyncLoader(source, options))
        assert (known.in_vain, known.chosen, known.queue_depth) == (shuffle == "global", True, 4)


def test_what_auto_may_still_do_for_a_loader_is_known(monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.resources.workers.cores", lambda _: 3)
    source = ArraySource({"x": np.zeros(32)}, chunks=StorageLayout(reading="decoded"))
    for workers, most, known in ((2, 0, ("", 2)), ("auto", 0, ("tries", 1)), ("auto", 1, ("tried", 1))):
        with lad.AsyncLoader(source, {"batch_size": 8, "workers": workers, "worker_kind": "thread"}) as loader:
            next(loader)
            if most:
                loader._machinery.engine.feed.pipeline._tuner.stay(most)
            found = Readers.of(loader, loader.stats())
        assert (found.auto, found.count, found.by_auto) == (*known, 3)


@pytest.fixture
def now(monkeypatch):
    """The seconds of a clock that stands still, in a list."""
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    for module in ("engine.device.inline_queue", "engine.loader.async_loader", "engine.verdict.watch"):
        monkeypatch.setattr(f"lit_async_data.{module}.time", clock)
    return now


def test_the_seconds_of_a_transform_in_the_loop_are_no_wait(now):
    def slow(batch):
        now[0] += 0.5
        return batch

    source = ArraySource({"x": np.zeros(8)})
    with lad.AsyncLoader(source, {"batch_size": 4, "workers": 0}, device_transform=slow) as loader:
        watch = Watch([loader])
        assert len(list(loader)) == 2
        measured = watch.facts()
    assert (measured.waited, measured.transform_s) == (Wait(2, busy_s=1.0), 1.0)


def test_of_several_loaders_the_one_that_was_waited_for_longest_is_described(now, monkeypatch):
    def read_into(self, samples, out):
        now[0] += len(self)

    monkeypatch.setattr(ArraySource, "read_into", read_into)
    loaders = [lad.AsyncLoader(ArraySource({"x": np.zeros(n)}), {"batch_size": 1, "workers": 0}) for n in (2, 3, 2)]
    watch = Watch(loaders)
    for loader in loaders:
        list(loader)
    measured = watch.facts()
    assert measured.waited == Wait(3, wait_s=2 + 6 + 2, gap_s=2 + 3 + 2)
