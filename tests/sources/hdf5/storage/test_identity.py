"""Files that change while a source has them open: rewritten with their old mtime, renamed, linked, or unlinked."""

import os
import pickle
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.hdf5 import stored_spans
from support.sources.oracle import read

from lit_async_data import ChangedError, HDF5Source
from lit_async_data.sources.hdf5.readers.part_reader import PartReader
from lit_async_data.sources.hdf5.storage.external_files import FileIdentity

COUNT = 400
VALUES = np.random.default_rng(0).integers(0, 100, (COUNT, 8), dtype=np.int32)
WAYS = {
    "copied": {},
    "decoded": {"chunks": (10, 8), "compression": "gzip"},
    "locked": {"chunks": (10, 8), "scaleoffset": 8},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def path(h5, request):
    return h5(data={"data": VALUES, **request.param})


def rewritten(path):
    """Flips one bit of each stored byte of the values; size and mtime stay the same."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        for begin, size in stored_spans(path):
            content[begin : begin + size] = bytes(byte ^ 1 for byte in content[begin : begin + size])
        file.seek(0)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    # The ctime advances in ticks of a few milliseconds.
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_rewritten_with_its_old_time_is_an_error(path):
    source = HDF5Source(path, ["data"])
    assert (read(source, np.arange(COUNT))["data"] == VALUES).all()
    rewritten(path)
    said = r"x\.h5: was written to and its modification time set back, .* since the source was built; build"
    for each in (source, pickle.loads(pickle.dumps(source))):
        with pytest.raises(ChangedError, match=said):
            read(each, np.arange(10))
        each.close()


def test_a_file_rewritten_while_a_batch_is_read_is_an_error(path, monkeypatch):
    """1. The file is checked. 2. It is rewritten with its old mtime. 3. Values are read. 4. It is checked again."""
    source = HDF5Source(path, ["data"])
    once = PartReader.read
    monkeypatch.setattr(PartReader, "read", lambda *asked: (rewritten(path), once(*asked)))
    with pytest.raises(ChangedError, match="set back"):
        read(source, np.arange(10))


CHANGES = {
    "renamed": lambda path: os.rename(path, path + "2"),
    "unlinked": os.unlink,
    "replaced": lambda path: os.replace(shutil.copy2(path, path + "2"), path),
    "linked": lambda path: os.link(path, path + "2"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_open_file_with_other_names_is_read_on(path, change):
    source = HDF5Source(path, ["data"])
    read(source, [0])
    CHANGES[change](path)
    for _ in range(2):
        assert (read(source, np.arange(COUNT))["data"] == VALUES).all()


def test_a_ctime_alone_is_a_change_while_the_file_is_in_its_place(tmp_path):
    path, other = str(tmp_path / "x"), str(tmp_path / "y")
    for each in (path, other):
        Path(each).write_bytes(b"1234")
    was = FileIdentity.of(os.stat(path))
    later = was._replace(ctime_ns=was.ctime_ns + 1)
    assert was.difference(was, path) is None
    assert "or its permissions" in was.difference(later, path)
    for names in (later._replace(links=0), later._replace(links=2)):
        assert was.difference(names, path) is None
    for elsewhere in (other, path + "3"):  # renamed, and another file in its place or none
        assert was.difference(later, elsewhere) is None
    for mtime in (was.mtime_ns - 1, was.mtime_ns + 1):
        assert was.difference(later._replace(mtime_ns=mtime, links=2), path) == "was written to"
    assert was.difference(later._replace(size=3, mtime_ns=5), path) == "shrank from 4 to 3 bytes"
    assert was.difference(FileIdentity.of(os.stat(other)), path) == "was replaced by another file"


def test_after_a_change_of_its_names_a_file_may_not_be_rewritten_either(path):
    source = HDF5Source(path, ["data"])
    read(source, [0])
    os.link(path, path + "2")
    read(source, [0])
    rewritten(path)
    with pytest.raises(ChangedError, match="set back"):
        read(source, [0])


def test_external_files_are_compared_too(h5):
    other = h5("other.h5", data=VALUES)
    source = HDF5Source(h5(data=h5py.ExternalLink("other.h5", "data")), ["data"], allow_external=True)
    read(source, np.arange(10))
    rewritten(other)
    with pytest.raises(ChangedError, match=r"other\.h5: was written to"):
        read(source, np.arange(10))
