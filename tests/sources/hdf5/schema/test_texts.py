"""Datasets of text as numbers, and what is no field of text."""

import numpy as np
import pytest

from lit_async_data import ConfigError, Field, FormatError, HDF5Source


@pytest.mark.parametrize(
    ("field", "error", "message"),
    [
        (Field("y", classes=["owl"]), FormatError, r"0.h5:/y, row 1: 'jay' is not one of owl; fields.y.classes names"),
        (Field("y", kind="number"), ConfigError, "fields.y.kind: .*0.h5:/y holds"),
        (Field("x", kind="class"), ConfigError, "fields.y.kind: .*0.h5:/x holds int64, which is not class"),
        (Field("y", column=0), ConfigError, "column and mask_and_scale do not apply to text"),
        (Field("y", lookup="x"), FormatError, "holds text; "),
        (Field("square"), FormatError, "holds text, ids or values of variable length on 2 axes"),
    ],
)
def test_what_is_no_field_of_text_is_named(field, error, message, h5):
    path = h5("0.h5", x=np.arange(4), y=["owl", "jay", "owl", "emu"], square=np.array([["a", "b"]] * 4, "S"))
    with pytest.raises(error, match=message):
        HDF5Source(path, {"y": field})


def test_many_texts_are_ids(h5):
    path = h5(y=np.array([f"p{number}" for number in range(2**16 + 1)], "S8"))
    with pytest.raises(ConfigError, match="65537 distinct texts, which seem to be ids; write kind='text'"):
        HDF5Source(path, {"y": "y"})
    source = HDF5Source(path, {"y": Field("y", kind="text")})
    assert source.spec.names("y", source[7]["y"]) == "p7"
