"""Decoding images: against Pillow done plainly."""

import struct
import zlib

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, PngImagePlugin
from support.files.pictures import KINDS, a_png, decoded, exif, plainly, stored

from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.sources.images import formats
from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.image import write_resized
from lit_async_data.sources.images.image_shape import ImageShape
from lit_async_data.sources.images.orientation import mirrored, orientation_of

MODES = ("RGB", "L", "RGBA", "LA")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_comes_out_as_pillow_decodes_it(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((60, 41)), name, **options)
    for mode in MODES:
        assert (decoded(data, ImageShape(mode=mode)) == plainly(data, mode)).all()


PIXELS = [
    *(
        ("PNG", found, decoder)
        for found in ("1", "L", "LA", "P", "RGB", "RGBA")
        for decoder in ("imagecodecs", "Pillow")
    ),
    *(("TIFF", found, "Pillow") for found in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")),
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


def test_a_png_that_imagecodecs_refuses_is_left_to_pillow(photo, monkeypatch):
    class Refusing:
        def spng_decode(self, *_, **__):
            raise RuntimeError

    data = stored(photo.resize((40, 30)), "PNG")
    monkeypatch.setattr(formats, "_imagecodecs", Refusing)
    assert np.array_equal(decoded(data, ImageShape()), plainly(data, "RGB"))


def test_a_tiff_of_twelve_bits_keeps_the_upper_eight():
    # 0x123 and 0xABC in three bytes; uncompressed, little-endian.
    tags = [(256, 3, 2), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 1)]
    tags.append((279, 4, 3))
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    data = b"II*\0" + struct.pack("<I", 12) + b"\x12\x3a\xbc\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert decoded(data, ImageShape(mode="L", upper_8_bits=True)).ravel().tolist() == [0x12, 0xAB]
    assert decoded(data, ImageShape(mode="uint16")).ravel().tolist() == [0x123, 0xABC]


def test_what_does_not_fit_eight_bits_is_refused():
    deep = np.arange(600, dtype="f4").reshape(20, 30)
    for values in (deep, deep.astype("i4")):
        with pytest.raises(FormatError, match=r"^there/x.png: a TIFF of Pillow's mode [IF],"):
            decoded(stored(Image.fromarray(values), "TIFF"), ImageShape())
    white = stored(Image.fromarray(deep.astype("u2")), "TIFF", tiffinfo={262: 0})
    with pytest.raises(FormatError, match=r"^there/x.png: .*0 is white"):
        decoded(white, ImageShape())
    one = stored(Image.fromarray(deep.astype("u2")), "PNG", transparency=5)
    with pytest.raises(FormatError, match=r"^there/x.png: .*one transparent colour"):
        decoded(one, ImageShape(mode="RGBA", upper_8_bits=True))
    assert (decoded(one, ImageShape(mode="L", upper_8_bits=True))[..., 0] == deep.astype("u2") >> 8).all()
    assert (decoded(one, ImageShape(mode="uint16"))[..., 0] == deep).all()


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
        for data in (
            stored(small, "JPEG", exif=exif(noted), xmp=twice),
            stored(small, "TIFF", tiffinfo={0x0112: noted, 700: twice}),
        ):
            assert np.array_equal(decoded(data, ImageShape()), plainly(data, "RGB"))
    for text in ("", "\nexif\n", "\nexif\n 4\nnothing", "\nexif\n    8\n49492a00"):
        notes = PngImagePlugin.PngInfo()
        notes.add_text("Raw profile type exif", text)
        assert np.array_equal(decoded(stored(small, pnginfo=notes), ImageShape()), plainly(stored(small), "RGB"))
    assert orientation_of(b"", b'tiff:Orientation="9"') == 1


def test_orientations_are_read_in_either_byte_order_and_oddities_are_upright():
    def block(order, kind=3, count=1, value=6, tag=0x0112):
        start = b"II*\0" if order == "<" else b"MM\0*"
        packed = struct.pack(order + ("HH" if kind == 3 else "I"), *([value, 0] if kind == 3 else [value]))
        other = struct.pack(order + "HHII", 0x0100, 4, 1, 3)
        return (
            start
            + struct.pack(order + "IHH", 8, 2, 0x0100)[:-2]
            + other
            + struct.pack(order + "HHI", tag, kind, count)
            + packed
        )

    assert [orientation_of(block(order, kind)) for order in "<>" for kind in (3, 4)] == [6] * 4
    assert orientation_of(b"Exif\0\0" + block("<")) == 6
    odd = [block("<", value=0), block("<", value=9), block("<", count=2), block("<", tag=0x0113), b"", b"II*\0"]
    odd += [block("<", kind=4)[:end] for end in range(32)]
    assert {orientation_of(one) for one in odd} == {1}


@pytest.mark.parametrize(("factor", "turned"), [(2, 1), *((4, turned) for turned in range(1, 9)), (8, 6)])
def test_a_jpeg_that_is_much_larger_is_decoded_smaller_with_little_change(photo, factor, turned, monkeypatch):
    seen, parts = [], []
    upright, write_resized = images.upright, images.write_resized
    monkeypatch.setattr(images, "upright", lambda found, way: seen.append(found.shape[1]) or upright(found, way))
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


def test_padding_keeps_the_shape_and_fills_the_rest(photo):
    data = stored(photo.resize((60, 40)))
    found = decoded(data, ImageShape(image_size=(30, 30), resize="pad", fill=9))
    assert (np.abs(found[5:25].astype(int) - plainly(data, "RGB", (30, 20))) <= 1).all()
    assert (found[:5] == 9).all()
    assert (found[25:] == 9).all()


def test_a_random_crop_is_one_of_its_key_and_the_middle_without_one(photo):
    data = stored(photo.resize((60, 40)))
    shape = ImageShape(image_size=24, resize="random_crop")
    first, again, other = (decoded(data, shape, key=key) for key in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert (decoded(data, shape) == decoded(data, ImageShape(image_size=24, resize="crop"))).all()
    differ = decoded(data, shape).astype(int) - plainly(data, "RGB", (24, 24), (10, 0, 50, 40))
    assert (np.abs(differ) <= 1).all()


def test_an_array_of_another_kind_is_a_mistake_of_the_caller(photo):
    data = stored(photo.resize((6, 4)))
    for out in (np.zeros((4, 6, 3), "f4"), np.zeros((4, 6, 1), "u1"), np.zeros((4, 6), "u1")):
        with pytest.raises(ValueError, match="channels"):
            images.decode(data, ImageShape(), out, None, "x")


def test_another_size_is_an_error_unless_one_is_given(photo):
    data = stored(photo.resize((60, 40)))
    with pytest.raises(FormatError, match=r"^there/x.png: 40×60 pixels .*41×60 are expected; give image_size"):
        decoded(data, ImageShape(), (41, 60))


def test_nothing_and_other_things_are_refused():
    with pytest.raises(CorruptError, match=r"^there/x.png: empty"):
        decoded(b"", ImageShape(), (2, 2))
    for other in (b"%PDF-1.7", b"8BPS\0\1", b"\0" * 100, b"%!PS-Adobe-3.0 EPSF-3.0"):
        with pytest.raises(FormatError, match=r"^there/x.png: begins with b'"):
            decoded(other, ImageShape(), (2, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_more_pixels_than_allowed_are_refused(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((30, 20)), name, **options)
    decoded(data, ImageShape(max_pixels=600))
    with pytest.raises(FormatError, match=r"^there/x.png: 20×30 pixels .* are more than max_pixels \(599\)"):
        decoded(data, ImageShape(max_pixels=599), (20, 30))


def test_no_setting_of_pillow_is_changed_and_large_images_warn_of_nothing(photo, monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Image.open would refuse more than 200
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK
    for name in ("JPEG", "PNG", "BMP"):
        decoded(stored(photo.resize((90, 61)), name), ImageShape())
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK)


def test_whatever_a_decoder_raises_names_the_image_but_for_a_lack_of_memory(monkeypatch, photo):
    from PIL import PngImagePlugin

    data = stored(photo.resize((6, 4)).convert("P"))  # not plain: by Pillow whatever is installed
    for raised, expected in ((KeyError("key"), CorruptError), (MemoryError(), MemoryError)):

        def loaded(self, raised=raised):
            raise raised

        monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", loaded)
        with pytest.raises(expected) as found:
            decoded(data, ImageShape(), (4, 6))
        assert expected is MemoryError or str(found.value).startswith(
            "there/x.png: the PNG cannot be decoded (its data"
        )


@pytest.mark.parametrize(("kind", "colours"), [*(("PNG", mode) for mode in MODES), ("JPEG", "L")])
def test_what_goes_where_it_goes_as_it_is_stored_is_decoded_there(photo, kind, colours, monkeypatch, png_decoder):
    written, write_resized = [], images.write_resized
    monkeypatch.setattr(images, "write_resized", lambda *given: written.append(1) or write_resized(*given))
    data = stored(photo.resize((40, 30)).convert(colours), kind)
    known = kind == "JPEG" or (png_decoder == "imagecodecs" and colours != "LA")
    for shape in (ImageShape(mode=colours), ImageShape(image_size=(30, 40), mode=colours, resize="pad")):
        assert np.array_equal(decoded(data, shape), plainly(data, colours))
    assert len(written) == 2 * (not known)
    # Not so: another size, a part of it, a wider memory, another mode, and one that is held otherwise.
    written.clear()
    shape = ImageShape(mode=colours)
    around = np.full((30, 50, shape.channels), 77, "u1")
    images.decode(data, shape, around[:, 5:45], None, "x")
    assert np.array_equal(around[:, 5:45], plainly(data, colours))
    assert (around[:, :5] == 77).all()
    assert (around[:, 45:] == 77).all()
    decoded(data, ImageShape(image_size=(30, 40), mode=colours, resize="random_crop", scale=(0.2, 0.3)), key=1)
    decoded(data, ImageShape(image_size=(40, 30), mode=colours, resize="crop"))
    decoded(data, ImageShape(mode="RGBA" if colours != "RGBA" else "L"))
    turned = stored(photo.resize((40, 30)).convert(colours), kind, exif=exif(3))
    assert np.array_equal(decoded(turned, shape), plainly(turned, colours))
    assert len(written) == 5


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
