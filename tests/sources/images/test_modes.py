"""Values come out as they are stored: class numbers of palettes, and more than 8 bits; or an error says why not."""

import dataclasses
import io
import struct

import numpy as np
import PIL
import pyarrow as pa
import pytest
import torch
from PIL import Image
from support.files.pictures import DEEP, MODES, a_png, decoded, exif, plainly, stored

from lit_async_data import AsyncLoader, LoaderOptions, ManifestSource, Normalize, ToFloat
from lit_async_data.errors import ConfigError, FormatError
from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.formats import ImageShape

# The first colours of PASCAL VOC's palette: as grey tones 0 38 75 113 15.
VOC = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, 0, 0, 128]
CLASSES = np.arange(6 * 10, dtype="u1").reshape(6, 10) % 5


def mask(classes=CLASSES, colours=VOC):
    image = Image.fromarray(classes)
    image.putpalette(colours + [0] * (768 - len(colours)))
    assert image.mode == "P"
    return image


def refused(data, shape):
    """The error: the same before and during the decoding of its pixels."""
    with pytest.raises(FormatError) as early:
        images.size_of(data, shape, "x.png")
    with pytest.raises(FormatError) as late:
        images.ImageDecoder(shape, ()).decode(data, np.zeros((4, 4, shape.channels), shape.dtype), None, "x.png")
    assert str(early.value) == str(late.value)
    return str(late.value)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_numbers_of_a_palette_are_delivered_as_they_are_stored(bits):
    classes = CLASSES & (2**bits - 1)
    data = stored(mask(classes), bits=bits)
    assert data[24:26] == bytes([bits, 3])
    found = decoded(data, ImageShape(mode="P"))
    assert found.dtype == np.uint8
    assert np.array_equal(found[..., 0], classes)
    assert np.array_equal(found[..., 0], np.array(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("GIF", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("PNG", {"transparency": 0})],
)
def test_palettes_grey_and_one_bit_are_numbers_in_every_format(kind, options):
    for image in (mask(), Image.fromarray(CLASSES)):
        assert np.array_equal(decoded(stored(image, kind, **options), ImageShape(mode="P"))[..., 0], CLASSES)
    two = Image.fromarray(CLASSES % 2 == 1)
    assert two.mode == "1"
    if kind != "GIF":  # which has no such images: 0 and 255 are stored
        assert np.array_equal(decoded(stored(two, kind), ImageShape(mode="P"))[..., 0], CLASSES % 2)


@pytest.mark.parametrize("turned", range(1, 9))
def test_a_mask_is_turned_cropped_and_resized_without_new_numbers(turned):
    classes = np.random.default_rng(0).integers(0, 256, (37, 61), np.uint8)
    plain = mask(classes, list(np.random.default_rng(1).integers(0, 256, 768)))
    grey = stored(Image.fromarray(classes), exif=exif(turned))
    data = stored(plain, exif=exif(turned))
    for options in (
        {},
        {"image_size": (20, 33)},
        {"image_size": 64, "resize": "crop"},
        {"image_size": 48, "resize": "pad", "fill": 255},
        {"image_size": 16, "resize": "random_crop"},
    ):
        found = decoded(data, ImageShape(mode="P", **options), key=7)
        as_grey = decoded(grey, ImageShape(mode="L", interpolation="nearest", **options), key=7)
        assert np.array_equal(found, as_grey)


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "L"), ("GIF", "LA"), ("TIFF", "L"), ("BMP", "LA")])
def test_grey_tones_of_class_numbers_are_refused(mode, kind):
    data = stored(mask(), kind)
    said = refused(data, ImageShape(mode=mode, interpolation="nearest"))
    assert said.startswith(f"x.png: a {kind} with a palette, but mode {mode} makes grey tones of its colours; set ")
    assert "set mode: P" in said
    # A photograph may have a palette too.
    tones = decoded(data, ImageShape(mode=mode))[..., 0]
    assert sorted(set(tones.ravel().tolist())) == [0, 15, 38, 75, 113]
    assert decoded(data, ImageShape(interpolation="nearest"))[0, 3].tolist() == [128, 128, 0]


def test_only_nearest_keeps_class_numbers():
    assert ImageShape(mode="P").resampling == "nearest"
    with pytest.raises(ConfigError, match=r"^fields\.m\.interpolation: 'bicubic' mixes class numbers"):
        ManifestSource(pa.table({"m": ["a.png"]}), {"m": {"name": "m", "mode": "P"}}, interpolation="bicubic")
    # A field of its own mode has its own default.
    assert dataclasses.replace(ImageShape(), mode="P").resampling == "nearest"
    assert dataclasses.replace(ImageShape(mode="P"), mode="RGB").resampling == "bilinear"


GREY, COLOURS = Image.fromarray(CLASSES), Image.new("RGB", (8, 6))
P, DEEP_GREY = {"mode": "P"}, {"mode": "uint16"}


@pytest.mark.parametrize(
    ("image", "kind", "stored_with", "options", "said"),
    [
        *((COLOURS, kind, {}, P, "set mode: RGB, or convert the file") for kind in ("PNG", "TIFF", "BMP", "WEBP")),
        *((COLOURS.convert(mode), "PNG", {}, P, "without a palette") for mode in ("RGBA", "LA")),
        (Image.new("L", (8, 6)), "JPEG", {}, P, "a JPEG whose compression changes class numbers"),
        (Image.fromarray(DEEP), "PNG", {}, P, "set mode: uint16 and interpolation: nearest"),
        (GREY, "TIFF", {"tiffinfo": {262: 0}}, P, "stored upside down (0 is white)"),
        *((GREY, "PNG", {}, DEEP_GREY, said) for said in ("of 8 bits, but mode uint16 delivers more", "set mode: L")),
        (Image.new("RGB", (4, 4)), "JPEG", {}, DEEP_GREY, "of 8 bits, but mode uint16 delivers more than 8"),
        (mask(), "GIF", {}, DEEP_GREY, "of 8 bits, but mode uint16 delivers more than 8"),
        (Image.fromarray(DEEP.astype("f4")), "TIFF", {}, {}, "a TIFF of Pillow's mode F,"),
        (Image.fromarray(DEEP.astype("i4")), "TIFF", {}, {}, "a TIFF of Pillow's mode I,"),
        (Image.fromarray(DEEP), "TIFF", {"tiffinfo": {262: 0}}, {}, "0 is white"),
        (Image.fromarray(DEEP), "PNG", {"transparency": 5}, {"mode": "RGBA", "upper_8_bits": True}, "one transparent"),
    ],
)
def test_what_a_mode_cannot_deliver_is_refused_with_what_to_write(image, kind, stored_with, options, said):
    assert said in refused(stored(image, kind, **stored_with), ImageShape(**options))


def test_one_transparent_colour_does_not_matter_without_opacity():
    one = stored(Image.fromarray(DEEP), "PNG", transparency=5)
    assert (decoded(one, ImageShape(mode="L", upper_8_bits=True))[..., 0] == DEEP >> 8).all()
    assert (decoded(one, ImageShape(mode="uint16"))[..., 0] == DEEP).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_grey_of_two_or_four_bits_has_no_sure_number(bits):
    """Some readers deliver what is stored, and others multiply it, so that the largest is 255."""
    data = a_png(8, 2, bits, 0, (b"\0" + bytes(bits)) * 2)
    assert f"in {bits} bits, which Pillow multiplies" in refused(data, ImageShape(mode="P"))
    assert not decoded(data, ImageShape(mode="L")).any()


def test_each_field_has_its_own_limit_of_pixels_which_holds_before_memory_is_taken(tmp_path, monkeypatch):
    from PIL import ImageFile

    mask(np.zeros((40, 30), "u1")).save(tmp_path / "m.png")
    table = pa.table({"path": ["m.png"]})
    small, large = {"name": "path", "mode": "P", "max_pixels": 1199}, {"name": "path", "mode": "P"}
    assert len(ManifestSource(table, {"m": large}, root=tmp_path, image_size=8)) == 1
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(FormatError, match=r"^row 0 .*m\.png: 40×30 pixels .* are more than max_pixels \(1199\)"):
        ManifestSource(table, {"m": small}, root=tmp_path, image_size=8)


@pytest.mark.parametrize(
    ("kind", "values"),
    [("PNG", each) for each in (DEEP, DEEP >> 4, DEEP % 324)]
    + [("TIFF", each) for each in (DEEP, DEEP >> 6, DEEP.astype(">u2"))],
)
def test_sixteen_bits_come_out_as_they_are_stored(kind, values):
    data = stored(Image.fromarray(values), kind)
    found = decoded(data, ImageShape(mode="uint16"))
    assert found.dtype == np.dtype("u2")
    assert found.dtype.isnative
    assert np.array_equal(found[..., 0], values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_more_bits_than_a_mode_has_are_refused_with_the_key(kind, mode):
    data = stored(Image.fromarray(DEEP), kind)
    said = refused(data, ImageShape(mode=mode))
    assert said == (
        f"x.png: a {kind} of 16 bits, but mode {mode} delivers 8; set upper_8_bits: true to get the upper 8, or mode: "
        "uint16 to get all of them"
    )
    if mode == "L":
        assert np.array_equal(decoded(data, ImageShape(mode=mode, upper_8_bits=True))[..., 0], DEEP >> 8)


@pytest.mark.parametrize("colour", [2, 4, 6])
def test_colours_of_sixteen_bits_need_the_key_too(colour):
    channels = {2: 3, 4: 2, 6: 4}[colour]
    values = np.random.default_rng(0).integers(0, 65536, (3, 2, channels)).astype(">u2")
    data = a_png(2, 3, 16, colour, b"".join(b"\0" + row.tobytes() for row in values))
    mode = {2: "RGB", 4: "LA", 6: "RGBA"}[colour]
    said = refused(data, ImageShape(mode=mode))
    assert said.endswith(f"of 16 bits, but mode {mode} delivers 8; set upper_8_bits: true to get the upper 8")
    assert np.array_equal(decoded(data, ImageShape(mode=mode, upper_8_bits=True)), values >> 8)
    assert "several channels" in refused(data, ImageShape(mode="uint16"))


def test_sixteen_bits_reach_a_step_and_become_floats(tmp_path):
    for number in range(3):
        Image.fromarray(DEEP + np.uint16(number)).save(tmp_path / f"{number}.png")
    table = pa.table({"path": [f"{number}.png" for number in range(3)], "y": [0, 1, 2]})
    source = ManifestSource(table, {"x": "path", "y": "y"}, root=tmp_path, mode="uint16")
    assert (source.spec["x"].shape, source.spec["x"].dtype) == ((1, 30, 40), np.dtype("u2"))
    with AsyncLoader(source, LoaderOptions(batch_size=3, shuffle=False)) as loader:
        (batch,) = loader
        assert batch["x"].dtype == torch.uint16
        assert np.array_equal(batch["x"][2, 0].numpy(), DEEP + np.uint16(2))
    wanted = torch.from_numpy(DEEP.astype("f4")) / 65535
    for transform, floats in ((ToFloat("x"), wanted), (Normalize(0.5, 0.5, scale="type", fields="x"), 2 * wanted - 1)):
        with AsyncLoader(source, LoaderOptions(batch_size=3, shuffle=False), device_transform=transform) as loader:
            (batch,) = loader
            assert torch.allclose(batch["x"][0, 0], floats, atol=1e-6)


FOUND = ("1", "L", "LA", "P", "RGB", "RGBA")
PIXELS = [
    *(("PNG", found, decoder) for found in FOUND for decoder in ("imagecodecs", "Pillow")),
    *(("TIFF", found, "Pillow") for found in (*FOUND, "CMYK", "YCbCr")),
    *(("JPEG", found, "Pillow") for found in ("L", "RGB", "CMYK", "YCbCr")),
]


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "found", "png_decoder"), PIXELS, indirect=["png_decoder"])
def test_every_kind_of_pixels_becomes_every_mode(photo, kind, found, mode):
    small = photo.resize((60, 41)).convert(found)
    if found in ("LA", "RGBA"):
        small.putalpha(Image.linear_gradient("L").resize((60, 41)))
    data = stored(small, kind)
    if (kind, found) == ("TIFF", "YCbCr") and int(PIL.__version__.split(".")[0]) < 13:
        with pytest.raises(FormatError, match=r"there/x.png: .* which Pillow decodes from version 13 on; install it"):
            decoded(data, ImageShape(mode=mode))
        return
    assert (decoded(data, ImageShape(mode=mode)) == plainly(data, mode)).all()
    resized = decoded(data, ImageShape(image_size=(20, 30), mode=mode))
    if found == "1" and mode in ("RGB", "L"):
        assert len(np.unique(resized)) > 2  # its greys are weighed, which black and white could not be
    assert (resized == plainly(data, mode, (30, 20))).all()


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize("found", ["P", "L", "RGB"])
def test_one_transparent_colour(photo, found):
    small = photo.resize((60, 41)).convert(found)
    transparent = {"P": bytes(range(200)), "L": 90, "RGB": small.getpixel((7, 7))}[found]
    data = stored(small, "PNG", transparency=transparent)
    for mode in MODES:
        assert (decoded(data, ImageShape(mode=mode)) == plainly(data, mode)).all()
        assert (decoded(data, ImageShape(image_size=(20, 30), mode=mode)) == plainly(data, mode, (30, 20))).all()
    assert (decoded(data, ImageShape(mode="RGBA"))[..., -1] < 255).any()


def test_a_tiff_of_twelve_bits_keeps_the_upper_eight():
    # 0x123 and 0xABC in three bytes; uncompressed, little-endian.
    tags = [(256, 3, 2), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 1)]
    tags.append((279, 4, 3))
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    data = b"II*\0" + struct.pack("<I", 12) + b"\x12\x3a\xbc\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert decoded(data, ImageShape(mode="L", upper_8_bits=True)).ravel().tolist() == [0x12, 0xAB]
    assert decoded(data, ImageShape(mode="uint16")).ravel().tolist() == [0x123, 0xABC]
