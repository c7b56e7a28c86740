"""When no descriptor is left, every source says so and what to do, never that a file does not exist."""

import contextlib
import errno
import gzip
import os
import resource

import h5py
import numpy as np
import pytest

from lit_async_data import HDF5Source, ManifestSource
from lit_async_data.errors import CorruptError, MissingError, SourceError
from lit_async_data.sources.local_files import ADVICE, advice_on

pa = pytest.importorskip("pyarrow", reason="pip install 'lit-async-data[manifest]'")
pq = pytest.importorskip("pyarrow.parquet")


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
    with no_descriptors(), pytest.raises(SourceError) as caught:
        MAKE[name](path)
    assert type(caught.value) is SourceError
    assert caught.value.file == path
    assert path in str(caught.value)
    assert "Too many open files" in str(caught.value)
    assert "ulimit -n" in str(caught.value)


def test_a_folder_below_that_cannot_be_listed_is_not_left_out(data, monkeypatch):
    """The last descriptor may be taken at any time."""
    listed = os.scandir

    def scandir(path):
        if os.path.basename(path) == "owl":
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(SourceError, match=r"classes: cannot be listed: Too many open files in system; .*fs.file-max"):
        ManifestSource.from_folder(str(data / "classes"))
    (data / "folder/owl").mkdir()
    with pytest.raises(SourceError, match=r"folder: cannot be listed: .*fs.file-max"):
        ManifestSource(str(data / "folder"), ["y"])


def test_patterns_of_folders_that_are_not_there_or_forbidden_match_nothing(tmp_path, monkeypatch):
    for source, pattern in ((HDF5Source, "none/*.h5"), (ManifestSource, "none/*.csv")):
        with pytest.raises(MissingError, match="matches no file"):
            source(str(tmp_path / pattern), ["x"])

    def refused(path):
        raise PermissionError(errno.EACCES, "no", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(MissingError, match="matches no file"):
        HDF5Source(str(tmp_path / "*.h5"), ["x"])


def test_advice_follows_the_causes_of_an_error():
    first = OSError(errno.EMFILE, "")
    second = CorruptError("does not decode")
    second.__cause__ = first
    assert ADVICE[errno.EMFILE] in advice_on(second)
    assert advice_on(OSError(errno.ENOENT, "")) is None
