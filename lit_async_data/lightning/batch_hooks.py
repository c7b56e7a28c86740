"""Which of Lightning's batch hooks are the user's own, so that a batch must come to them in host memory."""

from __future__ import annotations

import importlib
from typing import Any

from lit_async_data.lightning.compat import pl

# In the order in which Lightning calls them. What comes after these has the batch on its device in any case.
HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


def transfer_of(trainer: pl.Trainer) -> str | None:
    """The user's hook that sees a batch before, or instead of, Lightning's own transfer; None if there is none.

    Args:
        trainer: With its module, and DataModule if there is one, attached.
    """
    is_overridden = importlib.import_module(f"{pl.__name__}.utilities.model_helpers").is_overridden
    owners: list[Any] = [getattr(trainer, "datamodule", None), trainer.lightning_module]
    found = (
        f"{type(owner).__name__}.{hook}"
        for hook in HOOKS
        for owner in owners
        if owner is not None and is_overridden(hook, owner)
    )
    return next(found, None)
