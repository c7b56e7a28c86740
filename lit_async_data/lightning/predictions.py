"""`PredictionWriter`: writes the predictions of ``trainer.predict``, with samples and locations, in dataset order.

Each rank writes a `TablePart` and an `ArrayPart`. Row n of the part of rank r is row ``r + n · ranks`` of the merged
file. Merging opens the parts one after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import torch

from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.lightning.display import print_line
from lit_async_data.lightning.loops import loaders_in, on_rank_zero, pl
from lit_async_data.options import explains_names
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.composed.composed import check_whole
from lit_async_data.sources.contract.source import starts
from lit_async_data.sources.hdf5.storage.codecs import read_chunk, write_chunk
from lit_async_data.sources.local_files import expanded, not_local
from lit_async_data.sources.table.formats import arrow

# Bytes, about, that are held before they are written or merged; bytes that a text is taken to have.
HELD_BYTES, TEXT_BYTES = 2**26, 64
# Samples of whole numbers are compressed, each as one chunk, from this many bytes on.
COMPRESSED_BYTES = 4096

# Numbers with the samples on axis 0, or a text for each sample.
Values = npt.NDArray[Any] | list[Any]


class Field(NamedTuple):
    dtype: np.dtype[Any] | None  # None for text
    shape: tuple[int, ...]  # of one sample

    @property
    def is_array(self) -> bool:
        return len(self.shape) > 1  # such as a mask; smaller fields fit into a column of a table

    def __str__(self) -> str:
        return "text" if self.dtype is None else f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)


def _piece_rows(fields: Mapping[str, Field], ranks: int) -> int:
    row = sum(math.prod(each.shape) * each.dtype.itemsize if each.dtype else TEXT_BYTES for each in fields.values())
    return max(HELD_BYTES // (row * ranks), 1)


class TablePart:
    """A Parquet file. Its row groups have the same number of rows on all ranks, so merging goes group by group."""

    suffix = ".parquet"

    def __init__(self, path: str, fields: Mapping[str, Field], ranks: int) -> None:
        self._schema = arrow().schema([(name, _arrow_type(field)) for name, field in fields.items()])
        self._group_rows, self._kept, self._rows = _piece_rows(fields, ranks), list[Any](), 0
        self._writer = arrow("parquet").ParquetWriter(path, self._schema)

    def write(self, columns: Mapping[str, Values]) -> None:
        """Values are copied."""
        arrays = [_arrow_array(columns[field.name], field.type) for field in self._schema]
        self._kept.append(arrow().Table.from_arrays(arrays, schema=self._schema))
        self._rows += self._kept[-1].num_rows
        while self._rows >= self._group_rows:
            self._write_group()

    def _write_group(self) -> None:
        rows = arrow().concat_tables(self._kept)
        self._writer.write_table(rows.slice(0, self._group_rows), row_group_size=self._group_rows)
        self._kept = [rows.slice(self._group_rows)]
        self._rows = self._kept[0].num_rows

    def close(self) -> None:
        if self._rows:
            self._write_group()
        self._writer.close()

    def merge(self, paths: Sequence[str], target: str, total: int) -> None:
        with arrow("parquet").ParquetWriter(target, self._schema) as writer:
            for number in range(-(-total // len(paths) // self._group_rows)):
                tables = [_row_group(path, number) for path in paths]
                places = [rank + len(paths) * np.arange(table.num_rows) for rank, table in enumerate(tables)]
                rows = arrow().concat_tables(tables).take(np.argsort(np.concatenate(places)))
                writer.write_table(rows, row_group_size=rows.num_rows)


def _row_group(path: str, number: int) -> Any:
    with arrow("parquet").ParquetFile(path) as file:
        return file.read_row_group(number) if number < file.num_row_groups else file.schema_arrow.empty_table()


def _arrow_type(field: Field) -> Any:
    number = arrow().string() if field.dtype is None else arrow().from_numpy_dtype(field.dtype)
    return arrow().list_(number, field.shape[0]) if field.shape else number


def _arrow_array(values: Any, kind: Any) -> Any:
    if isinstance(values, list) or values.ndim == 1:
        return arrow().array(values if isinstance(values, list) else values.copy(), kind)
    return arrow().FixedSizeListArray.from_arrays(arrow().array(values.flatten()), type=kind)


class ArrayPart:
    """An HDF5 file with a dataset of ``rows`` rows for each field. Methods as in `TablePart`."""

    suffix = ".h5"

    def __init__(self, path: str, fields: Mapping[str, Field], rows: int) -> None:
        self._fields, self._file, self._written = fields, h5py.File(path, "w"), 0
        for name, (dtype, shape) in fields.items():
            kind, packed = h5py.string_dtype() if dtype is None else dtype, dict[str, Any]()
            if kind.kind in "biu" and math.prod(shape) * kind.itemsize >= COMPRESSED_BYTES:
                packed = {"chunks": (1, *shape), "compression": 1, "shuffle": True}
            self._file.create_dataset(name, (rows, *shape), kind, **packed)

    def write(self, columns: Mapping[str, Values]) -> None:
        first, self._written = self._written, self._written + len(columns["sample"])
        for name, dataset in self._file.items():
            values = columns[name]
            if isinstance(values, list):  # HDF5 has no text that is missing
                values = np.array(["" if each is None else each for each in values], object)
            dataset[first : self._written] = values

    def close(self) -> None:
        self._file.close()

    def merge(self, paths: Sequence[str], target: str, total: int) -> None:
        ranks, merged, step = len(paths), ArrayPart(target, self._fields, total), _piece_rows(self._fields, len(paths))
        for first in range(0, -(-total // ranks), step):
            for rank, path in enumerate(paths):
                with h5py.File(path) as part:
                    for name, dataset in part.items():
                        _copy(dataset, merged._file[name], range(len(dataset))[first : first + step], rank, ranks)
        merged.close()


def _copy(source: Any, target: Any, rows: range, rank: int, ranks: int) -> None:
    if source.chunks is None:
        target[rank + ranks * rows.start : rank + ranks * rows.stop : ranks] = source[rows.start : rows.stop]
        return
    for row in rows:  # compressed chunks are copied as they are
        rest = (0,) * (source.ndim - 1)
        write_chunk(target, (rank + ranks * row, *rest), *read_chunk(source, (row, *rest)))


# The columns of locations, in order; a column is left out if all samples have the value in `ABSENT`.
LOCATION_COLUMNS = ("sample", "file", "group", "row", "id", "path")
ABSENT = {"group": "/", "id": None, "path": None}
MISSING = "missing"  # the column that marks samples which could not be read
WANTED = "return a tensor or array whose first axis is the samples of the batch, or a dict of these and of lists of str"


@explains_names()
class PredictionWriter(pl.Callback):
    """Writes the predictions of ``trainer.predict`` with samples and locations, each sample once, in dataset order.

    ``predict_step`` returns a tensor or array whose first axis is the samples of the batch, or a dict of such tensors
    and arrays and of lists of str, the same for each batch. Without a dict the name is ``prediction``.

    * Numbers, text and vectors (lists of fixed length) are columns of ``PATH/predictions.parquet``.
    * Arrays with two axes or more per sample, such as masks, are datasets of ``PATH/predictions.h5``, samples first.
    * Bad samples that `LoaderOptions.on_error` skips keep their rows, with ``missing`` true.

    Row n belongs to sample n of the source; columns give its location. With several sources the files are
    ``predictions_0``, ``predictions_1``, …. See docs/training/predictions.md.

    Ranks write into ``PATH.partial``, which is renamed at the end. Not thread-safe: Lightning calls it from one thread.

    Args:
        path: The folder for the results. It must not exist, or be empty, when prediction begins.

    Raises:
        ConfigError: ``path`` is not a path. From ``trainer.predict``: the folder is not empty; pyarrow is missing; a
            loader is not an `AsyncLoader` in dataset order; or ``predict_step`` returned a value that cannot be stored.
        MissingError: From ``trainer.predict``: not every sample was predicted, or ranks predicted different fields.

    Example:
        >>> trainer = pl.Trainer(callbacks=[PredictionWriter("predictions")])  # doctest: +SKIP
        >>> trainer.predict(model, datamodule=dm, return_predictions=False)  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"{path!r} is not the path of a folder; give one for the predictions", "path")
        self.path = expanded(os.fspath(path)).rstrip("/") or "/"
        if why := not_local(self.path):
            raise ConfigError(f"{self.path}: {why}", "path")
        self._partial = f"{self.path}.partial"
        self._predictions: list[LoaderPredictions] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check what can be checked without the loaders of prediction."""
        if stage == "predict":
            arrow()  # names the package to install if it is missing
            on_rank_zero(trainer, self._check_free, "PredictionWriter")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = loaders_in(trainer.predict_dataloaders)
        for number, loader in enumerate(loaders):
            _check_loader(loader, number, trainer)
        on_rank_zero(trainer, self._make_partial, "PredictionWriter")
        names = ["predictions"] if len(loaders) == 1 else [f"predictions_{number}" for number in range(len(loaders))]
        self._predictions = [
            LoaderPredictions(loader, int(steps), os.path.join(self._partial, name))
            for loader, steps, name in zip(loaders, trainer.num_predict_batches, names, strict=True)
        ]

    def on_predict_batch_end(  # noqa: PLR0917  # Lightning says what its hooks take
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._predictions[dataloader_idx].add(batch_idx, outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Merge the parts of all ranks, and rename the temporary folder to the result."""
        for each in self._predictions:
            each.close()
            fault = each.fault(trainer.strategy.broadcast(str(each)))
            if not trainer.strategy.reduce_boolean_decision(not fault, all=True):
                raise MissingError(f"{self.path}: {fault or 'another rank failed'}; predict again", file=self.path)
        on_rank_zero(trainer, self._publish, "PredictionWriter")
        for each in self._predictions:
            print_line(f"{self.path}: predictions of {each}")
        self._predictions = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Release the files; the predictions so far stay in the temporary folder."""
        self._predictions = []

    def _check_free(self) -> None:
        empty = not os.path.islink(self.path) and os.path.isdir(self.path) and not os.listdir(self.path)
        if os.path.lexists(self.path) and not empty:
            raise ConfigError(f"{self.path} exists; move or delete it, or give another path", "path", file=self.path)

    def _make_partial(self) -> None:
        os.makedirs(self._partial, exist_ok=True)
        for name in os.listdir(self._partial):
            if name.startswith("predictions"):  # of a run that ended early
                os.unlink(os.path.join(self._partial, name))

    def _publish(self) -> None:
        for each in self._predictions:
            each.merge()
        os.rename(self._partial, self.path)


def _check_loader(loader: Any, number: int, trainer: pl.Trainer) -> None:
    where = f"PredictionWriter: predict loader {number}"
    if not isinstance(loader, AsyncLoader):
        kind = type(getattr(loader, "loader", loader)).__name__  # of a DataLoader that DevicePrefetcher has wrapped
        what = f"{where} is a {kind}, which does not say which samples a batch has; predict with"
        raise ConfigError(f"{what} AsyncDataModule(predict=source, …); the source can be DatasetSource(dataset)")
    if loader.options.batch_by is not None:
        raise ConfigError(f"{where} takes samples by length; leave it out for prediction", "batch_by")
    check_whole("predict", loader.source)
    loader._check_evaluation(predicts=True)
    if loader.order.decks.shuffle != "none" or loader.options.drop_last:
        raise ConfigError(f"{where} shuffles or drops samples; set shuffle=False and drop_last=False for it")
    if loader.options.on_error == "substitute":
        raise ConfigError(f"{where} replaces bad samples by other ones; set on_error=skip for it", "on_error")
    if (loader.rank, loader.world_size) != (trainer.global_rank, trainer.world_size):
        what = f"{where} has rank {loader.rank} of {loader.world_size}, and the Trainer another"
        raise ConfigError(f"{what}; use AsyncDataModule, or give AsyncLoader the rank and world_size of the Trainer")


class LoaderPredictions:
    """Writes and merges the predictions of ``steps`` batches; the names of the files begin with ``path``."""

    def __init__(self, loader: AsyncLoader, steps: int, path: str) -> None:
        self._loader, self._plan, self._source = loader, loader.order, loader.source
        self._steps, self._path, self._total = steps, path, self._plan.position(steps)
        self._done, self._fields = 0, dict[str, Field]()
        self._parts: list[TablePart | ArrayPart] = []
        firsts = np.unique(starts([part.samples for part in self._source.parts]))[:-1]
        located = self._source.locate(self._source.ids(firsts))
        absent = {name for name, value in ABSENT.items() if all(_of(each, name) == value for each in located)}
        self._locations = [name for name in LOCATION_COLUMNS[1:] if name not in absent]

    def add(self, step: int, outputs: Any) -> None:
        where = f"{os.path.basename(self._path)}: predict_step, batch {step}"
        if step != self._done:
            raise ConfigError(f"{where}: batch {self._done} comes next; predict each batch once, in order")
        samples, read = self._plan.batch(step), self._loader._wiring.quarantine.samples(step)
        options, count = self._loader.options, len(samples if read is None else read)
        values = predicted(outputs, max(count, options.batch_size) if options.pad_last else count, where)
        values, columns = {name: of[:count] for name, of in values.items()}, self._located(samples)
        if options.on_error != "raise":
            values, columns[MISSING] = placed(values, samples, samples if read is None else np.array(read))
        if not self._parts:
            self._open(fields_of(values), fields_of(columns))
        if fields_of(values) != self._fields:
            what = f"{_described(fields_of(values))}, but the first batch had {_described(self._fields)}"
            raise ConfigError(f"{where}: {what}; return the same fields for each batch")
        for part in self._parts:
            part.write({**columns, **values})
        self._done += 1

    def _open(self, fields: dict[str, Field], locations: dict[str, Field]) -> None:
        self._fields, rank, ranks = fields, self._plan.rank, self._plan.world_size
        arrays = {name: each for name, each in fields.items() if each.is_array}
        if columns := {name: each for name, each in fields.items() if name not in arrays}:
            self._parts.append(TablePart(self._part(TablePart.suffix, rank), locations | columns, ranks))
        if arrays:
            rows = len(range(rank, self._total, ranks))
            self._parts.append(ArrayPart(self._part(ArrayPart.suffix, rank), locations | arrays, rows))

    def _located(self, samples: Indices) -> dict[str, Values]:
        located = self._source.locate(ids := self._source.ids(samples))
        columns: dict[str, Any] = {name: [_of(each, name) for each in located] for name in self._locations}
        return {"sample": ids, **columns, "row": np.array(columns["row"], np.int64)}

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def fault(self, on_rank_zero: str) -> str:
        """Why these parts cannot be merged with rank 0's, given by its description; empty if they can."""
        if self._done < self._steps or not self._parts:
            return f"predict_step was called for {self._done} of {self._steps} batches"
        return "" if str(self) == on_rank_zero else f"{self}; but on rank 0 {on_rank_zero}"

    def merge(self) -> None:
        for part in self._parts:
            paths = [self._part(part.suffix, rank) for rank in range(self._plan.world_size)]
            if len(paths) == 1:
                os.rename(paths.pop(), self._path + part.suffix)
            else:
                part.merge(paths, self._path + part.suffix, self._total)
            for path in paths:
                os.unlink(path)

    def __str__(self) -> str:
        return f"{self._total:,} of {self._plan.length:,} samples: {_described(self._fields)}"

    def _part(self, suffix: str, rank: int) -> str:
        return f"{self._path}.part-{rank}{suffix}"


def _described(fields: dict[str, Field]) -> str:
    return ", ".join(f"{name} {field}" for name, field in fields.items())


def _of(location: Any, name: str) -> Any:
    value = getattr(location, name, None)  # only locations in tables have an id and a path
    # Parquet and HDF5 store text as UTF-8, but a file name may be any bytes: these are written as \xe4.
    return value.encode(errors="surrogateescape").decode(errors="backslashreplace") if isinstance(value, str) else value


def placed(values: Mapping[str, Values], samples: Indices, read: Indices) -> tuple[dict[str, Values], Values]:
    """The predictions, with empty rows for the samples that were not read; and a mask of these."""
    if MISSING in values:
        raise ConfigError(f"{MISSING!r} is the column of samples that could not be read; rename it", "predict_step")
    missing, rows = ~np.isin(samples, read), np.flatnonzero(np.isin(read, samples))
    found: dict[str, Values] = {}
    for name, column in values.items():
        if isinstance(column, list):
            left = iter([column[row] for row in rows])
            found[name] = [None if each else next(left) for each in missing]
        else:
            empty = np.nan if column.dtype.kind == "f" else 0
            found[name] = full = np.full((len(samples), *column.shape[1:]), empty, column.dtype)
            full[~missing] = column[rows]
    return found, missing


def fields_of(values: Mapping[str, Values]) -> dict[str, Field]:
    return {name: Field(None, ()) if isinstance(v, list) else Field(v.dtype, v.shape[1:]) for name, v in values.items()}


def predicted(outputs: Any, samples: int, where: str) -> dict[str, Values]:
    """The return value of ``predict_step`` by name, in host memory, in the stored type."""
    named = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
    if not named:
        raise ConfigError(f"{where}: an empty dict; {WANTED}")
    for name in named:
        if not isinstance(name, str) or not name or name in LOCATION_COLUMNS:
            raise ConfigError(f"{where}: {name!r} cannot be a name; give text other than {', '.join(LOCATION_COLUMNS)}")
    found = {name: _stored(value, f"{where}: {name}") for name, value in named.items()}
    for name, field in fields_of(found).items():
        if (found_samples := len(found[name])) != samples or 0 in field.shape:
            what = f"{found_samples} values of shape {field.shape} for a batch of {samples} samples"
            raise ConfigError(f"{where}: {name} has {what}; {WANTED}")
        if field.is_array and ("/" in name or name == "."):
            raise ConfigError(f"{where}: {name!r} cannot be a dataset of HDF5; leave out the slash or the dot")
    return found


def _stored(value: Any, where: str) -> Values:
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return list(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
            value = value.float()  # numpy has no bfloat16 or smaller floats
        value = value.numpy(force=True)
    if not isinstance(value, np.ndarray) or not value.ndim:
        what = "a single number" if isinstance(value, np.ndarray) else f"of type {type(value).__name__}"
        raise ConfigError(f"{where} is {what}; {WANTED}")
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise ConfigError(f"{where} is of type {value.dtype}; return bools, whole numbers or floats of at most 64 bits")
    in_table = value.dtype == np.float16 and value.ndim < 3  # many readers of Parquet do not know float16
    return np.ascontiguousarray(value, np.float32 if in_table else value.dtype.newbyteorder("="))
