"""What a run of ``train.py`` is built of: its checkpoint, its objects, and how it goes on."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lit_async_data import ConfigError
from lit_async_data.errors import AsyncDataError, SourceError


def check_run(cfg: DictConfig) -> None:
    """Refuse a run that cannot train or test, before it reads any data."""
    for key in sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(f"missing; give it, as in {key}=VALUE", key)
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if sweep and (cfg.trainer.devices not in (1, "1") or cfg.trainer.num_nodes > 1):
        raise ConfigError(
            f"{cfg.trainer.devices} with --multirun: each process would repeat the whole sweep; use "
            "trainer.devices=1, or one call per setting",
            "trainer.devices",
        )
    if cfg.ckpt_path is None and cfg.test and not cfg.train:
        raise ConfigError(
            "false without ckpt_path would test untrained weights; give a checkpoint: ckpt_path=best, "
            "ckpt_path=last or a file",
            "train",
        )
    if cfg.train and OmegaConf.select(cfg, "data.train", default="elsewhere") is None:
        raise ConfigError(
            "null leaves no data to train on; to only test a checkpoint, write train=false ckpt_path=best", "data.train"
        )


def starting_checkpoint(cfg: DictConfig) -> str | None:
    """The checkpoint that ``ckpt_path`` stands for.

    Each run has its own folder. So ``last`` is the newest checkpoint of all runs of ``task_name``, and ``best`` what
    that run's `ModelCheckpoint` calls the best. The runs of a sweep do not count for each other.
    """
    chosen = cfg.ckpt_path
    if chosen in ("last", "best"):
        folders = Path(cfg.paths.log_dir, cfg.task_name), Path(cfg.paths.output_dir)
        sweep = Path(HydraConfig.get().sweep.dir) if HydraConfig.get().mode == RunMode.MULTIRUN else None
        found = _newest(folders, sweep)
        if found is None:
            raise ConfigError(
                f"{chosen}: there is no checkpoint below {folders[0]}; train first, or give a file", "ckpt_path"
            )
        chosen = str(found) if chosen == "last" else _best(found)
    typed = None if chosen is None else Path(cfg.paths.work_dir, chosen)  # Hydra may have gone elsewhere
    if typed is not None and not (typed.is_file() and zipfile.is_zipfile(typed)):
        raise ConfigError(
            f"{chosen} is not a complete checkpoint; give another file, ckpt_path=last or ckpt_path=best", "ckpt_path"
        )
    return None if typed is None else str(typed)


def _newest(folders: Iterable[Path], without: Path | None = None) -> Path | None:
    found = {path for folder in folders for path in folder.rglob("*.ckpt")}
    counted = [path for path in found if without is None or without not in path.parents]
    # Of two that were written at once, the name decides: last.ckpt has what is newest.
    return max(
        counted, key=lambda path: (path.stat().st_mtime_ns, path.stem.startswith("last"), str(path)), default=None
    )


def _best(newest: Path) -> str:
    """The path of the best checkpoint, as the callbacks in the newest one remember it."""
    import torch

    states: Iterable[Any] = ()
    if zipfile.is_zipfile(newest):
        states = torch.load(newest, map_location="cpu", weights_only=False, mmap=True).get("callbacks", {}).values()
    bests = [state.get("best_model_path") for state in states if isinstance(state, dict) and state.get("monitor")]
    if not any(bests):
        raise ConfigError(
            f"best: the newest run has none, as its checkpoints monitor no metric; write ckpt_path={newest}",
            "ckpt_path",
        )
    best = next(filter(None, bests))
    here = newest.parent / Path(best).name  # the folder of the run may have been moved
    return str(here if here.is_file() else best)


def built(cfg: DictConfig, key: str, **more: Any) -> Any:
    """The object of a section of the configuration; ``more`` are further arguments of its class."""
    section = OmegaConf.select(cfg, key)
    try:
        return hydra.utils.instantiate(section, **more)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, SourceError):
            named = next(_naming(cause.dataset, key, OmegaConf.to_container(section, resolve=True)), None)
            cause.args = (f"{named}: {cause}" if named else str(cause),)
        if isinstance(cause, AsyncDataError):
            raise cause from None
        raise ConfigError(f"{type(cause).__name__}: {' '.join(str(cause).split())}", key) from error


def _naming(dataset: str | None, key: str, value: Any) -> Iterator[str]:
    """The keys that name a dataset or column."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _naming(dataset, f"{key}.{name}", each)
    elif dataset is not None and (value == dataset or (isinstance(value, list) and dataset in value)):
        yield key


def usable_callbacks(cfg: DictConfig, unused: str | None) -> list[Any]:
    """The configured callbacks, of which none monitors validation if it is ``unused``, which says why."""
    from pytorch_lightning.utilities import rank_zero_info

    usable = []
    for name, callback in cfg.callbacks.items():
        if callback is None or ("ProgressBar" in callback["_target_"] and not cfg.trainer.enable_progress_bar):
            continue
        metric = callback.get("monitor") or ""
        unmonitored = unused and metric.startswith("val/")
        if unmonitored and "ModelCheckpoint" not in callback["_target_"]:
            rank_zero_info(f"{unused}: callback {name} is left out, as it monitors {metric}")
        else:
            usable.append(built(cfg, f"callbacks.{name}", **({"monitor": None} if unmonitored else {})))
    return usable


def how_to_go_on(cfg: DictConfig, trainer: Any) -> str:
    """What to type after a training that was stopped."""
    newest = _newest([Path(cfg.paths.output_dir)])
    within = OmegaConf.select(cfg, "callbacks.step_checkpoint.every_n_train_steps", default=None) == 0
    go_on = f"to go on from {newest}, add ckpt_path=last" if newest else "there is no checkpoint to go on from yet"
    saving = "; callbacks.step_checkpoint.every_n_train_steps=100 saves within an epoch, too" if within else ""
    return f"stopped in epoch {trainer.current_epoch} after step {trainer.global_step}; {go_on}{saving}"


def write_replay(cfg: DictConfig, datamodule: Any) -> None:
    """Make the batches of step ``cfg.replay.step`` again, and write them to ``replay.pt`` in the folder of the run."""
    import torch

    limits = {key: cfg.trainer[key] for key in ("accumulate_grad_batches", "limit_train_batches")}
    found = datamodule.replay(**cfg.replay, **limits)
    path = Path(cfg.paths.output_dir, "replay.pt")
    torch.save([each._asdict() | {"places": [tuple(place) for place in each.places]} for each in found], path)
    batches = ", ".join(f"batch {each.batch_idx} of epoch {each.epoch} ({len(each.ids)} samples)" for each in found)
    sys.stdout.write(f"step {cfg.replay.step}: {batches}, written to {path}\n")
