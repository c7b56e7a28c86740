"""What a run of ``train.py`` is built of: its checkpoint, its objects, and how it goes on."""

from __future__ import annotations

import contextlib
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
    if cfg.trainer.accelerator in ("gpu", "cuda"):
        import torch

        if not (torch.cuda.is_available() or (cfg.trainer.accelerator == "gpu" and torch.backends.mps.is_available())):
            build = f"torch {torch.__version__}" + (", a build without CUDA," if torch.version.cuda is None else "")
            raise ConfigError(
                f"{cfg.trainer.accelerator}, but {build} finds no GPU here; trainer=cpu trains on the CPU, "
                "trainer=ddp_sim in two processes on it",
                "trainer.accelerator",
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
        what = "is not a complete checkpoint" if typed.exists() else "does not exist"
        raise ConfigError(f"{chosen} {what}; give another file, ckpt_path=last or ckpt_path=best", "ckpt_path")
    return None if typed is None else str(typed)


def _newest(folders: Iterable[Path], without: Path | None = None) -> Path | None:
    found = {path for folder in folders for path in folder.rglob("*.ckpt")}
    counted = [path for path in found if without is None or without not in path.parents]
    # Of two that were written at once, the name decides: last.ckpt has what is newest.
    return max(
        counted, key=lambda path: (path.stat().st_mtime_ns, path.stem.startswith("last"), str(path)), default=None
    )


def _loaded(path: Any) -> dict[str, Any]:
    import torch

    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return saved


def _best(newest: Path) -> str:
    """The path of the best checkpoint, as the callbacks in the newest one remember it."""
    states: Iterable[Any] = _loaded(newest).get("callbacks", {}).values() if zipfile.is_zipfile(newest) else ()
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
        validated, saves = metric.startswith("val/"), "ModelCheckpoint" in callback["_target_"]
        more: dict[str, Any] = {}
        if saves and not cfg.trainer.enable_checkpointing:
            continue
        if validated and unused and saves:
            more = {"monitor": None}
        elif validated and unused:
            rank_zero_info(f"{unused}: callback {name} is left out, as it monitors {metric}")
            continue
        elif validated and "EarlyStopping" in callback["_target_"]:
            # At the end of an epoch that trainer.max_steps has cut there is no such metric.
            more = {"check_on_train_epoch_end": callback.get("check_on_train_epoch_end", False)}
        usable.append(built(cfg, f"callbacks.{name}", **more))
    return usable


def fit(cfg: DictConfig, trainer: Any, model: Any, datamodule: Any) -> bool:
    """Train, and say how to go on where training was stopped; returns whether there was a step to train."""
    from pytorch_lightning.utilities import rank_zero_info

    saved: dict[str, Any] = {} if cfg.ckpt_path is None else _loaded(cfg.ckpt_path)
    before, most = saved.get("global_step", 0), cfg.trainer.max_epochs
    progress = saved.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
    epochs = progress.get("current", {}).get("processed", 0)
    has_trained = f"{cfg.ckpt_path} has trained {epochs} epochs, {before} steps"
    if most is not None and 0 <= most < epochs:
        raise ConfigError(
            f"{has_trained}; to go on from there, write trainer.max_epochs={epochs + 1} or more", "ckpt_path"
        )
    del saved
    try:
        with fitting(cfg.ckpt_path, cfg, model):
            trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    except BaseException:  # Lightning makes SystemExit of Ctrl-C
        if trainer.global_step:
            rank_zero_info(how_to_go_on(cfg, trainer))
        raise
    if before and trainer.global_step == before:
        limit = f"trainer.max_epochs={most}, trainer.max_steps={cfg.trainer.max_steps}"
        rank_zero_info(f"ckpt_path: {has_trained}, and {limit} leave nothing to train; to go on, raise them")
    elif trainer.global_step > before and cfg.trainer.enable_checkpointing and not cfg.trainer.fast_dev_run:
        newest = _newest([Path(cfg.paths.output_dir)])
        step = None if newest is None else _loaded(newest).get("global_step")
        # Rank 0 has written it, and others may not see its disk.
        if trainer.strategy.broadcast(step) != trainer.global_step:
            trainer.save_checkpoint(f"{cfg.paths.output_dir}/checkpoints/last.ckpt")
    return bool(trainer.global_step > before)


@contextlib.contextmanager
def fitting(checkpoint: str | None, cfg: DictConfig, model: Any) -> Iterator[None]:
    """Say of a checkpoint that cannot be loaded into the model what differs, and what it was trained on."""
    try:
        yield
    except RuntimeError as error:
        if checkpoint is None:
            raise
        from torch.nn.parameter import is_lazy  # without a shape before the first batch

        saved = {name: tuple(each.shape) for name, each in _loaded(checkpoint).get("state_dict", {}).items()}
        own = {
            name: saved.get(name, ()) if is_lazy(each) else tuple(each.shape)
            for name, each in model.state_dict().items()
        }
        names = [*saved, *(own.keys() - saved.keys())] if model.strict_loading else saved.keys() & own.keys()
        differing = [name for name in names if saved.get(name) != own.get(name)]
        if not differing:
            raise
        name = differing[0]
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ConfigError(
            f"{checkpoint} does not fit the model: {name} is {saved.get(name, 'missing')} there and "
            f"{own.get(name, 'missing')} here{more}{_of_other_data(cfg, checkpoint)}; choose another file, or leave "
            "ckpt_path out to train from the start",
            "ckpt_path",
        ) from error


def _of_other_data(cfg: DictConfig, checkpoint: str) -> str:
    """The data of the run that saved a checkpoint, where they are others."""
    config = Path(checkpoint).parents[1] / "config.yaml"
    if not config.is_file():
        return ""
    keys = [f"data.{part}.{name}" for part in ("train", "source") for name in ("path", "table", "root", "_target_")]
    saved = OmegaConf.load(config)
    then = {key: OmegaConf.select(saved, key) for key in keys}
    other = [f"{key}={value}" for key, value in then.items() if value not in (None, OmegaConf.select(cfg, key))]
    return f"; its run had {other[0]}" if other else ""


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
