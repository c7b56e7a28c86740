"""Tables and their files: photographs of many sizes, small images, arrays; and tables of many million rows.

Photographs are crops of the two in scikit-learn, so that decoders get real pixels. Files differ and have random
classes, so that a check notices a label or an image from the wrong place.
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
from measuring.page_cache import process_memory
from PIL import Image
from pyarrow import compute, parquet
from pyarrow import csv as arrow_csv

from lit_async_data import AsyncLoader, FieldSpec, ManifestSource
from lit_async_data.sources.images.formats import ImageShape
from lit_async_data.sources.images.image import ImageDecoder
from lit_async_data.sources.manifest.fields import NpyDecoder
from lit_async_data.sources.manifest.files import RootDirectory, fetched

Array = npt.NDArray[Any]
CLASSES, BATCH = 10, 64
MIB = 2**20
# Sides of the photographs, in pixels, and the quality of their JPEGs.
SIDES, QUALITY = (256, 500), 90
SMALL = 64
# The photographs of 427 × 640 pixels are enlarged to this size, so that the largest crop fits.
ENLARGED = (768, 512)
# Seconds that a slow network takes for a file.
DELAY_S = 5e-3
# Rows generated at a time.
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
    """A data set for all contenders.

    Attributes:
        files: Images or arrays.
        shape: How images become arrays; None for arrays.
    """

    name: str
    files: Files
    shape: ImageShape | None

    @property
    def random(self) -> bool:
        """Whether each image is cropped at random."""
        return self.shape is not None and self.shape.resize == "random_crop"

    @property
    def size(self) -> tuple[int, int] | None:
        """(H, W) that images are resized to."""
        # As `ImageShape` keeps it.
        return None if self.shape is None else cast("tuple[int, int] | None", self.shape.image_size)

    def source(self) -> ManifestSource:
        """The source of this package; batches are tuples."""
        options: dict[str, Any] = {}
        if self.shape is not None:
            options = {"image_size": self.size, "resize": self.shape.resize}
        return ManifestSource(self.files.table, ("path", "label"), **options)

    def empty(self) -> Array:
        """Memory for a decoded sample; images have their channels last."""
        if self.shape is None:
            sample: Array = np.load(self.files.paths[0])
            return sample
        side: Any = self.size or Image.open(self.files.paths[0]).size[::-1]
        return np.empty((*side, self.shape.channels), np.uint8)

    def decode(self, data: bytes, out: Array, key: int | None) -> None:
        """Decode with this package's decoder."""
        if self.shape is None:
            NpyDecoder(FieldSpec(out.shape, out.dtype), out.dtype).decode(data, out, None, "")
        else:
            decoder = ImageDecoder(self.shape, out.shape[:2])
            (draw,) = decoder.draws(None if key is None else np.array([key], np.uint64), 1)
            decoder.decode(data, out, draw, "")


def photographs(folder: str, count: int) -> Files:
    """JPEGs of 256×256 to 500×500 pixels."""
    return write_images(folder, "jpg", count, SIDES)


def pngs(folder: str, count: int, side: int) -> Files:
    """Square PNGs."""
    return write_images(folder, "png", count, (side, side))


def arrays(folder: str, count: int) -> Files:
    """Arrays of float32, shape (3, 64, 64), as ``numpy.save`` stores them."""
    return write_images(folder, "npy", count, (SMALL, SMALL))


def write_images(folder: str, kind: str, count: int, sides: tuple[int, int]) -> Files:
    """Write crops of random place and size, and their table.

    Args:
        folder: Gets a folder named after ``kind``.
        kind: ``"jpg"``, ``"png"`` or ``"npy"``.
        count: Number of files.
        sides: Smallest and largest side in pixels.
    """
    rng = np.random.default_rng(0)
    originals = [Image.fromarray(image).resize(ENLARGED, Image.Resampling.BICUBIC) for image in sample_photographs()]
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
            crop.save(path, quality=QUALITY)  # PNG ignores it
    table = os.path.join(root, "table.csv")
    with open(table, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows((name, os.path.dirname(name)) for name in names)
    return Files(root, table, [os.path.join(root, name) for name in names], labels)


def sample_photographs() -> list[Array]:
    """The two photographs, uint8 of shape (427, 640, 3)."""
    # Imported here, since spawned workers do not need it.
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
    """Some rows: ids with leading zeros, and a thousand files per folder."""
    numbers = np.arange(first, first + count)
    digits = compute.utf8_lpad(pa.array(numbers).cast(pa.string()), 9, "0")
    folders = compute.utf8_slice_codeunits(digits, 0, 6)
    paths = compute.binary_join_element_wise(folders, digits, "/")
    paths = compute.binary_join_element_wise(paths, ".jpg", "")
    return pa.table({"id": digits, "path": paths, "label": numbers * 7919 % CLASSES})


def open_table(path: str, rows: int, with_id: bool) -> dict[str, float]:
    """Open a table: seconds, then milliseconds to the order of the first batch; memory in the end, its peak, and its
    private part.

    Args:
        path: The table.
        rows: Its number of rows.
        with_id: Whether to read ids and check them for duplicates.
    """
    little, fields = f"{path}.little.csv", ("path", "label")
    Path(little).write_text("path,label\n0.jpg,0\n")
    # Imports what the first source of a process imports.
    ManifestSource(little, fields, image_size=SMALL, check_files="none")
    before, started = process_memory(), time.perf_counter()
    options: dict[str, Any] = {"id": "id" if with_id else None, "image_size": SMALL, "check_files": "none"}
    source = ManifestSource(path, fields, **options)
    built = time.perf_counter()
    order = AsyncLoader(source, {"batch_size": BATCH, "shuffle": True}).order
    order.batch(0)
    ordered = time.perf_counter()
    after = process_memory()
    assert len(source) == rows
    # getrusage would include the peak of the parent process.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024 - sum(before.values())
    grown = sum(after.values()) - sum(before.values())
    result = {"seconds": built - started, "order_ms": 1000 * (ordered - built)}
    own = (after["RssAnon"] - before["RssAnon"]) * MIB / rows
    return result | {
        "bytes_per_row": grown * MIB / rows,
        "own_bytes_per_row": own,
        "peak_bytes_per_row": peak * MIB / rows,
    }


# -- reading ahead -----------------------------------------------------------------------------------------------------


class FarFiles:
    """Takes the place of `fetched`: files of a slow network, each of which takes its time until it has been read."""

    def __init__(self) -> None:
        # Changed by several threads, each time in one step.
        self._here = set[str]()
        self._ahead: list[bool] = []

    def __call__(self, path: str, most_bytes: int, root: RootDirectory) -> tuple[bytes, bool]:
        """As `fetched`."""
        if cold := path not in self._here:
            self._ahead.append("fetcher" in threading.current_thread().name)
            time.sleep(DELAY_S)
            self._here.add(path)
        return fetched(path, most_bytes, root)[0], cold

    @property
    def share(self) -> float:
        """The share of files that were read ahead."""
        return sum(self._ahead) / len(self._ahead)


def linked_files(folder: str, nbytes: int, number: int) -> ManifestSource:
    """A source of hard links to one file, so that each read is a copy from the page cache."""
    first = Path(folder, "0.npy")
    np.save(first, np.zeros(nbytes, np.uint8))
    names = [f"{each}.npy" for each in range(number)]
    for name in names[1:]:
        Path(folder, name).hardlink_to(first)
    return ManifestSource(pa.table({"x": names}), {"x": "x"}, root=folder, check_files="none")


def reserve_nothing(_: Any) -> Callable[[], None]:
    """Replaces `FilePrefetcher.reserve`, so that no file is read ahead."""
    return lambda: None
