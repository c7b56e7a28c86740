"""The filters of HDF5: a chunk decodes to what was encoded, or is refused."""

import concurrent.futures
import logging
import subprocess
import sys
import types
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py._objects import phil
from hypothesis import given
from hypothesis import strategies as st
from support.files.hdf5 import WAYS
from support.sources.oracle import check, refused

import lit_async_data
from lit_async_data import FormatError, HDF5Source
from lit_async_data.errors import CorruptError
from lit_async_data.sources.hdf5.storage import codecs
from lit_async_data.sources.hdf5.storage.codecs import DEFLATE, FLETCHER32, SHUFFLE, Filter, FilterPipeline, fletcher32

filters = st.lists(st.sampled_from([SHUFFLE, DEFLATE, FLETCHER32]), unique=True)  # in any order


@given(st.binary(min_size=1, max_size=400), filters, st.sampled_from([1, 2, 4, 8]), st.integers(0, 7))
def test_a_chunk_decodes_to_what_was_encoded(content, which, itemsize, left_out):
    """Encodes independently: shuffle by transposing, the checksum by HDF5's own loop."""
    stored, mask = content, 0
    for number, filter_ in enumerate(which):
        if left_out >> number & 1:
            mask |= 1 << number
        elif filter_ == SHUFFLE:
            whole = len(stored) // itemsize * itemsize
            table = np.frombuffer(stored[:whole], np.uint8).reshape(-1, itemsize)
            stored = table.T.tobytes() + stored[whole:]
        elif filter_ == DEFLATE:
            stored = zlib.compress(stored, 1)
        else:
            stored += checksum(stored).to_bytes(4, "little")
    pipeline = tuple(Filter(filter_, (itemsize,)) for filter_ in which)
    decoded = FilterPipeline(pipeline, len(content)).decode(np.frombuffer(stored, np.uint8), mask)
    assert decoded.tobytes() == content


def checksum(data):
    """HDF5's loop, word by word, folding after each."""
    first = second = 0
    for at in range(0, len(data), 2):
        first += int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        first = (first & 0xFFFF) + (first >> 16)
        second += first
        second = (second & 0xFFFF) + (second >> 16)
    return second << 16 | first


def test_the_checksum_is_exact_over_many_words(monkeypatch):
    data = np.full(4 * codecs._SUM_WORDS + 11, 255, np.uint8)
    whole = fletcher32(data)
    monkeypatch.setattr(codecs, "_SUM_WORDS", 7)
    assert fletcher32(data) == whole == checksum(data.tobytes())


@pytest.mark.parametrize(
    ("which", "stored"),
    [
        ((DEFLATE,), zlib.compress(b"x" * 15)),
        ((DEFLATE,), zlib.compress(b"x" * 17)),
        ((DEFLATE,), zlib.compress(b"x" * 16)[:-6]),
        ((DEFLATE,), b"rubbish"),
        ((), b"x" * 15),
        ((FLETCHER32,), b"x" * 16 + b"\0\0\0\0"),
        ((FLETCHER32,), b"xy"),
    ],
)
def test_what_does_not_decode_to_exactly_a_chunk_is_refused(which, stored):
    with pytest.raises(CorruptError):
        FilterPipeline(tuple(Filter(w) for w in which), 16).decode(np.frombuffer(stored, np.uint8), 0)


THESE = ("read_direct_chunk", "write_direct_chunk")


@pytest.mark.parametrize(
    "call",
    [lambda dataset: codecs.read_chunk(dataset, (0,)), lambda dataset: codecs.write_chunk(dataset, (0,), 0, b"")],
)
def test_no_other_thread_can_be_in_libhdf5_meanwhile(call):
    """On h5py 3.13, ``read_direct_chunk`` gives the GIL up inside libhdf5 without h5py's lock: 1. A thread calls it.
    2. Another reads a dataset. 3. Both change libhdf5's stack of contexts, and one fails: "no VOL object wrap context?"
    """
    free = []

    def try_to_enter():
        if taken := phil.acquire(blocking=False):
            phil.release()
        return taken

    def inside(*_):
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            free.append(other.submit(try_to_enter).result())
        return 0, b""

    call(types.SimpleNamespace(id=types.SimpleNamespace(**dict.fromkeys(THESE, inside))))
    assert free == [False]


def test_nothing_else_calls_h5pys_functions():
    folder = Path(lit_async_data.__file__).parent
    calling = [path for path in folder.rglob("*.py") if any(f".{name}(" in path.read_text() for name in THESE)]
    assert calling == [Path(codecs.__file__)]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_chunk_is_found_without_being_read(tmp_path, options):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("data", (20, 6), "i4", chunks=(4, 6), **options)
        dataset[4:8] = 1
        assert [codecs.is_found(dataset, (row, 0)) for row in range(0, 20, 4)] == [False, True, False, False, False]


hdf5plugin = pytest.importorskip("hdf5plugin", reason="writes what these tests read")
BZIP2 = dict(hdf5plugin.BZip2())
VALUES = np.arange(12 * 150, dtype="i2").reshape(12, 150)


def test_filters_of_plugins_are_read_by_h5py_with_a_warning(h5, caplog):
    path = h5(data={"data": VALUES, "chunks": (1, 150), **BZIP2})
    with caplog.at_level(logging.DEBUG, logger="lit_async_data"):
        check(path, {"x": "data"}, reading="locked")
    assert all("filters that only libhdf5 decodes" in said for said in caplog.messages)
    assert caplog.messages


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (hdf5plugin.Blosc2(), "blosc2 (32026)"),
        ({**hdf5plugin.LZ4(), "maxshape": (12, None)}, "HDF5 lz4 filter (32004)"),  # its index is wrong
    ],
)
def test_datasets_that_need_a_missing_plugin_are_refused_with_its_name(h5, options, name, without_plugins):
    path = h5(data={"data": VALUES, "chunks": (1, 150), **options})
    without_plugins()
    refused(FormatError, [f"filter {name}; hdf5plugin does not have it: set HDF5_PLUGIN_PATH"], path, ["data"])


WANT = r"{}:/{}: cannot be decoded without the HDF5 filter bzip2 \(307\); .*HDF5_PLUGIN_PATH"


@pytest.fixture
def compressed(h5):
    """Datasets of all uses, which only a plugin decodes."""
    rows, short = {"data": np.arange(8), "chunks": (4,), **BZIP2}, {"data": np.arange(3), "chunks": (3,), **BZIP2}
    return h5(**{"x": np.ones((8, 2)), "rows": rows, "group/offsets": short, "group/values": np.zeros(2)})


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("rows", lambda path: HDF5Source(path, ["rows"])),
        ("rows", lambda path: HDF5Source(path, ["x"], rows="rows")),
        ("rows", lambda path: HDF5Source(path, ["x"]).column("rows")),
        ("group/offsets", lambda path: HDF5Source(path, ["group"])),
    ],
    ids=["field", "rows", "column", "offsets"],
)
def test_whatever_needs_a_missing_filter_names_it(compressed, name, build, without_plugins):
    without_plugins()
    with pytest.raises(FormatError, match=WANT.format(compressed, name)):
        build(compressed)


def test_a_filter_that_only_the_process_that_reads_lacks_is_no_damage(compressed, without_plugins):
    source = HDF5Source(compressed, {"x": "rows"})
    without_plugins()
    with pytest.raises(FormatError, match=WANT.format(compressed, "rows")) as caught:
        source.read_into(np.array([5]), {"x": np.empty(1, "i8")})
    assert (caught.value.file, caught.value.dataset) == (compressed, "rows")


def test_nothing_has_to_be_imported_for_filters_of_hdf5plugin(compressed):
    program = f"""
import numpy as np, sys
from lit_async_data import HDF5Source
source, out = HDF5Source({compressed!r}, ["rows"], rows="rows"), np.empty(8, "i8")
source.read_into(np.arange(8), {{"rows": out}})
assert out.tolist() == list(range(8))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_hdf5plugin_the_advice_is_to_install_it(compressed, monkeypatch, without_plugins):
    without_plugins()
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    refused(FormatError, ["pip install hdf5plugin; or set HDF5_PLUGIN_PATH"], compressed, ["rows"])
