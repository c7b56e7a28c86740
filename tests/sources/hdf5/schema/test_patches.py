"""Patches of volumes that do not fit their volumes, each other, or the options of a source."""

import numpy as np
import pytest
from support.sources.oracle import refused

from lit_async_data import ConfigError, Field, FormatError, MissingError

FLAT, SIZE = Field("ct", patch=(8, 7)), {"patch": (8, 7, 3)}
CT, STRIDED = Field("ct", **SIZE), Field("mask", **SIZE, stride=(1, 1, 1))
SHAPES = ["0.h5:/other", "(20, 31, 18)", "(20, 31, 17)"]
SIZES = ["/mask", "patches (8, 7, 4)", "/ct", "patches (8, 7, 3)"]
FAULTS = [
    ({"x": Field("ct", patch=(21, 8, 7))}, {}, FormatError, ["0.h5:/ct", "(20, 31, 17)", "(21, 8, 7)", "pad='zero'"]),
    ({"x": FLAT}, {}, ConfigError, ["fields.x.patch", "2 axes", "(20, 31, 17)", "layout"]),
    ({"x": FLAT}, {"layout": "NHW"}, ConfigError, ["layout", "NHW", "different capital letters"]),
    ({"x": FLAT}, {"layout": "NDHW"}, ConfigError, ["'NDHW' for", "without N"]),
    ({"x": FLAT}, {"layout": "HW"}, ConfigError, ["'HW' names 2 axes", "has 3", "(20, 31, 17)"]),
    ({"x": FLAT}, {"layout": {"x": 3}}, ConfigError, ["layout", "3"]),
    ({"x": CT, "y": Field("other", **SIZE)}, {}, FormatError, [*SHAPES, "ct"]),
    ({"x": CT, "y": Field("mask", patch=(8, 7, 4))}, {}, FormatError, SIZES),
    ({"x": CT, "y": STRIDED}, {}, FormatError, ["/mask", "stride (1, 1, 1)", "stride (8, 7, 3)"]),
    ({"x": CT, "y": "rows"}, {}, ConfigError, ["fields.y", "0.h5:/rows", "table="]),
    ({"x": Field(["ct", "other"], **SIZE)}, {}, FormatError, SHAPES),
    ({"x": Field("c*", **SIZE)}, {"sample": "group"}, ConfigError, ["sample", "volumes"]),
    ({"x": Field("scalar", patch=(1,))}, {}, FormatError, ["0.h5:/scalar"]),
    ({"x": Field("none", patch=(1,))}, {}, MissingError, ["none"]),
    ({"x": Field("empty", patch=(1, 1))}, {}, FormatError, ["0.h5:/empty", "(0, 4)"]),
    ({"x": CT}, {"stride": 2}, ConfigError, ["stride", "Field(stride=…)"]),
    ({"x": CT}, {"episodes": "rows"}, ConfigError, ["episodes", "volumes"]),
    ({"x": CT}, {"patches_per_volume": 0}, ConfigError, ["patches_per_volume", "0"]),
    ({"x": STRIDED}, {"patches_per_volume": 4}, ConfigError, ["fields.x.stride"]),
    ({"x": "rows"}, {"patches_per_volume": 4}, ConfigError, ["patches_per_volume", "patch=(32, 64, 64)"]),
    ({"x": CT, "x_origin": Field("mask", **SIZE)}, {}, ConfigError, ["x_origin", "the origin"]),
]


@pytest.mark.parametrize(("fields", "options", "error", "words"), FAULTS, ids=lambda each: "")
def test_a_fault_is_named_before_training(h5, fields, options, error, words):
    volumes = dict(zip(("ct", "mask", "other"), (np.zeros((20, 31, n)) for n in (17, 17, 18))))
    path = h5("0.h5", **volumes, rows=np.arange(27), scalar=3.0, empty=np.zeros((0, 4)))
    refused(error, words, path, fields, **options)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"patch": (8, 0)}, "patch: 0 is not a whole number from 1"),
        ({"patch": ()}, "patch"),
        ({"patch": (8, True)}, "patch: True"),
        ({"patch": "88"}, "patch: '88'"),
        ({"patch": (8, 8), "stride": (2,)}, "stride"),
        ({"stride": (2,)}, r"stride: \(2,\) needs patch="),
        ({"patch": (8, 8), "window": (0, 2)}, "window: does not apply to patches"),
        ({"patch": (8, 8), "decode": "image"}, "decode: does not apply to patches"),
    ],
)
def test_options_of_a_field_that_do_not_fit_are_refused(options, word):
    with pytest.raises(ConfigError, match=f"^{word}"):
        Field("x", **options)
