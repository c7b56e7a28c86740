"""Contenders that read windows of frames: this package, a handwritten Dataset, and LanceDB."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from lit_async_data import Field, HDF5Source
from readers.hdf5 import OURS, Array, Contender, asynchronous, by_dataloader, identity, is_installed

BATCH = 64
DATALOADER = "DataLoader, h5py"


class Shape(NamedTuple):
    """The rows of a sample, counted from its own."""

    name: str
    frames: Sequence[int]
    actions: Sequence[int]


SHAPES = (
    Shape("4 frames at step 5", (-15, -10, -5, 0), (0,)),
    Shape("2 frames, 16 actions", (-1, 0), tuple(range(-1, 15))),
)


def episodes_source(path: str, shape: Shape) -> HDF5Source:
    frames = Field("image", offsets=shape.frames, pad="last")
    return HDF5Source(path, (frames, Field("action", offsets=shape.actions, pad="last")), episodes="episode_index")


class Episodes(Dataset[Any]):
    """Windows read by h5py, the file opened once in each worker: frames, actions, and which of both are real."""

    def __init__(self, path: str, shape: Shape) -> None:
        self.path = path
        self.images: Any = None
        self.frames, self.steps = np.array(shape.frames), np.array(shape.actions)
        with h5py.File(path) as file:
            ids, self.actions = file["episode_index"][...], file["action"][...]
        self.first, self.last = np.searchsorted(ids, ids), np.searchsorted(ids, ids, "right") - 1

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, row: int, offsets: Array) -> tuple[Array, torch.Tensor]:
        """The rows of a window, at the ends of an episode the nearest, and which lie in the episode."""
        wanted = row + offsets
        rows = wanted.clip(self.first[row], self.last[row])
        return rows, torch.from_numpy(rows == wanted)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        if self.images is None:
            self.images = h5py.File(self.path, "r")["image"]
        frames, frames_real = self.rows(row, self.frames)
        steps, steps_real = self.rows(row, self.steps)
        images = np.stack([self.images[each] for each in frames.tolist()])
        return torch.from_numpy(images), frames_real, torch.from_numpy(self.actions[steps]), steps_real


class LanceEpisodes(Episodes):
    """The same windows from a `Permutation` of LanceDB, all frames of a batch in one call."""

    def __init__(self, path: str, shape: Shape, folder: str) -> None:
        super().__init__(path, shape)
        import pyarrow as pa

        with h5py.File(path) as file:
            images = file["image"]
            self.sample = images.shape[1:]
            batches = (
                pa.record_batch({"image": [each.tobytes() for each in images[at : at + BATCH]]})
                for at in range(0, len(images), BATCH)
            )
            schema = pa.schema({"image": pa.binary()})
            database = importlib.import_module("lancedb").connect(f"{folder}/lance")
            table = database.create_table("frames", batches, schema=schema, mode="overwrite")
        self.images = importlib.import_module("lancedb.permutation").Permutation.identity(table)

    def __getitems__(self, rows: list[int]) -> Any:
        frames, frames_real = zip(*(self.rows(row, self.frames) for row in rows), strict=True)
        steps, steps_real = zip(*(self.rows(row, self.steps) for row in rows), strict=True)
        wanted, places = np.unique(np.stack(frames), return_inverse=True)
        found = [np.frombuffer(each["image"], np.uint8) for each in self.images.__getitems__(wanted.tolist())]
        images = np.stack(found)[places.ravel()].reshape(*places.shape, *self.sample)
        actions = torch.from_numpy(self.actions[np.stack(steps)])
        return torch.from_numpy(images), torch.stack(frames_real), actions, torch.stack(steps_real)


def windows(path: str, shape: Shape, source: HDF5Source, folder: str) -> list[Contender]:
    """All contenders that read windows of frames, with 0, 1 and 2 workers."""
    counts = (0, 1, 2)
    orders = {OURS: True, f"{OURS}, global": "global"}
    chosen = [asynchronous(OURS, source, batch_size=BATCH, shuffle=True)] + [
        asynchronous(name, source, batch_size=BATCH, shuffle=shuffle, workers=count, worker_kind="thread")
        for name, shuffle in orders.items()
        for count in counts
    ]
    dataset = Episodes(path, shape)
    chosen += [by_dataloader(DATALOADER, dataset, count, BATCH, collate_fn=default_collate) for count in counts]
    if is_installed("lancedb", "lance"):
        # It reads in threads of its own, which a fork does not keep, and spawned workers abort when they are ended.
        chosen.append(by_dataloader("LanceDB", LanceEpisodes(path, shape, folder), 0, BATCH, collate_fn=identity))
    else:
        print("left out: LanceDB: not installed")
    return chosen
