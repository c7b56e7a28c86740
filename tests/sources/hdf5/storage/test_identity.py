"""Files that are rewritten in place with their old mtime while a source has them open."""

import os
import pickle

import h5py
import numpy as np
import pytest
from support.files.hdf5 import stored_spans
from support.sources.oracle import read

from lit_async_data import ChangedError, HDF5Source
from lit_async_data.sources.hdf5.readers.part_reader import PartReader
from lit_async_data.sources.hdf5.storage import identity

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
    said = r"x\.h5: was written to .*, and its modification time was set back; build"
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


def with_another_ctime(path):
    before = os.stat(path).st_ctime_ns
    while os.stat(path).st_ctime_ns == before:
        os.chmod(path, 0o600)


def test_new_permissions_are_no_change_and_compared_once(path, monkeypatch):
    source = HDF5Source(path, ["data"])
    read(source, np.arange(10))
    with_another_ctime(path)
    compared, once = [], identity.FileIdentity.matches
    monkeypatch.setattr(identity.FileIdentity, "matches", lambda *asked: compared.append(1) or once(*asked))
    for _ in range(3):
        assert (read(source, np.arange(COUNT))["data"] == VALUES).all()
    assert len(compared) == 1


def test_external_files_are_compared_too(h5):
    other = h5("other.h5", data=VALUES)
    source = HDF5Source(h5(data=h5py.ExternalLink("other.h5", "data")), ["data"], allow_external=True)
    read(source, np.arange(10))
    with_another_ctime(other)
    assert (read(source, np.arange(COUNT))["data"] == VALUES).all()
    rewritten(other)
    with pytest.raises(ChangedError, match=r"other\.h5: was written to"):
        read(source, np.arange(10))
