"""The handles on files: read by map and by pread, opened again, and few at once."""

import errno
import mmap
import os
import pickle
import resource
import shutil
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.damage import failing
from support.files.encoded_images import field, picture, written
from support.files.hdf5 import stored_spans
from support.sources.oracle import orders, read, refused_when_read
from support.threads.interrupts import interrupted
from support.threads.leaks import open_files

from lit_async_data import AsyncLoader, ChangedError, Field, HDF5Source, SourceError
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.readers.part_reader import PartReader
from lit_async_data.sources.hdf5.storage import open_file
from lit_async_data.sources.hdf5.storage.open_file import GlobalHeap


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
    monkeypatch.setattr(open_file, opens, lambda *given: (begun.set(), in_time.append(back.wait(20)), whole(*given))[2])
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


VALUES = np.arange(50 * 6, dtype=">i4").reshape(50, 6)


class Kernel:
    """Fakes which bytes are in memory, and records what it was told to fetch."""

    def __init__(self, monkeypatch):
        self.fetched = []
        monkeypatch.setattr(open_file, "is_cold", self.is_cold)
        monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, size, advice: self.fetched.append((at, at + size)))

    def is_cold(self, descriptor, offset):
        return not any(begin <= offset < end for begin, end in self.fetched)


@pytest.mark.parametrize(
    ("field", "options", "samples", "pieces"),
    [
        (Field("data"), {}, [3, 5, 4, 30, 3], [(0, 3, 6), (0, 30, 31)]),
        (Field("data"), {"chunks": (8, 6)}, [3, 5, 4, 30, 3], [(0, 3, 6), (3, 6, 7)]),
        (Field("data"), {"chunks": (8, 6), "compression": "gzip"}, [1, 30], [(0, 0, None), (3, 0, None)]),
        (Field("data", window=(0, 2)), {}, [3], [(0, 3, 5)]),
        (Field("data", lengths="n"), {}, [3], [(0, 6, 8)]),
    ],
    ids=["contiguous", "chunked", "gzip", "windows", "lengths"],
)
def test_cold_rows_are_fetched_together_and_neighbours_as_one(h5, monkeypatch, field, options, samples, pieces):  # noqa: PLR0917
    """The pieces are rows of a chunk, from the first to the one behind the last; None: all of the chunk."""
    path = h5(data={"data": VALUES, **options}, n=[2] * 25)
    source = HDF5Source(path, {"x": field})
    kernel, spans = Kernel(monkeypatch), stored_spans(path)
    source.fetch(np.array(samples))
    source.close()
    ends = [sum(spans[n]) if end is None else spans[n][0] + end * 24 for n, _, end in pieces]
    assert sorted(kernel.fetched) == [(spans[n][0] + row * 24, end) for (n, row, _), end in zip(pieces, ends)]


def test_later_batches_are_fetched_while_earlier_ones_are_read(h5, monkeypatch):
    path = h5(data=np.zeros((400, 20_000), np.uint8))
    source = HDF5Source(path, ["data"])
    kernel = Kernel(monkeypatch)
    with AsyncLoader(source, {"batch_size": 2, "shuffle": "global", "workers": 1, "queue_depth": 1}) as loader:
        schedule, steps = loader._wiring.schedule, 8 + loader.footprint.layout.batches
        for _ in range(3):
            next(loader)
    samples = schedule.plan(0).batch(steps)
    begins = stored_spans(path)[0][0] + samples * 20_000
    source.close()
    assert all(any(first <= begin < end for first, end in kernel.fetched) for begin in begins)


COUNT, CHUNKS = 400, {"chunks": (10, 8)}
IDENTICAL = np.random.default_rng(0).integers(0, 100, (COUNT, 8), dtype=np.int32)
WAYS = {"copied": {}, "decoded": {**CHUNKS, "compression": "gzip"}, "locked": {**CHUNKS, "scaleoffset": 8}}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def path(h5, request):
    return h5(data={"data": IDENTICAL, **request.param})


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
    # The ctime advances in ticks of a few milliseconds.
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_rewritten_with_its_old_time_is_an_error(path):
    source = HDF5Source(path, ["data"])
    assert (read(source, np.arange(COUNT))["data"] == IDENTICAL).all()
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
    monkeypatch.setattr(PartReader, "read", lambda *asked, **how: (rewritten(path), once(*asked, **how)))
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
        assert (read(source, np.arange(COUNT))["data"] == IDENTICAL).all()
    if change == "linked":
        rewritten(path)
        with pytest.raises(ChangedError, match="set back"):
            read(source, [0])


@pytest.mark.parametrize("storage", ["variable", "of other addresses", "variable behind a user block"])
def test_the_global_heap_equals_h5py(tmp_path, storage):
    """Many values of one collection, collections of one value, and the holes of values that were written again."""
    rng, path = np.random.default_rng(0), written(tmp_path / "x.h5", storage, images=[b"?"] * 300)
    with h5py.File(path, "a") as file:
        for size in (40, 300, 9000):
            for row in rng.integers(300, size=200):
                file["x"][row] = rng.integers(0, 255, rng.integers(size), dtype=np.uint8)
        values, offset = file["x"][...], file["x"].id.get_offset()
        address_bytes, length_bytes = file.id.get_create_plist().get_sizes()
    data = np.fromfile(path, np.uint8)
    references = data[offset : offset + 300 * (8 + address_bytes)].reshape(300, -1)
    heap = GlobalHeap(length_bytes, 512 if storage.endswith("user block") else 0, len(data))
    for reference, value in zip(heap.references(references).tolist(), values, strict=True):
        np.testing.assert_array_equal(heap.value(reference, lambda at, n: data[at : at + n], ""), value)


DAMAGES = {
    "to nowhere": (lambda data, at, _: data[at + 4 : at + 12].fill(0x7F), "outside of the file"),
    "to another place": (lambda data, at, _: data[at + 4 : at + 5].fill(0x30), "no collection"),
    "to another object": (lambda data, at, _: data[at + 12 : at + 16].fill(9), "missing"),
    "of another length": (lambda data, at, _: data[at : at + 1].__iadd__(1), "but it has"),
    "to a collection that is too long": (lambda data, _, heap: data[heap + 8 : heap + 16].fill(0x7F), "no collection"),
    "to an object that is too long": (lambda data, _, heap: data[heap + 24 : heap + 30].fill(0x7F), "missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_reference_or_heap_is_named_by_its_row(tmp_path, damage):
    path = written(tmp_path / "x.h5", images=[picture(number, sides=(40, 50)) for number in range(4)])
    with h5py.File(path) as file:
        at = file["x"].id.get_offset() + 2 * 16
    data = np.fromfile(path, np.uint8)
    change, said = DAMAGES[damage]
    change(data, at, int.from_bytes(data[at + 4 : at + 12].tobytes(), "little"))
    data.tofile(path)
    error = refused_when_read(CorruptError, ["row 2", said], path, field(image_size=9), [2])
    assert (error.row, error.sample_id) == (2, 2)
