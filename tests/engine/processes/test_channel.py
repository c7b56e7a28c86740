"""What comes from a reader process, and its end; errors and stalls say what was being read."""

import collections
import errno
import itertools
import os
import signal
import threading

import numpy as np
import pytest
from support.failures import raising
from support.processes import loader_of, pid_of, running, wait_for_the_end_of
from support.sources import reader_sources as acts
from support.sources.cut_while_read import CutWhileRead
from support.sources.reader_sources import BadInChildAtLength, Deadly, Numbers

from lit_async_data import ChangedError, ClosedError, CorruptError, ReadError, StalledError
from lit_async_data.errors import AsyncDataError, WorkerError

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", ["os.memfd_create", "mmap.mmap", "os.pipe", "socket.socketpair"])
def test_a_want_of_descriptors_is_named_with_the_limit_to_raise(name, monkeypatch):
    loader = loader_of(Numbers())
    with monkeypatch.context() as patched:
        patched.setattr(name, raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with loader, pytest.raises(AsyncDataError, match=r"Too many open files.*ulimit -n"):
            next(loader)


def test_a_process_that_cannot_begin_is_an_error_with_its_reason_though_that_is_longer_than_the_pipe():
    with loader_of(BadInChildAtLength()) as loader:
        with pytest.raises(WorkerError, match="failed: ImportError: xxx") as caught:
            next(loader)
        assert str(caught.value).count("x") >= 2**18
        assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    ("act", "how"), [(acts.crash, "was killed by SIGSEGV"), (acts.leave, "ended with exit code 3")]
)
def test_the_end_of_the_process_is_an_error_that_says_what_it_read(act, how):
    with loader_of(Numbers(33, act)) as loader:
        what = r"while it read batch 3 of epoch 0, samples 30, .* \(the first is row 30 of Numbers\)"
        with pytest.raises(WorkerError, match=rf"reader process \d+ {how}.*{what}"):
            list(loader)
        assert next(loader)["y"][0].item() == 40


@pytest.mark.parametrize(("workers", "chunk"), [(1, 1), (2, 4)], ids=["one process", "two that share"])
@pytest.mark.parametrize(("hook", "on_error"), [("sample_transform", "raise"), ("batch_transform", "skip")])
def test_a_transform_that_ends_processes_is_an_error_that_names_the_batch(workers, chunk, hook, on_error):
    """Of a batch_transform also where bad samples are skipped: nobody knows which sample it was."""
    options = {"workers": workers, "on_error": on_error, "max_bad": 9}
    with loader_of(Deadly(-1, chunk), {hook: acts.kill_at_33}, **options) as loader:
        assert [batch["y"][0].item() for batch in itertools.islice(loader, 3)] == [0, 10, 20]
        with pytest.raises(WorkerError, match="while it read batch 3 of epoch 0, samples 30"):
            loader.next()
        assert loader.next()["y"][0].item() == 40


def test_a_process_that_does_not_answer_is_a_stall_that_says_what_it_reads(capfd):
    with loader_of(Numbers(33, acts.stop)) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        pipeline = running(loader)
        while not any(each.key == (0, 3) and each.where for each in pipeline._readings()):
            pipeline.poll(None)
        pipeline.timeout_s = 0.5  # the start of the process may take longer
        what = r"batch 3 of epoch 0 .* reads batch 3 of epoch 0, samples 30, 31, 32, … \(10 in all\) .*, for \d"
        with pytest.raises(StalledError, match=what) as caught:
            next(loader)
        error = caught.value
        assert (error.stage, error.worker, error.sample_id, error.row, error.file) == ("read", 0, 30, 30, "Numbers")
        stacks = capfd.readouterr().err
        assert stacks.index(f"threads of process {os.getpid()}") < stacks.index(f"reader process {pid_of(loader)}:")
        assert " in stop\n" in stacks


def test_a_file_that_is_cut_while_its_map_is_read_is_named(h5, caplog):
    """1. The file is checked. 2. It is cut. 3. The kernel ends the process that reads its map. 4. The next checks."""
    path = h5(data=np.zeros((100, 1024), "f4"))
    error = pytest.raises(ChangedError, match=f"{path}: shrank from")
    with loader_of(CutWhileRead(path), workers=2) as loader, error as caught:
        list(loader)
    assert caught.value.file == path
    (line,) = (line for line in caplog.messages if "was killed by SIGBUS" in line)
    assert f"(the first is row 50 of {path})" in line


def test_the_end_of_a_loader_reaches_its_process_though_a_fork_keeps_all_ends():
    with loader_of(Numbers()) as loader:
        next(loader)
        channel = running(loader)._readers[0].channel
        while not channel.ready:
            running(loader).poll(None)
        ends = channel.control, channel.lifeline, channel.reports, channel.tasks
        copies = [os.dup(end.fileno()) for end in ends]
    assert channel.process.returncode == 0  # it was not killed
    for copied in copies:
        os.close(copied)


def test_the_process_ends_with_its_loader():
    loader = loader_of(Numbers())
    next(loader)
    closed = pid_of(loader)
    loader.close()
    loader.close()
    wait_for_the_end_of(closed)
    with pytest.raises(ClosedError):
        next(loader)
    loader = loader_of(Numbers())
    next(loader)
    dropped = pid_of(loader)
    del loader
    wait_for_the_end_of(dropped)


def test_a_stopped_process_is_a_stall_and_ends_with_its_loader(capfd):
    with loader_of(Numbers()) as loader:
        next(loader)
        running(loader).timeout_s = 0.5
        os.kill(stopped := pid_of(loader), signal.SIGSTOP)
        with pytest.raises(StalledError, match=rf"reader process {stopped} reads"):
            collections.deque(iter(loader.next, None))
        assert "no answer: it is stopped" in capfd.readouterr().err
    wait_for_the_end_of(stopped)


def test_the_process_outlives_the_thread_that_began():
    with loader_of(Numbers()) as loader:
        thread = threading.Thread(target=loader.__next__)
        thread.start()
        thread.join()
        # A signal that the system sends when that thread ends has arrived with the next batches, if there is one.
        assert [len(list(loader)) for _ in range(2)] == [10, 10]


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (acts.fail, ReadError, r"batch 3 of epoch 0 \(samples 30, 31, 32, .*OSError: \[Errno 5\]"),
        (acts.fail_strangely, ReadError, "batch 3 of epoch 0 .*UnpicklableError: odd and even"),
        (acts.damage, CorruptError, "x.h5:/data, row 33: bad"),
    ],
)
def test_an_error_comes_at_its_place_with_type_sample_and_traceback(act, kind, message):
    with loader_of(Numbers(33, act)) as loader:
        assert [next(loader)["y"][0].item() for _ in range(3)] == [0, 10, 20]
        with pytest.raises(kind, match=message) as caught:
            next(loader)
        assert (caught.value.stage, caught.value.worker) == ("read", 0)
        assert caught.value.sample_id == (33 if act is acts.damage else 30)
        notes = "\n".join(caught.value.__notes__)
        assert "In reader process" in notes
        assert f"in {act.__name__}" in notes  # the traceback
        assert isinstance(caught.value.__cause__, OSError) == (act is acts.fail)
        assert [next(loader)["y"][0].item() for _ in range(6)] == [40, 50, 60, 70, 80, 90]
