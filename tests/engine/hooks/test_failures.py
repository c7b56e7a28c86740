"""What a host hook returns is an array of a batch, or an error at its place that says what to return."""

import numpy as np
import pytest
import torch
from support.sources.hooked_loaders import hooked
from support.sources.hooks import explode, wrong_at

from lit_async_data.errors import TransformError

WRONG = {
    "error": (explode, r"failed on sample 9 \(row 9 of ArraySource\): ZeroDivisionError: no light"),
    "shape": (
        lambda s: {**s, "x": s["x"][:, 1:]},
        r"field 'x' of sample 9 \(row 9 .*\) has shape \(3, 9, 8\), but \(3, 10, 8\) .*: resize, crop or pad",
    ),
    "dtype": (
        lambda s: {**s, "x": s["x"] / 2},
        r"field 'x' of sample 9 .* has dtype float64, but uint8 .* one dtype for all samples, as .astype\('uint8'\)",
    ),
    "missing": (
        lambda s: {"x": s["x"]},
        r"returned the keys x for sample 9 \(.*\), but x, y for the first sample; .* same keys",
    ),
    "list": (list, r"returned a list for sample 9 \(row 9 of ArraySource\); return a dict"),
}


@pytest.mark.parametrize(("result", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_sample_is_the_error_of_its_batch_alone(result, message):
    with hooked(sample=wrong_at(9, result), workers=2) as loader:
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(TransformError, match=f"^sample_transform: {message}") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [12, 13, 14, 15]
    error = caught.value
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", 9, 9, "ArraySource")
    assert error.__notes__ == ["in batch 2 of epoch 0, samples 8, 9, 10, … (4 in all)"]
    if result is explode:
        assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            explode,
            r"failed on the batch of samples 8, 9, 10, … \(4 in all\) \(the first is row 8 of ArraySource\): Zero",
        ),
        (
            lambda b: {**b, "x": b["x"][:, :1]},
            r"field 'x' of the batch .* has shape \(1, 10, 8\), but \(3, 10, 8\) for",
        ),
        (
            lambda b: {**b, "x": b["x"][:3]},
            r"field 'x' of the batch .* has shape \(3, 3, 10, 8\), but .* each of the 4",
        ),
        (lambda b: {**b, "y": b["y"] * 0.5}, r"field 'y' of the batch .* has dtype float64, but int64 for the first"),
        (lambda b: {"y": b["y"]}, r"returned the keys y for the batch .*, but x, y for the first sample"),
    ],
)
def test_a_wrong_batch_is_an_error_at_its_place(result, message):
    def hook(batch):
        return result(batch) if 9 in batch["y"] else batch

    with hooked(batch=hook, workers=1) as loader:
        assert [next(loader)["y"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(TransformError, match=f"^batch_transform: {message}") as caught:
            next(loader)
        assert next(loader)["y"].tolist() == [12, 13, 14, 15]
    assert (caught.value.sample_id, caught.value.row) == (8, 8)


HOW = [
    (lambda s: [s], r"returned a list for sample 0 \(row 0 of ArraySource\); return a dict with an array for each key"),
    (lambda s: {}, r"returned no field for sample 0 \(row 0 of ArraySource\); return at least one"),
    (lambda s: {"x": "text"}, r"field 'x' of sample 0 \(.*\) is a str; return an array or a number, or leave it out"),
    (lambda s: {"x": None}, r"field 'x' of sample 0 \(.*\) is a NoneType; return"),
    (lambda s: {"x": np.array(["a"])}, r"field 'x' of .* is an array of <U1, which no tensor can hold; return numbers"),
    (lambda s: {"x": np.ma.array([1])}, r"field 'x' of .* is a MaskedArray; return numpy.asarray\(…\) of it"),
    (lambda s: {"x": 2**70}, r"field 'x' of .* which does not fit into int64; return it as a float"),
    (
        lambda s: {"x": torch.zeros(2, dtype=torch.bfloat16)},
        r"field 'x' of .* is a tensor of torch.bfloat16, .* return a dense tensor",
    ),
    (lambda s: {"x": torch.zeros(2, device="meta")}, r"field 'x' of .* is a tensor on meta; return it on the CPU"),
    (lambda s: {3: 1}, r"the key 3 in the result for sample 0 \(.*\) is not text; name each field by text"),
    (lambda s: 1 / 0, r"failed on sample 0 \(row 0 of ArraySource\): ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("hook", "message"), HOW, ids=range(len(HOW)))
def test_a_result_that_cannot_be_a_sample_is_an_error_that_says_what_to_return(hook, message):
    with (
        hooked(sample=hook) as loader,
        pytest.raises(TransformError, match=f"^sample_transform: {message}") as caught,
    ):
        next(loader)
    error = caught.value
    assert (error.stage, error.sample_id, error.row, error.file) == ("transform", 0, 0, "ArraySource")
    assert "to learn what comes out" in error.__notes__[0]


BATCHES = [
    (
        lambda b: b["y"],
        r"returned a ndarray for the batch of samples 0, 1 \(the first is row 0 of ArraySource\); return",
    ),
    (lambda b: {"x": b["x"].mean()}, r"field 'x' of the batch .* has shape \(\), but the first axis must have one row"),
    (
        lambda b: {"x": b["x"][:1]},
        r"field 'x' of .* has shape \(1, 3, 10, 8\), but .* one row for each of the 2 samples",
    ),
    (lambda b: {"x": np.zeros(2)}, r"field 'x' of .* has shape \(2,\), but .* one row for each of the 3 samples"),
    (lambda b: {"x": np.eye(len(b["y"]))}, r"field 'x' of .* is float64 \(3,\) for each sample, but float64 \(2,\) in"),
    (lambda b: {"y": b["y"], **({"z": b["y"]} if len(b["y"]) > 2 else {})}, r"field 'z' of .*, but missing in a batch"),
    (lambda b: 1 / 0, r"failed on the batch of samples 0, 1 \(the first is row 0 of ArraySource\): ZeroDivisionError"),
]


@pytest.mark.parametrize(("hook", "message"), BATCHES, ids=range(len(BATCHES)))
def test_a_result_that_cannot_be_a_batch_is_an_error_that_says_what_to_return(hook, message):
    with hooked(batch=hook) as loader, pytest.raises(TransformError, match=f"^batch_transform: {message}"):
        next(loader)
