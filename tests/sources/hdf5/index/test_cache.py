"""Cached indexes: the same values with and without them, whatever happened to them meanwhile."""

import contextlib
import logging
import os
import shutil

import h5py
import numpy as np
import pytest
from support.sources import oracle

from lit_async_data import ConfigError, HDF5Source
from lit_async_data.sources import local_files
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.index.index import IndexCache, IndexKey

VALUES = np.arange(20 * 6, dtype="i4").reshape(20, 6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache; small files count as large and new ones as old, since no program can set their ctime."""
    monkeypatch.setattr(index, "FEWEST_CHUNKS", 2)
    monkeypatch.setattr(local_files, "RECENT_NS", 0)
    return tmp_path / "made" / "cache"


@pytest.fixture
def built(monkeypatch):
    """One entry for each time that an index was built."""
    built = []
    once = index.columns_of
    monkeypatch.setattr(index, "columns_of", lambda dataset: built.append(dataset.name) or once(dataset))
    return built


@pytest.fixture
def path(tmp_path):
    (tmp_path / "data").mkdir()
    path = str(tmp_path / "data" / "x.h5")
    write(path, VALUES)
    return path


def write(path, values):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=values, chunks=(4, 6), maxshape=(None, 6), compression="gzip")
    age(path)


def age(path, seconds=100):
    """Sets the mtime back, as if the file had been written a while ago."""
    now = os.stat(path).st_mtime_ns
    os.utime(path, ns=(now, now - seconds * 10**9))


def opened(path, folder):
    """All samples, read by the index."""
    with contextlib.closing(HDF5Source(path, ["data"], cache_dir=folder)) as source:
        assert source.chunks.reading == "decoded"
        return oracle.read(source, np.arange(len(source)))["data"]


def key_of(path):
    with h5py.File(path) as file:
        return IndexKey.of(file["data"])


def test_the_second_opening_builds_nothing_and_reads_the_same(path, folder, built, tmp_path):
    os.symlink(path, tmp_path / "link.h5")  # all links share the index of the data
    for file in (path, path, str(tmp_path / "link.h5")):
        assert (opened(file, folder) == VALUES).all()
    assert built == ["/data"]
    assert next(folder.iterdir()).name.startswith("x.h5.")


def test_a_cached_index_knows_chunks_that_are_not_there(path, folder, built):
    with h5py.File(path, "r+") as file:
        file["data"].resize((32, 6))
    age(path)
    for _ in range(2):
        assert (opened(path, folder) == np.concatenate([VALUES, np.zeros((12, 6))])).all()
    assert built == ["/data"]


def test_each_dataset_of_each_file_has_its_own_index(path, folder, built, tmp_path):
    with h5py.File(path, "r+") as file:
        file.create_dataset("other", data=VALUES + 1, chunks=(2, 6))
    shutil.copy2(path, tmp_path / "x.h5")
    for _ in range(2):
        for file in (path, tmp_path / "x.h5"):
            out = oracle.read_from(file, ["data", "other"], cache_dir=folder)
            assert (out["other"] == out["data"] + 1).all()
    assert len(built) == len(os.listdir(folder)) == 4


def test_the_index_of_a_small_file_is_not_cached(path, folder, monkeypatch):
    monkeypatch.setattr(index, "FEWEST_CHUNKS", 6)
    opened(path, folder)
    assert os.listdir(folder) == []


def test_the_index_of_a_file_that_has_just_changed_is_not_cached_yet(path, folder, monkeypatch):
    monkeypatch.setattr(local_files, "RECENT_NS", 2 * 10**9)
    now = os.stat(path).st_ctime_ns  # its time of writing was set back
    monkeypatch.setattr(local_files.time, "time_ns", lambda: now + 10**9)
    opened(path, folder)
    assert os.listdir(folder) == []
    monkeypatch.setattr(local_files.time, "time_ns", lambda: now + 3 * 10**9)
    opened(path, folder)
    assert len(os.listdir(folder)) == 1


def test_an_index_that_fails_verification_is_not_cached(path, folder):
    with h5py.File(path, "r+") as file:  # an edge chunk that cannot be decoded
        file["data"].resize((18, 6))
        file["data"].id.write_direct_chunk((16, 0), b"?" * 96)
    age(path)
    HDF5Source(path, ["data"], cache_dir=folder).close()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("wrong", [True, b"x", ""])
def test_what_is_no_path_is_refused(path, wrong):
    assert oracle.refused(ConfigError, [], path, ["data"], cache_dir=wrong).option == "cache_dir"


def touched(path):
    age(path, 5)
    return VALUES


def with_another_ctime(path):
    """It may have been written to, and its time set back."""
    os.chmod(path, 0o640)
    return VALUES


def replaced(path):
    """By a copy of other values, of the same size and time."""
    was = os.stat(path)
    write(path + "2", VALUES[::-1])
    os.utime(path + "2", ns=(was.st_mtime_ns, was.st_mtime_ns))
    os.replace(path + "2", path)
    return VALUES[::-1]


@pytest.mark.parametrize("change", [touched, with_another_ctime, replaced])
def test_the_index_of_a_changed_file_is_built_again_and_the_log_says_so(path, folder, built, caplog, change):
    opened(path, folder)
    expected = change(path)
    with caplog.at_level(logging.INFO, "lit_async_data"):
        assert (opened(path, folder) == expected).all()
        assert (opened(path, folder) == expected).all()
    assert len(built) == 2
    (record,) = caplog.records
    assert f"{path}:/data: the index in {next(folder.iterdir())} is damaged or of another state" in record.message


@pytest.mark.parametrize("column", ["offsets", "sizes", "masks"])
@pytest.mark.parametrize(
    "forge",
    [lambda column: column[::-1] + 1, lambda column: column[::-1], lambda column: np.append(column[:-1], [7])],
    ids=["wrong", "swap", "last"],
)
def test_an_intact_but_wrong_index_is_built_again(path, folder, built, column, forge):
    opened(path, folder)
    key, cache = key_of(path), IndexCache(folder)
    columns = cache.load(key)
    false = forge(columns[column])
    cache.store(key, columns | {column: false})
    assert (opened(path, folder) == VALUES).all()
    assert len(built) == (1 if (false == columns[column]).all() else 2)
