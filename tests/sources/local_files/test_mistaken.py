"""Files that are something else than their name says, wherever a file is read."""

import gzip
import io
import struct
import wave
import zipfile

import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import HDF5Source, ManifestSource
from lit_async_data.errors import AsyncDataError


def wav():
    with wave.open(file := io.BytesIO(), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(800))
    return file.getvalue()


def npz():
    np.savez(file := io.BytesIO(), a=np.zeros(50))
    return file.getvalue()


def spreadsheet():
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("xl/workbook.xml", "<workbook/>" * 50)
    return file.getvalue()


CONTENTS = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n", "a pointer of Git LFS; "),
    "page": (b"\n<!DOCTYPE html><html><head><title>404", "a web page, "),
    "npz": (npz(), "a ZIP archive, "),
    "spreadsheet": (spreadsheet(), "a ZIP archive, "),
    "gzip": (gzip.compress(b"x" * 500), "compressed by gzip; "),
    "dicom": (bytes(128) + b"DICM" + bytes(300), "DICOM; "),
    "nifti": (struct.pack("<i", 348) + bytes(340) + b"n+1\0" + bytes(60), "NIfTI; "),
    "wav": (wav(), "a WAV recording; "),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(400), "a HEIC or AVIF image; "),
    "pdf": (b"%PDF-1.7\n" + bytes(400), "a PDF; "),
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing; "),
}
READERS = {
    ".png": lambda path: ManifestSource(pa.table({"x": [path]}), {"x": "x"}),
    ".npy": lambda path: ManifestSource(pa.table({"x": [path]}), {"x": "x"}),
    ".h5": lambda path: HDF5Source(path, {"x": "x"}),
    ".csv": lambda path: ManifestSource(path, {"x": "x"}),
    ".jsonl": lambda path: ManifestSource(path, {"x": "x"}),
    ".parquet": lambda path: ManifestSource(path, {"x": "x"}),
}


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_what_a_file_is_and_what_reads_it_are_said(content, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored, said = CONTENTS[content]
    (tmp_path / f"a{suffix}").write_bytes(stored)
    with pytest.raises(AsyncDataError) as caught:
        READERS[suffix](f"a{suffix}")
    assert f"a{suffix}: is {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("a.npy", "image", "a .npy array; name it in a table for ManifestSource"),
        ("a.h5", "npy", "kind: hdf5"),
    ],
)
def test_a_kind_that_another_reads_is_named(name, kind, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.zeros(3))
    (tmp_path / "a.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(AsyncDataError, match=said):
        ManifestSource(pa.table({"x": [name]}), {"x": {"name": "x", "kind": kind}})


def test_text_that_is_like_a_beginning_is_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("version https,x\n1,2\n")
    assert len(ManifestSource(str(tmp_path / "a.csv"), {"x": "x"})) == 1


@pytest.mark.parametrize(
    ("name", "reader", "said"),
    [
        ("a.npy", HDF5Source, "is a .npy array; name it in a table for ManifestSource"),
        ("a.csv", HDF5Source, "is not an HDF5 file, .*; tables and images are read by ManifestSource"),
        ("a.h5", ManifestSource, "HDF5 files are read by HDF5Source"),
        ("a.nc", ManifestSource, "HDF5 files are read by HDF5Source"),
    ],
)
def test_a_source_that_reads_a_file_of_another_kind_is_named(name, reader, said, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    for each in ("a.csv", "a.h5", "a.nc"):
        (tmp_path / each).write_text("x\n1\n")
    with pytest.raises(AsyncDataError, match=said):
        reader(str(tmp_path / name), {"x": "x"})
