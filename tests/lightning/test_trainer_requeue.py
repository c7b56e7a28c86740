"""`RequeueBetweenBatches`: where a run of SLURM is saved after the signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from support.lightning.trainer import BATCH, CountingSource, Recorder, datamodule, trainer
from support.ranks.slurm import environment

from lit_async_data import DevicePrefetcher
from lit_async_data.lightning.requeue import RequeueBetweenBatches

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before:UserWarning")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The environment of a job; its `scontrol` ends nothing."""
    for name, value in environment(tmp_path, "77").items():
        monkeypatch.setenv(name, value)
    Path(tmp_path, "bin/scontrol").write_text("#!/bin/sh\necho $@ >> $SCONTROL_LOG\n")
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)  # Lightning leaves its own


def signalled(folder, stage, number, **options):
    """Trains with a signal in a batch of a stage; returns the counters of what was saved, as (epoch, batches)."""
    seen = []

    def on_step(now, batch):
        seen.append(now)
        if (now, seen.count(now)) == (stage, number + 1):
            os.kill(os.getpid(), signal.SIGUSR1)

    source = CountingSource()
    run = trainer(DevicePrefetcher(), RequeueBetweenBatches(), default_root_dir=folder, **{"max_epochs": 2} | options)
    run.fit(Recorder(on_step), datamodule=datamodule(train=source, val=CountingSource(9)))
    assert (folder / "scontrol.log").read_text() == "requeue 77\n"
    (saved,) = folder.glob("hpc_ckpt_*.ckpt")
    checkpoint = torch.load(saved, weights_only=False)
    return checkpoint["epoch"], checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]


@pytest.mark.parametrize(
    ("stage", "number", "options", "saved"),
    [
        pytest.param("train", 2, {}, (0, 3), id="in a step"),
        pytest.param("train", 0, {"accumulate_grad_batches": 3}, (0, 3), id="while gradients are accumulated"),
        pytest.param("train", 5, {}, (1, 0), id="in the last step of an epoch"),
        pytest.param("val 0", 1, {"val_check_interval": 2}, (0, 2), id="in validation"),
        pytest.param("val 0", 5, {}, (2, 6), id="in the last validation"),
    ],
)
def test_the_signal_is_obeyed_between_two_steps(slurm, stage, number, options, saved):
    assert 22 // BATCH == 5  # six batches of training; three of validation
    assert signalled(slurm, stage, number, **options) == saved
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_nothing_is_done_outside_of_slurm(tmp_path):
    handlers = []
    model = Recorder(lambda *_: handlers.append(signal.getsignal(signal.SIGUSR1)))
    trainer(RequeueBetweenBatches(), default_root_dir=tmp_path).fit(
        model, datamodule=datamodule(train=CountingSource())
    )
    assert set(handlers) == {signal.SIG_DFL}


def test_a_handler_of_the_user_stays(slurm):
    calls = []
    handler = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    try:
        model = Recorder(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        run = trainer(RequeueBetweenBatches(), default_root_dir=slurm)
        run.fit(model, datamodule=datamodule(train=CountingSource()))
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert len(calls) == 6
