"""What libraries keep for a whole process holds in a reader process, too."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from PIL import Image, ImageFile

from lit_async_data import AsyncLoader, DatasetSource, HDF5Source
from lit_async_data.engine.processes.shared_memory import adopt, environment, settings_here

pytestmark = pytest.mark.processes
hdf5plugin = pytest.importorskip("hdf5plugin", reason="writes what these tests read")


def in_process(source, **hooks):
    options = {"batch_size": 4, "shuffle": False, "workers": 1, "worker_kind": "process"}
    with AsyncLoader(source, options, **hooks) as loader:
        return list(loader)


@pytest.mark.parametrize("codec", [hdf5plugin.BZip2(), hdf5plugin.Blosc2(), hdf5plugin.Zfp(reversible=True)], ids=repr)
def test_what_only_libhdf5_decodes_is_read_in_a_reader_process(h5, codec):
    values = np.arange(96, dtype="f4").reshape(8, 12)
    path = h5(data={"data": values, "chunks": (2, 12), **codec})
    read = in_process(HDF5Source(path, {"data": "data"}))
    assert (np.concatenate([batch["data"] for batch in read]) == values).all()


class Settings:
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return {
            "truncated": bool(ImageFile.LOAD_TRUNCATED_IMAGES),
            "pixels": Image.MAX_IMAGE_PIXELS,
            "complex": h5py.get_config().complex_names == ("real", "imag"),
            "bzip2": bool(h5py.h5z.filter_avail(307)),
            "variable": int(os.environ.get("SET_WHILE_IT_RAN", "-1")),
            "here": os.getpid(),
        }


def test_settings_of_pillow_and_h5py_and_the_environment_are_those_of_the_training_process(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12345)
    monkeypatch.setattr(h5py.get_config(), "complex_names", ("real", "imag"))
    monkeypatch.setenv("SET_WHILE_IT_RAN", "7")
    (batch,) = in_process(DatasetSource(Settings()))
    found = {key: value[0].item() for key, value in batch.items()}
    assert found.pop("here") != os.getpid()
    assert found == {"truncated": True, "pixels": 12345, "complex": True, "bzip2": True, "variable": 7}


def test_a_process_that_goes_on_takes_back_what_was_taken_back(monkeypatch):
    usual = settings_here(filters=True)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    adopt(*usual)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_folders_of_plugins_are_passed_on(tmp_path):
    h5py.h5pl.append(os.fsencode(tmp_path))
    try:
        listed = "import h5py.h5pl as pl; print([pl.get(n).decode() for n in range(pl.size())])"
        found = subprocess.run([sys.executable, "-c", listed], env=environment(), stdout=subprocess.PIPE, check=True)
    finally:
        h5py.h5pl.remove(h5py.h5pl.size() - 1)
    assert str(tmp_path) in found.stdout.decode()


def test_a_process_without_h5py_and_pillow_imports_neither():
    program = """
import sys
from lit_async_data.engine.processes.shared_memory import adopt, environment, settings_here
before = set(sys.modules)
environment(), adopt(*settings_here(filters=True))
assert not {"h5py", "PIL"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
