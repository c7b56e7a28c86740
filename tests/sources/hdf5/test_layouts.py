"""Storage of HDF5 that the matrix cannot express: skipped filters, files that have lived, files of many kinds."""

import tempfile

import h5py
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.files.hdf5 import EARLY, INCREMENTAL, LATE, LIBVERS, PIPELINE, create, numbered
from support.sources.oracle import check

pytestmark = pytest.mark.usefixtures("no_extra_codecs")
SHAPE = (13, 7, 5)


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
        check(path, {"x": "data"}, layout=layout, reading="decoded")


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
        check(path, {"x": "data"}, layout="".join(letters))
