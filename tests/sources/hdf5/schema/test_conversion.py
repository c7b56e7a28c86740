"""Stored values become delivered ones: cast, looked up, unpacked and checked, or an error that names the row."""

import h5py
import numpy as np
import pytest
from support.files.hdf5 import numbered
from support.files.stored_fields import AT, HOLES, ROWS, STORAGE, in_every_way, numbers, set_attributes, stored
from support.sources.comparison import assert_same_samples
from support.sources.oracle import check, read_from, refused_sooner_or_later, refused_when_read

from lit_async_data import ConfigError, Field, FormatError, HDF5Source, SourceError


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


DELIVERED = {"i1": "f4", "u1": "f4", "i2": "f4", ">i2": "f4", "u2": "f4", "i4": "f8", ">u4": "f8", "i8": "f8"}
DELIVERED |= {"f2": "f4", "f4": "f4", ">f4": "f4", "f8": "f8"}


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


@pytest.mark.parametrize("bad", [3, 100, -1])
@pytest.mark.parametrize("classes", [None, ["a", "b", "c"]])
def test_a_label_outside_its_classes_is_refused_when_it_is_read(h5, classes, bad):
    values = (np.arange(ROWS) % 3).astype("i1")
    values[AT] = bad
    animals = h5py.enum_dtype({"cow": 2, "cat": 0, "dog": 1}, "i1")
    path = h5(labels={"data": values, "dtype": "i1" if classes else animals})
    fields = {"y": Field("labels", classes=classes)}
    refused_when_read(SourceError, [path, "labels", AT, bad], path, fields, [1, AT])
    assert read_from(path, fields, [0, 1, ROWS - 1])["y"].tolist() == [0, 1, (ROWS - 1) % 3]


@pytest.mark.parametrize(
    ("values", "field", "samples", "named"),
    [
        ([0] * 13 + [0.5] + [0] * 6, Field("y", dtype="int32", window=(0, 4)), [0, 10], (13, 10)),
        ([0] * 13 + [7] + [0] * 6, Field("age", lookup="y", window=(0, 4)), [12], (13, 12)),
        ([7, 0, 1, 1, 7], Field("y", window=(-2, 3), pad="last", classes=["a", "b"]), [0], (0, 0)),
        ([7, 0, 1, 1, 7], Field("y", window=(2, 4), pad="last", classes=["a", "b"]), [4], (4, 4)),
        ([0] * 8 + [7] + [0] * 3, Field("y", window=(0, 7, 3), classes=["a", "b"]), [3, 1, 0, 2], (8, 2)),
    ],
)
def test_a_bad_value_in_a_window_is_named_by_its_row_and_by_a_sample_that_reads_it(h5, values, field, samples, named):
    path = h5(age=numbered((5,)), y=np.array(values))
    error = refused_when_read(FormatError, [path, "y", named[0]], path, {"y": field}, samples)
    assert (error.row, error.sample_id) == named
