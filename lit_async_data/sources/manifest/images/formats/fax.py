"""Checks fax data in TIFFs (Group 3, ITU-T T.4, and Group 4, T.6), because libtiff reports damage only to stderr.

Most encoders choose the same Group 4 codes for the same pixels. A strip is therefore intact if Pillow encodes its
pixels to the stored bytes. Otherwise, and for Group 3, Python checks the codes one by one, which takes several times as
long.
"""

from __future__ import annotations

import collections
import functools
import io
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lit_async_data.sources.manifest.images.formats.image_bytes import DamageError

# TIFF tags, and the compressions that are checked.
_COMPRESSION, _COLOURS, _ORDER, _ROWS, _TILE_WIDTH, _TILE_LENGTH = 259, 262, 266, 278, 322, 323
_OFFSETS, _COUNTS = (273, 324), (279, 325)  # of strips and of tiles
_GROUP_3_OPTIONS = 292
_GROUP_3, _GROUP_4 = 3, 4
# Compressions with rows of runs, and where rows begin: at multiples of this many bits; 0: after an end-of-line code.
_ROW_STARTS = {2: 8, _GROUP_3: 0, 32771: 16}
# Codes of runs: 0 to 63 pixels; multiples of 64 up to 1728; and multiples of 64 from 1792 to 2560 for both colours.
_WHITE = """
00110101 000111 0111 1000 1011 1100 1110 1111 10011 10100 00111 01000 001000 000011 110100 110101 101010 101011 0100111
0001100 0001000 0010111 0000011 0000100 0101000 0101011 0010011 0100100 0011000 00000010 00000011 00011010 00011011
00010010 00010011 00010100 00010101 00010110 00010111 00101000 00101001 00101010 00101011 00101100 00101101 00000100
00000101 00001010 00001011 01010010 01010011 01010100 01010101 00100100 00100101 01011000 01011001 01011010 01011011
01001010 01001011 00110010 00110011 00110100
11011 10010 010111 0110111 00110110 00110111 01100100 01100101 01101000 01100111 011001100 011001101 011010010 011010011
011010100 011010101 011010110 011010111 011011000 011011001 011011010 011011011 010011000 010011001 010011010 011000
010011011
"""
_BLACK = """
0000110111 010 11 10 011 0011 0010 00011 000101 000100 0000100 0000101 0000111 00000100 00000111 000011000 0000010111
0000011000 0000001000 00001100111 00001101000 00001101100 00000110111 00000101000 00000010111 00000011000 000011001010
000011001011 000011001100 000011001101 000001101000 000001101001 000001101010 000001101011 000011010010 000011010011
000011010100 000011010101 000011010110 000011010111 000001101100 000001101101 000011011010 000011011011 000001010100
000001010101 000001010110 000001010111 000001100100 000001100101 000001010010 000001010011 000000100100 000000110111
000000111000 000000100111 000000101000 000001011000 000001011001 000000101011 000000101100 000001011010 000001100110
000001100111
0000001111 000011001000 000011001001 000001011011 000000110011 000000110100 000000110101 0000001101100 0000001101101
0000001001010 0000001001011 0000001001100 0000001001101 0000001110010 0000001110011 0000001110100 0000001110101
0000001110110 0000001110111 0000001010010 0000001010011 0000001010100 0000001010101 0000001011010 0000001011011
0000001100100 0000001100101
"""
CODES_OF_BOTH_COLOURS = """
00000001000 00000001100 00000001101 000000010010 000000010011 000000010100 000000010101 000000010110 000000010111
000000011100 000000011101 000000011110 000000011111
"""
# Codes of modes: the offset of a change from the change above it, or another mode.
_PASS, _TWO_RUNS = 8, 9
_MODES = {"1": 0, "011": 1, "000011": 2, "0000011": 3, "010": -1, "000010": -2, "0000010": -3, "0001": _PASS}
# Bits of the longest code, and of the end of data: twice 000000000001.
_CODE_BITS, _END_BITS = 13, 24
_END_OF_LINE_ZEROS = 11
_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

_Codes = list[tuple[int, int]]  # length and meaning of the code that begins with these bits; (0, 0) if invalid


def check_fax(data: bytes, image: Any) -> None:
    """Raise DamageError if the fax data of a TIFF have an invalid code, too few rows, or rows that libtiff misread.

    Args:
        data: All bytes of the file.
        image: The Pillow image, decoded but not rotated.
    """
    tags = image.tag_v2
    compression = tags.get(_COMPRESSION)
    if compression not in (_GROUP_4, *_ROW_STARTS):
        return
    (width, height), tiled = image.size, _TILE_WIDTH in tags
    rows = min(tags.get(_ROWS, height), height)
    for number, strip in enumerate(strips_of_fax(data, tags)):
        first = number * rows
        if tiled:
            size, part = (tags[_TILE_WIDTH], tags[_TILE_LENGTH]), None
        elif first < height:
            size = (width, min(rows, height - first))
            part = image.crop((0, first, width, first + size[1])) if image.mode == "1" else None
        else:
            return
        if compression == _GROUP_4:
            if part is None or not pillow_encodes_same(strip, part, tags):
                collections.deque(rows_of_group_4(strip, *size), maxlen=0)
        else:
            two_dimensional = compression == _GROUP_3 and bool(tags.get(_GROUP_3_OPTIONS, 0) & 1)
            found = rows_of_group_3(strip, *size, start=_ROW_STARTS[compression], two_dimensional=two_dimensional)
            # libtiff looks for the next row if one is damaged, so its pixels are compared with all rows.
            _check_pixels(found, part, black_is_one=tags.get(_COLOURS, 0) != 0)


def rows_of_group_4(data: bytes, width: int, rows: int) -> Iterator[list[int]]:
    """The columns at which the colour changes, for each row; white comes first.

    Args:
        data: Bytes of the strip, highest bit first.
        width: Pixels per row.
        rows: Number of rows.

    Raises:
        DamageError: The strip has an invalid code or too few rows.
    """
    data += bytes(4)
    above: list[int] = []
    place = 0
    for row in range(rows):
        above, place = _two_dimensional_row(data, place, width, above, row)
        yield above


def rows_of_group_3(data: bytes, width: int, rows: int, *, start: int, two_dimensional: bool) -> Iterator[list[int]]:
    """The columns at which the colour changes, for each row; white comes first.

    Args:
        data: Bytes of the strip, highest bit first.
        width: Pixels per row.
        rows: Number of rows.
        start: Rows begin at multiples of this many bits; 0 if an end-of-line code, after any fill bits, begins a row.
        two_dimensional: Whether a bit after each end-of-line code says how the row is encoded.

    Raises:
        DamageError: The strip has an invalid code or too few rows.
    """
    data += bytes(4)
    above: list[int] = []
    place = 0
    for row in range(rows):
        if start:
            place += -place % start
        else:
            place = _after_end_of_line(data, place, row)
        if two_dimensional:
            one_dimensional = data[place >> 3] >> (7 - (place & 7)) & 1
            place += 1
            if not one_dimensional:
                above, place = _two_dimensional_row(data, place, width, above, row)
                yield above
                continue
        above = []
        at = 0
        while at < width:
            at, place = _run(data, place, at, len(above) % 2, row)
            above.append(at)
        if at > width:
            raise DamageError(f"row {row} of its fax data is too long")
        yield above


def _two_dimensional_row(data: bytes, place: int, width: int, above: list[int], row: int) -> tuple[list[int], int]:
    """The changes of a row that is encoded by those of the row above, and the place after it."""
    modes = _mode_codes()
    above = [*above, width, width, width]
    changes: list[int] = []
    at, known = 0, 0  # decoded pixels of the row; index of the next change in the row above
    while at < width:
        # The first change above to the same colour after the decoded pixels.
        while changes and above[known] <= at and above[known] < width:
            known += 2
        length, mode = modes[_next_bits(data, place)]
        place += length
        if not length:
            raise DamageError(f"row {row} of its fax data has an invalid code")
        if mode == _PASS:
            at = above[known + 1]
            known += 2
        elif mode == _TWO_RUNS:
            for colour in (len(changes) % 2, 1 - len(changes) % 2):
                at, place = _run(data, place, at, colour, row)
                changes.append(at)
        else:
            if above[known] + mode < at:
                raise DamageError(f"row {row} of its fax data goes backwards")
            at = above[known] + mode
            changes.append(at)
            known += -1 if known else 1
    if at > width:
        raise DamageError(f"row {row} of its fax data is too long")
    return changes, place


def _run(data: bytes, place: int, at: int, colour: int, row: int) -> tuple[int, int]:
    """The column after a run of one colour, and the place after its codes."""
    codes, run = _run_codes()[colour], 64
    while run >= 64:
        length, run = codes[_next_bits(data, place)]
        place += length
        if not length:
            raise DamageError(f"row {row} of its fax data has an invalid code")
        at += run
    return at, place


def _after_end_of_line(data: bytes, place: int, row: int) -> int:
    """The place after an end-of-line code: eleven zeros or more, and a one."""
    zeros = 0
    while not (bits := _next_bits(data, place + zeros)):
        zeros += _CODE_BITS
        if place + zeros > 8 * len(data):
            raise DamageError(f"its fax data end before row {row}")
    zeros += _CODE_BITS - bits.bit_length()
    if zeros < _END_OF_LINE_ZEROS:
        raise DamageError(f"row {row} of its fax data does not begin with an end-of-line code")
    return place + zeros + 1


def _check_pixels(rows: Iterable[list[int]], part: Any, *, black_is_one: bool) -> None:
    """Compare rows with the pixels that libtiff decoded; ``part`` is None if they are not known."""
    pixels = None if part is None else np.asarray(part)
    for number, changes in enumerate(rows):
        if pixels is not None:
            ends = np.zeros(pixels.shape[1] + 1, np.int64)
            np.add.at(ends, changes, 1)
            if not np.array_equal(np.cumsum(ends[:-1]) % 2 == black_is_one, pixels[number]):
                raise DamageError(f"libtiff decodes row {number} of its fax data to other pixels")


def strips_of_fax(data: bytes, tags: Any) -> Iterator[bytes]:
    offsets, counts = (tags.get(both[0], tags.get(both[1], ())) for both in (_OFFSETS, _COUNTS))
    for number, offset in enumerate(offsets):
        count = counts[number] if number < len(counts) else 0
        strip = data[offset : offset + count] if count else data[offset:]
        yield strip.translate(_REVERSED_BITS) if tags.get(_ORDER) == 2 else strip


def pillow_encodes_same(strip: bytes, part: Any, tags: Any) -> bool:
    """Whether Pillow encodes the pixels to the stored bytes."""
    from PIL import ImageChops, TiffImagePlugin

    part.info = {}
    if tags.get(_COLOURS, 0) == 0:
        part = ImageChops.invert(part)
    stream = io.BytesIO()
    part.save(stream, "TIFF", compression="group4", tiffinfo={_ROWS: part.height})
    stream.seek(0)
    (encoded,) = strips_of_fax(stream.getvalue(), TiffImagePlugin.TiffImageFile(stream).tag_v2)
    # The end of data may be missing, so only the codes before it are compared.
    number = int.from_bytes(encoded[-4:], "big")
    unused = (number & -number).bit_length() - 1 + _END_BITS
    whole, last = len(encoded) - 4, int.from_bytes(strip[len(encoded) - 4 : len(encoded)].ljust(4, b"\0"), "big")
    return (
        8 * len(strip) >= 8 * len(encoded) - unused
        and strip[:whole] == encoded[:whole]
        and last >> unused == number >> unused
    )


def _next_bits(data: bytes, place: int) -> int:
    """The next bits, as many as in the longest code."""
    begin = place >> 3
    return int.from_bytes(data[begin : begin + 3].ljust(3, b"\0"), "big") >> 24 - _CODE_BITS - (place & 7) & 0x1FFF


@functools.cache
def _mode_codes() -> _Codes:
    return _code_table({**_MODES, "001": _TWO_RUNS})


@functools.cache
def _run_codes() -> tuple[_Codes, _Codes]:
    """Codes for white and for black."""
    pixels = (*range(64), *range(64, 2561, 64))
    return tuple(
        _code_table(dict(zip((of + CODES_OF_BOTH_COLOURS).split(), pixels, strict=True))) for of in (_WHITE, _BLACK)
    )  # type: ignore[return-value]


def _code_table(meanings: dict[str, int]) -> _Codes:
    codes = [(0, 0)] * 2**_CODE_BITS
    for code, meaning in meanings.items():
        free = _CODE_BITS - len(code)
        begin = int(code, 2) << free
        codes[begin : begin + 2**free] = [(len(code), meaning)] * 2**free
    return codes
