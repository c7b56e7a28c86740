"""Fields as people write them: wrong options and values are named."""

import pytest
from support.files.stored_fields import ROWS, numbers
from support.sources.oracle import check, refused

from lit_async_data import ConfigError, Field


def test_a_field_is_a_name_a_field_or_a_mapping(h5):
    fields = {"a": "data", "b": Field("data", column=1), "c": {"name": "data", "column": 1}}
    model = check(h5(data=numbers((ROWS, 3))), fields)
    assert Field.of({"name": "y", None: "drop"}).null == "drop"  # YAML reads null as None
    assert model.values["c"].tolist() == numbers((ROWS, 3))[:, 1].tolist()


@pytest.mark.parametrize("key", ["y", "a.b"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"colum": 1}, ".colum: no such option; did you mean column?"),
        ({"column": -1}, ".column: -1"),
        ({"window": (3, 3)}, ".window: (3, 3)"),
        ({"dtype": "float31"}, ".dtype: 'float31'"),
        ({"classes": "cat"}, ".classes: 'cat'"),
        ({"window": (0, 3), "pad": "first"}, ".pad: 'first' is not one of last, zero"),
        ({"pad": "last"}, ".pad: 'last' needs a window"),
        ({"window": 2, "pad": "last"}, ".pad: 'last' needs a window"),
        ({"kind": "id"}, ".kind: 'id'"),
        ({"null": "none"}, ".null: 'none'"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_field_is_named(h5, key, wrong, said):
    refused(ConfigError, [f"fields.{key}{said}"], h5(data=numbers((ROWS, 3))), {key: {"name": "data", **wrong}})


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"ragged": "no"}, "ragged"),
        ({"attr": "a"}, "ragged"),
        ({"decode": "image"}, "ragged"),
        ({"max_length": 180}, "max_length"),
        ({"pad_side": "left"}, "pad_side"),
        ({"pad_side": "top"}, "pad_side"),
    ],
)
def test_options_that_do_not_fit_joined_samples_are_named(option, name):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        Field("x", **{"ragged": "concat"} | option)
