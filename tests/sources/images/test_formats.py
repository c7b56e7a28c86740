"""Images of each format and mode: as Pillow decodes them and as they are stored; others are errors that name the file.

Nothing can find a flipped bit in a JPEG, WebP, BMP or TIFF for sure: they have no checksums.
"""

import contextlib
import dataclasses
import io
import re
import struct
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import PIL
import pyarrow as pa
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin
from support.failures import raising
from support.files.pictures import DEEP, KINDS, MODES, a_png, decoded, exif, plainly, stored

from lit_async_data import AsyncLoader, LoaderOptions, ManifestSource, Normalize, ToFloat
from lit_async_data.errors import ConfigError, CorruptError, FormatError, SourceError
from lit_async_data.sources.images import formats
from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.formats import ImageShape
from lit_async_data.system import Lazy

SIZE = (61, 90)


@pytest.fixture(scope="module")
def photo(photo):
    return photo.resize(SIZE[::-1])


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize(
    ("kind", "png_decoder"), [*((kind, "Pillow") for kind in KINDS), ("png", "imagecodecs")], indirect=["png_decoder"]
)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's words on tags that it skips
def test_a_file_that_is_cut_short_is_an_error_that_names_it(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo, name, **options)
    whole = decoded(data)
    for end in {*range(40), *range(len(data) - 40, len(data)), *np.linspace(40, len(data) - 40, 40).astype(int)}:
        behind_the_pixels = len(data) - end <= 12  # an error or not
        with (contextlib.suppress if behind_the_pixels else pytest.raises)(SourceError) as found:
            assert np.array_equal(decoded(data[:end], size=SIZE), whole)
        assert behind_the_pixels or str(found.value).startswith("there/x.png: ")


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize("found", ["RGB", "P", "I;16"])
def test_a_changed_byte_in_a_png_is_an_error(photo, found):
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "it changes no pixel, but is damage")
    data = stored(photo.resize((30, 20)).convert(found), pnginfo=notes)
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        with pytest.raises(SourceError, match=r"^there/x.png: "):
            decoded(broken, ImageShape(upper_8_bits=True), (20, 30))


@pytest.mark.parametrize("mode", MODES)
def test_a_jpeg_that_libjpeg_warns_of_is_an_error_in_every_mode(photo, mode):
    data = stored(photo, "JPEG", quality=90, restart_marker_blocks=4)
    marks = [found.start() for found in re.compile(rb"\xff[\xd0-\xd7]").finditer(data, data.index(b"\xff\xda"))]
    for damaged in (
        data[: len(data) // 2] + b"\xff\xd9",  # cut short, with an end put behind
        data[: marks[0]] + data[marks[2] :],  # two stretches are missing
        data[:-1000] + bytes(1000),  # the end was never written
    ):
        assert np.asarray(Image.open(io.BytesIO(damaged[:-2] + b"\xff\xd9")).convert("L")).any()  # Pillow serves it
        with pytest.raises(CorruptError, match=r"^there/x.png: the JPEG cannot be decoded \(.*\); fetch"):
            decoded(damaged, ImageShape(mode=mode), SIZE)
    assert np.array_equal(decoded(data + b"more"), decoded(data))


@pytest.mark.parametrize(
    ("marker", "bits", "channels"),
    # 12 bits; lossless, at a smaller size of which simplejpeg would crash; differential; two channels
    [(0xC1, 12, 3), (0xC3, 8, 3), (0xC5, 8, 3), (0xC0, 8, 2)],
)
def test_kinds_of_jpeg_that_libjpeg_does_not_decode_are_named(photo, marker, bits, channels):
    data = stored(photo, "JPEG")
    place = data.index(b"\xff\xc0")
    head = data[place + 2 : place + 4] + bytes((bits,)) + data[place + 5 : place + 9] + bytes((channels,))
    changed = data[: place + 1] + bytes((marker,)) + head + data[place + 10 :]
    for size in ((61, 90), (8, 8)):
        with pytest.raises(FormatError, match=r"^there/x.png: a JPEG of . channels of .* not|only 1, 3 or 4"):
            decoded(changed, ImageShape(image_size=size), size)


def test_what_another_library_refuses_is_left_to_pillow(photo, monkeypatch):
    fails = raising(ValueError())  # such as for a sampling without a name
    monkeypatch.setattr(formats, "simplejpeg", SimpleNamespace(decode_jpeg=fails, decode_jpeg_header=fails))
    monkeypatch.setattr(formats, "_imagecodecs", lambda: SimpleNamespace(spng_decode=raising(RuntimeError())))
    for kind in ("JPEG", "PNG"):
        data = stored(photo, kind)
        assert np.array_equal(decoded(data), plainly(data, "RGB"))
        with pytest.raises(CorruptError, match=rf"^there/x.png: the {kind} cannot be decoded"):
            decoded(data[:-200], size=SIZE)


@pytest.mark.parametrize(("library", "kind"), [("simplejpeg", "JPEG"), ("PIL", "BMP")])
def test_a_missing_library_is_named_with_what_to_install(photo, monkeypatch, library, kind):
    data, name = stored(photo, kind), {"PIL": "pillow"}.get(library, library)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(formats, "simplejpeg", Lazy("simplejpeg"))
    with pytest.raises(ConfigError, match=rf"{name} is missing; install it by pip install {name}$"):
        decoded(data)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_files_of_several_images_are_refused(photo, kind):
    data = stored(photo, kind, save_all=True, append_images=[ImageOps.invert(photo)])
    with pytest.raises(FormatError, match=r"^there/x.png: a file of several images"):
        decoded(data)


def test_files_that_claim_any_size_are_refused_by_their_first_bytes():
    side = 2**31 - 1
    bmp = b"BM" + struct.pack("<IIIIiiHHIIiiII", 100, 0, 54, 40, side, side, 1, 24, 0, 0, 1, 1, 0, 0)
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x10\0\0\0" + b"\xff\xff\0" + b"\xfe\xff\0"
    webp = b"RIFF" + struct.pack("<I", len(canvas) + 4) + b"WEBP" + canvas
    for data in (bmp, webp):
        with pytest.raises(SourceError, match=r"^there/x.png: "):
            decoded(data)


def test_a_tiff_whose_colours_pillow_would_misread_is_refused(photo):
    data = stored(photo.convert("YCbCr"), "TIFF", tiffinfo={530: (2, 1)})
    with pytest.raises(FormatError, match=r"^there/x.png: a TIFF of uncompressed YCbCr"):
        decoded(data + bytes(10**5))


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_comes_out_as_pillow_decodes_it(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((60, 41)), name, **options)
    for mode in MODES:
        assert (decoded(data, ImageShape(mode=mode)) == plainly(data, mode)).all()


def filtered(random, width, height, channels):
    """Rows of any values, each filtered in some way: any bytes are pixels."""
    rows = random.integers(0, 256, (height, 1 + width * channels), np.uint8)
    rows[:, 0] = random.integers(0, 5, height)
    return rows.tobytes()


@pytest.mark.parametrize(
    ("size", "colour", "mode"), [((1, 1), 0, "L"), ((7, 3), 2, "RGB"), ((160, 137), 6, "RGBA"), ((160, 137), 0, "L")]
)
def test_pixels_of_a_png_are_those_of_pillow_however_they_are_filtered(size, colour, mode, monkeypatch, png_decoder):
    width, height = size
    stream = zlib.compress(filtered(np.random.default_rng(width), width, height, len(mode)))
    for streams in ([stream], [stream[:1], b"", stream[1:20], stream[20:]]):
        data = a_png(width, height, 8, colour, streams=streams)
        with monkeypatch.context() as context:
            if png_decoder == "imagecodecs":
                context.setattr(formats, "_opened", lambda *_: pytest.fail("left to Pillow"))
            found = decoded(data, ImageShape(mode=mode))
        assert np.array_equal(found, plainly(data, mode))


def test_nothing_and_other_things_are_refused():
    with pytest.raises(CorruptError, match=r"^there/x.png: empty"):
        decoded(b"", ImageShape(), (2, 2))
    with pytest.raises(FormatError, match=r"^there/x.png: begins with b'"):
        decoded(b"8BPS\0\1", ImageShape(), (2, 2))


def test_pillows_limit_of_pixels_does_not_count(photo, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Image.open would refuse more than 200
    for name in ("JPEG", "PNG", "BMP"):
        assert decoded(stored(photo, name)).shape == (*SIZE, 3)


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
    assert (found.dtype, found[..., 0].tolist()) == (np.uint8, classes.tolist())
    if bits in (2, 4):  # of grey, some readers deliver what is stored, and others multiply it
        data = a_png(8, 2, bits, 0, (b"\0" + bytes(bits)) * 2)
        assert f"in {bits} bits, which Pillow multiplies" in refused(data, ImageShape(mode="P"))
        assert not decoded(data, ImageShape(mode="L")).any()


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
        (Image.new("L", (8, 6)), "JPEG", {}, P, "a JPEG whose compression changes class numbers"),
        (Image.fromarray(DEEP), "PNG", {}, P, "set mode: uint16 and interpolation: nearest"),
        (GREY, "TIFF", {"tiffinfo": {262: 0}}, P, "stored upside down (0 is white)"),
        *((GREY, "PNG", {}, DEEP_GREY, said) for said in ("of 8 bits, but mode uint16 delivers more", "set mode: L")),
        (mask(), "GIF", {}, DEEP_GREY, "of 8 bits, but mode uint16 delivers more than 8"),
        (Image.fromarray(DEEP.astype("f4")), "TIFF", {}, {}, "a TIFF of Pillow's mode F,"),
        (Image.fromarray(DEEP), "TIFF", {"tiffinfo": {262: 0}}, {}, "0 is white"),
        (Image.fromarray(DEEP), "PNG", {"transparency": 5}, {"mode": "RGBA", "upper_8_bits": True}, "one transparent"),
    ],
)
def test_what_a_mode_cannot_deliver_is_refused_with_what_to_write(image, kind, stored_with, options, said):
    assert said in refused(stored(image, kind, **stored_with), ImageShape(**options))


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
    ("kind", "values"), [("PNG", DEEP), ("PNG", DEEP >> 4), ("TIFF", DEEP), ("TIFF", DEEP.astype(">u2"))]
)
def test_sixteen_bits_come_out_as_they_are_stored(kind, values):
    found = decoded(stored(Image.fromarray(values), kind), ImageShape(mode="uint16"))
    assert (found.dtype, found.dtype.isnative) == (np.dtype("u2"), True)
    assert np.array_equal(found[..., 0], values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_more_bits_than_a_mode_has_are_refused_with_the_key(kind, mode):
    data = stored(Image.fromarray(DEEP), kind)
    said = f"x.png: a {kind} of 16 bits, but mode {mode} delivers 8; set upper_8_bits: true to get the upper 8, or mode"
    assert refused(data, ImageShape(mode=mode)) == f"{said}: uint16 to get all of them"
    if mode == "L":
        assert np.array_equal(decoded(data, ImageShape(mode=mode, upper_8_bits=True))[..., 0], DEEP >> 8)


@pytest.mark.parametrize(("colour", "mode"), [(2, "RGB"), (4, "LA"), (6, "RGBA")])
def test_colours_of_sixteen_bits_need_the_key_too(colour, mode):
    values = np.random.default_rng(0).integers(0, 65536, (3, 2, len(mode))).astype(">u2")
    data = a_png(2, 3, 16, colour, b"".join(b"\0" + row.tobytes() for row in values))
    said = refused(data, ImageShape(mode=mode))
    assert said.endswith(f"of 16 bits, but mode {mode} delivers 8; set upper_8_bits: true to get the upper 8")
    assert np.array_equal(decoded(data, ImageShape(mode=mode, upper_8_bits=True)), values >> 8)
    assert "several channels" in refused(data, ImageShape(mode="uint16"))


def test_sixteen_bits_reach_a_step_and_become_floats(tmp_path):
    Image.fromarray(DEEP).save(tmp_path / "0.png")
    source = ManifestSource(pa.table({"path": ["0.png"] * 3}), {"x": "path"}, root=tmp_path, mode="uint16")
    assert (source.spec["x"].shape, source.spec["x"].dtype) == ((1, 30, 40), np.dtype("u2"))
    stored_, wanted = torch.from_numpy(DEEP), torch.from_numpy(DEEP.astype("f4")) / 65535
    normalize = Normalize(0.5, 0.5, scale="type", fields="x")
    for transform, values in ((None, stored_), (ToFloat("x"), wanted), (normalize, 2 * wanted - 1)):
        with AsyncLoader(source, LoaderOptions(batch_size=3), device_transform=transform) as loader:
            found = next(loader)["x"][2, 0]
        assert found.dtype == values.dtype
        np.testing.assert_allclose(found.numpy(), values.numpy(), atol=1e-6)


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
    one = stored(Image.fromarray(DEEP), "PNG", transparency=5)  # without opacity it does not matter
    assert (decoded(one, ImageShape(mode="uint16"))[..., 0] == DEEP).all()


def test_a_tiff_of_twelve_bits_keeps_the_upper_eight():
    # 0x123 and 0xABC in three bytes; uncompressed, little-endian.
    tags = [(256, 3, 2), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 1)]
    tags.append((279, 4, 3))
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    data = b"II*\0" + struct.pack("<I", 12) + b"\x12\x3a\xbc\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert decoded(data, ImageShape(mode="L", upper_8_bits=True)).ravel().tolist() == [0x12, 0xAB]
    assert decoded(data, ImageShape(mode="uint16")).ravel().tolist() == [0x123, 0xABC]
