"""The comparison that tests of sources and loaders use."""

import contextlib
import re

import numpy as np
import pytest

from lit_async_data import Field, HDF5Source
from support.files.hdf5 import numbered
from support.sources.comparison import assert_same_samples
from support.sources.oracle import Model, assert_is, unpacked

PLACES = [("a.h5", "/", 0), ("a.h5", "/", 1), ("b.h5", "/left", 0), ("b.h5", "/left", 7)]


def test_the_first_sample_that_differs_is_named_with_its_file_and_row():
    expected = np.arange(12, dtype="i4").reshape(4, 3)
    actual = expected.copy()
    actual[1, 2], actual[3, 0] = -1, -2
    with pytest.raises(AssertionError) as caught:
        assert_same_samples(actual, expected, key="x", samples=[0, 3, 2, 1], places=PLACES)
    assert str(caught.value) == (
        "field 'x': 2 of 4 samples differ; the first is sample 3, row 7 of b.h5:/left: got -1, expected 5 at [1, 2]"
    )


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (np.zeros(3, "f4"), np.zeros(3, "f8"), "got float32 (3,), expected float64 (3,)"),
        (np.zeros((3, 1)), np.zeros(3), "got float64 (3, 1), expected float64 (3,)"),
        (
            np.array([0, np.nan]),
            np.array([0, 1.0]),
            "1 of 2 samples differ; the first is sample 1: got nan, expected 1.0",
        ),
        (np.array(["a", "b"]), np.array(["a", "c"]), "got b, expected c"),
        (np.float32(1), np.float32(2), "the first is sample 0"),
    ],
)
def test_shapes_dtypes_and_nans_are_compared(actual, expected, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_same_samples(actual, expected)


def test_equal_arrays_pass():
    for values in (np.array([1.0, np.nan]), np.array(["a"]), np.zeros((0, 3)), np.int64(3), np.array([1j, np.nan])):
        assert_same_samples(values, values.copy())


def test_the_oracle_names_the_first_wrong_sample(h5):
    path = h5("x.h5", data=np.arange(20).reshape(10, 2))
    model = Model(path, {"x": "data"})
    model.values["x"][[4, 6]] = -1
    with contextlib.closing(HDF5Source(path, {"x": "data"})) as source, pytest.raises(AssertionError) as caught:
        assert_is(source, model)
    assert str(caught.value) == (
        f"field 'x': 2 of 10 samples differ; the first is sample 4, row 4 of {path}:/: got 8, expected -1 at [4, 0]"
    )


def test_the_model_takes_windows_as_one_would_by_hand(h5):
    path = h5(x=np.arange(10))
    model = Model(path, {"x": Field("x", window=(-1, 2))}, stride=3)
    assert model.values["x"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [row for _, _, row in model.places] == [1, 4, 7]
    model = Model(path, {"x": Field("x", window=(2, 4)), "y": Field("x", window=5), "z": "x"}, stride=2)
    assert model.values["x"].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert model.values["y"].tolist() == [5, 7, 9]
    assert model.values["z"].tolist() == [0, 2, 4]


def test_the_model_puts_channels_before_the_axis_of_a_window(h5):
    model = Model(h5(x=numbered((3, 4))), {"x": Field("x", window=(0, 2))}, layout="CN", stride=2)
    assert model.values["x"].tolist() == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    model = Model(h5(x=numbered((4, 3))), {"x": Field("x", window=(1, 3))}, layout="NC", stride=9)
    assert model.values["x"].tolist() == [[[3, 6], [4, 7], [5, 8]]]
    model = Model(h5(x=numbered((3, 2, 2))), {"x": Field("x", window=(0, 2))}, layout="NHC", stride=9)
    assert model.values["x"].tolist() == [[[[0, 2], [4, 6]], [[1, 3], [5, 7]]]]


def test_the_model_keeps_windows_inside_their_parts_and_parts_in_natural_order(h5):
    path = h5(**{"p_10/x": np.arange(3), "p_2/x": np.arange(10, 15), "p_3/x": np.arange(20, 21)})
    model = Model(path, {"x": Field("x", window=(0, 3))}, group="p_*")
    assert model.values["x"].tolist() == [[10, 11, 12], [11, 12, 13], [12, 13, 14], [0, 1, 2]]
    assert model.parts == [(path, "/p_2", 3), (path, "/p_10", 1)]
    everything = Model(path, {"x": "x"}, group="p_*", rows=np.array([8, 0, 5]))
    assert everything.values["x"].tolist() == [2, 10, 20]
    mask = np.arange(9) % 4 == 3
    assert Model(path, {"x": "x"}, group="p_*", rows=mask).values["x"].tolist() == [13, 1]


def test_the_model_unpacks_as_one_would_by_hand():
    got = unpacked(
        np.array([4, 7, -1], "i1"), {"scale_factor": 0.5, "add_offset": [3], "_FillValue": 7, "_Unsigned": "true"}
    )
    assert (got[0], got[2], got.dtype) == (5, 130.5, np.float32)
    assert np.isnan(got[1])
