"""Paths as people give them: as for a shell, as an address, of Windows, wherever a path is taken."""

import os

import h5py
import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import HDF5Source, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import AsyncDataError
from lit_async_data.reading import open_reader, read

FOREIGN = {
    "s3://bucket/x.h5": "an address, not a path; fetch the file first",
    "https://host/x.h5?v=1": "an address, not a path; fetch the file first",
    r"C:\data\x.h5": "a path of Windows; give the path that leads there",
}
# What takes a path.
TAKERS = {
    "HDF5Source": lambda path: HDF5Source(path, {"x": "x"}),
    "HDF5Source, a list": lambda path: HDF5Source([path], {"x": "x"}),
    "HDF5Source, table": lambda path: HDF5Source("x.h5", {"x": "x"}, table=path + ".csv", on="x"),
    "HDF5Source, exclude": lambda path: HDF5Source("x.h5", {"x": "x"}, exclude=path + ".csv"),
    "HDF5Source, cache_dir": lambda path: HDF5Source("x.h5", {"x": "x"}, cache_dir=path),
    "ManifestSource": lambda path: ManifestSource(path + ".csv", {"x": "x"}),
    "ManifestSource, root": lambda path: ManifestSource(pa.table({"x": ["a.png"]}), {"x": "x"}, root=path),
    "ManifestSource, a row": lambda path: ManifestSource(
        pa.table({"p": [path], "row": [0], "dataset": ["x"]}), {"x": {"name": "p", "kind": "hdf5"}}
    ),
    "from_folder": ManifestSource.from_folder,
    "read": lambda path: read(path + ":/x"),
    "open_reader": open_reader,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", str(tmp_path))
    with h5py.File("x.h5", "w") as file:
        file["x"] = np.arange(6)
    return tmp_path


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("path", FOREIGN)
def test_what_leads_to_no_file_here_is_told(path, taker):
    with pytest.raises(AsyncDataError) as caught:
        TAKERS[taker](path)
    assert f"{path.split(':')[0]}:" in str(caught.value)
    assert FOREIGN[path] in str(caught.value)


@pytest.mark.parametrize("command", [["inspect"], ["doctor"], ["pack", "--out", "y.h5"]])
@pytest.mark.parametrize("path", FOREIGN)
def test_the_tools_tell_it_too(path, command, capsys):
    assert main([*command, path]) != 0
    assert FOREIGN[path] in capsys.readouterr().err


@pytest.mark.parametrize("path", ["~/x.h5", "$DATA/x.h5", "${DATA}/x.h5", "file://{}/x.h5", "~/*.h5"])
def test_a_path_may_be_as_in_a_shell_or_a_file_url(path, folder):
    path = path.replace("{}", str(folder)) if path.startswith("file:") else path
    assert HDF5Source(path, {"x": "x"}).parts[0].file == str(folder / "x.h5")
    if "*" not in path:
        assert read(f"{path}:/x", [2]) == [2]


def test_a_file_that_is_called_so_is_meant(folder):
    os.rename("x.h5", "$DATA.h5")
    assert len(HDF5Source("$DATA.h5", {"x": "x"})) == 6
