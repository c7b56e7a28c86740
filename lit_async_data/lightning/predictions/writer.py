"""`PredictionWriter`: writes what ``trainer.predict`` predicts, with samples and locations, in dataset order."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.lightning.predictions.folder import ResultFolder
from lit_async_data.lightning.predictions.loader_predictions import LoaderPredictions
from lit_async_data.lightning.predictions.ranks import on_rank_zero
from lit_async_data.lightning.trainer.compat import pl, rank_zero_info
from lit_async_data.lightning.trainer.priority import evaluate
from lit_async_data.lightning.trainer.stages import loaders_in
from lit_async_data.loader.async_loader import AsyncLoader


class PredictionWriter(pl.Callback):
    """Writes the predictions of ``trainer.predict`` with samples and locations, each sample once, in dataset order.

    ``predict_step`` returns a tensor or array whose first axis is the samples of the batch, or a dict of such tensors
    and arrays and of lists of str. Without a dict the name is ``prediction``. All batches must have the same names,
    types and shapes.

    * Numbers and text are columns of ``PATH/predictions.parquet``. Vectors, such as class scores, are columns of lists
      of fixed length. float16 is stored as float32.
    * Arrays with two axes or more per sample, such as masks, are datasets of ``PATH/predictions.h5``, with the samples
      on axis 0. Whole numbers and bools are compressed (gzip), sample by sample.
    * bfloat16 and smaller floats are stored as float32, everything else as it is; NaN stays NaN.

    Row n belongs to sample n of the source. Both files have the location columns ``sample`` (the number that
    ``source.locate`` takes), ``file`` and ``row``; ``group`` if samples are in groups of HDF5 files; ``id`` and
    ``path`` if a table has them. With several sources the files are ``predictions_0``, ``predictions_1``, ….

    Each rank writes a file of its own in ``PATH.partial``. At the end rank 0 merges them, checks that each sample is
    there exactly once, and renames the folder to ``PATH``, so that ``PATH`` never holds half of a result. It must be on
    a file system that all nodes share. A run that ends early leaves ``PATH.partial``, which the next one clears. Memory
    does not grow with the number of predictions; give ``trainer.predict`` ``return_predictions=False``, or the Trainer
    keeps all of them as well.

    The loaders must be those of an `AsyncDataModule`, or `AsyncLoader` objects without shuffle. Not thread-safe:
    Lightning calls it from one thread.

    Args:
        path: The folder for the results. It must not exist, or be empty, when prediction begins.

    Raises:
        ConfigError: ``path`` is not a path. From ``trainer.predict``: there is something at the path; pyarrow is
            missing; a loader is not in dataset order; or ``predict_step`` returned what cannot be stored.
        MissingError, CorruptError: From ``trainer.predict``: not every sample was predicted exactly once.

    Example:
        >>> callback = PredictionWriter("predictions")
        >>> callback
        PredictionWriter('predictions')

        >>> trainer = pl.Trainer(callbacks=[callback])  # doctest: +SKIP
        >>> trainer.predict(model, datamodule=dm, return_predictions=False)  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"path: {path!r} is not the path of a folder; give one for the predictions")
        self.path = path
        self._folder = ResultFolder(path)
        self._predictions: list[LoaderPredictions] = []

    def __repr__(self) -> str:
        return f"PredictionWriter({os.fspath(self.path)!r})"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check before prediction what can be checked without its loaders."""
        if stage != "predict":
            return
        evaluate(trainer)
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                "PredictionWriter: it writes Parquet, and pyarrow is missing; install it by "
                "pip install 'lit-async-data[manifest]'"
            )
        if "dataloader_iter" in inspect.signature(pl_module.predict_step).parameters:
            raise ConfigError(
                "PredictionWriter: a predict_step that takes dataloader_iter does not say which batch its predictions "
                "belong to; let it take batch and batch_idx"
            )
        on_rank_zero(trainer, self._check())

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the loaders, and make the temporary folder."""
        loaders = loaders_in(trainer.predict_dataloaders)
        for number, loader in enumerate(loaders):
            _check_loader(loader, number, trainer)
        on_rank_zero(trainer, self._begin())
        if not trainer.strategy.reduce_boolean_decision(os.path.isdir(self._folder.partial), all=True):
            raise ConfigError(
                f"path: some ranks do not see {self._folder.partial}, which rank 0 has made; give PredictionWriter a "
                "path on a file system that all nodes share"
            )
        self._predictions = [
            LoaderPredictions(
                loader, int(steps), "predictions" if len(loaders) == 1 else f"predictions_{number}", self._folder
            )
            for number, (loader, steps) in enumerate(zip(loaders, trainer.num_predict_batches, strict=True))
        ]
        if trainer.predict_loop.return_predictions:
            rank_zero_info(
                "PredictionWriter: the Trainer keeps all predictions in memory as well; return_predictions=False "
                "keeps it from that"
            )

    def on_predict_batch_end(  # noqa: PLR0917  # Lightning says what its hooks take
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the predictions of this batch, or those of the one before while a device computes this one."""
        self._predictions[dataloader_idx].add(batch_idx, outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Merge the parts of all ranks, and rename the temporary folder to the result."""
        for each in self._predictions:
            each.close()
        trainer.strategy.barrier("predictions are written")
        on_rank_zero(trainer, self._finish())
        for each in self._predictions:
            rank_zero_info(f"{self._folder.path}: predictions of {each}")
        self._predictions = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the files; what they hold stays in the temporary folder."""
        for each in self._predictions:
            each.abandon()
        self._predictions = []
        self._folder.release()

    # -- on rank 0, step by step -----------------------------------------------------------------------------------

    def _check(self) -> Iterator[None]:
        self._folder.check_free()
        yield

    def _begin(self) -> Iterator[None]:
        self._folder.begin()
        yield

    def _finish(self) -> Iterator[None]:
        for each in self._predictions:
            yield from each.merge()
        self._folder.publish()


def _check_loader(loader: Any, number: int, trainer: pl.Trainer) -> None:
    """Check that the loader has each sample of its source once, in order, over the ranks of the Trainer.

    Raises:
        ConfigError: It has not, or is not of this package.
    """
    where = f"PredictionWriter: predict loader {number}"
    if not isinstance(loader, AsyncLoader):
        kind = type(getattr(loader, "loader", loader)).__name__  # of a DataLoader that DevicePrefetcher has wrapped
        raise ConfigError(
            f"{where} is a {kind}, which does not say which samples a batch has; predict with "
            "AsyncDataModule(predict=source, …), where the source can be DatasetSource(dataset)"
        )
    if loader.order.shuffle != "none":
        raise ConfigError(f"{where} shuffles, and predictions are in dataset order; set shuffle=False for it")
    if loader.options.drop_last:
        raise ConfigError(f"{where} drops samples, and each must have a prediction; set drop_last=False for it")
    mine, wanted = (loader.rank, loader.world_size), (trainer.global_rank, trainer.world_size)
    if mine != wanted:
        raise ConfigError(
            f"{where} is that of rank {mine[0]} of {mine[1]} in rank {wanted[0]} of {wanted[1]}, so samples would be "
            "predicted twice or never; use AsyncDataModule, or AsyncLoader(rank=trainer.global_rank, "
            "world_size=trainer.world_size)"
        )
