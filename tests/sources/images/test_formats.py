"""Images of each format: as Pillow decodes them; damaged and unsupported ones are errors that name the file.

Nothing can find a flipped bit in a JPEG, WebP, BMP or TIFF for sure: they have no checksums.
"""

import contextlib
import io
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin
from support.files.pictures import KINDS, MODES, a_png, decoded, plainly, stored

from lit_async_data.errors import ConfigError, CorruptError, FormatError, SourceError
from lit_async_data.sources.images import formats
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


def test_kinds_of_jpeg_that_libjpeg_does_not_decode_are_named(photo):
    data = stored(photo, "JPEG")
    place = data.index(b"\xff\xc0")

    def frame(marker, bits=8, channels=3):
        head = data[place + 2 : place + 4] + bytes((bits,)) + data[place + 5 : place + 9] + bytes((channels,))
        return data[: place + 1] + bytes((marker,)) + head + data[place + 10 :]

    # simplejpeg would crash if it were asked for a smaller size of a lossless one.
    for each in (frame(0xC1, bits=12), frame(0xC3), frame(0xC5), frame(0xC0, channels=2)):
        for size in ((61, 90), (8, 8)):
            with pytest.raises(FormatError, match=r"^there/x.png: a JPEG of . channels of .* not|only 1, 3 or 4"):
                decoded(each, ImageShape(image_size=size), size)


def test_a_jpeg_of_a_sampling_without_a_name_is_decoded_by_pillow(photo, monkeypatch):
    class Library:
        def decode_jpeg(self, *_, **__):
            raise ValueError

        decode_jpeg_header = decode_jpeg

    data = stored(photo, "JPEG")
    monkeypatch.setattr(formats, "simplejpeg", Library())
    assert np.array_equal(decoded(data), np.asarray(Image.open(io.BytesIO(data))))
    with pytest.raises(CorruptError, match=r"^there/x.png: the JPEG cannot be decoded"):
        decoded(data[:-200], size=SIZE)


@pytest.mark.parametrize(("library", "kind"), [("simplejpeg", "JPEG"), ("PIL", "BMP")])
def test_a_missing_library_is_named_with_what_to_install(photo, monkeypatch, library, kind):
    data, name = stored(photo, kind), {"PIL": "pillow"}.get(library, library)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(formats, "simplejpeg", Lazy("simplejpeg"))
    with pytest.raises(ConfigError, match=rf"{name} is missing; install it by pip install {name}$"):
        decoded(data)


def test_a_broken_library_is_told_by_its_own_error(photo, monkeypatch, tmp_path):
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('libturbojpeg.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "simplejpeg", raising=False)
    monkeypatch.setattr(formats, "simplejpeg", Lazy("simplejpeg"))
    with pytest.raises(ConfigError, match=r"a decoder cannot be loaded \(libturbojpeg.so: cannot open\); install"):
        decoded(stored(photo, "JPEG"))


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


def test_a_png_that_imagecodecs_refuses_is_left_to_pillow(photo, monkeypatch):
    class Refusing:
        def spng_decode(self, *_, **__):
            raise RuntimeError

    data = stored(photo.resize((40, 30)), "PNG")
    monkeypatch.setattr(formats, "_imagecodecs", Refusing)
    assert np.array_equal(decoded(data, ImageShape()), plainly(data, "RGB"))


def test_nothing_and_other_things_are_refused():
    with pytest.raises(CorruptError, match=r"^there/x.png: empty"):
        decoded(b"", ImageShape(), (2, 2))
    for other in (b"8BPS\0\1", b"\0" * 100, b"%!PS-Adobe-3.0 EPSF-3.0"):
        with pytest.raises(FormatError, match=r"^there/x.png: begins with b'"):
            decoded(other, ImageShape(), (2, 2))


def test_no_setting_of_pillow_is_changed_and_large_images_warn_of_nothing(photo, monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Image.open would refuse more than 200
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK
    for name in ("JPEG", "PNG", "BMP"):
        decoded(stored(photo.resize((90, 61)), name), ImageShape())
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK)
