"""`on_rank_zero`: what one rank does while the others wait, however long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lit_async_data.errors import AsyncDataError

# Seconds between two signs of life. The others wait in a collective operation, which times out after minutes.
BEAT_S = 30.0
GOES_ON = "goes on"


def on_rank_zero(trainer: Any, work: Iterator[None]) -> None:
    """Do the work on rank 0; every rank returns when it is done.

    Args:
        trainer: Of this rank.
        work: The work, in pieces. Only rank 0 begins it.

    Raises:
        Exception: What the work raised, on rank 0.
        AsyncDataError: It raised something, on the other ranks.
    """
    failed: Exception | None = None
    word: str | None = None
    if trainer.is_global_zero:
        spoke = time.monotonic()
        try:
            for _ in work:
                if time.monotonic() - spoke > BEAT_S:
                    trainer.strategy.broadcast(GOES_ON)
                    spoke = time.monotonic()
        except Exception as error:  # noqa: BLE001  # raised below, when the others know of it
            failed, word = error, f"{type(error).__name__}: {error}"
    while (heard := trainer.strategy.broadcast(word)) == GOES_ON:
        pass
    if failed is not None:
        raise failed
    if heard is not None:
        raise AsyncDataError(f"rank 0 failed: {heard}")
