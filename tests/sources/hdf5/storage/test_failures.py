"""Errors of h5py, numpy and the system reach the user as a `SourceError` with the file and what to do."""

import errno
import mmap
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.hdf5 import create, stored_spans
from support.sources import oracle

from lit_async_data import AsyncLoader, HDF5Source
from lit_async_data.errors import ChangedError, CorruptError, FormatError, MissingError, SourceError
from lit_async_data.sources.hdf5.readers.part_reader import PartReader
from lit_async_data.sources.hdf5.storage import open_file
from lit_async_data.sources.hdf5.storage.failures import open_h5py, open_raw, source_error
from lit_async_data.sources.local_files import retrying
from lit_async_data.sources.local_files.retrying import retry_once


def read(source, rows=(0,)):
    return oracle.read(source, rows)


def failing(real, number, times):
    """A system call that fails a number of times, then works."""
    left = [times]

    def call(*args, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    return call


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The seconds that were waited before a read was repeated."""
    pauses = []
    monkeypatch.setattr(retrying.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def large(h5):
    """Rows that are read by ``pread``."""
    return h5(data=np.arange(4 * 2**17, dtype="i4").reshape(4, -1))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOMEM, "ulimit -v"),
        (errno.EIO, "dmesg"),
        (errno.EACCES, "chmod"),
        (errno.ENOENT, "moved or deleted"),
        (errno.EFBIG, "check that this user may read it"),
    ],
)
def test_a_file_that_the_system_does_not_open_is_named_with_what_to_do(h5, monkeypatch, number, said):
    path = h5(data=np.ones((8, 4)))
    source = HDF5Source(path, ["data"])
    monkeypatch.setattr(os, "open", failing(os.open, number, 2))
    with pytest.raises(SourceError, match=rf"{path}: cannot be opened: \[Errno {number}\] .*{said}") as caught:
        read(source)
    assert type(caught.value) is (MissingError if number == errno.ENOENT else SourceError)
    assert caught.value.file == path
    monkeypatch.undo()
    assert (read(source)["data"] == 1).all()
    source.close()


def test_a_transient_input_error_is_not_raised(large, monkeypatch, pauses):
    monkeypatch.setattr(h5py, "File", failing(h5py.File, errno.EIO, 1))
    source = HDF5Source(large, ["data"])
    monkeypatch.setattr(os, "open", failing(os.open, errno.EIO, 1))
    monkeypatch.setattr(open_file.system, "preadv", failing(os.preadv, errno.EIO, 1))
    assert read(source, [3])["data"][0, 0] == 3 * 2**17
    assert pauses == [retrying.PAUSE_S] * 3
    source.close()


CHUNKED = [{"chunks": (2, 4), "compression": "gzip"}, {"chunks": (2, 4), "scaleoffset": 0}]


@pytest.mark.parametrize("options", [{}, *CHUNKED], ids=str)
@pytest.mark.parametrize(
    ("times", "error", "said"),
    [(1, None, ""), (1, ChangedError, "was replaced"), (9, SourceError, "file server no longer knows")],
)
def test_a_file_that_its_server_has_forgotten_is_opened_again_if_it_is_the_same(  # noqa: PLR0917
    h5, monkeypatch, options, times, error, said
):
    path = h5(data={"data": np.ones((8, 4), "i4"), **options})
    other = h5("other.h5", data={"data": np.ones((8, 4), "i4"), **options})
    source = HDF5Source(path, ["data"])
    read(source)
    if error is ChangedError:
        os.replace(other, path)
    monkeypatch.setattr(os, "fstat", failing(os.fstat, errno.ESTALE, times))
    if error is None:
        assert (read(source)["data"] == 1).all()
    else:
        with pytest.raises(error, match=rf"{path}: .*{said}"):
            read(source)
    monkeypatch.undo()
    source.close()


def test_only_input_errors_are_retried():
    for number in (errno.EMFILE, errno.ENOENT, errno.EACCES):
        with pytest.raises(OSError, match=os.strerror(number)):
            retry_once(failing(int, number, 1))


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"scaleoffset": 0}], ids=str)
def test_a_pipe_in_place_of_a_data_file_is_an_error_and_no_hang(h5, options):
    """1. A source is built. 2. A pipe without a writer replaces its file. 3. Opening the pipe would block for ever."""
    path = h5(data={"data": np.ones((8, 4), "i4"), **options})
    source = HDF5Source(path, ["data"])
    os.unlink(path)
    os.mkfifo(path)
    with (
        AsyncLoader(source, {"batch_size": 4, "workers": 0}) as loader,
        pytest.raises(FormatError, match=f"{path}: is no regular file"),
    ):
        next(iter(loader))
    with pytest.raises(FormatError, match="is no regular file"):
        HDF5Source(path, ["data"])
    with pytest.raises(FormatError, match="is no regular file"):
        source.column("other")
    source.close()


def test_a_folder_is_refused(tmp_path):
    for each in (open_h5py, open_raw):
        with pytest.raises(FormatError, match=rf"{tmp_path}: is a folder; for all files in it write"):
            each(str(tmp_path))


def states(h5, state):
    """A file that h5py does not open, and why."""
    path = h5(data=np.ones((8, 4)))
    with h5py.File(path, "w", libver="latest", userblock_size=512) as file:
        file["data"] = np.ones((8, 4))
    if isinstance(state, int):
        with open(path, "r+b") as file:
            file.seek(512 + 11)
            file.write(bytes([state]))
    elif state == "short":
        os.truncate(path, 600)
    elif state == "other":
        Path(path).write_bytes(b"no HDF5")
    return path


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_variable_that_helps(h5, monkeypatch, number):
    path = h5(data=np.ones((8, 4)))
    monkeypatch.setattr(h5py, "File", failing(h5py.File, number, 2))
    with pytest.raises(SourceError, match=rf"{path}.*HDF5_USE_FILE_LOCKING=FALSE") as caught:
        HDF5Source(path, ["data"])
    assert caught.value.file == path


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (5, "is marked as open for writing in SWMR mode .*h5clear -s {path} removes the mark"),
        (1, "is marked as open for writing: .*if nobody has it open, h5clear -s {path}"),
        ("short", "is damaged: shorter than when it was written"),
        ("locked", "is open for writing in another process"),
        ("other", "is not an HDF5 file"),
    ],
)
def test_why_a_file_is_not_opened_does_not_depend_on_what_h5py_says(h5, monkeypatch, state, said):
    path = states(h5, state)
    error = (
        BlockingIOError(errno.EAGAIN, "in words of its own") if state == "locked" else OSError("in words of its own")
    )

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(h5py, "File", refuse)
    with pytest.raises(FormatError, match=said.format(path=path)) as caught:
        open_h5py(path)
    assert "wait until" not in str(caught.value) or state == "locked"


def test_an_input_error_names_file_and_byte(large, monkeypatch):
    source = HDF5Source(large, ["data"])
    read(source)
    offset = stored_spans(large)[0][0] + 2**19
    monkeypatch.setattr(open_file.system, "preadv", failing(os.preadv, errno.EIO, 9))
    said = rf"{large}, {2**19} bytes at byte {offset}: cannot be read: \[Errno 5\] Input/output error; .*dmesg"
    with pytest.raises(SourceError, match=said) as caught:
        read(source, [1])
    assert (type(caught.value), caught.value.file) == (SourceError, large)
    monkeypatch.undo()
    source.close()


def test_a_read_that_the_system_cuts_short_goes_on(large, monkeypatch):
    source, whole = HDF5Source(large, ["data"]), os.preadv
    monkeypatch.setattr(
        open_file.system, "preadv", lambda descriptor, parts, offset: whole(descriptor, [parts[0][:100_001]], offset)
    )
    assert (read(source, [2])["data"] == np.arange(2 * 2**17, 3 * 2**17)).all()
    source.close()


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
    source.close()


def test_a_file_that_cannot_be_mapped_says_what_to_do(h5, monkeypatch):
    path = h5(data=np.ones((8, 4), "i4"))
    source = HDF5Source(path, ["data"])
    monkeypatch.setattr(mmap, "mmap", failing(mmap.mmap, errno.ENOMEM, 1))
    with pytest.raises(SourceError, match=rf"{path}: cannot be mapped: .*ulimit -v.*memory_map=False"):
        read(source)
    monkeypatch.undo()
    source.close()


@pytest.mark.parametrize("error", [MemoryError("8 GiB"), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_memory_that_runs_out_while_reading_names_the_file(h5, monkeypatch, error):
    path = h5(data=np.ones((8, 4), "i4"))
    source = HDF5Source(path, ["data"])

    def broken(*_, **__):
        raise error

    for name in ("read", "decode"):
        monkeypatch.setattr(PartReader, name, broken)
    with pytest.raises(SourceError, match=rf"{path}: cannot be read: .*not enough memory"):
        read(source)
    with pytest.raises(SourceError, match=rf"{path}: cannot be read: .*not enough memory"):
        source.decode(np.array([0]), None)
    source.close()


def damaged(path, name):
    """One byte of the object's header is changed, which has a checksum."""
    with h5py.File(path) as file:
        at = h5py.h5o.get_info(file[name].id).addr
    with open(path, "r+b") as file:
        file.seek(at + 10)
        byte = file.read(1)[0]
        file.seek(at + 10)
        file.write(bytes([byte ^ 255]))


@pytest.fixture
def broken(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file["data"] = np.ones((8, 4))
        file["bad"] = np.ones(8)
        file["link"] = h5py.SoftLink("/bad")
        file["group/x"] = np.ones(8)
    damaged(path, "bad")
    damaged(path, "group")
    return path


@pytest.mark.parametrize("name", ["bad", "/bad", "link", "group", "group/x"])
def test_a_damaged_dataset_is_called_damaged_and_not_missing(broken, name):
    with pytest.raises(CorruptError, match=rf"{broken}:/{name.strip('/')}.* cannot be .*checksum") as caught:
        HDF5Source(broken, ["data", name])
    assert (caught.value.file, caught.value.dataset) == (broken, name)


def test_damage_beside_the_fields_is_named_too(broken):
    with pytest.raises(CorruptError, match=rf"rows: {broken}:/bad: .*damaged"):
        HDF5Source(broken, ["data"], rows="bad")
    source = HDF5Source(broken, ["data"])
    with pytest.raises(CorruptError, match=rf"{broken}:/bad: .*damaged"):
        source.column("bad")
    source.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "cannot be opened: .*corruption"), ({"chunks": (8,)}, "behind the {} bytes of the file; was it truncated")],
    ids=["one piece", "chunks"],
)
def test_values_behind_the_end_of_the_file_are_damage(h5, options, said):
    path = h5(data={"data": np.arange(64, dtype="i4"), **options})
    with h5py.File(path) as file:
        stored = file["data"].id
        offset = stored.get_chunk_info(3).byte_offset if options else stored.get_offset()
    content = bytearray(Path(path).read_bytes())
    # The size of contiguous values follows their address.
    at = content.index(offset.to_bytes(8, "little") + (b"" if options else (256).to_bytes(8, "little")))
    content[at : at + 8] = (len(content) - 16).to_bytes(8, "little")
    Path(path).write_bytes(content)
    with pytest.raises(CorruptError, match=f"{path}:/data.*{said.format(len(content))}"):
        HDF5Source(path, ["data"])


def test_types_that_numpy_lacks_are_named(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["data"] = np.ones(4)
        quad = h5py.h5t.IEEE_F64LE.copy()
        quad.set_size(16)
        quad.set_precision(128)
        quad.set_fields(127, 112, 15, 0, 112)
        quad.set_ebias(16383)
        create(file, "quad", (4,), quad)
        create(file, "time", (4,), h5py.h5t.UNIX_D32LE)
    for name in ("quad", "time"):
        with pytest.raises(FormatError, match=rf"{path}:/{name}: holds values of a type that numpy lacks") as caught:
            HDF5Source(path, ["data", name])
        assert (caught.value.file, caught.value.dataset) == (path, name)


@pytest.mark.parametrize(("name", "shown"), [(b"d\xe9", r"d\\xe9"), (b"d\x1b[31m", r"d\\x1b\[31m")])
def test_names_that_cannot_be_printed_can_be_listed(h5, name, shown):
    path = h5(data=np.ones(4))
    with h5py.File(path, "r+") as file:
        file.id.link(b"data", name, h5py.h5g.LINK_HARD)
    with pytest.raises(MissingError, match=rf"has no dataset 'other'; the file holds: .*{shown}"):
        HDF5Source(path, ["other"])


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (TypeError("Unknown reference type"), FormatError, "TypeError: Unknown reference type; h5py does not support"),
        (KeyError("bad"), CorruptError, "KeyError: 'bad'; the file is damaged"),
        (RuntimeError("bad"), CorruptError, "bad; the file is damaged"),
        (RuntimeError(), CorruptError, "no reason given; the file is damaged"),
    ],
    ids=repr,
)
def test_what_h5py_raises_is_either_unsupported_or_damage(error, kind, said):
    found = source_error(error, "x.h5:/data", "cannot be read", file="x.h5", dataset="data", row=3)
    assert type(found) is kind
    assert re.fullmatch(rf"x\.h5:/data: cannot be read: {re.escape(said)}.*", str(found))
    assert (found.file, found.dataset, found.row) == ("x.h5", "data", 3)
