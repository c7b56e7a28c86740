"""The queue of a device without streams: it has batches read ahead, and times the transform."""

from types import SimpleNamespace

import pytest

from lit_async_data.engine.device import queues
from lit_async_data.engine.device.queues import InlineQueue
from lit_async_data.order.plan import BatchIndex

KEY = BatchIndex(0, 3)


@pytest.mark.parametrize(("depth", "read"), [(0, []), (1, [KEY])])
def test_batches_are_read_ahead_where_there_is_a_depth(depth, read):
    asked = []
    InlineQueue(SimpleNamespace(lend=None, prefetch=asked.append), depth, None).prefetch(KEY)
    assert asked == read


def test_the_time_of_a_transform_is_known_even_if_it_fails(monkeypatch):
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(queues, "time", clock)

    def took(seconds):
        clock.now_s += seconds
        return not seconds

    queue = InlineQueue(SimpleNamespace(lend=lambda key: took(5)), 0, lambda batch, key: 1 / took(0.25))
    with pytest.raises(ZeroDivisionError):
        queue.take(KEY)
    assert queue.transform_s == 0.25
