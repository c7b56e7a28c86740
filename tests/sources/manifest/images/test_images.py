"""Decoding images: against Pillow done plainly, and never a value from what is not whole."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import types
import warnings
import zlib

import numpy as np
import pytest
import torch

from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.sources.manifest.images import image as images
from lit_async_data.sources.manifest.images import picture, pixels
from lit_async_data.sources.manifest.images.formats import jpeg, png
from lit_async_data.sources.manifest.images.geometry.image_shape import ImageShape
from lit_async_data.sources.manifest.images.geometry.orientation import mirrored, orientation_of
from lit_async_data.sources.manifest.images.geometry.resizing import write_resized

PIL = pytest.importorskip("PIL")
from PIL import Image, ImageOps  # noqa: E402

KINDS = {
    "jpeg": ("JPEG", {"quality": 90}),
    "progressive": ("JPEG", {"quality": 90, "progressive": True}),
    "png": ("PNG", {}),
    "tiff": ("TIFF", {}),
    "lzw": ("TIFF", {"compression": "tiff_lzw"}),
    "deflate": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "jpeg in tiff": ("TIFF", {"compression": "jpeg"}),
    "webp": ("WEBP", {"quality": 90}),
    "lossless webp": ("WEBP", {"lossless": True}),
    "bmp": ("BMP", {}),
    "gif": ("GIF", {}),
}
MODES = ("RGB", "L", "RGBA", "LA")


@pytest.fixture(autouse=True, params=["faster", "Pillow", "inflated"])
def decoders(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(picture, "imagecodecs", lambda: None)
    if request.param == "inflated":  # also PNGs that are small enough for libspng alone
        monkeypatch.setattr(png, "_LEAST_BYTES", 0)
    return request.param


@pytest.fixture(scope="module")
def photo():
    """427×640 pixels; without scikit-learn, waves of every length."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        rows, columns = np.mgrid[:427, :640]
        waves = [np.sin((rows * a + columns * b) ** 1.3 / 300) for a, b in ((1, 0), (0, 1), (0.5, 0.7))]
        return Image.fromarray((np.dstack(waves) * 120 + 128).astype("u1"))
    return Image.fromarray(load_sample_images().images[0])


def stored(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decoded(data, shape, target=None, key=None, where="there/x.png"):
    height, width = target or shape.image_size or images.size_of(data, shape, where)
    out = np.full((height, width, shape.channels), 77, shape.dtype)
    images.decode(data, shape, out, key, where)
    return out


def plainly(data, mode, size=None, box=None, resample=Image.Resampling.BILINEAR):
    """By Pillow, in the simplest way there is; size as (width, height)."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image.info.pop("transparency", None) if mode in ("RGB", "L") else None
    image = image.convert(mode)
    if box and all(edge == int(edge) for edge in box):
        image, box = image.crop(box), None
    image = image.resize(size, resample, box=box) if size else image
    return np.asarray(image).reshape(image.height, image.width, -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_comes_out_as_pillow_decodes_it(photo, kind, mode):
    name, options = KINDS[kind]
    data = stored(photo.resize((60, 41)), name, **options)
    assert (decoded(data, ImageShape(mode=mode)) == plainly(data, mode)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        *(("PNG", found) for found in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *(("TIFF", found) for found in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")),
        *(("JPEG", found) for found in ("L", "RGB", "CMYK", "YCbCr")),
    ],
)
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
    resized = decoded(data, ImageShape((20, 30), mode))
    if found == "1" and mode in ("RGB", "L"):
        assert len(np.unique(resized)) > 2  # its greys are weighed, which black and white could not be
    assert (resized == plainly(data, mode, (30, 20))).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("found", ["P", "L", "RGB"])
def test_one_transparent_colour(photo, found, mode):
    small = photo.resize((60, 41)).convert(found)
    transparent = {"P": bytes(range(200)), "L": 90, "RGB": small.getpixel((7, 7))}[found]
    data = stored(small, "PNG", transparency=transparent)
    assert (decoded(data, ImageShape(mode=mode)) == plainly(data, mode)).all()
    assert (decoded(data, ImageShape((20, 30), mode)) == plainly(data, mode, (30, 20))).all()
    if mode in ("RGBA", "LA"):
        assert (decoded(data, ImageShape(mode=mode))[..., -1] < 255).any()


def test_sixteen_bits_keep_the_upper_eight():
    values = np.arange(0, 65536, 97, dtype="u2")[:672].reshape(28, 24)
    for kind in ("PNG", "TIFF"):
        data = stored(Image.fromarray(values), kind)
        assert (decoded(data, ImageShape(mode="L", depth=8))[..., 0] == values >> 8).all()
        assert (decoded(data, ImageShape(depth=8))[..., 2] == values >> 8).all()


def a_png(width, height, depth, colour, rows=b"", *, streams=None, interlaced=False):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    parts = [(b"IHDR", head), *((b"IDAT", each) for each in streams or [zlib.compress(rows)]), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def filtered(random, width, height, channels):
    """Rows of any values, each filtered in some way: any bytes are pixels."""
    rows = random.integers(0, 256, (height, 1 + width * channels), np.uint8)
    rows[:, 0] = random.integers(0, 5, height)
    return rows.tobytes()


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (90, 91), (160, 137), (300, 221)])
@pytest.mark.parametrize(("colour", "mode"), [(0, "L"), (2, "RGB"), (6, "RGBA")])
def test_pixels_of_a_png_are_those_of_pillow_however_they_are_filtered(size, colour, mode, monkeypatch, decoders):
    inflated = []
    if decoders != "Pillow":
        library = pytest.importorskip("imagecodecs")
        deflate_decode = library.deflate_decode
        monkeypatch.setattr(
            library, "deflate_decode", lambda *given, **how: inflated.append(1) or deflate_decode(*given, **how)
        )
        monkeypatch.setattr(images, "_pillow", lambda *_: pytest.fail("left to Pillow"))
    width, height = size
    # The last has 66 385 bytes or more: more than one block that is not compressed.
    rows = filtered(np.random.default_rng(width), width, height, len(mode))
    stream = zlib.compress(rows)
    for streams in ([stream], [stream[:1], b"", stream[1:20], stream[20:]]):
        data = a_png(width, height, 8, colour, streams=streams)
        assert np.array_equal(decoded(data, ImageShape(mode=mode)), plainly(data, mode))
    large = len(rows) >= 24 * 1024
    assert len(inflated) == 2 * (decoders == "inflated" or (decoders == "faster" and large))
    monkeypatch.setattr(png, "_MOST_BYTES", len(rows) - 1)
    assert np.array_equal(decoded(data, ImageShape(mode=mode)), plainly(data, mode))
    assert len(inflated) <= 2


def test_a_png_of_odd_streams_is_what_pillow_makes_of_it(monkeypatch):
    rows = filtered(np.random.default_rng(0), 40, 30, 3)
    stream = zlib.compress(rows)
    strange = bytearray(rows)
    strange[121 * 7] = 9  # there are five ways to filter
    streams = {
        "as it should be": [stream],
        "too many rows": [zlib.compress(rows + rows[:121])],
        "too few rows": [zlib.compress(rows[:-121])],
        "a row cut short": [zlib.compress(rows[:-1])],
        "more behind it": [stream + b"more"],
        "a wrong sum": [stream[:-1] + bytes([stream[-1] ^ 1])],
        "no sum": [stream[:-4]],
        "half of it": [stream[: len(stream) // 2]],
        "no way to filter": [zlib.compress(bytes(strange))],
        "no stream": [b"nothing of the kind"],
        "nothing": [b""],
    }
    said = []
    for name, parts in streams.items():
        data = a_png(40, 30, 8, 2, streams=parts)
        found = outcome(data, ImageShape(), (30, 40))
        with monkeypatch.context() as context:
            context.setattr(picture, "imagecodecs", lambda: None)
            alone = outcome(data, ImageShape(), (30, 40))
        assert type(found) is type(alone), name
        assert np.array_equal(found, alone), name
        said.append(isinstance(found, str))
    assert sum(said) == 7


def in_passes(values, depth):
    """Rows of an interlaced image of one byte, or two, per pixel; none is filtered."""
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    parts = [values[upper::down, left::across] for left, upper, across, down in passes]
    return b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for part in parts if part.shape[1] for row in part)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (2, 2), (8, 8), (13, 11)])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("interlaced", [False, True])
def test_a_png_of_fewer_rows_than_it_says_is_refused(size, depth, interlaced):
    """Pillow leaves what is missing black, and says nothing."""
    width, height = size
    values = np.random.default_rng(0).integers(1 << depth - 1, 1 << depth, (height, width))
    rows = (
        in_passes(values, depth)
        if interlaced
        else b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for row in values)
    )
    shape = ImageShape(mode="L", depth=8)

    def of(rows):
        return a_png(width, height, depth, 0, rows, interlaced=interlaced)

    assert np.array_equal(decoded(of(rows), shape)[..., 0], values >> depth - 8)
    assert np.array_equal(decoded(of(rows + rows), shape)[..., 0], values >> depth - 8)
    for missing in {1, 2, len(rows) // 2, len(rows) - 1, len(rows)}:
        with pytest.raises(CorruptError, match=r"^there/x.png: the PNG cannot be decoded"):
            decoded(of(rows[: len(rows) - missing]), shape)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "I;16", "RGB", "RGBA"])
def test_a_png_that_ends_black_is_an_image(mode):
    for size in ((1, 1), (9, 3), (17, 2)):
        data = stored(Image.new(mode, size))
        assert not decoded(data, ImageShape(depth=8)).any()
    for depth in (1, 2, 4):  # nine pixels are two, three and five bytes
        rows = b"\0" * (-(-9 * depth // 8) + 1) * 3
        assert not decoded(a_png(9, 3, depth, 0, rows), ImageShape()).any()
        with pytest.raises(CorruptError, match="the PNG cannot be decoded"):
            decoded(a_png(9, 3, depth, 0, rows[: -len(rows) // 3]), ImageShape())


def test_colours_of_sixteen_bits_keep_the_upper_eight():
    values = np.random.default_rng(0).integers(0, 65536, (3, 2, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    assert (decoded(a_png(2, 3, 16, 2, rows), ImageShape(depth=8)) == values >> 8).all()


def test_a_tiff_of_twelve_bits_keeps_the_upper_eight():
    # 0x123 and 0xABC in three bytes; uncompressed, little-endian.
    tags = [(256, 3, 2), (257, 3, 1), (258, 3, 12), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 1)]
    tags.append((279, 4, 3))
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    data = b"II*\0" + struct.pack("<I", 12) + b"\x12\x3a\xbc\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    assert decoded(data, ImageShape(mode="L", depth=8)).ravel().tolist() == [0x12, 0xAB]
    assert decoded(data, ImageShape(mode="I;16")).ravel().tolist() == [0x123, 0xABC]


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
        decoded(one, ImageShape(mode="RGBA", depth=8))
    assert (decoded(one, ImageShape(mode="L", depth=8))[..., 0] == deep.astype("u2") >> 8).all()
    assert (decoded(one, ImageShape(mode="I;16"))[..., 0] == deep).all()


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_what_a_camera_noted_is_applied(photo, kind, turned):
    exif = Image.Exif()
    exif[0x0112] = turned
    data = stored(photo.resize((64, 40)), kind, exif=exif)
    shape = ImageShape()
    assert images.size_of(data, shape, "x") == ((64, 40) if turned >= 5 else (40, 64))
    assert (decoded(data, shape) == plainly(data, "RGB")).all()
    target = ImageShape((16, 24), resize="crop")
    wanted = (0, 64 / 2 - 40 / 3, 40, 64 / 2 + 40 / 3) if turned >= 5 else (2, 0, 62, 40)
    assert np.abs(decoded(data, target).astype(int) - plainly(data, "RGB", (24, 16), wanted)).max() <= 1


def test_a_png_may_say_after_its_pixels_how_it_was_held(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    block = exif.tobytes().removeprefix(b"Exif\0\0")
    data = stored(photo.resize((64, 40)))
    chunk = struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    late = data[:-12] + chunk + data[-12:]
    assert images.size_of(late, ImageShape(), "x") == (64, 40)
    assert (decoded(late, ImageShape()) == plainly(late, "RGB")).all()


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


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_jpeg_that_is_much_larger_is_decoded_smaller_with_little_change(photo, factor, turned, monkeypatch):
    seen, parts = [], []
    upright, write_resized = pixels.upright, images.write_resized
    monkeypatch.setattr(pixels, "upright", lambda found, way: seen.append(found.shape[1]) or upright(found, way))
    monkeypatch.setattr(
        images, "write_resized", lambda found, *rest: parts.append(rest[0]) or write_resized(found, *rest)
    )
    exif = Image.Exif()
    exif[0x0112] = turned
    # Neither side is a multiple of the factor: the last column and row stand for less than the others.
    data = stored(photo.crop((0, 0, 635, 427)), "JPEG", quality=90, exif=exif)
    # 213 is half of 427, less half a pixel: twice that many are just left over.
    side = 427 // factor // 2
    found = decoded(data, ImageShape(side, resize="crop")).astype(int)
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
    whole = decoded(data, ImageShape(side, resize="stretch")).astype(int)
    # A shift by a pixel would be ten times that.
    assert np.abs(whole - plainly(data, "RGB", (side, side))).mean() < 1.2
    seen.clear()
    decoded(data, ImageShape(side + 1, resize="crop"))
    assert seen == [-(-635 // (factor // 2))]
    seen.clear()
    nearest = decoded(data, ImageShape(side, interpolation="nearest"))
    assert seen == [635]
    assert (nearest == plainly(data, "RGB", (side, side), resample=Image.Resampling.NEAREST)).all()


@pytest.mark.parametrize("name", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
def test_every_interpolation_is_pillows(photo, name):
    data = stored(photo.resize((60, 41)))
    found = decoded(data, ImageShape((20, 30), interpolation=name)).astype(int)
    differ = np.abs(found - plainly(data, "RGB", (30, 20), resample=Image.Resampling[name.upper()]))
    # Torch's are Pillow's but for rounding, which happens in two steps.
    assert differ.max() <= (2 if name == "bicubic" else 1 if name == "bilinear" else 0)
    assert differ.mean() < 0.02


def test_padding_keeps_the_shape_and_fills_the_rest(photo):
    data = stored(photo.resize((60, 40)))
    found = decoded(data, ImageShape((30, 30), resize="pad", fill=9))
    assert (np.abs(found[5:25].astype(int) - plainly(data, "RGB", (30, 20))) <= 1).all()
    assert (found[:5] == 9).all()
    assert (found[25:] == 9).all()


def test_a_random_crop_is_one_of_its_key_and_the_middle_without_one(photo):
    data = stored(photo.resize((60, 40)))
    shape = ImageShape(24, resize="random_crop")
    first, again, other = (decoded(data, shape, key=key) for key in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert (decoded(data, shape) == decoded(data, ImageShape(24, resize="crop"))).all()
    differ = decoded(data, shape).astype(int) - plainly(data, "RGB", (24, 24), (10, 0, 50, 40))
    assert (np.abs(differ) <= 1).all()


def test_any_bytes_like_and_any_part_of_an_array_will_do(photo):
    data, shape = stored(photo.resize((60, 40))), ImageShape()
    batch = np.zeros((3, 40, 60, 3), "u1")
    images.decode(memoryview(data), shape, batch[1], None, "x")
    images.decode(bytearray(data), shape, batch[2], None, "x")
    assert (batch[1] == plainly(data, "RGB")).all()
    assert (batch[2] == batch[1]).all()
    assert not batch[0].any()


def test_an_array_of_another_kind_is_a_mistake_of_the_caller(photo):
    data = stored(photo.resize((6, 4)))
    for out in (np.zeros((4, 6, 3), "f4"), np.zeros((4, 6, 1), "u1"), np.zeros((4, 6), "u1")):
        with pytest.raises(ValueError, match="channels"):
            images.decode(data, ImageShape(), out, None, "x")


def test_another_size_is_an_error_unless_one_is_given(photo):
    data = stored(photo.resize((60, 40)))
    with pytest.raises(FormatError, match=r"^there/x.png: 40×60 pixels .*41×60 are expected; give image_size"):
        decoded(data, ImageShape(), (41, 60))


def outcome(data, shape, target):
    """The image, or the error's message."""
    try:
        return decoded(data, shape, target)
    except (CorruptError, FormatError) as error:
        return str(error)


def pieces(data):
    """Where a file is cut: everywhere near its beginning and its end, and here and there between."""
    ends = {*range(40), *range(len(data) - 40, len(data)), *np.linspace(40, len(data) - 40, 40).astype(int).tolist()}
    return [data[:end] for end in sorted(ends)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_short_never_gives_another_image(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((90, 61)), name, **options)
    whole, refused = decoded(data, ImageShape()), 0
    for piece in pieces(data):
        found = outcome(piece, ImageShape(), whole.shape[:2])
        if isinstance(found, str):
            assert found.startswith("there/x.png: ")
            refused += 1
        else:
            # Nothing but what stands behind the pixels is missing.
            assert len(data) - len(piece) <= 12
            assert (found == whole).all()
    assert refused >= 100


def test_a_jpeg_whose_end_was_never_written_is_refused(photo):
    # Pillow takes the zeros of most of these for pixels.
    for options in ({"quality": 95, "subsampling": 0}, {"quality": 75}, {"progressive": True}):
        for image in (photo, photo.convert("L")):
            data = stored(image, "JPEG", **options)
            for missing in (len(data) // 2, 20_000, 1000, 3, 1):
                for tail in (b"\0", b"\x55"):
                    with pytest.raises(CorruptError, match=r"^there/x.png: the JPEG"):
                        decoded(data[:-missing] + tail * missing, ImageShape())


def test_the_end_of_a_thumbnail_is_not_the_end_of_a_jpeg(photo):
    inner = stored(photo.resize((30, 20)), "JPEG")
    outer = stored(photo, "JPEG", quality=95, subsampling=0)
    both = outer[:2] + b"\xff\xe1" + struct.pack(">H", len(inner) + 2) + inner + outer[2:]
    assert (decoded(both, ImageShape()) == decoded(outer, ImageShape())).all()
    with pytest.raises(CorruptError, match="the JPEG"):
        decoded(both[:-1000] + bytes(1000), ImageShape())


def test_a_png_with_any_bit_turned_is_refused(photo):
    data = stored(photo.resize((30, 20)))
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        with pytest.raises((CorruptError, FormatError), match=r"^there/x.png: "):
            decoded(broken, ImageShape(), (20, 30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's words on tags that it skips
def test_damage_is_an_error_of_ours_or_some_image(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((30, 20)), name, **options)
    random = np.random.default_rng(0)
    for _ in range(150):
        broken = bytearray(data)
        for place in random.integers(0, min(len(data), 400), 3):
            broken[place] = random.integers(256)
        found = outcome(broken, ImageShape(max_pixels=10**6), (20, 30))
        assert not isinstance(found, str) or found.startswith("there/x.png: ")


def test_nothing_and_other_things_are_refused():
    with pytest.raises(CorruptError, match=r"^there/x.png: empty"):
        decoded(b"", ImageShape(), (2, 2))
    for other in (b"%PDF-1.7", b"8BPS\0\1", b"\0" * 100, b"%!PS-Adobe-3.0 EPSF-3.0"):
        with pytest.raises(FormatError, match=r"^there/x.png: begins with b'"):
            decoded(other, ImageShape(), (2, 2))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_files_of_several_images_are_refused(photo, kind):
    small = photo.resize((30, 20))
    data = stored(small, kind, save_all=True, append_images=[ImageOps.invert(small)])
    with pytest.raises(FormatError, match=r"^there/x.png: a \w+ of several images"):
        decoded(data, ImageShape(), (20, 30))


@pytest.mark.parametrize("kind", KINDS)
def test_more_pixels_than_allowed_are_refused(photo, kind):
    name, options = KINDS[kind]
    data = stored(photo.resize((30, 20)), name, **options)
    decoded(data, ImageShape(max_pixels=600))
    with pytest.raises(FormatError, match=r"^there/x.png: 20×30 pixels .* are more than max_pixels \(599\)"):
        decoded(data, ImageShape(max_pixels=599), (20, 30))


def bombs():
    # Each claims four thousand million pixels or more; the decoders of the last two take memory at once.
    yield "png", a_png(2**31 - 1, 2**31 - 1, 8, 2, b"\0" * 100)
    yield "bmp", b"BM" + struct.pack("<IIIIiiHHIIiiII", 100, 0, 54, 40, 2**31 - 1, 2**31 - 1, 1, 24, 0, 0, 1, 1, 0, 0)
    yield "gif", b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0)
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\x10\0\0\0" + b"\xff\xff\0" + b"\xfe\xff\0"
    yield "webp", b"RIFF" + struct.pack("<I", len(canvas) + 4) + b"WEBP" + canvas


@pytest.mark.parametrize("data", [pytest.param(data, id=kind) for kind, data in bombs()])
def test_bombs_are_refused_by_their_first_bytes(data):
    with pytest.raises(FormatError, match=r"^there/x.png: \d+×\d+ pixels .* are more than max_pixels"):
        decoded(data, ImageShape(), (2, 2))


def test_sizes_of_webp_are_read_as_pillow_reads_them(photo):
    from lit_async_data.sources.manifest.images.formats.image_bytes import early_size

    small = photo.resize((301, 277))
    with_alpha = small.copy()
    with_alpha.putalpha(Image.linear_gradient("L").resize(small.size))
    for data in (stored(small, "WEBP"), stored(small, "WEBP", lossless=True), stored(with_alpha, "WEBP")):
        assert early_size(data, "WebP") == (301, 277)


def test_no_setting_of_pillow_is_changed_and_large_images_warn_of_nothing(photo, monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Image.open would refuse more than 200
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK
    for name in ("JPEG", "PNG", "BMP"):
        decoded(stored(photo.resize((90, 61)), name), ImageShape())
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, ImageFile.MAXBLOCK)


def test_threads_decode_at_once(photo):
    from concurrent.futures import ThreadPoolExecutor

    data = [stored(photo.rotate(angle), "JPEG") for angle in range(8)]
    shape = ImageShape(64, resize="random_crop")
    alone = [decoded(one, shape, key=3) for one in data]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: decoded(one, shape, key=3), data * 4))
    assert all((one == two).all() for one, two in zip(alone * 4, together))


def test_without_pillow_it_is_said_what_to_install(monkeypatch, photo):
    data = stored(photo.resize((6, 4)), "BMP")
    assert images.installed()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert not images.installed()
    with pytest.raises(ConfigError, match=r"lit-async-data\[manifest\]"):
        decoded(data, ImageShape(), (4, 6))


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


def blocks(data):
    """Where the blocks before the pixels of a JPEG begin."""
    place, found = 2, []
    while data[place + 1] != 0xDA:
        found.append(place)
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return [*found, place]


def test_the_head_of_a_jpeg_is_what_pillow_says_or_refused(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    rng, read = np.random.default_rng(0), 0
    for mode, options in itertools.product(("L", "RGB", "CMYK"), ({}, {"progressive": True}, {"exif": exif})):
        whole = stored(photo.resize((40, 30)).convert(mode), "JPEG", **options)
        end = blocks(whole)[-1]
        damaged = [whole]
        for _ in range(300):
            data = bytearray(whole)
            data[int(rng.integers(2, end))] = int(rng.integers(256))
            damaged.append(bytes(data))
        for data in damaged:
            try:
                found = jpeg.head_of(data, "x")
                with warnings.catch_warnings(action="ignore"):  # of a tag that damage has made too large
                    opened = Image.open(io.BytesIO(data), formats=["JPEG"])
            except (OSError, SyntaxError, FormatError, CorruptError):
                continue  # and its pixels decode to the same, or not at all
            read += 1
            assert (opened.size, opened.mode, opened.info.get("exif", b"")) == (found.size, found.mode, found.exif)
    assert read > 1500


def test_a_png_that_a_faster_decoder_refuses_is_left_to_pillow(photo, monkeypatch):
    class Refusing:
        def spng_decode(self, *_, **__):
            raise RuntimeError

        def deflate_decode(self, *_, **__):
            raise ValueError

    data = stored(photo.resize((40, 30)), "PNG")
    wanted = decoded(data, ImageShape())
    monkeypatch.setattr(pixels, "imagecodecs", Refusing)
    assert np.array_equal(decoded(data, ImageShape()), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_png_is_decoded_by_the_faster_library_and_others_are_not(photo, mode, monkeypatch, decoders):
    asked = []
    if decoders != "Pillow":
        library = pytest.importorskip("imagecodecs")
        spng_decode = library.spng_decode
        monkeypatch.setattr(library, "spng_decode", lambda data, out: asked.append(1) or spng_decode(data, out=out))
    plain = stored(photo.resize((40, 30)).convert(mode), "PNG")
    decoded(plain, ImageShape(mode=mode))
    known = decoders != "Pillow" and mode != "LA"
    assert len(asked) == known
    for data in (
        stored(photo.resize((40, 30)).convert("P"), "PNG"),
        stored(photo.resize((40, 30)).convert("I;16"), "PNG") if mode == "L" else plain,
    )[: 1 + (mode == "L")]:
        decoded(data, ImageShape(mode=mode, depth=8))
    assert len(asked) == known


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("mode", MODES)
def test_what_goes_where_it_goes_as_it_is_stored_is_decoded_there(photo, kind, mode, monkeypatch, decoders):
    written, write_resized = [], images.write_resized
    monkeypatch.setattr(images, "write_resized", lambda *given: written.append(1) or write_resized(*given))
    data = stored(photo.resize((40, 30)).convert("L" if mode == "L" or kind == "JPEG" else mode), kind)
    colours = "L" if kind == "JPEG" else mode
    known = kind == "JPEG" or (decoders != "Pillow" and colours != "LA")
    for shape in (ImageShape(mode=colours), ImageShape((30, 40), colours, resize="pad")):
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
    decoded(data, ImageShape((30, 40), colours, resize="random_crop", scale=(0.2, 0.3)), key=1)
    decoded(data, ImageShape((40, 30), colours, resize="crop"))
    decoded(data, ImageShape(mode="RGBA" if colours != "RGBA" else "L"))
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = stored(photo.resize((40, 30)).convert(colours), kind, exif=exif)
    assert np.array_equal(decoded(turned, shape), plainly(turned, colours))
    assert len(written) == 5


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(30, 20), (90, 110), (7, 130)])
def test_torch_resizes_straight_into_the_array_as_it_does_by_itself(interpolation, channels, size):
    given = np.random.default_rng(0).integers(0, 256, (80, 100, channels), np.uint8)
    batch = torch.from_numpy(given[None, 10:70, 5:95].copy()).permute(0, 3, 1, 2)
    alone = torch.nn.functional.interpolate(batch, size, mode=interpolation, antialias=True)[0].permute(1, 2, 0).numpy()
    shape, box = ImageShape(size, interpolation=interpolation), (5, 10, 95, 70)
    frozen = given.copy()
    frozen.flags.writeable = False  # as what comes from Pillow is; torch would warn of it
    for pixels_ in (given, frozen, np.asfortranarray(given)):
        for out in (np.zeros((*size, channels), "u1"), np.zeros((size[0], 200, 3), "u1")[:, 7 : 7 + size[1]]):
            write_resized(pixels_, box, shape, out)
            assert np.array_equal(out, np.broadcast_to(alone, out.shape))
    whole = np.zeros((*size, channels), "u1")
    write_resized(given[10:70, 5:95].copy(), (0, 0, 90, 60), shape, whole)
    assert np.array_equal(whole, alone)


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 17)])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_an_image_of_one_row_or_column_comes_out_however_it_was_held(turned, size, mode):
    random = np.random.default_rng(0)
    pixels_ = random.integers(0, 256, (size[1], size[0], 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = turned
    data = stored(Image.fromarray(pixels_).convert(mode), exif=exif)
    for wanted in ((64, 64), (1, 9)):
        found = decoded(data, ImageShape(wanted, mode)).astype(int)
        assert np.abs(found - plainly(data, mode, wanted[::-1])).max() <= 1
    if max(size) > 1:
        assert decoded(data, ImageShape((3, 3), mode, resize="random_crop"), key=3).any()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 10}])
def test_a_jpeg_whose_end_was_put_behind_a_part_of_it_is_refused(photo, options):
    for image in (photo, photo.convert("L")):
        data = stored(image, "JPEG", **options)
        for kept in (len(data) // 3, len(data) // 2, len(data) - 40):
            with pytest.raises(CorruptError, match=r"^there/x.png: the JPEG cannot be decoded"):
                decoded(data[:kept] + b"\xff\xd9", ImageShape())
        for harmless in (data + b"more", data[:-2] + b"\0\0\0\xff\xd9"):
            assert np.array_equal(decoded(harmless, ImageShape()), decoded(data, ImageShape()))


@pytest.mark.parametrize("side", [8, 200])
def test_texts_in_a_png_are_not_inflated(photo, side, monkeypatch, decoders):
    from PIL import PngImagePlugin

    notes = PngImagePlugin.PngInfo()
    notes.add_text("note", "n" * 1000, zip=True)
    data = stored(photo.resize((side, side)), pnginfo=notes)
    assert b"zTXt" in data
    if decoders != "Pillow":  # which limits a text by itself
        library = pytest.importorskip("imagecodecs")
        spng_decode = library.spng_decode
        seen = []
        monkeypatch.setattr(library, "spng_decode", lambda data, out: seen.append(data) or spng_decode(data, out=out))
        monkeypatch.setattr(images, "_pillow", lambda *_: pytest.fail("left to Pillow"))
    assert np.array_equal(decoded(data, ImageShape()), plainly(data, "RGB"))
    if decoders != "Pillow":
        assert len(seen) == 1
        assert b"zTXt" not in seen[0]


@pytest.mark.parametrize("missing", ["SPNG", "DEFLATE", None])
def test_a_library_without_what_is_needed_is_as_none(monkeypatch, missing):
    parts = {name: types.SimpleNamespace(available=name != missing) for name in ("SPNG", "DEFLATE")}
    library = types.SimpleNamespace(**parts)
    monkeypatch.undo()
    monkeypatch.setattr(picture, "_imported", lambda _: library)
    picture.imagecodecs.cache_clear()
    try:
        assert picture.imagecodecs() is (None if missing else library)
    finally:
        picture.imagecodecs.cache_clear()


def test_without_pillow_what_is_left_to_it_is_no_damage(monkeypatch, photo):
    # Colours into grey are.
    data = stored(photo.resize((40, 30)), "JPEG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"lit-async-data\[manifest\]"):
        decoded(data, ImageShape(mode="L"), (30, 40))


def test_what_a_camera_noted_may_stand_in_two_blocks(photo):
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "x" * 200
    data = stored(photo.resize((40, 30)), "JPEG", exif=exif)
    block = exif.tobytes()
    at = data.index(b"\xff\xe1")
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    halves = [block[:100], b"Exif\0\0" + block[100:]]
    apart = b"".join(b"\xff\xe1" + struct.pack(">H", len(half) + 2) + half for half in halves)
    both = data[:at] + apart + data[end:]
    assert decoded(both, ImageShape()).shape == (40, 30, 3)
    assert np.array_equal(decoded(both, ImageShape()), decoded(data, ImageShape()))


def test_a_jpeg_of_which_a_stretch_is_missing_is_refused(photo):
    data = stored(photo, "JPEG", restart_marker_blocks=40)
    marks = [at for at in range(len(data) - 1) if data[at] == 0xFF and 0xD0 <= data[at + 1] <= 0xD7]
    without = data[: marks[0]] + data[marks[2] :]
    stray = data[: marks[0]] + b"\x12" * 30 + data[marks[0] :]
    for damaged in (without, stray):
        with pytest.raises(CorruptError, match=r"^there/x.png: the JPEG cannot be decoded"):
            decoded(damaged, ImageShape())
