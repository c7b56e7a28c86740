import gc
import itertools
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import lit_async_data
from lit_async_data.engine.pipeline.pipeline import TRANSITIONS, SlotPool, SlotState

EVENTS = {event: lambda pool, slot, event=event: pool.move(slot, event) for _, event in TRANSITIONS}
EVENTS["lend"] = SlotPool.lend
# How a free slot comes into a state.
WAYS = {
    SlotState.FREE: [],
    SlotState.FILLING: ["take"],
    SlotState.READY: ["take", "filled"],
    SlotState.LENT: ["take", "filled", "lend"],
    SlotState.COPYING: ["take", "filled", "copy"],
}


def pool_of(slots, nbytes=1000):
    return SlotPool([np.zeros(nbytes, np.uint8) for _ in range(slots)])


def lent(pool):
    slot = pool.take(timeout=0)
    pool.move(slot, "filled")
    return pool.lend(slot)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, EVENTS)), ids=str)
def test_an_event_moves_a_slot_as_the_table_says_or_changes_nothing(state, event):
    pool = pool_of(1)
    for before in WAYS[state]:
        pool.move(0, before)
    assert pool._states[0] is state
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(RuntimeError, match=f"slot 0 is {state.name} and cannot {event}"):
            EVENTS[event](pool, 0)
        assert pool._states[0] is state
    else:
        kept = EVENTS[event](pool, 0)
        assert pool._states[0] is after
        del kept


def test_the_readme_shows_the_table():
    readme = Path(lit_async_data.__file__).with_name("README.md").read_text()
    lines = ["stateDiagram-v2", "    [*] --> FREE"]
    lines += [f"    {state.name} --> {after.name}: {event}" for (state, event), after in TRANSITIONS.items()]
    assert "\n".join(lines) in readme


KEPT = {
    "a slice": lambda array: array[1:2],
    "another type": lambda array: array.view(np.uint16)[3:],
    "a tensor": torch.from_numpy,
    "a slice of a tensor": lambda array: torch.from_numpy(array)[5:6],
    "a reshaped tensor": lambda array: torch.from_numpy(array).view(torch.float32).reshape(2, 125)[1],
    "an autograd graph": lambda array: (
        torch.from_numpy(array).view(torch.float32) * torch.ones(250, requires_grad=True)
    ).sum(),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())
def test_a_slot_is_lent_as_long_as_anything_made_from_it_lives(kept):
    pool = pool_of(1)
    something = kept(lent(pool))
    gc.collect()
    assert pool.held == 1
    assert pool.take(timeout=0) is None
    del something
    assert pool.held == 0
    assert pool.take(timeout=0) == 0


def test_a_lease_may_end_inside_the_lock_of_the_ring():
    """1. A thread holds the ring's lock. 2. It allocates; garbage collection drops the last view of a lease. 3. The
    finalizer runs in that thread, inside the lock. Did it ask for a lock that is not reentrant, it would wait for
    itself."""
    pool = pool_of(2)
    cycle = [lent(pool)]
    cycle.append(cycle)
    del cycle
    done = threading.Event()

    def collect():
        with pool._lock:
            gc.collect()
        done.set()

    threading.Thread(target=collect, daemon=True).start()
    assert done.wait(60)
    assert {pool.take(timeout=0), pool.take(timeout=0)} == {0, 1}


def test_a_lease_may_end_inside_the_queue_that_it_goes_to(monkeypatch):
    """1. `take` is inside SimpleQueue.get. 2. A lease ends there, as it can in any allocation. 3. Its put must not wait
    for the get. The queue is C code; forced here by a queue that collects inside its own get."""
    pool = pool_of(2)
    cycle = [lent(pool)]
    cycle.append(cycle)
    del cycle
    inner = pool.vacant

    class Collecting:
        put = inner.put

        get_nowait = inner.get_nowait

        def get(self, timeout):
            gc.collect()
            return inner.get(timeout=timeout)

    monkeypatch.setattr(pool, "vacant", Collecting())
    assert pool.take(timeout=0) is not None
    assert inner.qsize() == 1


def test_what_is_lent_is_its_own_slot():
    pool = pool_of(2)
    slots = [pool.take(timeout=0) for _ in range(2)]
    for slot in slots:
        pool.memories[slot][:] = slot
        pool.move(slot, "filled")
    assert [int(pool.lend(slot).max()) for slot in slots] == slots


def test_what_is_lent_outlives_the_ring():
    pool = pool_of(1)
    array = lent(pool)
    array[:] = 7
    pool.clear()
    del pool
    gc.collect()
    assert (array == 7).all()


def test_a_waiting_taker_is_woken_by_the_end_of_a_lease():
    pool = pool_of(1)
    held = [lent(pool)]
    taken = []
    thread = threading.Thread(target=lambda: taken.append(pool.take(timeout=30)))
    thread.start()
    held.clear()
    thread.join(30)
    assert taken == [0]


def test_wake_lets_a_taker_go_without_a_slot():
    pool = pool_of(0)
    pool.wake(1)
    assert pool.take() is None


def test_the_slot_that_was_let_go_last_is_taken_first():
    pool = pool_of(3)
    first, second, third = (pool.take(timeout=0) for _ in range(3))
    for slot in (third, first, second):
        pool.move(slot, "abandon")
    assert [pool.take(timeout=0) for _ in range(3)] == [second, first, third]


def test_who_waits_is_not_left_beside_a_free_slot():
    """1. A waits for a slot. 2. Two become vacant, and B collects both. 3. B takes one; the other must wake A."""
    pool = pool_of(2)
    slots = [pool.take(timeout=0), pool.take(timeout=0)]
    got = []
    waiting = threading.Thread(target=lambda: got.append(pool.take(timeout=60)))
    for slot in slots:
        pool.move(slot, "abandon")
    got.append(pool.take(timeout=0))
    waiting.start()
    waiting.join(60)
    assert sorted(got) == sorted(slots)


def test_being_woken_is_not_lost_among_free_slots():
    pool = pool_of(2)
    pool.wake(1)
    assert [pool.take(timeout=0) for _ in range(4)].count(None) == 2


def test_the_end_of_a_lease_runs_no_python_code():
    """Else an interrupt can arrive there, which CPython prints and drops: Ctrl-C would have no effect."""
    pool = pool_of(1)
    kept = lent(pool)[3:]
    called = []
    sys.setprofile(lambda frame, event, argument: called.append((event, frame.f_code.co_name)))
    try:
        del kept
    finally:
        sys.setprofile(None)
    assert [name for event, name in called if event == "call"] == []
    assert pool.take(timeout=0) == 0
