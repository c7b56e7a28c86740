"""`check_contract` accepts every source of the package, and finds each broken promise."""

import contextlib
import functools
import threading

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support.sources.squares import ROWS, Squares
from torch.utils.data import TensorDataset

from lit_async_data import BatchSpec, DatasetSource, Field, FieldSpec, HDF5Source, ManifestSource, StorageLayout, split
from lit_async_data.order.chunk_order import ChunkRun
from lit_async_data.sources.contract.source import Part
from lit_async_data.testing import ArraySource, check_contract


def test_hdf5_files_keep_the_contract(tmp_path):
    random = np.random.default_rng(0)
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            images = random.integers(0, 256, (ROWS, 3, 8, 8), np.uint8)
            file.create_dataset("gzip", data=images, chunks=(16, 3, 8, 8), compression="gzip")
            file["images"], file["signal"] = images, random.normal(size=(ROWS, 2)).astype("f4")
    windows = {"x": Field("signal", window=(0, 8)), "next": Field("signal", window=(8, 10))}
    for fields in ({"x": "gzip"}, windows, {"x": Field("images", dtype="float32")}):
        check_contract(HDF5Source(tmp_path / "*.h5", fields))
        check_contract(HDF5Source(tmp_path / "0.h5", fields, memory_map=False))


def test_a_table_of_files_keeps_the_contract(tmp_path):
    random = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(random.integers(0, 256, (9, 11, 3), np.uint8)).save(tmp_path / f"{number}.png")
        np.save(tmp_path / f"{number}.npy", random.normal(size=4).astype("f4"))
    rows = [f"{number}.png,{'abc'[number % 3]},{number}.npy" for number in range(12)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,array", *rows]))
    for resize in ("stretch", "random_crop"):
        options = {"image_size": 6, "resize": resize}
        check_contract(ManifestSource(tmp_path / "table.csv", {"x": "path", "y": "label", "a": "array"}, **options))


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


def broken(**members):
    """A class that can be pickled."""
    name = f"Broken{sum(each.startswith('Broken') for each in globals())}"
    globals()[name] = type(name, (Squares,), members | {"__module__": __name__})
    return globals()[name]


def reading(what):
    """A source that reads other samples than it is asked for, or fewer."""

    def read_into(self, samples, out):
        wrong = what(samples)
        Squares.read_into(self, wrong, {key: array[: len(wrong)] for key, array in out.items()})

    return broken(read_into=read_into)


def by_place(self, samples, out, keys):
    out["y"][...] = np.arange(len(samples))
    out["x"][...] = 0


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


def failing(error, when=lambda *_: True):
    def member(self, *given):
        if when(*given):
            raise error
        Squares.read_into(self, *given)

    return member


def replaces(self, samples, out):
    out["x"] = None


NO_ROW = failing(ValueError("no such row"), lambda samples, out: 299 in samples)
TWICE = StorageLayout((ChunkRun(ROWS, 16),), order=np.zeros(ROWS, np.int64))
TEXT = BatchSpec({"y": FieldSpec((), np.dtype("U5"))}, as_mapping=True)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (reading(lambda samples: samples[:-1]), "'y' of sample 299 differs if read into memory that held other bytes"),
        (reading(np.sort), "'y' of sample .* differs if read in mixed order"),
        (Overflows, "read_into wrote outside the array of 'y'"),
        (Shares, "differs if read from 4 threads"),
        (functools.partial(ForgetsInPickle, 3), "'y' of sample 0 differs if read from a pickled copy"),
        (ClosesForGood, "closed"),
        (broken(read_random=by_place), "'y' of sample .* differs if read at random with the same keys"),
        (broken(chunks=StorageLayout((ChunkRun(200, 16),))), r"chunks\.runs hold 200 samples of 300"),
        (broken(chunks=TWICE), r"chunks\.order is not a permutation"),
        (broken(parts=(Part("a", "/", "a", 3),)), "parts hold 3 samples of 300"),
        (broken(column=lambda self, name: np.arange(ROWS)), "'y' of sample .* differs if read as a column"),
        (broken(locate=lambda self, ids: [Squares().locate([0])[0] for _ in ids]), "locate accepted sample"),
        (broken(spec=TEXT), "y has dtype .*U5.*, which no tensor can have"),
        (broken(spec=Squares().read_into), "spec is a method; write @property above it"),
        (object, "object does not inherit from lit_async_data.Source"),
        (broken(__len__=lambda self: 9.0), "__len__ returns a whole number; here it raised TypeError: "),
        (broken(read_into=replaces), r"read_into replaced out\['x'\]; fill the arrays"),
        (broken(read_into=NO_ROW), "read_into reads sample 299; here it raised ValueError: no such row"),
        (broken(column=failing(KeyError("y"))), "locate, chunks, .* describe all samples; here it raised Key"),
        (broken(__reduce_ex__=failing(TypeError("no"))), "a source can be pickled, .*; here it raised TypeError"),
        (broken(name=property(failing(OSError("gone")))), "spec and name are properties that raise nothing; here it"),
    ],
)
def test_a_broken_promise_is_named_with_the_sample(kind, said):
    with pytest.raises(AssertionError, match=said):
        check_contract(kind())
