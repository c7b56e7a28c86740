"""The reference script: ``python train.py data=hdf5 data.train.path=x.h5 loader.workers=2``.

The command line can set every value of ``configs/train.yaml``; ``-m loader.queue_depth=1,2,4`` sweeps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_async_data.errors import ConfigError, ResumeError, SourceError
from lit_async_data.reference.checkpoints import any_objects, starting_checkpoint
from lit_async_data.reference.commandline import check_choices, check_run, check_sweep, check_types, write_wait
from lit_async_data.reference.explanations import explained
from lit_async_data.reference.objects import built_loggers, built_model, usable_callbacks, use_own_model
from lit_async_data.reference.replay import write_replay
from lit_async_data.reference.slurm import job_id

ROOT = Path(__file__).resolve().parent
os.environ.setdefault("PROJECT_ROOT", str(ROOT))
OmegaConf.register_new_resolver("slurm_job", job_id, replace=True)  # for configs/hydra/slurm.yaml


def train(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and test.

    Args:
        cfg: The composed `configs/train.yaml`.

    Returns:
        The logged metrics, and the objects built from the configuration, by name.
    """
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_info

    datamodule = hydra.utils.instantiate(cfg.data)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    model = built_model(cfg)
    callbacks = [hydra.utils.instantiate(callback) for callback in usable_callbacks(cfg, datamodule)]
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=built_loggers(cfg))
    if cfg.train:
        trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    metrics = dict(trainer.callback_metrics)
    if cfg.test and not datamodule.sources["test"]:
        rank_zero_info("no test set (data.test): testing is skipped")
    elif cfg.test and cfg.train and cfg.ckpt_path is None and not trainer.global_step:
        rank_zero_info("no step was trained and the weights are random: testing is skipped")
    elif cfg.test:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "") if cfg.train else cfg.ckpt_path
        if not best and cfg.run_id is not None:
            # In a requeued job, Lightning would test the checkpoint of the requeue.
            best = f"{cfg.paths.output_dir}/checkpoints/trained.ckpt"
            trainer.save_checkpoint(best)
        trainer.test(model, datamodule=datamodule, ckpt_path=best or None, **any_objects(trainer.test))
        metrics |= trainer.callback_metrics
    for callback in callbacks:
        if cfg.train and hasattr(callback, "waited"):
            rank_zero_info(f"training waited {callback.waited}")
    return metrics, {"cfg": cfg, "datamodule": datamodule, "model": model, "callbacks": callbacks, "trainer": trainer}


def show(cfg: DictConfig) -> None:
    """Print the resolved configuration, and save it in the folder of the run."""
    text = OmegaConf.to_yaml(cfg, resolve=True)
    print(text)
    Path(cfg.paths.output_dir).mkdir(parents=True, exist_ok=True)
    Path(cfg.paths.output_dir, "config.yaml").write_text(text)


def leave_process_group() -> None:
    """End gloo, which Lightning leaves running: its thread may abort Python's exit by freeing a tensor then."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Run once, and return the metric to optimise."""
    from pytorch_lightning.utilities import rank_zero_only

    check_sweep(cfg)
    cfg.ckpt_path = starting_checkpoint(cfg)
    use_own_model(cfg)
    check_types(cfg)
    check_run(cfg)
    rank_zero_only(show)(cfg)
    if cfg.replay.step is not None:
        write_replay(cfg, hydra.utils.instantiate(cfg.data))
        return None
    metrics, objects = train(cfg)
    leave_process_group()
    rank_zero_only(write_wait)(cfg.paths.output_dir, objects["callbacks"])
    if cfg.optimized_metric is None:
        return None
    if cfg.optimized_metric not in metrics:
        raise ConfigError(f"optimized_metric: {cfg.optimized_metric!r} is not one of {', '.join(sorted(metrics))}")
    return float(metrics[cfg.optimized_metric])


if __name__ == "__main__":
    # Hydra's own message has several lines; HYDRA_FULL_ERROR=1 still shows it.
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    configs = str(ROOT / "configs")
    try:
        check_choices(sys.argv[1:], configs)
        main()
    except (HydraException, OmegaConfBaseException, ConfigError, ResumeError, SourceError) as error:
        if full_error:
            raise
        sys.exit(f"error: {explained(error, sys.argv[1:], configs)}")
