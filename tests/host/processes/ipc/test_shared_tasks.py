"""What a reader process tells worker processes that share a batch."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lit_async_data.host.processes.ipc.messages import Command, CommandKind
from lit_async_data.host.processes.ipc.shared_tasks import SharedTasks
from lit_async_data.order.plan import BatchIndex, Limits

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def both_ends():
    with contextlib.closing(SharedTasks(4, 50)) as ours:
        ours.add(3)
        with contextlib.closing(SharedTasks(4, 50, ours.fd)) as theirs:
            yield ours, theirs


@given(readers=arrays.arrays(np.int64, st.integers(1, 50), elements=st.integers(0, 3)), thread=st.integers(0, 2))
def test_each_process_finds_its_samples_and_their_rows(readers, thread):
    samples = 1000 - 7 * np.arange(len(readers))
    with both_ends() as (ours, theirs):
        ours.write(thread, samples, readers)
        for reader in range(4):
            found, rows, count = theirs.read(thread, reader)
            assert rows.tolist() == np.flatnonzero(readers == reader).tolist()
            assert found.tolist() == samples[readers == reader].tolist()
            assert count == len(samples)
            del found, rows


def test_threads_do_not_overwrite_each_others_tasks():
    with both_ends() as (ours, theirs):
        for thread in range(3):
            ours.write(thread, np.arange(50) + 100 * thread, np.arange(50) % 4)
        for thread in range(3):
            assert theirs.read(thread, 1)[0].tolist() == list(range(100 * thread + 1, 100 * thread + 50, 4))


numbers = st.integers(0, 2**62)
keys = st.builds(BatchIndex, numbers, numbers)
limits = st.builds(Limits, numbers, st.none() | numbers, st.none() | numbers, numbers)


@given(command=st.builds(Command, st.sampled_from(CommandKind), numbers, numbers, keys, limits, keys, *[numbers] * 4))
def test_a_command_arrives_as_it_was_sent(command):
    assert Command.unpacked(command.packed()) == command
