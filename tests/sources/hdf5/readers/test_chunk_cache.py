"""Chunks are decoded once, by one thread, and cached within their budget."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from support.threads.interrupts import interrupted

from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.readers import chunk_cache
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
    slab = slabs.get(key, lambda: made.append(key) or SLAB, wait=wait)
    return slab is not None, bool(made)


def test_the_slab_decoded_first_is_evicted_first_however_often_it_was_used():
    slabs = recent(2 * SLAB.nbytes)
    assert [fetched(slabs, key)[1] for key in (1, 2, 1, 1, 3)] == [True, True, False, False, True]
    assert [fetched(slabs, key)[1] for key in (2, 3, 1)] == [False, False, True]


def test_without_room_nothing_is_cached():
    slabs = recent(0)
    assert [fetched(slabs, 1)[1] for _ in range(2)] == [True, True]


def test_groups_whose_slabs_have_all_moved_on_leave_nothing():
    """As with shuffle=chunk when all chunks fit: each group finds the slabs of the last one, and evicts none."""
    slabs = recent(2 * SLAB.nbytes)
    for number in (1, 2):
        slabs.get(("x", number), lambda: SLAB, wait=True, chunk_group=(0, 0))
    for group in range(1, 50):
        assert not len(slabs.missing("x", np.array([1, 2]), (0, group)))
    assert [len(of_group) for of_group in slabs._held._by_group.values()] == [2]


def test_slabs_of_the_earliest_group_are_evicted_first():
    slabs = recent(3 * SLAB.nbytes)
    for number, group in enumerate([(0, 0), (0, 1), None, (0, 2)]):
        slabs.get(("x", number), lambda: SLAB, wait=True, chunk_group=group)
    assert slabs.missing("x", np.arange(4), None).tolist() == [0]
    assert slabs.missing("x", np.array([1]), (0, 3)).tolist() == []  # assigned to the last group
    slabs.get(("x", 4), lambda: SLAB, wait=True, chunk_group=(0, 3))
    assert slabs.missing("x", np.arange(5), None).tolist() == [0, 2]


def test_removing_room_evicts_slabs():
    cache = ChunkCache()
    releases = [cache.reserve({"x": SLAB.nbytes, "y": 0}, 0) for _ in range(2)]
    slabs = cache.recent("x")
    for key in (1, 2):
        fetched(slabs, key)
    for _ in range(2):
        releases[0]()  # counts once
    assert [fetched(slabs, key)[1] for key in (3, 3, 2)] == [True, False, True]


class Slow:
    """A thread in the middle of decoding."""

    def __init__(self, slabs, error=None):
        self.begun, self.go = threading.Event(), threading.Event()
        self._error = error
        self.thread = threading.Thread(target=self._run, args=(slabs,))
        self.thread.start()
        assert self.begun.wait(60)

    def _run(self, slabs):
        def decode():
            self.begun.set()
            assert self.go.wait(60)
            if self._error:
                raise self._error
            return SLAB

        with contextlib.suppress(CorruptError):
            slabs.get(1, decode, wait=True)

    def finish(self):
        self.go.set()
        self.thread.join(60)


def test_a_slab_that_another_thread_is_decoding_is_not_decoded_again():
    slabs = recent(SLAB.nbytes)
    slow = Slow(slabs)
    assert fetched(slabs, 1, wait=False) == (False, False)
    slow.finish()
    assert fetched(slabs, 1) == (True, False)


def test_a_thread_that_waits_for_a_failed_decoding_decodes_itself(monkeypatch):
    """1. A decodes. 2. B waits for it. 3. A fails and raises. 4. B wakes, finds nothing, and decodes itself."""
    slabs = recent(SLAB.nbytes)
    slow = Slow(slabs, CorruptError("bad"))
    waits = threading.Event()
    wait = Gate.wait
    monkeypatch.setattr(Gate, "wait", lambda gate, timeout: waits.set() or wait(gate, timeout))
    got = []
    waiter = threading.Thread(target=lambda: got.append(fetched(slabs, 1)))
    waiter.start()
    assert waits.wait(60)
    slow.finish()
    waiter.join(60)
    assert got == [(True, True)]


def budget(nbytes):
    cache = ChunkCache()
    cache.reservation = cache.reserve({}, nbytes)
    return cache


def kept_slabs(cache):
    return cache.kept(10, 4, (2,), np.dtype("i4"))


def test_the_byte_budget_is_shared_and_given_back():
    cache = budget(3 * 4 * 8)
    first, second = kept_slabs(cache), kept_slabs(cache)
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
    found = kept._found

    def meanwhile(numbers):
        places = found(numbers)
        kept.clear()
        kept.put(2, np.full((4, 2), 2, "i4"))
        return places

    monkeypatch.setattr(kept, "_found", meanwhile)
    out = np.zeros((2, 2), "i4")
    assert kept.copy_rows(np.array([4, 8]), out, lambda taken, _: taken).tolist() == [1]
    assert out.tolist() == [[1, 1], [0, 0]]


def test_only_what_the_budget_holds_is_allocated():
    """Of a dataset of 64 GiB, in slabs of 64 KiB."""
    kept = budget(3 * 2**16 + 5).kept(2**20, 1, (2**16,), np.dtype("u1"))
    for number in (2**19, 7, 8, 9):
        kept.put(number, np.full((1, 2**16), number % 251, np.uint8))
    assert kept._content[0].nbytes == 3 * 2**16
    out = np.zeros((4, 2**16), np.uint8)
    assert kept.copy_rows(np.array([9, 8, 7, 2**19]), out, lambda taken, _: taken).tolist() == [0]
    assert out[1:, 0].tolist() == [8, 7, 2**19 % 251]


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


def test_a_table_that_the_system_has_no_memory_for_is_left_out_with_a_word(monkeypatch, caplog):
    def refused(*_):
        raise MemoryError("Unable to allocate 3 GiB")

    cache = budget(10_000)
    kept = kept_slabs(cache)
    monkeypatch.setattr(chunk_cache.np, "empty", refused)
    for number in (0, 1):
        kept.put(number, np.zeros((4, 2), "i4"))
    assert kept.slab(0) is None
    assert not kept.enabled
    assert [record.getMessage()[:38] for record in caplog.records] == ["cache_bytes: Unable to allocate 3 GiB;"]
