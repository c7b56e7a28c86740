"""Stored chunks are read and written under h5py's lock, which h5py 3.15 and before do not take for them."""

import concurrent.futures
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py._objects import phil
from support.files.hdf5 import WAYS

import lit_async_data
from lit_async_data.sources.hdf5.storage import codecs
from lit_async_data.sources.hdf5.storage.codecs import is_found, read_chunk, write_chunk

THESE = ("read_direct_chunk", "write_direct_chunk")


def test_a_chunk_is_copied_with_its_mask(tmp_path):
    values = np.arange(12).reshape(6, 2)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        first, second = (file.create_dataset(name, (6, 2), "i8", chunks=(3, 2), compression="gzip") for name in "ab")
        first.id.write_direct_chunk((0, 0), values[:3].tobytes(), filter_mask=1)
        first[3:] = values[3:]
        assert read_chunk(first, (0, 0)) == (1, values[:3].tobytes())
        for row in (0, 3):
            write_chunk(second, (row, 0), *read_chunk(first, (row, 0)))
        assert (second[...] == values).all()


@pytest.mark.parametrize(
    "call", [lambda dataset: read_chunk(dataset, (0,)), lambda dataset: write_chunk(dataset, (0,), 0, b"")]
)
def test_no_other_thread_can_be_in_libhdf5_meanwhile(call):
    """On h5py 3.13, without the lock:

    1. A thread calls ``read_direct_chunk``, which gives the GIL up inside libhdf5.
    2. Another thread reads a dataset, takes h5py's lock, which is free, and enters libhdf5.
    3. Both change libhdf5's stack of contexts: one of them fails with "no VOL object wrap context?".
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


ROWS, OPENINGS = 20, 2


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_chunk_is_found_without_being_read(tmp_path, options):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("data", (ROWS, 6), "i4", chunks=(4, 6), **options)
        dataset[4:8] = 1
        assert [is_found(dataset, (row, 0)) for row in range(0, ROWS, 4)] == [False, True, False, False, False]
