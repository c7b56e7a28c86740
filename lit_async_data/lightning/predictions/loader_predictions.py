"""`LoaderPredictions`: what is predicted for the samples of one loader, on its way to the merged files."""

from __future__ import annotations

import os
from typing import Any

from lit_async_data.errors import ConfigError
from lit_async_data.lightning.predictions.parts import ArrayPart, TablePart
from lit_async_data.lightning.predictions.values import Field, LocationColumns, fields_of, predicted
from lit_async_data.loader.async_loader import AsyncLoader


class LoaderPredictions:
    """The predictions of ``steps`` batches: this rank's parts, whose files begin with ``path``, and their merging."""

    def __init__(self, loader: AsyncLoader, steps: int, path: str) -> None:
        self._plan, self._locations, self._steps, self._path = loader.order, LocationColumns(loader.source), steps, path
        self._total = self._plan.length
        if steps < len(self._plan):
            self._total = self._plan.bounds(steps - 1)[1] * self._plan.world_size if steps else 0
        self._done, self._fields = 0, dict[str, Field]()
        self._parts: list[TablePart | ArrayPart] = []

    def add(self, step: int, outputs: Any) -> None:
        """Write what ``predict_step`` returned for a batch."""
        where = f"{os.path.basename(self._path)}: predict_step, batch {step}"
        if step != self._done:
            raise ConfigError(f"{where}: batch {self._done} comes next; predict each batch once, in order")
        samples = self._plan.batch(step).samples
        values, columns = predicted(outputs, len(samples), where), self._locations.of(samples)
        if not self._parts:
            self._open(fields_of(values), fields_of(columns))
        if fields_of(values) != self._fields:
            what = f"{_described(fields_of(values))}; but it began with {_described(self._fields)}"
            raise ConfigError(f"{where}: {what}; return the same for each batch")
        for part in self._parts:
            part.write({**columns, **values})
        self._done += 1

    def _open(self, fields: dict[str, Field], locations: dict[str, Field]) -> None:
        self._fields, rank, ranks = fields, self._plan.rank, self._plan.world_size
        columns = {name: each for name, each in fields.items() if not each.is_array}
        arrays = {name: each for name, each in fields.items() if each.is_array}
        if columns:
            self._parts.append(TablePart(self._part(TablePart.suffix, rank), locations | columns, ranks))
        if arrays:
            rows = len(range(rank, self._total, ranks))
            self._parts.append(ArrayPart(self._part(ArrayPart.suffix, rank), locations | arrays, rows))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def fault(self, on_rank_zero: str) -> str:
        """Why these parts cannot be merged with those of rank 0, which describes itself; empty if they can."""
        if self._done < self._steps or not self._parts:
            return f"predict_step was called for {self._done} of {self._steps} batches"
        return "" if str(self) == on_rank_zero else f"{self}; but on rank 0 {on_rank_zero}"

    def merge(self) -> None:
        for part in self._parts:
            paths = [self._part(part.suffix, rank) for rank in range(self._plan.world_size)]
            if len(paths) > 1:
                part.merge(paths, self._path + part.suffix, self._total)
                for path in paths:
                    os.unlink(path)
            else:
                os.rename(paths[0], self._path + part.suffix)

    def __str__(self) -> str:
        return f"{self._total:,} of {self._plan.length:,} samples: {_described(self._fields)}"

    def _part(self, suffix: str, rank: int) -> str:
        return f"{self._path}.part-{rank}{suffix}"


def _described(fields: dict[str, Field]) -> str:
    return ", ".join(f"{name} {field}" for name, field in fields.items())
