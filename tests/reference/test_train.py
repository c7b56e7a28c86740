"""`train.py` and its configurations, from the command line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import hydra
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from support.lightning.command_line import CONFIGS, LIGHTNING_SAYS, QUIET, ROOT
from support.ranks.processes import as_ranks, run_together

from lit_async_data.reference.suggestions import PACKAGE

with contextlib.suppress(ImportError):
    from pyarrow import csv

    # With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
    csv.read_csv(io.BytesIO(b"a\n1\n"))

GROUPS = sorted(
    path.relative_to(folder)
    for folder in (CONFIGS, PACKAGE)
    for path in folder.rglob("*.yaml")
    if path.parent != CONFIGS
)
pytestmark = [pytest.mark.filterwarnings(said) for said in LIGHTNING_SAYS]


# -- every configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GROUPS, ids=str)
def test_every_configuration_composes_and_resolves(composed, path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    group, choice = str(path.parent), path.stem
    override = f"{group}={choice}"
    given = ["data.train.path=x.h5"] if choice == "hdf5" else []
    cfg = composed(override, *given)
    OmegaConf.to_container(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]), resolve=True)


@pytest.mark.parametrize("choice", [path.stem for path in GROUPS if str(path.parent) in ("experiment", "debug")])
def test_every_experiment_runs(typed, choice):
    group = next(str(path.parent) for path in GROUPS if path.stem == choice)
    _, ending = typed(f"{group}={choice}", "trainer.fast_dev_run=true", *QUIET)
    assert ending is None


def test_ranks_end_their_process_group(tmp_path):
    """Gloo, if left running, may free a tensor while Python ends, and then aborts the process."""
    program = f"""if True:
        import runpy, torch
        start, started = torch.distributed.init_process_group, []
        torch.distributed.init_process_group = lambda *a, **options: started.append(start(*a, **options))
        runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
        assert len(started) == 1
        assert not torch.distributed.is_initialized()
    """
    typed = ["trainer=ddp_sim", "trainer.fast_dev_run=true", "hydra.run.dir=run", *QUIET]
    run_together(as_ranks([sys.executable, "-c", program, *typed], PROJECT_ROOT=tmp_path), tmp_path)


class Flipped:
    """Called with each sample."""

    def __call__(self, sample, rng):
        return {**sample, "flipped": rng is not None}


def test_transforms_of_samples_are_set_like_those_on_the_device(composed, birds):
    typed = [f"data.source.table={birds}/train.csv", "data.source.fields.y=species", "data.source.image_size=8"]
    target = f"_target_: {__name__}.Flipped"
    for setting, stages in (
        (f"+data.sample_transform._target_={__name__}.Flipped", ("train", "val")),
        (f"data.sample_transform={{train: {{{target}}}}}", ("train",)),
    ):
        dm = built(composed, "data=manifest", *typed, "data.split={train: 0.5, val: 0.5}", setting)
        train, val = next(dm.train_dataloader()), next(dm.val_dataloader()[0])
        assert train["flipped"].all()
        assert ("flipped" in val) == ("val" in stages)
        assert not val.get("flipped", torch.zeros(1)).any()
        dm.close()


# -- what is typed wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loader.worker=4"], "loader.worker: no such key; did you mean loader.workers?"),
        (["loadr=threads"], "loadr: no such key; did you mean loader?"),
        (["loader=thread"], "Could not find 'loader/thread' Available options in 'loader': threads"),
        (["trainer.max_epoch=3"], "trainer.max_epoch: no such key; did you mean trainer.max_epochs?"),
        (["loader.workers=four"], "loader.workers: 'four' is not a whole number from 0 to 256 or 'auto'"),
        (["loader.batch_size=0"], "loader.batch_size: 0 is not a whole number from 1 on"),
        (
            ["loader.shuffle=sometimes"],
            "loader.shuffle: 'sometimes' is not one of none, chunk, global, auto, true, false",
        ),
        (["+loader.num_workers=3"], "loader.num_workers: no such option; use workers"),
        (["data.val_loader.workers=-3"], "data.val_loader.workers: -3 is not a whole number"),
        (["callbacks.device_prefetcher.device_depth=-1"], "callbacks.device_prefetcher.device_depth: -1 is not"),
        (["trainer.max_epochs=abc"], "trainer.max_epochs: 'abc' is not a number (the default is 12)"),
        (["trainer.fast_dev_run=maybe"], "trainer.fast_dev_run: 'maybe' is not true or false"),
        (["model.lr=fast"], "model.lr: 'fast' is not a number (the default is 0.01)"),
        (["trainer.accelerator=tpuu"], "trainer: ValueError: You selected an invalid accelerator name"),
        (["train=no"], "train: 'no' is not true or false"),
        (["seed=-1"], "seed: -1 is not a whole number from 0"),
        (["loader.pin_memory=true"], "loader.pin_memory: no such key; leave it out"),
        (["loader.xyzzy=2"], "loader.xyzzy: no such key; there are loader.batch_size, loader.shuffle"),
        (["data.train.path=x.h5"], "data.train.path: no such key; for files of your own, add data=hdf5"),
        (["data.source.table=x.csv"], "data.source.table: no such key; for a table of your own, add data=manifest"),
        (["data=manifest"], "data.source.table: missing; give it, as in data.source.table=VALUE"),
        (["data=manifest", "data.source.table=no.csv"], "no.csv: no such file"),
        (
            ["data=manifest", "data.source.fields.z=w"],
            "there are x, y; to add a field, write +data.source.fields.z=…",
        ),
        (["data=manifest", "data.source.fields={x: a, y: b, z: c}"], "to add one, write +data.source.fields.NAME=…"),
        (["data=hdf5", "data.train.pth=x.h5"], "data.train.pth: no such key; did you mean data.train.path?"),
        (["ckpt_path=nope.ckpt"], "ckpt_path: nope.ckpt is not a file"),
        (["data=hdf5"], "data.train.path: missing; give it, as in data.train.path=VALUE"),
        (["data=hdf5", "data.train.path=no.h5"], "no.h5: no such file"),
        # What was meant, found by the last part of the key; never a key of another stage.
        (["batch_size=32"], "batch_size: no such key; did you mean loader.batch_size?"),
        (["data.loader.batch_size=3"], "data.loader.batch_size: no such key; did you mean loader.batch_size?"),
        (["data.train.batch_size=4"], "did you mean loader.batch_size?"),
        (["data.val.batch_size=4"], "did you mean data.val_loader.batch_size?"),
        (["data.val_loader.shuffle=true"], "to set it for this stage only, write +data.val_loader.shuffle=…"),
        (
            ["model._target_=test_train.Small", "model.depth=2"],
            "to give it to a model of your own, write +model.depth=…",
        ),
        (["model=own"], "model._target_: missing; give it, as in model._target_=VALUE"),
        (["optimizer.lr=1"], "optimizer.lr: no such key; did you mean model.lr?"),
        (["num_workers=2"], "num_workers: no such key; did you mean loader.workers?"),
        (["prefetch_factor=2"], "prefetch_factor: no such key; for the loader, use queue_depth"),
        (["epochs=2"], "epochs: no such key; did you mean trainer.max_epochs or trainer.min_epochs?"),
        (["trainer.xyzzy=2"], "trainer.overfit_batches, … (30 in all; --cfg job shows them)"),
        (["data=hdf5", "data.path=x.h5"], "data.path: no such key; did you mean data.train.path?"),
        (["data=hdf5_split", "data.path=x.h5"], "data.path: no such key; did you mean data.source.path?"),
        (["path=x.h5"], "path: no such key; for files of your own, write data=hdf5 data.train.path=…"),
        (["table=x.csv"], "table: no such key; for a table of your own, write data=manifest data.source.table=…"),
        (["data.path=x.h5"], "data.path: no such key; for files of your own, write data=hdf5 data.train.path=…"),
        (
            ["data=hdf5", "data.train.path=x.h5", "data.train.fields.x=X_train"],
            "data.train.fields.x: no such key; set the whole section: 'data.train.fields={x: X_train, y: labels}'",
        ),
        # A batch key is not a setting of the model, and a choice that has the setting is named.
        (
            ["data.train.fields.x=X_train"],
            "the default data has no train.fields; one that has it: data=hdf5, data=manifest_stages",
        ),
        (["data.train.layout.x=NHWC"], "the default data has no train.layout; one that has it: data=hdf5"),
        (["data=hdf5", "data.train.layout.x=NHWC"], "set the whole section: 'data.train.layout={x: NHWC}'"),
        (
            ["data=manifest", "data.train.fields.y=bird"],
            "data.train.fields.y: no such key; its stages share one source; did you mean data.source.fields.y?",
        ),
        (["data.x=3"], "data.x: no such key; there are data.train"),
        (["data.transform=3"], "data.transform: no such key; there are data.train"),
        (
            ["data.train_loader.batch_size=3"],
            "data.train_loader.batch_size: no such key; did you mean loader.batch_size?",
        ),
        (
            ["data.split.train=0.8"],
            "the default data has no split; one that has it: data=digits_manifest, data=hdf5_split, data=manifest",
        ),
        (
            ["data=manifest_stages", "data.split={train: 1}"],
            "data=manifest_stages has no split; one that has it",
        ),
        (["data=hdf5_split", "data.split.train=0.8"], "'data.split={train: 0.8, val: 0.15, test: 0.15}'"),
        # What Hydra and Lightning would say over several lines, or in words that lead astray.
        (["data.train.path=x (v2).h5"], "only inside quotes; quote it: 'data.train.path=\"x (v2).h5\"'"),
        (["data.train.path=lr=0.1/x.h5"], "only inside quotes; quote it: 'data.train.path=\"lr=0.1/x.h5\"'"),
        (["ckpt_path=runs[1]/last.ckpt"], "only inside quotes; quote it: 'ckpt_path=\"runs[1]/last.ckpt\"'"),
        (
            ["+tags.new=(a)"],
            "tags.new: (a) has characters that Hydra accepts only inside quotes; quote it: '+tags.new=",
        ),
        (
            ["data.train.path=my", "data", "file.h5"],
            "data: no key; write KEY=VALUE, or if it belongs to data.train.path, quote it: ",
        ),
        (
            ["data=hdf5", "file.h5"],
            "file.h5: no key; write KEY=VALUE, or if it belongs to data, quote it: 'data=\"hdf5 file.h5\"'",
        ),
        (["x.h5"], "x.h5: no key; write KEY=VALUE, as in loader.workers=2"),
        (["data.loader.xyzzy=2"], "data.loader.xyzzy: no such key; there are loader.batch_size, loader.shuffle"),
        (["data=hdf5", "loader.workers"], "loader.workers: no value; write loader.workers=VALUE"),
        (["data.train path=x.h5"], "data.train path: not a key; a key has letters"),
        (
            ["data.train.path=a,b.h5"],
            "to run once with each, add -m; if it is one, quote it: 'data.train.path=\"a,b.h5\"'",
        ),
        (["data.train.fields={x: a"], "data.train.fields: {x: a cannot be read (no viable alternative"),
        (["data.train.path=[v2] x.h5"], "closed? If it is text, quote it: 'data.train.path=\"[v2] x.h5\"'"),
        (["data"], "data: no value; write data=VALUE"),
        (["loader=null"], "loader: null is no choice; there are threads; leave loader= out for the default"),
        (
            ["callbacks=null"],
            "there are default, device_prefetcher, early_stopping, model_checkpoint, none, progress_bar",
        ),
        (
            ["data=hdf5", "data.train=x.h5"],
            "data.train: 'x.h5' cannot replace all of its settings; set one of them, as in",
        ),
        (
            ["model._target_=nope.Net"],
            "model._target_: there is no nope.Net to import. Are you sure that module 'nope' is",
        ),
        (["model._target_=torch.nn.ReLU"], "model._target_: torch.nn.ReLU gives a ReLU, not a LightningModule"),
        (["ckpt_path=last"], "ckpt_path: last: there is no checkpoint below "),
        (["train=false", "ckpt_path=best"], "ckpt_path: best: there is no checkpoint below "),
        (["ckpt_path=hpc"], "ckpt_path: hpc is found without ckpt_path in a requeued job of hydra=slurm"),
        ([f"ckpt_path={__file__}"], "test_train.py is not a complete checkpoint of Lightning"),
        (["ckpt_path=."], "ckpt_path: . is a folder; give a file in it"),
        # What would be trained or tested in vain.
        (["train=false"], "would test untrained weights; give a checkpoint: ckpt_path=best, ckpt_path=last or a file"),
        (["data.train=null"], "data.train: null leaves no data to train on"),
        (["debug=fdr", "data.train=null"], "data.train: null leaves no data to train on"),
        (["model.classes=3"], "model.classes: 3, but field 'y' has 10 classes, 0 to 9; leave it out"),
        (["model.channels=3"], "model.channels: 3, but the images of field 'x' have 1"),
        (["model.x=image"], "model.x: there is no field 'image', but x, y; name one of these with model.x=KEY"),
        (["model.y=label"], "model.y: there is no field 'label', but x, y"),
        (["model.width=0"], "model.width: 0 is not above 0"),
        (["model.lr=-1"], "model.lr: -1 is not above 0"),
        (["optimized_metric=val/ac", "train=false", "test=false"], "optimized_metric: 'val/ac' is not one of"),
        (["-m", "trainer.devices=2", "trainer=ddp_sim"], "trainer.devices: 2 with --multirun: each process would"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_with_one_line_that_names_the_key_as_typed(typed, arguments, said):
    quiet = [override for override in QUIET if override.partition("=")[0] not in " ".join(arguments)]
    _, ending = typed(*arguments, *quiet)
    assert isinstance(ending, str)
    assert ending.startswith("error: ")
    assert said in ending
    assert "\n" not in ending


# -- runs --------------------------------------------------------------------------------------------------------------


def image_file(path, size=64, classes=7, count=84):
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["data"] = random.integers(0, 255, (count, 3, size, size), dtype=np.uint8)
        file["labels"] = (np.arange(count) % classes).astype(np.uint8)
    return str(path)


def test_a_foreign_file_is_trained_on_without_validation_and_test(typed, tmp_path):
    path = image_file(tmp_path / "x.h5")
    quiet = [*(override for override in QUIET if "logger" not in override), "trainer.log_every_n_steps=1"]
    out, ending = typed("data=hdf5", f"data.train.path={path}", "trainer.max_epochs=1", "loader.batch_size=16", *quiet)
    assert ending is None
    assert list((tmp_path / "logs").rglob("metrics.csv"))
    saved = next((tmp_path / "logs").glob("train/runs/*/config.yaml")).read_text()
    assert saved in out
    assert "seed: 42" in saved.partition("loader:")[2]
    assert f"path: {path}" in saved


def test_a_foreign_file_says_what_is_left_out(composed, tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT))
    try:
        import train
    finally:
        sys.path.remove(str(ROOT))
    said = []
    for module in (
        "lit_async_data.lightning.display.lines",
        "pytorch_lightning.utilities",
        "pytorch_lightning.utilities.rank_zero",
    ):
        monkeypatch.setattr(f"{module}.rank_zero_info", lambda message, *_, **__: said.append(str(message)))
    path = image_file(tmp_path / "x.h5")
    cfg = composed("data=hdf5", f"data.train.path={path}", "trainer.max_epochs=1", "loader.batch_size=16", *QUIET)
    metrics, objects = train.train(cfg)
    model = objects["model"]
    assert (model.hparams["channels"], model.hparams["classes"]) == (3, 7)
    assert "train/loss" in metrics
    assert "data/wait_ms" in metrics
    text = "\n".join(said)
    assert "84 samples" in text
    assert "batch 16, 6 steps, shuffle global: every sample is read alone" in text
    assert "callback model_checkpoint is left out, as it monitors val/acc" in text
    assert "callback early_stopping is left out" in text
    assert "no test set (data.test): testing is skipped" in text
    assert said[-1].startswith("training waited ")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("[data, labels]", "tuples of data, labels.*name the fields, as in 'data.train.fields={x: data, y: labels}'"),
        ("{x: data}", "model.y: there is no field 'y', but x; name one of these with model.y=KEY, or add y to"),
        ("{x: data, y: weights}", "field 'y' is float64 and holds no class numbers"),
        ("{x: weights, y: labels}", r"field 'x' has samples of shape \(\)"),
    ],
)
def test_fields_that_the_model_cannot_take_are_named(typed, tmp_path, fields, said):
    path = image_file(tmp_path / "x.h5")
    with h5py.File(path, "a") as file:
        file["weights"] = np.ones(len(file["labels"]))
    _, ending = typed("data=hdf5", f"data.train.path={path}", f"data.train.fields={fields}", *QUIET)
    assert re.search(said, ending)
    assert "\n" not in ending


def test_a_run_goes_on_in_mid_epoch_and_another_order_ends_with_one_line(typed, tmp_path):
    saving = ["+callbacks.model_checkpoint.every_n_train_steps=7", "callbacks.model_checkpoint.monitor=null"]
    assert typed("trainer.max_epochs=1", "test=false", *saving, *QUIET)[1] is None
    saved = next((tmp_path / "logs").rglob("epoch_000.ckpt"))
    _, ending = typed(f"ckpt_path={saved}", "test=false", "seed=2", *saving, *QUIET)
    assert ending.startswith("error: the checkpoint is from sample 896 of ")
    assert re.search(r"seed: \d+ in the checkpoint, 2 now", ending)
    assert "\n" not in ending
    assert typed(f"ckpt_path={saved}", "trainer.max_epochs=1", "test=false", *saving, *QUIET)[1] is None


def test_weights_of_no_step_are_not_tested(composed, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    import train

    metrics, _ = train.train(composed("trainer.max_epochs=0", *QUIET))
    assert "test/acc" not in metrics


class Small(pl.LightningModule):
    """A user's own network; `model.lr` is the only setting that the demo has, too."""

    got = None

    def __init__(self, **settings):
        super().__init__()
        Small.got = settings
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        return self.layer(batch["x"].float().mean()[None])

    def validation_step(self, batch, number):
        self.log("val/acc", 0.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("typed_too", "got"),
    [
        ([], {}),
        (["+model.depth=3", "model.lr=0.25"], {"depth": 3, "lr": 0.25}),
        (["model.x=image", "~model.width"], {"x": "image"}),
        (["model.lr=0.01"], {"lr": 0.01}),  # as the demo has it
        (["model.lr=fast"], {"lr": "fast"}),  # a number only in the demo
        (["model=cnn", "model.width=3", "experiment=digits_wide"], {"width": 3}),
        (["experiment=digits_wide"], {"width": 48}),  # which the experiment sets
        (["model=own", "+model.depth=2"], {"depth": 2}),
    ],
    ids=" ".join,
)
def test_a_network_of_ones_own_gets_what_was_typed_and_nothing_of_the_demo(typed, typed_too, got):
    quick = ["trainer.fast_dev_run=true", "test=false", *QUIET]
    out, ending = typed(f"model._target_={__name__}.Small", *typed_too, *quick)
    assert ending is None
    assert Small.got == got
    assert OmegaConf.create(out[out.index("data:\n") :]).model == {"_target_": f"{__name__}.Small", **got}


def test_what_a_network_of_ones_own_does_not_take_is_named(typed):
    _, ending = typed(f"model._target_={__name__}.Strict", "model.width=3", *QUIET)
    assert ending.startswith("error: model: TypeError: ")
    assert "unexpected keyword argument 'width'" in ending


class Strict(Small):
    def __init__(self):
        super().__init__()


# -- tables of files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def birds(tmp_path):
    """A table of PNG files of two sizes for each stage."""
    image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
    random = np.random.default_rng(0)
    lines = {"train": ["path,species,site"], "val": ["path,species,site"]}
    for number in range(30):
        pixels = random.integers(0, 255, (12 + number % 2, 10, 3), dtype=np.uint8)
        image.fromarray(pixels).save(tmp_path / f"{number}.png")
        stage = "train" if number < 24 else "val"
        species = ("owl", "auk", "jay")[number % (3 if stage == "train" else 2)]
        lines[stage].append(f"{number}.png,{species},{number % 8}")
    for stage, rows in lines.items():
        (tmp_path / f"{stage}.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def built(composed, *overrides):
    return hydra.utils.instantiate(composed(*overrides, *QUIET).data)


@pytest.mark.parametrize(("label", "classes"), [("digit", 10), ("even", 2)])
def test_the_same_files_are_trained_on_for_either_label(composed, label, classes, monkeypatch):
    pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
    monkeypatch.syspath_prepend(str(ROOT))
    import train

    cfg = composed("data=digits_manifest", f"data.source.fields.y={label}", "trainer.max_epochs=2", *QUIET)
    metrics, objects = train.train(cfg)
    dm = objects["datamodule"]
    assert objects["model"].hparams["classes"] == dm.num_classes["y"] == classes
    assert dm.spec["x"].shape == (1, 8, 8)
    assert metrics["test/acc"] > (0.5 if label == "digit" else 0.7)  # by guessing: 0.1 and 0.5
    where = dm.sources["train"][0].locate([7])[0]
    assert (where.id, Path(where.path).name) == ("0007", "0007.png")


def test_a_table_is_cut_into_stages_by_a_column(composed, birds):
    typed = [f"data.source.table={birds}/train.csv", "data.source.fields.y=species", "data.source.image_size=[8,6]"]
    dm = built(composed, "data=manifest", *typed, "data.groups=site", "data.split={train: 0.5, val: 0.5}")
    assert dm.classes == {"y": ("auk", "jay", "owl")}
    sides = [set(dm.sources[stage][0].column("site").tolist()) for stage in ("train", "val")]
    assert not sides[0] & sides[1]
    (batch,) = list(dm.train_dataloader())
    assert batch["x"].shape[1:] == (3, 8, 6)
    assert -1 <= batch["x"].min() < -0.5 < 0.5 < batch["x"].max() <= 1
    dm.close()
    bare = built(composed, "data=manifest", *typed, "data.device_transform=null")
    assert next(iter(bare.train_dataloader()))["x"].dtype == torch.uint8
    bare.close()


def test_a_table_for_each_stage_has_the_classes_of_training(composed, birds):
    typed = [f"data.train.table={birds}/train.csv", f"data.val.table={birds}/val.csv", "data.train.fields.y=species"]
    cfg = composed("data=manifest_stages", *typed, "data.train.image_size=8", "data.train.resize=random_crop", *QUIET)
    cfg.data.test = cfg.data.predict = None
    dm = hydra.utils.instantiate(cfg.data)
    assert dm.sources["val"][0].spec["y"].classes == ("auk", "jay", "owl")
    (val,) = dm.val_dataloader()
    assert val.next()["y"].tolist() == [2, 0] * 3
    first, again = val.next()["x"], val.next()["x"]
    assert (first == again).all()  # the middle of each image, in every epoch
    train = dm.train_dataloader()
    assert train.next()["x"].mean() != train.next()["x"].mean()
    dm.close()


def test_batch_keys_can_be_chosen_on_the_command_line(composed):
    cfg = composed("data=hdf5", "data.train.path=x.h5", "data.train.fields={image: images}")
    assert cfg.data.train.fields == cfg.data.val.fields == {"image": "images"}
    assert composed("data=hdf5", "data.train.path=x.h5").data.test.fields == {"x": "data", "y": "labels"}


def test_a_run_goes_on_from_its_checkpoint_for_longer(typed, tmp_path):
    once = ["trainer.max_epochs=1", "test=false", *QUIET]
    assert typed(*once)[1] is None
    saved = next((tmp_path / "logs").rglob("last.ckpt"))
    again = ["trainer.max_epochs=2", f"ckpt_path={saved}", "test=false", *QUIET]
    assert typed(*again)[1] is None
    assert len(list((tmp_path / "logs").rglob("last.ckpt"))) == 2


def test_overrides_reach_what_they_name(composed):
    cfg = composed("loader.workers=2", "loader.queue_depth=8", "callbacks.device_prefetcher.device_depth=3", "seed=7")
    assert (cfg.data.loader.workers, cfg.data.loader.queue_depth, cfg.data.loader.seed) == (2, 8, 7)
    assert cfg.callbacks.device_prefetcher.device_depth == 3


def test_the_digits_are_learned(tmp_path):
    """The whole demo in a new process, with progress bar and test."""
    environment = {**os.environ, "PROJECT_ROOT": str(tmp_path), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "optimized_metric=test/acc", "trainer.accelerator=cpu"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    accuracy = next(float(line.split("│")[2]) for line in lines if "test/acc" in line and "│" in line)
    assert accuracy >= 0.97
    assert "training waited" in done.stdout.splitlines()[-1]
    with h5py.File(tmp_path / "data/digits/train.h5") as file:
        assert file["data"].shape == (1258, 1, 8, 8)


def test_a_sweep_ends_with_how_long_each_run_waited(typed):
    said, ending = typed("-m", "callbacks.device_prefetcher.device_depth=0,2", "trainer.max_epochs=1", *QUIET)
    assert ending is None
    assert re.fullmatch(r"data wait \d+\.\d % → \d+\.\d %", said.strip().splitlines()[-1])


def test_a_sweep_without_training_or_callback_knows_of_no_waiting(typed):
    said, ending = typed("-m", "train=false", "test=false", "callbacks=none", "seed=1,2", *QUIET)
    assert ending is None
    assert said.strip().splitlines()[-1] == "data wait unknown → unknown"


# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_step_of_a_run_is_written_to_a_file(typed, tmp_path):
    out, ending = typed("replay.step=3", "replay.rank=1", "replay.world_size=2", f"paths.output_dir={tmp_path}", *QUIET)
    assert ending is None
    assert "step 3: batch 3 of epoch 0" in out
    (row,) = torch.load(tmp_path / "replay.pt", weights_only=False)
    assert len(next(iter(row["batch"].values()))) == len(row["ids"]) == len(row["places"])
    out, ending = typed("replay.step=-3", *QUIET)
    assert ending == "error: replay.step: -3 is not a whole number from 0 on"
