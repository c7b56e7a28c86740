"""Fax data: whatever libtiff complains of is refused, and nothing that any encoder may write."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest

from lit_async_data.errors import CorruptError
from lit_async_data.sources.manifest.images import image as images
from lit_async_data.sources.manifest.images.formats import fax
from lit_async_data.sources.manifest.images.formats.image_bytes import DamageError
from lit_async_data.sources.manifest.images.geometry.image_shape import ImageShape

Image = pytest.importorskip("PIL.Image", reason="pip install 'lit-async-data[manifest]'")
TiffImagePlugin = pytest.importorskip("PIL.TiffImagePlugin")
HEIGHT = 13


def noise(width, share, seed=0):
    return Image.fromarray(np.random.default_rng(seed).random((HEIGHT, width)) < share)


def page(width=600, seed=0):
    """Something like text: runs of all lengths, and rows that are like those above them."""
    shades = np.random.default_rng(seed).normal(size=(150, width))
    for axis in (0, 1):
        for step in (1, 2, 4):
            shades += np.roll(shades, step, axis)
    return Image.fromarray(shades > 0.8 * shades.std())


def stored(image, rows=1000, tags=None, compression="group4"):
    stream = io.BytesIO()
    image.save(stream, "TIFF", compression=compression, tiffinfo={278: min(rows, image.height), **(tags or {})})
    return stream.getvalue()


def strips(data):
    tags = TiffImagePlugin.TiffImageFile(io.BytesIO(data)).tag_v2
    return [data[start : start + count] for start, count in zip(tags[273], tags[279], strict=True)]


def tiff_of(image, strip):
    """A TIFF of one strip."""
    tags = {256: image.width, 257: image.height, 258: 1, 259: 4, 262: 1, 273: 8, 277: 1, 278: image.height}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in {**tags, 279: len(strip)}.items())
    directory = struct.pack("<H", len(tags) + 1) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + directory


def decoded(data, mode="L", size=None):
    shape = ImageShape(size, mode)
    height, width = size or images.size_of(data, shape, "x")
    out = np.zeros((height, width, shape.channels), "u1")
    images.decode(data, shape, out, None, "x")
    return out[..., 0]


def damaged(strip, random, number):
    """A strip with one bit changed, or four bytes that are zero or random."""
    at, changed = int(random.integers(len(strip) - 8)), bytearray(strip)
    changed[at : at + 4] = (
        bytes((changed[at] ^ 1 << int(random.integers(8)), *changed[at + 1 : at + 4])),
        bytes(4),
        random.integers(0, 256, 4, np.uint8).tobytes(),
    )[number % 3]
    return bytes(changed)


def outcome(data):
    try:
        decoded(data)
    except CorruptError as error:
        return str(error)
    return "served"


@pytest.fixture
def codes_alone(monkeypatch):
    """Nothing is encoded again: the codes are read."""
    monkeypatch.setattr(fax, "pillow_encodes_same", lambda *_: False)


@pytest.mark.parametrize("width", [1, 5, 31, 64, 65, 1000, 1728, 2561, 6000])
def test_no_code_of_pillows_encoder_is_damage(width, codes_alone):
    for share in (0, 0.001, 0.02, 0.3, 0.5, 0.9, 1):
        image = noise(width, share)
        for rows in (HEIGHT, 5):
            found = decoded(stored(image, rows=rows))
            assert np.array_equal(found == 255, np.asarray(image))


@pytest.mark.parametrize("tags", [{}, {266: 2}, {274: 6}, {262: 0}])
def test_what_pillow_encodes_alike_needs_no_reading(tags, monkeypatch):
    def unwanted(*_):
        raise AssertionError

    monkeypatch.setattr(fax, "rows_of_group_4", unwanted)
    for rows in (1000, 40):
        data = stored(page(), rows=rows, tags=tags)
        for mode, size in (("L", None), ("L", (8, 8)), ("RGB", None)):
            decoded(data, mode, size)


def other_codes(pixels):
    """The codes of an encoder that knows no rows but the one that it writes."""
    bits = ""
    for row in pixels:
        runs, colour = [0], False
        for pixel in row:
            if pixel != colour:
                runs.append(0)
                colour = pixel
            runs[-1] += 1
        runs += [0] * (len(runs) % 2)
        for at in range(0, len(runs), 2):
            bits += "001" + code(0, runs[at]) + code(1, runs[at + 1])
    bits += "000000000001" * 2
    return int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")


def code(colour, run):
    codes = ((fax._WHITE, fax._BLACK)[colour] + fax.CODES_OF_BOTH_COLOURS).split()
    return (codes[63 + run // 64] if run >= 64 else "") + codes[run % 64]


def test_an_encoder_may_choose_other_codes():
    image = page()
    other = other_codes(np.asarray(image))
    assert [other] != strips(stored(image))
    assert np.array_equal(decoded(tiff_of(image, other)) == 255, np.asarray(image))


def test_the_end_of_the_data_may_be_missing_or_something_may_follow(monkeypatch):
    data = stored(page())
    (strip,) = strips(data)
    for each in (strip[:-3], strip + b"more"):
        for usual in (fax.pillow_encodes_same, lambda *_: False):
            monkeypatch.setattr(fax, "pillow_encodes_same", usual)
            assert np.array_equal(decoded(tiff_of(page(), each)), decoded(data))


def test_a_strip_without_a_length_goes_on_to_the_end():
    data = stored(page())
    (strip,) = strips(data)
    assert strip in data
    (whole,) = fax.strips_of_fax(data, {273: (data.index(strip),), 279: (0,)})
    assert whole.startswith(strip)


def test_whatever_libtiff_complains_of_is_refused(capfd):
    random = np.random.default_rng(0)
    data = stored(page())
    (strip,) = strips(data)
    complaints = refused = 0
    for number in range(90):
        mutant = data.replace(strip, damaged(strip, random, number))
        capfd.readouterr()
        with Image.open(io.BytesIO(mutant)) as image:
            image.load()
        said = "Fax4Decode" in capfd.readouterr().err
        verdict = outcome(mutant)
        assert verdict.startswith("x: the TIFF cannot be decoded (row ") or (verdict == "served" and not said)
        complaints += said
        refused += verdict != "served"
    assert complaints > 40
    assert refused > 80


def test_rows_that_are_missing_are_damage():
    (strip,) = strips(stored(page().crop((0, 0, 600, 149))))
    fewer = tiff_of(page(), strip)
    for mode, size in (("L", None), ("P", None), ("RGB", (8, 8))):
        with pytest.raises(CorruptError, match=r"^x: the TIFF cannot be decoded \(row 149 of its fax data"):
            decoded(fewer, mode, size)


def test_no_data_make_anything_else_of_it_than_damage():
    random = np.random.default_rng(0)
    for _ in range(2000):
        data = random.integers(0, 256, 30, np.uint8) | random.integers(0, 256, 30, np.uint8)
        with contextlib.suppress(DamageError):
            list(fax.rows_of_group_4(data.tobytes(), int(random.integers(1, 70)), 9))


# -- Group 3, and rows of runs -----------------------------------------------------------------------------------------

# Group 3 with one and two dimensions and with fill bits, and rows that begin at a byte.
OLDER = {
    "one-dimensional": {"compression": "group3"},
    "two-dimensional": {"compression": "group3", "tags": {292: 1}},
    "filled": {"compression": "group3", "tags": {292: 4}},
    "filled, two-dimensional": {"compression": "group3", "tags": {292: 5}},
    "low bits first": {"compression": "group3", "tags": {266: 2}},
    "black is one": {"compression": "group3", "tags": {262: 0}},
    "rows at bytes": {"compression": "tiff_ccitt"},
}


@pytest.mark.parametrize("how", OLDER.values(), ids=OLDER)
@pytest.mark.parametrize("width", [1, 5, 64, 65, 1000, 2561])
def test_no_code_of_older_encoders_is_damage(width, how):
    for share in (0, 0.02, 0.5, 0.9, 1):
        image = noise(width, share)
        for rows in (HEIGHT, 5):
            found = decoded(stored(image, rows, **how))
            assert np.array_equal(found == 255, np.asarray(image))


@pytest.mark.parametrize("how", OLDER.values(), ids=OLDER)
def test_damaged_older_data_are_refused_or_served_unchanged(how, capfd):
    """A damaged row is refused even where libtiff finds the next row and goes on."""
    random = np.random.default_rng(0)
    image = page()
    data = stored(image, **how)
    (strip,) = strips(data)
    refused = 0
    for number in range(60):
        mutant = data.replace(strip, damaged(strip, random, number))
        capfd.readouterr()
        with Image.open(io.BytesIO(mutant)) as opened:
            opened.load()
        complained = "Fax3Decode" in capfd.readouterr().err
        verdict = outcome(mutant)
        assert verdict.startswith("x: the TIFF cannot be decoded (") or (verdict == "served" and not complained)
        refused += verdict != "served"
    assert refused > 50


def test_older_data_that_end_too_soon_are_damage():
    for how in OLDER.values():
        data = stored(page(), **how)
        (strip,) = strips(data)
        for kept in (len(strip) // 2, 0):
            assert outcome(data.replace(strip, strip[:kept] + bytes(len(strip) - kept))) != "served"


def test_random_older_data_raise_nothing_but_damage():
    random = np.random.default_rng(0)
    for number in range(2000):
        data = random.integers(0, 256, 30, np.uint8) & random.integers(0, 256, 30, np.uint8)
        width, start = int(random.integers(1, 70)), (0, 8, 16)[number % 3]
        with contextlib.suppress(DamageError):
            list(fax.rows_of_group_3(data.tobytes(), width, 9, start=start, two_dimensional=number % 2 == 0))
