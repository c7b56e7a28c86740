"""Resumed training: sees the batches of an uninterrupted run, or is refused."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from support.trainer import CountingSource, Recorder, datamodule, pl, plan, trainer

import lit_async_data as lad
from lit_async_data.errors import ResumeError
from lit_async_data.lightning.resume import newest_resumable

# Lightning remarks on callbacks that a resumed run lacks, on loaders without a state, on stages without data.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS, EPOCHS = 6, 3
WHOLE = [plan(epoch) for epoch in range(EPOCHS)]


class Saver(pl.Callback):
    """Saves a checkpoint in a hook, at a given batch of the second epoch."""

    def __init__(self, path, hook, batches=None):
        self.path, self.batches = str(path), batches
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        now = trainer.fit_loop.epoch_loop.batch_progress.current
        if trainer.current_epoch == 1 and self.batches in (None, now.ready):
            trainer.save_checkpoint(self.path)


def fitted(*callbacks, loader=None, **options):
    """A run of three epochs with validation."""
    fit = trainer(*callbacks, max_epochs=EPOCHS, **{"limit_val_batches": 2} | options)
    dm = datamodule(loader, train=CountingSource(), val=CountingSource(width=1))
    return fit, dm


def saved(tmp_path, hook, batches=None, **options):
    path = tmp_path / "at.ckpt"
    fit, dm = fitted(Saver(path, hook, batches), **options)
    fit.fit(Recorder(), datamodule=dm)
    return path


def resumed(path, callbacks=list, **options):
    """The batches of each epoch that a resumed run sees."""
    model = Recorder()
    fit, dm = fitted(*callbacks(), **options)
    fit.fit(model, datamodule=dm, ckpt_path=str(path))
    return model.seen["train"]


with_and_without = pytest.mark.parametrize(
    "callbacks", [list, lambda: [lad.DevicePrefetcher()]], ids=["alone", "externally_driven"]
)


@with_and_without
@pytest.mark.parametrize(
    ("hook", "batches", "first"),
    [
        ("on_train_batch_start", 1, 1),  # interrupted before the first step
        ("on_before_backward", 1, 1),
        ("on_train_batch_end", STEPS, 2),
        ("on_validation_start", STEPS, 2),
        ("on_validation_end", STEPS, 2),
        ("on_train_epoch_end", STEPS, 2),
    ],
)
def test_from_the_end_of_an_epoch_the_batches_are_those_of_an_uninterrupted_run(
    tmp_path, callbacks, hook, batches, first
):
    path = saved(tmp_path, hook, batches)
    assert resumed(path, callbacks) == WHOLE[first:]


@with_and_without
@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward", "on_train_batch_end"])
def test_in_the_middle_of_an_epoch_it_is_refused(tmp_path, callbacks, hook, batches):
    path = saved(tmp_path, hook, batches)
    done = batches if hook == "on_train_batch_end" else batches - 1
    if not done:
        assert resumed(path, callbacks) == WHOLE[1:]
        return
    with pytest.raises(ResumeError, match=f"at.ckpt was written after {done} of 6 batches of epoch 1, and") as caught:
        resumed(path, callbacks)
    assert caught.value.file == str(path)


class StopError(Exception):
    pass


class Stopping(Recorder):
    """Fails at a batch of the second epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def training_step(self, batch, number):
        if (self.current_epoch, number) == (1, self.batch):
            raise StopError
        return super().training_step(batch, number)


def kept(folder, **options):
    return pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}-{step}", **options)


@with_and_without
@pytest.mark.parametrize("batch", [0, 2, 5])
def test_what_an_exception_leaves_is_refused_in_mid_epoch(tmp_path, callbacks, batch):
    folder = tmp_path / "kept"
    saving = [kept(folder, save_top_k=-1), pl.callbacks.OnExceptionCheckpoint(folder)]
    fit, dm = fitted(*saving, enable_checkpointing=True)
    with pytest.raises(StopError):
        fit.fit(Stopping(batch), datamodule=dm)
    path = folder / "on_exception.ckpt"
    if batch == 0:
        assert resumed(path, callbacks) == WHOLE[1:]
        return
    with pytest.raises(ResumeError, match=f"after {batch} of 6 batches of epoch 1.*resume from .*epoch=0-step=6.ckpt"):
        resumed(path, callbacks)
    assert resumed(folder / "epoch=0-step=6.ckpt", callbacks) == WHOLE[1:]


@with_and_without
@pytest.mark.parametrize(
    "options",
    [
        {"every_n_train_steps": 2, "save_on_train_epoch_end": False},
        {"val_check_interval": 0.5},
        {"val_check_interval": 0.5, "accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 4, "every_n_train_steps": 1},
        {"limit_train_batches": 4, "every_n_train_steps": 1},
        {"reload_dataloaders_every_n_epochs": 1, "every_n_train_steps": 3},
    ],
    ids=str,
)
def test_what_a_model_checkpoint_has_kept_is_right_or_refused(tmp_path, callbacks, options):
    """Each of its files gives the batches of an uninterrupted run, or an error if batches would come twice."""
    its = {name: value for name, value in options.items() if name.endswith("steps") or name.startswith("save")}
    of_fit = {name: value for name, value in options.items() if name not in its}
    folder, steps = tmp_path / "kept", options.get("limit_train_batches", STEPS)
    fit, dm = fitted(kept(folder, save_top_k=-1, **its), enable_checkpointing=True, **of_fit)
    fit.fit(Recorder(), datamodule=dm)
    refused = []
    for path in folder.iterdir():
        counted = torch.load(path, weights_only=False)["loops"]["fit_loop"]
        epoch = counted["epoch_progress"]["current"]["ready"] - 1
        done = counted["epoch_loop.batch_progress"]["current"]["processed"]
        if done == steps:
            assert resumed(path, callbacks, **of_fit) == [order[:steps] for order in WHOLE[epoch + 1 :]]
        else:
            with pytest.raises(ResumeError, match=f"after {done} of {steps} batches of epoch {epoch}"):
                resumed(path, callbacks, **of_fit)
            refused.append(path)
    assert 0 < len(refused) < len(list(folder.iterdir()))


def test_signals_of_a_cluster_leave_checkpoints_that_are_refused(tmp_path, monkeypatch):
    """As on SLURM: on a signal Lightning saves in mid-epoch, and the next job finds that file."""
    folder = tmp_path / "kept"
    fit, dm = fitted(kept(folder), enable_checkpointing=True, default_root_dir=tmp_path)

    def signalled(stage, batch):
        if (stage, fit.current_epoch, fit.fit_loop.epoch_loop.batch_idx) == ("train", 1, 3):
            fit.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")

    fit.fit(Recorder(signalled), datamodule=dm)
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "job"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("lightning_fabric.plugins.environments.SLURMEnvironment.detect", lambda: True)
    again, dm = fitted(kept(folder), enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(
        ResumeError,
        match=r"hpc_ckpt_1.ckpt was written after 3 .* resume from .*kept/epoch=2.* belongs to the same training",
    ):
        again.fit(Recorder(), datamodule=dm)


@with_and_without
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_takes_any_checkpoint(tmp_path, callbacks, stage):
    path = saved(tmp_path, "on_train_batch_end", 2)
    model, name = Recorder(), stage.replace("validate", "val")
    dm = datamodule(**{name: CountingSource()})
    getattr(trainer(*callbacks()), stage)(model, datamodule=dm, ckpt_path=str(path))
    assert model.seen == {f"{name} 0": [plan(0, shuffle="none")]}


def loader():
    options = {"batch_size": 4, "shuffle": True, "queue_depth": 3, "return_indices": True}
    return lad.AsyncLoader(CountingSource(), options)


@pytest.mark.parametrize("nested", [lambda each: each, lambda each: [each], lambda each: {"a": each}])
def test_a_loader_without_a_datamodule_is_refused_under_the_callback(tmp_path, nested):
    class Nested(Recorder):
        def training_step(self, batch, number):
            while "index" not in batch:
                batch = batch["a"] if isinstance(batch, dict) else batch[0]
            return super().training_step(batch, number)

    saver = Saver(tmp_path / "at.ckpt", "on_train_batch_end", 2)
    ended = Saver(tmp_path / "end.ckpt", "on_train_epoch_end")
    with loader() as train:
        trainer(saver, ended, lad.DevicePrefetcher(), max_epochs=3).fit(Nested(), nested(train))
    with loader() as train, pytest.raises(ResumeError, match=r"after 2 of 6 batches.*resume from .*end.ckpt"):
        trainer(lad.DevicePrefetcher(), max_epochs=3).fit(Nested(), nested(train), ckpt_path=saver.path)
    model = Nested()
    with loader() as train:
        trainer(lad.DevicePrefetcher(), max_epochs=3).fit(model, nested(train), ckpt_path=ended.path)
    assert model.seen["train"] == WHOLE[2:]


def test_a_loader_without_datamodule_and_callback_has_the_warning_of_lightning(tmp_path):
    class Blind(Recorder):
        def see(self, *_):
            pass

    saver = Saver(tmp_path / "at.ckpt", "on_train_batch_end", 2)
    with loader() as train:
        trainer(saver, max_epochs=2).fit(Blind(), train)
    with loader() as train, pytest.warns(UserWarning, match="your dataloader is not resumable"):
        trainer(max_epochs=2).fit(Blind(), train, ckpt_path=saver.path)


def test_a_short_loader_that_begins_again_in_mid_epoch_is_no_resumed_run(tmp_path):
    class Both(Recorder):
        def training_step(self, batch, number):
            return super().training_step(batch["long"], number)

    with loader() as long, lad.AsyncLoader(CountingSource(8), {"batch_size": 4}) as short:
        ended = Saver(tmp_path / "end.ckpt", "on_train_epoch_end")
        trainer(ended, lad.DevicePrefetcher(), max_epochs=3).fit(Both(), {"long": long, "short": short})
    model = Both()
    with loader() as long, lad.AsyncLoader(CountingSource(8), {"batch_size": 4}) as short:
        both = {"long": long, "short": short}
        trainer(lad.DevicePrefetcher(), max_epochs=3).fit(model, both, ckpt_path=ended.path)
    assert model.seen["train"] == WHOLE[2:]


# -- what is recommended -----------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_of_an_epochs_end_is_named(tmp_path):
    middle = saved(tmp_path, "on_train_batch_end", 2)
    with pytest.raises(ResumeError, match=r"no checkpoint from the end of an epoch was found.*save_on_train_epoch_end"):
        resumed(middle)
    end = tmp_path / "kept"
    end.mkdir()
    end = saved(end, "on_train_epoch_end")
    for age, name in enumerate(["newest.ckpt", "middle", "older.ckpt"]):
        copy = shutil.copy(middle if name == "middle" else end, tmp_path / name)
        os.utime(copy, ns=(10**18 - age, 10**18 - age))
    for name, content in {
        "text.ckpt": b"no checkpoint",
        "empty.ckpt": b"",
        "cut.ckpt": end.read_bytes()[:3000],
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.ckpt").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    with pytest.raises(
        ResumeError, match=r"resume from .*/newest.ckpt, the newest checkpoint from the end of an epoch$"
    ):
        resumed(middle)
    assert newest_resumable([tmp_path / "nowhere", end.parent]) == end


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_a_file_that_nobody_asked_for_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counters = {"current": {"ready": 6, "processed": 6}, "is_last_batch": True}
    loops = {"fit_loop": {"epoch_loop.batch_progress": counters}}
    harmful = {"hyper_parameters": [Harmful(), {Harmful()}], "loops": loops, "weights": torch.nn.Linear(1, 1)}
    torch.save(harmful, tmp_path / "x.ckpt")
    assert newest_resumable([tmp_path]) == tmp_path / "x.ckpt"
    assert not (tmp_path / "harm").exists()
