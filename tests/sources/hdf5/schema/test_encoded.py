"""Groups that stand for one dataset: categories, sparse rows, rows of different lengths."""

import itertools
import os
import tempfile

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.files.damage import damage_chunk
from support.files.stored_fields import AT, ROWS, numbers
from support.sources.comparison import assert_same_samples
from support.sources.oracle import check, read, read_from, refused

from lit_async_data import AsyncLoader, ConfigError, CorruptError, Field, FormatError, HDF5Source, SourceError
from lit_async_data.testing import check_contract


@pytest.mark.parametrize(
    ("offsets", "row"),
    [
        ([0, 2, 4, 4, 8, 10], None),
        ([0, 2, 4, 9, 11, 13], 3),  # the values end early
        ([0, 4, 2, 6, 8, 10], 1),
        ([0, 2, 4, -1, 8, 10], 2),
        ([1, 3, 5, 7, 9, 10], 0),  # counted from 1
        ([0, 11], 0),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_offsets_cut_all_values_in_their_order_or_are_refused(h5, offsets, row, sparse):
    names = ("x/data", "x/indices", "x/indptr") if sparse else ("x/values", "x/none", "x/offsets")
    path = h5(**dict(zip(names, (np.arange(1, 11), np.arange(10), offsets), strict=True)))
    with h5py.File(path, "a") as file:
        if sparse:
            file["x"].attrs.update({"encoding-type": "csr_matrix", "shape": (len(offsets) - 1, 10)})
    if row is not None:
        said = f"{names[2]}, row {row}: {offsets[row]} to {offsets[row + 1]} of 10 elements; offsets must begin with"
        assert refused(CorruptError, [said], path, {"x": "x"}).row == row
        return
    source = HDF5Source(path, {"x": "x"})
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        assert sorted(filter(None, source[number]["x"].tolist())) == [*range(begin + 1, end + 1)]


@pytest.mark.parametrize("offsets", [[[0, 1], [2, 3]], [0.5, 3.0], [0.0, np.nan], 3], ids=str)
def test_offsets_are_whole_numbers_on_one_axis(h5, offsets):
    path = h5(**{"x/values": np.arange(3), "x/offsets": offsets})
    refused(FormatError, [f"{path}:/x/offsets: has not one axis of integers"], path, {"x": "x"})


BOUNDS = {"offsets": [0, 3, 3, 8], "starts": [0, 3, 3], "ends": [3, 3, 8], "lengths": [3, 0, 5]}


@pytest.mark.parametrize("rule", BOUNDS)
@pytest.mark.parametrize("options", [{}, {"chunks": (3,), "compression": "gzip"}], ids=str)
def test_another_dataset_says_where_samples_begin_end_or_how_long_they_are(h5, rule, options):
    numbers, table = np.arange(1, 9), np.zeros(8, [("t", "f4"), ("id", "i2")])
    table["id"] = numbers
    bounds = {"cut/plain": BOUNDS[rule], "cut/matlab": np.array(BOUNDS[rule], "f8")[None]}
    wide = {"data": np.stack([numbers, -numbers], 1), **options, **({"chunks": (3, 2)} if options else {})}
    path = h5(x={"data": numbers, **options}, hits={"data": table, **options}, y=np.arange(3), wide=wide, **bounds)
    of_member = {rule: "cut/matlab", "dtype": "float32", "pad_side": "left", "fill": -1}
    fields = {"x": Field("x", **{rule: "cut/plain"}), "id": {"name": "hits.id", **of_member}, "y": "y"}
    source = HDF5Source(path, fields | {"w": Field("wide", **{rule: "cut/plain"}, max_length=6)})
    check_contract(source)
    got = read(source, [2, 0, 1])
    assert got["x"].tolist() == [[4, 5, 6, 7, 8], [1, 2, 3, 0, 0], [0] * 5]
    assert got["id"].tolist() == [[4, 5, 6, 7, 8], [-1, -1, 1, 2, 3], [-1] * 5]
    assert got["w"][1].tolist() == [[1, -1], [2, -2], [3, -3], [0, 0], [0, 0], [0, 0]]
    assert got["x_length"].tolist() == got["id_length"].tolist() == [5, 3, 0]
    refused(FormatError, ["y has 3, x has 8 (5 more)", "write 'x': Field(…, lengths=NAME), or ends="], path, ["x", "y"])
    joined = HDF5Source(path, {"x": Field("x", ragged="concat", **{rule: "cut/plain"})})
    with AsyncLoader(joined, {"batch_size": 3, "shuffle": "none"}) as loader:
        batch = next(loader)
    assert (batch["x"].tolist(), batch["x_offsets"].tolist()) == (numbers.tolist(), [0, 3, 3, 8])


@pytest.mark.parametrize(
    ("rule", "bounds", "row", "said"),
    [
        ("offsets", [0, 3, 7], 1, "offsets must begin with 0, never fall and end with 8"),  # or they are starts
        ("starts", [1, 3, 7], 0, "1 to 3 of 8 elements; starts must begin with 0"),  # counted from 1
        ("ends", [3, 2, 8], 1, "3 to 2 of 8 elements; ends must never fall"),
        ("lengths", [3, -1, 2], 1, "3 to 2 of 8 elements; lengths must not be negative"),
        ("lengths", [3, 6], 1, "nor exceed 8 together"),
        ("lengths", np.array([2**63, 2**63], "u8"), 0, "lengths must not be negative"),
    ],
)
def test_wrong_boundaries_are_named_with_their_row_when_the_source_is_built(h5, rule, bounds, row, said):
    path = h5(x=np.arange(8), cut=bounds)
    error = refused(CorruptError, [f"{path}:/cut, row {row}: ", said], path, {"x": Field("x", **{rule: "cut"})})
    assert (error.dataset, error.row) == ("cut", row)


def test_errors_of_values_name_the_sample_that_has_them_and_what_lies_behind_the_last_end_is_in_none(h5):
    path = h5(x={"data": np.arange(12.0), "chunks": (2,), "fletcher32": True}, cut=[3, 3, 8])
    damage_chunk(path, "x", (4,))
    source = HDF5Source(path, {"x": Field("x", ends="cut"), "n": "cut"})
    assert source[0]["x"].tolist() == [0, 1, 2, 0, 0]
    with pytest.raises(CorruptError) as raised:
        read(source, [1, 2])
    assert raised.value.sample_id == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ends": "cut", "lengths": "cut"}, "lengths: one of offsets, starts, ends, lengths is enough"),
        ({"offsets": [-3, 0.5]}, "offsets: [-3, 0.5] is neither the name of a dataset nor a list of whole numbers"),
        ({"ends": "cut", "window": (0, 2)}, "fields.x.window: does not apply to "),
    ],
)
def test_options_that_do_not_go_with_boundaries_are_named(h5, options, said):
    path = h5(x=np.arange(8), cut=[3, 8])
    refused(ConfigError, [said], path, {"x": {"name": "x", **options}})


def add_nwb(path):
    """Three units, with their spikes and electrodes, as NWB has them."""
    with h5py.File(path, "w") as file:
        for name, values in (("spike_times", np.arange(5.0)), ("electrodes", np.arange(4)), ("quality", np.arange(3))):
            file[f"units/{name}"] = values
            file[f"units/{name}"].attrs["neurodata_type"] = "VectorData"
        ends = {"spike_times_index": [2, 2, 5], "electrodes_index": [1, 3, 4], "electrodes_index_index": [2, 3]}
        for name, each in ends.items():
            index, target = file.create_dataset(f"units/{name}", data=each, dtype="u1"), name.removesuffix("_index")
            index.attrs.update({"neurodata_type": "VectorIndex", "target": file[f"units/{target}"].ref})


@pytest.mark.parametrize("name", ["spike_times", "spike_times_index"])
def test_a_column_of_nwb_is_divided_by_its_index(path, name):
    add_nwb(path)
    source = HDF5Source(path, {"x": name, "e": "electrodes", "y": "quality"}, group="units")
    got = read(source, range(3))
    assert got["x"].tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4]]
    assert (got["e_length"].tolist(), got["y"].tolist()) == ([1, 2, 1], [0, 1, 2])
    said = [f"{path}:/units/electrodes_index_index: is an index of the index /units/electrodes_index", "name that"]
    refused(FormatError, said, path, {"x": "units/electrodes_index_index"})


def add_categorical(path, name, codes):
    with h5py.File(path, "a") as file:
        group = file.create_group(name)
        group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        group["codes"] = codes
        group["categories"] = np.array(["B", "NK", "T"], object)


def test_a_categorical_group_is_its_codes_and_its_categories_are_the_classes_or_ids_of_a_table(h5):
    path = h5(data=numbers((ROWS, 2)))
    add_categorical(path, "cells/type", (np.arange(ROWS) % 3).astype("u1"))
    assert check(path, {"x": "data", "y": "cells/type"}).values["y"].dtype == np.int64
    assert HDF5Source(path, ["type"], group="cells").spec["type"].classes == ("B", "NK", "T")
    table, key = pa.table({"type": ["T", "B", "NK"], "z": [9, 7, 8]}), Field("cells/type", kind="text")
    source = HDF5Source(path, {"t": key, "z": "z"}, table=table, on={"type": "cells/type"})
    assert source.column("cells/type").tolist() == (["B", "NK", "T"] * ROWS)[:ROWS]
    assert (source.spec["t"].texts, source.column("z").tolist()) == (("B", "NK", "T"), ([7, 8, 9] * ROWS)[:ROWS])


def add_csr(path, matrix, *, name="X", kind="csr_matrix", index="i4", backwards=False, **options):
    """A matrix as AnnData writes it; ``backwards`` leaves the columns of a row unsorted."""
    rows, columns = np.nonzero(matrix)
    if backwards:
        order = np.lexsort((-columns, rows))
        rows, columns = rows[order], columns[order]
    ends = np.cumsum([0, *np.bincount(rows, minlength=len(matrix))])
    with h5py.File(path, "a") as file:
        group = file.create_group(name)
        group.attrs.update({"encoding-type": kind, "encoding-version": "0.1.0", "shape": matrix.shape})
        group.create_dataset("data", data=matrix[rows, columns], **options)
        group.create_dataset("indices", data=columns.astype(index), **options)
        group.create_dataset("indptr", data=ends.astype(index), **options)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 9),
    filled=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 8))),
    chunk=st.sampled_from([None, 1, 3, 64]),
    gzip=st.booleans(),
    backwards=st.booleans(),
    dtype=st.sampled_from(["f4", "f8", "i8", "u2", ">f4"]),
    index=st.sampled_from(["i4", "i8", ">i4"]),
)
def test_any_sparse_matrix_comes_out_dense(*, rows, columns, filled, chunk, gzip, backwards, dtype, index):
    matrix = np.zeros((rows, columns), dtype)
    for number, (row, column) in enumerate(sorted(filled), 1):
        if row < rows and column < columns:
            matrix[row, column] = number
    assume(matrix.any())  # without a value there is no sample to speak of
    options = {"chunks": (chunk,), "maxshape": (None,), "compression": "gzip" if gzip else None} if chunk else {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.h5")
        add_csr(path, matrix, backwards=backwards, index=index, **options)
        model = check(path, {"x": "X"})
        assert_same_samples(model.values["x"], matrix.astype(matrix.dtype.newbyteorder("=")))


@pytest.mark.parametrize("slow", ["data", "indices"])
def test_a_sparse_matrix_is_read_as_slowly_as_the_slower_of_its_datasets(path, slow):
    matrix = np.arange(12, dtype="i4").reshape(4, 3)
    add_csr(path, matrix)
    with h5py.File(path, "r+") as file:
        values = file[f"X/{slow}"][...]
        del file[f"X/{slow}"]
        file.create_dataset(f"X/{slow}", data=values, chunks=(4,), scaleoffset=0)  # only libhdf5 decodes this filter
    assert HDF5Source(path, {"x": "X"}).chunks.reading == "locked"
    check(path, {"x": "X"})


def add_bare_csr(path, matrix, shape, *, attribute=False, **datasets):
    """A matrix by rows without a word on what it is, as other writers than AnnData have it."""
    add_csr(path, matrix)
    with h5py.File(path, "a") as file:
        for name in list(file["X"].attrs):
            del file["X"].attrs[name]
        (file["X"].attrs if attribute else file["X"])["shape"] = np.array(shape, "i4")
        file["X"].update(datasets)


CELLS = numbers((3, 5), "f4") * (np.arange(5) % 2)


@pytest.mark.parametrize("attribute", [True, False])
def test_a_sparse_matrix_without_a_word_on_its_kind_is_rows_if_its_shape_says_so(path, attribute):
    add_bare_csr(path, CELLS, CELLS.shape, attribute=attribute)
    assert read_from(path, {"x": "X"})["x"].tolist() == CELLS.tolist()


@pytest.mark.parametrize("genes", [5, 3])
def test_the_barcodes_of_10x_are_samples(path, genes):
    matrix = CELLS[:, :genes]
    add_bare_csr(path, matrix, matrix.shape[::-1], barcodes=np.array([b"AA-1", b"AC-1", b"AG-1"]))
    source = HDF5Source(path, {"x": "X", "cell": Field("X/barcodes", kind="text")})
    check_contract(source)
    assert read(source, [2, 0, 1])["x"].tolist() == matrix[[2, 0, 1]].tolist()
    assert source.spec.names("cell", source.column("cell")).tolist() == ["AA-1", "AC-1", "AG-1"]


def test_columns_instead_of_rows_are_refused_with_a_way_out(h5):
    path = h5("csc.h5")
    add_csr(path, np.eye(ROWS), kind="csc_matrix")
    refused(FormatError, [path, "X", "csc", "csr"], path, {"x": "X"})
    unsaid = ["X: does not say by encoding-type = 'csr_matrix'", "store it by rows"]
    cases = [(CELLS, (5, 3), unsaid), (CELLS[:, :3], (3, 3), unsaid), (CELLS, [], ["sparse matrix without shape"])]
    for number, (matrix, shape, said) in enumerate(cases):
        add_bare_csr(other := h5(f"{number}.h5"), matrix, shape)
        refused(FormatError, said, other, {"x": "X"})


@pytest.mark.parametrize(
    ("name", "place", "value", "row"),
    [
        ("indptr", AT, 10**6, AT - 1),
        ("indptr", 0, -1, 0),
        *(("indices", "of AT", value, AT) for value in (11, -1, 2**64 - 1)),
    ],
)
def test_a_damaged_sparse_matrix_is_refused_and_the_row_named(h5, name, place, value, row):
    matrix = numbers((ROWS, 11), "f4") * (np.arange(11) % 4 == 3)
    path = h5(y=np.arange(ROWS))
    add_csr(path, matrix, chunks=(5,), compression="gzip", index="u8" if value > 10**6 else "i4")
    with h5py.File(path, "r+") as file:
        file["X"][name][file["X/indptr"][AT] if place == "of AT" else place] = value
    with pytest.raises(SourceError, match=rf"{path}:/X.*row {row}.* {value}\b") as raised:
        read_from(path, {"x": "X"})
    assert raised.value.row in (None, row)


def test_samples_without_a_single_value_are_not_taken_for_no_samples(h5):
    path = h5(y=np.arange(3))
    add_csr(path, np.zeros((3, 4), "f4"), name="sparse")
    with h5py.File(path, "a") as file:
        file["ragged/values"], file["ragged/offsets"] = np.zeros(0, "f4"), np.zeros(4, "i8")
    for name in ("sparse", "ragged"):
        refused(FormatError, [f"{path}:/{name}", "holds no value for 3 rows"], path, {"x": name})
