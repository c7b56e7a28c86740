"""Processes of a distributed run: their environment, also as tasks of a job of SLURM, and waiting for all of them."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch

# Seconds. Each process imports torch and Lightning, on a machine that may have one core.
PATIENCE_S = 280
# Ends the tasks of the job, as SLURM does when it requeues one; so they must have saved before.
SCONTROL = """#!/bin/sh
echo "$@" >> "$SCONTROL_LOG"
if [ -e "$SCONTROL_LOG.tasks" ]; then kill -KILL $(cat "$SCONTROL_LOG.tasks"); else kill -TERM $PPID; fi
"""
# Starts the tasks of one node.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
rm -f "$SCONTROL_LOG.tasks"
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_NODEID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    echo $! >> "$SCONTROL_LOG.tasks"
done
wait
"""


# Not those that the system gives to outgoing connections: one could take the port before the first rank listens there.
_PORTS = itertools.count(20_000 + os.getpid() * 10 % 10_000)


def free_port():
    """A port that nobody listens on, another one for each call in this process."""
    for port in _PORTS:
        with contextlib.closing(socket.socket()) as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def send(number, child):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def codes_of(children):
    """Waits until all processes have ended, one has failed, or time is up: their codes, None for those that run."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return codes
        with contextlib.suppress(subprocess.TimeoutExpired):
            children[codes.index(None)].wait(timeout=0.1)
    return [child.poll() for child in children]


def leave_process_group():
    """The end of a program that Lightning or Fabric gave a process group, which they leave running on the CPU.

    A thread of gloo may hold a tensor of the last collective for a moment longer. It frees it with the GIL, and a
    thread that asks for the GIL while Python ends is ended by Python, which C++ answers by aborting the process.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def as_ranks(command, ranks=2, **variables):
    """A command once per rank of one machine, with its environment variables, as `run_together` takes them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": ranks, "NODE_RANK": 0} | variables
    return [(command, common | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(ranks)]


def run_together(commands, folder):
    """Runs commands at the same time, and asserts that all succeed.

    If one fails or hangs, the stacks of those that still run are in the message.

    Args:
        commands: Pairs of arguments and environment variables, which are added to those of this process.
        folder: Where they run, and where their outputs go: ``0.txt``, ``1.txt``, …
    """
    # Not through pipes: a process whose pipe is full would wait for its reader, and the others for it.
    logs = [folder / f"{number}.txt" for number in range(len(commands))]
    common = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with contextlib.ExitStack() as stack:
        children = []
        for (arguments, variables), log in zip(commands, logs):
            child = subprocess.Popen(
                arguments,
                env=common | {name: str(value) for name, value in variables.items()},
                cwd=folder,
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to end also what it started
            )
            stack.callback(child.wait)
            stack.callback(send, signal.SIGKILL, child)
            children.append(child)
        codes = codes_of(children)
        for child, code in zip(children, codes):
            if code is None:
                send(signal.SIGABRT, child)  # faulthandler writes the stacks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=10)
    assert codes == [0] * len(codes), f"{codes}\n" + "\n".join(log.read_text()[-8000:] for log in logs)


def environment(folder, job, *, rank=0, ranks=1, restarts=0, **more):
    """The variables of one task of a job, with a PATH to a `scontrol` that notes its calls in ``scontrol.log``."""
    commands = Path(folder, "bin")
    commands.mkdir(exist_ok=True)
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    found = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SCONTROL_LOG": f"{folder}/scontrol.log",
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": ranks,
        "SLURM_NTASKS_PER_NODE": ranks,
        "SLURM_NNODES": 1,
        "SLURM_CPUS_PER_TASK": 1,
        "SLURM_NODEID": 0,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        **more,
    }
    if restarts:  # not set before the first restart
        found["SLURM_RESTART_COUNT"] = restarts
    return {name: str(value) for name, value in found.items()}
