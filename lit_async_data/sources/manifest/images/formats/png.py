"""The parts of a PNG, their checksums, and pixels decoded by libdeflate and libspng.

libspng inflates with zlib, which takes most of its time: 57 of 93 µs for 64×64 pixels. libdeflate takes 26 µs, but does
not undo row filters. So libdeflate inflates the rows, libspng gets them as uncompressed data and undoes the filters: 57
µs.

Small images are decoded by libspng alone. Each call releases the GIL, and if a thread takes longer to wake up than the
call takes, threads delay each other: at 64×64 pixels, two threads with one call decoded 1.5 times as many images as one
thread, and with two calls 0.6 times as many.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.sources.manifest.images.formats.image_bytes import PNG, DamageError, cut_short

# Positions of the parts of a file, by name.
Parts = dict[bytes, list[slice]]

_END, _PIXELS, _EXIF = b"IEND", b"IDAT", b"eXIf"
_REQUIRED = {b"IHDR", _PIXELS, _END}
# Parts that Pillow reads the image from: those, palette, transparency, and frames of an animation.
_READ_BY_PILLOW = _REQUIRED | {b"PLTE", b"tRNS", b"acTL", b"fcTL", b"fdAT"}
# Text parts, and the prefixes of texts with an orientation: of ImageMagick, and XMP.
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_RAW_EXIF, _XMP = b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"
_MAX_TEXT = 2**20  # bytes when inflated; Pillow refuses more
# The beginning of a file: a signature of 8 bytes, and a part with width, height, depth, colour type, two zero bytes,
# and whether it is interlaced.
_BEGIN = 8 + 12 + 13
INTERLACED = 28
HEAD = struct.Struct(">II5B")
# An uncompressed zlib stream (RFC 1950 and 1951): its header, and a header for each block.
_STREAM, _BLOCK, _MOST_IN_BLOCK = b"\x78\x01", struct.Struct("<?HH"), 0xFFFF
# Values per pixel by colour type; and first column, first row and steps of each pass of an interlaced image.
_VALUES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
# Bytes of pixels from which a call takes longer than a thread needs to wake up; and up to which a copy is acceptable.
_LEAST_BYTES, _MOST_BYTES = 24 * 2**10, 2**24
# Bytes per step when rows are only counted.
_COUNT_STEP = 2**18
# zlib keeps the GIL for checksums up to _GIL_BYTES. Up to _SHORT bytes, releasing it costs more than it gains.
_GIL_BYTES, _SHORT = 5 * 2**10, 64 * 2**10


def whole_png(data: bytes, where: str) -> Parts:
    """Positions of the parts of a PNG, after checking its end and the checksums that matter.

    A part that changes no pixel, such as a comment, is left out if its checksum is wrong.

    Args:
        data: All bytes of the file.
        where: The file in messages.

    Raises:
        CorruptError: The file ends too soon, or a checksum is wrong.
    """
    parts: Parts = {}
    name, view = b"", memoryview(data)
    for name, start, end in _parts(data):
        if _checksum(view[start:end]) != int.from_bytes(data[end : end + 4], "big"):
            if _harmless(name, data[start + 4 : end]):
                continue
            part = name.decode("latin-1")
            raise CorruptError(f"{where}: the checksum of its part {part} is wrong; fetch the file again")
        parts.setdefault(name, []).append(slice(start + 4, end))
    if name != _END:
        raise cut_short(PNG, where)
    return parts


def exif_of_png(data: bytes, parts: Parts) -> bytes:
    """The EXIF block of a PNG, which may follow the pixels or be a text of ImageMagick; empty if there is none."""
    if _EXIF in parts:
        return data[parts[_EXIF][0]]
    try:
        # The first three lines are name and length.
        return bytes.fromhex("".join(_text(data, parts, _RAW_EXIF).decode("latin-1").split("\n")[3:]))
    except ValueError:
        return b""


def xmp_of_png(data: bytes, parts: Parts) -> bytes:
    """The XMP block of a PNG; empty if there is none."""
    return _text(data, parts, _XMP)


def file_of_pixels(data: bytes, parts: Parts) -> bytes:
    """The image without parts that do not affect its pixels, since Pillow refuses a PNG if one of them is damaged."""
    if _has_only(_READ_BY_PILLOW, data, parts):
        return data
    kept = sorted(
        (part for name in _READ_BY_PILLOW & parts.keys() for part in parts[name]), key=lambda part: part.start
    )
    view = memoryview(data)
    return b"".join((view[:8], *(view[part.start - 8 : part.stop + 4] for part in kept)))


def copied_bytes(data: bytes, parts: Parts, *, by_pillow: bool) -> int:
    """Bytes of the copy that is made of a PNG if its decoder must not see all parts."""
    return (
        0
        if _has_only(_READ_BY_PILLOW if by_pillow else _REQUIRED, data, parts)
        else sum(part.stop - part.start for part in parts.get(_PIXELS, ()))
    )


def check_rows(data: bytes, parts: Parts) -> None:
    """Refuse a PNG with fewer rows than its header says; Pillow leaves such rows black.

    Args:
        data: All bytes of the file.
        parts: From `whole_png`.

    Raises:
        DamageError: Rows are missing.
    """
    width, height, depth, colours, _, _, interlaced = HEAD.unpack_from(data, 16)
    bits = depth * _VALUES[colours]
    expected = 0
    for left, upper, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - upper) // down)
        expected += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    if _has_fewer_bytes(data, parts, expected):
        raise DamageError("it has fewer rows than its header says")


def _has_fewer_bytes(data: bytes, parts: Parts, expected: int) -> bool:
    """Whether the rows have fewer bytes; they are counted in steps and never held together."""
    inflate, view = zlib.decompressobj(), memoryview(data)
    for part in parts.get(_PIXELS, ()):
        for begin in range(part.start, part.stop, _COUNT_STEP):
            piece: Any = view[begin : min(begin + _COUNT_STEP, part.stop)]
            while piece and expected > 0:
                expected -= len(inflate.decompress(piece, _COUNT_STEP))
                piece = inflate.unconsumed_tail
    # The rest inside zlib after all input.
    while expected > 0 and (more := inflate.decompress(b"", _COUNT_STEP)):
        expected -= len(more)
    return expected > 0


def png_pixels(data: bytes, parts: Parts, shape: tuple[int, int, int], out: Bytes | None, codecs: Any) -> Bytes:
    """Decode a PNG of 8 bits that is not interlaced and has no palette.

    Args:
        data: All bytes of the file.
        parts: From `whole_png`.
        shape: (height, width, channels).
        out: uint8, C-contiguous, of that shape: receives the pixels. None: a new array.
        codecs: The library imagecodecs.

    Returns:
        uint8, of that shape.

    Raises:
        RuntimeError: The data cannot be decoded, or there are more or fewer rows.
    """
    height, width, channels = shape
    nbytes = height * (1 + width * channels)  # each row begins with the number of its filter
    if _LEAST_BYTES <= nbytes <= _MOST_BYTES:
        data = _inflated(data, parts, nbytes, codecs)
    elif not _has_only(_REQUIRED, data, parts):  # libspng would inflate texts to any size
        streams = _streams(data, parts)
        data = _file(data[:_BEGIN], sum(map(len, streams)), *streams)
    pixels: Bytes = codecs.spng_decode(data, out=out)
    return pixels.reshape(shape)  # a grey image has no channel axis


def _inflated(data: bytes, parts: Parts, nbytes: int, codecs: Any) -> bytes:
    """The image as an uncompressed PNG."""
    stream = b"".join(_streams(data, parts))
    rows = codecs.deflate_decode(stream, out=nbytes)
    # The checksum of the rows is that of the stream.
    length = len(_STREAM) + -(-len(rows) // _MOST_IN_BLOCK) * _BLOCK.size + len(rows) + 4
    return _file(data[:_BEGIN], length, _STREAM, *_blocks(memoryview(rows)), stream[-4:])


def _streams(data: bytes, parts: Parts) -> list[memoryview]:
    """The deflated rows, which may be in several parts."""
    view = memoryview(data)
    return [view[part] for part in parts.get(_PIXELS, ())]


def _file(begin: bytes, length: int, *stream: bytes | memoryview) -> bytes:
    """A PNG with one part of pixels, without its checksum, which libspng does not check here."""
    end = (bytes(4), bytes(4), _END, zlib.crc32(_END).to_bytes(4, "big"))
    return b"".join((begin, length.to_bytes(4, "big"), _PIXELS, *stream, *end))


def _blocks(rows: memoryview) -> Iterator[bytes | memoryview]:
    for begin in range(0, len(rows), _MOST_IN_BLOCK):
        block = rows[begin : begin + _MOST_IN_BLOCK]
        yield _BLOCK.pack(begin + len(block) == len(rows), len(block), _MOST_IN_BLOCK - len(block))
        yield block


def _has_only(names: set[bytes], data: bytes, parts: Parts) -> bool:
    """Whether a file has no other parts, not even damaged ones that ``parts`` lacks."""
    known: int = sum(part.stop - part.start + 12 for name in names & parts.keys() for part in parts[name])
    return len(data) == 8 + known


def _harmless(name: bytes, content: bytes) -> bool:
    """Whether a part with damage changes no pixel."""
    optional = bool(name[0] & 0x20)
    # The name itself may be damaged; it must differ enough from names that matter.
    other = all(sum(map(int.__ne__, name, known)) > 1 for known in _READ_BY_PILLOW | {_EXIF})
    turning = name in _TEXTS and content.startswith((_RAW_EXIF, _XMP))
    return optional and other and not turning


def _text(data: bytes, parts: Parts, keyword: bytes) -> bytes:
    """The last text with a keyword that ends in a zero byte; empty if there is none that can be read."""
    text = b""
    for name in _TEXTS:
        for part in parts.get(name, ()):
            if data.startswith(keyword, part.start):
                text = _read_text(name, data[part.start + len(keyword) : part.stop]) or text
    return text


def _read_text(name: bytes, content: bytes) -> bytes:
    deflated = name == b"zTXt"
    if name == b"zTXt":
        content = content[1:]  # the number of the only compression method
    elif name == b"iTXt":
        deflated = content[:1] == b"\1"
        content = content[2:].split(b"\0", 2)[-1]  # language and translated keyword
    if not deflated:
        return content
    try:
        return zlib.decompressobj().decompress(content, _MAX_TEXT)
    except zlib.error:
        return b""


def _checksum(part: memoryview) -> int:
    if len(part) > _SHORT:
        return zlib.crc32(part)
    checksum = 0
    for begin in range(0, len(part), _GIL_BYTES):
        checksum = zlib.crc32(part[begin : begin + _GIL_BYTES], checksum)
    return checksum


def _parts(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of each complete part; its checksum covers data[start:end] and follows it."""
    place = 8
    while place + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, place)
        end = place + 8 + length
        if end + 4 > len(data):
            return
        yield name, place + 4, end
        if name == _END:
            return
        place = end + 4
