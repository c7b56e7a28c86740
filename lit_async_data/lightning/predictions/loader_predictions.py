"""`LoaderPredictions`: what is predicted for the samples of one loader, on its way to the merged files."""

from __future__ import annotations

import collections
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from lit_async_data import system
from lit_async_data.device import streams as device_streams
from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.lightning.predictions.arrays import ArrayPart
from lit_async_data.lightning.predictions.completeness import check_complete
from lit_async_data.lightning.predictions.folder import ResultFolder
from lit_async_data.lightning.predictions.locations import LocationColumns
from lit_async_data.lightning.predictions.tables import TablePart
from lit_async_data.lightning.predictions.values import HostCopies, PredictedField, field_of, named
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.order.permutation import Indices

log = logging.getLogger(__name__)


class LoaderPredictions:
    """The predictions of one loader: the parts of this rank, and on rank 0 the merging of all parts.

    Predictions of a batch on a device with streams are copied while the device computes the next batch, and written
    after that batch was launched, so the device does not wait for the writing.

    Args:
        loader: In dataset order, with nothing dropped.
        steps: Batches that will be predicted.
        name: Of the files, without suffix.
        folder: Holds the parts and the merged files.

    Attributes:
        total: Samples that will be predicted, over all ranks.
    """

    def __init__(self, loader: AsyncLoader, steps: int, name: str, folder: ResultFolder) -> None:
        self._plan, self._columns = loader.order, LocationColumns(loader.source)
        self._name, self._folder = name, folder
        self.total = self._plan.length
        if steps < len(self._plan):
            self.total = self._plan.bounds(steps - 1)[1] * self._plan.world_size if steps else 0
        self._streams_of = functools.cache(device_streams.streams_of)
        self._fields: dict[str, PredictedField] = {}
        # Each part of this rank, and the names of its fields.
        self._parts: list[tuple[TablePart | ArrayPart, list[str]]] = []
        self._under_way: collections.deque[tuple[Indices, HostCopies]] = collections.deque()

    def add(self, step: int, outputs: Any) -> None:
        """Take what ``predict_step`` returned for a batch.

        Raises:
            ConfigError: It cannot be stored, or does not fit what was returned for the first batch.
            OSError: It cannot be written.
        """
        where = f"{self._name}: predict_step, batch {step}"
        values, samples = named(outputs, where), self._plan.batch(step).samples
        fields = {name: field_of(name, value, len(samples), where) for name, value in values.items()}
        if not self._parts:
            self._open(fields)
        if fields != self._fields:
            raise ConfigError(
                f"{where}: {_described(fields)}; but it began with {_described(self._fields)}; return the same for "
                "each batch"
            )
        copies = HostCopies(values, fields, self._streams_of)
        self._under_way.append((samples, copies))
        self._store(keep=1 if copies.under_way else 0)

    def _open(self, fields: dict[str, PredictedField]) -> None:
        self._fields, ranks = fields, self._plan.world_size
        rows = len(range(self._plan.rank, self.total, ranks))
        columns = {name: field for name, field in fields.items() if not field.is_array}
        arrays = {name: field for name, field in fields.items() if field.is_array}
        if columns:
            path = self._part(TablePart.suffix, self._plan.rank)
            self._parts.append((TablePart(path, self._columns.names, columns, ranks), list(columns)))
        if arrays:
            path = self._part(ArrayPart.suffix, self._plan.rank)
            self._parts.append((ArrayPart(path, self._columns.names, arrays, rows), list(arrays)))

    def _store(self, *, keep: int) -> None:
        while len(self._under_way) > keep:
            samples, copies = self._under_way.popleft()
            columns, values = self._columns.of(samples), copies.values()
            for part, names in self._parts:
                part.write({**columns, **{name: values[name] for name in names}})

    def close(self) -> None:
        """Write what is left, so that rank 0 can read the parts of this rank.

        Raises:
            OSError: It cannot be written.
        """
        self._store(keep=0)
        for part, _ in self._parts:
            part.close()
            system.write_through(self._part(part.suffix, self._plan.rank))

    def abandon(self) -> None:
        """Close the files as they are. Never raises, since it is called after an error."""
        self._under_way.clear()
        for part, _ in self._parts:
            try:
                part.close()
            except Exception:  # whatever it is, it has a cause that is being raised
                log.debug("closing %s failed", self._name, exc_info=True)

    def merge(self) -> Iterator[None]:
        """Merge the parts of all ranks; for rank 0, after all ranks have closed theirs. Yields now and then.

        Raises:
            MissingError: A part or a sample is missing.
            CorruptError: A sample was predicted twice.
            OSError: The merged file cannot be written.
        """
        if not self._parts:
            raise MissingError(f"{self._name}: predict_step was not called, so there are no predictions")
        self._check_parts()
        for part, _ in self._parts:
            paths = [self._part(part.suffix, rank) for rank in range(self._plan.world_size)]
            for path in paths[1:]:
                if (there := part.layout(path)) != (here := part.layout(paths[0])):
                    raise ConfigError(
                        f"{path}: {there}; but rank 0 has {here}; predict_step must return the same on each rank"
                    )
            target = self._folder.file(self._name + part.suffix)
            check_complete(
                [functools.partial(part.samples, path) for path in paths], self.total, self._columns.ids, target
            )
            if len(paths) == 1:
                os.rename(paths[0], target)
                continue
            yield from part.merge(paths, target)
            for path in paths:
                os.unlink(path)

    def _check_parts(self) -> None:
        wanted = {
            os.path.basename(self._part(part.suffix, rank))
            for part, _ in self._parts
            for rank in range(self._plan.world_size)
        }
        found = {name for name in os.listdir(self._folder.partial) if name.startswith(f"{self._name}.part-")}
        if missing := sorted(wanted - found):
            raise MissingError(f"{self._folder.partial}: {', '.join(missing)}: missing; predict again", file=missing[0])
        if other := sorted(found - wanted):
            raise ConfigError(
                f"{self._folder.partial}: {', '.join(other)}: rank 0 has no such part; predict_step must return the "
                "same on each rank"
            )

    def __str__(self) -> str:
        files = (
            f"{_described({name: self._fields[name] for name in names})} in {self._name}{part.suffix}"
            for part, names in self._parts
        )
        return f"{self.total:,} of {self._plan.length:,} samples: {', '.join(files)}"

    def _part(self, suffix: str, rank: int) -> str:
        return self._folder.file(f"{self._name}.part-{rank}{suffix}")


def _described(fields: dict[str, PredictedField]) -> str:
    return ", ".join(f"{name} {field}" for name, field in fields.items())
