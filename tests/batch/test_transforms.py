"""`Normalize`: mean and std of integers, axes, and its inverse; and the `Moments` of statistics against numpy."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.statistics import IMAGES, check

from lit_async_data import ConfigError, Normalize, ToFloat, statistics
from lit_async_data.batch import transforms
from lit_async_data.batch.spec import FieldSpec
from lit_async_data.batch.transforms import Moments, first_measured
from lit_async_data.testing import ArraySource

SCANS = torch.tensor([[145, 300]], dtype=torch.int16)
CHANNELS = torch.tensor([[[[0, 255]]] * 3], dtype=torch.uint8)  # an image of 1 × 2 pixels


@pytest.mark.parametrize(
    ("given", "scale", "values", "wanted"),
    [
        ((258, 113), None, SCANS, [-1, 42 / 113]),
        ((0, 100), "stored", SCANS, [1.45, 3]),
        ((258, 113), "type", SCANS, [(145 / 32767 - 258) / 113, (300 / 32767 - 258) / 113]),
        ((0.5, 0.5), "type", torch.tensor([[0, 255]], dtype=torch.uint8), [-1, 1]),
        (([258, 0.5], [113, 1]), None, SCANS, [-1, 299.5]),  # one of the means is none of values from 0 to 1
        ((0.5, 0.5), "type", SCANS.float(), [289, 599]),
        (([0.1, 0.2, 0.3], [1, 2, 3]), "type", CHANNELS, [[[-0.1, 0.9]], [[-0.1, 0.4]], [[-0.1, 0.7 / 3]]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mean_and_std_are_those_of_the_stored_values_unless_scale_says_otherwise(given, scale, values, wanted, dtype):
    (found,) = Normalize(*given, scale=scale, dtype=dtype)((values,))
    assert torch.allclose(found, torch.tensor([wanted], dtype=found.dtype), rtol=1e-6)


def test_means_from_0_to_1_of_integers_are_an_error_that_names_both_spellings():
    with pytest.raises(ConfigError, match=r'^scale: .*int16.*scale="type".*32767.*scale="stored"'):
        Normalize([0.2, 1], 0.5)((SCANS,))
    with pytest.raises(ConfigError, match=r"^scale: 'byte' is not one of stored, type"):
        Normalize(scale="byte")


@pytest.mark.parametrize(("axis", "shape"), [(0, (3,)), (-1, (5,)), (2, (5,)), ((0, 1), (3, 4)), ((0, -1), (3, 5))])
def test_means_go_along_the_axes_of_a_sample_that_are_named(axis, shape):
    values, mean = torch.rand(2, 3, 4, 5), np.arange(1.0, np.prod(shape) + 1).reshape(shape)
    at = [each % 3 for each in (axis if isinstance(axis, tuple) else (axis,))]
    wide = torch.tensor(mean.reshape([values.shape[each + 1] if each in at else 1 for each in range(3)]))
    normalize = Normalize(mean, 2 * mean, axis=axis)
    assert torch.allclose(normalize((values,))[0], ((values - wide) / (2 * wide)).float())
    assert torch.allclose(normalize.inverse(normalize(values)), values, atol=1e-5)
    with pytest.raises(ConfigError, match=r"channels, but a batch of the field has .* name it with axis"):
        normalize((values[:, :2, :3, :4],))


@pytest.mark.parametrize("dtype", ["u1", "i2", "i8", "f2", "f4", "f8"])
def test_statistics_make_a_mean_of_0_and_a_std_of_1_and_predictions_come_back(dtype):
    x = (np.random.default_rng(0).random((50, 3, 4, 4)) * [[[[100]], [[20]], [[3]]]]).astype(dtype)
    arrays = {"x": x, "y": 1000 + 30 * x[:, 0, 0, 0].astype("f4"), "id": np.arange(50)}
    found = statistics(ArraySource(arrays))
    normalize = Normalize.of(found, ["x", "y"])
    made = normalize({key: torch.from_numpy(values) for key, values in arrays.items()})
    assert made["id"].tolist() == [*range(50)]
    for values in (*made["x"].transpose(0, 1), made["y"]):
        assert abs(values.mean()) < 1e-4
        assert values.std(correction=0) == pytest.approx(1, rel=1e-4)
    what = r"^fields: 'x', 'y' are each normalised .*inverse\(\{\*\*batch, 'y': values\}\)"
    with pytest.raises(ConfigError, match=what):
        normalize.inverse(made["y"])
    back = normalize.inverse(made)
    assert torch.allclose(back["x"], torch.from_numpy(x).float(), atol=1e-3)
    assert torch.allclose(Normalize.of(found, "y").inverse(made["y"]), back["y"])


@pytest.mark.parametrize(("dtype", "first", "step"), [("f8", 1.7e9, 1), ("i4", 1.7e9, 1), ("f4", 1e5, 128)])
def test_the_mean_is_subtracted_before_digits_are_lost(dtype, first, step):
    seconds = (first + np.arange(3600) / step).astype(dtype)
    made = Normalize.of(statistics(ArraySource({"x": seconds[:, None]})))({"x": torch.from_numpy(seconds[:, None])})
    wanted = torch.from_numpy((np.arange(3600) - 1799.5) / np.arange(3600).std()).float()
    assert torch.allclose(made["x"][:, 0], wanted, atol=1e-5)
    values = torch.tensor([1000, 1001, 1002.0])
    assert Normalize(1001, 1, dtype="bfloat16")((values,))[0].tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.nan, r"^statistics: 'x' has no values but NaN at \(1,\) of axis \(0,\).*; leave the field out"),
        (np.inf, r"^statistics: 'x' has infinite values at \(1,\)"),
        (7, r"^statistics: 'x' has only one value at \(1,\).*np\.where\(std, std, 1\), scale='stored', axis=AXIS"),
    ],
)
def test_a_channel_without_spread_is_named(value, said):
    x = np.random.default_rng(0).random((5, 3, 4, 4)).astype("f4")
    x[:, 1] = value
    found = statistics(ArraySource({"x": x}))
    with pytest.raises(ConfigError, match=said):
        Normalize.of(found)
    if value == 7:  # the advice
        mean, std = found["x"].mean, found["x"].std
        made = Normalize(mean, np.where(std, std, 1), scale="stored", axis=(0,))
        assert not made({"x": torch.from_numpy(x)})["x"][:, 1].any()


@pytest.mark.parametrize("shape", [(2, 2, 8, 8), (3, 2, 8, 8), (2,)])  # a window of 2 or 3 rows, and a mean of images
def test_statistics_of_rows_need_the_axis_of_samples_with_other_axes(shape):
    rows = np.stack([np.linspace(0, 2, 64), np.linspace(100, 300, 64)]).reshape(1, 2, 8, 8)
    found = statistics(ArraySource({"x": rows}))["x"]
    values = torch.from_numpy(rows[0].mean((1, 2)) if len(shape) == 1 else np.stack([rows[0]] * shape[0]))
    said = rf"^mean, std: 2 channels, .* of the statistics have 3 and N: .*\(1, {shape[0]}.* name it with axis \(1 be"
    for normalize in (made := Normalize.of({"x": found, "y": found}, ["x", "y"])), made.inverse:
        with pytest.raises(ConfigError, match=said):
            normalize({"x": values[None], "y": torch.from_numpy(rows)})
    axis = len(shape) > 1
    made = Normalize.of({"x": found, "y": found}, ["x", "y"], axis={"x": int(axis)})
    made = made({"x": values[None], "y": torch.from_numpy(rows)})
    assert torch.allclose(made["x"].movedim(1 + axis, 0).flatten(1).mean(1), torch.zeros(2), atol=1e-5)
    assert torch.allclose(made["y"].mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    one = Normalize.of({"x": found}, axis=axis)({"x": values[None]})
    assert torch.equal(one["x"], made["x"])


@pytest.mark.parametrize("labels", [np.arange(5), np.eye(5, dtype="?")])
def test_labels_are_normalised_only_by_name(labels):
    found = statistics(ArraySource({"y": labels, "x": np.arange(10, dtype="u1").reshape(5, 2)}))
    assert Normalize.of(found).fields == first_measured(found | {"x": FieldSpec((3,), np.dtype("f4"))}) == ("x",)
    assert Normalize.of(found, "y").fields == ("y",)
    del found["x"]
    with pytest.raises(ConfigError, match=r"^fields: no field is named, and 'y' hold .*; name the field to normalise"):
        Normalize.of(found)


def test_axes_may_be_named_in_any_order_but_once():
    values, mean = torch.rand(2, 3, 3, dtype=torch.float64), np.arange(9.0).reshape(3, 3)
    for axis in ((1, 0), (-1, 0)):
        assert torch.equal(Normalize(mean, 1, axis=axis, dtype="float64")((values,))[0], values - torch.tensor(mean.T))
    with pytest.raises(ConfigError, match=r"^axis: \(0, 1\) does not name the 1 axes"):
        Normalize([1, 2], 1, axis=(0, 1))
    with pytest.raises(ConfigError, match=r"^mean, std: 3 × 3 channels, .* has 3 × 3 on axis 1, 1"):
        Normalize(mean, 1, axis=(0, -2))((values,))


@pytest.mark.parametrize("transform", [Normalize(5, 2), ToFloat()])
def test_arrays_and_fields_without_statistics_are_refused_by_name(transform):
    with pytest.raises(ConfigError, match="'x' is no tensor but ndarray; pass this as device_transform"):
        transform({"x": np.ones(3)})
    with pytest.raises(ConfigError, match=r"^fields: no statistics of 'z'; choose from 'x'"):
        Normalize.of(statistics(ArraySource({"x": np.eye(3)})), "z")


def test_one_transform_serves_several_devices_and_types_and_copies_take_no_constants():
    normalize = Normalize([1, 2], 2)
    for dtype in (torch.float32, torch.float64):
        for device in ("cpu", "meta", "cpu"):
            made = normalize(torch.ones(1, 2, dtype=dtype, device=device))
            assert (made.device.type, made.dtype) == (device, torch.float32)
    for copied in (pickle.loads(pickle.dumps(normalize)), copy.deepcopy(normalize)):
        assert not copied._scalings[None]._by_device
        assert torch.equal(copied(torch.ones(1, 2)), normalize(torch.ones(1, 2)))


def test_a_gradient_goes_through_constants_that_were_made_in_inference_mode():
    undo = Normalize(2.0, 4.0, scale="stored").inverse
    values = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        undo(torch.ones(3))
    undo(values).sum().backward()
    assert values.grad.tolist() == [4.0] * 3


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
        (IMAGES, (0, 2)),
        (IMAGES, (0, 1, 2)),
        (GAPS.astype("f4"), (0,)),
        (GAPS, (0,)),
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


def test_floats_have_no_usual_mean_but_bytes_do():
    for made in (Normalize(axis=1), Normalize(3.0), Normalize(std=2)):
        with pytest.raises(ConfigError, match=r"^mean, std: one is missing, and floats have no usual range"):
            made((SCANS.float(),))
    assert Normalize(scale="type")((CHANNELS,))[0].flatten()[:2].tolist() == [-1, 1]
    assert Normalize().inverse(torch.tensor([-1.0, 1.0])).tolist() == [0, 1]


@pytest.mark.parametrize(("axis", "alone"), [({"act": 1, "q": 0}, True), ({"act": 1}, False)])
def test_each_field_has_an_axis_of_its_own(axis, alone):
    arrays = {"q": np.random.default_rng(0).random((9, 4)), "act": np.arange(270.0).reshape(9, 5, 6)}
    source, made = ArraySource(arrays), Normalize(fields=None if alone else ["q", "act"], axis=axis)
    with pytest.raises(ConfigError, match=r"axis: 'act' is not one of the fields q$"):
        Normalize(fields="q", axis=axis)
    kept = {key: made.kept(key, source.spec[key]) for key in arrays}
    of = Normalize.of(statistics(source, [*arrays], axis=kept), [*arrays], dtype="float64")
    found = of({key: torch.from_numpy(values) for key, values in arrays.items()})
    assert found["act"].mean((0, 1)).abs().max() < 1e-9
    assert bool(found["q"].mean(0).abs().max() < 1e-9) is alone
