"""The program of a reader process: its channels come and go, and it ends with the training process."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import loader_of, pid_of, sharing, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import BadInChild, Numbers

from lit_async_data.engine.processes.__main__ import Endpoint
from lit_async_data.engine.processes.messages import REPORT_BYTES
from lit_async_data.engine.processes.reader_server import LogToParent
from lit_async_data.errors import WorkerError

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def training(folder, sample, act, *lines):
    """A program that takes the first batch, says the id of its reader process, and is killed in the end."""
    program = folder / "train.py"
    program.write_text(
        "import os, signal, sys\n"
        f"sys.path.append({str(Path(acts.__file__).parents[2])!r})\n"
        "from support.sources import reader_sources as acts\n"
        "from lit_async_data import AsyncLoader\n"
        f"source = acts.Numbers({sample}, {act})\n"
        "loader = AsyncLoader(source, dict(batch_size=1, shuffle=False, worker_kind='process'))\n"
        "next(loader)\n"
        "print(loader._machinery.engine.feed.pipeline._readers[0].channel.pid, flush=True)\n" + "\n".join(lines)
    )
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as trainer:
        try:  # the reader may write before the trainer does
            yield sorted(trainer.stdout.readline().strip() for _ in range(2))
        finally:
            trainer.kill()


def test_the_process_ends_when_the_trainer_is_killed_even_if_a_fork_of_it_lives(tmp_path):
    lines = "fork = os.fork()", "if fork: print(f'~{fork}', flush=True)", "signal.pause()"
    with training(tmp_path, -1, None, *lines) as (reader, fork):
        pass
    try:
        wait_for_the_end_of(int(reader))
    finally:
        os.kill(int(fork[1:]), signal.SIGKILL)


def test_the_process_ends_when_the_trainer_is_killed_even_if_c_code_holds_its_gil(tmp_path):
    with training(tmp_path, 33, "acts.hold_the_gil", "list(loader)") as (reader, holding):
        assert holding == "holding"
    wait_for_the_end_of(int(reader))


def test_signals_for_the_trainer_do_not_end_the_process():
    with loader_of(Numbers()) as loader:
        next(loader)
        process = pid_of(loader)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(process, number)
        assert len(list(loader)) == 10
        assert pid_of(loader) == process


def test_a_source_that_cannot_begin_leaves_a_shared_process_to_the_others():
    good, bad = (loader_of(each) for each in (Numbers(), BadInChild()))
    sharing(good, bad)
    next(good)
    with pytest.raises(WorkerError, match="failed: ImportError"):
        next(bad)
    bad.close()
    assert len(list(good)) == 10
    good.close()


def test_a_read_that_hangs_does_not_keep_the_others_from_going_on():
    stuck, good = (loader_of(each) for each in (Numbers(33, acts.stop), Numbers()))
    sharing(stuck, good)
    assert next(stuck)["y"].tolist() == list(range(10))
    next(good)
    stuck.close()
    assert len(list(good)) == 10
    good.close()


def test_a_setup_that_cannot_be_read_leaves_no_descriptor_open(tmp_path):
    """A reader process may go on for other loaders."""
    ends = [*os.pipe(), *os.pipe(), *os.pipe()]
    setup = os.open(tmp_path / "empty", os.O_RDWR | os.O_CREAT)
    (reports, sent), others = ends[:2], ends[4:]
    slots, end = ends[2:4]
    endpoint = Endpoint([setup, slots, end, sent, *others], 0, LogToParent())
    endpoint._close()
    assert os.read(reports, REPORT_BYTES)
    os.close(reports)
    for descriptor in (setup, slots, end, sent, *others):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
