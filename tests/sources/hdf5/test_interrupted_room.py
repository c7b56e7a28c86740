"""Ctrl-C while room for decoded chunks is made, taken or given back: no byte stays counted that nothing holds."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from support.threads.interrupts import interrupted

from lit_async_data import AsyncLoader, ConcatSource, HDF5Source
from lit_async_data.sources.contract.reservations import Owner
from lit_async_data.sources.hdf5.readers.cache.persistent_cache import ByteBudget, PersistentChunkCache

ROWS, SLABS, ROOM = 4, 6, 3
SLAB_BYTES = ROWS * 8
LOADER = Owner()


def slab(number):
    return np.full((ROWS, 1), number)


def full(room):
    """Two caches that share room for three slabs, of which both have one."""
    room.set_room(LOADER, ROOM * SLAB_BYTES)
    caches = [PersistentChunkCache(ROWS * SLABS, ROWS, (1,), np.dtype(np.int64), room) for _ in range(2)]
    for cache in caches:
        cache.put(0, slab(0))
    return caches


def held(caches):
    """The slabs that each holds, of which each is right."""
    found = [{number for number in range(SLABS) if cache.slab(number) is not None} for cache in caches]
    for cache, numbers in zip(caches, found, strict=True):
        for number in numbers:
            assert (cache.slab(number) == number).all()
    return found


STEPS = {
    "a slab is cached": lambda caches: caches[0].put(1, slab(1)),
    "there is no room": lambda caches: [cache.put(number, slab(number)) for number in (1, 2) for cache in caches],
    "one cache is cleared": lambda caches: caches[0].clear(),
    "all begins anew": lambda caches: [caches[1].clear(), caches[1].put(3, slab(3))],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_what_is_counted_is_what_is_kept_wherever_an_interrupt_came(step):
    with interrupted(None) as passed:
        step(full(ByteBudget()))
    for place in range(len(passed)):
        room = ByteBudget()
        caches = full(room)
        with contextlib.suppress(KeyboardInterrupt), interrupted(place):
            step(caches)
        assert room.taken == sum(len(numbers) for numbers in held(caches)) * SLAB_BYTES
        caches[0].clear()
        caches[1].clear()
        for number in range(SLABS):
            caches[0].put(number, slab(number))
        assert held(caches) == [set(range(ROOM)), set()]


@pytest.fixture
def sources(h5):
    data = {"data": np.arange(60).reshape(20, 3), "chunks": (4, 3), "compression": "gzip"}
    made = [HDF5Source(h5(name, x=data), fields={"x": "x"}) for name in ("a.h5", "b.h5")]
    yield made
    for source in made:
        source.close()


def rooms(sources):
    """Bytes that may be held: of chunks decoded last, and for good."""
    readers = [source._reader for source in sources]
    return [(sum(each.room for each in reader.recent.values()), reader.room.limit) for reader in readers]


def test_room_that_is_made_and_given_back_is_counted_once_wherever_an_interrupt_came(sources):
    both = ConcatSource(sources)

    def used():
        give_back = both.reserve(2, 1000, 0)
        try:
            made.append(rooms(sources))
        finally:
            ended.append(give_back)
            give_back()

    made, ended = [], []
    with interrupted(None) as passed:
        used()
    assert all(min(each) > 0 for each in made[0])
    for place in range(len(passed)):
        with contextlib.suppress(KeyboardInterrupt), interrupted(place):
            used()
        for give_back in ended:
            give_back()  # as an engine that is closed again
        ended.clear()
        assert rooms(sources) == [(0, 0), (0, 0)], passed[place]
    assert all(each == made[0] for each in made)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 19])
def test_a_loader_whose_beginning_is_interrupted_takes_its_room_once(sources, every):
    def loader():
        options = {"batch_size": 4, "workers": 0, "shuffle": "chunk", "shuffle_chunks": 2, "cache_bytes": 150}
        return AsyncLoader(ConcatSource(sources), options)

    with loader() as begun:
        first = next(begun)
        once = rooms(sources)
    assert min(once[0]) > 0
    for place in itertools.count(step=every):
        with loader() as begun:
            try:
                with interrupted(place):
                    next(begun)
                break
            except KeyboardInterrupt:
                pass
            batch = next(begun)
            assert rooms(sources) == once, place
            assert torch.equal(batch["x"], first["x"])
        assert rooms(sources) == [(0, 0), (0, 0)], place
    assert place > 500
