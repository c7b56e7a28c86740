"""What may go wrong: told from files as they are."""

from __future__ import annotations

import builtins
import io

import h5py
import numpy as np
import pytest

from lit_async_data import HDF5Source
from lit_async_data.testing import ArraySource
from lit_async_data.tools.doctor import risks as module
from lit_async_data.tools.doctor.risks import file_system, risks


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "cores", lambda: 4)
    monkeypatch.setattr(module, "file_system", lambda path: "ext4")
    return tmp_path


def told(source, paths=()):
    try:
        return list(risks(source, paths))
    finally:
        source.close()


def test_a_healthy_file_has_none():
    with h5py.File("a.h5", "w") as file:
        file["data"] = np.zeros((8, 4))
    assert told(HDF5Source("a.h5", ["data"]), ["a.h5"]) == []


def test_the_lock_of_h5py_is_named_with_its_reason():
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("data", data=np.arange(64).reshape(8, 8), chunks=(1, 8), scaleoffset=0)
    (line,) = told(HDF5Source("a.h5", ["data"]), ["a.h5"])
    assert line.startswith("data (data) is read under the lock of h5py, one thread at a time: ")


def test_samples_in_very_many_chunks():
    with h5py.File("a.h5", "w") as file:
        file.create_dataset("data", data=np.zeros((4, 10, 10)), chunks=(4, 1, 1))
    (line,) = told(HDF5Source("a.h5", ["data"]), ["a.h5"])
    assert line == "data (data): each sample lies in 100 chunks; a chunk that holds whole samples is read faster"


@pytest.mark.parametrize(("flags", "words"), [(1, "open for writing"), (5, "open for SWMR"), (0, "")])
@pytest.mark.parametrize("userblock", [0, 512, 2048])
def test_a_file_that_is_open_elsewhere(flags, words, userblock):
    with h5py.File("a.h5", "w", libver="latest", userblock_size=userblock) as file:
        file["data"] = np.zeros(4)
    with open("a.h5", "r+b") as file:
        file.seek(userblock + 11)
        file.write(bytes([flags]))
    found = list(module._of_hdf5(_Described(), ["a.h5"]))
    assert [words in line for line in found] == [True] * bool(words)


class _Described:
    """A source without fields: only its files matter."""

    stored_parts = (type("Part", (), {"fields": {}}),)


def test_network_file_systems_and_a_single_core(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 1)
    monkeypatch.setattr(module, "file_system", lambda path: "nfs4")
    network, core = told(ArraySource({"x": np.zeros(4)}), ["/data/x.h5"])
    assert "on nfs4" in network
    assert "one core only" in core


def test_the_file_system_is_that_of_the_deepest_mount(monkeypatch):
    monkeypatch.undo()
    table = "none / ext4 rw 0 0\nsrv:/a /mnt/a\\040b nfs4 rw 0 0\nsrv:/c /mnt/a\\040b/c fuse.sshfs rw 0 0\n"
    opened = builtins.open

    def mounts(path, *arguments, **options):
        return io.StringIO(table) if path == "/proc/self/mounts" else opened(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", mounts)
    assert file_system("/mnt/a b/x.h5") == "nfs4"
    assert file_system("/mnt/a b/c/x.h5") == "fuse.sshfs"
    assert file_system("/mnt/a bc/x.h5") == "ext4"
