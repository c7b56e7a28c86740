"""Chunks are decoded once, by one thread, and cached within their budget."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
import types

import h5py
import numpy as np
import pytest
from support.files.stored import stored_spans
from support.sources.slabs import cached

from lit_async_data import AsyncLoader, HDF5Source, system
from lit_async_data.errors import CorruptError, MemoryBudgetError
from lit_async_data.host.ahead import Ahead
from lit_async_data.order.plan import BatchIndex
from lit_async_data.sources.contract.reservations import Owner
from lit_async_data.sources.hdf5.readers import decode_memory as holding
from lit_async_data.sources.hdf5.readers.cache import persistent_cache as decoded
from lit_async_data.sources.hdf5.readers.cache.chunk_cache import DecodedChunkCache
from lit_async_data.sources.hdf5.readers.cache.persistent_cache import ByteBudget, PersistentChunkCache
from lit_async_data.sources.hdf5.storage.codecs import FilterPipeline
from lit_async_data.threads import Gate

SLAB = np.arange(4, dtype=np.int64)
LOADER, ANOTHER = Owner(), Owner()


def fetched(slabs, key, *, wait=True):
    made = []
    slab = slabs.get(key, lambda: made.append(key) or SLAB, wait=wait)
    return slab is not None, bool(made)


# -- recent slabs ------------------------------------------------------------------------------------------------------


def test_the_slab_decoded_first_is_evicted_first_however_often_it_was_used():
    slabs = DecodedChunkCache()
    slabs.set_room(LOADER, 2 * SLAB.nbytes)
    assert [fetched(slabs, key)[1] for key in (1, 2, 1, 1, 3)] == [True, True, False, False, True]
    assert [fetched(slabs, key)[1] for key in (2, 3, 1)] == [False, False, True]


def test_cached_slabs_are_looked_up_at_once_and_leave_one_by_one():
    slabs = DecodedChunkCache()
    slabs.set_room(LOADER, 2 * SLAB.nbytes)
    for number in (1, 2):
        slabs.get(("x", number), lambda number=number: SLAB * number, wait=True)
    groups = [(number, np.array([number])) for number in (2, 5, 1)]
    cached, others = slabs.cached("x", groups)
    assert others == groups[1:2]
    assert [(number, slab.tolist(), where.tolist()) for number, slab, where in iter(cached.popleft, None)] == [
        (2, (SLAB * 2).tolist(), [2]),
        (1, SLAB.tolist(), [1]),
    ]
    assert not cached
    assert slabs.cached("y", groups)[1] == groups


def test_without_room_nothing_is_cached():
    slabs = DecodedChunkCache()
    assert [fetched(slabs, 1)[1] for _ in range(2)] == [True, True]


def test_turns_whose_slabs_have_all_moved_on_leave_nothing():
    """As with shuffle=chunk when all chunks fit: each turn finds the slabs of the last one, and evicts none."""
    slabs = DecodedChunkCache()
    slabs.set_room(LOADER, 2 * SLAB.nbytes)
    for number in (1, 2):
        slabs.get(("x", number), lambda: SLAB, wait=True, turn=(0, 0))
    for turn in range(1, 50):
        assert not len(slabs.missing("x", np.array([1, 2]), (0, turn)))
    assert [len(of_turn) for of_turn in slabs._order.values()] == [2]
    slabs.clear()
    assert not any(cached(slabs, ("x", number)) for number in (1, 2))
    assert not slabs._order


def test_removing_room_evicts_slabs():
    slabs = DecodedChunkCache()
    slabs.set_room(LOADER, 2 * SLAB.nbytes)
    for key in (1, 2):
        fetched(slabs, key)
    slabs.set_room(LOADER, SLAB.nbytes)
    assert [fetched(slabs, key)[1] for key in (2, 1)] == [False, True]


class Slow:
    """A thread in the middle of decoding."""

    def __init__(self, slabs, error=None):
        self.begun, self.go = threading.Event(), threading.Event()
        self._error = error
        self.thread = threading.Thread(target=self._run, args=(slabs,))
        self.thread.start()
        assert self.begun.wait(10)

    def _run(self, slabs):
        def decode():
            self.begun.set()
            assert self.go.wait(10)
            if self._error:
                raise self._error
            return SLAB

        with contextlib.suppress(CorruptError):
            slabs.get(1, decode, wait=True)

    def finish(self):
        self.go.set()
        self.thread.join(10)


def test_a_slab_that_another_thread_is_decoding_is_not_decoded_again():
    slabs = DecodedChunkCache()
    slabs.set_room(LOADER, SLAB.nbytes)
    slow = Slow(slabs)
    assert fetched(slabs, 1, wait=False) == (False, False)
    slow.finish()
    assert fetched(slabs, 1) == (True, False)


def test_a_thread_that_waits_for_a_failed_decoding_decodes_itself(monkeypatch):
    """1. A decodes. 2. B waits for it. 3. A fails and raises. 4. B wakes, finds nothing, and decodes itself."""
    slabs = DecodedChunkCache()
    slabs.set_room(LOADER, SLAB.nbytes)
    slow = Slow(slabs, CorruptError("bad"))
    waits = threading.Event()
    wait = Gate.wait
    monkeypatch.setattr(Gate, "wait", lambda gate, timeout: waits.set() or wait(gate, timeout))
    got = []
    waiter = threading.Thread(target=lambda: got.append(fetched(slabs, 1)))
    waiter.start()
    assert waits.wait(10)
    slow.finish()
    waiter.join(10)
    assert got == [(True, True)]


# -- kept slabs --------------------------------------------------------------------------------------------------------


def budget(nbytes):
    room = ByteBudget()
    room.set_room(LOADER, nbytes)
    return room


def kept_slabs(room):
    return PersistentChunkCache(10, 4, (2,), np.dtype("i4"), room)


def test_persistent_slabs_stay_and_are_read_right():
    values = np.arange(20, dtype="i4").reshape(10, 2)
    kept = kept_slabs(budget(2 * 4 * 8))
    for number in (2, 0, 1, 0):
        kept.put(number, values[4 * number : 4 * number + 4])
    rows, out = np.array([9, 3, 5, 8, 0]), np.zeros((5, 2), "i4")
    assert kept.copy_rows(rows, out, lambda taken, _: taken).tolist() == [2]
    assert out.tolist() == [[18, 19], [6, 7], [0, 0], [16, 17], [0, 1]]
    assert kept.copy_rows(rows[[0, 1]], out[:2], lambda taken, _: taken) is None


def test_the_byte_budget_is_shared_and_given_back():
    room = budget(3 * 4 * 8)
    first, second = kept_slabs(room), kept_slabs(room)
    slab = np.ones((4, 2), "i4")
    for number in (0, 1, 2):
        first.put(number, slab)
        second.put(number, slab)
    out = np.empty((3, 2), "i4")
    rows = np.array([0, 4, 8])
    missing = [kept.copy_rows(rows, out, lambda taken, _: taken).tolist() for kept in (first, second)]
    assert missing == [[2], [1, 2]]
    first.clear()
    second.put(1, slab)
    assert second.copy_rows(rows, out, lambda taken, _: taken).tolist() == [2]


def test_a_table_that_is_cleared_while_it_is_read_is_read_right(monkeypatch):
    """1. A looks up slab 1. 2. The cache is cleared, and slab 2 takes its place. 3. A copies."""
    kept = kept_slabs(budget(4 * 8))
    kept.put(1, np.full((4, 2), 1, "i4"))
    divmod_ = np.divmod

    def meanwhile(rows, size):
        monkeypatch.setattr(np, "divmod", divmod_)
        kept.clear()
        kept.put(2, np.full((4, 2), 2, "i4"))
        return divmod_(rows, size)

    monkeypatch.setattr(np, "divmod", meanwhile)
    out = np.zeros((2, 2), "i4")
    assert kept.copy_rows(np.array([4, 8]), out, lambda taken, _: taken).tolist() == [1]
    assert out.tolist() == [[1, 1], [0, 0]]


def huge_slabs(room):
    """Of a dataset of 64 GiB, in slabs of 64 KiB."""
    return PersistentChunkCache(2**20, 1, (2**16,), np.dtype("u1"), room)


def mapped(monkeypatch, fails=False):
    """Records the size of each anonymous map; each fails if ``fails``."""
    made = []

    def mapping(length, flags=0):
        made.append(length)
        if fails:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return system.private_memory(length, flags)

    # In this module only: slots are mapped too.
    monkeypatch.setattr(decoded, "system", types.SimpleNamespace(**vars(system) | {"private_memory": mapping}))
    return made


def test_only_what_the_budget_holds_is_mapped(monkeypatch):
    made = mapped(monkeypatch)
    kept = huge_slabs(budget(3 * 2**16 + 5))
    for number in (2**19, 7, 8, 9):
        kept.put(number, np.full((1, 2**16), number % 251, np.uint8))
    assert made == [3 * 2**16]
    out = np.zeros((4, 2**16), np.uint8)
    assert kept.copy_rows(np.array([9, 8, 7, 2**19]), out, lambda taken, _: taken).tolist() == [0]
    assert out[1:, 0].tolist() == [8, 7, 2**19 % 251]


def test_room_that_another_loader_adds_later_is_used(monkeypatch):
    made = mapped(monkeypatch)
    room = budget(2**16)
    kept = huge_slabs(room)
    kept.put(1, np.full((1, 2**16), 1, np.uint8))
    room.set_room(ANOTHER, 2**16)
    for number in (2, 1):
        kept.put(number, np.full((1, 2**16), number, np.uint8))
    out = np.zeros((2, 2**16), np.uint8)
    assert kept.copy_rows(np.array([1, 2]), out, lambda taken, _: taken) is None
    assert out[:, 0].tolist() == [1, 2]
    assert made == [2**16, 2**17]
    assert room.taken == room.limit
    kept.clear()
    assert room.limit - room.taken == 2**17


def test_where_nothing_can_be_mapped_there_is_no_cache_and_one_warning(file, monkeypatch, caplog):
    source = HDF5Source(file)
    made = mapped(monkeypatch, fails=True)
    found = epochs(source, 2, shuffle="none", workers=1, cache_bytes=600 * 50 * 4)
    assert [sorted(epoch) for epoch in found] == [list(range(600))] * 2
    assert made == [600 * 50 * 4]
    (said,) = [record.message for record in caplog.records if "cannot be mapped" in record.message]
    assert said == (
        "cache of decoded chunks: 120000 bytes cannot be mapped ([Errno 12] Cannot allocate memory), so no more "
        "of this dataset is cached; raise the limit on memory (ulimit -v), or set a smaller cache_bytes"
    )


# -- through the loader ------------------------------------------------------------------------------------------------


@pytest.fixture
def decodings(monkeypatch):
    """The chunks that were decoded, as they are stored."""
    count = []
    once = FilterPipeline.decode
    monkeypatch.setattr(FilterPipeline, "decode", lambda *args: count.append(bytes(args[1])) or once(*args))
    return count


@pytest.fixture
def file(tmp_path):
    """600 samples in 60 chunks, and labels in chunks of their own."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as made:
        values = np.arange(600 * 50, dtype=np.int32).reshape(600, 50)
        made.create_dataset("data", data=values, chunks=(10, 50), compression="gzip")
        made["labels"] = np.arange(600)
    return str(path)


def epochs(source, number, **options):
    """The samples of each epoch, in order and checked."""
    found = []
    with AsyncLoader(source, {"batch_size": 16, **options}) as loader:
        for _ in range(number):
            epoch = []
            for data, labels in loader:
                assert (data[:, 0] == labels * 50).all()
                assert (data[:, -1] == labels * 50 + 49).all()
                epoch += labels.tolist()
            found.append(epoch)
    source.close()
    return found


@pytest.mark.usefixtures("one_batch_per_slot")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffle_by_chunks_decodes_each_once_per_epoch(file, decodings, workers):
    source = HDF5Source(file)
    decodings.clear()
    first, second = epochs(source, 2, shuffle="chunk", shuffle_chunks=8, workers=workers)
    assert sorted(first) == sorted(second) == list(range(600))
    assert first != second
    # Of the second epoch the first may find some that the end of the first has left, and what was read ahead of a third
    # was decoded too: 5 slots of 16 samples out of 80 a group, and the group behind it.
    assert 2 * 60 - 16 <= len(decodings) <= 2 * 60 + (16 if workers else 0)


def test_a_slow_worker_costs_no_decoding(file, decodings):
    source = HDF5Source(file)
    give_back = source.reserve(16, 0)
    with AsyncLoader(source, {"batch_size": 16, "shuffle": "chunk", "shuffle_chunks": 8, "workers": 1}) as loader:
        ahead = Ahead(source, 8)
        decodings.clear()
        # Five steps make a group. Of group 1 a batch has been read, while one of group 0 still is: nothing of group 2.
        ahead(loader.schedule, [BatchIndex(0, 5)], BatchIndex(0, 4))
        assert decodings == []
        ahead(loader.schedule, [BatchIndex(0, 4)], BatchIndex(0, 7))
        assert len(decodings) == len(set(decodings)) >= 2
    give_back()
    source.close()


def test_each_chunk_of_each_field_is_decoded_once_whatever_its_size(h5, decodings):
    values = np.arange(600 * 50, dtype=np.int32).reshape(600, 50)
    path = h5(
        data={"data": values, "chunks": (10, 50), "compression": "gzip"},
        labels={"data": np.arange(600), "chunks": (150,), "compression": "gzip"},
        mask={"data": -values[:, :20], "chunks": (70, 20), "compression": "gzip"},
    )
    source = HDF5Source(path, ["data", "labels", "mask"])
    decodings.clear()
    options = {"batch_size": 16, "shuffle": "chunk", "shuffle_chunks": 8, "workers": 0}
    with AsyncLoader(source, options) as loader:
        for data, labels, mask in loader:
            assert (data[:, 0] == labels * 50).all()
            assert (mask == -data[:, :20]).all()
    source.close()
    assert len(decodings) == len(set(decodings)) == 60 + 4 + 9


def test_batches_that_are_read_together_cost_no_decoding(file, decodings, monkeypatch):
    """60 chunks are decoded, and at most the first 8 of the next epoch; a few twice, by slow workers.

    If each slot held 32 batches, 40 more would be decoded: four workers would hold more than two groups of chunks.
    """
    monkeypatch.setattr("lit_async_data.host.pipeline.thread_pipeline.COALESCED_S", 1e9)
    options = {"batch_size": 4, "shuffle": "chunk", "shuffle_chunks": 8, "workers": 4}
    decodings.clear()
    for _ in range(10):
        with contextlib.closing(HDF5Source(file)) as source, AsyncLoader(source, options) as loader:
            loader.steps_wanted = lambda: (None, 0)  # nothing is read of a second epoch
            assert loader.footprint.layout.batches > 1
            assert sorted(itertools.chain.from_iterable(labels.tolist() for _, labels in loader)) == list(range(600))
    assert len(decodings) <= 10 * 75


@pytest.mark.parametrize("shuffle", ["global", "chunk", "none"])
def test_a_dataset_that_fits_the_cache_is_decoded_once_ever(file, decodings, shuffle):
    source = HDF5Source(file)
    decodings.clear()
    found = epochs(source, 3, shuffle=shuffle, workers=1, cache_bytes=600 * 50 * 4)
    assert [sorted(epoch) for epoch in found] == [list(range(600))] * 3
    assert len(decodings) == 60


def test_a_global_shuffle_decodes_nothing_beforehand(file, decodings):
    source = HDF5Source(file)
    decodings.clear()
    with AsyncLoader(source, {"batch_size": 600, "shuffle": "global", "workers": 1, "queue_depth": 1}) as loader:
        next(loader)
    # 600 samples are all 60 chunks; two batches were read at most when the loader was closed, and one was begun.
    assert len(decodings) <= 3 * 60
    source.close()


@pytest.mark.usefixtures("one_batch_per_slot")
def test_in_order_the_next_chunk_is_decoded_while_one_is_read(file, decodings):
    source = HDF5Source(file)
    with AsyncLoader(source, {"batch_size": 2, "shuffle": "none", "workers": 1, "queue_depth": 1}) as loader:
        decodings.clear()
        for _ in range(5):
            next(loader)
    # 10 samples are one chunk; 4 slots and the next chunk were read ahead at most.
    assert 2 <= len(decodings) <= 3
    source.close()


def test_each_chunk_is_decoded_about_once_by_many_workers(tmp_path, decodings):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as made:
        values = np.arange(6400 * 5, dtype=np.int32).reshape(6400, 5)
        made.create_dataset("data", data=values, chunks=(4, 5), compression="gzip")
    source = HDF5Source(path, ["data"])
    decodings.clear()
    with AsyncLoader(source, {"batch_size": 256, "shuffle_chunks": 64, "workers": 4}) as loader:
        for _ in range(4):
            assert sum(len(batch) for (batch,) in loader) == 6400
    source.close()
    assert len(decodings) <= 1.5 * 5 * 1600


def test_a_cache_is_given_back_with_its_loader_unless_another_wants_it(file, decodings):
    source = HDF5Source(file)
    options = {"batch_size": 16, "shuffle": "none", "workers": 0}
    cache = 600 * 50 * 4
    with AsyncLoader(source, options | {"cache_bytes": cache}) as first:
        with AsyncLoader(source, options | {"cache_bytes": cache}) as second:
            assert len(list(first)) == len(list(second))
        decodings.clear()
        assert len(list(first)) == 38
        assert decodings == []
    with AsyncLoader(source, options) as third:
        assert len(list(third)) == 38
    assert len(decodings) == 60
    source.close()


def test_a_cache_for_half_of_a_dataset_saves_half_of_the_decoding(file, decodings, monkeypatch):
    monkeypatch.setattr(holding, "RECENT_BYTES", 0)
    source = HDF5Source(file)
    decodings.clear()
    epochs(source, 2, shuffle="none", workers=0, cache_bytes=600 * 50 * 2)
    assert len(decodings) == 60 + 30


def test_one_sample_per_chunk_is_cached_too(tmp_path, decodings):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as made:
        values = np.arange(40 * 50, dtype=">i4").reshape(40, 50)
        made.create_dataset("data", data=values, chunks=(1, 50), compression="gzip")
        made["labels"] = np.arange(40)
    source = HDF5Source(str(path))
    decodings.clear()
    epochs(source, 3, shuffle="global", workers=1, cache_bytes=40 * 50 * 4)
    assert len(decodings) == 40


def test_filters_that_only_libhdf5_knows_are_shuffled_by_chunks_too(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as made:
        values = np.arange(600 * 50, dtype=np.int32).reshape(600, 50)
        made.create_dataset("data", data=values, chunks=(7, 50), scaleoffset=0)
        made["labels"] = np.arange(600)
    source = HDF5Source(str(path))
    assert source.chunks.reading == "locked"
    for epoch in epochs(source, 2, shuffle_chunks=4):
        assert sorted(epoch) == list(range(600))


# With several batches in a slot, the slots take more memory, and get smaller where the budget is small.
@pytest.mark.usefixtures("one_batch_per_slot")
def test_a_shuffle_that_does_not_fit_the_budget_is_refused(file):
    source = HDF5Source(file)
    options = {"batch_size": 16, "shuffle": "chunk", "shuffle_chunks": 20, "workers": 2}
    needed = AsyncLoader(source, options).footprint.budget
    # Two groups, and for each worker a stored chunk, a decoded one, and the slab in use.
    stored = max(size for _, size in stored_spans(file))
    assert needed.decoded == 40 * 10 * 50 * 4 + 2 * (2 * 10 * 50 * 4 + stored)
    with pytest.raises(MemoryBudgetError, match=r"decoded need .* smaller batch_size or queue_depth, shuffle_chunks"):
        AsyncLoader(source, options | {"memory_budget": needed.total - 1})
    with pytest.raises(MemoryBudgetError, match="cache_bytes"):
        AsyncLoader(source, options | {"memory_budget": needed.total, "cache_bytes": 1})


def test_auto_shuffles_by_chunk_where_compressed_samples_share_one(file, tmp_path):
    assert AsyncLoader(HDF5Source(file), {"batch_size": 4}).order.shuffle == "chunk"
    with h5py.File(tmp_path / "raw.h5", "w") as made:
        made.create_dataset("data", data=np.zeros((60, 50)), chunks=(10, 50))
    raw = HDF5Source(tmp_path / "raw.h5", ["data"])
    assert AsyncLoader(raw, {"batch_size": 4}).order.shuffle == "global"
    assert AsyncLoader(raw, {"batch_size": 4, "shuffle": "chunk"}).order.chunk_order.chunks == 6
