"""The program of a reader process: it ends with the training process."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import loader_of, pid_of, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.reader_sources import Numbers

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
        "print(loader._run.engine.feed.pipeline._readers[0].channel.pid, flush=True)\n" + "\n".join(lines)
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
