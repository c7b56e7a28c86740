"""Slots come to the workers of a reader process through a pipe that two processes write to."""

from __future__ import annotations

import fcntl
import os
import queue
import select
import threading

import numpy as np
import pytest
from support.threads.waits import LONG

from lit_async_data.host.pipeline.slots import COPYING, FILLING, FREE, SlotPool
from lit_async_data.host.processes.ipc.given_slots import MOST_SLOTS, GivenSlots, packed_slots


@pytest.fixture
def pipe():
    """What a reader process has of the pipe, and the descriptor to which the training process writes."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    given = GivenSlots(read, os.dup(write))
    yield given, write
    given.close()
    os.close(write)


def test_slots_come_in_the_order_in_which_both_processes_put_them(pipe):
    given, write = pipe
    os.write(write, packed_slots([3, 1]))
    given.put(70_000)
    os.write(write, packed_slots([2]))
    assert [given.get_nowait() for _ in range(4)] == [3, 1, 70_000, 2]
    with pytest.raises(queue.Empty):
        given.get_nowait()


def test_none_comes_after_the_time(pipe):
    with pytest.raises(queue.Empty):
        pipe[0].get(timeout=0.001)


def test_none_wakes_one_worker(pipe):
    given, _ = pipe
    woken = queue.SimpleQueue()
    waiting = [threading.Thread(target=lambda: woken.put(given.get())) for _ in range(2)]
    for thread in waiting:
        thread.start()
    given.put(None)
    assert woken.get(timeout=LONG) is None
    given.put(5)
    assert woken.get(timeout=LONG) == 5
    for thread in waiting:
        thread.join()


def test_a_slot_that_another_worker_has_taken_is_waited_for_again(pipe, monkeypatch):
    """1. A slot comes, and two workers wake. 2. One takes it. 3. The other waits for the next."""
    given, write = pipe
    os.write(write, packed_slots([1]))
    taken = []

    def robbed():
        if not taken:
            taken.append(GivenSlots.get_nowait(given))
            os.write(write, packed_slots([2]))
        return GivenSlots.get_nowait(given)

    monkeypatch.setattr(given, "get_nowait", robbed)
    assert given.get() == 2
    assert taken == [1]


def test_a_worker_that_ends_after_the_pipe_was_closed_gets_none(pipe):
    """1. The channel ends while a worker reads. 2. The pipe is closed. 3. The worker is done, and asks for a slot."""
    given, _ = pipe
    pool = SlotPool([np.zeros(8, np.uint8)], given)
    given.close()
    assert pool.take() is None
    assert pool.take_all() == []


def test_all_slots_fit_into_the_smallest_pipe(pipe):
    """If they did not: 1. A worker takes all that lie in the pipe. 2. Others are put there. 3. The worker puts back all
    but one; nobody reads, and it waits for ever."""
    given, write = pipe
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    os.set_blocking(write, False)  # a write that would wait writes nothing instead
    pool = SlotPool([np.zeros(8, np.uint8)] * MOST_SLOTS, given)
    pool.wake(64)
    taken = [pool.take(timeout=0) for _ in range(MOST_SLOTS + 64)]
    assert sorted(slot for slot in taken if slot is not None) == list(range(MOST_SLOTS))


def test_a_pool_takes_a_slot_that_the_training_process_has_given_back(pipe):
    given, write = pipe
    memory = np.zeros(8, np.uint8)
    pool = SlotPool([memory, memory], given)
    first = pool.take(timeout=0)
    assert (first, pool.state(first)) == (1, FILLING)
    pool.filled(first)
    pool.copy(first)
    assert pool.state(first) is COPYING
    assert pool.take() == 0
    os.write(write, packed_slots([first]))
    assert pool.take() == first
    pool.abandon(first)
    assert pool.state(first) is FREE
    assert pool.take_all() == [first]
