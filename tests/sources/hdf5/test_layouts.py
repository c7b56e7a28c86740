"""Storage of HDF5 that the matrix cannot express: odd indexes, files that have lived, links, and what is refused."""

import ctypes
import tempfile

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.files.hdf5 import (
    EARLY,
    INCREMENTAL,
    LATE,
    LIBVERS,
    PIPELINE,
    STORAGES,
    create,
    libhdf5,
    needs_libhdf5,
    numbered,
    stored_as,
)
from support.sources import oracle
from support.sources.oracle import read

from lit_async_data import HDF5Source
from lit_async_data.errors import SourceError

pytestmark = pytest.mark.usefixtures("no_extra_codecs")
SHAPE = (13, 7, 5)


def check(path, name, layout=None, reading=None):
    oracle.check(path, {"x": name}, layout=layout, reading=reading)


@pytest.mark.parametrize("left_out", range(8))
@pytest.mark.parametrize("chunks", [(4, 3, 5), (1, 7, 5)], ids=str)
def test_single_chunks_may_skip_a_filter(new, path, left_out, chunks):
    used = [which for number, which in enumerate(PIPELINE) if not left_out >> number & 1]
    with new() as file:
        dataset = create(file, "data", SHAPE, "i4", chunks=chunks, filters=PIPELINE)
        dataset[...] = numbered(SHAPE)
        other = create(file, "other", SHAPE, "i4", chunks=chunks, filters=used)
        other[...] = numbered(SHAPE) + 1000
        for corner in ((0, 0, 0), (4, 0, 0), (12, 0, 0)):
            dataset.id.write_direct_chunk(corner, other.id.read_direct_chunk(corner)[1], filter_mask=left_out)
        assert dataset[0, 0, 0] == 1000
    for layout in ("NHW", "HWN"):
        check(path, "data", layout, "decoded")


BTREE_1, SINGLE, IMPLICIT, FIXED_ARRAY, EXTENSIBLE_ARRAY, BTREE_2 = range(6)
INDEXES = {
    "v1 B-tree": (BTREE_1, "earliest", {}),
    "v1 B-tree, growing": (BTREE_1, "earliest", {"maxshape": (None, None, 5)}),
    "single chunk": (SINGLE, "v110", {"chunks": SHAPE}),
    "single filtered chunk": (SINGLE, "v110", {"chunks": SHAPE, "filters": ["gzip"]}),
    "implicit": (IMPLICIT, "v110", {"alloc": EARLY}),
    "implicit, may grow": (IMPLICIT, "v110", {"alloc": EARLY, "maxshape": (20, 9, 9)}),
    "fixed array": (FIXED_ARRAY, "v110", {}),
    "fixed array, may grow": (FIXED_ARRAY, "v110", {"maxshape": (20, 9, 9)}),
    "filtered fixed array": (FIXED_ARRAY, "v110", {"filters": ["gzip"]}),
    "extensible array": (EXTENSIBLE_ARRAY, "v110", {"maxshape": (None, 7, 5)}),
    "filtered extensible array": (EXTENSIBLE_ARRAY, "v110", {"maxshape": (None, 9, 5), "filters": ["gzip"]}),
    "v2 B-tree": (BTREE_2, "v110", {"maxshape": (None, None, 5)}),
    "filtered v2 B-tree": (BTREE_2, "v110", {"maxshape": (None, None, None), "filters": ["shuffle", "gzip"]}),
}


def index_type(dataset):
    found = ctypes.c_int()
    assert libhdf5().H5Dget_chunk_index_type(dataset.id.id, ctypes.byref(found)) >= 0
    return found.value


@needs_libhdf5
@pytest.mark.parametrize("kind", INDEXES)
def test_every_kind_of_index_is_followed(new, path, kind):
    wanted, libver, arguments = INDEXES[kind]
    with new(libver=(libver, "v110")) as file:
        dataset = create(file, "data", SHAPE, "i4", **{"chunks": (4, 3, 2), **arguments})
        dataset[...] = numbered(SHAPE)
        assert index_type(dataset) == wanted
    for layout in ("NHW", "HNW", "HWN"):
        check(path, "data", layout, "decoded")


@needs_libhdf5
@pytest.mark.parametrize("kind", [name for name in INDEXES if "single" not in name])
def test_an_index_may_have_many_levels_and_lie_behind_a_user_block(new, path, kind):
    wanted, libver, arguments = INDEXES[kind]
    arguments = dict(arguments)
    if "maxshape" in arguments:
        arguments["maxshape"] = tuple(limit and {20: 2000, 9: 4, 7: 3, 5: 2}[limit] for limit in arguments["maxshape"])
    shape = (600, 3, 2)
    with new(libver=(libver, "v110"), userblock_size=1024) as file:
        dataset = create(file, "data", shape, "u2", **{"chunks": (1, 2, 2), **arguments})
        dataset[...] = numbered(shape, "u2")
        assert index_type(dataset) == wanted
    check(path, "data", reading="decoded")


@needs_libhdf5
def test_a_dataset_with_no_values_at_all_is_an_error_as_in_h5py(new, path):
    with new() as file:
        create(file, "data", (9, 3), "i4", undefined_fill=True, alloc=LATE)
    source = HDF5Source(path, {"x": "data"})
    with pytest.raises(SourceError, match="data"):
        read(source, [1])


@st.composite
def lives(draw):
    """A dataset that is resized, and what happens to it: a new extent, then some values."""
    rank = draw(st.integers(1, 3))
    chunks = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    maxshape = tuple(draw(st.sampled_from([None, None, 9])) for _ in range(rank))
    extents = draw(st.lists(st.tuples(*[st.integers(1, 9)] * rank), min_size=1, max_size=5))
    filters = draw(st.sampled_from([[], ["gzip"], ["shuffle", "gzip"], ["fletcher32"], ["lzf"]]))
    properties = {"fill": draw(st.sampled_from([None, 3])), "alloc": draw(st.sampled_from([EARLY, LATE, INCREMENTAL]))}
    pages = draw(st.sampled_from([{}, {}, {"fs_strategy": "page", "fs_page_size": 512, "libver": ("v110", "v110")}]))
    options = {"userblock_size": draw(st.sampled_from([0, 512])), "libver": draw(st.sampled_from(LIBVERS)), **pages}
    return {"chunks": chunks, "maxshape": maxshape, "filters": filters, **properties}, extents, options


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.integers(0, 2))
def test_a_dataset_that_grew_and_shrank_is_what_it_is_now(life, place):
    """Except with unfiltered edge chunks: libhdf5 2.0 cannot read its own result then."""
    arguments, extents, options = life
    letters = list("AB"[: len(extents[0]) - 1])
    letters.insert(place, "N")
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/x.h5"
        with h5py.File(path, "w", **options) as file:
            dataset = create(file, "data", extents[0], "i4", **arguments)
            for number, extent in enumerate(extents):
                dataset.resize(extent)
                part = tuple(slice(0, max(1, size - number)) for size in extent)
                dataset[part] = numbered(extent)[part] + 1000 * number
        check(path, "data", "".join(letters))


@pytest.mark.parametrize("lengths", [[1, 7, 2, 5, 3, 4, 3], [1] * 12], ids=str)
@pytest.mark.parametrize("layout", ["NHW", "HNW", "HWN"])
def test_files_of_many_kinds_and_lengths_are_one_dataset_in_natural_order(tmp_path, lengths, layout):
    """Each is stored in another way; sample n of them all is n + a place."""
    first = 0
    for number, count in enumerate(lengths):
        values = np.arange(first, first + count).reshape(-1, 1, 1) * 10 + numbered((3, 2))
        values = np.moveaxis(values, 0, layout.index("N")).astype(["i4", ">i4"][number % 2])
        arguments, _ = stored_as(list(STORAGES)[number % len(STORAGES)], values.shape)
        options = {"libver": LIBVERS[number % len(LIBVERS)], "userblock_size": 512 * (number % 2)}
        with h5py.File(tmp_path / f"part{number}.h5", "w", **options) as file:
            create(file, "data", dtype=values.dtype, **arguments)[...] = values
            file["labels"] = np.arange(first, first + count).astype(["u1", ">i8"][number % 2])
        first += count
    model = oracle.check(str(tmp_path / "part*.h5"), {"x": "data", "y": "labels"}, layout={"x": layout})
    assert model.values["y"].tolist() == list(range(sum(lengths)))
