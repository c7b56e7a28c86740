"""Processes, as tests see them."""

import contextlib
import os
import select
import time
from pathlib import Path


def patience():
    """Repeats a loop that waits for processes to start: until it ends, or a minute and a half has passed."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        yield


def children(process):
    """The ids of the children of a process that have not ended."""
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
