"""Fixtures of the tests of HDF5 files."""

import functools
import sys

import h5py
import pytest

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
