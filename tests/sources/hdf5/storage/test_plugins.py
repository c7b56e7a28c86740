"""Filters of plugins: libhdf5 decodes with those it has, and an error names what it lacks and what to do."""

import logging
import subprocess
import sys

import h5py
import numpy as np
import pytest
from support.sources.oracle import check

from lit_async_data import Field, FormatError, HDF5Source

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
        (hdf5plugin.Blosc2(), r"blosc2 \(32026\)"),
        ({**hdf5plugin.LZ4(), "maxshape": (12, None)}, r"HDF5 lz4 filter \(32004\)"),  # its index is wrong
    ],
)
def test_datasets_that_need_a_missing_plugin_are_refused_with_its_name(h5, options, name, without_plugins):
    path = h5(data={"data": VALUES, "chunks": (1, 150), **options})
    without_plugins()
    with pytest.raises(FormatError, match=rf"filter {name}; hdf5plugin does not have it: set HDF5_PLUGIN_PATH"):
        HDF5Source(path, ["data"])


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
        ("rows", lambda path: HDF5Source(path, {"x": Field("rows", lookup="rows")})),
        ("rows", lambda path: HDF5Source(path, ["x"]).column("rows")),
        ("group/offsets", lambda path: HDF5Source(path, ["group"])),
    ],
    ids=["field", "rows", "lookup", "column", "offsets"],
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


def test_a_virtual_dataset_names_the_filter_that_its_parts_lack(compressed, tmp_path, without_plugins):
    layout = h5py.VirtualLayout((8,), "i8")
    layout[:] = h5py.VirtualSource(compressed, "rows", (8,))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("y", layout)
    without_plugins()
    with pytest.raises(FormatError, match=WANT.format(compressed, "rows")):
        HDF5Source(tmp_path / "virtual.h5", ["y"], allow_external=True)


def test_nothing_has_to_be_imported_for_filters_of_hdf5plugin(compressed):
    program = f"""
import numpy as np, sys
from lit_async_data import Field, FormatError, HDF5Source
source, out = HDF5Source({compressed!r}, ["rows"], rows="rows"), np.empty(8, "i8")
source.read_into(np.arange(8), {{"rows": out}})
assert out.tolist() == list(range(8))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_hdf5plugin_the_advice_is_to_install_it(compressed, monkeypatch, without_plugins):
    without_plugins()
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(FormatError, match="pip install hdf5plugin, which is imported where it is needed"):
        HDF5Source(compressed, ["rows"])
