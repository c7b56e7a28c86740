"""Tasks on their way to reader processes, and reports on their way back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import loader_of, sharing
from support.sources import reader_sources as acts
from support.sources.reader_sources import Numbers

from lit_async_data.engine.processes.messages import Phase, Task
from lit_async_data.errors import ReadError
from lit_async_data.order.plan import BatchIndex, Limits, Share

numbers = st.integers(0, 2**62)
keys = st.builds(BatchIndex, numbers, numbers)
shares = st.builds(Share, numbers, numbers)
limits = st.builds(Limits, numbers, st.none() | numbers, st.none() | numbers, numbers)


@given(st.builds(Task, numbers, numbers, keys, numbers, numbers, shares, limits, st.sampled_from(Phase), st.just(0)))
def test_a_task_arrives_as_it_was_sent(task):
    assert Task.unpacked(task.packed()) == task


@pytest.mark.processes
@pytest.mark.parametrize("act", [acts.fail_at_length, acts.warn_at_length])
def test_a_loader_whose_reports_are_not_read_does_not_hold_up_the_others(act):
    flooded, good = loader_of(Numbers(33, act), batch_size=1), loader_of(Numbers(), timeout_s=60)
    sharing(flooded, good)
    iter(flooded)
    flooded._machinery.prefetch(copy=False)
    for _ in range(20):
        assert len(list(good)) == 10
    with contextlib.suppress(ReadError):
        for _ in range(50):
            next(flooded)
    flooded.close()
    good.close()
