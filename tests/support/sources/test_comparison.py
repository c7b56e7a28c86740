"""The comparison that tests of sources and loaders use."""

import re

import numpy as np
import pytest

from support.sources.comparison import assert_same_samples

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
