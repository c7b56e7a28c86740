"""A field of a part: its columns, classes and lookups, and whether packed values are mentioned."""

import contextlib
import logging

import h5py
import numpy as np
import pytest
from support.files.stored_fields import HOLES, ROWS, numbers, set_attributes
from support.sources.comparison import assert_same_samples
from support.sources.oracle import check, read, refused

from lit_async_data import AsyncDataError, ConfigError, Field, HDF5Source, MissingError


@pytest.mark.parametrize(("shape", "column"), [((ROWS, 4), 4), ((ROWS, 4), 71), ((ROWS,), 0), ((ROWS, 4, 2), 1)])
def test_a_column_that_is_not_there_is_refused(h5, shape, column):
    said = ["labels", column, *shape]
    refused(AsyncDataError, said, h5(labels=numbers(shape)), {"y": Field("labels", column=column)})


@pytest.mark.parametrize("index", [np.zeros((ROWS, 1), "i4"), np.zeros(ROWS, "f4"), np.zeros(ROWS, "?")], ids=str)
def test_an_index_of_anything_but_whole_numbers_on_one_axis_is_refused_at_once(h5, index):
    path = h5(age=numbers((4,)), patient_index=index)
    refused(AsyncDataError, ["patient_index"], path, {"age": Field("age", lookup="patient_index")})


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
    check(path, {"x": Field(name, mask_and_scale=True)})
    assert name not in caplog.text
    with caplog.at_level(logging.INFO), contextlib.closing(HDF5Source(path, fields)) as source:
        for _ in range(2):
            assert_same_samples(read(source, np.arange(ROWS))["x"], HOLES.astype("i2"))
    (said,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert next(iter(attributes)) in said
    check(path, fields)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("t", {}),
        (Field("t", patch=(2, 2)), {}),
        (Field(["t", "t"], patch=(2, 2)), {}),
        (Field("t", points=2), {}),
        (Field("t", offsets="begins"), {}),
        ("t", {"sample": "group", "group": "alike/*"}),
        ("t", {"sample": "group", "group": "longer/*"}),
        (Field("longer/*/t", patch=(2, 2)), {"sample": "dataset"}),
    ],
    ids=str,
)
def test_packed_values_of_any_samples_are_mentioned(h5, caplog, field, options):
    values, begins = np.arange(8, dtype="i2").reshape(4, 2), np.array([0, 1, 4])
    names = ["t", "alike/0/t", "alike/1/t", "longer/0/t", "longer/1/t"]
    path = h5(begins=begins, **{name: np.concatenate([values] * (1 + (name == "longer/1/t"))) for name in names})
    for name in names:
        set_attributes(path, name, scale_factor=0.5, _FillValue=np.int16(-9))
    with contextlib.closing(HDF5Source(path, {"x": field}, **options)) as source:
        assert source.spec["x"].dtype == np.int16
    (said,) = [each.getMessage() for each in caplog.records if "come as stored" in each.getMessage()]
    cure = "Field(mask_and_scale=True) applies it" if field == "t" and not options else "unpack them in a transform"
    assert said.endswith(f"t: has scale_factor, _FillValue, but values come as stored; {cure}")
    given = {
        name: value for name, value in vars(Field.of(field)).items() if name in ("name", "patch", "points", "offsets")
    }
    if "transform" in cure and isinstance(given["name"], str):
        with pytest.raises(ConfigError, match=r"mask_and_scale: does not apply .*; leave it out, and unpack in a tr"):
            HDF5Source(path, {"x": {**given, "mask_and_scale": True}}, **options)


def test_a_fill_value_of_nan_says_nothing_of_values_as_stored(h5, caplog):
    path = h5(nan=numbers((4, 4)).astype("f4"))
    set_attributes(path, "nan", _FillValue=np.float32(np.nan))
    for field in ("nan", Field("nan", patch=(2, 2))):
        HDF5Source(path, {"x": field}).close()
    assert "come as stored" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "rows", "said"),
    [
        ({"x": Field("x", window=4), "y": "y"}, None, "x: window=4 is a single row, 4 rows ahead; window=(0, 4) is 4"),
        ({"x": Field("x", window=250)}, [0, 20], "x: window=250 is a single row, 250 rows ahead; window=(0, 250) is"),
        # Windows of forecasts: the target ahead of its input, the next row, an earlier row, rows.
        ({"x": "x", "y": Field("x", window=4)}, None, ""),
        ({"x": Field("x", window=1)}, None, ""),
        ({"x": Field("x", window=-4)}, None, ""),
        ({"x": Field("x", window=(4, 5))}, None, ""),
    ],
    ids=str,
)
def test_a_single_number_as_the_window_of_the_input_is_questioned(h5, caplog, fields, rows, said):
    HDF5Source(h5(x=np.arange(300.0), y=np.arange(300)), fields, rows=rows).close()
    found = [record.getMessage() for record in caplog.records if "window=" in record.getMessage()]
    assert len(found) == bool(said)
    assert said in "".join(found)


@pytest.mark.parametrize("field", [Field("x", decode="image"), "g"], ids=str)
def test_images_and_samples_of_variable_length_have_no_layout(h5, field):
    path = h5(x=[[1, 2]], **{"g/values": np.arange(3), "g/offsets": [0, 3]})
    refused(AsyncDataError, ["layout: 'NHWC' for"], path, {"x": field}, layout="NHWC")


def classes_of(path, field):
    return HDF5Source(path, {"y": field}).spec["y"].classes


@pytest.mark.parametrize("base", ["i1", ">i4", "i8"])
@pytest.mark.parametrize(
    ("codes", "classes"),
    [
        ({"cow": 2, "cat": 0, "dog": 1}, ("cat", "dog", "cow")),
        ({"a": 1, "b": 2}, ()),
        ({"a": 0, "b": 2}, ()),
        ({"a": -1, "b": 0}, ()),
    ],
    ids=str,
)
def test_an_enumeration_names_its_classes_in_the_order_of_their_codes_from_0_on(h5, base, codes, classes):
    values = np.array(sorted(codes.values()) * 4)
    path = h5(labels={"data": values, "dtype": h5py.enum_dtype(codes, base)})
    assert check(path, {"y": "labels"}).values["y"].tolist() == values.tolist()
    assert classes_of(path, "labels") == classes


@pytest.mark.parametrize("field", [Field("dta", column=1), Field("dta", lookup="who"), Field("data", lookup="dta")])
def test_a_dataset_that_is_not_there_is_still_named(h5, field):
    path = h5(data=numbers((ROWS, 3)), who=np.zeros(ROWS, "i4"))
    refused(MissingError, [path, "dta"], path, {"x": field})


def test_padding_that_only_the_delivered_type_holds_is_not_left_to_the_device(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (2,), h5py.vlen_dtype(np.uint8))[:] = [np.arange(3), np.arange(2)]
    assert HDF5Source(path, {"x": Field("x", dtype="int64")}).spec["x"].narrow == np.uint8
    assert HDF5Source(path, {"x": Field("x", dtype="int64", fill=-100)}).spec["x"].narrow is None
