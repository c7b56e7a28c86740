"""``ckpt_path``: the checkpoint that a run of ``train.py`` goes on from, or tests."""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lit_async_data.errors import ConfigError
from lit_async_data.reference.slurm import requeued_from


def starting_checkpoint(cfg: DictConfig) -> str | None:
    """The checkpoint that ``ckpt_path`` stands for, or that of a requeued job of SLURM.

    Each run has its own folder. So ``last`` is the newest checkpoint of all runs of ``task_name``, and ``best`` what
    that run's `ModelCheckpoint` calls the best. The runs of a sweep do not count for each other.

    Args:
        cfg: The composed configuration of the run that Hydra is in.

    Returns:
        Its path; None if the run starts from nothing.

    Raises:
        ConfigError: There is no such checkpoint; or the file is none.
    """
    hydra = HydraConfig.get()
    if hydra.runtime.choices["hydra"] == "slurm" and (requeued := requeued_from(cfg.paths.output_dir)):
        return str(requeued)
    chosen = cfg.ckpt_path
    if chosen in ("last", "best"):
        folders = [Path(cfg.paths.log_dir, cfg.task_name), Path(cfg.paths.output_dir)]
        sweep = Path(hydra.sweep.dir) if hydra.mode == RunMode.MULTIRUN else None
        newest = _newest(folders, sweep)
        if newest is None:
            raise ConfigError(
                f"ckpt_path: {chosen}: there is no checkpoint below {folders[0]}; train first, or give a file"
            )
        chosen = str(newest) if chosen == "last" else _best(newest)
    elif chosen == "hpc":
        raise ConfigError("ckpt_path: hpc is found without ckpt_path in a requeued job of hydra=slurm; leave it out")
    if chosen is not None and not Path(chosen).is_file():
        problem = "a folder; give a file in it" if Path(chosen).is_dir() else "not a file; check the path"
        raise ConfigError(f"ckpt_path: {chosen} is {problem}, or write ckpt_path=last or ckpt_path=best")
    if chosen is not None and not zipfile.is_zipfile(chosen):
        raise ConfigError(f"ckpt_path: {chosen} is not a complete checkpoint of Lightning; give another file")
    return None if chosen is None else str(chosen)


def _newest(folders: Iterable[Path], without: Path | None) -> Path | None:
    found = {path for folder in folders for path in folder.rglob("*.ckpt")}
    counted = [path for path in found if without is None or without not in path.parents]
    # Of two that were written at once, the name decides: last.ckpt has what is newest.
    return max(
        counted, key=lambda path: (path.stat().st_mtime_ns, path.stem.startswith("last"), str(path)), default=None
    )


def _best(newest: Path) -> str:
    """The path of the best checkpoint, as the callbacks in the newest one remember it."""
    import torch

    try:
        callbacks = torch.load(newest, map_location="cpu", weights_only=False, mmap=True)["callbacks"]
    except (OSError, RuntimeError, KeyError) as error:
        raise ConfigError(f"ckpt_path: best: {newest} is not a complete checkpoint of Lightning ({error})") from error
    states: list[dict[str, Any]] = [state for state in callbacks.values() if isinstance(state, dict)]
    best = next(
        (state["best_model_path"] for state in states if state.get("monitor") and state["best_model_path"]), None
    )
    if best is None:
        raise ConfigError(
            f"ckpt_path: best: the newest run has none, as its checkpoints monitor no metric; write ckpt_path={newest}"
        )
    # The folder of the run may have been moved.
    here = newest.parent / Path(best).name
    return str(here if here.is_file() else best)


def any_objects(load: Callable[..., Any]) -> dict[str, bool]:
    """Arguments that let a method of the Trainer load a checkpoint whose hyperparameters are objects of any class.

    Lightning before 2.6 does so anyway, and has no such argument.
    """
    return {"weights_only": False} if "weights_only" in inspect.signature(load).parameters else {}
