"""Bugs that show only in combinations of fields, loaders, sources and devices."""

import contextlib

import h5py
import numpy as np
import pytest
from support.sources.parts import parts_of

from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, split
from lit_async_data.engine.device.queues import widened
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.sources.hdf5.readers.slabs import IndexedSlabDecoder

GZIP = {"compression": "gzip", "compression_opts": 1}


def numbered(shape, dtype="u1"):
    """Rows that differ from each other."""
    rows = np.random.default_rng(0).integers(0, 200, shape)
    return rows.astype(dtype)


@pytest.mark.parametrize("window", [(0, 4), (-4, 0), 1, -1], ids=str)
def test_a_window_of_another_field_than_the_widest_costs_no_sample(h5, window):
    frames = {"data": numbered((200, 64)), "chunks": (10, 64), **GZIP}
    path = h5(frame=frames, action=np.arange(200, dtype="f4"))
    with contextlib.closing(HDF5Source(path, {"x": "frame", "a": Field("action", window=window)})) as source:
        assert ChunkExtents(source.chunks.runs).length == len(source)
        options = {"batch_size": 16, "shuffle": "chunk", "shuffle_chunks": 4, "return_indices": True}
        with AsyncLoader(source, options) as loader:
            seen = np.concatenate([batch["index"] for batch in loader])
    assert sorted(seen.tolist()) == list(range(len(source)))


@pytest.mark.parametrize(("stored", "to"), [("f4", "int64"), ("i1", "uint16"), ("i1", "uint64")])
def test_a_cast_that_may_lose_a_value_is_not_left_to_the_device(h5, stored, to):
    with contextlib.closing(HDF5Source(h5(y=np.array([0, 1, -1], stored)), {"y": Field("y", dtype=to)})) as source:
        assert source.spec["y"].narrow is None
        assert widened(source.spec) is None


def test_samples_that_share_rows_are_not_split(h5):
    path = h5(x=np.arange(30.0))
    with contextlib.closing(HDF5Source(path, ["x"], rows=np.repeat(np.arange(30), 3))) as source:
        assert source.chunks.overlap == 2
        with pytest.raises(ConfigError, match="would share values"):
            split(source, {"train": 0.5, "val": 0.5})
    twice = [HDF5Source(path, ["x"], rows=np.arange(0, 30, 2)), HDF5Source(path, ["x"])]
    with contextlib.closing(ConcatSource(twice)) as two, pytest.raises(ConfigError, match="twice with different"):
        split(two, {"train": 0.5, "val": 0.5})


def test_a_wrong_label_names_the_sample_that_it_belongs_to(h5):
    labels = np.zeros(1300, "u1")
    labels[600] = 7
    fields = {"x": Field("x", window=(0, 512)), "y": Field("y", classes=["no", "yes"])}
    with contextlib.closing(HDF5Source(h5(x=np.zeros(1300, "f4"), y=labels), fields)) as source:
        out = {key: np.empty((2, *field.stored_shape), field.dtype) for key, field in source.spec.fields.items()}
        with pytest.raises(FormatError, match="row 600: 7 is not one of its 2 classes") as caught:
            source.read_into(np.array([200, 600]), out)
    assert caught.value.sample_id == 600


def test_a_small_part_of_a_large_chunk_holds_no_more_than_its_rows(h5, monkeypatch):
    path = h5(data={"data": numbered((10, 100)), "chunks": (250, 100), "maxshape": (None, 100), **GZIP})
    slabs, decode = [], IndexedSlabDecoder.decode

    def decoded(decoder, number):
        slabs.append(decode(decoder, number))
        return slabs[-1]

    monkeypatch.setattr(IndexedSlabDecoder, "decode", decoded)
    with contextlib.closing(HDF5Source(path, {"x": "data"})) as source:
        source.read_into(np.arange(10), {"x": np.empty((10, 100), source.spec["x"].dtype)})
        (slab,) = slabs
        assert (slab.shape, source.memory().cacheable) == ((10, 100), 1000)
        assert slab.base is None or slab.base.nbytes == 1000


def test_what_is_looked_up_is_laid_out_too_and_held_once_for_all_groups(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["images"] = numbered((4, 6, 5, 3))
        for number in range(3):
            file[f"p{number}/which"] = np.array([3, 0, 2])
    fields = {"x": Field("/images", lookup="which")}
    with contextlib.closing(HDF5Source(path, fields, group="p*", layout={"x": "NHWC"})) as source:
        assert source.spec["x"].shape == (3, 6, 5)
        parts = parts_of(path, fields, group="p*", layout={"x": "NHWC"})
        assert len(parts) == 3
        assert len({id(part.fields["x"].conversion.table) for part in parts}) == 1
        with AsyncLoader(source, {"batch_size": 9, "shuffle": "none"}) as loader, h5py.File(path) as file:
            wanted = np.tile(file["images"][...][[3, 0, 2]], (3, 1, 1, 1)).transpose(0, 3, 1, 2)
            assert (next(loader)["x"].numpy() == wanted).all()


@pytest.mark.parametrize(("fill", "stored"), [(2**53 + 1, "i8"), (np.uint8(255), "i1")])
def test_a_fill_value_is_compared_as_it_is_stored(h5, fill, stored):
    values = np.array([2**53, 2**53 + 1] if stored == "i8" else [1, -1], stored)
    path = h5(x=values)
    with h5py.File(path, "r+") as file:
        file["x"].attrs["_FillValue"], file["x"].attrs["missing_value"] = fill, 1e20
        if stored == "i1":
            file["x"].attrs["_Unsigned"] = "true"
    with contextlib.closing(HDF5Source(path, {"x": Field("x", mask_and_scale=True)})) as source:
        out = np.empty(2, source.spec["x"].dtype)
        source.read_into(np.arange(2), {"x": out})
    assert np.isnan(out).tolist() == [False, True]


@pytest.mark.parametrize("use", ["rows", "column", "indptr", "categories"])
def test_what_is_read_beside_the_fields_is_no_link_into_another_file_either(tmp_path, use):
    other, path = str(tmp_path / "other.h5"), str(tmp_path / "x.h5")
    with h5py.File(other, "w") as file:
        file["rows"], file["categories"] = np.array([2, 0]), ["no", "yes"]
        file["indptr"] = np.array([0, 1, 2, 3])
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3.0)
        file["rows"] = h5py.ExternalLink("other.h5", "/rows")
        file.create_group("y").attrs["encoding-type"] = "categorical"
        file["y/codes"], file["y/categories"] = np.zeros(3, "i1"), h5py.ExternalLink("other.h5", "/categories")
        sparse = file.create_group("s")
        sparse.attrs["encoding-type"], sparse.attrs["shape"] = "csr_matrix", (3, 2)
        sparse["data"], sparse["indices"] = np.ones(3, "f4"), np.zeros(3, "i4")
        sparse["indptr"] = h5py.ExternalLink("other.h5", "/indptr")
    build = {
        "rows": lambda **more: HDF5Source(path, {"x": "x"}, rows="rows", **more),
        "column": lambda **more: HDF5Source(path, {"x": "x"}, **more).column("rows"),
        "indptr": lambda **more: HDF5Source(path, {"x": "s"}, **more),
        "categories": lambda **more: HDF5Source(path, {"x": "y"}, **more),
    }[use]
    with pytest.raises(FormatError, match=r"other\.h5"):
        build()
    if use != "column":  # of two values for three rows
        build(allow_external=True).close()
