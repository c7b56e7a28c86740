"""The datasets of a group: their names, and those that are read as a whole when a source is built."""

import zlib

import h5py
import numpy as np
import pytest
from support.files.hdf5 import numbered
from support.sources.oracle import check

from lit_async_data import CorruptError, Field, HDF5Source


@pytest.mark.parametrize("short", [False, True])
def test_a_short_chunk_of_a_dataset_that_is_read_whole_is_damage(tmp_path, short):
    """Rows are chosen when the source is built, by h5py: it would take memory that was never written."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(20)
        kept = file.create_dataset("kept", data=np.arange(10), chunks=(5,), compression="gzip")
        content = np.arange(5, 10).tobytes()
        kept.id.write_direct_chunk((5,), zlib.compress(content[:8] if short else content))
    if short:
        with pytest.raises(CorruptError, match=r"^rows: .*x.h5:/kept, chunk \(5,\) .*8 bytes instead of 40"):
            HDF5Source(path, ["data"], rows="kept")
    else:
        assert len(HDF5Source(path, ["data"], rows="kept")) == 10


@pytest.mark.parametrize("group", ["train", "/train", "train/", "/train/"])
def test_a_group_stands_before_the_names_of_fields_and_of_indices(h5, group):
    inside = {"x": numbered((3, 2)), "deep/y": np.arange(3), "who": [1, 0, 1], "age": [5, 6]}
    outside = {"x": numbered((9,)), "y": np.arange(50, 53), "who": [0, 0], "age": [7, 8]}
    path = h5(**outside, **{f"train/{name}": values for name, values in inside.items()})
    lookups = {"here": ("age", "who"), "root": ("/age", "who"), "far": ("/age", "/train/who")}
    fields = {key: Field(name, lookup=index) for key, (name, index) in lookups.items()}
    model = check(path, {"x": "x", "y": "deep/y", "other": "/y", **fields}, group=group)
    wanted = {"y": [0, 1, 2], "other": [50, 51, 52], "here": [6, 5, 6], "root": [8, 7, 8], "far": [8, 7, 8]}
    assert {key: model.values[key].tolist() for key in wanted} == wanted
    assert model.parts == [(path, "/train", 3)]
