"""Reading JPEGs that HDF5 files hold, compared with DataLoaders over h5py, with a table of files, and with LanceDB.

    python benchmarks/loading/encoded.py [--quick] [--json FILE] [--folder DIR] [frames | windows ...]

* frames: JPEGs of 224×224 pixels as rows of variable length, as rows of one length, and one dataset each, shuffled.
* windows: four of them, of consecutive rows and of every fifth.

The DataLoaders read a frame by h5py and decode it by OpenCV or simplejpeg, in one or two processes. OpenCV and LanceDB
take part where they are installed (``pip install opencv-python-headless lancedb``); LanceDB by a DataLoader over a
`Permutation`, whose rows simplejpeg decodes. Rounds, medians and machine as in hdf5.py. All files are in the page
cache, and the loop only counts batches. Before that the program compares pixels.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import simplejpeg
import torch
from torch.utils.data import Dataset

from lit_async_data import Field, HDF5Source, ManifestSource
from lit_async_data.sources.contract.source import Source

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, for the imports below

from files.tables import Files, write_images
from measuring.program import Figures, Goal, argument_parser, run_parts
from measuring.rates import TimedRun, in_turns
from readers.hdf5 import OURS, Batch, Contender, asynchronous, by_dataloader, is_installed

Window = tuple[int, int, int]  # start, stop and step of the frames of a sample
SIDE, BATCH = 224, 64
STORED = {"vlen": "variable length", "fixed": "one length", "groups": "a dataset each"}
ONE = ((0, 1, 1),)
WINDOWS = ((0, 4, 1), (0, 16, 5))
DATALOADER, TABLE = "DataLoader", f"{OURS}, table of files"
# Frames per second: times the best DataLoader of as many processes, and times our table of files.
TIMES, OF_TABLE = 5, 0.9


def write_encoded(folder: str, files: Files) -> dict[str, str]:
    """The bytes of the files in one HDF5 file for each storage."""
    images = [Path(path).read_bytes() for path in files.paths]
    paths = {stored: f"{folder}/{stored}.h5" for stored in STORED}
    for stored, path in paths.items():
        with h5py.File(path, "w") as file:
            file["labels"] = files.labels
            if stored == "vlen":
                dataset = file.create_dataset("x", (len(images),), h5py.vlen_dtype(np.uint8))
            elif stored == "fixed":
                file["x"] = np.array(images, f"S{max(map(len, images))}")
            for number, data in enumerate(images if stored != "fixed" else ()):
                if stored == "vlen":
                    dataset[number] = np.frombuffer(data, np.uint8)
                else:
                    file[f"x/{number}"] = np.frombuffer(data, np.uint8)
    return paths


# -- contenders --------------------------------------------------------------------------------------------------------


def by_simplejpeg(data: bytes) -> Any:
    return simplejpeg.decode_jpeg(data)


def by_opencv(data: bytes) -> Any:
    cv2 = importlib.import_module("cv2")
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


DECODERS = {"simplejpeg": by_simplejpeg} | ({"OpenCV": by_opencv} if is_installed("cv2") else {})


class Frames(Dataset[tuple[Any, int]]):
    """Frames read one by one by h5py, the file opened once in each worker."""

    def __init__(self, path: str, window: Window, decode: Callable[[bytes], Any]) -> None:
        self.path, self.steps, self.decode, self.data = path, range(*window), decode, None
        with h5py.File(path) as file:
            self.labels = file["labels"][...]

    def __len__(self) -> int:
        return len(self.labels) - self.steps[-1]

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if self.data is None:
            self.data = h5py.File(self.path, "r")["x"]
        data: Any = self.data
        frames = []
        for step in self.steps:
            value = data[str(row + step)][()] if isinstance(data, h5py.Group) else data[row + step]
            frames.append(torch.from_numpy(self.decode(bytes(value))).permute(2, 0, 1))
        return frames[0] if len(frames) == 1 else torch.stack(frames), int(self.labels[row])


def ours(source: Source, family: str, workers: int | str, kind: str) -> Contender:
    return asynchronous(family, source, batch_size=BATCH, workers=workers, worker_kind=kind, shuffle="global")


def decoded(rows: Any) -> Batch:
    frames = [torch.from_numpy(by_simplejpeg(row["x"])).permute(2, 0, 1) for row in rows]
    return torch.stack(frames), torch.tensor([row["labels"] for row in rows])


def lance(folder: str, files: Files, workers: int) -> Contender:
    """LanceDB: rows of a `Permutation`, as its own documentation gives them to a DataLoader."""
    import pyarrow as pa

    images = pa.array([Path(path).read_bytes() for path in files.paths], pa.binary())
    table = pa.table({"x": images, "labels": files.labels})
    stored = importlib.import_module("lancedb").connect(f"{folder}/lance").create_table("x", table, mode="overwrite")
    permutation = importlib.import_module("lancedb.permutation").Permutation.identity(stored)
    start = {"multiprocessing_context": "spawn"} if workers else {}  # its threads do not survive a fork
    return by_dataloader("LanceDB, simplejpeg", permutation, workers, BATCH, collate_fn=decoded, **start)


# -- parts -------------------------------------------------------------------------------------------------------------


def compare(run: TimedRun, paths: Mapping[str, str], files: Files, window: Window, folder: str) -> Figures:
    """Measure all contenders in turns, and print frames per second."""
    frames = len(range(*window))
    fields = (Field("x", decode="image", image_size=SIDE, window=None if frames == 1 else window), "labels")
    sources: dict[str, Source] = {stored: HDF5Source(path, fields) for stored, path in paths.items()}
    for source in sources.values():
        expected, _ = Frames(paths["vlen"], window, by_simplejpeg)[7]
        x, _ = source[7]
        np.testing.assert_array_equal(x, expected)
    workers = (1, 2)
    chosen = [
        ours(source, f"{OURS}, {STORED[stored]}", count, "thread")
        for stored, source in sources.items()
        for count in workers
    ]
    chosen += [ours(source, f"{OURS}, {STORED[stored]}", "auto", "auto") for stored, source in sources.items()]
    if frames == 1:
        table = sources["table"] = ManifestSource(files.table, ("path", "label"), image_size=SIDE)
        chosen += [ours(table, TABLE, count, "thread") for count in workers] + [ours(table, TABLE, "auto", "auto")]
        if is_installed("lancedb", "lance"):
            chosen += [lance(folder, files, count) for count in (0, *workers)]
    for name, decode in DECODERS.items():
        for stored, path in paths.items():
            read = Frames(path, window, decode)
            family = f"{DATALOADER}, {name}, {STORED[stored]}"
            chosen += [by_dataloader(family, read, count, BATCH) for count in workers]
    rates = in_turns(run, chosen)
    for source in sources.values():
        source.close()
    print(f"\nwindow {window}, {len(files.paths):,} JPEGs of {files.nbytes // len(files.paths):,} bytes, batch {BATCH}")
    print(f"{'':<52} frames/s")
    rows = []
    for contender in chosen:
        rate = frames * rates[contender.name].samples_per_s
        row = {"window": window, "contender": contender.family, "workers": contender.workers, "frames_per_s": rate}
        rows.append(row)
        print(f"{contender.name:<52} {rate:>8,.0f}")
    return rows


def frames(run: TimedRun, windows: tuple[Window, ...] = ONE) -> Figures:
    run = TimedRun(run.quick, run.folder, 1.5)  # a batch takes tenths of a second
    with tempfile.TemporaryDirectory(dir=run.folder) as folder:
        files = write_images(folder, "jpg", 256 if run.quick else 3_000, (SIDE, SIDE))
        paths = write_encoded(folder, files)
        return [row for window in windows for row in compare(run, paths, files, window, folder)]


def goals(figures: Mapping[str, Figures]) -> Iterator[Goal]:
    rows = [row for part in figures.values() for row in part]
    for window in dict.fromkeys(row["window"] for row in rows):
        of = [row for row in rows if row["window"] == window]

        def best(begin: str, of: Figures = of, **only: Any) -> float | None:
            found = [
                row["frames_per_s"]
                for row in of
                if row["contender"].startswith(begin) and all(row[name] == value for name, value in only.items())
            ]
            return max(found, default=None)

        for stored in STORED.values():
            mine = best(f"{OURS}, {stored}") or 0.0
            name = f"window {window}, {stored}, frames per second, times"
            if table := best(TABLE):
                yield Goal(f"{name} our table of files", mine / table, OF_TABLE, OF_TABLE)
            if lances := best("LanceDB"):
                yield Goal(f"{name} LanceDB", mine / lances, 1, 1)
            for workers in (1, 2):
                if theirs := best(f"{DATALOADER}", workers=workers):
                    yield Goal(f"{name} the best DataLoader of {workers}", mine / theirs, TIMES, TIMES)


PARTS: dict[str, Callable[[TimedRun], Figures]]
PARTS = {"frames": frames, "windows": functools.partial(frames, windows=WINDOWS)}


if __name__ == "__main__":
    run_parts(argument_parser(__doc__, PARTS), PARTS, goals, TimedRun, ("torch", "h5py"))
