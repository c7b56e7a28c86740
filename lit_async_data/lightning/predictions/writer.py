"""`PredictionWriter`: writes what ``trainer.predict`` predicts, with samples and locations, in dataset order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lit_async_data.errors import AsyncDataError, ConfigError, MissingError
from lit_async_data.lightning.predictions.loader_predictions import LoaderPredictions
from lit_async_data.lightning.trainer.compat import pl, rank_zero_info
from lit_async_data.lightning.trainer.priority import evaluate
from lit_async_data.lightning.trainer.stages import loaders_in
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.sources.manifest.table.arrow import arrow


class PredictionWriter(pl.Callback):
    """Writes the predictions of ``trainer.predict`` with samples and locations, each sample once, in dataset order.

    ``predict_step`` returns a tensor or array whose first axis is the samples of the batch, or a dict of such tensors
    and arrays and of lists of str, the same for each batch. Without a dict the name is ``prediction``.

    * Numbers, text and vectors (lists of fixed length) are columns of ``PATH/predictions.parquet``.
    * Arrays with two axes or more per sample, such as masks, are datasets of ``PATH/predictions.h5``, samples first.
    * bfloat16 and smaller floats, and float16 in Parquet, become float32; everything else is stored as it is.

    Row n belongs to sample n of the source. Both files have the columns ``sample`` (the number that ``source.locate``
    takes), ``file`` and ``row``; ``group`` if samples are in groups of HDF5 files; ``id`` and ``path`` if a table has
    them. With several sources the files are ``predictions_0``, ``predictions_1``, ….

    Each rank writes into ``PATH.partial``, on a file system that all nodes share. At the end rank 0 merges the files
    and renames the folder to ``PATH``, while the others wait. A run that ends early leaves ``PATH.partial``, which the
    next one clears. Not thread-safe: Lightning calls it from one thread.

    Args:
        path: The folder for the results. It must not exist, or be empty, when prediction begins.

    Raises:
        ConfigError: ``path`` is not a path. From ``trainer.predict``: something is there; pyarrow is missing; a loader
            is not an `AsyncLoader` in dataset order; or ``predict_step`` returned what cannot be stored.
        MissingError: From ``trainer.predict``: not every sample was predicted, or ranks predicted different things.

    Example:
        >>> trainer = pl.Trainer(callbacks=[PredictionWriter("predictions")])  # doctest: +SKIP
        >>> trainer.predict(model, datamodule=dm, return_predictions=False)  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not the path of a folder; give one for the predictions")
        self.path = os.path.expanduser(os.fspath(path)).rstrip("/") or "/"
        self._partial = f"{self.path}.partial"
        self._predictions: list[LoaderPredictions] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check before prediction what can be checked without its loaders."""
        if stage != "predict":
            return
        evaluate(trainer)
        arrow()  # says what to install if it is missing
        _on_rank_zero(trainer, self._check_free)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the loaders, and make the temporary folder."""
        loaders = loaders_in(trainer.predict_dataloaders)
        for number, loader in enumerate(loaders):
            _check_loader(loader, number, trainer)
        _on_rank_zero(trainer, self._make_partial)
        names = ["predictions"] if len(loaders) == 1 else [f"predictions_{number}" for number in range(len(loaders))]
        self._predictions = [
            LoaderPredictions(loader, int(steps), os.path.join(self._partial, name))
            for loader, steps, name in zip(loaders, trainer.num_predict_batches, names, strict=True)
        ]

    def on_predict_batch_end(  # noqa: PLR0917  # Lightning says what its hooks take
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write the predictions of this batch."""
        self._predictions[dataloader_idx].add(batch_idx, outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Merge the parts of all ranks, and rename the temporary folder to the result."""
        for each in self._predictions:
            each.close()
            fault = each.fault(trainer.strategy.broadcast(str(each)))
            if not trainer.strategy.reduce_boolean_decision(not fault, all=True):
                raise MissingError(f"{self.path}: {fault or 'another rank failed'}; predict again", file=self.path)
        _on_rank_zero(trainer, self._publish)
        for each in self._predictions:
            rank_zero_info(f"{self.path}: predictions of {each}")
        self._predictions = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let go of the files; what they hold stays in the temporary folder."""
        self._predictions = []

    def _check_free(self) -> None:
        empty = not os.path.islink(self.path) and os.path.isdir(self.path) and not os.listdir(self.path)
        if os.path.lexists(self.path) and not empty:
            what = f"path: {self.path} exists; move or delete it, or give PredictionWriter another path"
            raise ConfigError(what, file=self.path)

    def _make_partial(self) -> None:
        os.makedirs(self._partial, exist_ok=True)
        for name in os.listdir(self._partial):
            if name.startswith("predictions"):  # of a run that ended early
                os.unlink(os.path.join(self._partial, name))

    def _publish(self) -> None:
        for each in self._predictions:
            each.merge()
        os.rename(self._partial, self.path)


def _on_rank_zero(trainer: pl.Trainer, work: Callable[[], None]) -> None:
    """Do the work on rank 0, while the others wait in a broadcast; an error of it is raised on every rank."""
    failed: Exception | None = None
    try:
        if trainer.is_global_zero:
            work()
    except Exception as error:  # noqa: BLE001  # raised below, when the others know of it
        failed = error
    heard = trainer.strategy.broadcast(failed and f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    if heard is not None:
        raise AsyncDataError(f"rank 0 failed: {heard}")


def _check_loader(loader: Any, number: int, trainer: pl.Trainer) -> None:
    where = f"PredictionWriter: predict loader {number}"
    if not isinstance(loader, AsyncLoader):
        kind = type(getattr(loader, "loader", loader)).__name__  # of a DataLoader that DevicePrefetcher has wrapped
        what = f"{where} is a {kind}, which does not say which samples a batch has; predict with"
        raise ConfigError(f"{what} AsyncDataModule(predict=source, …); the source can be DatasetSource(dataset)")
    if loader.order.shuffle != "none" or loader.options.drop_last:
        raise ConfigError(f"{where} shuffles or drops samples; set shuffle=False and drop_last=False for it")
    if (loader.rank, loader.world_size) != (trainer.global_rank, trainer.world_size):
        what = f"{where} is that of rank {loader.rank} of {loader.world_size}, not of the Trainer's"
        raise ConfigError(f"{what}; use AsyncDataModule, or give AsyncLoader the rank and world_size of the Trainer")
