"""A job of SLURM: the environment of its tasks, and a `scontrol` and a `srun` that do what SLURM does."""

import os
from pathlib import Path

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
