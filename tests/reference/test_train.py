"""`train.py` and its configurations, from the command line; also `ckpt_path=last` and `ckpt_path=best`."""

import inspect
import itertools
import os
import re
import subprocess
import sys

import hydra
import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict, read_write
from support.failures import raising
from support.lightning.command_line import CONFIGS, LIGHTNING_SAYS, QUIET, ROOT
from support.lightning.trainer import Learning
from support.pages import programs

from lit_async_data.errors import ConfigError
from reference.command_line import PACKAGE, own_model
from reference.run import starting_checkpoint
from train import train

NO_STEP = "ignore:You passed in a `val_dataloader` but have no `validation_step`:UserWarning"
# After trainer.max_steps in the first epoch.
NO_METRIC = "ignore:.*could not find the monitored key in the returned metrics:UserWarning"
pytestmark = [pytest.mark.filterwarnings(said) for said in (*LIGHTNING_SAYS, NO_STEP, NO_METRIC)]


def sections(node):
    if isinstance(node, dict):
        yield from [node] if "_target_" in node else []
        for each in node.values():
            yield from sections(each)


def choices():
    files = sorted(path.relative_to(folder) for folder in (CONFIGS, PACKAGE) for path in folder.rglob("*.yaml"))
    groups = {}
    for path in files:
        if path.parent.name not in ("", "debug", "experiment"):  # these are run, see below
            groups.setdefault(path.parent, []).append(f"{path.parent}={path.stem}")
    return [list(filter(None, chosen)) for chosen in itertools.zip_longest(*groups.values())]


@pytest.mark.parametrize("chosen", choices(), ids=" ".join)
def test_every_configuration_composes_and_its_classes_take_its_settings(composed, chosen, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    cfg = composed(*chosen)
    if "data=hdf5" in chosen:
        cfg.data.train.path = "x.h5"
    resolved = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    for section in sections(OmegaConf.to_container(resolved, resolve=True)):
        if section["_target_"] != "???":
            parameters = inspect.signature(hydra.utils.get_object(section["_target_"])).parameters
            free = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            assert free or {key for key in section if key[0] != "_"} <= parameters.keys()


@pytest.mark.parametrize("choice", ["experiment=digits_wide", "debug=fdr", "debug=inline", "debug=overfit"])
def test_every_experiment_runs(typed, choice):
    assert typed(choice, "trainer.fast_dev_run=true", *QUIET)[1] is None


def test_the_recipe_of_patches_runs_from_the_command_line(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/recipes/ct_patches.md"
    (program,), text = programs(page), page.read_text()
    (config,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(program[: program.index("def patches_of")], {})
    model = program[program.index("class SegmentScans") : program.index("data = AsyncDataModule")]
    (tmp_path / "scans.py").write_text(f"import torch\nfrom pytorch_lightning import LightningModule\n{model}")
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/ct_patches.yaml").write_text(config)
    given = [f"--config-dir={tmp_path}/configs", "experiment=ct_patches", "model=own"]
    quick = ["trainer.limit_train_batches=2", "trainer.limit_val_batches=1", "trainer.max_epochs=1", *QUIET]
    shown, ending = typed(*given, "model._target_=scans.SegmentScans", *quick)
    assert ending is None
    assert "32 samples from" in shown
    assert "18 samples from" in shown  # a grid, with a stride


def test_a_foreign_file_says_what_is_left_out(typed, tmp_path, images):
    """Without sets for validation and test."""
    quick = ["trainer.max_epochs=1", "loader.batch_size=16", "trainer.log_every_n_steps=1", "logger=csv"]
    out, ending = typed("data=hdf5", f"data.train.path={images}", *quick, *QUIET[:-1])
    assert ending is None
    left_out = "callback early_stopping is left out", "no test set (data.test): testing is skipped"
    for said in ("100 samples", "training waited ", *left_out):
        assert said in out
    assert "seed: 42" not in out
    assert list((tmp_path / "logs").rglob("metrics.csv"))
    assert list((tmp_path / "logs").rglob("last.ckpt"))
    saved = next((tmp_path / "logs").glob("train/runs/*/config.yaml")).read_text()
    assert "seed: 42" in saved.partition("loader:")[2]
    assert f"path: {images}" in saved
    out, _ = typed("data=hdf5", f"data.train.path={images}", "train=false", "test=false", "print_config=true", *QUIET)
    assert f"path: {images}" in out


def test_a_sweep_over_folds_validates_each_once(typed, images):
    typed_too = [f"data.source.path={images}", "data.split=null", "data.folds=3", "trainer.fast_dev_run=true"]
    out, ending = typed("-m", "data=hdf5_split", *typed_too, "data.fold=0,1,2", *QUIET)
    assert ending is None
    assert [f"val is fold {number}" in out for number in range(4)] == [True, True, True, False]


class Small(Learning):
    """A user's own network, without a step for validation and test; ``stop_at`` is a step with Ctrl-C."""

    got = None

    def __init__(self, **settings):
        super().__init__()
        Small.got = settings

    def training_step(self, batch):
        if self.global_step == Small.got.get("stop_at"):
            raise KeyboardInterrupt
        return self.layer(batch["x"].float().mean()[None])


@pytest.mark.parametrize(
    ("typed_too", "got"),
    [
        ([], {}),
        (["model.depth=3", "+model.lr=0.25", "~model.width"], {"depth": 3, "lr": 0.25}),
        (["model.lr=fast"], {"lr": "fast"}),  # a number only in the demo
        (["experiment=digits_wide"], {"width": 48}),  # which the experiment sets
    ],
    ids=" ".join,
)
def test_a_network_of_ones_own_gets_what_was_typed_and_nothing_of_the_demo(composed, typed_too, got):
    hydra.utils.instantiate(composed(*own_model([f"model._target_={__name__}.Small", *typed_too])).model)
    assert Small.got == got


OWN = """
import atexit, sys, torch
from test_train import Small
class Net(Small): pass
atexit.register(lambda: sys.stderr.write(f"left running: {torch.distributed.is_initialized()}\\n"))
"""


def test_a_class_in_the_current_folder_is_found_by_all_ranks_which_leave_nothing_running(tmp_path, images):
    """Wherever Hydra goes. Gloo, if left running, may free a tensor while Python ends, and then aborts the process."""
    (tmp_path / "mynet.py").write_text(OWN)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mynet.py").write_text("raise ImportError('not the one in the current folder')")
    typed = ["model._target_=mynet.Net", "trainer=ddp_sim", "trainer.fast_dev_run=true", "hydra.job.chdir=true"]
    typed += ["data=hdf5", f"data.train.path={os.path.relpath(images, tmp_path)}"]
    command = [sys.executable, str(ROOT / "train.py"), *typed, *QUIET]
    variables = {
        **os.environ,
        "PROJECT_ROOT": str(tmp_path),
        "PYTHONPATH": ":".join([str(tmp_path / "elsewhere"), os.path.dirname(__file__), str(ROOT / "tests")]),
    }
    options = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left running: False") == 2


@pytest.mark.parametrize("every", [0, 2])
def test_after_ctrl_c_it_says_how_to_go_on(typed, tmp_path, every):
    saving = f"callbacks.step_checkpoint.every_n_train_steps={every}"
    model = [f"model._target_={__name__}.Small", "trainer.max_epochs=1", saving]
    out, ending = typed(*model, "model.stop_at=5", *QUIET)
    assert ending == 1
    assert "stopped in epoch 0 after step 5; " in out
    if every:
        saved = next((tmp_path / "logs").rglob("step_000004.ckpt"))
        assert f"to go on from {saved}, add ckpt_path=last" in out
        _, ending = typed(*model, "ckpt_path=last", "seed=2", *QUIET)
        assert ending.startswith("error: the checkpoint is from sample 256 of ")
        out, ending = typed(*model, "ckpt_path=last", *QUIET)
        assert ending is None
        assert "resumed at epoch 0, sample 256 of 1258" in out
    else:
        assert "no checkpoint to go on from yet; callbacks.step_checkpoint.every_n_train_steps=100 saves" in out


def steps_saved(folder):
    newest = max(folder.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    return newest and torch.load(newest, weights_only=False)["global_step"]


@pytest.mark.parametrize(
    ("typed_too", "saved", "said"),
    [
        (["trainer.max_steps=5"], 5, ""),  # less than an epoch: nothing is validated, so there is no metric to watch
        (["trainer.max_epochs=0"], None, "no step was trained and the weights are random: testing is skipped"),
        ([f"model._target_={__name__}.Small", "trainer.max_steps=1"], 1, "the model has no test_step: testing is sk"),
        (["trainer.limit_val_batches=0", "trainer.max_steps=3"], 3, "trainer.limit_val_batches is 0: callback early_"),
        (["trainer.check_val_every_n_epoch=5", "trainer.max_epochs=1", "trainer.limit_train_batches=2"], 2, ""),
        (["trainer.overfit_batches=2", "trainer.max_epochs=2"], 4, ""),
        (["trainer.limit_test_batches=0", "trainer.max_steps=3"], 3, "trainer.limit_test_batches is 0: testing is sk"),
        (["trainer.enable_checkpointing=false", "trainer.max_steps=3"], None, ""),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_was_trained_is_saved_and_no_callback_waits_for_a_metric_that_never_comes(
    typed, tmp_path, typed_too, saved, said
):
    out, ending = typed(*typed_too, *QUIET)
    assert ending is None
    assert said in out
    assert steps_saved(tmp_path) == saved


def test_an_error_of_the_model_keeps_its_traceback(typed, monkeypatch):
    monkeypatch.setattr(Small, "training_step", raising(RuntimeError("of the user")))
    with pytest.raises(RuntimeError, match="of the user"):
        typed(f"model._target_={__name__}.Small", *QUIET)


QUICK = [*QUIET, *(f"trainer.limit_{stage}_batches=1" for stage in ("val", "test")), "trainer.limit_train_batches=2"]


def test_a_checkpoint_of_other_data_and_one_past_the_last_epoch_are_one_line(typed, tmp_path, h5):
    assert typed("trainer.max_epochs=2", *QUICK)[1] is None
    (last,) = tmp_path.rglob("last.ckpt")
    coloured = h5(data=np.zeros((20, 3, 8, 8), "u1"), labels=np.arange(20) % 10)
    other = ["data=hdf5", f"data.train.path={coloured}"]
    for more in ([], ["train=false", "data.test.path=${data.train.path}"]):
        _, ending = typed(f"ckpt_path={last}", *other, *more, *QUICK)
        assert f"{last} does not fit the model: net.0.weight is (1,) there and (3,) here, and 4 more; its run" in ending
    _, ending = typed(f"ckpt_path={last}", "trainer.max_epochs=1", *QUICK)
    assert ending.startswith(f"error: ckpt_path: {last} has trained 2 epochs, 4 steps; to go on from there, write ")
    assert ending.endswith("trainer.max_epochs=3 or more")
    for limit in ("trainer.max_epochs=2", "trainer.max_steps=3"):
        out, ending = typed(f"ckpt_path={last}", limit, *QUICK)
        assert ending is None
        assert re.search(f"has trained 2 epochs, 4 steps, and .*{limit}.* leave nothing to train", out)
        assert "training waited" not in out
    assert typed(f"ckpt_path={last}", "trainer.max_steps=5", *QUICK)[1] is None
    assert steps_saved(tmp_path) == 5


def test_a_step_of_a_run_is_written_to_a_file(typed, tmp_path):
    out, ending = typed("replay.step=3", "replay.rank=1", "replay.world_size=2", f"paths.output_dir={tmp_path}", *QUIET)
    assert ending is None
    assert "step 3: batch 3 of epoch 0" in out
    (row,) = torch.load(tmp_path / "replay.pt", weights_only=False)
    assert len(next(iter(row["batch"].values()))) == len(row["ids"]) == len(row["places"])


def checkpoint(path, at, **states):
    path.parent.mkdir(parents=True, exist_ok=True)
    callbacks = {name: {"monitor": "val/acc", "best_model_path": str(best)} for name, best in states.items()}
    torch.save({"callbacks": callbacks}, path)
    os.utime(path, ns=(at, at))
    return str(path)


@pytest.fixture
def runs(tmp_path):
    """Checkpoints of two runs, of a debugging run and of a sweep."""
    logs = tmp_path / "logs"
    first, second = logs / "train/runs/1/checkpoints", logs / "train/runs/2/checkpoints"
    checkpoint(first / "last.ckpt", 10)
    checkpoint(second / "epoch_001.ckpt", 20)
    checkpoint(second / "epoch_002.ckpt", 30)
    checkpoint(second / "last.ckpt", 30, other="", saver=second / "epoch_001.ckpt")  # written at once
    checkpoint(logs / "debug/runs/3/checkpoints/last.ckpt", 50)
    return logs


def chosen(composed, word, *overrides, multirun=False):
    cfg = composed(f"ckpt_path={word}", *overrides)
    if multirun:
        with read_write(cfg.hydra), open_dict(cfg.hydra):
            cfg.hydra.mode = RunMode.MULTIRUN
            cfg.hydra.sweep.dir = f"{cfg.paths.log_dir}/train/multiruns/4"
        HydraConfig.instance().set_config(cfg)
    return starting_checkpoint(cfg)


def test_last_is_the_newest_and_best_what_it_remembers(composed, runs, tmp_path):
    assert chosen(composed, "last") == str(runs / "train/runs/2/checkpoints/last.ckpt")
    assert chosen(composed, "best") == str(runs / "train/runs/2/checkpoints/epoch_001.ckpt")
    assert chosen(composed, "last", "task_name=debug") == str(runs / "debug/runs/3/checkpoints/last.ckpt")
    in_this_run = checkpoint(tmp_path / "out/checkpoints/last.ckpt", 60)
    assert chosen(composed, "last") == in_this_run


def test_runs_of_a_sweep_do_not_go_on_from_each_other(composed, runs):
    sibling = checkpoint(runs / "train/multiruns/4/0/checkpoints/last.ckpt", 90)
    assert chosen(composed, "last") == sibling
    assert chosen(composed, "last", multirun=True) == str(runs / "train/runs/2/checkpoints/last.ckpt")


@pytest.mark.parametrize(
    ("word", "saved", "said"),
    [
        ("best", {}, "best: .* none, as its checkpoints monitor no metric; write ckpt_path=.*last.ckpt"),
        ("best", {"saver": "gone/epoch_001.ckpt"}, "gone/epoch_001.ckpt does not exist; give another"),
        ("last", None, r"last\.ckpt is not a complete checkpoint"),
    ],
)
def test_what_is_no_checkpoint_is_named(composed, tmp_path, word, saved, said):
    last = tmp_path / "logs/train/runs/1/checkpoints/last.ckpt"
    checkpoint(last, 10, **(saved or {}))
    if saved is None:
        last.write_bytes(b"half")
    with pytest.raises(ConfigError, match=f"^ckpt_path: .*{said}"):
        chosen(composed, word)


def test_the_digits_are_learned_in_two_runs_and_the_best_is_tested_in_a_third(typed, composed, tmp_path):
    assert typed("trainer.max_epochs=1", "test=false", *QUIET)[1] is None
    (first,) = (tmp_path / "logs").rglob("last.ckpt")
    out, ending = typed("ckpt_path=last", "test=false", "print_config=true", "trainer.max_epochs=6", *QUIET)
    assert ending is None
    assert f"ckpt_path: {first}\n" in out
    (second,) = set((tmp_path / "logs").rglob("last.ckpt")) - {first}
    assert torch.load(second, weights_only=False)["epoch"] > 1
    assert typed("train=false", "ckpt_path=best", "optimized_metric=test/acc", *QUIET)[1] is None
    best = chosen(composed, "best")
    metrics, _ = train(composed("train=false", f"ckpt_path='{best}'", "trainer.accelerator=cpu", "logger=none"))
    assert metrics["test/acc"] >= 0.97
