"""Bugs that show only in combinations of fields, loaders, sources and devices."""

import contextlib
import functools

import h5py
import numpy as np
import pytest
from support.sources.parts import parts_of

from lit_async_data import AsyncLoader, ConcatSource, Field, HDF5Source, SubsetSource, split
from lit_async_data.engine.device.queues import widened
from lit_async_data.errors import ConfigError, CorruptError, FormatError
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


def test_rows_that_are_there_several_times_are_not_split_by_sample(h5):
    with contextlib.closing(HDF5Source(h5(x=np.arange(30.0)), ["x"], rows=np.repeat(np.arange(30), 3))) as source:
        assert source.chunks.overlap == 2
        with pytest.raises(ConfigError, match="would share values"):
            split(source, {"train": 0.5, "val": 0.5})


def test_a_file_that_is_there_twice_with_other_rows_is_not_split(h5):
    path = h5(x=np.arange(30.0))
    sources = [HDF5Source(path, ["x"], rows=np.arange(0, 30, 2)), HDF5Source(path, ["x"])]
    with contextlib.closing(ConcatSource(sources)) as two, pytest.raises(ConfigError, match="twice with different"):
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


def test_a_damaged_chunk_of_sparse_rows_names_a_sample_that_takes_it(tmp_path):
    path = str(tmp_path / "x.h5ad")
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (300, 20)
        group.create_dataset("data", data=np.ones(3000, "f4"), chunks=(500,), **GZIP)
        group["indices"] = np.tile(np.arange(10), 300)
        group["indptr"] = np.arange(0, 3001, 10)
        group["data"].id.write_direct_chunk((2000,), b"no gzip")
    source = HDF5Source(path, {"x": "X"})
    with pytest.raises(CorruptError, match=r"chunk \(2000,\)") as caught:
        source.read_into(np.array([3, 205]), {"x": np.empty((2, 20), "f4")})
    source.close()
    assert caught.value.sample_id is None or caught.value.sample_id == 205


@pytest.mark.usefixtures("one_batch_per_slot")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_validation_on_the_same_source_costs_training_one_group_at_most(h5, decodings, workers):
    path = h5(data={"data": numbered((1200, 2000)), "chunks": (10, 2000), **GZIP})
    with contextlib.closing(HDF5Source(path, {"x": "data"})) as source:
        train, val = SubsetSource(source, np.arange(800)), SubsetSource(source, np.arange(800, 1200))
        options = {"batch_size": 4, "workers": workers, "shuffle": "chunk", "shuffle_chunks": 8}
        with AsyncLoader(train, options) as training, AsyncLoader(val, options | {"shuffle": "none"}) as evaluation:
            for _ in range(4):
                decodings.clear()
                assert sum(len(batch["x"]) for batch in training) == 800
                assert sum(len(batch["x"]) for batch in evaluation) == 400
                # 80 and 40 chunks; a group that validation has pushed out, and what was read ahead of either.
                assert len(decodings) <= 120 + 3 * 8 + 16


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


def test_windows_of_plain_data_need_no_order_of_chunks(h5):
    with contextlib.closing(HDF5Source(h5(x=np.zeros(3000, "f4")), {"x": Field("x", window=(0, 50))})) as source:
        assert source.chunks.runs == ()
        assert source.chunks.chunks_per_run == 1


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


def test_what_is_unpacked_to_float64_is_computed_in_float64(h5):
    path = h5(x=np.array([1234, 77], "i2"))
    with h5py.File(path, "r+") as file:
        file["x"].attrs["scale_factor"], file["x"].attrs["add_offset"] = 0.01, 273.15
    with contextlib.closing(HDF5Source(path, {"x": Field("x", mask_and_scale=True, dtype="float64")})) as source:
        out = np.empty(2)
        source.read_into(np.arange(2), {"x": out})
    assert out.tolist() == (np.array([1234, 77]) * 0.01 + 273.15).tolist()


def test_a_cache_that_comes_later_is_used_in_full(h5, decodings):
    path = h5(data={"data": numbered((400, 100)), "chunks": (10, 100), **GZIP})
    with contextlib.closing(HDF5Source(path, {"x": "data"})) as source:
        loader = functools.partial(AsyncLoader, source)
        small, large = ({"batch_size": 10, "workers": 0, "cache_bytes": size} for size in (2000, 40_000))
        with loader(small | {"shuffle": "none"}) as first, loader(large | {"shuffle": "global"}) as second:
            next(first)
            for _ in range(2):
                decodings.clear()
                assert len(list(second)) == 40
            assert decodings == []


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
