"""`Moments`: numbers counted block by block are those that numpy finds in the whole of an array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.statistics import IMAGES, check

from lit_async_data.batch import transforms
from lit_async_data.batch.spec import FieldSpec
from lit_async_data.batch.transforms import FieldStatistics, Moments, first_measured
from lit_async_data.errors import ConfigError

RNG = np.random.default_rng(0)
GAPS = np.where(RNG.random(IMAGES.shape) < 0.2, np.nan, IMAGES)


def found(values, kept=()):
    moments = Moments.of(values, [axis + 1 for axis in kept])
    return moments.statistics(FieldSpec(values.shape[1:], values.dtype), kept)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        (IMAGES, (0,)),
        (IMAGES, ()),
        (IMAGES, (2,)),
        (IMAGES, (0, 2)),
        (IMAGES, (0, 1, 2)),
        (GAPS.astype("f4"), (0,)),
        (GAPS, (0,)),
        (IMAGES[:, 0], ()),
        (IMAGES * np.float32(1e-25), (0,)),  # squares leave the range of float32
        (IMAGES * np.float32(1e25), (0,)),
        (RNG.integers(0, 256, (40, 3, 20, 20), "u1"), (0,)),
        (RNG.integers(-30000, 30000, (40, 3, 20, 20), "i2"), (0,)),
        (RNG.integers(2**62, 2**63 - 1, 40), ()),
        (RNG.random(40) < 0.3, ()),
        (IMAGES.astype("f2"), (0,)),
    ],
)
@pytest.mark.parametrize("block", [2**19, 100])
def test_they_are_those_of_the_whole_array(values, kept, block, monkeypatch):
    monkeypatch.setattr(transforms, "BLOCK", block)
    check(found(values, kept), values, kept)


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6, width=32), st.just(float("nan"))), min_size=1, max_size=60),
    st.integers(1, 9),
)
def test_blocks_are_put_together_as_if_they_were_one(values, cut):
    column = np.array(values, "f8")[:, None]
    whole = Moments.of(column, [1])
    parts = [Moments.of(column[at : at + cut], [1]) for at in range(0, len(column), cut)]
    for one, other in zip(whole, Moments.together(parts), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-6)


def test_a_constant_far_from_zero_has_no_spread():
    same = found(np.full((50, 1000), 101325.7, "f4"))
    assert (same.std, same.mean) == (0, np.float32(101325.7))


def test_the_first_field_that_holds_no_labels_is_measured():
    labels = FieldStatistics(*[np.zeros(1)] * 6, labels=True)
    assert first_measured({"y": labels, "x": FieldSpec((3,), np.dtype("f4")), "z": found(IMAGES)}) == ("x",)
    with pytest.raises(ConfigError, match="no field is named, and 'y' hold classes"):
        first_measured({"y": labels})
