"""Local files: those that are something else, patterns, errors of input, and a lack of descriptors."""

import contextlib
import errno
import functools
import gzip
import io
import os
import resource
import struct
import zipfile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.failures import raising

from lit_async_data import HDF5Source, ManifestSource
from lit_async_data.errors import AsyncDataError, MissingError, SourceError
from lit_async_data.tools.inspect import report_on


@contextlib.contextmanager
def no_descriptors():
    """No file can be opened inside."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def data(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((4, 3))
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "t.csv").write_text("y\n1.5\n")
    (tmp_path / "t.jsonl").write_text('{"y": 1.5}\n')
    (tmp_path / "z.csv.gz").write_bytes(gzip.compress(b"y\n1.5\n"))
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.table({"y": [1.5]}), tmp_path / "folder/t.parquet")
    for name in ("auk", "owl"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        np.save(tmp_path / "classes" / name / "1.npy", np.zeros(3))
    return tmp_path


TABLES = ("t.csv", "t*.csv", "t.jsonl", "z.csv.gz", "folder/t.parquet", "folder")
MAKE = {
    **dict.fromkeys(("a.h5", "*.h5"), lambda path: HDF5Source(path, {"x": "x"})),
    **dict.fromkeys(TABLES, lambda path: ManifestSource(path, ["y"])),
    "classes": ManifestSource.from_folder,
    "a.npy": lambda path: ManifestSource(pa.table({"p": [os.path.basename(path)]}), ["p"], root=os.path.dirname(path)),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_source_without_descriptors_says_what_to_do(data, name):
    path = str(data / name)
    made = MAKE[name](path)  # works, and imports what it needs
    if isinstance(made, HDF5Source):
        made.close()
    with no_descriptors(), pytest.raises(SourceError, match=r"Too many open files.*ulimit -n") as caught:
        MAKE[name](path)
    assert type(caught.value) is SourceError
    assert caught.value.file == path
    assert path in str(caught.value)


def test_a_folder_below_that_cannot_be_listed_is_not_left_out(data, monkeypatch):
    """The last descriptor may be taken at any time."""
    listed, refused = os.scandir, raising(OSError(errno.ENFILE, os.strerror(errno.ENFILE)))
    monkeypatch.setattr(os, "scandir", lambda path: (refused if str(path).endswith("owl") else listed)(path))
    with pytest.raises(SourceError, match=r"classes: cannot be listed: .*Too many open files in system; .*fs.file-max"):
        ManifestSource.from_folder(str(data / "classes"))
    (data / "folder/owl").mkdir()
    with pytest.raises(SourceError, match=r"folder: cannot be listed: .*fs.file-max"):
        ManifestSource(str(data / "folder"), ["y"])


def test_a_pattern_in_a_forbidden_folder_matches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "scandir", raising(PermissionError(errno.EACCES, "no")))
    with pytest.raises(MissingError, match="matches no file"):
        HDF5Source(str(tmp_path / "*.h5"), ["x"])
    with pytest.raises(MissingError, match="cannot be listed: no"):
        ManifestSource.from_folder(tmp_path)


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


READERS = {
    "HDF5Source": (".h5", lambda pattern: [part.file for part in HDF5Source(pattern, ["x"]).parts]),
    "ManifestSource": (".csv", lambda pattern: [part.file for part in ManifestSource(pattern, ["x"]).parts]),
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
    for pattern in ("d/none*", "none/*"):
        with pytest.raises(MissingError, match=r"none.*: matches no file; check the pattern"):
            files(pattern + end)
    with pytest.raises(MissingError, match=rf"d/fold\*{end}: matches folders only; for the files in them write .*/\*"):
        files(f"d/fold*{end}")


def spreadsheet():
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>" * 50)
    return file.getvalue()


CONTENTS = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n", "a pointer of Git LFS; "),
    "page": (b"\n<!DOCTYPE html><html><head><title>404", "a web page, "),
    "spreadsheet": (spreadsheet(), "a ZIP archive, "),
    "gzip": (gzip.compress(b"x" * 500), "compressed by gzip; "),
    "dicom": (bytes(128) + b"DICM" + bytes(300), "DICOM; "),
    "nifti": (struct.pack("<i", 348) + bytes(340) + b"n+1\0" + bytes(60), "NIfTI; "),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(400), "a HEIC or AVIF image; "),
    "pdf": (b"%PDF-1.7\n" + bytes(400), "a PDF; "),
}
OPENED = {
    **dict.fromkeys((".png", ".npy"), lambda path: ManifestSource(pa.table({"x": [path]}), {"x": "x"})),
    **dict.fromkeys((".csv", ".jsonl", ".parquet"), lambda path: ManifestSource(path, {"x": "x"})),
    ".h5": lambda path: HDF5Source(path, {"x": "x"}),
}


@pytest.mark.parametrize("suffix", OPENED)
@pytest.mark.parametrize("content", CONTENTS)
def test_what_a_file_is_and_what_reads_it_are_said(content, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored, said = CONTENTS[content]
    (tmp_path / f"a{suffix}").write_bytes(stored)
    with pytest.raises(AsyncDataError, match=f"a{suffix}: is {said}"):
        OPENED[suffix](f"a{suffix}")


def of_kind(kind, path, fields):
    return ManifestSource(pa.table({"x": [path]}), {"x": {"name": "x", "kind": kind}}, allow_external=True)


@pytest.mark.parametrize(
    ("name", "reader", "said"),
    [
        ("a.npy", HDF5Source, "is a .npy array; name it in a table for ManifestSource"),
        ("a.csv", HDF5Source, "is not an HDF5 file, .*; tables and images are read by ManifestSource"),
        ("a.h5", ManifestSource, "HDF5 files are read by HDF5Source"),
        ("a.npy", functools.partial(of_kind, "image"), "a .npy array; name it in a table for ManifestSource"),
        ("a.h5", functools.partial(of_kind, "npy"), "kind: hdf5"),
    ],
)
def test_what_reads_a_file_of_another_kind_is_named(name, reader, said, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.csv").write_text("version https,x\n1,2\n")
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(AsyncDataError, match=said):
        reader(str(tmp_path / name), {"x": "x"})
    assert len(ManifestSource(str(tmp_path / "a.csv"), {"x": "x"})) == 1  # text that begins as a pointer does
