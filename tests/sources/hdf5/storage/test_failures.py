"""Errors of h5py, numpy and the system reach the user as a `SourceError` with the file and what to do."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
from support.files.damage import failing
from support.sources.oracle import read, refused

from lit_async_data import CorruptError, FormatError, HDF5Source, MissingError, SourceError
from lit_async_data.sources import local_files
from lit_async_data.sources.hdf5.storage import open_file
from lit_async_data.sources.hdf5.storage.failures import source_error
from lit_async_data.sources.hdf5.storage.handles import open_h5py

pytestmark = pytest.mark.usefixtures("pauses")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "dmesg"),
        (errno.ENOENT, "moved or deleted"),
        (errno.EFBIG, "check that this user may read it"),
    ],
)
def test_a_file_that_the_system_does_not_open_is_named_with_what_to_do(h5, monkeypatch, number, said):
    path = h5(data=np.ones((8, 4)))
    source = HDF5Source(path, ["data"])
    monkeypatch.setattr(os, "open", failing(os.open, number, 2))
    with pytest.raises(SourceError, match=rf"{path}: cannot be opened: \[Errno {number}\] .*{said}") as caught:
        read(source, [0])
    assert type(caught.value) is (MissingError if number == errno.ENOENT else SourceError)
    assert caught.value.file == path
    monkeypatch.undo()
    assert (read(source, [0])["data"] == 1).all()


def test_a_transient_input_error_is_not_raised(large, monkeypatch, pauses):
    monkeypatch.setattr(h5py, "File", failing(h5py.File, errno.EIO, 1))
    source = HDF5Source(large, ["data"])
    monkeypatch.setattr(os, "open", failing(os.open, errno.EIO, 1))
    monkeypatch.setattr(open_file.system, "preadv", failing(os.preadv, errno.EIO, 1))
    assert read(source, [3])["data"][0, 0] == 3 * 2**17
    assert pauses == [local_files.PAUSE_S] * 3


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"scaleoffset": 0}], ids=str)
def test_a_pipe_in_place_of_a_data_file_is_an_error_and_no_hang(h5, options):
    """1. A source is built. 2. A pipe without a writer replaces its file. 3. Opening the pipe would block for ever."""
    source = HDF5Source(path := h5(data={"data": np.ones((8, 4), "i4"), **options}), ["data"])
    os.unlink(path)
    os.mkfifo(path)
    for use in (lambda: read(source, [0]), lambda: source.column("other"), lambda: HDF5Source(path, ["data"])):
        with pytest.raises(FormatError, match=f"{path}: is no regular file"):
            use()


def test_a_file_that_became_a_folder_is_called_a_folder(h5):
    path = Path(h5(data=np.arange(4)))
    source = HDF5Source(path, ["data"])
    path.unlink()
    path.mkdir()
    with pytest.raises(FormatError, match=rf"{path}: is a folder; for all files in it write"):
        source[1]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_variable_that_helps(h5, monkeypatch, number):
    path = h5(data=np.ones((8, 4)))
    monkeypatch.setattr(h5py, "File", failing(h5py.File, number, 2))
    assert refused(SourceError, [path, "HDF5_USE_FILE_LOCKING=FALSE"], path, ["data"]).file == path


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("marked", "marked as open for writing .*if nobody writes to it, h5clear -s {path} removes the mark"),
        ("short", "is damaged or cut short; copy it again, once nobody writes to it: .*eof = 100, "),
        ("empty", "is not an HDF5 file, or is damaged: it is empty"),
        ("locked", "is open for writing in another process"),
        ("other", "is not an HDF5 file"),
    ],
)
def test_why_a_file_is_not_opened(h5, monkeypatch, state, said):
    path = Path(h5(data=np.ones((8, 4))))
    contents = {"short": path.read_bytes()[:100], "empty": b"", "other": b"no HDF5"}
    if state == "marked":
        with h5py.File(path, "w", libver="latest") as file:
            file.swmr_mode = True
            contents["marked"] = path.read_bytes()
    path.write_bytes(contents.get(state, path.read_bytes()))
    if state == "locked":
        monkeypatch.setattr(h5py, "File", Mock(side_effect=OSError(errno.EAGAIN, "locked")))
    with pytest.raises(FormatError, match=said.format(path=path)) as caught:
        open_h5py(str(path))
    assert "wait until" not in str(caught.value) or state == "locked"


def test_an_input_error_of_libhdf5_is_a_source_error(h5, monkeypatch):
    path = h5(data={"data": np.ones((8, 4), "i4"), "chunks": (2, 4), "scaleoffset": 0})
    source = HDF5Source(path, ["data"])
    text = "Can't synchronously read data (file read failed: errno = 5, error message = 'Input/output error')"
    asked = []

    def broken(dataset, which):
        asked.append(which)
        raise OSError(text)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", broken)
    with pytest.raises(SourceError, match=rf"{path}:/data, rows 2 to 3: cannot be read: .*dmesg") as caught:
        read(source, [3])
    assert (type(caught.value), caught.value.row, caught.value.sample_id, len(asked)) == (SourceError, 2, None, 2)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (TypeError("Unknown reference type"), FormatError, "TypeError: Unknown reference type; h5py does not support"),
        (KeyError("bad"), CorruptError, "KeyError: 'bad'; the file is damaged"),
        (RuntimeError(), CorruptError, "no reason given; the file is damaged"),
    ],
    ids=repr,
)
def test_what_h5py_raises_is_either_unsupported_or_damage(error, kind, said):
    found = source_error(error, "x.h5:/data", "cannot be read", file="x.h5", dataset="data", row=3)
    assert type(found) is kind
    assert re.fullmatch(rf"x\.h5:/data: cannot be read: {re.escape(said)}.*", str(found))
    assert (found.file, found.dataset, found.row) == ("x.h5", "data", 3)
