"""Processes, as tests see them."""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from lit_async_data import AsyncLoader, WorkerError


def patience():
    """Repeats a loop that waits for processes to start: until it ends, or a minute and a half has passed."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        yield


def children(process):
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if int(lines["PPid"]) == process and "Z" not in lines["State"]:
                found.add(int(lines["Pid"]))
    return found


def wait_for_the_end_of(pid):
    """Wait until a process has ended; a minute at most."""
    with contextlib.suppress(ProcessLookupError):
        end = os.pidfd_open(pid)
        try:
            assert select.select([end], [], [], 60)[0]
        finally:
            os.close(end)


def in_fork(act):
    """Exit status of a forked child that does something within 10 s: 0, or 3 where that raises `WorkerError`, or 1."""
    child = os.fork()
    if not child:
        signal.alarm(10)
        status = 1
        try:
            act()
            status = 0
        except WorkerError as error:
            status = 3 if "fork" in str(error) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def loader_of(source, hooks=None, **options):
    """A loader whose batches reader processes read in the stored order."""
    options = {"batch_size": 10, "shuffle": False, "worker_kind": "process", **options}
    return AsyncLoader(source, options, **(hooks or {}))


def running(loader):
    return loader._run.engine.feed.pipeline


def process_ids(loader):
    return [each.channel.pid for each in running(loader)._readers]


def pid_of(loader):
    return process_ids(loader)[0]


def in_two_processes(loader):
    """Take passes until two processes read; returns their ids."""
    for _ in patience():
        found = {pid for batch in loader for pid in batch["process"].tolist()}
        if len(found) == 2 and found == set(process_ids(loader)):
            return found
    raise AssertionError("the second process never started")
