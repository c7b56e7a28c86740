"""Whether an image is damaged, unsupported or merely odd: the same in every mode and with whatever is installed."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import zlib

import numpy as np
import pytest

from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.manifest.images import image as images
from lit_async_data.sources.manifest.images import picture, pixels
from lit_async_data.sources.manifest.images.formats import jpeg, tiff
from lit_async_data.sources.manifest.images.geometry.image_shape import ImageShape
from lit_async_data.sources.manifest.images.geometry.orientation import orientation_of

pytest.importorskip("PIL")
from PIL import Image, ImageOps, PngImagePlugin

MODES = ("RGB", "L", "RGBA", "LA")


@pytest.fixture(autouse=True, params=["with imagecodecs", "without"])
def install(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(picture, "imagecodecs", lambda: None)


@pytest.fixture(scope="module")
def photo():
    rows, columns = np.mgrid[:128, :200]
    waves = [np.sin((rows * a + columns * b) ** 1.3 / 300) for a, b in ((1, 0), (0, 1), (0.5, 0.7))]
    noise = np.random.default_rng(0).normal(0, 6, (128, 200, 3))
    return Image.fromarray((np.dstack(waves) * 110 + 128 + noise).clip(0, 255).astype("u1"))


def stored(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decoded(data, mode="RGB", size=None):
    shape = ImageShape(size, mode)
    height, width = size or images.size_of(data, shape, "x")
    out = np.zeros((height, width, shape.channels), "u1")
    images.decode(data, shape, out, None, "x")
    return out


def plainly(data, mode="RGB"):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if mode in ("RGB", "L"):
        image.info.pop("transparency", None)
    return np.asarray(image.convert(mode)).reshape(image.height, image.width, -1)


def is_as_pillow_decodes(data, like=None):
    for mode in MODES:
        assert np.array_equal(decoded(data, mode), plainly(like or data, mode)), mode
        decoded(data, mode, (8, 8))


def is_refused(data, error, said):
    for mode, size in itertools.product(MODES, (None, (8, 8), (100, 150))):
        with pytest.raises(error, match=said) as found:
            decoded(data, mode, size)
        assert str(found.value).startswith("x: ")
        if error is FormatError:
            assert "whole?" not in str(found.value)


def restarts(data):
    return [
        at for at in range(data.index(b"\xff\xda"), len(data) - 1) if data[at] == 0xFF and 0xD0 <= data[at + 1] < 0xD8
    ]


def segment(marker, content):
    return b"\xff" + bytes((marker,)) + struct.pack(">H", len(content) + 2) + content


# JPEG


@pytest.mark.parametrize("found", ["L", "RGB", "CMYK"])
def test_a_damaged_jpeg_is_refused_in_every_mode(photo, found):
    data = stored(photo.convert(found), "JPEG", quality=90, restart_marker_blocks=8)
    marks = restarts(data)
    noisy = bytes(np.random.default_rng(0).integers(1, 255, 300, np.uint8))
    damaged = {
        "cut short, with an end put behind": data[: len(data) // 2] + b"\xff\xd9",
        "two stretches are missing": data[: marks[0]] + data[marks[2] :],
        "more than fills a word before a marker": data[: marks[1]] + b"\x12" * 8 + data[marks[1] :],
        "other bytes in the middle": data[: marks[3] + 9] + noisy + data[marks[3] + 309 :],
    }
    for name, each in damaged.items():
        assert plainly(each, "L").any(), name  # Pillow says nothing
        is_refused(each, CorruptError, "^x: the JPEG cannot be decoded .libjpeg says: ")
    is_as_pillow_decodes(data)


def test_scans_that_are_missing_from_a_progressive_jpeg_are_damage(photo):
    data = stored(photo, "JPEG", progressive=True)
    first = scans(data)[0]
    is_refused(data[:first] + data[data.index(b"\xff\xc4", first) :], CorruptError, "Inconsistent progression")


def scans(data):
    return [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"]


def test_oddities_in_the_head_of_a_jpeg_are_no_damage_and_hide_none(photo):
    data = stored(photo, "JPEG", icc_profile=b"p" * 300)
    tables = data.index(b"\xff\xdb")
    scan = scans(data)[0]
    of_icc = data.index(b"ICC_PROFILE\0") + 12
    odd = {
        "zeros escaped as in pixels": data[:tables] + b"\xff\0\xff\0" + data[tables:],
        "stray bytes": data[:tables] + b"stray bytes" + data[tables:],
        "fill bytes": data[:tables] + b"\xff" * 5 + data[tables:],
        "an unknown version of JFIF": data.replace(b"JFIF\0\1", b"JFIF\0\7"),
        "a profile that misses a part": data[: of_icc + 1] + b"\x05" + data[of_icc + 2 :],
        "a range of coefficients that is not used": data[: scan + 12] + b"\1" + data[scan + 13 :],
        "bytes before the last marker": data[:-2] + b"any number of bytes" + data[-2:],
        "bytes behind the last marker": data + b"more",
        "colours named unusually": data[:tables] + segment(0xEE, b"Adobe\0d\0\0\0\0\xff") + data[tables:],
        "colours named as usual, without a marker": data[:tables] + b"\0\x0eAdobe\0d\0\0\0\0\1" + data[tables:],
    }
    for name, each in odd.items():
        for mode in MODES:
            assert np.array_equal(decoded(each, mode), plainly(data, mode)), name
        is_refused(each[: len(data) // 2] + b"\xff\xd9", CorruptError, "premature end")
    without = data[:tables] + b"\0\x0eAdobe\0d\0\0\0\0\0" + data[tables:]
    is_refused(without, CorruptError, "colour transform")


@pytest.mark.parametrize("filling", [b"\0", b"\x28\x00\xa2\x80\x0a\x3f", b"\xff" * 7])
def test_what_fills_a_word_before_a_marker_is_no_damage(photo, filling):
    data = stored(photo, "JPEG", restart_marker_blocks=8)
    mark = restarts(data)[2]
    is_as_pillow_decodes(data[:mark] + filling + data[mark:], like=data)


def frame(data, marker, bits=8):
    place = data.index(b"\xff\xc0")
    return data[: place + 1] + bytes((marker,)) + data[place + 2 : place + 4] + bytes((bits,)) + data[place + 5 :]


def test_kinds_of_jpeg_that_are_not_supported_are_named(photo):
    data = stored(photo, "JPEG")
    place = data.index(b"\xff\xc0")
    two = (
        data[:place]
        + segment(0xC0, data[place + 4 : place + 9] + b"\2" + data[place + 10 : place + 16])
        + data[place + 19 :]
    )
    is_refused(frame(data, 0xC1, 12), FormatError, "a 12-bit JPEG, which is not supported; convert it")
    # libjpeg would crash if it were asked for a smaller one.
    is_refused(frame(data, 0xC3), FormatError, "a lossless JPEG, which is not supported; convert it")
    is_refused(frame(data, 0xC5), FormatError, "a hierarchical JPEG")
    is_refused(two, FormatError, "a JPEG of 2 channels")
    for damaged in (frame(data, 0xC0, 12), frame(data, 0xC1, 77), data[: place + 9] + b"\2" + data[place + 10 :]):
        is_refused(damaged, CorruptError, "the header of the JPEG is inconsistent")
    is_refused(data[:place] + data[place : place + 19] * 2 + data[place + 19 :], CorruptError, "states its size twice")


def test_a_jpeg_of_a_sampling_without_a_name_is_decoded_by_pillow_in_every_mode(photo, monkeypatch):
    class Library:
        def decode_jpeg(self, *_, **__):
            raise ValueError("tjDecompressHeader3(): Could not determine subsampling level of JPEG image")

    monkeypatch.setattr(jpeg, "_library", Library)
    is_as_pillow_decodes(stored(photo, "JPEG"))


def test_no_jpeg_is_decoded_without_the_library_that_notices_damage(photo, monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    for mode in MODES:
        with pytest.raises(ConfigError, match=r"simplejpeg.*pip install 'lit-async-data\[manifest\]'"):
            decoded(stored(photo, "JPEG"), mode)


# PNG


def chunk(name, content, sum_=None):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", sum_ or zlib.crc32(name + content))


def with_chunk(data, name, content, sum_=None):
    return data[:33] + chunk(name, content, sum_) + data[33:]


@pytest.mark.parametrize("found", ["P", "L", "RGB", "RGBA", "1"])
def test_damage_in_what_only_describes_a_png_is_no_damage(photo, found):
    data = stored(photo.convert(found))
    for name, content in (
        (b"tEXt", b"Comment\0text"),
        (b"zTXt", b"mxfile\0\0nothing deflated"),
        (b"tIME", bytes(7)),
        (b"gAMA", bytes(4)),
        (b"prVW", b"of a program"),
    ):
        is_as_pillow_decodes(with_chunk(data, name, content, 1), like=data)
    # Pillow refuses these although their sums are right.
    for name, content in ((b"pHYs", b"\0"), (b"cHRM", b"\0"), (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21)))):
        is_as_pillow_decodes(with_chunk(data, name, content), like=data)


def test_damage_in_what_a_png_is_decoded_or_turned_by_is_refused(photo):
    data = stored(photo.convert("P"))
    for name, content in (
        (b"tRNS", bytes(9)),
        (b"tRNs", bytes(9)),  # perhaps that one
        (b"iDAT", bytes(9)),
        (b"pLTE", bytes(9)),
        (b"eXIf", bytes(9)),
        (b"acTL", bytes(8)),
        (b"ABCD", b""),
        (b"tEXt", b"Raw profile type exif\0"),
        (b"iTXt", b"XML:com.adobe.xmp\0"),
    ):
        is_refused(with_chunk(data, name, content, 1), CorruptError, f"checksum of its part {name.decode()} is wrong")


# Orientation


def exif_block(turned):
    exif = Image.Exif()
    exif[0x0112] = turned
    return exif.tobytes()


def xmp_block(turned, element=False):
    noted = f"><tiff:Orientation>{turned}</tiff:Orientation" if element else f' tiff:Orientation="{turned}"'
    return f"<x:xmpmeta><rdf:Description{noted}></x:xmpmeta>".encode()


def imagemagick(turned):
    block = exif_block(turned)
    return f"\nexif\n{len(block):8}\n{block.hex()}\n"


def turned_files(photo, turned):
    small = photo.resize((30, 20))
    for zip_ in (False, True):
        notes = PngImagePlugin.PngInfo()
        notes.add_text("Raw profile type exif", imagemagick(turned), zip=zip_)
        yield stored(small, pnginfo=notes)
        notes = PngImagePlugin.PngInfo()
        notes.add_itxt("XML:com.adobe.xmp", xmp_block(turned, zip_).decode(), zip=zip_)
        yield stored(small, pnginfo=notes)
        yield stored(small.convert("P"), pnginfo=notes)
        yield stored(small, "JPEG", xmp=xmp_block(turned, zip_))
        yield stored(small, "WEBP", xmp=xmp_block(turned, zip_), lossless=True)
        for compression in ("raw", "tiff_lzw"):
            yield stored(small, "TIFF", tiffinfo={700: xmp_block(turned, zip_)}, compression=compression)


@pytest.mark.parametrize("turned", range(1, 9))
def test_orientation_in_xmp_and_in_texts_of_imagemagick_is_applied(photo, turned):
    for data in turned_files(photo, turned):
        assert images.size_of(data, ImageShape(), "x") == ((30, 20) if turned >= 5 else (20, 30))
        assert plainly(data).shape[:2] == ((30, 20) if turned >= 5 else (20, 30))
        is_as_pillow_decodes(data)


def test_exif_comes_before_xmp_and_what_cannot_be_read_is_upright(photo):
    small = photo.resize((30, 20))
    for noted in (1, 3):
        data = stored(small, "JPEG", exif=exif_block(noted), xmp=xmp_block(6))
        assert orientation_of(jpeg.head_of(data, "x").exif, xmp_block(6)) == noted
        is_as_pillow_decodes(data)
    for text in ("", "\nexif\n", "\nexif\n 4\nnothing", "\nexif\n    8\n49492a00"):
        notes = PngImagePlugin.PngInfo()
        notes.add_text("Raw profile type exif", text)
        assert np.array_equal(decoded(stored(small, pnginfo=notes)), plainly(stored(small)))
    assert orientation_of(b"", b'tiff:Orientation="9"') == 1


# TIFF


def tiff_of(*pages, order="<", big=False, last=0):
    """Uncompressed grey images; each page is (array, further tags)."""
    pointer = "Q" if big else "I"
    data = bytearray(32)  # where an empty directory of Exif is found at 16
    link = 8 if big else 4
    for values, further in pages:
        at = len(data)
        data += values.tobytes() + bytes(-values.size % 8)
        height, width = values.shape
        tags = {
            256: width,
            257: height,
            258: 8,
            259: 1,
            262: 1,
            273: at,
            277: 1,
            278: height,
            279: values.size,
            **further,
        }
        struct.pack_into(order + pointer, data, link, len(data))
        data += struct.pack(order + ("Q" if big else "H"), len(tags))
        for tag, value in sorted(tags.items()):
            data += struct.pack(order + ("HHQQ" if big else "HHII"), tag, 4, 1, value)
        link = len(data)
        data += struct.pack(order + pointer, last)
    start = struct.pack(order + "2sH", b"II" if order == "<" else b"MM", 43 if big else 42)
    data[: len(start) + 4 * big] = start + struct.pack(order + "HH", 8, 0) * big
    return bytes(data)


WHOLE, HALF, SMALL = (
    np.random.default_rng(0).integers(0, 256, size, np.uint8) for size in ((480, 640), (240, 320), (120, 160))
)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_overviews_masks_and_thumbnails_are_no_pages(order, big):
    page = (WHOLE, {})
    chains = {
        "overviews": (page, (HALF, {254: 1}), (SMALL, {254: 1})),
        "a mask, and one of an overview": (page, (WHOLE, {254: 4}), (HALF, {254: 5})),
        "an overview by the older tag": (page, (HALF, {255: 2})),
        "the thumbnail first": ((SMALL, {254: 1}), (WHOLE, {254: 0})),
        "a camera's, which is not marked": ((WHOLE, {34665: 16}), (SMALL, {})),
        "one that says that it is a page": ((WHOLE, {254: 2}), (HALF, {254: 1})),
        "nothing but an overview": ((WHOLE, {254: 1}),),
    }
    for name, chain in chains.items():
        data = tiff_of(*chain, order=order, big=big)
        assert images.size_of(data, ImageShape(), "x") == (480, 640), name
        assert np.array_equal(decoded(data, "L")[..., 0], WHOLE), name
    pages = [
        (page, page),
        (page, (HALF, {})),
        (page, (SMALL, {})),
        ((WHOLE, {34665: 16}), (HALF, {})),
        ((WHOLE, {34665: 16}), (SMALL, {254: 2})),
        ((WHOLE, {34665: 16}), (SMALL, {}), (SMALL, {})),
        ((SMALL, {254: 1}), page, page),
    ]
    for chain in pages:
        is_refused(tiff_of(*chain, order=order, big=big), FormatError, "TIFF of several images.*in its own file")
    for last in (10**9, 2**32 - 1, *((2**63 + 5,) if big else ())):
        is_refused(tiff_of(page, order=order, big=big, last=last), CorruptError, "the TIFF ends too soon")


def test_damage_in_a_jpeg_inside_of_a_tiff_is_refused_in_every_mode(photo):
    for found in ("L", "RGB", "CMYK"):
        data = stored(photo.convert(found), "TIFF", compression="jpeg", quality=90)
        is_as_pillow_decodes(data)
        tags = Image.open(io.BytesIO(data)).tag_v2
        strip = tags[273][0] + tags[279][0] // 2
        damaged = data[:strip] + b"\xff\xd9" + data[strip + 2 :]
        assert plainly(damaged, "L").any()
        is_refused(damaged, CorruptError, "the TIFF cannot be decoded .libjpeg says: ")


def test_a_lossless_jpeg_inside_of_a_tiff_is_left_to_pillow(photo):
    data = stored(photo.convert("L"), "TIFF", compression="jpeg")
    tiff.check_jpegs(frame(data, 0xC3), Image.open(io.BytesIO(data)).tag_v2)  # libjpeg would crash


def test_kinds_of_tiff_that_are_not_supported_are_named(photo, monkeypatch):
    colours = tiff_of((WHOLE, {258: 10, 277: 3, 262: 2}))
    is_refused(
        colours, FormatError, "an unsupported kind of TIFF .BitsPerSample 10, SamplesPerPixel 3.*convert it to 8 bits"
    )
    is_refused(tiff_of((WHOLE, {}), order=">", big=True), FormatError, "a BigTIFF of big-endian numbers, which is not")
    is_refused(tiff_of((WHOLE, {259: 50013})), FormatError, "unsupported kind of TIFF .*Compression 50013")
    subsampled = stored(photo.convert("YCbCr"), "TIFF", tiffinfo={530: (2, 1)})
    is_refused(subsampled, FormatError, "uncompressed, subsampled YCbCr, which is not supported; convert it to RGB")
    data = stored(photo, "TIFF", compression="zstd") if tiff.configured("zstd") else stored(photo, "TIFF")
    tiff.configured.cache_clear()
    monkeypatch.setattr(tiff, "_OPTIONAL", (Image.open(io.BytesIO(data)).info["compression"],))

    def save(*_, **__):
        raise OSError("encoder error -2")

    with monkeypatch.context() as context:
        context.setattr(Image.Image, "save", save)
        is_refused(data, FormatError, "which this installation of Pillow cannot decode; store it with another")
    tiff.configured.cache_clear()
    is_as_pillow_decodes(data)
    tiff.configured.cache_clear()


def test_a_bmp_that_is_not_supported_is_no_damage(photo):
    data = bytearray(stored(photo.resize((8, 8)), "BMP"))
    struct.pack_into("<H", data, 28, 64)
    is_refused(bytes(data), FormatError, "an unsupported kind of BMP; convert it")


# All of them


def mutants(data, number):
    random = np.random.default_rng(len(data))
    for count in range(number):
        place, length = int(random.integers(len(data))), int(random.choice((1, 4, 60)))
        if count % 4 == 0:
            yield data[:place] + bytes((data[place] ^ 1 << int(random.integers(8)),)) + data[place + 1 :]
        elif count % 4 == 1:
            yield data[:place] + b"\xff\xd9"
        elif count % 4 == 2:
            yield data[:place] + bytes(len(data[place : place + length])) + data[place + length :]
        else:
            yield data[:place] + data[place + length :]


INSIDES = ("unpack", "buffer", "tile", "decoder error", "subscript", "'NoneType'", "tjDecompress", "0x7", "BytesIO")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's words on tags that it skips
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"restart_marker_blocks": 5}),
        ("PNG", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "jpeg"}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
    ],
)
@pytest.mark.parametrize("least", [2**20, 1])
def test_damage_is_noticed_in_all_modes_or_in_none(photo, kind, options, least, monkeypatch):
    monkeypatch.setattr(pixels, "LARGE", least)  # from here on an image is read in strips
    data = stored(photo.resize((40, 30)), kind, **options)
    refused, all_codecs = 0, picture.imagecodecs
    for mutant in mutants(data, 60):
        verdicts = set()
        for mode, codecs in itertools.product(MODES, (all_codecs, lambda: None)):
            monkeypatch.setattr(picture, "imagecodecs", codecs)
            monkeypatch.setattr(pixels, "imagecodecs", codecs)
            try:
                shape = ImageShape(mode=mode, max_pixels=10**6)
                out = np.zeros((*images.size_of(mutant, shape, "x"), shape.channels), "u1")
                images.decode(mutant, shape, out, None, "x")
            except (CorruptError, FormatError) as error:
                verdicts.add(str(error))
            else:
                verdicts.add("served")
        assert len(verdicts) == 1, verdicts
        assert not any(inside in verdict for verdict in verdicts for inside in INSIDES), verdicts
        refused += verdicts != {"served"}
    assert refused > 10
