"""Fixtures of the tests of bytes: large rows, pauses that take no time, and a process without plugins."""

import h5py
import numpy as np
import pytest

from lit_async_data.sources import local_files


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
