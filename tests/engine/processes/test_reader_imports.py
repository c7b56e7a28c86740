"""A reader process imports only what its source needs: torch takes a second, h5py a tenth of one."""

import contextlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lit_async_data import AsyncLoader, Field, HDF5Source, ManifestSource, SubsetSource

pytestmark = pytest.mark.processes
ROWS = 64


@pytest.fixture
def file(h5):
    images = np.random.default_rng(0).integers(0, 9, (ROWS, 6, 20), np.uint8)
    chunked = {"data": images, "chunks": (8, 6, 20)}
    packed = {"gzip": chunked | {"compression": "gzip"}, "nbit": chunked | {"scaleoffset": 0}}
    return h5(contiguous=images, chunked=chunked, **packed)


def libraries_of(source, options=()):
    """Which of the libraries that are slow to import a reader process has loaded after the first batches."""
    options = {"batch_size": 8, "worker_kind": "process", **dict(options)}
    with contextlib.closing(source), AsyncLoader(source, options) as loader:
        next(loader)  # may be read by a thread of this process
        batch = next(loader)
        maps = Path(f"/proc/{loader._run.engine.feed.pipeline._readers[0].channel.pid}/maps").read_text()
    if "y" in batch:
        assert (batch["x"].flatten(1) == batch["y"][:, None]).all()
    return {name for name in ("libtorch", "h5py") if f"/{name}" in maps}


@pytest.mark.parametrize("window", [None, (0, 4)])
@pytest.mark.parametrize(
    ("name", "shuffle", "needed"),
    [("contiguous", "global", set()), ("chunked", False, set()), ("gzip", "chunk", set()), ("nbit", False, {"h5py"})],
)
def test_hdf5_needs_h5py_only_where_libhdf5_decodes(file, name, shuffle, needed, window):
    source = HDF5Source(file, {"x": Field(name, window=window)})
    assert libraries_of(SubsetSource(source, np.arange(32)), {"shuffle": shuffle}) == needed


def test_a_reader_process_imports_nothing_that_only_builds_orders():
    program = "import lit_async_data.engine.processes.reader_server, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in found if "lit_async_data.sources.composed" in name}


def table_of(folder, names):
    table = folder / "t.csv"
    table.write_text("path,y\n" + "".join(f"{name},{number}\n" for number, name in enumerate(names)))
    return table


def test_arrays_of_a_table_need_neither_torch_nor_h5py(tmp_path):
    for number in range(16):
        np.save(tmp_path / f"{number}.npy", np.full((3, 4), number))
    source = ManifestSource(table_of(tmp_path, [f"{n}.npy" for n in range(16)]), {"x": "path", "y": "y"})
    assert libraries_of(source) == set()


@pytest.mark.parametrize(("size", "needed"), [(32, set()), (16, {"libtorch"})], ids=["as stored", "resized"])
def test_images_need_torch_only_to_be_resized(tmp_path, size, needed):
    image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
    pytest.importorskip("simplejpeg", reason="pip install 'lit-async-data[manifest]'")
    for number in range(16):
        image.fromarray(np.full((32, 32, 3), number, np.uint8)).save(tmp_path / f"{number}.jpg")
    column = {"name": "path", "image_size": size}
    source = ManifestSource(table_of(tmp_path, [f"{n}.jpg" for n in range(16)]), {"x": column, "y": "y"})
    assert libraries_of(source) == needed
