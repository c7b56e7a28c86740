"""Reading takes no more memory than is counted beforehand and printed."""

import errno
import os
import subprocess
import sys
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from support.files.damage import failing
from support.memory import SMALL, peak
from support.sources.oracle import read, refused

from lit_async_data import AsyncLoader, ChangedError, Field, FormatError, HDF5Source, LoaderOptions, SourceError
from lit_async_data.sources.hdf5.readers import part_reader
from lit_async_data.sources.hdf5.readers.part_reader import PartReader

MIB = 2**20
ROWS = np.random.default_rng(0).integers(0, 8, (128, 64, 256), np.uint8)


def test_samples_of_several_files_are_read_in_small_blocks(h5, monkeypatch):
    monkeypatch.setattr(part_reader, "BLOCK_BYTES", 2**18)
    paths = [h5(f"{k}.h5", data=ROWS + k, labels=np.arange(128) + 1000 * k) for k in range(2)]
    source = HDF5Source(paths)
    order = np.random.default_rng(1).permutation(256)
    out = {"data": np.empty((256, *ROWS.shape[1:]), np.uint8), "labels": np.empty(256, np.int64)}
    assert peak(lambda: source.read_into(order, out)) < 2 * 2**18 + SMALL  # of 4 MiB
    assert (out["data"] == np.concatenate([ROWS, ROWS + 1])[order]).all()
    assert (out["labels"] == np.concatenate([np.arange(128), np.arange(128) + 1000])[order]).all()


# In a new process: its anonymous memory before a loader is built, and the most while its threads read.
PROGRAM = """
import sys, threading
from lit_async_data import AsyncLoader, HDF5Source
import lit_async_data.sources.hdf5.readers.slabs, torch

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

source = HDF5Source(sys.argv[2:])
options = {"batch_size": 64, "workers": 2, "worker_kind": "thread"} | eval(sys.argv[1])
before = most = anonymous()
done = threading.Event()

def watch():
    global most
    while not done.wait(0.001):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
with AsyncLoader(source, options) as loader:
    for _ in range(150):
        loader.next()
    total = loader.footprint.budget.total
done.set()
watcher.join()
print(most - before, total)
"""
GZIP = {"compression": "gzip", "compression_opts": 1}
STORED = {
    "64 a chunk": ("u1", 3200, 1, {"chunks": (64, 3, 64, 64), **GZIP}),
    "four files": ("u1", 800, 4, {"chunks": (64, 3, 64, 64), **GZIP}),
    "scale-offset": ("i2", 1600, 1, {"chunks": (64, 3, 64, 64), "scaleoffset": 0}),
    "not compressed": ("u1", 3200, 4, {}),
}
ORDERS = {
    "chunk": {"shuffle": "chunk", "shuffle_chunks": 8},
    "global": {"shuffle": "global"},
    "half a cache": {"shuffle": "chunk", "shuffle_chunks": 8, "cache_bytes": 20 * MIB},
}


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stored", STORED)
def test_a_process_grows_by_at_most_4_mib_more_than_is_printed(h5, stored, order):
    dtype, rows, files, options = STORED[stored]
    values = np.random.default_rng(0).integers(0, 8, (rows, 3, 64, 64)).astype(dtype)
    paths = [h5(f"{number}.h5", data={"data": values, **options}, labels=np.arange(rows)) for number in range(files)]
    command = [sys.executable, "-c", PROGRAM, repr(ORDERS[order]), *paths]
    # Else glibc keeps what threads free, each in an arena of its own: up to 10 MiB, at random.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, env=environ)
    grown, printed = map(int, found.stdout.split())
    assert grown <= printed + 4 * MIB, f"{grown / MIB:.1f} MiB, of {printed / MIB:.1f}"


CHUNKED = [{"chunks": (2, 4), "compression": "gzip"}, {"chunks": (2, 4), "scaleoffset": 0}]


@pytest.mark.parametrize("options", [{}, *CHUNKED], ids=str)
@pytest.mark.parametrize(
    ("times", "error", "said"),
    [(1, None, ""), (1, ChangedError, "was replaced"), (9, SourceError, "file server no longer knows")],
)
def test_a_file_that_its_server_has_forgotten_is_opened_again_if_it_is_the_same(  # noqa: PLR0917
    h5, monkeypatch, options, times, error, said
):
    path = h5(data={"data": np.ones((8, 4), "i4"), **options})
    other = h5("other.h5", data={"data": np.ones((8, 4), "i4"), **options})
    source = HDF5Source(path, ["data"])
    read(source, [0])
    if error is ChangedError:
        os.replace(other, path)
    monkeypatch.setattr(os, "fstat", failing(os.fstat, errno.ESTALE, times))
    if error is None:
        assert (read(source, [0])["data"] == 1).all()
    else:
        with pytest.raises(error, match=rf"{path}: .*{said}"):
            read(source, [0])
    monkeypatch.undo()
    source.close()


@pytest.mark.parametrize("error", [MemoryError("8 GiB"), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_memory_that_runs_out_while_reading_names_the_file(h5, monkeypatch, error):
    source = HDF5Source(path := h5(data=np.ones((8, 4), "i4")), ["data"])
    for name, use in {"read": lambda: source[0], "decode": lambda: source.decode(np.array([0]), None)}.items():
        monkeypatch.setattr(PartReader, name, Mock(side_effect=error))
        with pytest.raises(SourceError, match=rf"{path}: cannot be read: .*not enough memory"):
            use()
    source.close()


@pytest.fixture
def cells(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(9)
        file["y"] = np.array([0, 1, -1, 0, 1, 0, 1, 0, 1], "i1")
        file["y"].attrs["categories"] = file.create_dataset("names", data=[b"B", b"T"]).ref
        file.create_dataset("z", data=np.array([0, 1, 1, -1, 1, 0, 1, 0, 1], "i1"), chunks=(3,), fletcher32=True)
        file["z"].attrs["categories"] = file["names"].ref
    return path


def test_values_that_take_more_are_found_at_their_batch(cells, monkeypatch):
    monkeypatch.setattr(part_reader, "MOST_BYTES", 8)
    source = HDF5Source(cells, {"x": "x", "y": "y"})
    with pytest.raises(FormatError, match="y, row 2: -1 is a missing value") as caught:
        source[2]
    assert caught.value.sample_id == 2
    with AsyncLoader(source, LoaderOptions(batch_size=3, shuffle="none", on_error="skip")) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 1], [3, 4, 5], [6, 7, 8]]
    assert HDF5Source(cells, {"x": "x", "y": Field("y", null="drop")}).column("x").tolist() == [0, 1, *range(3, 9)]


def test_samples_that_are_left_out_may_lack_a_value(cells):
    fields = {"x": "x", "y": "y", "z": "z"}
    assert HDF5Source(cells, fields, exclude=[2, 3]).column("x").tolist() == [0, 1, *range(4, 9)]
    dropping = {**fields, "y": Field("y", null="drop"), "z": Field("z", null="drop")}
    assert HDF5Source(cells, dropping, exclude=[2]).column("x").tolist() == [0, 1, *range(5, 9)]
    refused(FormatError, ["z, row 3: -1 is a missing value"], cells, fields, exclude=[2])
    with pytest.raises(FormatError, match="no sample is left that has a value of each field"):
        HDF5Source(cells, {"y": Field("y", null="drop")}, rows=[2])
