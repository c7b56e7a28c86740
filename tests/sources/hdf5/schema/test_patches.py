"""Patches of volumes that do not fit their volumes, each other, or the options of a source."""

import h5py
import numpy as np
import pytest
from support.sources.oracle import refused

from lit_async_data import ConfigError, Field, FormatError, MissingError

FAULTS = [
    ({"x": Field("ct", patch=(21, 8, 7))}, {}, FormatError, ["0.h5:/ct", "(20, 31, 17)", "(21, 8, 7)", "pad='zero'"]),
    ({"x": Field("ct", patch=(8, 7))}, {}, ConfigError, ["fields.x.patch", "2 axes", "(20, 31, 17)", "layout"]),
    ({"x": Field("ct", patch=(8, 7))}, {"layout": "NHW"}, ConfigError, ["layout", "NHW", "different capital letters"]),
    ({"x": Field("ct", patch=(8, 7))}, {"layout": "NDHW"}, ConfigError, ["'NDHW' for", "without N"]),
    ({"x": Field("ct", patch=(8, 7))}, {"layout": "HW"}, ConfigError, ["'HW' names 2 axes", "has 3", "(20, 31, 17)"]),
    ({"x": Field("ct", patch=(8, 7))}, {"layout": {"x": 3}}, ConfigError, ["layout", "3"]),
    (
        {"x": Field("ct", patch=(8, 7, 3)), "y": Field("other", patch=(8, 7, 3))},
        {},
        FormatError,
        ["0.h5:/other", "(20, 31, 18)", "(20, 31, 17)", "ct"],
    ),
    (
        {"x": Field("ct", patch=(8, 7, 3)), "y": Field("mask", patch=(8, 7, 4))},
        {},
        FormatError,
        ["/mask", "patches (8, 7, 4)", "/ct", "patches (8, 7, 3)"],
    ),
    (
        {"x": Field("ct", patch=(8, 7, 3)), "y": Field("mask", patch=(8, 7, 3), stride=(1, 1, 1))},
        {},
        FormatError,
        ["/mask", "stride (1, 1, 1)", "stride (8, 7, 3)"],
    ),
    ({"x": Field("ct", patch=(8, 7, 3)), "y": "rows"}, {}, ConfigError, ["fields.y", "0.h5:/rows", "table="]),
    ({"x": Field(["ct", "other"], patch=(8, 7, 3))}, {}, FormatError, ["0.h5:/other", "(20, 31, 18)", "(20, 31, 17)"]),
    ({"x": Field("c*", patch=(8, 7, 3))}, {"sample": "group"}, ConfigError, ["sample", "volumes"]),
    ({"x": Field("scalar", patch=(1,))}, {}, FormatError, ["0.h5:/scalar"]),
    ({"x": Field("none", patch=(1,))}, {}, MissingError, ["none"]),
    ({"x": Field("empty", patch=(1, 1))}, {}, FormatError, ["0.h5:/empty", "(0, 4)"]),
    ({"x": Field("ct", patch=(8, 7, 3))}, {"stride": 2}, ConfigError, ["stride", "Field(stride=…)"]),
    ({"x": Field("ct", patch=(8, 7, 3))}, {"episodes": "rows"}, ConfigError, ["episodes", "volumes"]),
    ({"x": Field("ct", patch=(8, 7, 3))}, {"patches_per_volume": 0}, ConfigError, ["patches_per_volume", "0"]),
    (
        {"x": Field("ct", patch=(8, 7, 3), stride=(2, 2, 2))},
        {"patches_per_volume": 4},
        ConfigError,
        ["fields.x.stride"],
    ),
    ({"x": "rows"}, {"patches_per_volume": 4}, ConfigError, ["patches_per_volume", "patch=(32, 64, 64)"]),
    (
        {"x": Field("ct", patch=(8, 7, 3)), "x_origin": Field("mask", patch=(8, 7, 3))},
        {},
        ConfigError,
        ["x_origin", "the origin"],
    ),
]


@pytest.mark.parametrize(("fields", "options", "error", "words"), FAULTS, ids=lambda each: "")
def test_a_fault_is_named_before_training(tmp_path, fields, options, error, words):
    with h5py.File(tmp_path / "0.h5", "w") as file:
        file["ct"], file["mask"], file["other"] = (np.zeros((20, 31, n)) for n in (17, 17, 18))
        file["rows"], file["scalar"], file["empty"] = np.arange(27), 3.0, np.zeros((0, 4))
    refused(error, words, tmp_path / "0.h5", fields, **options)


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
