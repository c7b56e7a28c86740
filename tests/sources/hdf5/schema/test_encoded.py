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
from support.files.stored_fields import AT, ROWS, numbers
from support.sources.comparison import assert_same_samples
from support.sources.oracle import Model, check, refused, refused_sooner_or_later

from lit_async_data import CorruptError, Field, FormatError, HDF5Source, SourceError


@pytest.mark.parametrize(
    ("offsets", "row"),
    [
        ([0, 2, 4, 4, 8, 10], None),
        ([0, 2, 4, 9, 11, 13], 3),  # the values end early
        ([0, 2, 4, 6, 0, 0], 3),  # the last were never written
        ([0, 4, 2, 6, 8, 10], 1),
        ([0, 2, 4, -1, 8, 10], 2),
        ([1, 3, 5, 7, 9, 10], 0),  # counted from 1
        ([0, 2, 4, 6, 8], 3),  # the end is missing
        ([0, 11], 0),
        ([0, 8, 16, 24, 32, 40], 1),  # in bytes
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_offsets_cut_all_values_in_their_order_or_are_refused(path, offsets, row, sparse):
    with h5py.File(path, "w") as file:
        names = ("data", "indices", "indptr") if sparse else ("values", "none", "offsets")
        for name, values in zip(names, (np.arange(1, 11), np.arange(10), offsets), strict=True):
            file[f"x/{name}"] = values
        if sparse:
            file["x"].attrs.update({"encoding-type": "csr_matrix", "shape": (len(offsets) - 1, 10)})
    if row is not None:
        said = f"x/{names[2]}, row {row}: {offsets[row]} to {offsets[row + 1]} of 10 elements; offsets must begin with"
        with pytest.raises(CorruptError, match=said) as raised:
            HDF5Source(path, {"x": "x"})
        assert raised.value.row == row
        return
    source = HDF5Source(path, {"x": "x"})
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        assert sorted(filter(None, source[number]["x"].tolist())) == [*range(begin + 1, end + 1)]


@pytest.mark.parametrize("offsets", [[[0, 3]], [0.0, 3.0]], ids=str)
def test_offsets_are_integers_on_one_axis(h5, offsets):
    path = h5(**{"x/values": np.arange(3), "x/offsets": offsets})
    refused(FormatError, [f"{path}:/x/offsets: has not one axis of integers"], path, {"x": "x"})


def add_categorical(path, name, codes):
    with h5py.File(path, "a") as file:
        group = file.create_group(name)
        group.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        group["codes"] = codes
        group["categories"] = np.array(["B", "NK", "T"], object)


@pytest.mark.parametrize("kind", ["i1", "u1", "i2"])
def test_a_categorical_group_is_its_codes_and_its_categories_are_the_classes(h5, kind):
    path = h5(data=numbers((ROWS, 2)))
    add_categorical(path, "cells/type", (np.arange(ROWS) % 3).astype(kind))
    model = check(path, {"x": "data", "y": "cells/type"})
    table, key = pa.table({"type": ["T", "B", "NK"], "z": [9, 7, 8]}), Field("cells/type", kind="text")
    source = HDF5Source(path, {"t": key, "z": "z"}, table=table, on={"type": "cells/type"})
    assert source.column("cells/type").tolist() == (["B", "NK", "T"] * ROWS)[:ROWS]
    assert (source.spec["t"].texts, source.column("z").tolist()) == (("B", "NK", "T"), ([7, 8, 9] * ROWS)[:ROWS])
    assert model.values["y"].dtype == np.int64
    assert HDF5Source(path, ["cells/type"]).spec["cells/type"].classes == ("B", "NK", "T")
    check(path, {"y": "type"}, group="cells")


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


def test_columns_instead_of_rows_are_refused_with_a_way_out(h5):
    path = h5(y=np.arange(ROWS))
    add_csr(path, np.eye(ROWS), kind="csc_matrix")
    refused(FormatError, [path, "X", "csc", "csr"], path, {"x": "X"})


@pytest.mark.parametrize(
    ("name", "place", "value", "row"),
    [
        ("indptr", AT, 10**6, AT - 1),
        ("indptr", 0, -1, 0),
        ("indices", "of AT", 11, AT),
        ("indices", "of AT", -1, AT),
        ("indices", "of AT", 10**6, AT),
    ],
)
def test_a_damaged_sparse_matrix_is_refused_and_the_row_named(h5, name, place, value, row):
    matrix = numbers((ROWS, 11), "f4") * (np.arange(11) % 4 == 3)
    path = h5(y=np.arange(ROWS))
    add_csr(path, matrix, chunks=(5,), compression="gzip")
    with h5py.File(path, "r+") as file:
        file["X"][name][file["X/indptr"][AT] if place == "of AT" else place] = value
    error = refused_sooner_or_later(SourceError, [path, "X", "row", row], path, {"x": "X"})
    assert error.row in (None, row)


def add_ragged(path, samples, name="words", **options):
    with h5py.File(path, "a") as file:
        group = file.create_group(name)
        values = np.concatenate(samples)
        if options.get("chunks"):
            options["chunks"] = (options["chunks"], *values.shape[1:])
        group.create_dataset("values", data=values, **options)
        group["offsets"] = np.cumsum([0, *map(len, samples)])


LENGTHS = [3, 0, 7, 1, 1, 7, 0, 2, 5, 4]


def ragged(dtype, rest=()):
    random = np.random.default_rng(3)
    return [random.integers(1, 100, (length, *rest)).astype(dtype) for length in LENGTHS]


@pytest.mark.parametrize("options", [{}, {"chunks": 4}, {"chunks": 4, "compression": "gzip"}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "rest", "max_length"), [("i2", (), None), (">f4", (3,), 7), ("i8", (3,), None), (">f4", (), 9)]
)
def test_samples_of_different_lengths_are_padded_with_zeros(h5, options, dtype, rest, max_length):
    samples = ragged(dtype, rest)
    path = h5(y=np.arange(len(samples)))
    add_ragged(path, samples, **options)
    model = check(path, {"x": Field("words", max_length=max_length), "y": "y"})
    assert list(model.values) == ["x", "x_length", "y"]
    assert model.values["x"].shape == (10, max_length or 7, *rest)
    assert model.values["x_length"].tolist() == LENGTHS
    for got, wanted in zip(model.values["x"], samples):
        assert got[: len(wanted)].tolist() == wanted.tolist()
        assert not got[len(wanted) :].any()


def test_a_sample_longer_than_max_length_is_refused_at_once(h5):
    samples = ragged("i4")
    samples[8] = np.ones(9, "i4")
    path = h5(y=np.arange(len(samples)))
    add_ragged(path, samples)
    error = refused(FormatError, [path, "words", 8], path, {"x": Field("words", max_length=8)})
    assert error.row in (None, 8)
    assert Model(path, {"x": Field("words")}).values["x"].shape == (10, 9)


def test_samples_without_a_single_value_are_not_taken_for_no_samples(h5):
    path = h5(y=np.arange(3))
    add_csr(path, np.zeros((3, 4), "f4"), name="sparse")
    add_ragged(path, [np.zeros(0, "f4")] * 3, "ragged")
    for name in ("sparse", "ragged"):
        refused(FormatError, [f"{path}:/{name}", "3 rows without a single value"], path, {"x": name})
