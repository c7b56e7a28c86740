"""Which part of an image is wanted, and the options that say so."""

import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from support.files.pictures import draw_of

from lit_async_data.errors import ConfigError
from lit_async_data.order.permutation import derived_keys
from lit_async_data.sources.images.formats import RESIZES, ImageShape, crop_of
from lit_async_data.sources.images.image import ImageDecoder

SIDES = st.integers(1, 5000) | st.sampled_from([1, 2, 3, 2**16, 2**24 + 1])


@given(
    height=SIDES,
    width=SIDES,
    target=st.tuples(st.integers(1, 600), st.integers(1, 600)),
    key=st.integers(0, 2**64 - 1),
    scale=st.tuples(st.floats(1e-6, 1), st.floats(1e-6, 1)).map(sorted),
    ratio=st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)).map(sorted),
)
def test_boxes_lie_in_the_image_and_hold_something(*, height, width, target, key, scale, ratio):
    for resize in RESIZES:
        shape = ImageShape(image_size=target, resize=resize, scale=scale, ratio=ratio)
        check(shape, height, width, key)
        check(shape, height, width, None)


def check(shape, height, width, key):
    resize, target = shape.resize, shape.image_size
    crop = crop_of(shape, height, width, target, draw_of(shape, key))
    left, upper, right, lower = crop.box
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height
    rows, columns = crop.size
    assert 1 <= rows <= target[0] - crop.corner[0]
    assert 1 <= columns <= target[1] - crop.corner[1]
    if resize != "pad":
        assert (crop.size, crop.corner) == (target, (0, 0))
    if resize == "crop" or (resize == "random_crop" and key is None):
        # Of the target's shape, in the middle, and as large as can be; where it is large, to whole pixels.
        large = min(right - left, lower - upper) >= 127
        off = {"rel_tol": 1e-7, "abs_tol": 2 if large else 0}
        assert math.isclose((right - left) / target[1], (lower - upper) / target[0], rel_tol=0.016 if large else 1e-7)
        assert math.isclose(left + right, width, **off)
        assert math.isclose(upper + lower, height, **off)
        assert math.isclose(right - left, width, **off) or math.isclose(lower - upper, height, **off)
        assert not large or all(edge == int(edge) for edge in crop.box)
    if resize == "pad":
        assert crop.box == (0, 0, width, height)
        assert rows == target[0] or columns == target[1]
        assert abs(rows - min(target[0], height * target[1] / width)) <= 1 or rows == 1
        assert all(abs(2 * corner + side - all_) <= 1 for corner, side, all_ in zip(crop.corner, crop.size, target))
    if resize == "random_crop" and key is not None:
        assert all(isinstance(edge, int) for edge in crop.box)


@given(*[st.integers(1, 300)] * 4)
def test_padding_is_that_of_pillow(height, width, tall, wide):
    crop = crop_of(ImageShape(image_size=(tall, wide), resize="pad"), height, width, (tall, wide), None)
    assume(round(height / width * wide) and round(width / height * tall))  # Pillow refuses images without pixels
    white = np.asarray(ImageOps.pad(Image.new("L", (width, height), 255), (wide, tall), color=0))
    rows, columns = map(np.flatnonzero, (white.any(1), white.any(0)))
    assert (crop.corner, crop.size) == ((rows[0], columns[0]), (len(rows), len(columns)))


def torchvisions(height, width, scale, ratio, rng):
    """RandomResizedCrop.get_params of torchvision 0.26, with Python's numbers for torch's."""
    area, log_ratio = height * width, (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(10):
        target_area = area * rng.uniform(*scale)
        aspect_ratio = math.exp(rng.uniform(*log_ratio))
        w, h = round(math.sqrt(target_area * aspect_ratio)), round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    in_ratio = width / height
    if in_ratio < min(ratio):
        w, h = width, round(width / min(ratio))
    elif in_ratio > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


def boxes_of(shape, height, width, count):
    draws = ImageDecoder(shape, ()).draws(derived_keys(5, np.arange(count)), count)
    return [crop_of(shape, height, width, shape.image_size, draw).box for draw in draws]


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [(500, 333, (0.3, 0.6), (0.5, 3.0)), (100, 200, (0.5, 1.0), (3 / 4, 4 / 3))],  # of which few boxes fit
)
def test_random_crops_are_distributed_as_torchvisions(height, width, scale, ratio):
    rng, count = random.Random(0), 8000
    theirs = np.array([torchvisions(height, width, scale, ratio, rng) for _ in range(count)], float)
    shape = ImageShape(image_size=224, resize="random_crop", scale=scale, ratio=ratio)
    left, upper, right, lower = np.array(boxes_of(shape, height, width, count), float).T
    mine = np.stack([upper, left, lower - upper, right - left], axis=1)

    def measures(boxes):
        upper, left, tall, wide = boxes.T
        room = np.maximum(height - tall, 1), np.maximum(width - wide, 1)
        down, right = upper / room[0], left / room[1]
        return {"area": tall * wide, "ratio": wide / tall, "down": down, "right": right, "across": down * right}

    one, two = measures(mine), measures(theirs)
    for name in one:
        # Kolmogorov and Smirnov: equal distributions differ by more once in two thousand.
        both = np.sort(np.concatenate([one[name], two[name]]))
        steps = [np.searchsorted(np.sort(values), both, side="right") / count for values in (one[name], two[name])]
        assert np.abs(steps[0] - steps[1]).max() < 1.95 * math.sqrt(2 / count), name


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 1000, (493, 0, 506, 10)), (1000, 10, (0, 493, 10, 506)), (1000, 1000, (0, 0, 1000, 1000))],
)
def test_where_no_box_fits_the_middle_is_taken(height, width, box):
    shape = ImageShape(image_size=8, resize="random_crop", scale=(1, 1))
    assert {*boxes_of(shape, height, width, 300)} == {box}


def test_every_place_of_a_small_box_comes_up():
    shape = ImageShape(image_size=8, resize="random_crop", scale=(0.25, 0.25), ratio=(1, 1))
    corners = {(left, upper) for left in range(3) for upper in range(3)}
    assert {*boxes_of(shape, 4, 4, 300)} == {(left, upper, left + 2, upper + 2) for left, upper in corners}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "image_size: 0 is not"),
        *(({"image_size": wrong}, "image_size: ") for wrong in ((3,), True, "224", 65536)),
        ({"mode": "BGR"}, "mode: 'BGR' is not one of L, LA, RGB, RGBA"),
        ({"resize": "pad"}, "image_size: missing"),
        ({"scale": (0, 1)}, r"scale: \(0, 1\) is not a pair of numbers above 0 of at most 1"),
        *(({"scale": wrong}, "scale: ") for wrong in ((0.5, 1.1), (0.5, 0.4), 0.5, (0.1, math.nan))),
        ({"fill": 256}, "fill: 256 is not a whole number from 0 to 255"),
        ({"mode": "uint16", "upper_8_bits": True}, "upper_8_bits: mode uint16"),
        *(({"mode": "P", "interpolation": each}, "interpolation: .* mixes class") for each in ("bilinear", "box")),
        ({"max_pixels": 0}, "max_pixels: 0 is not a whole number from 1 on"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        ImageShape(**options)


def test_options_are_plain_values_whatever_they_came_as():
    shape = ImageShape(image_size=[np.int64(3), 4], scale=[0.5, 1], ratio=[1, 1], fill=np.int32(3))
    assert shape == ImageShape(image_size=(3, 4), scale=(0.5, 1.0), ratio=(1.0, 1.0), fill=3.0)
    assert all(type(side) is int for side in shape.image_size)
    assert pickle.loads(pickle.dumps(shape)) == shape


def test_fields_with_the_same_text_share_their_crops():
    def crop(draw=None, key=3):
        shape = ImageShape(image_size=8, resize="random_crop", draw=draw)
        return crop_of(shape, 200, 300, (8, 8), draw_of(shape, key))

    # Boxes of a key never change: a run goes on after an update.
    assert [crop(draw, 2**64 - 3).box for draw in (None, "a")] == [(85, 9, 280, 192), (30, 71, 124, 172)]
    assert crop("a") == crop("a")
    assert len({crop(draw).box for draw in (None, "a", "b")}) == 3
    assert crop("a") != crop("a", key=4)
    assert crop("a", None) == crop(None, None)  # the middle, in evaluation
    for wrong in ("", 3, True):
        with pytest.raises(ConfigError, match=r"^draw: .* is not text"):
            ImageShape(draw=wrong)
