"""`check_contract` accepts every source of the package, and finds each broken promise."""

import contextlib
import csv
import functools
import re
import threading
from multiprocessing import resource_tracker

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    BatchSpec,
    ConcatSource,
    DatasetSource,
    Field,
    FieldSpec,
    HDF5Source,
    ManifestSource,
    Source,
    StorageLayout,
    SubsetSource,
    split,
)
from lit_async_data.errors import ConfigError
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.places import Part
from lit_async_data.testing import ArraySource, check_contract

ROWS = 300
# With the first process that it spawns, multiprocessing starts another one, and keeps a pipe to it.
resource_tracker.ensure_running()


class Squares(Source):
    """The smallest source."""

    spec = BatchSpec({"y": FieldSpec((), np.dtype("i8")), "x": FieldSpec((3,), np.dtype("f4"))}, as_mapping=True)

    def __len__(self):
        return ROWS

    def read_into(self, samples, out):
        if "y" in out:
            out["y"][...] = samples**2
        if "x" in out:
            out["x"][...] = samples[:, None] + np.arange(3)


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
    ],
)
def test_a_broken_promise_is_found(broken, message):
    with pytest.raises((AssertionError, TypeError, ValueError)) as caught:
        check_contract(broken())
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dataloader_takes_a_source_also_where_its_files_are_open(recordings, method):
    whole = HDF5Source(recordings / "*.h5", {"x": "gzip", "y": "label"})
    source = SubsetSource(whole, np.arange(0, 2 * ROWS, 3))
    first = source[0]  # opens the files, before a fork
    loader = DataLoader(source, batch_size=16, num_workers=1, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(batches[0]["x"][0], torch.from_numpy(first["x"]))
    labels = torch.cat([batch["y"] for batch in batches])
    assert labels.tolist() == [number % ROWS % 7 for number in range(0, 2 * ROWS, 3)]
    with AsyncLoader(source, {"batch_size": 16, "shuffle": False}) as ours:
        for mine, theirs in zip(ours, batches):
            assert torch.equal(mine["x"], theirs["x"])
    source.close()


def test_samples_are_taken_by_number():
    source = Squares()
    assert source[3]["y"] == source[3 - ROWS]["y"] == 9
    assert source[3]["x"].tolist() == [3, 4, 5]
    assert [sample["y"] for sample in source.__getitems__([4, 2, 4])] == [16, 4, 16]
    assert source.__getitems__([]) == []
    for wrong in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError, match=f"sample .* of {ROWS} in Squares"):
            source[wrong]
    with pytest.raises(IndexError, match="whole numbers"):
        source[0.5]
    pair = DatasetSource(TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3)))
    assert pair[1][0].tolist() == [2.0, 3.0]
    with pytest.raises(TypeError, match="not iterable"):  # it is no loader
        iter(pair)


class NoSubclass:
    """Has all members that are needed, and another base class."""

    spec = Squares.spec
    read_into = Squares.read_into
    __len__ = Squares.__len__


@pytest.mark.parametrize(
    "use",
    [
        AsyncLoader,
        lambda source: AsyncDataModule(train=source),
        lambda source: AsyncDataModule(source=source),
        lambda source: SubsetSource(source, [0]),
        lambda source: ConcatSource([source]),
        lambda source: split(source, {"train": 1}),
    ],
)
def test_a_class_with_the_right_methods_is_told_to_inherit(use):
    with pytest.raises(
        ConfigError, match=r"^\w+: NoSubclass has read_into, but .* class NoSubclass\(lit_async_data.Sou"
    ):
        use(NoSubclass())
    with pytest.raises(ConfigError, match=r"^\w+: .*Squares'> is not a source.*; build one"):
        use(Squares)
    with pytest.raises(AssertionError, match="NoSubclass does not inherit"):
        check_contract(NoSubclass())


def test_a_subclass_without_its_three_members_says_which_are_missing():
    class Half(Source):
        def __len__(self):
            return 1

    with pytest.raises(TypeError, match=r"abstract.*read_into.*spec"):
        Half()


def test_a_subclass_of_three_members_trains_shuffled_split_and_drawn():
    source = Squares()
    assert repr(source) == f"<Squares of {ROWS} samples: y int64, x float32 (3,); read by Python code>"
    with AsyncLoader(source, {"batch_size": 50, "shuffle": True, "return_indices": True, "workers": 1}) as loader:
        batches = list(loader)
    indices = torch.cat([batch["index"] for batch in batches])
    assert sorted(indices.tolist()) == list(range(ROWS))
    assert torch.equal(torch.cat([batch["y"] for batch in batches]), indices**2)
    sides = split(source, {"train": 0.5, "val": 0.5}, groups="y")
    assert sum(map(len, sides.values())) == ROWS
    assert source.locate([7])[0] == ("Squares", "/", 7)
