"""`check_contract` accepts every source of the package, and finds each broken promise."""

import contextlib
import csv
import functools
import re
import threading

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support.sources.squares import ROWS, Squares
from torch.utils.data import TensorDataset

from lit_async_data import (
    BatchSpec,
    DatasetSource,
    Field,
    FieldSpec,
    HDF5Source,
    ManifestSource,
    StorageLayout,
    split,
)
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import Part
from lit_async_data.testing import ArraySource, check_contract


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    random = np.random.default_rng(0)
    for number in range(2):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            images = random.integers(0, 256, (ROWS, 3, 8, 8), np.uint8)
            file["images"] = images
            file.create_dataset("gzip", data=images, chunks=(16, 3, 8, 8), compression="gzip")
            file.create_dataset("chunked", data=images, chunks=(16, 3, 8, 8))
            # Half of each value: HDF5 1.14 cannot read values that need all bits.
            file.create_dataset("offset", data=images // 2, chunks=(16, 3, 8, 8), scaleoffset=0)
            file["label"] = np.arange(ROWS) % 7
            file["signal"] = random.normal(size=(ROWS, 2)).astype("f4")
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"x": "images", "y": "label"},
        {"x": "gzip", "y": "label"},
        {"x": "chunked"},
        {"x": "offset", "y": "label"},
        {"x": Field("signal", window=(0, 8)), "next": Field("signal", window=(8, 10))},
        {"x": Field("images", dtype="float32")},
    ],
    ids=["contiguous", "gzip", "chunked", "through h5py", "windows", "cast"],
)
def test_hdf5_files_keep_the_contract(recordings, fields):
    check_contract(HDF5Source(recordings / "*.h5", fields))
    check_contract(HDF5Source(recordings / "0.h5", fields, memory_map=False))


def test_a_table_of_files_keeps_the_contract(tmp_path):
    random = np.random.default_rng(0)
    rows = [("path", "label", "array")]
    for number in range(12):
        Image.fromarray(random.integers(0, 256, (9, 11, 3), np.uint8)).save(tmp_path / f"{number}.png")
        np.save(tmp_path / f"{number}.npy", random.normal(size=4).astype("f4"))
        rows.append((f"{number}.png", "abc"[number % 3], f"{number}.npy"))
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    fields = {"x": "path", "y": "label", "a": "array"}
    for resize in ("stretch", "random_crop"):
        check_contract(ManifestSource(tmp_path / "table.csv", fields, image_size=6, resize=resize))
    check_contract(ManifestSource(tmp_path / "table.csv", {"y": "label"}))


def test_sources_in_memory_keep_the_contract():
    dataset = TensorDataset(torch.arange(30.0).reshape(10, 3), torch.arange(10))
    for source in (
        Squares(),
        DatasetSource(dataset),
        ArraySource({"x": np.zeros((4, 2)), "y": np.arange(4)}),
        ArraySource({"y": np.arange(5)}, parts={"a.h5": 2, "b.h5:/left": 3}),
        split(Squares(), {"train": 0.7, "val": 0.3})["train"],
    ):
        check_contract(source)


class Forgets(Squares):
    def read_into(self, samples, out):
        super().read_into(samples[:-1], {key: array[:-1] for key, array in out.items()})


class Sorts(Squares):
    def read_into(self, samples, out):
        super().read_into(np.sort(samples), out)


class Drops(Squares):
    """Takes a repeated sample only once."""

    def read_into(self, samples, out):
        super().read_into(np.unique(samples), {key: array[: len(np.unique(samples))] for key, array in out.items()})


class Overflows(Squares):
    def read_into(self, samples, out):
        super().read_into(samples, out)
        array = out.get("y", np.empty(0, "i8"))
        np.lib.stride_tricks.as_strided(array, (len(array) + 1,), (8,))[-1:] = 3


class Shares(Squares):
    """Keeps its samples in an attribute, which another thread overwrites."""

    def __init__(self):
        self._wait = None

    def read_into(self, samples, out):
        self.samples = samples
        if threading.current_thread() is not threading.main_thread():
            if self._wait is None:
                self._wait = threading.Barrier(2)
            with contextlib.suppress(threading.BrokenBarrierError):
                self._wait.wait(1)
        super().read_into(self.samples, out)


class Unpicklable(Squares):
    def __init__(self):
        self.lock = threading.Lock()


class ForgetsInPickle(Squares):
    offset = 0

    def __init__(self, offset):
        self.offset = offset

    def __getstate__(self):
        return {}

    def read_into(self, samples, out):
        super().read_into(samples + self.offset, out)


class ClosesForGood(Squares):
    closed = False

    def close(self):
        self.closed = True

    def read_into(self, samples, out):
        if self.closed:
            raise ValueError("closed")
        super().read_into(samples, out)


class Draws(Squares):
    def read_into(self, samples, out):
        super().read_into(samples, out)
        if "x" in out:
            out["x"][...] += np.random.default_rng().random((len(samples), 3))


class DrawsByPlace(Squares):
    def read_random(self, samples, out, keys):
        out["y"][...] = np.arange(len(samples))
        out["x"][...] = 0


class WrongChunks(Squares):
    chunks = StorageLayout((ChunkRun(200, 16),))


class WrongOrder(Squares):
    chunks = StorageLayout((ChunkRun(ROWS, 16),), order=np.zeros(ROWS, np.int64))


class WrongParts(Squares):
    parts = (Part("a", "/", "a", 3),)


class WrongColumn(Squares):
    def column(self, name):
        return np.arange(len(self))


class LocatesAnything(Squares):
    def locate(self, ids):
        return [Squares().locate([0])[0] for _ in ids]


class NoTensor(Squares):
    spec = BatchSpec({"y": FieldSpec((), np.dtype("U5"))}, as_mapping=True)


class Empty(Squares):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Forgets, "'y' of sample 299 differs if read into memory that held other bytes"),
        (Sorts, "'y' of sample .* differs if read in mixed order"),
        (Drops, "'y' of sample .* differs if read in mixed order|could not be broadcast"),
        (Overflows, "read_into wrote outside the array of 'y'"),
        (Shares, "differs if read from 4 threads"),
        (Unpicklable, "cannot pickle"),
        (functools.partial(ForgetsInPickle, 3), "'y' of sample 0 differs if read from a pickled copy"),
        (ClosesForGood, "closed"),
        (Draws, "'x' of sample 0 differs"),
        (DrawsByPlace, "'y' of sample .* differs if read at random with the same keys"),
        (WrongChunks, r"chunks\.runs hold 200 samples of 300"),
        (WrongOrder, r"chunks\.order is not a permutation"),
        (WrongParts, "parts hold 3 samples of 300"),
        (WrongColumn, "'y' of sample .* differs if read as a column"),
        (LocatesAnything, "locate accepted sample"),
        (NoTensor, "y has dtype .*U5.*, which no tensor can have"),
        (Empty, "__len__ returned 0"),
        (object, "object does not inherit from lit_async_data.Source"),
    ],
)
def test_a_broken_promise_is_found(broken, message):
    with pytest.raises((AssertionError, TypeError, ValueError)) as caught:
        check_contract(broken())
    assert re.search(message, str(caught.value))


class Breaks(ArraySource):
    """Raises, or replaces the array, where it is told to."""

    def __init__(self, how):
        super().__init__({"x": np.arange(9)})
        self.how = how

    def __len__(self):
        return 9.0 if self.how == "length" else super().__len__()

    def read_into(self, samples, out):
        if self.how == "replaced":
            out["x"] = None
            return
        if (self.how == "sample" and 4 in samples) or (self.how == "together" and len(samples) > 1):
            raise ValueError("no such row")
        super().read_into(samples, out)

    def column(self, name):
        if self.how == "column":
            raise KeyError(name)
        return super().column(name)

    def __reduce_ex__(self, protocol):
        if self.how == "pickled":
            raise TypeError("cannot pickle 'sqlite3.Connection' object")
        return super().__reduce_ex__(protocol)

    def close(self):
        if self.how == "closed" and not hasattr(self, "_closed"):
            self._closed = True
            raise OSError("closed")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("length", "__len__ returns a whole number; here it raised TypeError: "),
        ("replaced", "read_into replaced out['x']; fill the array"),
        ("sample", "read_into reads sample 4; here it raised ValueError: no such row"),
        ("together", "read_into reads 9 samples together, not only each alone; here it raised ValueError"),
        (
            "column",
            "locate, chunks, parts, places, fingerprint, ids and column describe all samples; here it raised Key",
        ),
        ("pickled", "a source can be pickled, without the connections and open files that it opens again; here it r"),
        ("closed", "close can be called twice; here it raised OSError: closed"),
    ],
)
def test_an_error_of_the_source_names_the_promise_and_the_sample(how, said):
    with pytest.raises(AssertionError, match=re.escape(said)) as caught:
        check_contract(Breaks(how))
    assert how == "replaced" or caught.value.__cause__ is not None
