"""`QueueGauge`: how full the queues of the training loaders are, in the progress bar."""

from __future__ import annotations

import functools
from typing import Any

from lit_async_data.lightning.compat import pl
from lit_async_data.lightning.stages import loaders_in

# Under this name bars show it: `data=host 4/4 device 2/2`.
NAME = "data"


class QueueGauge:
    """Adds one entry to what Lightning's progress bar shows in fit, whichever bar it is; no logger sees it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown: Any = None

    def attach(self, trainer: pl.Trainer) -> None:
        """Compose the bar's metrics, if there is a bar."""
        self.detach()
        bar: Any = trainer.progress_bar_callback
        if bar is not None:
            self._bar, self._shown = bar, functools.partial(_shown, bar.get_metrics)
            bar.get_metrics = self._shown

    def detach(self) -> None:
        """Leave the bar as it was, unless somebody else has composed it since. Twice is fine."""
        bar, shown, self._bar, self._shown = self._bar, self._shown, None, None
        if bar is not None and vars(bar).get("get_metrics") is shown:
            before = shown.args[0]
            del bar.get_metrics
            if before != bar.get_metrics:
                bar.get_metrics = before


def _shown(metrics: Any, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    items: dict[str, Any] = metrics(trainer, pl_module)
    loaders = loaders_in(trainer.train_dataloader) if trainer.state.fn == "fit" else []
    return items | {NAME: ", ".join(str(loader.fill) for loader in loaders)} if loaders else items
