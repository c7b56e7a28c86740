"""Ctrl-C while a file is opened, read or written: no descriptor stays open, and the next attempt succeeds."""

import contextlib
import dataclasses
import functools
import os
import warnings

import h5py
import numpy as np
import pytest
from support.threads.interrupts import interrupted
from support.threads.leaks import open_files

from lit_async_data.errors import FormatError, MissingError
from lit_async_data.sources.files.identity import FileIdentity
from lit_async_data.sources.hdf5.index import index as cache
from lit_async_data.sources.hdf5.index.index import IndexCache, IndexKey
from lit_async_data.sources.hdf5.storage.handles import open_h5py
from lit_async_data.sources.hdf5.storage.open_file import OpenFile, OpenFiles
from lit_async_data.sources.manifest import files as stored_file
from lit_async_data.sources.manifest.files import RootDirectory, fetched

DATA = bytes(range(100))


@pytest.fixture
def folder(tmp_path, h5, monkeypatch):
    monkeypatch.setattr(cache, "FEWEST_CHUNKS", 1)
    (tmp_path / "old").write_bytes(DATA)
    os.utime(tmp_path / "old", (1, 1))
    (tmp_path / "young").write_bytes(DATA)
    (tmp_path / "link").symlink_to("old")
    h5("x.h5", x={"data": np.arange(8), "chunks": (2,)})
    return tmp_path


def of_a_table(name, folder):
    assert fetched(str(folder / name), 1000, RootDirectory(str(folder)))[0] == DATA


def straight(folder):
    out = bytearray(len(DATA))
    there = stored_file.filled(str(folder / "old"), [out], len(DATA), RootDirectory(str(folder)))
    assert not there or bytes(out) == DATA


def missing(folder):
    with pytest.raises(MissingError):
        fetched(str(folder / "gone"), 1000, RootDirectory(str(folder)))


def handles(folder):
    path = str(folder / "old")
    with contextlib.closing(OpenFile(path, FileIdentity.of(os.stat(path)))) as file:
        try:
            assert os.pread(file._opened().descriptor, 100, 0) == DATA
        except KeyboardInterrupt:
            assert os.pread(file._opened().descriptor, 100, 0) == DATA
            raise


def no_hdf5(folder):
    with pytest.raises(FormatError, match="is not an HDF5 file"):
        open_h5py(str(folder / "old"))


def index(folder):
    with h5py.File(folder / "x.h5", "r") as file:
        key = dataclasses.replace(IndexKey.of(file["x"]), state=(0, 0, 0, 0))  # not written just now
    kept = IndexCache(folder / "kept")
    try:
        kept.store(key, {"offsets": np.arange(4)})
        assert kept.load(key)["offsets"].tolist() == [0, 1, 2, 3]
    finally:
        assert not [name for name in os.listdir(folder / "kept") if not name.endswith(".index")]


def read(folder):
    path = str(folder / "old")
    files = OpenFiles([OpenFile(path, FileIdentity.of(os.stat(path)))])
    (file,), ended = files.files, False
    try:
        assert files.use(0).during(lambda: os.pread(file._opened().descriptor, 100, 0)) == DATA
        ended = True
        file.close()
    except KeyboardInterrupt:
        pass
    file.close()
    if not ended:
        raise KeyboardInterrupt


STEPS = {
    "a file of a table": functools.partial(of_a_table, "old"),
    "one that was just written": functools.partial(of_a_table, "young"),
    "a link": functools.partial(of_a_table, "link"),
    "straight to its place": straight,
    "one that is not there": missing,
    "handles": handles,
    "a reader": read,
    "no HDF5 file": no_hdf5,
    "a kept index": index,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_wherever_an_interrupt_comes_no_file_stays_open(folder, step):
    step(folder)
    before = open_files()
    with interrupted(None) as passed:
        step(folder)
    assert passed
    with warnings.catch_warnings():
        # A file object that was just made closes its descriptor, and says so.
        warnings.simplefilter("ignore", ResourceWarning)
        for place, at in enumerate(passed):
            with contextlib.suppress(KeyboardInterrupt), interrupted(place):
                step(folder)
            assert open_files() == before, at
    step(folder)
