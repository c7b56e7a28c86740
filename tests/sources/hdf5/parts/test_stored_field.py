"""Fields as people store them: casts, tables, packed values, classes, sparse and ragged rows, and what is refused."""

import contextlib
import logging
import os
import tempfile

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sources.comparison import assert_same_samples
from support.sources.oracle import Model, check, read, read_from, refused, refused_sooner_or_later, refused_when_read

from lit_async_data import Field, HDF5Source, split
from lit_async_data.errors import AsyncDataError, ConfigError, CorruptError, FormatError, MissingError, SourceError

ROWS = 20
STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": 6},
    "gzip": {"chunks": 6, "compression": "gzip"},
    "gzip rows": {"chunks": 1, "compression": "gzip", "shuffle": True},
}


def stored(values, storage="contiguous", **more):
    """Arguments of create_dataset, with chunks of this many rows."""
    arguments = dict(STORAGE[storage], data=values, **more)
    if "chunks" in arguments:
        arguments["chunks"] = (min(arguments["chunks"], len(values)), *values.shape[1:])
    return arguments


def in_every_way(values, name="{}"):
    """The same values in one file, once for each kind of storage."""
    return {name.format(storage): stored(values, storage) for storage in STORAGE}


def numbers(shape, dtype="i4"):
    """Different values, as far as the type allows."""
    return (np.arange(np.prod(shape)).reshape(shape) * 7 % 120).astype(dtype)


def set_attributes(path, name, **attributes):
    with h5py.File(path, "r+") as file:
        for key, value in attributes.items():
            file[name].attrs[key] = value


def test_a_field_is_a_name_a_field_or_a_mapping(h5):
    fields = {"a": "data", "b": Field("data", column=1), "c": {"name": "data", "column": 1}}
    model = check(h5(data=numbers((ROWS, 3))), fields)
    assert model.values["c"].tolist() == numbers((ROWS, 3))[:, 1].tolist()


@pytest.mark.parametrize("key", ["y", "a.b"])
def test_a_typo_in_a_field_names_it_and_what_was_meant(h5, key):
    said = f"fields.{key}.colum: no such option; did you mean column?"
    refused(ConfigError, [said], h5(data=numbers((ROWS, 3))), {key: {"name": "data", "colum": 1}})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"column": -1}, "fields.y.column: -1"),
        ({"window": (3, 3)}, "fields.y.window: (3, 3)"),
        ({"dtype": "float31"}, "fields.y.dtype: 'float31'"),
        ({"classes": "cat"}, "fields.y.classes: 'cat'"),
    ],
    ids=str,
)
def test_a_wrong_value_in_a_field_names_it(h5, wrong, said):
    refused(ConfigError, [said], h5(data=numbers((ROWS, 3))), {"y": {"name": "data", **wrong}})


@pytest.mark.parametrize(
    ("shape", "column"), [((ROWS, 4), 4), ((ROWS, 4), 71), ((ROWS,), 0), ((ROWS, 4, 2), 1)], ids=str
)
def test_a_column_that_is_not_there_is_refused(h5, shape, column):
    said = ["labels", column, *shape]
    refused(AsyncDataError, said, h5(labels=numbers(shape)), {"y": Field("labels", column=column)})


@pytest.mark.parametrize(
    ("of", "to"),
    [
        ("u1", "float32"),
        ("u1", "int64"),
        (">i2", "float16"),
        ("i8", "uint8"),
        ("i8", "int32"),
        ("u8", "int64"),
        (">f4", "int16"),
        ("f8", "int64"),
        ("f8", "float32"),
        ("f4", "f8"),
        ("?", "float32"),
        ("f4", ">f4"),
    ],
)
def test_values_are_cast(h5, of, to):
    shapes = {"alone {}": (ROWS,), "rows {}": (ROWS, 3), "tables {}": (ROWS, 2, 4)}
    names = [in_every_way(numbers(shape, of), name) for name, shape in shapes.items()]
    datasets = {key: values for each in names for key, values in each.items()}
    path = h5(**datasets)
    model = check(path, {name: Field(name, dtype=to) for name in datasets})
    assert {values.dtype for values in model.values.values()} == {np.dtype(to).newbyteorder("=")}
    for name in shapes:  # as the only field, which may have its own way of reading
        check(path, {"x": Field(name.format("contiguous"), dtype=to)})


AT = 13  # the row with a bad value


@pytest.mark.parametrize(
    ("of", "bad", "to"),
    [
        ("f4", 1.5, "int64"),
        ("f8", np.nan, "int32"),
        ("f4", np.inf, "int64"),
        ("f8", -np.inf, "uint8"),
        ("f4", 256.0, "uint8"),
        (">f8", -1.0, "uint8"),
        ("f4", 2.0**31, "int32"),
        ("f8", 2.0**63, "int64"),
        ("f8", 2.0**64, "uint64"),
        ("f4", -129.0, "int8"),
        ("i8", 256, "uint8"),
        ("i8", -1, "uint8"),
        (">i8", 2**40, "int32"),
        ("i4", -1, "uint64"),
        ("u8", 2**63, "int64"),
        ("u2", 2**15, "int16"),
    ],
)
def test_a_value_that_a_type_does_not_hold_is_refused_when_its_row_is_read(h5, of, bad, to):
    rows, others = numbers((ROWS, 3), of), np.delete(np.arange(ROWS), AT)
    rows[AT, -1] = bad
    path = h5(line=rows[:, -1], gzip=stored(rows, "gzip"))
    for name, values in {"line": rows[:, -1], "gzip": rows}.items():
        fields = {"x": Field(name, dtype=to)}
        error = refused_when_read(SourceError, [path, name, AT], path, fields, [2, AT, 7])
        assert error.row in (None, AT)
        assert_same_samples(read_from(path, fields, others)["x"], values[others].astype(to))


@pytest.mark.parametrize(
    ("of", "to", "ends"),
    [
        ("f4", "uint8", [0.0, -0.0, 255.0]),
        ("f8", "int64", [-(2.0**63), 2.0**63 - 1024, 2.0**53]),
        ("f8", "uint64", [2.0**64 - 2048]),
        ("f4", "int32", [-(2.0**31), 2.0**31 - 128]),
        ("f2", "int16", [-32768.0, 32752.0]),
        ("i8", "int8", [-128, 127]),
        ("u8", "int64", [2**63 - 1]),
        ("i8", "uint64", [2**63 - 1]),
    ],
)
def test_the_ends_of_a_type_are_in_range(h5, of, to, ends):
    got = read_from(h5(data=np.array(ends, of)), {"x": Field("data", dtype=to)})["x"]
    assert got.tolist() == [int(end) for end in ends]


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_index_that_is_not_in_the_table_is_refused(h5, bad):
    index = np.array([0, 3, 1, 2] * 5)
    index[AT] = bad
    path = h5(age=numbers((4,)), patient_index=index)
    fields = {"age": Field("age", lookup="patient_index")}
    refused_sooner_or_later(SourceError, ["patient_index", AT, bad], path, fields)


@pytest.mark.parametrize("index", [np.zeros((ROWS, 1), "i4"), np.zeros(ROWS, "f4"), np.zeros(ROWS, "?")], ids=str)
def test_an_index_of_anything_but_whole_numbers_on_one_axis_is_refused_at_once(h5, index):
    path = h5(age=numbers((4,)), patient_index=index)
    refused(AsyncDataError, ["patient_index"], path, {"age": Field("age", lookup="patient_index")})


DELIVERED = {"i1": "f4", "u1": "f4", "i2": "f4", ">i2": "f4", "u2": "f4", "i4": "f8", ">u4": "f8", "i8": "f8"}
DELIVERED |= {"f2": "f4", "f4": "f4", ">f4": "f4", "f8": "f8"}
HOLES = numbers((ROWS, 3))
HOLES[4, 1] = HOLES[11] = 121


@pytest.mark.parametrize("of", DELIVERED)
def test_packed_values_are_unpacked(h5, of):
    path = h5(**in_every_way(HOLES.astype(of)))
    given = {"scale_factor": np.float64(0.25), "add_offset": np.array([20.5]), "_FillValue": np.array([121], of)}
    for storage in STORAGE:
        set_attributes(path, storage, **given)
    model = check(path, {storage: Field(storage, mask_and_scale=True) for storage in STORAGE})
    for values in model.values.values():
        assert values.dtype == DELIVERED[of]
        assert (np.isnan(values) == (HOLES == 121)).all()


@pytest.mark.parametrize(
    "attributes",
    [
        {"scale_factor": 0.5},
        {"add_offset": -3.0},
        {"_FillValue": np.int16(121)},
        {"missing_value": np.int16(121)},
        {"missing_value": np.int16(121), "scale_factor": np.array([0.25], "f4")},
        {"missing_value": np.int16(121), "_FillValue": np.int16(0), "add_offset": np.float32(4)},
    ],
    ids=str,
)
def test_each_attribute_counts_by_itself(h5, attributes):
    path = h5(data=HOLES.astype("i2"), line=HOLES[:, 1].astype("i2"))
    for name in ("data", "line"):
        set_attributes(path, name, **attributes)
    model = check(path, {"x": Field("data", mask_and_scale=True), "y": Field("line", mask_and_scale=True)})
    marks = [attributes[name] for name in ("_FillValue", "missing_value") if name in attributes]
    assert (np.isnan(model.values["x"]) == np.isin(HOLES, marks)).all()


def test_a_fill_value_of_nan_stays_nan(h5):
    values = HOLES.astype("f4")
    values[3, 0] = np.nan
    path = h5(data=values)
    set_attributes(path, "data", _FillValue=np.float32(np.nan), scale_factor=2.0)
    check(path, {"x": Field("data", mask_and_scale=True)})


@pytest.mark.parametrize("of", ["i1", "i2", ">i2", "i4"])
@pytest.mark.parametrize("said", ["true", np.bytes_(b"true"), "false"], ids=repr)
def test_unsigned_reinterprets_what_is_stored(h5, of, said):
    values = np.array([[0, 1, -1], [5, -2, -128], [127, -1, 5]], of)
    path = h5(plain=values, below=values, above=values)
    for name, fill in {"plain": {}, "below": {"_FillValue": -1}, "above": {"_FillValue": 5}}.items():
        set_attributes(path, name, _Unsigned=said, scale_factor=0.5, **fill)
    model = check(path, {name: Field(name, mask_and_scale=True) for name in ("plain", "below", "above")})
    below_zero = -1 if said == "false" else (256 ** np.dtype(of).itemsize - 2) / 2
    assert [values[1, 1] for values in model.values.values()] == [below_zero] * 3


def test_unpacked_values_become_whole_numbers_only_where_they_are(h5):
    path = h5(data=HOLES.astype("i2"))
    set_attributes(path, "data", scale_factor=2.0, _FillValue=np.int16(121))
    fields = {"x": Field("data", mask_and_scale=True, dtype="int64")}
    for row in (4, 11):
        refused_when_read(SourceError, [path, "data", row], path, fields, [0, row])
    assert_same_samples(read_from(path, fields, [0, 7])["x"], 2 * HOLES[[0, 7]].astype("i8"))
    set_attributes(path, "data", add_offset=0.5)
    with pytest.raises(ConfigError, match=r"fields.x.dtype: int64 holds no fractions, but .* add_offset 0.5"):
        HDF5Source(path, fields)


@pytest.mark.parametrize(
    "attributes",
    [{"scale_factor": 0.1}, {"add_offset": 5.0}, {"_FillValue": np.int16(121)}, {"missing_value": np.int16(121)}],
    ids=str,
)
def test_packed_values_that_are_not_unpacked_are_mentioned_once(h5, caplog, attributes):
    name = "packed_" + next(iter(attributes))
    path = h5(**{name: HOLES.astype("i2")})
    set_attributes(path, name, **attributes)
    fields = {"x": name, "y": Field(name, column=1)}
    with caplog.at_level(logging.INFO), contextlib.closing(HDF5Source(path, fields)) as source:
        for _ in range(2):
            assert_same_samples(read(source, np.arange(ROWS))["x"], HOLES.astype("i2"))
    (said,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert next(iter(attributes)) in said
    check(path, fields)


def test_packed_values_that_are_unpacked_are_not_mentioned(h5, caplog):
    path = h5(unpacked_here=HOLES.astype("i2"))
    set_attributes(path, "unpacked_here", scale_factor=0.5, _FillValue=np.int16(121))
    with caplog.at_level(logging.INFO):
        check(path, {"x": Field("unpacked_here", mask_and_scale=True)})
    assert not [record for record in caplog.records if "unpacked_here" in record.getMessage()]


ANIMALS = h5py.enum_dtype({"cow": 2, "cat": 0, "dog": 1}, "i1")


def classes_of(path, field):
    with contextlib.closing(HDF5Source(path, {"y": field})) as source:
        return source.spec["y"].classes


@pytest.mark.parametrize("base", ["u1", ">i4", "i8"])
def test_an_enumeration_names_its_classes_in_the_order_of_their_codes(h5, base):
    kind = h5py.enum_dtype({"cow": 2, "cat": 0, "dog": 1}, base)
    path = h5(labels={"data": np.arange(ROWS) % 3, "dtype": kind})
    check(path, {"y": "labels"})
    assert classes_of(path, "labels") == ("cat", "dog", "cow")


@pytest.mark.parametrize("codes", [{"a": 1, "b": 2}, {"a": 0, "b": 2}, {"a": -1, "b": 0}], ids=str)
def test_an_enumeration_of_other_codes_names_no_classes(h5, codes):
    values = np.array(sorted(codes.values()) * 4)
    path = h5(labels={"data": values, "dtype": h5py.enum_dtype(codes, "i2")})
    assert check(path, {"y": "labels"}).values["y"].tolist() == values.tolist()
    assert not classes_of(path, "labels")


def test_classes_may_be_named_by_the_user(h5):
    path = h5(labels=np.arange(ROWS) % 3, table=np.arange(ROWS * 2).reshape(ROWS, 2) % 3)
    fields = {"y": Field("labels", classes=["a", "b", "c"]), "z": Field("table", column=1, classes=("d", "e", "f"))}
    check(path, fields)
    assert classes_of(path, fields["y"]) == ("a", "b", "c")
    assert classes_of(path, fields["z"]) == ("d", "e", "f")
    assert classes_of(path, "labels") == ()


@pytest.mark.parametrize("bad", [3, 100, -1])
@pytest.mark.parametrize("kind", ["enumeration", "user"])
def test_a_label_outside_its_classes_is_refused_when_it_is_read(h5, kind, bad):
    values = (np.arange(ROWS) % 3).astype("i1")
    values[AT] = bad
    path = h5(labels={"data": values, "dtype": ANIMALS if kind == "enumeration" else "i1"})
    fields = {"y": "labels" if kind == "enumeration" else Field("labels", classes=["a", "b", "c"])}
    refused_when_read(SourceError, [path, "labels", AT, bad], path, fields, [1, AT])
    assert read_from(path, fields, [0, 1, ROWS - 1])["y"].tolist() == [0, 1, (ROWS - 1) % 3]


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
    assert classes_of(path, "cells/type") == ("B", "NK", "T")
    check(path, {"y": "type"}, group="cells")


@pytest.mark.parametrize("bad", [-2, -1, 3])
def test_a_code_without_a_category_names_its_row(h5, bad):
    codes = (np.arange(ROWS) % 3).astype("i1")
    codes[AT] = bad
    path = h5(data=numbers((ROWS, 2)))
    add_categorical(path, "type", codes)
    refused_sooner_or_later(SourceError, [path, "type", AT], path, {"y": "type"})
    if bad == -1:
        with pytest.raises(ConfigError, match=rf"groups: type has no value \(None\) for sample {AT} "):
            split(HDF5Source(path, ["data"]), {"train": 0.5, "val": 0.5}, groups="type")
    else:
        with pytest.raises(CorruptError, match=f"type/categories: has 3 names, but there is code {bad}"):
            HDF5Source(path, ["data"]).column("type")
        with pytest.raises(CorruptError, match=f"code {bad}"):
            HDF5Source(path, {"y": Field("type", kind="text")})


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


def sparse(rows, columns, dtype="f4", seed=0):
    random = np.random.default_rng(seed)
    return (random.integers(1, 100, (rows, columns)) * (random.random((rows, columns)) < 0.3)).astype(dtype)


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
    add_csr(path, sparse(ROWS, 11), kind="csc_matrix")
    refused(FormatError, [path, "X", "csc", "csr"], path, {"x": "X"})


@pytest.mark.parametrize(
    ("name", "place", "value", "row"),
    [
        ("indptr", AT, 10**6, None),
        ("indptr", AT, 0, AT - 1),
        ("indptr", 0, 1, None),
        ("indptr", 0, -1, 0),
        ("indptr", ROWS, 10**6, ROWS - 1),
        ("indptr", ROWS, 0, ROWS - 1),
        ("indices", "of AT", 11, AT),
        ("indices", "of AT", -1, AT),
        ("indices", "of AT", 10**6, AT),
    ],
)
def test_a_damaged_sparse_matrix_is_refused_and_the_row_named(h5, name, place, value, row):
    matrix = sparse(ROWS, 11)
    matrix[:, 3] = 1
    path = h5(y=np.arange(ROWS))
    add_csr(path, matrix, chunks=(5,), compression="gzip")
    with h5py.File(path, "r+") as file:
        file["X"][name][file["X/indptr"][AT] if place == "of AT" else place] = value
    said = [path, "X", "row"] if row is None else [path, "X", "row", row]
    error = refused_sooner_or_later(SourceError, said, path, {"x": "X"})
    assert row is None or error.row in (None, row)


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


@pytest.mark.parametrize("version", [1, 2, 5])
def test_a_netcdf_3_file_is_refused_with_the_command_that_converts_it(tmp_path, version):
    path = tmp_path / "t2m.nc"
    path.write_bytes(b"CDF" + bytes([version]) + bytes(2000))
    refused(FormatError, [str(path), "nccopy"], str(path), ["t2m"])


@pytest.mark.parametrize("field", [Field("dta", column=1), Field("dta", lookup="who"), Field("data", lookup="dta")])
def test_a_dataset_that_is_not_there_is_still_named(h5, field):
    path = h5(data=numbers((ROWS, 3)), who=np.zeros(ROWS, "i4"))
    refused(MissingError, [path, "dta"], path, {"x": field})
