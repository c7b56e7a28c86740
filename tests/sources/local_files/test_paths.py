"""Paths as people give them: as for a shell, as an address, of Windows, wherever a path is taken."""

import os
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import Field, HDF5Source, ManifestSource, merge_patches
from lit_async_data.__main__ import main
from lit_async_data.errors import AsyncDataError
from lit_async_data.reading import open_reader, read
from lit_async_data.sources.files import stores
from lit_async_data.system import Lazy
from lit_async_data.tools.call import Call
from lit_async_data.tools.inspect import check_all

WINDOWS = r"C:\data\x.h5"
ADDRESSES = {
    "s3://bucket/x.h5": "s3://bucket is read by obstore; install it: pip install 'lit_async_data[cloud]'",
    "https://host/x.h5?v=1": "https://host/x.h5?…: what follows the question mark may be secret",
    "simplecache::s3://bucket/x.h5": "a chain of filesystems; give the last address, and cache=FOLDER",
}
WRONG = {
    WINDOWS: "a path of Windows; give the path that leads there",
    str(Path("s3://bucket/x.h5")): "an address, not a path; write s3://… with both slashes, as text",
    **dict.fromkeys(("file://x.h5", "file:x.h5"), "no address of a file; write file:///… with the absolute path, or"),
}
# What takes the path of a file, or its address.
TAKERS = {
    "HDF5Source": lambda path: HDF5Source(path, {"x": "x"}),
    "HDF5Source, a list": lambda path: HDF5Source([path], {"x": "x"}),
    "HDF5Source, table": lambda path: HDF5Source("x.h5", {"x": "x"}, table=path + ".csv", on="x"),
    "ManifestSource": lambda path: ManifestSource(path + ".csv", {"x": "x"}),
    "ManifestSource, root": lambda path: ManifestSource(pa.table({"x": ["a.png"]}), {"x": "x"}, root=path),
    "ManifestSource, a row": lambda path: ManifestSource(
        pa.table({"p": [path], "row": [0], "dataset": ["x"]}), {"x": {"name": "p", "kind": "hdf5"}}, allow_external=True
    ),
    "read": lambda path: read(path + ":/x"),
    "open_reader": open_reader,
}


def patches():
    return HDF5Source("x.h5", {"x": Field("x", patch=(1,))})


# What takes a path only.
LOCAL = {
    "merge_patches": lambda path: merge_patches(np.ones((6, 1)), patches(), path),
    "inspect --check-all": lambda path: check_all(Call("HDF5Source", "x.h5", {"x": "x"}), path),
    "HDF5Source, exclude": lambda path: HDF5Source("x.h5", {"x": "x"}, exclude=path + ".csv"),
    "HDF5Source, cache_dir": lambda path: HDF5Source("x.h5", {"x": "x"}, cache_dir=path),
    "HDF5Source, cache": lambda path: HDF5Source("x.h5", {"x": "x"}, cache=path),
    "from_folder": ManifestSource.from_folder,
}
TOOLS = [["inspect"], ["doctor"], ["pack", "--out", "y.h5"]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path))
    with h5py.File("x.h5", "w") as file:
        file["x"] = np.arange(6)
    return tmp_path


@pytest.fixture
def without_obstore(monkeypatch):
    for name, lazy in (("obstore", "obstore"), ("obstore.store", "stores"), ("obstore.exceptions", "exceptions")):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(stores, lazy, Lazy(name))


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("path", ADDRESSES)
def test_an_address_that_cannot_be_read_says_why(path, taker):
    with pytest.raises(AsyncDataError) as caught:
        TAKERS[taker](path)
    assert ADDRESSES[path] in str(caught.value)


@pytest.mark.parametrize("taker", TAKERS | LOCAL)
@pytest.mark.parametrize("path", WRONG)
def test_what_is_no_path_here_says_what_to_give(path, taker):
    with pytest.raises(AsyncDataError) as caught:
        (TAKERS | LOCAL)[taker](path)
    assert WRONG[path] in str(caught.value)


@pytest.mark.parametrize("taker", LOCAL)
def test_lists_and_folders_are_local(taker):
    with pytest.raises(AsyncDataError, match="an address, not a path; give a path of this machine"):
        LOCAL[taker]("s3://bucket/x.h5")


@pytest.mark.usefixtures("without_obstore")
@pytest.mark.parametrize("command", TOOLS)
@pytest.mark.parametrize(("path", "what"), [*ADDRESSES.items(), (WINDOWS, "a path of Windows")])
def test_the_tools_tell_it_too(path, what, command, capsys):
    assert main([*command, path]) != 0
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("path", ["~/x.h5", "$DATA/x.h5", "${DATA}/x.h5", "file://{}/x.h5", "~/*.h5"])
def test_a_path_may_be_as_in_a_shell_or_a_file_url(path, folder):
    path = path.replace("{}", str(folder)) if path.startswith("file:") else path
    assert HDF5Source(path, {"x": "x"}).parts[0].file == str(folder / "x.h5")
    if "*" not in path:
        assert read(f"{path}:/x", [2]) == [2]


@pytest.mark.parametrize("path", ["~/out", "file://{}/out"])
@pytest.mark.parametrize("writer", ["merge_patches", "inspect --check-all"])
def test_so_may_a_path_that_is_written(writer, path, folder):
    LOCAL[writer](path.replace("{}", str(folder)))
    assert (folder / "out").exists()


def test_a_missing_path_with_backslashes_is_told_the_separator_and_one_that_exists_is_read(folder):
    takers = HDF5Source, ManifestSource
    for path, take in (("data\\x.h5", takers[0]), ("data\\*.h5", takers[0]), ("data\\x.csv", takers[1])):
        with pytest.raises(AsyncDataError, match=r"; folders are separated by / here$"):
            take(path, {"x": "x"})
    os.rename("x.h5", "data\\x.h5")
    assert len(HDF5Source("data\\x.h5", {"x": "x"})) == 6
