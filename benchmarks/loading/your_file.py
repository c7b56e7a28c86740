"""A plain DataLoader over your file beside this package's loader, as a table to send.

    python benchmarks/loading/your_file.py x.h5 [--batch-size N] [--seconds S] [--dataset module:function]

Without ``--fields`` and other options of `doctor`, the source is the one that `inspect` suggests. The DataLoader
shuffles, too; it reads one row with h5py, or one image with Pillow, at a time, without workers and with one per core.
``--dataset`` measures a Dataset of yours instead: what ``function()`` of a module in the current folder returns.
The loaders take turns, round by round, from the page cache. The table names neither files nor datasets.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import lit_async_data
from lit_async_data import AsyncLoader, LoaderOptions, Source
from lit_async_data.engine.resources import cores
from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.tools import doctor
from lit_async_data.tools.call import Call
from lit_async_data.tools.inspect import given_call
from lit_async_data.tools.terminal import shapes, table

ROUNDS = 3
SAMPLES = 20_000  # of which the DataLoader draws
SEND = """

To send this table, open an issue with the template "A table of your file". A ratio below 1 is of most use to us."""


class Rows(Dataset[Any]):
    """Samples of HDF5 files, each read by h5py when it is asked for, as most projects do."""

    def __init__(self, source: Source, fields: Mapping[str, Any], sample: str) -> None:
        drawn = np.random.default_rng(0).permutation(len(source))[:SAMPLES]
        self.places: list[Any] = [tuple(place) for place in source.locate(drawn)]
        self.fields = {key: (field if isinstance(field, Mapping) else {"name": field}) for key, field in fields.items()}
        self.images = {key: field for key, field in fields.items() if isinstance(field, Mapping) and "decode" in field}
        self.files: dict[str, h5py.File] = {}
        self.is_row = sample == "row"
        ours: Any = source[int(drawn[0])]
        for key, theirs in self[0].items():
            is_compared = key not in self.images and not isinstance(theirs, bytes | str)  # text is a class in ours
            if is_compared and not np.array_equal(np.sort(theirs, None), np.sort(ours[key], None)):
                raise ValueError(f"h5py alone does not read {key} as its options say")
        self.files.popitem()[1].close()  # workers must not inherit it

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        path, group, row = self.places[number]
        if path not in self.files:
            self.files[path] = h5py.File(path)
        parent = self.files[path][group]
        values = {key: self.value(parent, row, **field) for key, field in self.fields.items()}
        return values | {key: image(values[key].tobytes(), **field) for key, field in self.images.items()}

    def value(self, parent: h5py.Group, row: int, name: str = ".", attr: str | None = None, **_: object) -> Any:
        found = parent[name].attrs[attr] if attr else parent[name][row if self.is_row else ()]
        # Tensors have the byte order of the machine.
        return found.astype(found.dtype.newbyteorder("="), copy=False) if hasattr(found, "dtype") else found


class Files(Dataset[Any]):
    """Images or arrays that a table names, each read by Pillow or numpy when it is asked for."""

    def __init__(self, source: Source, options: Mapping[str, Any]) -> None:
        drawn = np.random.default_rng(0).permutation(len(source))[:SAMPLES]
        self.paths, self.options = [str(vars(place)["path"]) for place in source.locate(drawn)], options
        self[0]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        path = self.paths[number]
        if path.endswith(".npy"):
            return np.load(path)
        with open(path, "rb") as file:
            return image(file.read(), **self.options)


def image(encoded: bytes, image_size: Any = None, mode: str | None = None, **_: object) -> Any:
    from PIL import Image

    picture = Image.open(io.BytesIO(encoded)).convert(mode or "RGB")
    if image_size is not None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.array(picture)


def rate(loader: Iterable[Any], batch_size: int, first: int, seconds: float) -> float:
    """Samples per second of a loader without end, after its first batches."""
    taken, since, now = 0, 0.0, 0.0
    for number, _ in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), 1):
        now = time.perf_counter()
        if number <= first:
            since = now
            continue
        taken += batch_size
        if now - since >= seconds:
            break
    return taken / (now - since)


def of_dataloader(dataset: Dataset[Any], batch_size: int, workers: int, seconds: float) -> float:
    endless = RandomSampler(dataset, replacement=True, num_samples=2**40)  # type: ignore[arg-type]
    loader = DataLoader(dataset, batch_size, sampler=endless, num_workers=workers)
    return rate(loader, batch_size, max(workers, 1), seconds)


def dataset_of(given: str | None, call: Call, source: Source) -> tuple[Dataset[Any], str]:
    """A Dataset of the reader's, or a plain one."""
    if given:
        sys.path.insert(0, os.getcwd())
        module, _, function = given.partition(":")
        return getattr(importlib.import_module(module), function)(), "your Dataset"
    if call.source == "HDF5Source":
        return Rows(source, call.fields, call.options.get("sample", "row")), "h5py rows"
    return Files(source, call.options), "one file at a time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doctor.add_arguments(parser)
    parser.add_argument("--dataset", metavar="MODULE:FUNCTION", help="returns your Dataset, instead of a plain one")
    arguments = parser.parse_args()
    try:
        print(compared(arguments) + SEND)
    except AsyncDataError as error:
        sys.exit(f"error: {error}")


def compared(arguments: argparse.Namespace) -> str:
    call, size, seconds = given_call(arguments.files, arguments), arguments.batch_size, arguments.seconds
    source = call.build()
    what = f"a few loaders for doctor, then 3 loaders in {ROUNDS} rounds, {seconds:g} s each"
    print(f"measuring {source.name}: {what}; a few minutes", file=sys.stderr, flush=True)
    report = doctor.examination(source, LoaderOptions(batch_size=size), seconds)
    try:
        dataset, what = dataset_of(arguments.dataset, call, source)
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        why = f"{error}; a plain Dataset does not read these samples: write yours, and give MODULE:FUNCTION"
        raise ConfigError(why, "--dataset") from error
    options = ", ".join(f"{name}={value}" for name, value in report["options"].items())
    ours = functools.partial(AsyncLoader, source, {"batch_size": size, **report["options"]})
    contenders: dict[str, Callable[[], float]] = {
        f"AsyncLoader, {options}": lambda: doctor.measured(ours(), seconds).samples_per_s
    }
    for workers in (0, cores()):
        name = f"DataLoader, {what}, num_workers={workers}"
        contenders[name] = functools.partial(of_dataloader, dataset, size, workers, seconds)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, measure in contenders.items():
            rates[name].append(measure())
    first, *_ = rates.values()
    rows = [("loader", "samples/s", "ours / this")]
    for name, measured in rates.items():
        ratio = statistics.median(one / other for one, other in zip(first, measured, strict=True))
        rows.append((name, f"{statistics.median(measured):,.0f}", "" if measured is first else f"{ratio:.2f}"))
    title = f"{len(source):,} samples · {shapes(report['batch'])} · {report['reading']} · batches of {size}"
    versions = f"lit_async_data {lit_async_data.__version__}, torch {torch.__version__}, h5py {h5py.__version__}"
    machine = f"{cores()} cores, {platform.machine()} · Python {platform.python_version()}, {versions}"
    return "\n".join([title, machine, "", *table(rows)])


if __name__ == "__main__":
    main()
