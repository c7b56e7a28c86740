"""`ckpt_path=last` and `ckpt_path=best`, to go on with a training and to test it."""

import os

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import open_dict, read_write
from support.lightning.command_line import LIGHTNING_SAYS, QUIET

from lit_async_data.errors import ConfigError
from reference.run import starting_checkpoint
from train import train

pytestmark = [pytest.mark.filterwarnings(said) for said in LIGHTNING_SAYS]


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
        ("best", {"saver": ""}, "best: the newest run has none"),
        ("best", {"saver": "gone/epoch_001.ckpt"}, "gone/epoch_001.ckpt is not a complete checkpoint"),
        ("last", None, r"last\.ckpt is not a complete checkpoint"),
        (__file__, {}, r"test_run\.py is not a complete checkpoint; give another file, ckpt_path=last"),
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
