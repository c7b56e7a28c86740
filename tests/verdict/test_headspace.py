from __future__ import annotations

from types import SimpleNamespace

from lit_async_data.order.plan import BatchIndex
from lit_async_data.verdict.headspace import RepeatingQueue


def test_a_repeated_batch_has_not_been_transformed_again():
    queue = RepeatingQueue(SimpleNamespace(take=lambda key: key, transform_s=0.25), real=1, steps=3)
    assert [(queue.take(BatchIndex(0, step)), queue.transform_s) for step in range(3)] == [
        (BatchIndex(0, 0), 0.25),
        (BatchIndex(0, 0), 0.0),
        (BatchIndex(0, 0), 0.0),
    ]
