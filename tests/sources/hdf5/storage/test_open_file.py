"""The handles on files: read by map and by pread, opened again, and few at once."""

import errno
import mmap
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from support.files.hdf5 import stored_spans
from support.files.system_calls import failing
from support.sources.oracle import orders, read
from support.threads.interrupts import interrupted
from support.threads.leaks import open_files

from lit_async_data import ChangedError, HDF5Source, SourceError
from lit_async_data.sources.hdf5.storage import open_file


@pytest.mark.usefixtures("pauses")
def test_an_input_error_names_file_and_byte(large, monkeypatch):
    source = HDF5Source(large, ["data"])
    read(source, [0])
    offset = stored_spans(large)[0][0] + 2**19
    monkeypatch.setattr(open_file.system, "preadv", failing(os.preadv, errno.EIO, 9))
    said = rf"{large}, {2**19} bytes at byte {offset}: cannot be read: \[Errno 5\] Input/output error; .*dmesg"
    with pytest.raises(SourceError, match=said) as caught:
        read(source, [1])
    assert (type(caught.value), caught.value.file) == (SourceError, large)


def test_a_read_that_the_system_cuts_short_goes_on(large, monkeypatch):
    source, whole = HDF5Source(large, ["data"]), os.preadv
    monkeypatch.setattr(open_file.system, "preadv", lambda file, parts, at: whole(file, [parts[0][:100_001]], at))
    assert (read(source, [2])["data"] == np.arange(2 * 2**17, 3 * 2**17)).all()


def test_a_file_that_cannot_be_mapped_says_what_to_do(h5, monkeypatch):
    source = HDF5Source(path := h5(data=np.ones((8, 4), "i4")), ["data"])
    monkeypatch.setattr(mmap, "mmap", failing(mmap.mmap, errno.ENOMEM, 1))
    with pytest.raises(SourceError, match=rf"{path}: cannot be mapped: .*ulimit -v.*memory_map=False"):
        read(source, [0])


def test_a_row_beyond_the_end_of_the_file_is_an_error(h5, monkeypatch):
    """1. The file is checked and unchanged. 2. It shrinks. 3. Its rows are read."""
    path = h5(data=np.zeros((50, 6), "i4"))
    source = HDF5Source(path, ["data"], memory_map=False)
    os.truncate(path, stored_spans(path)[0][0] + 49 * 24 + 3)
    monkeypatch.setattr(open_file.OpenFile, "_refuse_changed", lambda *_: None)
    with pytest.raises(ChangedError, match="in the middle of a sample, so it shrank"):
        source.read_into(np.arange(50), {"data": np.empty((50, 6), "i4")})


@pytest.fixture
def few_descriptors():
    """Lets this process open three times as many files as it has open, and 20 more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * opened + 20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_descriptors")
def test_there_may_be_more_files_than_descriptors(h5):
    stored = [{}, {"chunks": (1, 6), "compression": "gzip"}, {"chunks": (1, 6), "scaleoffset": 0}]
    data = np.arange(12).reshape(2, 6)
    paths = [h5(f"{n}.h5", data={"data": data, **stored[n % 3]}, labels=[2 * n, 2 * n + 1]) for n in range(100)]
    source = HDF5Source(paths)
    for samples in orders(len(source)):
        assert read(source, samples)["labels"].tolist() == list(samples)


@pytest.mark.parametrize("opens", ["open_raw", "open_h5py"])
def test_closing_does_not_wait_for_a_thread_that_is_stuck_opening_the_file(h5, monkeypatch, opens):
    """1. A thread opens the file, whose disk is gone. 2. Another closes the source. 3. The disk is back."""
    path = h5(data={"data": np.arange(8.0), "scaleoffset": 2})  # which h5py reads
    source, read_values, in_time = HDF5Source(path, ["data"]), [], []
    begun, back, whole = threading.Event(), threading.Event(), getattr(open_file, opens)
    monkeypatch.setattr(open_file, opens, lambda path: (begun.set(), in_time.append(back.wait(20)), whole(path))[2])
    thread = threading.Thread(target=lambda: read_values.extend(read(source, [3])["data"]))
    thread.start()
    try:
        assert begun.wait(60)
        source.close()
    finally:
        back.set()
        thread.join(60)
    assert (read_values, in_time) == ([3.0], [True])
    assert not [each for each in open_files() if path in each]


def test_a_finaliser_may_close_the_source_anywhere_in_a_read(h5):
    source = HDF5Source([h5(f"{n}.h5", data=np.arange(8.0)) for n in range(2)], ["data"])
    source._reader._files._max_open = 1
    for place in range(600):
        with interrupted(place, source.close) as passed:
            assert read(source, [3, 12])["data"].tolist() == [3.0, 4.0]
    assert len(passed) < 600
