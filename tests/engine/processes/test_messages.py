"""Tasks on their way to reader processes, and reports on their way back."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import loader_of, running
from support.sources import reader_sources as acts
from support.sources.reader_sources import Numbers

from lit_async_data.engine.processes.shared_memory import REPORT, REPORT_BYTES, Report, ReportKind, Reports, Task
from lit_async_data.errors import ReadError
from lit_async_data.order.plan import BatchIndex, Limits, Share


@pytest.mark.parametrize("first", [0, 2**62])
def test_a_task_arrives_as_it_was_sent(first):
    keys = BatchIndex(first + 2, first + 3)
    limits = Limits(first + 8, first + 9, first + 10, first + 11)
    task = Task(first, first + 1, keys, first + 4, first + 5, Share(first + 6, first + 7), limits, first > 0, 0)
    assert Task.unpacked(task.packed()) == task


def test_long_reports_of_several_threads_do_not_mix():
    reading, writing = os.pipe()
    reports, length = Reports(writing), 2**18
    with ThreadPoolExecutor(4) as threads, open(reading, "rb") as pipe:
        for number in range(4):
            threads.submit(reports.send, Report(ReportKind.DONE, step=number), bytes([number]) * length)
        for _ in range(4):
            _, size, _, step, *_ = REPORT.unpack(pipe.read(REPORT_BYTES))
            assert (size, set(pipe.read(length))) == (length, {step})
    reports._pipe.close()


@pytest.mark.processes
@pytest.mark.parametrize("act", [acts.fail_at_length, acts.warn_at_length])
def test_reports_longer_than_the_pipe_arrive_and_do_not_hold_up_the_end(act, caplog):
    with loader_of(Numbers(33, act), batch_size=1) as loader:
        for step in range(40):
            if step == 33 and act is acts.fail_at_length:
                with pytest.raises(ReadError, match="x" * 2**18):
                    next(loader)
            else:
                assert next(loader)["y"].item() == step
    assert sum(line == "x" * 2**18 for line in caplog.messages) == (act is acts.warn_at_length)
    with loader_of(Numbers(2, act), batch_size=1) as loader:
        loader._prefetch()  # what it reports is never read
        while not (reader := running(loader)._readers[0]).channel.ready:
            reader.channel.receive()
    assert reader.channel.process.returncode == 0
