"""A field of a part: its columns, classes and lookups, and whether packed values are mentioned."""

import h5py
import numpy as np
import pytest
from support.files.stored_fields import ROWS, numbers, set_attributes
from support.sources.oracle import check, read, refused

from lit_async_data import AsyncDataError, Field, HDF5Source


@pytest.mark.parametrize(("shape", "column"), [((ROWS, 4), 4), ((ROWS, 4), 71), ((ROWS,), 0), ((ROWS, 4, 2), 1)])
def test_a_column_that_is_not_there_is_refused(h5, shape, column):
    said = ["labels", column, *shape]
    refused(AsyncDataError, said, h5(labels=numbers(shape)), {"y": Field("labels", column=column)})


@pytest.mark.parametrize("index", [np.zeros((ROWS, 1), "i4"), np.zeros(ROWS, "f4"), np.zeros(ROWS, "?")], ids=str)
def test_an_index_of_anything_but_whole_numbers_on_one_axis_is_refused_at_once(h5, index):
    path = h5(age=numbers((4,)), patient_index=index)
    refused(AsyncDataError, ["patient_index"], path, {"age": Field("age", lookup="patient_index")})


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
    assert HDF5Source(path, {"x": field}, **options).spec["x"].dtype == np.int16
    (said,) = [each.getMessage() for each in caplog.records if "come as stored" in each.getMessage()]
    cure = "Field(mask_and_scale=True) applies it" if field == "t" and not options else "unpack them in a transform"
    assert said.endswith(f"t: has scale_factor, _FillValue, but values come as stored; {cure}")
    if cure.startswith("Field"):
        assert read(HDF5Source(path, {"x": Field("t", mask_and_scale=True)}), [1])["x"].tolist() == [[1, 1.5]]
        assert caplog.text.count("come as stored") == 1


@pytest.mark.parametrize(
    ("fields", "rows", "said"),
    [
        ({"x": Field("x", window=4), "y": "y"}, None, "x: window=4 is a single row, 4 rows ahead; window=(0, 4) is 4"),
        ({"x": Field("x", window=250)}, [0, 20], "x: window=250 is a single row, 250 rows ahead; window=(0, 250) is"),
        # Windows of forecasts: the target ahead of its input, the next row, an earlier row, rows.
        ({"x": "x", "y": Field("x", window=4)}, None, ""),
        ({"x": Field("x", window=1)}, None, ""),
        ({"x": Field("x", window=(4, 5))}, None, ""),
    ],
    ids=str,
)
def test_a_single_number_as_the_window_of_the_input_is_questioned(h5, caplog, fields, rows, said):
    HDF5Source(h5(x=np.arange(300.0), y=np.arange(300)), fields, rows=rows).close()
    found = [record.getMessage() for record in caplog.records if "window=" in record.getMessage()]
    assert len(found) == bool(said)
    assert said in "".join(found)


@pytest.mark.parametrize("base", ["i1", ">i4"])
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
    assert HDF5Source(path, {"y": "labels"}).spec["y"].classes == classes


def test_padding_that_only_the_delivered_type_holds_is_not_left_to_the_device(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (2,), h5py.vlen_dtype(np.uint8))[:] = [np.arange(3), np.arange(2)]
    assert HDF5Source(path, {"x": Field("x", dtype="int64")}).spec["x"].narrow == np.uint8
    assert HDF5Source(path, {"x": Field("x", dtype="int64", fill=-100)}).spec["x"].narrow is None
