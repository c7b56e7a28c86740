"""Commands on their way to reader and worker processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.host.processes.ipc.messages import Command, CommandKind
from lit_async_data.order.plan import BatchIndex, Limits

numbers = st.integers(0, 2**62)
keys = st.builds(BatchIndex, numbers, numbers)
limits = st.builds(Limits, numbers, st.none() | numbers, st.none() | numbers, numbers)


@given(st.builds(Command, st.sampled_from(CommandKind), numbers, numbers, keys, limits, numbers, numbers))
def test_a_command_arrives_as_it_was_sent(command):
    assert Command.unpacked(command.packed()) == command
