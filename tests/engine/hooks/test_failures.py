"""What a host hook returns is an array of a batch, or an error at its place that says what to return."""

import numpy as np
import pytest
import torch
from support.sources.hooked_loaders import hooked
from support.sources.hooks import explode

from lit_async_data.errors import TransformError

BFLOAT, META = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, device="meta")


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        ("sample", explode, r"failed on sample 9 \(row 9 of ArraySource\): ZeroDivisionError: no light"),
        (
            "sample",
            lambda s: {**s, "x": s["x"][:, 1:]},
            r"field 'x' of .* has shape \(3, 9, 8\), but \(3, 10, 8\) .* crop or",
        ),
        (
            "sample",
            lambda s: {**s, "x": s["x"] / 2},
            r"field 'x' of sample 9 .* float64, but uint8 .* as .astype\('uint8'\)",
        ),
        (
            "sample",
            lambda s: {"x": s["x"]},
            r"returned the keys x for sample 9 \(.*\), but x, y for the first .* same keys",
        ),
        ("sample", list, r"returned a list for sample 9 \(row 9 of ArraySource\); return a dict"),
        (
            "batch",
            explode,
            r"failed on the batch of samples 8, 9, 10, … \(4 in all\) \(the first is row 8 of Arr.*: Zero",
        ),
        ("batch", lambda b: {**b, "x": b["x"][:, :1]}, r"field 'x' of .* has shape \(1, 10, 8\), but \(3, 10, 8\) for"),
        ("batch", lambda b: {**b, "x": b["x"][:3]}, r"field 'x' .* has shape \(3, 3, 10, 8\), but .* each of the 4"),
        ("batch", lambda b: {**b, "y": b["y"] * 0.5}, r"field 'y' .* has dtype float64, but int64 for the first"),
        ("batch", lambda b: {"y": b["y"]}, r"returned the keys y for the batch .*, but x, y for the first sample"),
    ],
)
def test_a_wrong_result_is_the_error_of_its_batch_alone(kind, result, message):
    def hook(values):
        return result(values) if 9 in np.atleast_1d(values["y"]) else values

    with hooked(**{kind: hook}, workers=2) as loader:
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(TransformError, match=f"^{kind}_transform: {message}") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [12, 13, 14, 15]
    error, first = caught.value, 9 if kind == "sample" else 8
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", first, first, "ArraySource")
    assert error.__notes__ == ["in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)"]
    assert isinstance(error.__cause__, ZeroDivisionError) is (result is explode)


@pytest.mark.parametrize(
    ("kind", "hook", "message"),
    [
        (
            "sample",
            lambda s: [s],
            r"returned a list for sample 0 \(row 0 of ArraySource\); return a dict with an array",
        ),
        ("sample", lambda s: {}, r"returned no field for sample 0 \(row 0 of ArraySource\); return at least one"),
        (
            "sample",
            lambda s: {"x": "text"},
            r"field 'x' of sample 0 \(.*\) is a str, .*; return an array or a number",
        ),
        ("sample", lambda s: {"x": None}, r"field 'x' of sample 0 \(.*\) is a NoneType, .*; return"),
        (
            "sample",
            lambda s: {"x": np.array(["a"])},
            "field 'x' of .* is an array of <U1, which no tensor can hold; ret",
        ),
        (
            "sample",
            lambda s: {"x": np.ma.array([1])},
            r"field 'x' .* is a MaskedArray, .*; return numpy.asarray\(…\) of it",
        ),
        ("sample", lambda s: {"x": 2**70}, "field 'x' of .* which does not fit into int64; return it as a float"),
        ("sample", lambda s: {"x": BFLOAT}, "field 'x' of .* is a tensor of torch.bfloat16, .* return a dense tensor"),
        ("sample", lambda s: {"x": META}, "field 'x' of .* is a tensor on meta; return it on the CPU"),
        (
            "sample",
            lambda s: {3: 1},
            r"the key 3 in the result for sample 0 \(.*\) is not text; name each field by text",
        ),
        ("sample", explode, r"failed on sample 0 \(row 0 of ArraySource\): ZeroDivisionError: no light"),
        (
            "batch",
            lambda b: b["y"],
            r"returned a ndarray for the batch of samples 0, 1 \(the first is row 0 of .*\); ret",
        ),
        ("batch", lambda b: {"x": b["x"].mean()}, r"field 'x' of the batch .* has shape \(\), but the first axis must"),
        (
            "batch",
            lambda b: {"x": b["x"][:1]},
            r"field 'x' .* \(1, 3, 10, 8\), but .* one row for each of the 2 samples",
        ),
        ("batch", lambda b: {"x": np.zeros(2)}, r"field 'x' .* shape \(2,\), but .* one row for each of the 3 samples"),
        (
            "batch",
            lambda b: {"x": np.eye(len(b["y"]))},
            r"field 'x' .* is float64 \(3,\) for each sample, .* \(2,\) in",
        ),
        ("batch", lambda b: dict.fromkeys("yz"[: len(b["y"]) - 1], b["y"]), "field 'z' of .*, but missing in a batch"),
        (
            "batch",
            explode,
            r"failed on the batch of samples 0, 1 \(the first is row 0 of ArraySource\): ZeroDivisionError",
        ),
    ],
)
def test_a_result_that_fits_no_batch_is_an_error_that_says_what_to_return(kind, hook, message):
    with (
        hooked(**{kind: hook}) as loader,
        pytest.raises(TransformError, match=f"^{kind}_transform: {message}") as caught,
    ):
        next(loader)
    error = caught.value
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", 0, 0, "ArraySource")
    assert "to learn what comes out" in error.__notes__[0]
