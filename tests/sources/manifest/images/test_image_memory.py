"""A small sample of a large image takes the memory of its decoded pixels, and not several copies of them."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys

import numpy as np
import pytest

from lit_async_data.errors import CorruptError
from lit_async_data.sources.manifest.images import image as images
from lit_async_data.sources.manifest.images import picture, pixels, png, resizing, strips
from lit_async_data.sources.manifest.images.image_shape import INTERPOLATIONS, ImageShape
from lit_async_data.sources.manifest.images.orientation import stored_part, upright, upright_size

Image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")


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
    monkeypatch.setattr(png, "_INFLATED", 2**14)
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


# Decodes each image to 64×64 pixels, and writes down by how much the most memory exceeded what was held before.
MEASURE = """
import sys
import numpy as np
from lit_async_data.sources.manifest.images import image as images
from lit_async_data.sources.manifest.images.image_shape import ImageShape

def kept(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

shape, out = ImageShape(64), np.ones((64, 64, 3), "u1")
for path in [sys.argv[1], *sys.argv[1:]]:  # the first is decoded twice: what is imported for it does not count
    data = open(path, "rb").read()
    open("/proc/self/clear_refs", "w").write("5")  # the most so far is what is held now
    before = kept("VmRSS")
    images.decode(data, shape, out, None, path)
    print(kept("VmHWM") - before)
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
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *files], capture_output=True, text=True, check=True, timeout=300
    )
    taken = [int(line) / SIDE**2 for line in done.stdout.split()][1:]
    # Strips take 12 MiB or so, however large the image is.
    wanted = [1.2 * nbytes + 24 * 2**20 / SIDE**2 for nbytes in most]
    over = [line for line in zip(files, taken, wanted, strict=True) if line[1] > line[2]]
    assert not over, over


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
