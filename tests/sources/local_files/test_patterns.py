"""A pattern means the same files to every source and every tool."""

import argparse

import h5py
import numpy as np
import pytest

from lit_async_data import HDF5Source, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import MissingError
from lit_async_data.tools.call import add_source_arguments, given_source
from lit_async_data.tools.inspect import report_on

FILES = ("n2", "n10", "a/1", "a/b/2", ".hidden/3", "a/.hidden")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Six files of three rows in folders, of which two are hidden, and a folder with the name of a file."""
    for name in FILES:
        path = tmp_path / f"d/{name}.h5"
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(6.0).reshape(3, 2)
        path.with_suffix(".csv").write_text("x\n1\n2\n3\n")
    (tmp_path / "d/folder.h5").mkdir()
    (tmp_path / "d/folder.csv").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def names(paths):
    return [str(path).partition("/d/")[2].rpartition(".")[0] for path in paths]


def opened(pattern):
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    return given_source([pattern], parser.parse_args(["--fields", "x"])).build()


READERS = {
    "HDF5Source": (".h5", lambda pattern: [part.file for part in HDF5Source(pattern, ["x"]).parts]),
    "ManifestSource": (".csv", lambda pattern: [part.file for part in ManifestSource(pattern, ["x"]).parts]),
    "pack and doctor": (".h5", lambda pattern: [part.file for part in opened(pattern).parts]),
    "inspect": (".h5", lambda pattern: report_on([pattern]).files),
}


@pytest.mark.parametrize("reader", READERS)
def test_two_stars_reach_all_folders_in_natural_order(folder, reader):
    end, files = READERS[reader]
    assert names(files(f"~/d/**/*{end}")) == ["a/1", "a/b/2", "n2", "n10"]
    assert names(files(f"~/d/*{end}")) == ["n2", "n10"]
    assert names(files(f"~/d/.*/*{end}")) == [".hidden/3"]


@pytest.mark.parametrize("reader", READERS)
def test_a_pattern_that_matches_nothing_says_so(folder, reader):
    end, files = READERS[reader]
    with pytest.raises(MissingError, match=r"none\*.*: matches no file; check the pattern"):
        files(f"d/none*{end}")
    with pytest.raises(MissingError, match=rf"d/fold\*{end}: matches folders only; for the files in them write .*/\*"):
        files(f"d/fold*{end}")


def test_pack_reads_files_of_all_folders_and_inspect_suggests_one_pattern_for_them(folder, capsys):
    assert main(["pack", "d/**/*.h5", "-o", "packed.h5", "--fields", "x"]) == 0
    assert len(HDF5Source("packed.h5", ["x"])) == 12
    (suggestion, *_) = report_on(["d/**/*.h5"]).suggestions
    assert suggestion.call.path == "d/**/*.h5"
