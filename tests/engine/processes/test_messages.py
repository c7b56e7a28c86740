"""Tasks on their way to reader processes."""

from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.engine.processes.messages import Part, Task
from lit_async_data.order.plan import BatchIndex, Limits, Share

numbers = st.integers(0, 2**62)
keys = st.builds(BatchIndex, numbers, numbers)
shares = st.builds(Share, numbers, numbers)
limits = st.builds(Limits, numbers, st.none() | numbers, st.none() | numbers, numbers)


@given(st.builds(Task, numbers, numbers, keys, numbers, numbers, shares, limits, st.sampled_from(Part), numbers))
def test_a_task_arrives_as_it_was_sent(task):
    assert Task.unpacked(task.packed()) == task
