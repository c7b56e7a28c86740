"""Refuses to resume training in the middle of an epoch, and finds the checkpoint to resume from instead."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_async_data.errors import ResumeError
from lit_async_data.lightning.compat import pl

# What writes a resumable checkpoint, even if validation runs several times per epoch.
WRITE_ONE = "ModelCheckpoint(save_on_train_epoch_end=True, save_last=True) writes one"


def check_position(trainer: pl.Trainer, batches: int) -> None:
    """Refuse a run that was restored from a checkpoint in the middle of an epoch.

    Lightning would train on the rest of the epoch, but an `AsyncLoader` starts the epoch again: training would see the
    first batches twice and never the last ones.

    Args:
        trainer: Has restored its loops and is about to train.
        batches: Batches of the epoch that the Trainer counts as done when it asks the loader for the first one.

    Raises:
        ResumeError: The epoch has begun. The message names the checkpoint, and the newest resumable one beside it.
    """
    if not batches or not trainer.fit_loop.restarting:
        return
    used = trainer.ckpt_path
    other = newest_resumable(checkpoint_folders(trainer), used)
    where = ""
    if other and used and other.parent != Path(used).parent:
        where = " in the folder that this Trainer writes to; make sure that it belongs to the same training"
    instead = (
        f"resume from {other}, the newest checkpoint from the end of an epoch{where}"
        if other
        else f"no checkpoint from the end of an epoch was found beside it: {WRITE_ONE}; to keep the weights only, use "
        "load_from_checkpoint and train without ckpt_path"
    )
    total = f" of {trainer.num_training_batches}" if trainer.num_training_batches != float("inf") else ""
    raise ResumeError(
        f"ckpt_path: {used or 'the checkpoint'} was written after {batches}{total} batches of epoch "
        f"{trainer.current_epoch}, and training cannot resume in the middle of an epoch yet: it would see some "
        f"batches twice and others never; {instead}",
        file=None if used is None else str(used),
    )


def checkpoint_folders(trainer: pl.Trainer) -> list[Path]:
    """The folders that may hold checkpoints of a run: that of its own checkpoint, and those its callbacks write to."""
    folders = [] if trainer.ckpt_path is None else [Path(trainer.ckpt_path).parent]
    written = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    return list(dict.fromkeys([*folders, *(Path(folder) for folder in written if folder)]))


def newest_resumable(folders: list[Path], used: Any = None) -> Path | None:
    """The newest checkpoint from the end of an epoch.

    Args:
        folders: Searched in this order; the first folder with such a checkpoint decides.
        used: Checkpoint to leave out.
    """
    for folder in folders:
        files = [path for path in folder.glob("*.ckpt") if path.is_file() and path != Path(used or "")]
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if any(map(ends_epoch, batch_progress(path))):
                return path
    return None


def batch_progress(path: Path) -> Iterator[dict[str, Any]]:
    """The counters of training batches in a checkpoint; nothing if the file cannot be read or has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as pickled:
                yield _CounterUnpickler(pickled).load()["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    except Exception:  # noqa: BLE001  # whatever is wrong with the file, it is not one to recommend
        return


def ends_epoch(progress: dict[str, Any]) -> bool:
    """Whether Lightning continues with a whole epoch from these counters."""
    now = progress["current"]
    # An interrupt in the last batch leaves it ready but not processed.
    return now["processed"] == 0 or bool(progress["is_last_batch"] and now["processed"] == now["ready"])


class _Placeholder(dict[Any, Any]):
    """Takes the place of an object of any class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None: ...

    extend = add = append


class _CounterUnpickler(pickle.Unpickler):
    """Reads the numbers and strings of a checkpoint, but no weights. Runs no code: the user did not choose the file."""

    def find_class(self, *_: str) -> Any:
        return _Placeholder

    def persistent_load(self, pid: Any) -> None:
        """Skips the weights."""
