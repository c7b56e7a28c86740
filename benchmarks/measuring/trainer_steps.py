"""Steps in a Trainer that record when they began and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
import torch

from lit_async_data import DevicePrefetcher

Work = Callable[[float], None]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# A context that gives the batches of a loader.
Opened = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A loader, with or without the callback, that gives batches to the Trainer.

    Attributes:
        name: In words.
        opened: Starts the loader.
        depth: The callback's ``device_depth``; None without a callback.
    """

    name: str
    opened: Opened
    depth: int | None = None

    def callbacks(self) -> list[Any]:
        return [] if self.depth is None else [DevicePrefetcher(device_depth=self.depth)]


@dataclasses.dataclass
class Marks:
    """When steps began and ended."""

    begins: list[float] = dataclasses.field(default_factory=list)
    ends: list[float] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.begins.append(time.perf_counter())
        yield
        self.ends.append(time.perf_counter())

    @property
    def per_step(self) -> float:
        """Seconds from the end of one step to the end of the next."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    @property
    def alone(self) -> float:
        """Seconds inside a step."""
        return statistics.fmean(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    @property
    def between(self) -> float:
        """Seconds between two steps."""
        return statistics.fmean(begin - end for begin, end in zip(self.begins[1:], self.ends[:-1], strict=True))


class Steps(pl.LightningModule):
    """A step that takes a given time per sample."""

    def __init__(self, seconds: float, work: Work) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.marks = Marks()
        self._seconds, self._work = seconds, work

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        with self.marks.step():
            self._work(self._seconds * len(batch["x"]))

    def configure_optimizers(self) -> None:
        return None


def fitted(model: Any, contender: Contender) -> tuple[Marks, Mapping[str, torch.Tensor]]:
    """Train an epoch with a contender; returns the marks of its steps, and the logged means."""
    trainer = pl.Trainer(callbacks=contender.callbacks(), **QUIET)
    with contender.opened() as batches:
        trainer.fit(model, batches)
    return model.marks, trainer.callback_metrics
