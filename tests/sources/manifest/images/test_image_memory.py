"""A small sample of a large image takes the memory of its decoded pixels, and not several copies of them."""

from __future__ import annotations

import io
import itertools
import os
import re
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.sources.manifest.images import decode_memory, picture, pixels
from lit_async_data.sources.manifest.images import image as images
from lit_async_data.sources.manifest.images.formats import png
from lit_async_data.sources.manifest.images.geometry import resizing, strips
from lit_async_data.sources.manifest.images.geometry.image_shape import INTERPOLATIONS, ImageShape
from lit_async_data.sources.manifest.images.geometry.orientation import stored_part, upright, upright_size

Image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
PngImagePlugin = pytest.importorskip("PIL.PngImagePlugin")


@pytest.fixture(params=["faster", "Pillow"])
def decoders(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(picture, "imagecodecs", lambda: None)
        monkeypatch.setattr(pixels, "imagecodecs", lambda: None)
    return request.param


def stored(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def some(mode, size=(61, 47)):
    values = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 4), np.uint8)
    if mode == "I;16":
        return Image.fromarray(values.view("u2")[..., 0].copy())
    return Image.fromarray(values).resize((size[0] // 3, size[1] // 3)).resize(size).convert(mode)


def decoded(data, shape, key=None):
    height, width = shape.image_size or images.size_of(data, shape, "x.png")
    out = np.full((height, width, shape.channels), 77, shape.dtype)
    images.decode(data, shape, out, key, "x.png")
    return out


def by_strips(monkeypatch, rows_of=61, rows=5):
    """From now on every image is a large one, of strips of a few rows and columns."""
    monkeypatch.setattr(pixels, "LARGE", 1)
    monkeypatch.setattr(resizing, "LARGE", 1)
    monkeypatch.setattr(strips, "_STRIP_BYTES", 4 * rows_of * rows)
    monkeypatch.setattr(resizing, "_COLUMNS_BYTES", 4 * 47 * 7)


RESIZES = (
    {},
    {"image_size": (20, 33)},
    {"image_size": (47, 20)},
    {"image_size": (90, 61)},
    {"image_size": 64, "resize": "crop"},
    {"image_size": (40, 17), "resize": "crop"},
    {"image_size": 48, "resize": "pad", "fill": 9},
    {"image_size": 16, "resize": "random_crop"},
)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(
    ("found", "modes"),
    [
        ("RGB", ("RGB", "L", "RGBA")),
        ("RGBA", ("RGB", "RGBA", "LA")),
        ("LA", ("LA", "L")),
        ("L", ("RGB", "L")),
        ("P", ("RGB", "RGBA")),
    ],
)
def test_strips_give_the_values_of_the_whole(found, modes, interpolation, monkeypatch, decoders):
    data = stored(some(found))
    shapes = [ImageShape(mode=mode, interpolation=interpolation, **how) for mode in modes for how in RESIZES]
    whole = [decoded(data, shape, key=5) for shape in shapes]
    by_strips(monkeypatch)
    for shape, wanted in zip(shapes, whole, strict=True):
        assert np.array_equal(decoded(data, shape, key=5), wanted), shape


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize(("found", "mode"), [("RGBA", "RGB"), ("P", "P"), ("I;16", "I;16"), ("RGB", "RGB")])
def test_strips_are_turned_as_the_whole_is(found, mode, turned, monkeypatch, decoders):
    exif = Image.Exif()
    exif[0x0112] = turned
    data = stored(some(found), exif=exif)
    shapes = [ImageShape(mode=mode, **how) for how in RESIZES]
    whole = [decoded(data, shape, key=5) for shape in shapes]
    by_strips(monkeypatch)
    for shape, wanted in zip(shapes, whole, strict=True):
        assert np.array_equal(decoded(data, shape, key=5), wanted), shape


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "BMP", "JPEG"])
def test_strips_of_every_format(kind, monkeypatch, decoders):
    lossless = {"lossless": True} if kind == "WEBP" else {}
    for found, mode in itertools.product(("RGB", "L") if kind == "JPEG" else ("RGB", "L", "RGBA", "P"), ("RGB", "L")):
        data = stored(some(found, (640, 400) if kind == "JPEG" else (160, 100)), kind, **lossless)
        shapes = [ImageShape(mode=mode, **how) for how in RESIZES]
        with monkeypatch.context() as context:
            whole = [decoded(data, shape, key=5) for shape in shapes]
            by_strips(context)
            for shape, wanted in zip(shapes, whole, strict=True):
                assert np.array_equal(decoded(data, shape, key=5), wanted), shape


@pytest.mark.parametrize("turned", range(1, 9))
def test_a_part_of_a_turned_image_is_found_where_it_is_stored(turned):
    values = np.arange(5 * 7).reshape(5, 7, 1)
    seen = upright(values, turned)
    size = upright_size((7, 5), turned)
    for left, upper in itertools.product(range(size[1] - 1), range(size[0] - 2)):
        a, b, c, d = stored_part((left, upper, left + 2, upper + 3), size, turned)
        assert np.array_equal(upright(values[b:d, a:c], turned), seen[upper : upper + 3, left : left + 2])


def test_no_more_than_a_strip_is_converted_at_a_time(monkeypatch, decoders):
    made = []
    values = pixels._values

    def counted(*given):
        found = values(*given)
        made.append(found.nbytes)
        return found

    monkeypatch.setattr(pixels, "_values", counted)
    for found, kind, options in (
        ("P", "GIF", {}),
        ("P", "PNG", {"mode": "P"}),
        ("RGBA", "PNG", {}),
        ("RGB", "TIFF", {}),
        ("RGB", "WEBP", {}),
        ("I;16", "PNG", {"mode": "I;16"}),
        ("RGB", "JPEG", {"mode": "RGBA", "interpolation": "nearest"}),  # else it is decoded at an eighth of its size
    ):
        made.clear()
        decoded(stored(some(found, (1100, 1000)), kind), ImageShape(32, **options))
        assert sum(made) >= 1_100_000
        assert max(made) <= strips._STRIP_BYTES


@pytest.mark.parametrize("interlaced", [False, True])
def test_rows_of_a_png_are_counted_a_few_at_a_time(interlaced, monkeypatch):
    from test_images import a_png, in_passes

    black = np.zeros((3000, 1000), "u1")
    rows = in_passes(black, 8) if interlaced else (b"\0" * 1001) * 3000
    monkeypatch.setattr(picture, "imagecodecs", lambda: None)
    monkeypatch.setattr(png, "_COUNT_STEP", 2**14)
    inflated, decompressobj = [], png.zlib.decompressobj

    class Counted:
        def __init__(self):
            self.inflate = decompressobj()

        def decompress(self, data, most):
            found = self.inflate.decompress(data, most)
            inflated.append(len(found))
            return found

        @property
        def unconsumed_tail(self):
            return self.inflate.unconsumed_tail

    monkeypatch.setattr(png.zlib, "decompressobj", Counted)
    shape = ImageShape(8, mode="L")
    assert not decoded(a_png(1000, 3000, 8, 0, rows, interlaced=interlaced), shape).any()
    assert sum(inflated) >= len(rows)
    assert max(inflated) <= 2**14
    for missing in (1, 1001, len(rows) // 2):
        with pytest.raises(CorruptError, match="the PNG cannot be decoded"):
            decoded(a_png(1000, 3000, 8, 0, rows[:-missing], interlaced=interlaced), shape)


def test_a_large_webp_that_is_cut_short_is_refused(monkeypatch, decoders):
    monkeypatch.setattr(pixels, "LARGE", 1)
    for options in ({"lossless": True}, {"quality": 50}):
        data = stored(some("RGB", (90, 61)), "WEBP", **options)
        for end in (len(data) // 3, len(data) // 2, len(data) - 3):
            with pytest.raises(CorruptError, match=r"^x\.png: the WebP cannot be decoded"):
                images.decode(data[:end], ImageShape(8), np.zeros((8, 8, 3), "u1"), None, "x.png")


# Decodes each image to 64×64 pixels, and writes down by how much the most memory exceeded what was held before, and by
# how much it was expected to.
MEASURE = """
import ctypes, sys
import numpy as np
from lit_async_data.sources.manifest.images import image as images, picture, pixels
from lit_async_data.sources.manifest.images.geometry.image_shape import ImageShape

def kept(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

shape, out = ImageShape(64), np.ones((64, 64, 3), "u1")
if sys.argv[1]:
    picture.imagecodecs = pixels.imagecodecs = lambda: None
expected, decode_bytes = [], images.decode_bytes
images.decode_bytes = lambda *given: expected.append(decode_bytes(*given)) or expected[-1]
paths = sys.argv[2:]
for path in [paths[0], *paths]:  # the first is decoded twice: what is imported for it does not count
    data = open(path, "rb").read()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not serve this image
    open("/proc/self/clear_refs", "w").write("5")  # the most so far is what is held now
    before = kept("VmRSS")
    images.decode(data, shape, out, None, path)
    print(kept("VmHWM") - before, expected[-1])
"""
SIDE = 4096
# Kind, mode, options of Pillow's writer, and bytes for each decoded pixel, of which Pillow keeps four for colours.
LARGE_FILES = {
    "p.gif": ("P", {}, 1),
    "p.png": ("P", {}, 1),
    "rgba.png": ("RGBA", {"compress_level": 1}, 4),
    "black.png": ("RGBA", {"compress_level": 1}, 4),
    "lzw.tiff": ("RGB", {"compression": "tiff_lzw"}, 4),
    "deflate.tiff": ("RGB", {"compression": "tiff_adobe_deflate"}, 4),
    "turned.tiff": ("RGB", {"compression": "tiff_lzw", "tiffinfo": {274: 6}}, 4),
    "turned raw.tiff": ("RGB", {"tiffinfo": {274: 3}}, 4),
    "colours.bmp": ("RGB", {}, 4),
}


def test_a_small_sample_of_a_large_image_takes_its_decoded_pixels_and_little_more(tmp_path):
    files, most = [], []
    rows = np.arange(SIDE, dtype="u1")[:, None] // 8 * np.ones((1, SIDE), "u1")
    for name, (mode, options, nbytes) in LARGE_FILES.items():
        image = Image.fromarray(rows if name != "black.png" else rows * 0)
        if mode == "P":
            image.putpalette(list(range(255, -1, -1)) * 3)
        else:
            image = image.convert(mode)
        if name == "black.png":
            image.putalpha(Image.fromarray(rows * 0))
        image.save(tmp_path / name, **options)
        files.append(str(tmp_path / name))
        most.append(nbytes)
    if picture.imagecodecs() is not None and picture.imagecodecs().WEBP.available:
        Image.fromarray(rows).convert("RGB").save(tmp_path / "x.webp", quality=50, method=0)
        Image.fromarray(rows).convert("RGB").save(tmp_path / "colours.png", compress_level=1)
        files += [str(tmp_path / "x.webp"), str(tmp_path / "colours.png")]
        most += [3, 3]
        if picture.imagecodecs().TIFF.available:
            one_strip = {"compression": "tiff_lzw", "tiffinfo": {278: SIDE}}
            Image.fromarray(rows).convert("RGB").save(tmp_path / "strip.tiff", **one_strip)
            files.append(str(tmp_path / "strip.tiff"))
            most.append(3)
    taken = [found for found, _ in measured("", files)]
    # Strips take 5 MiB or so, however large the image is.
    wanted = [1.2 * nbytes * SIDE**2 + 12 * 2**20 for nbytes in most]
    over = [line for line in zip(files, taken, wanted, strict=True) if line[1] > line[2]]
    assert not over, over


def measured(without, files):
    """Bytes that decoding each file took, and bytes that were expected."""
    command = [sys.executable, "-c", MEASURE, without, *files]
    # glibc would raise this threshold when a large block is freed, and keep later ones of that size.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()][1:]


# Kind, mode and options of Pillow's writer.
COSTLY_FILES = {
    "progressive.jpg": ("RGB", {"progressive": True, "subsampling": 0}),
    "grey.jpg": ("L", {"progressive": True}),
    "strip.tiff": ("RGB", {"compression": "tiff_lzw", "tiffinfo": {278: SIDE}}),
    "strip of inks.tiff": ("CMYK", {"compression": "tiff_lzw", "tiffinfo": {278: SIDE}}),
    "jpeg strip.tiff": ("RGB", {"compression": "jpeg", "tiffinfo": {278: SIDE}}),
    "fax.tiff": ("1", {"compression": "group4", "tiffinfo": {278: SIDE}}),
    "lossy.webp": ("RGB", {"quality": 50, "method": 0}),
    "lossless.webp": ("RGB", {"lossless": True, "quality": 0, "method": 0}),
    "text.png": ("RGB", {"compress_level": 0}),
}


def test_what_decoding_takes_is_known_before(tmp_path):
    rows = Image.fromarray(np.arange(SIDE, dtype="u1")[:, None] // 8 * np.ones((1, SIDE), "u1"))
    for name, (mode, options) in COSTLY_FILES.items():
        notes = PngImagePlugin.PngInfo()
        notes.add_text("Comment", "which libspng must not see")
        more = {"pnginfo": notes} if name == "text.png" else {}
        rows.convert(mode).save(tmp_path / name, **options, **more)
    files = [str(tmp_path / name) for name in COSTLY_FILES]
    for without in ("", "imagecodecs"):
        for name, (taken, expected) in zip(files, measured(without, files), strict=True):
            assert expected > 2**25, name
            # WebP has planes of no fixed size.
            assert abs(taken - expected) <= 12 * 2**20 + 0.15 * expected, (name, taken / SIDE**2, expected / SIDE**2)


def bmp_of_runs(side):
    """A BMP in which every row is one run."""
    assert side < 256
    rows = b"".join(bytes((side, row)) + b"\0\0" for row in range(side)) + b"\0\1"
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(rows), 0, 0, 256, 256)
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + head + bytes(1024) + rows


def costly():
    photo, one_strip = some("RGB", (200, 180)), {"compression": "tiff_lzw", "tiffinfo": {278: 180}}
    yield "JPEG", stored(photo, "JPEG", progressive=True, subsampling=0), {}
    yield "TIFF", stored(photo.convert("CMYK"), "TIFF", **one_strip), {}
    yield "TIFF", stored(photo.convert("P"), "TIFF", **one_strip), {}
    yield "WebP", stored(photo, "WEBP", lossless=True), {}
    yield "WebP", stored(some("RGBA", (200, 180)), "WEBP"), {}
    yield "BMP", bmp_of_runs(180), {}
    yield "PNG", stored(some("L", (20, 1000))), {"image_size": (8, 3000)}


@pytest.mark.parametrize("case", range(7))
def test_an_image_that_takes_much_more_than_its_pixels_is_refused_before_it_is_decoded(case, monkeypatch, decoders):
    monkeypatch.setattr(decode_memory, "LARGE", 0)
    monkeypatch.setattr(decode_memory, "_SMALL_PIXELS", 0)
    monkeypatch.setattr(pixels, "LARGE", 1)
    kind, data, more = list(costly())[case]
    height, width = images.size_of(data, ImageShape(), "x")
    options = {"image_size": 8, "interpolation": "nearest", **more}
    with pytest.raises(
        FormatError, match=rf"^x: decoding this {kind} of {height}×{width} pixels.* takes \d+ bytes"
    ) as e:
        decode_as(data, ImageShape(max_pixels=height * width, **options))
    wanted = int(re.search(r"raise max_pixels to (\d+)", str(e.value))[1])
    assert ("lit-async-data[codecs]" in str(e.value)) == (decoders == "Pillow" and kind == "WebP")
    with pytest.raises(FormatError):
        decode_as(data, ImageShape(max_pixels=wanted - 1, **options))
    decode_as(data, ImageShape(max_pixels=wanted, **options))
    monkeypatch.undo()
    decode_as(data, ImageShape(max_pixels=height * width, **options))  # so small an image is never refused


def decode_as(data, shape):
    out = np.zeros((*shape.image_size, shape.channels), shape.dtype)
    images.decode(data, shape, out, None, "x")


def test_an_ordinary_image_of_max_pixels_is_decoded(monkeypatch, decoders):
    monkeypatch.setattr(decode_memory, "LARGE", 0)
    monkeypatch.setattr(decode_memory, "_SMALL_PIXELS", 0)
    photo = some("RGB", (200, 180))
    for mode in ("RGB", "L", "P"):
        for kind in ("PNG", "TIFF", "BMP", "JPEG", "GIF"):
            if (mode, kind) != ("P", "JPEG"):
                few_rows = {"compression": "tiff_lzw", "tiffinfo": {278: 8}} if kind == "TIFF" else {}
                data = stored(photo.convert(mode), kind, **few_rows)
                decode_as(data, ImageShape(8, max_pixels=200 * 180, mode="P" if mode == "P" else "RGB"))


class Turnstile:
    """A lock that notes who is inside of it, and who has come to it."""

    def __init__(self):
        self.lock, self.inside, self.came = threading.Lock(), [], threading.Semaphore(0)

    def __enter__(self):
        self.came.release()
        self.lock.acquire()
        self.inside.append(threading.current_thread())

    def __exit__(self, *_):
        self.inside.pop()
        self.lock.release()


def test_large_images_are_decoded_one_at_a_time(monkeypatch):
    turn, entered, go_on, together = Turnstile(), threading.Semaphore(0), threading.Semaphore(0), []
    monkeypatch.setattr(decode_memory, "_turn", turn)
    monkeypatch.setattr(decode_memory, "_SMALL_PIXELS", 0)
    large, small = stored(some("RGB", (400, 300)), "BMP"), stored(some("RGB", (20, 20)), "BMP")
    monkeypatch.setattr(decode_memory, "LARGE", 20 * 20 * 4 + 400 * 8 * 3)
    load = pixels.pixels_of

    def held(picture, *further):
        entered.release()
        assert go_on.acquire(timeout=30)
        together.append(len(turn.inside))
        return load(picture, *further)

    monkeypatch.setattr(images, "pixels_of", held)
    threads = [threading.Thread(target=decode_as, args=(data, ImageShape(8))) for data in (large, large, small)]
    for thread in threads[:2]:
        thread.start()
        assert turn.came.acquire(timeout=30)
    assert entered.acquire(timeout=30)
    assert not entered.acquire(blocking=False)  # the other large one waits
    threads[2].start()
    assert entered.acquire(timeout=30)  # a small one does not
    for _ in threads:
        go_on.release()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert len(together) == 3
    assert max(together) == 1


def test_an_error_ends_the_turn(monkeypatch):
    monkeypatch.setattr(decode_memory, "LARGE", 0)
    monkeypatch.setattr(decode_memory, "_SMALL_PIXELS", 0)
    data = stored(some("RGB", (200, 180)))

    def fails(*given):
        raise FormatError("in its turn")

    with monkeypatch.context() as patch:
        patch.setattr(images, "pixels_of", fails)
        with pytest.raises(FormatError, match="in its turn"):
            decode_as(data, ImageShape(8))
    another = threading.Thread(target=decode_as, args=(data, ImageShape(8)), daemon=True)
    another.start()
    another.join(30)
    assert not another.is_alive()


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "CMYK", "1", "I;16", "I;16B"])
def test_a_large_tiff_of_one_strip_has_the_values_of_pillow(mode, monkeypatch, decoders):
    image = some("I;16" if mode == "I;16B" else mode, (90, 61))
    more = {"tiffinfo": {262: 0, 278: 61}} if mode == "L" else {"tiffinfo": {278: 61, 274: 6}}
    shape = ImageShape(mode="I;16" if mode.startswith("I") else "RGBA" if mode.endswith("A") else "RGB")
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        data = stored(image, "TIFF", compression=compression, **more)
        with monkeypatch.context() as context:
            context.setattr(pixels, "imagecodecs", lambda: None)
            wanted = decoded(data, shape)
            by_strips(context, 90)
            assert np.array_equal(decoded(data, shape), wanted)
        with monkeypatch.context() as context:
            by_strips(context, 90)
            assert np.array_equal(decoded(data, shape), wanted)


CHECKED = """
import sys
import pyarrow
from lit_async_data import ManifestSource

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def source(name):
    table = pyarrow.table({"path": [name], "y": [1]})
    return ManifestSource(table, {"x": "path", "y": "y"}, root=sys.argv[1], image_size=64)

source("small.gif")  # what is imported for it does not count
before = resident()
kept = source("large.gif")
print(resident() - before)
"""


def test_building_a_source_holds_no_memory_of_the_image_that_it_checks(tmp_path):
    Image.new("P", (8, 8)).save(tmp_path / "small.gif")
    Image.new("P", (SIDE, SIDE)).save(tmp_path / "large.gif")
    command = [sys.executable, "-c", CHECKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert int(done.stdout) < SIDE**2 / 4  # of 16 MiB that Pillow decodes
