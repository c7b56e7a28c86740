"""The reference script: ``python train.py data=hdf5 data.train.path=x.h5 loader.workers=2``.

The command line can set every value of ``configs/train.yaml``; ``-m loader.queue_depth=1,2,4`` sweeps.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lit_async_data import ConfigError
from reference.command_line import check, in_one_line, own_model
from reference.run import built, check_run, fit, fitting, starting_checkpoint, usable_callbacks, write_replay

ROOT = Path(__file__).resolve().parent
os.environ.setdefault("PROJECT_ROOT", str(ROOT))


def train(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and test; returns the logged metrics, and the objects built from the configuration, by name."""
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_info
    from pytorch_lightning.utilities.model_helpers import is_overridden

    with contextlib.chdir(cfg.paths.work_dir):  # paths are relative to where they were typed
        datamodule = built(cfg, "data")
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    model = built(cfg, "model")
    if not isinstance(model, pl.LightningModule):
        raise ConfigError(f"{type(model).__name__} is no LightningModule", "model._target_")
    unused = {}
    for stage, step in {"val": "validation_step", "test": "test_step"}.items():
        if not datamodule.sources[stage]:
            unused[stage] = f"no {stage} set (data.{stage})"
        elif not is_overridden(step, model):
            unused[stage] = f"the model has no {step}"
        elif cfg.trainer[f"limit_{stage}_batches"] == 0:
            unused[stage] = f"trainer.limit_{stage}_batches is 0"
    callbacks = usable_callbacks(cfg, unused.get("val"))
    loggers = [built(cfg, f"logger.{name}") for name in cfg.logger]
    trainer = built(cfg, "trainer", callbacks=callbacks, logger=loggers)
    trained = cfg.train and fit(cfg, trainer, model, datamodule)
    metrics = dict(trainer.callback_metrics)
    if cfg.test and "test" in unused:
        rank_zero_info(f"{unused['test']}: testing is skipped")
    elif cfg.test and cfg.train and cfg.ckpt_path is None and not trainer.global_step:
        rank_zero_info("no step was trained and the weights are random: testing is skipped")
    elif cfg.test:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "") if cfg.train else cfg.ckpt_path
        if not best and cfg.run_id is not None:
            best = f"{cfg.paths.output_dir}/checkpoints/trained.ckpt"  # Lightning would test that of the requeue
            trainer.save_checkpoint(best)
        # Hyperparameters may be objects of any class; Lightning before 2.6 has no such argument.
        objects = {"weights_only": False} if "weights_only" in inspect.signature(trainer.test).parameters else {}
        with fitting(best or None, cfg, model):
            trainer.test(model, datamodule=datamodule, ckpt_path=best or None, **objects)
        metrics |= trainer.callback_metrics
    for callback in callbacks:
        if trained and hasattr(callback, "waited"):
            rank_zero_info(f"training waited {callback.waited}")
    return metrics, {"cfg": cfg, "datamodule": datamodule, "model": model, "callbacks": callbacks, "trainer": trainer}


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
@in_one_line()  # within the job: Hydra would name its overrides first
def main(cfg: DictConfig) -> float | None:
    """Run once, and return the metric to optimise."""
    from pytorch_lightning.utilities import rank_zero_only
    from torch import distributed

    check_run(cfg)
    cfg.ckpt_path = starting_checkpoint(cfg)
    rank_zero_only(save_config)(cfg)
    if cfg.replay.step is not None:
        with contextlib.chdir(cfg.paths.work_dir):
            write_replay(cfg, built(cfg, "data"))
        return None
    metrics, _ = train(cfg)
    if distributed.is_available() and distributed.is_initialized():
        # Lightning leaves gloo running, whose thread may abort Python's exit by freeing a tensor then.
        distributed.destroy_process_group()
    if cfg.optimized_metric is None:
        return None
    if cfg.optimized_metric not in metrics:
        raise ConfigError(f"{cfg.optimized_metric!r} is not one of {', '.join(sorted(metrics))}", "optimized_metric")
    return float(metrics[cfg.optimized_metric])


def save_config(cfg: DictConfig) -> None:
    """Save the resolved configuration in the folder of the run, and print it if asked for."""
    text = OmegaConf.to_yaml(cfg, resolve=True)
    Path(cfg.paths.output_dir).mkdir(parents=True, exist_ok=True)
    Path(cfg.paths.output_dir, "config.yaml").write_text(text)
    if cfg.print_config:
        print(text)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # classes of your own; Python itself looks in the folder of this script only
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's own message has several lines
    sys.argv[1:] = own_model(sys.argv[1:])
    with in_one_line():
        check(sys.argv[1:], str(ROOT / "configs"))
        main()
