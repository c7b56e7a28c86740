"""Fixtures of the tests of HDF5 files."""

import functools
import sys

import h5py
import numpy as np
import pytest

from lit_async_data.sources import local_files
from lit_async_data.sources.images import formats


@pytest.fixture
def no_extra_codecs(monkeypatch):
    """lzf stands for filters that h5py must decode; the extra decodes it, as `test_extra_codecs` shows."""
    monkeypatch.setitem(sys.modules, "imagecodecs", None)
    monkeypatch.setattr(formats, "_imagecodecs", lambda: None)  # keeps what it finds for the whole process


@pytest.fixture
def path(tmp_path):
    """A file to be written."""
    return str(tmp_path / "x.h5")


@pytest.fixture
def new(path):
    """That file, to be filled: ``with new() as file``."""
    return functools.partial(h5py.File, path, "w", libver=("earliest", "v110"))


@pytest.fixture
def patients(h5):
    """Writes groups patient_1, patient_10, patient_2, in which every value encodes its place."""

    def written(name="x.h5", counts={1: 4, 2: 5, 10: 3}, prefix=""):  # noqa: B006  # it is not changed
        datasets = {}
        for number, count in counts.items():
            values, options = 100 * number + np.arange(count), {"chunks": (min(2, count), 3), "compression": "gzip"}
            signal = np.repeat(values[:, None], 3, axis=1).astype("f4")
            datasets[f"{prefix}patient_{number}/label"] = values
            datasets[f"{prefix}patient_{number}/signal"] = {"data": signal, **options}
        return h5(name, **datasets)

    return written


@pytest.fixture
def large(h5):
    """Rows that are read by ``pread``."""
    return h5(data=np.arange(4 * 2**17, dtype="i4").reshape(4, -1))


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that were waited before a read was repeated."""
    pauses = []
    monkeypatch.setattr(local_files.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def without_plugins(monkeypatch):
    """To be called when the file is written."""
    return lambda: monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: number < 256)
