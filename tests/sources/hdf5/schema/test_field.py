"""Fields as people write them: wrong options and values are named."""

import numpy as np
import pytest
from support.files.stored_fields import ROWS, numbers
from support.sources.oracle import check, refused

from lit_async_data import Field
from lit_async_data.errors import ConfigError


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
    ("options", "said"),
    [
        ({"window": (0, 3), "pad": "first"}, ["pad", "'first'", "last, zero"]),
        ({"pad": "last"}, ["pad", "needs a window"]),
        ({"window": 2, "pad": "last"}, ["pad", "needs a window"]),
    ],
)
def test_padding_of_what_has_no_window_is_refused(h5, options, said):
    refused(ConfigError, ["fields.x", *said], h5(x=np.arange(9)), {"x": {"name": "x", **options}})
