"""A reader process starts with its first loader, serves several, and ends with the last."""

import collections
import copy
import os
import pickle
import select
import signal
import threading

import pytest
from support.processes import loader_of, pid_of, running, sharing, wait_for_the_end_of
from support.sources.reader_sources import Numbers

from lit_async_data.errors import ClosedError, StalledError

pytestmark = pytest.mark.processes


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


def test_a_stopped_process_is_a_stall_that_says_so_and_ends_with_its_loader(capfd):
    with loader_of(Numbers()) as loader:
        next(loader)
        running(loader).timeout_s = 0.5
        os.kill(stopped := pid_of(loader), signal.SIGSTOP)
        with pytest.raises(StalledError, match=rf"reader process {stopped} \(stopped by a signal"):
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


def test_loaders_that_share_a_process_have_their_own_batches():
    shuffled = {"shuffle": "global", "seed": 1}
    with loader_of(Numbers(), workers=0, worker_kind="thread", **shuffled) as alone:
        wanted = [batch["y"].tolist() for batch in alone]
    with loader_of(Numbers(), **shuffled) as train, loader_of(Numbers()) as val:
        sharing(train, val)
        batches = iter(train)
        seen = [next(batches)["y"].tolist() for _ in range(3)]
        assert [batch["y"][0].item() for batch in val] == list(range(0, 100, 10))
        assert pid_of(train) == pid_of(val)
        val.close()
        assert seen + [batch["y"].tolist() for batch in iter(batches.__next__, None)] == wanted


def test_a_shared_process_ends_with_its_last_loader_and_starts_anew():
    train, val = (loader_of(Numbers()) for _ in range(2))
    sharing(train, val)
    next(train), next(val)
    process = pid_of(train)
    end = os.pidfd_open(process)
    train.close()
    assert not select.select([end], [], [], 0)[0]
    next(val)
    val.close()
    assert select.select([end], [], [], 60)[0]
    os.close(end)
    with loader_of(Numbers()) as third:
        sharing(train, third)
        next(third)
        assert pid_of(third) != process


def test_all_loaders_of_a_shared_process_that_is_killed_go_on_with_the_next(caplog):
    loaders = [loader_of(Numbers()) for _ in range(3)]
    sharing(*loaders)
    for loader in loaders[:2]:
        next(loader)
    killed = pid_of(loaders[0])
    os.kill(killed, signal.SIGKILL)
    for loader in loaders[:2]:
        number = 1
        while pid_of(loader) == killed:
            assert loader.next()["y"][0].item() == 10 * (number % 10)
            number += 1
    next(loaders[2])
    assert len({pid_of(loader) for loader in loaders}) == 1
    assert sum(f"reader process {killed} was killed" in line for line in caplog.messages) == 2
    for loader in loaders:
        loader.close()


def test_a_copy_of_a_loader_and_a_pickled_process_begin_with_none():
    with loader_of(Numbers()) as loader:
        other = copy.deepcopy(loader)
        next(loader)
        next(other)
        assert pid_of(loader) != pid_of(other)
        other.close()
        process = loader._machinery.wiring.reader_processes
        assert pickle.loads(pickle.dumps(process)) is not process
