"""`hydra=slurm`: a job that is requeued at its time limit goes on in its folder, with the next sample."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
import torch
from support.lightning.command_line import LIGHTNING_SAYS, QUIET, ROOT
from support.ranks.processes import free_port, run_together
from support.ranks.slurm import environment

from lit_async_data.errors import ConfigError
from lit_async_data.order.plan import EpochPlan
from lit_async_data.reference.slurm import job_id, requeued_from

pytestmark = [pytest.mark.filterwarnings(said) for said in LIGHTNING_SAYS]

SAMPLES, BATCH, EPOCHS = 100, 8, 3  # 13 batches, the last of 4 samples


@pytest.fixture
def job(typed, monkeypatch, tmp_path, images):
    """Starts or restarts a job: ``job(*typed, signal_at=…, restarts=…)`` returns the end of its ``train.py``."""
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGUSR1)}

    def run(*typed_too, job="77", signal_at=None, **more):
        for name, value in environment(tmp_path, job, **more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SIGNAL_AT", json.dumps([signal_at] if signal_at else []))
        quiet = [each for each in QUIET if each.partition("=")[0] not in {each.partition("=")[0] for each in typed_too}]
        return typed("hydra=slurm", *settings(images), *quiet, *typed_too)[1]

    yield run
    for kind, handler in handlers.items():  # Lightning leaves its own for SIGTERM
        signal.signal(kind, handler)


def settings(images):
    return [
        "data=hdf5",
        f"data.train.path={images}",
        f"data.val.path={images}",
        "model._target_=support.ranks.slurm_job.Remembering",
        "loader.return_indices=true",
        f"loader.batch_size={BATCH}",
        "loader.shuffle=global",
        "trainer.num_sanity_val_steps=0",
        f"trainer.max_epochs={EPOCHS}",
    ]


def order(seed=42):
    plans = [
        EpochPlan(length=SAMPLES, batch_size=BATCH, shuffle="global", seed=seed, epoch=epoch) for epoch in range(EPOCHS)
    ]
    return [sample for plan in plans for step in range(len(plan)) for sample in plan.batch(step).samples.tolist()]


def seen(checkpoint):
    state = torch.load(checkpoint)["state_dict"]
    return state["seen"][: state["count"]].tolist()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(["train", 4], ["train", 18], id="in a step"),
        pytest.param(["train", 12], ["val", 26], id="at the end of an epoch and in validation"),
    ],
)
def test_a_job_that_is_requeued_twice_sees_every_sample_once(job, tmp_path, first, second):
    assert job(signal_at=first) is None
    assert job(signal_at=second, restarts=1) is None
    assert job(restarts=2) is None
    folder = tmp_path / "logs/train/slurm"
    assert os.listdir(folder) == ["77"]
    assert seen(folder / "77/checkpoints/last.ckpt") == order()
    assert (tmp_path / "scontrol.log").read_text().splitlines() == ["requeue 77"] * 2


@pytest.mark.long
def test_the_batch_script_is_requeued_twice_with_two_ranks(tmp_path, images):
    """Each rank gets its signal in another step. The processes are killed as soon as `scontrol` is called."""
    venv = tmp_path / ".venv/bin"
    venv.mkdir(parents=True)
    (venv / "activate").write_text(f"PATH={venv}:$PATH")
    (venv / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "python").chmod(0o755)
    for name in ("train.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    typed = [*settings(images), *QUIET, "trainer.accelerator=cpu", "loader.worker_kind=process"]
    typed += [f"loader.batch_size={BATCH // 2}"]
    common = {"PYTHONPATH": os.pathsep.join(sys.path), "PROJECT_ROOT": tmp_path, "MASTER_ADDR": "127.0.0.1"}
    places = [[["train", 4], ["train", 5]], [["train", 19], ["train", 18]], []]
    for restarts, signal_at in enumerate(places):
        variables = environment(tmp_path, "77", ranks=2, restarts=restarts) | common
        variables |= {"MASTER_PORT": free_port(), "SIGNAL_AT": json.dumps(signal_at)}
        job = [["bash", str(ROOT / "examples/train.sbatch"), *typed]]
        run_together([(*job, variables)], tmp_path)
    folder = tmp_path / "logs/train/slurm"
    assert os.listdir(folder) == ["77"]
    assert seen(folder / "77/checkpoints/last.ckpt") == order()
    assert (tmp_path / "scontrol.log").read_text().splitlines() == ["requeue 77"] * 2


def test_a_signal_while_next_reads_loses_no_sample(job, tmp_path):
    """Without threads the loop itself reads, so this signal comes inside `next`."""
    sender = f"_target_: support.ranks.slurm_job.SignalAtSample, sample: {order()[44]}"
    signalling = f"+data.sample_transform={{train: {{{sender}}}}}"
    assert job("loader.workers=0", signalling) is None
    assert job("loader.workers=0", restarts=1) is None
    folder = tmp_path / "logs/train/slurm/77"
    assert (folder / "hpc_ckpt_1.ckpt").exists()
    assert seen(folder / "checkpoints/last.ckpt") == order()


def test_each_task_of_an_array_has_its_own_folder(job, tmp_path):
    task = {"SLURM_ARRAY_JOB_ID": 70, "SLURM_ARRAY_TASK_ID": 7}
    assert job("trainer.max_epochs=1", signal_at=["train", 1], **task) is None
    assert os.listdir(tmp_path / "logs/train/slurm") == ["70_7"]
    assert (tmp_path / "scontrol.log").read_text() == "requeue 70_7\n"


def test_loggers_get_the_id_of_the_job(job, composed, tmp_path):
    typed = ["train=false", "test=false", "logger=wandb", "logger.wandb._target_=support.ranks.slurm_job.Notes"]
    assert job(*typed) is None
    assert job(*typed, restarts=1) is None
    notes = (tmp_path / "logs/train/slurm/77/notes.json").read_text().splitlines()
    assert [json.loads(line)["id"] for line in notes] == ["77", "77"]
    assert composed("hydra=slurm", "logger=tensorboard").logger.tensorboard.version == "77"


def test_a_requeued_job_goes_on_whatever_checkpoint_it_was_started_from(job, tmp_path, images):
    assert job(signal_at=["train", 2]) is None
    assert job(f"ckpt_path={images}", restarts=1) is None  # which is none, and is not looked at
    assert seen(tmp_path / "logs/train/slurm/77/checkpoints/last.ckpt") == order()


def test_a_job_without_checkpoint_callback_tests_what_it_has_trained(job, tmp_path, images):
    typed = ["callbacks=none", f"data.test.path={images}", "trainer.limit_test_batches=1", "trainer.max_epochs=1"]
    assert job(*typed, signal_at=["train", 3]) is None
    assert job(*typed, restarts=1) is None
    folder = tmp_path / "logs/train/slurm/77"
    assert json.loads((folder / "tested.json").read_text()) == order()[:SAMPLES]


def test_the_newest_checkpoint_counts(tmp_path):
    requeued = {"SLURM_RESTART_COUNT": "1"}
    assert requeued_from(tmp_path, requeued) is None
    assert requeued_from(tmp_path, {}) is None
    (tmp_path / "checkpoints").mkdir()
    files = [tmp_path / name for name in ("hpc_ckpt_2.ckpt", "checkpoints/last.ckpt", "hpc_ckpt_1.ckpt")]
    for age, file in enumerate(files):
        file.touch()
        os.utime(file, ns=(10**18 - age, 10**18 - age))
    (tmp_path / "checkpoints/epoch_001.ckpt").touch()
    for file in files:
        assert requeued_from(tmp_path, requeued) == file
        file.unlink()


def test_a_second_run_in_one_job_is_refused(tmp_path):
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    with pytest.raises(ConfigError, match=r"one run per job.*has not been requeued"):
        requeued_from(tmp_path, {"SLURM_RESTART_COUNT": "0"})


def test_a_run_outside_of_slurm_says_what_is_missing(typed, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID, which is not set"):
        job_id()
    _, ending = typed("hydra=slurm", *QUIET)
    assert ending.startswith(
        "error: hydra: slurm names the run by SLURM_JOB_ID, which is not set; start it with sbatch"
    )


def test_a_sweep_inside_of_a_job_is_refused(typed, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    _, ending = typed("-m", "hydra=slurm", "seed=1,2", *QUIET)
    assert ending.startswith("error: hydra: slurm with --multirun: a job has one run")
