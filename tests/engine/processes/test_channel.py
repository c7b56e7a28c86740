"""What comes from a reader process, and its end."""

import errno
import os
import signal
from pathlib import Path

import pytest
from support.processes import loader_of, pid_of, running, sharing
from support.sources import reader_sources as acts
from support.sources.reader_sources import BadInChildAtLength, Numbers

from lit_async_data.errors import AsyncDataError, WorkerError

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", ["os.memfd_create", "mmap.mmap", "os.pipe", "socket.socketpair"])
def test_a_want_of_descriptors_is_named_with_the_limit_to_raise(name, monkeypatch):
    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    loader = loader_of(Numbers())
    with monkeypatch.context() as patched:
        patched.setattr(name, none_left)
        with loader, pytest.raises(AsyncDataError, match=r"Too many open files.*ulimit -n"):
            next(loader)


def test_a_process_that_was_killed_for_lack_of_memory_says_so(monkeypatch, caplog):
    with loader_of(Numbers()) as loader:
        next(loader)
        monkeypatch.setattr("lit_async_data.engine.processes.channel.out_of_memory_kills", lambda: 10**9)
        os.kill(killed := pid_of(loader), signal.SIGKILL)
        while pid_of(loader) == killed:
            loader.next()
    assert "was killed by SIGKILL (out of memory: the kernel has killed processes of this container" in caplog.text


def test_a_process_that_cannot_begin_is_an_error_with_its_reason_though_that_is_longer_than_the_pipe():
    with loader_of(BadInChildAtLength()) as loader:
        with pytest.raises(WorkerError, match="failed: ImportError: xxx") as caught:
            next(loader)
        assert str(caught.value).count("x") >= 2**18
        assert isinstance(caught.value.__cause__, ImportError)


def test_the_end_of_a_loader_reaches_a_shared_process_though_a_fork_keeps_its_pipe():
    loaders = [loader_of(Numbers(), workers=1) for _ in range(2)]
    sharing(*loaders)
    for loader in loaders:
        next(loader)
    descriptors = Path("/proc") / str(pid_of(loaders[0])) / "fd"
    both = len(list(descriptors.iterdir()))
    (reader,) = running(loaders[1])._readers
    copies = [os.dup(end.fileno()) for end in reader.channel._end if not end.closed]
    loaders[1].close()
    while len(list(descriptors.iterdir())) > both - 6:  # its setup, its slots and three pipes
        next(iter(loaders[0].next, None))
    for copied in copies:
        os.close(copied)
    loaders[0].close()


def test_a_log_record_that_cannot_be_read_here_is_reported_and_costs_nothing(caplog):
    with loader_of(Numbers(33, acts.warn_oddly)) as loader:
        assert [next(loader)["y"][0].item() for _ in range(10)] == list(range(0, 100, 10))
        next(iter(loader.next, None))
    assert "a log record of another process could not be read: TypeError" in caplog.text
