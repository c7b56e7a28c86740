"""Decoding, turning and resizing images, against Pillow done plainly; and large images, which take turns."""

import contextlib
import io
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin
from support.failures import raising
from support.files.pictures import DEEP, KINDS, MODES, decoded, exif, plainly, stored

from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.formats import ImageShape, mirrored, orientation_of
from lit_async_data.sources.images.image import Alignment, Shown, write_resized


@pytest.mark.parametrize(("factor", "turned"), [(2, 1), *((4, turned) for turned in range(1, 9)), (8, 6)])
def test_a_jpeg_that_is_much_larger_is_decoded_smaller_with_little_change(photo, factor, turned, monkeypatch):
    seen, parts = [], []
    values_of, write_resized = images.values_of, images.write_resized
    monkeypatch.setattr(
        images, "values_of", lambda found, *rest: seen.append(found.shape[1]) or values_of(found, *rest)
    )
    monkeypatch.setattr(
        images, "write_resized", lambda found, *rest: parts.append(rest[0]) or write_resized(found, *rest)
    )
    # Neither side is a multiple of the factor: the last column and row stand for less than the others.
    data = stored(photo.crop((0, 0, 635, 427)), "JPEG", quality=90, exif=exif(turned))
    # 213 is half of 427, less half a pixel: twice that many are just left over.
    side = 427 // factor // 2
    found = decoded(data, ImageShape(image_size=side, resize="crop")).astype(int)
    assert seen == [-(-635 // factor)]
    # What was taken is in the middle, to half a pixel of what was decoded.
    right_first, lower_first = mirrored(turned)
    size = (635, 427) if turned < 5 else (427, 635)
    off = [-(-all_ // factor) - all_ / factor if last else 0 for all_, last in zip(size, (right_first, lower_first))]
    taken = [(edge - off[number % 2]) * factor for number, edge in enumerate(parts[0])]
    middle = (104, 0, 531, 427) if turned < 5 else (0, 104, 427, 531)
    assert all(abs(edge - wanted) <= factor for edge, wanted in zip(taken, middle))
    taken = [min(max(edge, 0), size[number % 2]) for number, edge in enumerate(taken)]
    assert np.abs(found - plainly(data, "RGB", (side, side), tuple(taken))).mean() < 2.5
    whole = decoded(data, ImageShape(image_size=side, resize="stretch")).astype(int)
    # A shift by a pixel would be ten times that.
    assert np.abs(whole - plainly(data, "RGB", (side, side))).mean() < 1.2
    seen.clear()
    decoded(data, ImageShape(image_size=side + 1, resize="crop"))
    assert seen == [-(-635 // (factor // 2))]
    seen.clear()
    nearest = decoded(data, ImageShape(image_size=side, interpolation="nearest"))
    assert seen == [635]
    assert (nearest == plainly(data, "RGB", (side, side), resample=Image.Resampling.NEAREST)).all()


@pytest.mark.parametrize("name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_every_interpolation_is_pillows(photo, name):
    data = stored(photo.resize((60, 41)))
    found = decoded(data, ImageShape(image_size=(20, 30), interpolation=name)).astype(int)
    differ = np.abs(found - plainly(data, "RGB", (30, 20), resample=Image.Resampling[name.upper()]))
    # Torch's are Pillow's but for rounding, which happens in two steps.
    assert differ.max() <= (2 if name == "bicubic" else 1 if name == "bilinear" else 0)
    assert differ.mean() < 0.02


def test_a_random_crop_is_one_of_its_key_and_the_middle_without_one(photo):
    data = stored(photo.resize((60, 40)))
    shape = ImageShape(image_size=24, resize="random_crop")
    first, again, other = (decoded(data, shape, key=key) for key in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert (decoded(data, shape) == decoded(data, ImageShape(image_size=24, resize="crop"))).all()
    differ = decoded(data, shape).astype(int) - plainly(data, "RGB", (24, 24), (10, 0, 50, 40))
    assert (np.abs(differ) <= 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_more_pixels_than_allowed_are_refused(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((30, 20)), name, **options)
    decoded(data, ImageShape(max_pixels=600))
    with pytest.raises(FormatError, match=r"^there/x.png: 20×30 pixels .* are more than max_pixels \(599\)"):
        decoded(data, ImageShape(max_pixels=599), (20, 30))


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [(KeyError("key"), CorruptError, "there/x.png: the PNG cannot be decoded"), (MemoryError(), MemoryError, "")],
)
def test_whatever_a_decoder_raises_names_the_image_but_for_a_lack_of_memory(raised, error, said, monkeypatch, photo):
    data = stored(photo.resize((6, 4)).convert("P"))  # not plain: by Pillow whatever is installed
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", raising(raised))
    with pytest.raises(error, match=f"^{said}"):
        decoded(data, ImageShape(), (4, 6))


@pytest.mark.parametrize(("kind", "colours"), [*(("PNG", mode) for mode in MODES), ("JPEG", "L")])
def test_what_goes_where_it_goes_as_it_is_stored_is_decoded_there(photo, kind, colours, monkeypatch, png_decoder):
    written, write_resized = [], images.write_resized
    monkeypatch.setattr(images, "write_resized", lambda *given: written.append(1) or write_resized(*given))
    data = stored(photo.resize((40, 30)).convert(colours), kind)
    shape = ImageShape(mode=colours)
    for each in (shape, ImageShape(image_size=(30, 40), mode=colours, resize="pad")):
        assert np.array_equal(decoded(data, each), plainly(data, colours))
    known = kind == "JPEG" or (png_decoder == "imagecodecs" and colours != "LA")
    assert len(written) == 2 * (not known)
    # Not so: a wider memory, and one that is held otherwise.
    around = np.full((30, 50, shape.channels), 77, "u1")
    images.ImageDecoder(shape, ()).decode(data, around[:, 5:45], None, "x")
    assert np.array_equal(around[:, 5:45], plainly(data, colours))
    assert (np.delete(around, np.s_[5:45], axis=1) == 77).all()
    turned = stored(photo.resize((40, 30)).convert(colours), kind, exif=exif(3))
    assert np.array_equal(decoded(turned, shape), plainly(turned, colours))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(30, 20), (90, 110), (7, 130)])
def test_torch_resizes_straight_into_the_array_as_it_does_by_itself(interpolation, channels, size):
    given = np.random.default_rng(0).integers(0, 256, (80, 100, channels), np.uint8)
    batch = torch.from_numpy(given[None, 10:70, 5:95].copy()).permute(0, 3, 1, 2)
    alone = torch.nn.functional.interpolate(batch, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0).numpy()
    shape, box = ImageShape(image_size=size, interpolation=interpolation), (5, 10, 95, 70)
    frozen = given.copy()
    frozen.flags.writeable = False  # as what comes from Pillow is; torch would warn of it
    for pixels_ in (given, frozen, np.asfortranarray(given)):
        for out in (np.zeros((*size, channels), "u1"), np.zeros((size[0], 200, 3), "u1")[:, 7 : 7 + size[1]]):
            write_resized(pixels_, box, shape, out)
            assert np.array_equal(out, np.broadcast_to(alone, out.shape))
    whole = np.zeros((*size, channels), "u1")
    write_resized(given[10:70, 5:95].copy(), (0, 0, 90, 60), shape, whole)
    assert np.array_equal(whole, alone)


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize("turned", [1, 3, 6, 7])
@pytest.mark.parametrize(("size", "mode"), [((1, 1), "RGB"), ((1, 300), "L"), ((300, 1), "RGB"), ((2, 17), "L")])
def test_an_image_of_one_row_or_column_comes_out_however_it_was_held(turned, size, mode):
    random = np.random.default_rng(0)
    pixels_ = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
    data = stored(Image.fromarray(pixels_).convert(mode), exif=exif(turned))
    for wanted in ((64, 64), (1, 9)):
        found = decoded(data, ImageShape(image_size=wanted, mode=mode)).astype(int)
        assert np.abs(found - plainly(data, mode, wanted[::-1])).max() <= 1
    if max(size) > 1:
        assert decoded(data, ImageShape(image_size=(3, 3), mode=mode, resize="random_crop"), key=3).any()


def in_floats(values, size, name, box=None):
    """By Pillow, in 32-bit floats, whose mantissa holds 16 bits."""
    resample = Image.Resampling[name.upper()]
    found = np.asarray(Image.fromarray(values.astype("f4")).resize(size[::-1], resample, box=box))
    return np.clip(np.rint(found), 0, 65535).astype("u2")


@pytest.mark.parametrize("name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(64, 90), (30, 17)])
def test_sixteen_bits_are_resized_in_sixteen_bits(name, size):
    # Black and white: what bicubic and lanczos make beyond both is clipped. Pillow's own kernel
    # for 16 bits is wrong by up to 12 410 there.
    extreme = (np.random.default_rng(0).integers(0, 2, (30, 40)) * 65535).astype("u2")
    for values in (DEEP, extreme):
        shape = ImageShape(image_size=size, mode="uint16", interpolation=name)
        assert np.array_equal(decoded(stored(Image.fromarray(values)), shape)[..., 0], in_floats(values, size, name))


@pytest.mark.parametrize("turned", range(1, 9))
def test_sixteen_bits_are_turned_cropped_and_padded(turned):
    data = stored(Image.fromarray(DEEP), exif=exif(turned))
    seen = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))

    def found(**options):
        return decoded(data, ImageShape(mode="uint16", **options), key=3)[..., 0]

    assert np.array_equal(found(), seen)
    height, width = seen.shape
    left, upper = (width - 30) // 2, (height - 30) // 2
    middle = in_floats(seen[upper : upper + 30, left : left + 30], (12, 12), "bilinear")
    assert np.array_equal(found(image_size=12, resize="crop"), middle)
    padded = found(image_size=80, resize="pad", fill=60000)
    beside = (padded[:, :9], padded[:, -9:]) if height > width else (padded[:9], padded[-9:])
    assert all((edge == 60000).all() for edge in beside)
    assert np.isin(found(image_size=16, resize="random_crop", interpolation="nearest"), seen).all()


def decode(data):
    images.ImageDecoder(ImageShape(image_size=8), ()).decode(data, np.zeros((8, 8, 3), "u1"), None, "x")


def test_an_error_ends_the_turn(monkeypatch):
    monkeypatch.setattr(images, "_LARGE", 1)
    data = stored(Image.new("RGB", (20, 20)), "BMP")

    def fails(*_):
        raise FormatError("in its turn")

    with monkeypatch.context() as patch:
        patch.setattr(images, "values_of", fails)
        with pytest.raises(FormatError, match="in its turn"):
            decode(data)
    another = threading.Thread(target=decode, args=(data,), daemon=True)
    another.start()
    another.join(30)
    assert not another.is_alive()


def complaint(image, mask, *, of_image=None, of_mask=None):
    """What is wrong with an image and a mask, each (height, width, orientation); empty if nothing."""
    shapes = {"x": ImageShape(**of_image or {}), "m": ImageShape(**{"mode": "P", **(of_mask or {})})}
    shown = {"x": {7: Shown(image[:2], image[2], "RGB")}, "m": {7: Shown(mask[:2], mask[2], "L")}}
    found = Alignment(shapes, {}, dict.fromkeys(shapes, "")).mismatches(shown)
    return "".join(f"{key} {place}: {what}" for key, place, what in found)


@pytest.mark.parametrize("turned", [3, 6])
def test_one_turned_image_beside_one_that_is_not_is_refused(turned):
    upright = (40, 20) if turned > 4 else (20, 40)
    message = complaint((*upright, turned), (20, 40, 1))
    assert message.startswith(f"m 7: x is turned by the orientation in its file ({turned}), but m, whose shape is that")
    assert "m is turned" in complaint((20, 40, 1), (*upright, turned))  # the mask may be the one that is turned
    assert "x is turned" in complaint((*upright, turned), (10, 20, 1))  # and smaller
    assert "x is turned" in complaint((*upright, turned), (20, 40, 1), of_mask={"mode": "L"})
    assert complaint((*upright, turned), (*upright, turned)) == ""
    assert complaint((*upright, turned), (20, 40, 1), of_mask={"draw": "m"}) == ""
    assert complaint((40, 20, 6), (40, 20, 1)) == complaint((400, 200, 6), (40, 20, 1)) == ""  # of what is shown


@pytest.mark.parametrize(
    ("mask", "fits"),
    [((20, 40), True), ((7, 14), True), ((3001, 6001), True), ((10, 30), False), ((40, 20), False), ((20, 44), False)],
)
def test_masks_fit_if_they_have_the_shape_of_the_image_at_any_scale(mask, fits):
    said = f"m 7: x has 20×40 and m has {mask[0]}×{mask[1]} pixels (height × width), so mask and"
    assert complaint((20, 40, 1), (*mask, 1)).startswith("" if fits else said)
    assert bool(complaint((20, 40, 1), (*mask, 1))) is not fits
    assert complaint((20, 40, 1), (*mask, 1), of_mask={"mode": "L"}) == ""  # it may be another picture
    assert complaint((20, 40, 1), (*mask, 1), of_image={"mode": "P"}) == ""  # two masks


@pytest.mark.parametrize("mode", ["P", "L", "1", "I;16"])
def test_grey_and_palettes_need_a_mode_beside_another_image(mode):
    def check(*, image_size=8, **options):
        shapes = {"x": ImageShape(image_size=8), "m": ImageShape(image_size=image_size, **options)}
        shown = {"x": {0: Shown((9, 9), 1, "RGB")}, "m": {0: Shown((9, 9), 1, mode)}}
        Alignment(shapes, {}, dict.fromkeys(shapes, "")).check_modes(shown)

    message = "fields.m.mode: missing; the first image (is grey|has a palette), .*; set P for the numbers"
    with pytest.raises(ConfigError, match=message) as caught:
        check()
    assert caught.value.option == "fields.m.mode"
    for fine in ({"mode": "P"}, {"mode": "RGB"}, {"draw": "m"}):
        check(**fine)
    for plain in ({"image_size": None}, {"interpolation": "nearest"}):  # a palette loses its numbers
        with pytest.raises(ConfigError) if mode == "P" else contextlib.nullcontext():
            check(**plain)


@pytest.mark.parametrize(
    ("array", "options", "image", "how"),
    [
        ((20, 40), {}, (20, 40, 1), ""),
        ((20, 40), {"resize": "random_crop"}, (20, 40, 1), "changed by resize: random_crop"),
        ((20, 40, 2), {"resize": "crop"}, (20, 40, 1), "changed by resize: crop"),
        ((20, 20), {"resize": "crop"}, (20, 20, 1), ""),  # of one shape with the result: nothing is cut
        ((8, 8), {"resize": "crop"}, (20, 40, 1), ""),  # may be the same part
        ((10, 20), {"resize": "random_crop"}, (20, 40, 1), ""),
        ((40, 20), {}, (20, 40, 6), "turned by the orientation in its file (6)"),
        ((20, 40), {}, (20, 40, 6), ""),  # made from what the image shows
    ],
)
def test_an_array_of_the_size_of_an_image_that_is_cut_or_turned(array, options, image, how):
    alignment = Alignment({"x": ImageShape(image_size=8, **options)}, {"m": array}, {"x": "photo"})
    found = list(alignment.mismatches({"x": {7: Shown(image[:2], image[2], "RGB")}}))
    assert [(key, place) for key, place, _ in found] == [("x", 7)] * bool(how)
    said = f"x is {how}, but m, an array of its height and width, is not: "
    assert all(what.startswith(said) and what.endswith("set draw: for x") for *_, what in found)


@pytest.mark.parametrize(
    ("key", "column", "options", "refused"),
    [
        *((key, column, {}, True) for key, column in (("m", "masks/7"), ("segLabel", "p"), ("m", "tumour_seg"))),
        *(("mask", "p", fine, False) for fine in ({"mode": "P"}, {"interpolation": "nearest"})),
        ("mask", "p", {"image_size": None}, True),
        ("masked", "segment/photo", {}, False),
    ],
)
def test_a_field_named_as_a_mask_is_not_read_as_a_picture(key, column, options, refused):
    said = r"is named as a mask, and (resizing would mix|as RGB, ).*; set P for the numbers of a"
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        Alignment({key: ImageShape(**{"image_size": 8, **options})}, {}, {key: column})


HELD = [
    *(("JPEG", turned, "Pillow") for turned in range(1, 9)),
    *((kind, turned, "Pillow") for kind in ("PNG", "WEBP", "TIFF") for turned in (3, 6)),
    ("PNG", 6, "imagecodecs"),
]


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize(("kind", "turned", "png_decoder"), HELD, indirect=["png_decoder"])
def test_what_a_camera_noted_is_applied(photo, kind, turned):
    data = stored(photo.resize((64, 40)), kind, exif=exif(turned))
    shape = ImageShape()
    assert images.size_of(data, shape, "x") == ((64, 40) if turned >= 5 else (40, 64))
    assert (decoded(data, shape) == plainly(data, "RGB")).all()
    target = ImageShape(image_size=(16, 24), resize="crop")
    wanted = (0, 64 / 2 - 40 / 3, 40, 64 / 2 + 40 / 3) if turned >= 5 else (2, 0, 62, 40)
    assert np.abs(decoded(data, target).astype(int) - plainly(data, "RGB", (24, 16), wanted)).max() <= 1


@pytest.mark.usefixtures("png_decoder")
def test_a_png_may_say_after_its_pixels_how_it_was_held(photo):
    block = exif(6).tobytes().removeprefix(b"Exif\0\0")
    data = stored(photo.resize((64, 40)))
    chunk = struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    late = data[:-12] + chunk + data[-12:]
    assert images.size_of(late, ImageShape(), "x") == (64, 40)
    assert (decoded(late, ImageShape()) == plainly(late, "RGB")).all()


def xmp(turned, *, element):
    noted = f"><tiff:Orientation>{turned}</tiff:Orientation" if element else f' tiff:Orientation="{turned}"'
    return f"<x:xmpmeta><rdf:Description{noted}></x:xmpmeta>".encode()


def turned_files(small, turned):
    """Files that state the orientation in XMP, or in a text of ImageMagick."""
    block = exif(turned).tobytes()
    for packed in (False, True):
        block_as_text, as_xmp = PngImagePlugin.PngInfo(), PngImagePlugin.PngInfo()
        block_as_text.add_text("Raw profile type exif", f"\nexif\n{len(block):8}\n{block.hex()}\n", zip=packed)
        as_xmp.add_itxt("XML:com.adobe.xmp", xmp(turned, element=packed).decode(), zip=packed)
        yield stored(small, pnginfo=block_as_text)
        yield stored(small, pnginfo=as_xmp)
        yield stored(small.convert("P"), pnginfo=as_xmp)
        yield stored(small, "JPEG", xmp=xmp(turned, element=packed))
        yield stored(small, "WEBP", xmp=xmp(turned, element=packed), lossless=True)
        for compression in ("raw", "tiff_lzw"):
            yield stored(small, "TIFF", tiffinfo={700: xmp(turned, element=packed)}, compression=compression)


@pytest.mark.usefixtures("png_decoder")
@pytest.mark.parametrize("turned", [3, 8])
def test_orientation_in_xmp_and_in_texts_of_imagemagick_is_applied(photo, turned):
    for data in turned_files(photo.resize((30, 20)), turned):
        assert images.size_of(data, ImageShape(), "x") == ((30, 20) if turned >= 5 else (20, 30))
        assert np.array_equal(decoded(data, ImageShape()), plainly(data, "RGB"))


def test_exif_comes_before_xmp_and_what_cannot_be_read_is_upright(photo):
    small = photo.resize((30, 20))
    for noted in (1, 3):
        twice = xmp(6, element=False)
        as_tiff = stored(small, "TIFF", tiffinfo={0x0112: noted, 700: twice})
        for data in (stored(small, "JPEG", exif=exif(noted), xmp=twice), as_tiff):
            assert np.array_equal(decoded(data, ImageShape()), plainly(data, "RGB"))
    for text in ("", "\nexif\n", "\nexif\n 4\nnothing", "\nexif\n    8\n49492a00"):
        notes = PngImagePlugin.PngInfo()
        notes.add_text("Raw profile type exif", text)
        assert np.array_equal(decoded(stored(small, pnginfo=notes), ImageShape()), plainly(stored(small), "RGB"))
    assert orientation_of(b"", b'tiff:Orientation="9"') == 1


def test_orientations_are_read_in_either_byte_order_and_oddities_are_upright():
    def block(order, kind=3, count=1, value=6, tag=0x0112):
        start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 2)
        entries = struct.pack(order + "HHII", 0x0100, 4, 1, 3) + struct.pack(order + "HHI", tag, kind, count)
        return start + entries + (struct.pack(order + "HH", value, 0) if kind == 3 else struct.pack(order + "I", value))

    assert [orientation_of(block(order, kind)) for order in "<>" for kind in (3, 4)] == [6] * 4
    assert orientation_of(b"Exif\0\0" + block("<")) == 6
    odd = [block("<", value=0), block("<", value=9), block("<", count=2), block("<", tag=0x0113), b"II*\0"]
    odd += [block("<", kind=4)[:end] for end in range(32)]
    assert {orientation_of(one) for one in odd} == {1}
