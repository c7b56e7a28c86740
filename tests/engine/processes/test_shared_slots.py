"""Slots that processes share, and notes of what is read."""

import contextlib

import numpy as np

from lit_async_data.engine.processes.shared_slots import NOTED, SharedSlots
from lit_async_data.order.plan import BatchIndex


def test_who_maps_the_file_sees_the_slots_and_what_others_read():
    with contextlib.closing(SharedSlots(100)) as slots, contextlib.closing(SharedSlots(100, slots.fd)) as reader:
        assert [len(slot) for slot in slots.add(2)] == [100, 100]
        assert slots.add(0) == []
        reader.slot(1)[:] = 7
        assert (slots.slot(0).max(), slots.slot(1).min()) == (0, 7)
        reader.thread.number = 2
        for hooks in (0, 1, 2):
            with reader.noted(BatchIndex(3, 4), np.arange(80), transforms=hooks == 2):
                if hooks:
                    reader.transforming()
                (note,) = slots.being_read(slice(2, 3))
                assert (note.key, note.rows, note.samples.tolist()) == ((3, 4), 80, list(range(NOTED)))
                assert (note.transforms, slots.being_read(slice(2))) == (hooks, [])
        assert slots.being_read(slice(None)) == []


def test_there_is_room_for_some_samples_that_end_processes():
    with contextlib.closing(SharedSlots(100)) as slots:
        most = len(slots.deadly) - 1
        assert [slots.condemn(sample) for sample in range(most + 1)] == [True] * most + [False]
        assert slots.deadly.tolist() == [most, *range(most)]
