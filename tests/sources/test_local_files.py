"""When no descriptor is left, every source says so and what to do, never that a file does not exist."""

import argparse
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
from lit_async_data.sources import local_files
from lit_async_data.sources.local_files import ADVICE, PAUSE_S, advice_on, errno_of, retry_once
from lit_async_data.tools.call import add_source_arguments, given_source
from lit_async_data.tools.inspect import report_on

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


def test_a_pattern_in_a_forbidden_folder_matches_nothing(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "no", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(MissingError, match="matches no file"):
        HDF5Source(str(tmp_path / "*.h5"), ["x"])
    with pytest.raises(MissingError, match="cannot be listed: no"):
        ManifestSource.from_folder(tmp_path)


def test_advice_follows_the_causes_of_an_error():
    first = OSError(errno.EMFILE, "")
    second = CorruptError("does not decode")
    second.__cause__ = first
    assert ADVICE[errno.EMFILE] in advice_on(second)
    assert advice_on(OSError(errno.ENOENT, "")) is None


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
    for pattern in ("d/none*", "none/*"):
        with pytest.raises(MissingError, match=r"none.*: matches no file; check the pattern"):
            files(pattern + end)
    with pytest.raises(MissingError, match=rf"d/fold\*{end}: matches folders only; for the files in them write .*/\*"):
        files(f"d/fold*{end}")


def test_inspect_suggests_one_pattern_for_files_of_all_folders(folder):
    (suggestion, *_) = report_on(["d/**/*.h5"]).suggestions
    assert suggestion.call.path == "d/**/*.h5"


@pytest.mark.parametrize(
    ("number", "failures", "reads"),
    [(number, failures, 2) for number in (errno.EIO, errno.ESTALE) for failures in (1, 2)]
    + [(number, 1, 1) for number in (errno.EMFILE, errno.ENOENT, errno.EACCES)],
)
def test_only_input_errors_are_waited_out_and_only_once(number, failures, reads, monkeypatch):
    done, pauses = [], []
    monkeypatch.setattr(local_files.time, "sleep", pauses.append)

    def read():
        done.append("read")
        if len(done) <= failures:
            raise OSError(number, os.strerror(number))
        return "data"

    with contextlib.nullcontext() if reads > failures else pytest.raises(OSError, match=os.strerror(number)):
        assert retry_once(read) == "data"
    assert (done, pauses) == (["read"] * reads, [PAUSE_S] * (reads - 1))


@pytest.mark.parametrize(
    ("error", "number"),
    [(MemoryError(), 12), (OSError(5, "?"), 5), (OSError("(errno = 116, "), 116), (OSError("errno = 0"), None)],
)
def test_the_number_of_an_error_may_stand_in_its_message(error, number):
    assert errno_of(error) == number
