"""The orientation that a camera noted, in EXIF, in XMP or in a text of ImageMagick."""

import struct
import zlib

import numpy as np
import pytest
from PIL import PngImagePlugin
from support.files.pictures import decoded, exif, plainly, stored

from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.formats import ImageShape, orientation_of

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
        start = b"II*\0" if order == "<" else b"MM\0*"
        packed = struct.pack(order + ("HH" if kind == 3 else "I"), *([value, 0] if kind == 3 else [value]))
        other = struct.pack(order + "HHII", 0x0100, 4, 1, 3)
        head = start + struct.pack(order + "IHH", 8, 2, 0x0100)[:-2]
        return head + other + struct.pack(order + "HHI", tag, kind, count) + packed

    assert [orientation_of(block(order, kind)) for order in "<>" for kind in (3, 4)] == [6] * 4
    assert orientation_of(b"Exif\0\0" + block("<")) == 6
    odd = [block("<", value=0), block("<", value=9), block("<", count=2), block("<", tag=0x0113), b"", b"II*\0"]
    odd += [block("<", kind=4)[:end] for end in range(32)]
    assert {orientation_of(one) for one in odd} == {1}
