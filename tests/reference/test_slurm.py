"""`hydra=slurm`: a job that is requeued at its time limit goes on in its folder, with the next sample."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from support.lightning.command_line import LIGHTNING_SAYS, QUIET, ROOT
from support.plans import plan_of
from support.ranks.processes import environment, free_port, run_together

pytestmark = [pytest.mark.filterwarnings(said) for said in LIGHTNING_SAYS]

MOST_IN_A_BATCH = 16
SAMPLES, BATCH, EPOCHS = 100, 8, 3  # 13 batches, the last of 4 samples


def reader_processes():
    """The ids of the reader processes of this process. multiprocessing has one too, which SIGUSR1 would end."""
    children = [pid for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()]
    return [int(pid) for pid in children if b"lit_async_data" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Remembering(pl.LightningModule):
    """What it has learned is which samples came, on all ranks, in order: in a checkpoint ``seen`` is what weights are.

    It signals the end of its job's time once, as `sbatch --signal` makes SLURM do. ``SIGNAL_AT`` is JSON, for each rank
    a place: ``["train", 3]`` is the step of training that comes after three steps of the optimizer, likewise ``"val"``.
    """

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("seen", torch.full((1000,), -1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        places = json.loads(os.environ.get("SIGNAL_AT", "[]"))
        self.place = places[int(os.environ["SLURM_PROCID"])] if places else None

    def reach(self, *place):
        if self.place == list(place):
            self.place = None
            for process in (*reader_processes(), os.getpid()):  # SLURM signals all processes of a job
                os.kill(process, signal.SIGUSR1)

    def training_step(self, batch, number):
        own = torch.full((MOST_IN_A_BATCH,), -1)
        own[: len(batch["index"])] = batch["index"]
        ids = self.all_gather(own).reshape(-1, MOST_IN_A_BATCH).T.flatten()
        ids = ids[ids >= 0]
        self.seen[self.count : self.count + len(ids)] = ids
        self.count += len(ids)
        self.reach("train", self.global_step)
        return self.layer(torch.ones(1, 1)).square().mean()

    def validation_step(self, batch, number):
        self.reach("val", self.global_step)
        self.log("val/acc", float(self.global_step))  # ModelCheckpoint saves what is better

    def test_step(self, batch, number):
        with open(f"{self.trainer.default_root_dir}/tested.json", "w") as file:
            json.dump(self.seen[: self.count].tolist(), file)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def job(typed, monkeypatch, tmp_path, images):
    """Starts or restarts a job: ``job(*typed, signal_at=…, restarts=…)`` returns the end of its ``train.py``."""

    def run(*typed_too, signal_at=None, **more):
        for name, value in environment(tmp_path, "77", **more).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SIGNAL_AT", json.dumps([signal_at] if signal_at else []))
        return typed("hydra=slurm", *settings(images), *QUIET, *typed_too)[1]

    return run


def settings(images):
    data = ["data=hdf5", f"data.train.path={images}", f"data.val.path={images}"]
    loader = ["loader.return_indices=true", f"loader.batch_size={BATCH}", "loader.shuffle=global"]
    trainer = ["trainer.num_sanity_val_steps=0", f"trainer.max_epochs={EPOCHS}"]
    return [f"model._target_={__name__}.Remembering", *data, *loader, *trainer]


def order():
    options = {"length": SAMPLES, "batch_size": BATCH, "shuffle": "global", "seed": 42}
    plans = [plan_of(**options, epoch=epoch) for epoch in range(EPOCHS)]
    return [sample for plan in plans for step in range(len(plan)) for sample in plan.batch(step).tolist()]


def seen(checkpoint):
    state = torch.load(checkpoint)["state_dict"]
    return state["seen"][: state["count"]].tolist()


def test_a_job_that_is_requeued_sees_every_sample_once(job, tmp_path):
    """In a step, at the end of an epoch and in a validation."""
    for restarts, signal_at in enumerate((["train", 4], ["train", 12], ["val", 26], None)):
        assert job(signal_at=signal_at, restarts=restarts) is None
    folder = tmp_path / "logs/train/slurm"
    assert os.listdir(folder) == ["77"]
    assert seen(folder / "77/checkpoints/last.ckpt") == order()
    assert (tmp_path / "scontrol.log").read_text().splitlines() == ["requeue 77"] * 3


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


def test_a_job_without_checkpoint_callback_tests_what_it_has_trained(job, tmp_path, images):
    typed = ["callbacks=none", f"data.test.path={images}", "trainer.limit_test_batches=1", "trainer.max_epochs=1"]
    assert job(*typed, signal_at=["train", 3]) is None
    assert job(*typed, restarts=1) is None
    folder = tmp_path / "logs/train/slurm/77"
    assert json.loads((folder / "tested.json").read_text()) == order()[:SAMPLES]
