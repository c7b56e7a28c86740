"""What libhdf5 lists and does not find is damage in every opening; what an index might read wrongly is left to h5py."""

import contextlib
import ctypes
from pathlib import Path

import h5py
import numpy as np
import pytest
from support.files.hdf5 import EARLY, WAYS, create, libhdf5, needs_libhdf5, numbered
from support.sources.oracle import check, read_from

from lit_async_data import CorruptError, Field, HDF5Source
from lit_async_data.sources.hdf5.index import index
from lit_async_data.sources.hdf5.storage.codecs import is_found

ROWS, OPENINGS, SHAPE = 20, 2, (13, 7, 5)
VALUES = np.arange(1, ROWS * 6 + 1, dtype="i4").reshape(ROWS, 6)


def written(path, *, row_numbers=False, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("data", data=VALUES, chunks=(4, 6), **options)
        if row_numbers:
            file.create_dataset("wanted", data=np.arange(1, ROWS), chunks=(4,))
    return Path(path).read_bytes()


def agree(path, name):
    """Whether libhdf5 finds the chunks that it lists and no others; None if it cannot list them."""
    with h5py.File(path) as file:
        dataset, listed = file[name], []
        try:
            dataset.id.chunk_iter(lambda info: listed.append(info.chunk_offset))
            corners = [(row, 0)[: dataset.ndim] for row in range(0, ROWS, 4)]
            return {corner for corner in corners if is_found(dataset, corner)} == set(listed)
        except (OSError, RuntimeError):
            return None


def damaged(content, name, path):
    """Writes the file again and again, with other bytes in the node of a B-tree; yields where they disagree."""
    node = content.rindex(b"TREE")  # of the dataset written last
    for at in range(node, node + 24 + 6 * 40):
        Path(path).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        if agree(path, name) is False:
            yield at


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_chunk_that_is_listed_and_not_found_is_damage_or_read_right(tmp_path, options):
    path = str(tmp_path / "x.h5")
    errors = found = 0
    for place in damaged(written(path, **options), "data", path):
        found += 1
        for _ in range(OPENINGS):
            try:
                assert (read_from(path, {"data": "data"})["data"] == VALUES).all(), place
            except CorruptError as error:
                errors += (error.file, error.dataset) == (path, "data")
    assert found > 9
    assert errors > OPENINGS * found / 2


@pytest.mark.parametrize(
    ("fields", "options"),
    [({"x": "data"}, {"rows": "wanted"}), ({"x": Field("data", lookup="wanted")}, {})],
    ids=["rows", "lookup"],
)
def test_row_numbers_are_not_zeros_either(tmp_path, fields, options):
    path = str(tmp_path / "x.h5")
    content = written(path, row_numbers=True)
    chosen = read_from(path, fields, **options)["x"]
    for place in damaged(content, "wanted", path):
        with contextlib.suppress(CorruptError):
            assert (read_from(path, fields, **options)["x"] == chosen).all(), place


def test_a_dataset_of_too_many_chunks_is_left_to_h5py(h5, monkeypatch):
    monkeypatch.setattr(index, "MOST_CHUNKS", 4)
    assert HDF5Source(h5(data={"data": VALUES, "chunks": (4, 6)}), ["data"]).chunks.reading == "locked"


FILTERS = [["gzip"], ["shuffle", "gzip"], ["gzip", "fletcher32"], ["lzf"], ["shuffle"], ["fletcher32", "shuffle"]]
FILTERS.append(["fletcher32"])
CHUNKS = [(4, 7, 5), (4, 3, 2), (13, 7, 3), (4, 4, 5)]
MAXSHAPES = [SHAPE, (None, None, 5), (None, 7, 5), (40, 40, 40), (13, None, 5)]


@needs_libhdf5
@pytest.mark.usefixtures("no_extra_codecs")
@pytest.mark.parametrize(("filters", "chunks", "maxshape"), [*zip(FILTERS * 2, CHUNKS * 4, MAXSHAPES * 3)], ids=str)
def test_edge_chunks_may_be_left_unfiltered(new, path, filters, chunks, maxshape):
    """The index says that they were filtered. Unshuffling never fails: it would give wrong values silently."""
    with new() as file:
        arguments = {"chunks": chunks, "maxshape": maxshape, "filters": filters, "raw_edges": True}
        create(file, "data", SHAPE, "i4", **arguments)[...] = numbered(SHAPE)
        create(file, "equal", SHAPE, "i4", **arguments)[...] = numbered(SHAPE) * (np.arange(13) < 12)[:, None, None]
    check(path, {"x": "data"}, reading="locked")
    check(path, {"x": "equal"})  # bytes that are alike look the same either way, and prove nothing
    check(path, {"x": "data"}, layout="HNW")


@needs_libhdf5
@pytest.mark.parametrize("written", [slice(0, 4), slice(4, 8), slice(12, 13), slice(3, 13)], ids=str)
def test_unfiltered_edge_chunks_that_were_partly_written_are_read(new, path, written):
    arguments = {"chunks": (4, 5, 3), "filters": ["shuffle", "gzip"], "raw_edges": True, "fill": 5}
    with new() as file:
        create(file, "data", SHAPE, "i4", **arguments)[written] = numbered(SHAPE)[written]
    check(path, {"x": "data"})


@pytest.mark.parametrize(("libver", "filters"), [("earliest", ["gzip"]), ("v110", []), ("latest", ["gzip"])])
@pytest.mark.parametrize("maxshape", [(13, None, 5), (13, 7, None), (20, None, 5), (20, 9, None)], ids=str)
def test_one_unlimited_axis_that_is_not_the_first_is_read_right(new, path, caplog, libver, maxshape, filters):  # noqa: PLR0917
    """With a warning. libhdf5 itself returns wrong coordinates of these chunks."""
    with new(libver=libver) as file:
        create(file, "data", SHAPE, "i4", chunks=(4, 3, 2), maxshape=maxshape, filters=filters)[...] = numbered(SHAPE)
    for layout in ("NHW", "HNW", "HWN"):
        check(path, {"x": "data"}, layout=layout, reading="locked")
    assert f"{path}:/data: is read by h5py, one thread at a time: it is unlimited along one axis" in caplog.text


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
def test_every_kind_of_index_is_followed_also_with_many_levels_behind_a_user_block(tmp_path, kind):
    wanted, libver, given = INDEXES[kind]
    most = {"maxshape": tuple(limit and {20: 2000, 9: 4, 7: 3, 5: 2}[limit] for limit in given.get("maxshape", ()))}
    many = {"chunks": (1, 2, 2), **given, **(most if "maxshape" in given else {})}
    for shape, user_block, arguments in ((SHAPE, 0, {"chunks": (4, 3, 2), **given}), ((600, 3, 2), 1024, many)):
        if user_block and "single" in kind:
            continue
        path = str(tmp_path / f"{user_block}.h5")
        with h5py.File(path, "w", libver=(libver, "v110"), userblock_size=user_block) as file:
            dataset = create(file, "data", shape, "i4", **arguments)
            dataset[...] = numbered(shape)
            assert index_type(dataset) == wanted
        for layout in ("NHW", "HNW", "HWN") if shape == SHAPE else (None,):
            check(path, {"x": "data"}, layout=layout, reading="decoded")
