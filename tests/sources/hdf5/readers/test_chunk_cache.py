"""Chunks are decoded once, by one thread, and cached within their budget."""

import contextlib
import gc
import itertools
import threading

import numpy as np
import pytest
from support.files.hdf5 import stored_spans
from support.threads.interrupts import interrupted

from lit_async_data import AsyncLoader, Field, HDF5Source, MemoryBudgetError
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.readers import part_reader as holding
from lit_async_data.sources.hdf5.readers.chunk_cache import ChunkCache
from lit_async_data.system import Gate

SLAB = np.arange(4, dtype=np.int64)


def recent(room):
    """A cache with room for recent slabs of a dataset."""
    cache = ChunkCache()
    slabs = cache.recent("x")
    slabs.reservation = cache.reserve({"x": room}, 0)
    return slabs


def fetched(slabs, key, *, wait=True):
    made = []
    return slabs.get(key, lambda: made.append(key) or SLAB, wait=wait) is not None, bool(made)


def test_the_slab_decoded_first_is_evicted_first_however_often_it_was_used():
    slabs = recent(2 * SLAB.nbytes)
    assert [fetched(slabs, key)[1] for key in (1, 2, 1, 1, 3)] == [True, True, False, False, True]
    assert [fetched(slabs, key)[1] for key in (2, 3, 1)] == [False, False, True]


def test_slabs_of_the_earliest_group_are_evicted_first():
    slabs = recent(3 * SLAB.nbytes)
    for number, group in enumerate([(0, 0), (0, 1), None, (0, 2)]):
        slabs.get(("x", number), lambda: SLAB, wait=True, chunk_group=group)
    assert slabs.missing("x", np.arange(4), None).tolist() == [0]
    assert slabs.missing("x", np.array([1]), (0, 3)).tolist() == []  # assigned to the last group
    slabs.get(("x", 4), lambda: SLAB, wait=True, chunk_group=(0, 3))
    assert slabs.missing("x", np.arange(5), None).tolist() == [0, 2]


@contextlib.contextmanager
def decoding(slabs, error=None):
    """Another thread is in the middle of decoding a slab; at the end it has it, or an error."""
    begun, go = threading.Event(), threading.Event()

    def decode():
        begun.set()
        assert go.wait(60)
        if error:
            raise error
        return SLAB

    def run():
        with contextlib.suppress(CorruptError):
            slabs.get(1, decode, wait=True)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        go.set()
        thread.join(60)


def test_a_slab_that_another_thread_is_decoding_is_not_decoded_again():
    slabs = recent(SLAB.nbytes)
    with decoding(slabs):
        assert fetched(slabs, 1, wait=False) == (False, False)
    assert fetched(slabs, 1) == (True, False)


def test_a_thread_that_waits_for_a_failed_decoding_decodes_itself(monkeypatch):
    """1. A decodes. 2. B waits for it. 3. A fails and raises. 4. B wakes, finds nothing, and decodes itself."""
    slabs, waits, wait, got = recent(SLAB.nbytes), threading.Event(), Gate.wait, []
    monkeypatch.setattr(Gate, "wait", lambda gate, timeout: waits.set() or wait(gate, timeout))
    waiter = threading.Thread(target=lambda: got.append(fetched(slabs, 1)))
    with decoding(slabs, CorruptError("bad")):
        waiter.start()
        assert waits.wait(60)
    waiter.join(60)
    assert got == [(True, True)]


def budget(nbytes):
    cache = ChunkCache()
    cache.reservation = cache.reserve({}, nbytes)
    return cache


def kept_slabs(cache):
    return cache.kept(10, 4, (2,), np.dtype("i4"))


def test_a_table_that_is_cleared_while_it_is_read_is_read_right(monkeypatch):
    """1. A looks up slab 1. 2. The cache is cleared, and slab 2 takes its place. 3. A copies."""
    kept = kept_slabs(budget(4 * 8))
    kept.put(1, np.full((4, 2), 1, "i4"))
    found = kept._found

    def meanwhile(numbers):
        places = found(numbers)
        kept.clear()
        kept.put(2, np.full((4, 2), 2, "i4"))
        return places

    monkeypatch.setattr(kept, "_found", meanwhile)
    out = np.zeros((2, 2), "i4")
    assert kept.copy_rows(np.array([4, 8]), out).tolist() == [1]
    assert out.tolist() == [[1, 1], [0, 0]]


def test_only_what_the_budget_holds_is_allocated():
    """Of a dataset of 64 GiB, in slabs of 64 KiB."""
    kept = budget(3 * 2**16 + 5).kept(2**20, 1, (2**16,), np.dtype("u1"))
    for number in (2**19, 7, 8, 9):
        kept.put(number, np.full((1, 2**16), number % 251, np.uint8))
    assert kept._content[0].nbytes == 3 * 2**16
    out = np.zeros((4, 2**16), np.uint8)
    assert kept.copy_rows(np.array([9, 8, 7, 2**19]), out).tolist() == [0]
    assert out[1:, 0].tolist() == [8, 7, 2**19 % 251]


@pytest.fixture
def no_garbage_collection():
    """An interrupt of the finaliser of an earlier cache would be none of this one."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("closing", [False, True], ids=["an interrupt", "garbage collection that closes a loader"])
def test_what_comes_anywhere_into_a_change_leaves_a_right_cache(closing):
    for place in itertools.count():
        cache = budget(0)
        slabs, kept, release = cache.recent("x"), kept_slabs(cache), cache.reserve({"x": 2 * SLAB.nbytes}, 64)
        for number in range(2):
            slabs.get(("x", number), lambda: SLAB, wait=True, chunk_group=(0, 0))
        with contextlib.suppress(KeyboardInterrupt), interrupted(place, release if closing else None) as passed:
            slabs.missing("x", np.arange(2), (0, 1))
            slabs.get(("x", 2), lambda: SLAB, wait=True, chunk_group=(0, 1))
            kept.put(0, np.zeros((4, 2), "i4"))
            new = cache.reserve({"x": 2 * SLAB.nbytes}, 64)
        if len(passed) <= place:
            return
        release = new if closing else release
        for number in range(3):
            assert slabs.get(("x", number), lambda: SLAB, wait=True) is SLAB  # waits for no gate
            kept.put(number, np.full((4, 2), number, "i4"))
        assert (len(slabs.missing("x", np.arange(3), None)), cache.room.taken) == (1, 64)
        assert all(slab is None or (slab == number).all() for number, slab in enumerate(map(kept.slab, range(3))))
        release()
        assert (len(slabs.missing("x", np.arange(3), None)), cache.room.taken) == (3, 0)


VALUES = np.arange(600 * 50, dtype=np.int32).reshape(600, 50)


@pytest.fixture
def file(h5):
    """600 samples in 60 chunks, and their numbers."""
    return h5(data={"data": VALUES, "chunks": (10, 50), "compression": "gzip"}, labels=np.arange(600))


def epochs(source, number, **options):
    """The samples of each epoch, in order and checked."""
    found = []
    with AsyncLoader(source, {"batch_size": 16, "shuffle": True, **options}) as loader:
        for _ in range(number):
            epoch = []
            for data, labels in loader:
                assert (data[:, 0] == labels * 50).all()
                assert (data[:, -1] == labels * 50 + 49).all()
                epoch += labels.tolist()
            found.append(epoch)
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


FRAMES = np.arange(480 * 50, dtype=np.int32).reshape(480, 50)


@pytest.mark.usefixtures("one_batch_per_slot")
@pytest.mark.parametrize("shuffle", ["chunk", "none"])
@pytest.mark.parametrize("seconds", [False, True])
@pytest.mark.parametrize(
    ("frames", "stride", "most"),
    [([[-6, -3, 0]], 1, 1.35), ([[0], [3]], 1, 1.35), ([[0, 1, 2, 3]], 4, 1), ([[0]], 1, 1)],
    ids=["offsets", "two fields", "windows apart", "frames"],
)
def test_frames_that_samples_share_are_decoded_once_in_a_stretch(  # noqa: PLR0917
    h5, decodings, frames, stride, most, seconds, shuffle
):
    camera = {"data": FRAMES, "chunks": (1, 50), "compression": "gzip"}
    path = h5(a=camera, row=np.arange(480), t=np.arange(480) / 10, episode=np.repeat(np.arange(8), 60))
    timed = {"time": "t", "tolerance": 0.04} if seconds else {}
    fields = {"row": Field("row", time=timed.get("time"))}
    for number, offsets in enumerate(frames):
        given = [each / 10 for each in offsets] if seconds else offsets
        fields[str(number)] = Field("a", offsets=given, pad="last", **timed)
    source = HDF5Source(path, fields, episodes="episode", stride=stride)
    decodings.clear()
    with AsyncLoader(source, {"batch_size": 16, "shuffle": shuffle, "workers": 0}) as loader:
        budget = loader.footprint.budget
        for batch in loader:
            rows = batch["row"].numpy()[:, None]
            for number, offsets in enumerate(frames):
                wanted = np.clip(rows + offsets, rows // 60 * 60, rows // 60 * 60 + 59)
                assert (batch[str(number)].numpy() == FRAMES[wanted]).all()
    assert len(decodings) <= most * 480
    assert (budget.decoded > 2 * FRAMES[0].nbytes + 500) == (most != 1)  # else a thread's own
    assert source.memory(1).decoded < FRAMES.nbytes / 2  # of one stretch


@pytest.mark.parametrize(("shuffle", "rows"), [("global", 10), ("chunk", 10), ("none", 10), ("global", 1)])
def test_a_dataset_that_fits_the_cache_is_decoded_once_ever(h5, decodings, shuffle, rows):
    data = {"data": VALUES[: 60 * rows].astype(">i4"), "chunks": (rows, 50), "compression": "gzip"}
    source = HDF5Source(h5(data=data, labels=np.arange(60 * rows)))
    decodings.clear()
    found = epochs(source, 3, shuffle=shuffle, workers=1, cache_bytes=60 * rows * 50 * 4)
    assert [sorted(epoch) for epoch in found] == [list(range(60 * rows))] * 3
    assert len(decodings) == 60


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


def test_a_cache_for_half_of_a_dataset_saves_half_of_the_decoding(file, decodings, monkeypatch):
    monkeypatch.setattr(holding, "RECENT_BYTES", 0)
    source = HDF5Source(file)
    decodings.clear()
    epochs(source, 2, shuffle="none", workers=0, cache_bytes=600 * 50 * 2)
    assert len(decodings) == 60 + 30


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


def test_auto_shuffles_by_chunk_where_compressed_samples_share_one(file, h5):
    assert AsyncLoader(HDF5Source(file), {"batch_size": 4, "shuffle": True}).order.decks.shuffle == "chunk"
    raw = HDF5Source(h5("raw.h5", data={"data": np.zeros((60, 50)), "chunks": (10, 50)}), ["data"])
    assert AsyncLoader(raw, {"batch_size": 4, "shuffle": True}).order.decks.shuffle == "global"
    assert AsyncLoader(raw, {"batch_size": 4, "shuffle": "chunk"}).order.deck.chunk_order.chunks == 6
