"""Starts the processes of a distributed run, and waits for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess

# Seconds. Each process imports torch and Lightning, on a machine that may have one core.
PATIENCE_S = 250


def free_port():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def end(child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def run_together(commands, folder):
    """Runs commands at the same time, and asserts that all succeed.

    Args:
        commands: Pairs of arguments and environment variables, which are added to those of this process.
        folder: Where they run, and where their outputs go: ``0.txt``, ``1.txt``, …
    """
    # Not through pipes: a process whose pipe is full would wait for its reader, and the others for it.
    logs = [folder / f"{number}.txt" for number in range(len(commands))]
    with contextlib.ExitStack() as stack:
        children = []
        for (arguments, variables), log in zip(commands, logs):
            child = subprocess.Popen(
                arguments,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in variables.items()},
                cwd=folder,
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to end also what it started
            )
            stack.callback(child.wait)
            stack.callback(end, child)
            children.append(child)
        codes = [child.wait(timeout=PATIENCE_S) for child in children]
    assert not any(codes), "\n".join(log.read_text()[-4000:] for log in logs)
