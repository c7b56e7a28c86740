"""Refuses to resume training in the middle of an epoch, and finds the checkpoint to resume from instead."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_async_data.errors import ResumeError
from lit_async_data.lightning.compat import pl

# What writes a checkpoint that training can be resumed from, also where validation runs several times per epoch.
WRITE_ONE = "ModelCheckpoint(save_on_train_epoch_end=True, save_last=True) writes one"


def check_position(trainer: pl.Trainer, batches: int) -> None:
    """Refuse a run that was restored from a checkpoint in the middle of an epoch.

    Lightning would train on as many batches as are left of that epoch, but an `AsyncLoader` begins it anew: those
    batches would be the first ones again, and the last ones would never come.

    Args:
        trainer: Which has restored its loops, and is about to train.
        batches: How many batches of the epoch it counts as done when the loader is asked for its first one.

    Raises:
        ResumeError: The epoch has begun; names the checkpoint, and the newest one beside it that works.
    """
    if not batches or not trainer.fit_loop.restarting:
        return
    used = trainer.ckpt_path
    other = newest_of_an_epochs_end(folders_of(trainer), used)
    where = ""
    if other and used and other.parent != Path(used).parent:
        where = " in the folder that this Trainer writes to; make sure that it is of the same training"
    instead = (
        f"resume from {other}, the newest checkpoint from the end of an epoch{where}"
        if other
        else f"no checkpoint from the end of an epoch was found beside it: {WRITE_ONE}; to keep the weights only, use "
        "load_from_checkpoint and train without ckpt_path"
    )
    of = f" of {trainer.num_training_batches}" if trainer.num_training_batches != float("inf") else ""
    raise ResumeError(
        f"ckpt_path: {used or 'the checkpoint'} was written after {batches}{of} batches of epoch "
        f"{trainer.current_epoch}, and training cannot be resumed in the middle of an epoch yet: batches would come "
        f"twice, and others never; {instead}",
        file=None if used is None else str(used),
    )


def folders_of(trainer: pl.Trainer) -> list[Path]:
    """Where checkpoints of a run may be: beside the one that it was restored from, and where its callbacks write."""
    found = [] if trainer.ckpt_path is None else [Path(trainer.ckpt_path).parent]
    written = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    return list(dict.fromkeys([*found, *(Path(folder) for folder in written if folder)]))


def newest_of_an_epochs_end(folders: list[Path], used: Any = None) -> Path | None:
    """The checkpoint that was written last, of those from which training goes on with a whole epoch.

    Args:
        folders: Where to search; the first one that has any counts.
        used: Checkpoint to leave out.
    """
    for folder in folders:
        files = [path for path in folder.glob("*.ckpt") if path.is_file() and path != Path(used or "")]
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if any(map(at_an_epochs_end, counters_of(path))):
                return path
    return None


def counters_of(path: Path) -> Iterator[dict[str, Any]]:
    """The counters of training batches in a checkpoint, if it can be read and has any."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as pickled:
                yield _Values(pickled).load()["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    except Exception:  # noqa: BLE001  # whatever a file of this name may hold: it is not one to recommend
        return


def at_an_epochs_end(progress: dict[str, Any]) -> bool:
    """Whether Lightning goes on with a whole epoch from these counters."""
    now = progress["current"]
    # An interrupt in the last batch leaves one that is ready and not processed.
    return now["processed"] == 0 or bool(progress["is_last_batch"] and now["processed"] == now["ready"])


class _Object(dict[Any, Any]):
    """Stands for any object of a class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None: ...

    extend = add = append


class _Values(pickle.Unpickler):
    """Reads the numbers and texts of a checkpoint and no weights, and runs no code: nobody has asked for this file."""

    def find_class(self, *_: str) -> Any:
        return _Object

    def persistent_load(self, pid: Any) -> None:
        """No weights."""
