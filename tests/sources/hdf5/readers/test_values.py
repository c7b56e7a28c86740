"""Samples without a value are found when a source is built, where that takes little."""

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, Field, FormatError, HDF5Source, LoaderOptions
from lit_async_data.sources.hdf5.readers import part_reader


@pytest.fixture
def cells(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(9)
        file["y"] = np.array([0, 1, -1, 0, 1, 0, 1, 0, 1], "i1")
        file["y"].attrs["categories"] = file.create_dataset("names", data=[b"B", b"T"]).ref
        file.create_dataset("z", data=np.array([0, 1, 1, -1, 1, 0, 1, 0, 1], "i1"), chunks=(3,), fletcher32=True)
        file["z"].attrs["categories"] = file["names"].ref
    return path


def test_values_that_take_more_are_found_at_their_batch(cells, monkeypatch):
    monkeypatch.setattr(part_reader, "MOST_BYTES", 8)
    source = HDF5Source(cells, {"x": "x", "y": "y"})
    with pytest.raises(FormatError, match="y, row 2: -1 is a missing value") as caught:
        source[2]
    assert caught.value.sample_id == 2
    with AsyncLoader(source, LoaderOptions(batch_size=3, shuffle="none", on_error="skip")) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 1], [3, 4, 5], [6, 7, 8]]
    assert HDF5Source(cells, {"x": "x", "y": Field("y", null="drop")}).column("x").tolist() == [0, 1, *range(3, 9)]


def test_samples_that_are_left_out_may_lack_a_value(cells):
    fields = {"x": "x", "y": "y", "z": "z"}
    assert HDF5Source(cells, fields, exclude=[2, 3]).column("x").tolist() == [0, 1, *range(4, 9)]
    dropping = {**fields, "y": Field("y", null="drop"), "z": Field("z", null="drop")}
    assert HDF5Source(cells, dropping, exclude=[2]).column("x").tolist() == [0, 1, *range(5, 9)]
    with pytest.raises(FormatError, match="z, row 3: -1 is a missing value"):
        HDF5Source(cells, fields, exclude=[2])
    with pytest.raises(FormatError, match="no sample is left that has a value of each field"):
        HDF5Source(cells, {"y": Field("y", null="drop")}, rows=[2])


def test_a_chunk_that_cannot_be_read_is_left_for_its_batch(cells):
    with h5py.File(cells) as file:
        offset = file["z"].id.get_chunk_info(0).byte_offset
    with open(cells, "r+b") as file:
        file.seek(offset)
        file.write(b"\1\1\0")
    with pytest.raises(FormatError, match="z, row 3: -1 is a missing value"):
        HDF5Source(cells, {"z": Field("z", classes=["T", "B"])})
    assert HDF5Source(cells, {"x": "x", "z": Field("z", null="drop")}).column("x").tolist() == [0, 1, 2, *range(4, 9)]
    source = HDF5Source(cells, {"x": "x", "z": Field("z", classes=["T", "B"])}, rows=[0, 5])
    assert source[1]["z"] == 1
    with pytest.raises(Exception, match="z"):
        source[0]
