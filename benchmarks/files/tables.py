"""The files that a table names: photographs of many sizes, small images and arrays; and tables of very many rows.

Photographs are crops of the two that scikit-learn brings along, so that decoders have real pixels to work on. Each file
differs from the others, and its class is drawn, so that a label or an image from the wrong place is noticed.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from measuring.page_cache import memory
from PIL import Image
from pyarrow import compute, parquet
from pyarrow import csv as arrow_csv

from lit_async_data import AsyncLoader, ManifestSource
from lit_async_data.sources.manifest.files import npy
from lit_async_data.sources.manifest.files.stored_file import RootDirectory, fetched
from lit_async_data.sources.manifest.images import image
from lit_async_data.sources.manifest.images.image_shape import ImageShape

Array = npt.NDArray[Any]
CLASSES, BATCH = 10, 64
MIB = 2**20
# Sides of the photographs, in pixels, and the quality of their JPEGs.
SIDES, QUALITY = (256, 500), 90
SMALL = 64
# The photographs that are cropped: 427 × 640 pixels enlarged, so that the largest crop fits.
ENLARGED = (768, 512)
# Seconds that a file takes to come over a slow network.
DELAY_S = 5e-3
# Rows that are made at a time.
PIECE = 1_000_000


@dataclasses.dataclass(frozen=True)
class Files:
    """A folder of files, one for each row of a table; also a tree with a folder for each class.

    Attributes:
        root: The folder.
        table: Path of a CSV file with the columns ``path`` and ``label``, the files in the order of their paths.
        paths: Absolute, of each row.
        labels: int64, the number of each row's class among the sorted names.
    """

    root: str
    table: str
    paths: list[str]
    labels: Array

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(os.path.getsize(path) for path in self.paths)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is to be read, by any way.

    Attributes:
        files: Images or arrays.
        shape: How images become arrays; None for arrays.
    """

    name: str
    files: Files
    shape: ImageShape | None

    @property
    def random(self) -> bool:
        """Whether a random part of each is taken."""
        return self.shape is not None and self.shape.resize == "random_crop"

    @property
    def size(self) -> tuple[int, int] | None:
        """(H, W) that images are resized to."""
        # As `ImageShape` keeps it.
        return None if self.shape is None else cast("tuple[int, int] | None", self.shape.image_size)

    def source(self) -> ManifestSource:
        """This project's; batches are tuples."""
        options: dict[str, Any] = {}
        if self.shape is not None:
            options = {"image_size": self.size, "resize": self.shape.resize}
        return ManifestSource(self.files.table, ("path", "label"), **options)

    def empty(self) -> Array:
        """Memory for a sample as it lies: images have their channels last."""
        if self.shape is None:
            found: Array = np.load(self.files.paths[0])
            return found
        side: Any = self.size or Image.open(self.files.paths[0]).size[::-1]
        return np.empty((*side, self.shape.channels), np.uint8)

    def decode(self, data: bytes, out: Array, key: int | None) -> None:
        """By the package's own decoder."""
        if self.shape is None:
            npy.decode(data, out, "")
        else:
            image.decode(data, self.shape, out, key, "")


def photographs(folder: str, count: int) -> Files:
    """JPEGs of 256×256 to 500×500 pixels."""
    return written(folder, "jpg", count, SIDES)


def pngs(folder: str, count: int, side: int) -> Files:
    """PNGs of that many pixels on each side."""
    return written(folder, "png", count, (side, side))


def arrays(folder: str, count: int) -> Files:
    """Arrays of float32, shape (3, 64, 64), as ``numpy.save`` stores them."""
    return written(folder, "npy", count, (SMALL, SMALL))


def written(folder: str, kind: str, count: int, sides: tuple[int, int]) -> Files:
    """Write crops of random place and size, and their table.

    Args:
        folder: Where they go, in a folder named by their kind.
        kind: ``"jpg"``, ``"png"`` or ``"npy"``.
        count: How many.
        sides: The least and the most that a side has.
    """
    rng = np.random.default_rng(0)
    originals = [Image.fromarray(image).resize(ENLARGED, Image.Resampling.BICUBIC) for image in loaded()]
    root = os.path.join(folder, kind)
    labels = np.sort(rng.integers(0, CLASSES, count))
    names = [f"class_{label}/{number:06}.{kind}" for number, label in enumerate(labels.tolist())]
    for label in range(CLASSES):
        os.makedirs(os.path.join(root, f"class_{label}"))
    for number, name in enumerate(names):
        wide, tall = rng.integers(sides[0], sides[1] + 1, 2).tolist()
        left, upper = (int(rng.integers(0, most + 1)) for most in (ENLARGED[0] - wide, ENLARGED[1] - tall))
        crop = originals[number % len(originals)].crop((left, upper, left + wide, upper + tall))
        path = os.path.join(root, name)
        if kind == "npy":
            np.save(path, np.asarray(crop, np.float32).transpose(2, 0, 1) / np.float32(255))
        else:
            crop.save(path, quality=QUALITY)  # which PNG has not
    table = os.path.join(root, "table.csv")
    with open(table, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows((name, os.path.dirname(name)) for name in names)
    return Files(root, table, [os.path.join(root, name) for name in names], labels)


def loaded() -> list[Array]:
    """The two photographs, uint8 of shape (427, 640, 3)."""
    # Imported here: workers that are started afresh need none of it.
    from sklearn.datasets import load_sample_images

    images: list[Array] = load_sample_images().images
    return images


def large_table(folder: str, kind: str, rows: int) -> str:
    """A table of rows ``id``, ``path`` and ``label``, for files that do not exist; returns its path.

    Args:
        folder: Where it goes.
        kind: ``"parquet"`` or ``"csv"``.
        rows: How many.
    """
    path = os.path.join(folder, f"rows.{kind}")
    schema = pa.schema([("id", pa.string()), ("path", pa.string()), ("label", pa.int64())])
    quoting: Any = arrow_csv.WriteOptions(quoting_style="none")
    writer: Any = (
        parquet.ParquetWriter(path, schema)
        if kind == "parquet"
        else arrow_csv.CSVWriter(path, schema, write_options=quoting)
    )
    with writer:
        for first in range(0, rows, PIECE):
            writer.write_table(large_piece(first, min(PIECE, rows - first)).cast(schema))
    return path


def large_piece(first: int, count: int) -> Any:
    """Rows of it: ids that begin with zeros, and a thousand files in each folder."""
    numbers = np.arange(first, first + count)
    digits = compute.utf8_lpad(pa.array(numbers).cast(pa.string()), 9, "0")
    folders = compute.utf8_slice_codeunits(digits, 0, 6)
    paths = compute.binary_join_element_wise(folders, digits, "/")
    paths = compute.binary_join_element_wise(paths, ".jpg", "")
    return pa.table({"id": digits, "path": paths, "label": numbers * 7919 % CLASSES})


def usable(path: str, rows: int, with_id: bool, cache: str | None = None) -> dict[str, float]:
    """What it takes to have a table ready to be read from: seconds, then milliseconds to the order of the first batch,
    and memory, as it is in the end, the most that it was meanwhile, and what of it no other process shares.

    Args:
        path: The table.
        rows: That it has.
        with_id: Whether ids are read, and checked for any that stand twice.
        cache: Folder in which columns are kept.
    """
    little, fields = f"{path}.little.csv", ("path", "label")
    Path(little).write_text("path,label\n0.jpg,0\n")
    # What is loaded once, by whoever reads first.
    ManifestSource(little, fields, image_size=SMALL, check_files="none")
    before, started = memory(), time.perf_counter()
    options: dict[str, Any] = {"id": "id" if with_id else None, "image_size": SMALL, "check_files": "none"}
    source = ManifestSource(path, fields, **options, table_cache=cache)
    built = time.perf_counter()
    order = AsyncLoader(source, {"batch_size": BATCH, "shuffle": True}).order
    order.batch(0)
    ordered = time.perf_counter()
    after = memory()
    assert len(source) == rows
    # Of this process alone: getrusage would begin with what the one before it had.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024 - sum(before.values())
    grown = sum(after.values()) - sum(before.values())
    found = {"seconds": built - started, "order_ms": 1000 * (ordered - built)}
    own = (after["RssAnon"] - before["RssAnon"]) * MIB / rows
    return found | {
        "bytes_per_row": grown * MIB / rows,
        "own_bytes_per_row": own,
        "peak_bytes_per_row": peak * MIB / rows,
    }


# -- reading ahead -----------------------------------------------------------------------------------------------------


def delayed(path: str, most_bytes: int, root: RootDirectory) -> tuple[bytes, bool]:
    """A file that comes from far away."""
    time.sleep(DELAY_S)
    return fetched(path, most_bytes, root)[0], True


class Counted:
    """Files that come from far away, and how many of them were read by threads that read ahead."""

    def __init__(self) -> None:
        # Appended to by several threads, which is atomic.
        self._ahead: list[bool] = []

    def __call__(self, path: str, most_bytes: int, root: RootDirectory) -> tuple[bytes, bool]:
        """As `delayed`."""
        self._ahead.append("fetcher" in threading.current_thread().name)
        return delayed(path, most_bytes, root)

    @property
    def share(self) -> float:
        """Of all files."""
        return sum(self._ahead) / len(self._ahead)


def linked(folder: str, nbytes: int, number: int) -> ManifestSource:
    """Files of so many bytes, which are links to one: reading each costs a copy from the page cache."""
    first = Path(folder, "0.npy")
    np.save(first, np.zeros(nbytes, np.uint8))
    names = [f"{each}.npy" for each in range(number)]
    for name in names[1:]:
        Path(folder, name).hardlink_to(first)
    return ManifestSource(pa.table({"x": names}), {"x": "x"}, root=folder, check_files="none")


def nothing_kept(_: Any) -> Callable[[], None]:
    """Nobody allows files to be read ahead."""
    return lambda: None
