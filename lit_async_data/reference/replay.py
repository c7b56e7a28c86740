"""``train.py replay.step=…``: writes the batches of a training step to a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from lit_async_data.errors import ConfigError

if TYPE_CHECKING:
    from lit_async_data.lightning.datamodule import AsyncDataModule


def write_replay(cfg: DictConfig, datamodule: AsyncDataModule) -> None:
    """Make the batches of a step again, and write them to ``replay.pt`` in the folder of the run.

    Args:
        cfg: The composed configuration of the run, with ``replay.step``.
        datamodule: Of the same configuration.

    Raises:
        ConfigError: See `AsyncDataModule.replay`; it names the key as typed.
    """
    import torch

    try:
        found = datamodule.replay(
            cfg.replay.step,
            rank=cfg.replay.rank,
            world_size=cfg.replay.world_size,
            accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
            limit_train_batches=cfg.trainer.limit_train_batches,
        )
    except ConfigError as error:
        group = "replay." if str(error).partition(":")[0] in cfg.replay else ""
        raise ConfigError(f"{group}{error}") from error
    path = Path(cfg.paths.output_dir, "replay.pt")
    rows = [each._asdict() | {"places": [tuple(place) for place in each.places]} for each in found]
    torch.save(rows, path)
    for each in found:
        print(f"step {cfg.replay.step}: batch {each.batch_idx} of epoch {each.epoch}, {len(each.ids)} samples")  # noqa: T201
    print(f"written to {path}")  # noqa: T201  # what the command was called for
