"""Which images of a sample show the same places, and which grey ones need a mode."""

import pytest

from lit_async_data.errors import ConfigError
from lit_async_data.sources.images.image import Alignment, Shown
from lit_async_data.sources.images.image_shape import ImageShape


def complaint(image, mask, *, of_image=None, of_mask=None):
    """What is wrong with an image and a mask, each (height, width, orientation); empty if nothing."""
    shapes = {"x": ImageShape(**of_image or {}), "m": ImageShape(**{"mode": "P", **(of_mask or {})})}
    shown = {"x": {7: Shown(image[:2], image[2], "RGB")}, "m": {7: Shown(mask[:2], mask[2], "L")}}
    return "".join(f"{key} {place}: {what}" for key, place, what in Alignment(shapes).mismatches(shown))


@pytest.mark.parametrize("turned", range(2, 9))
def test_one_turned_image_beside_one_that_is_not_is_refused(turned):
    upright = (40, 20) if turned > 4 else (20, 40)
    message = complaint((*upright, turned), (20, 40, 1))
    assert message.startswith(f"m 7: x is turned by the orientation in its file ({turned}), but m, whose shape is that")
    assert "ImageOps.exif_transpose(image).save(…); if x and m show different things, set draw: for one" in message
    assert "m is turned" in complaint((20, 40, 1), (*upright, turned))  # the mask may be the one that is turned
    assert "x is turned" in complaint((*upright, turned), (10, 20, 1))  # and smaller
    assert "x is turned" in complaint((*upright, turned), (20, 40, 1), of_mask={"mode": "L"})
    assert complaint((*upright, turned), (*upright, turned)) == ""
    assert complaint((*upright, turned), (20, 40, 1), of_mask={"draw": "m"}) == ""


def test_a_mask_made_from_the_turned_image_fits():
    assert complaint((40, 20, 6), (40, 20, 1)) == ""
    assert complaint((400, 200, 6), (40, 20, 1)) == ""


@pytest.mark.parametrize("mask", [(20, 40), (10, 20), (200, 400), (7, 14), (1, 2), (3001, 6001)])
def test_masks_of_another_scale_fit(mask):
    assert complaint((20, 40, 1), (*mask, 1)) == ""


@pytest.mark.parametrize("mask", [(10, 30), (40, 20), (20, 44), (1000, 1000)])
def test_masks_of_another_shape_are_refused(mask):
    message = complaint((20, 40, 1), (*mask, 1))
    assert message.startswith(f"m 7: x has 20×40 and m has {mask[0]}×{mask[1]} pixels (height × width), so mask and")
    assert complaint((20, 40, 1), (*mask, 1), of_mask={"mode": "L"}) == ""  # it may be another picture
    assert complaint((20, 40, 1), (*mask, 1), of_image={"mode": "P"}) == ""  # two masks


@pytest.mark.parametrize("mode", ["P", "L", "1", "I;16"])
def test_grey_and_palettes_need_a_mode_beside_another_image(mode):
    def check(*, image_size=8, **options):
        shapes = {"x": ImageShape(image_size=8), "m": ImageShape(image_size=image_size, **options)}
        shown = {"x": {0: Shown((9, 9), 1, "RGB")}, "m": {0: Shown((9, 9), 1, mode)}}
        Alignment(shapes).check_modes(shown)

    message = "fields.m.mode: missing: the first image is grey or has a palette, .*; set P for the numbers"
    with pytest.raises(ConfigError, match=message) as caught:
        check()
    assert caught.value.option == "fields.m.mode"
    for fine in ({"mode": "P"}, {"mode": "RGB"}, {"interpolation": "nearest"}, {"image_size": None}, {"draw": "m"}):
        check(**fine)
