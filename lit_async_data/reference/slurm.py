"""Runs of ``train.py`` in jobs of SLURM: the id of the run, and where it continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lit_async_data.errors import ConfigError

# Lightning writes the first kind when it gets the signal, ModelCheckpoint(save_last=True) the second.
CHECKPOINTS = ("hpc_ckpt_*.ckpt", "checkpoints/last*.ckpt")


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """The id of this job as `squeue` shows it. A requeue does not change it.

    Args:
        environment: Environment variables.

    Raises:
        ConfigError: This is no job of SLURM.

    Example:
        >>> job_id({"SLURM_JOB_ID": "1234"})
        '1234'
        >>> job_id({"SLURM_JOB_ID": "1240", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "6"})
        '1234_6'
    """
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError(
            "hydra: slurm names the run by SLURM_JOB_ID, which is not set; start it with sbatch, as in "
            "examples/train.sbatch, or leave hydra=slurm out"
        )
    return environment["SLURM_JOB_ID"]


def requeued_from(folder: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> Path | None:
    """The checkpoint from which a requeued job continues: the newest in its folder.

    After a time limit that is what Lightning wrote at the signal. After the failure of a node it may be the last one
    of the `ModelCheckpoint`.

    Args:
        folder: Folder of the run.
        environment: Environment variables.

    Returns:
        Its path; None if the job starts for the first time, or was ended before its first checkpoint.

    Raises:
        ConfigError: Another run of the same job has written to the folder.
    """
    found = [path for pattern in CHECKPOINTS for path in Path(folder).glob(pattern)]
    if found and not int(environment.get("SLURM_RESTART_COUNT", "0")):
        raise ConfigError(
            f"hydra: slurm has one run per job, and {folder} has the checkpoints of another, though the job has not "
            "been requeued; use one job per run, or leave hydra=slurm out"
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
