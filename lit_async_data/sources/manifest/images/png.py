"""The parts of a PNG file, whether they are whole, and its pixels by libdeflate and libspng.

libspng inflates by zlib, which is most of its time: 57 of 93 µs for 64×64 pixels. libdeflate takes 26, but knows no
rows. So it inflates them, and libspng gets them as if they had never been deflated, and undoes their filters: 57 µs.

Small images are left to libspng alone. Each call lets go of Python's lock, and where a thread that waits for the lock
takes longer to wake up than the call takes, threads stand in each other's way: two that decode 64×64 pixels in one call
made 1.5 times as many images as one, and in two calls 0.6 times as many.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

from lit_async_data.batch.spec import Bytes
from lit_async_data.errors import CorruptError
from lit_async_data.sources.manifest.images.image_bytes import PNG, DamageError, cut_short

# Where the parts of a file lie in it, by name.
Parts = dict[bytes, list[slice]]

_END, _PIXELS, _EXIF = b"IEND", b"IDAT", b"eXIf"
_NEEDED = {b"IHDR", _PIXELS, _END}
# Parts that Pillow makes the image of: those, palette, transparency, and frames of an animation.
_SEEN = _NEEDED | {b"PLTE", b"tRNS", b"acTL", b"fcTL", b"fdAT"}
# Parts with texts, and what texts begin with that say how the image must be turned: of ImageMagick, and XMP.
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_RAW_EXIF, _XMP = b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"
_MOST_TEXT = 2**20  # inflated; Pillow refuses more
# What a file begins with: eight bytes for all files, and a part with width, height, depth, type of colour, two that are
# always 0, and whether it is interlaced.
_BEGIN = 8 + 12 + 13
INTERLACED = 28
HEAD = struct.Struct(">II5B")
# A stream of zlib that is not compressed (RFC 1950 and 1951): its own head, and a head for each block.
_STREAM, _BLOCK, _MOST_IN_BLOCK = b"\x78\x01", struct.Struct("<?HH"), 0xFFFF
# Values per pixel by the type of colour; and of the passes of an interlaced image, first column and row, and the steps.
_VALUES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
# Bytes of pixels that take a call longer than a thread takes to wake up; and of which one more copy is no matter.
_LEAST_BYTES, _MOST_BYTES = 24 * 2**10, 2**24
# Bytes that are inflated at a time only to be counted.
_INFLATED = 2**18
# Bytes that zlib sums up without letting go of Python's lock; and those for which it is not worth while.
_KEPT, _SHORT = 5 * 2**10, 64 * 2**10


def whole_png(data: bytes, where: str) -> Parts:
    """Where the parts of a PNG lie, once it ends as it should and every check sum that matters is right.

    A part with a wrong check sum that changes no pixel, such as a comment, is left out.

    Args:
        data: All of the file.
        where: Its name, for messages.

    Raises:
        CorruptError: It is not what was written once.
    """
    parts: Parts = {}
    name, view = b"", memoryview(data)
    for name, start, end in _parts(data):
        if _check_sum(view[start:end]) != int.from_bytes(data[end : end + 4], "big"):
            if _harmless(name, data[start + 4 : end]):
                continue
            raise CorruptError(f"{where}: the check sum of a part of the PNG ({name!r}) is wrong; fetch the file again")
        parts.setdefault(name, []).append(slice(start + 4, end))
    if name != _END:
        raise cut_short(PNG, where)
    return parts


def exif_of_png(data: bytes, parts: Parts) -> bytes:
    """The EXIF block of a PNG, which may follow the pixels or be a text of ImageMagick; empty where there is none."""
    if _EXIF in parts:
        return data[parts[_EXIF][0]]
    try:
        # Three lines with the name and the length come first.
        return bytes.fromhex("".join(_text(data, parts, _RAW_EXIF).decode("latin-1").split("\n")[3:]))
    except ValueError:
        return b""


def xmp_of_png(data: bytes, parts: Parts) -> bytes:
    """The XMP block of a PNG; empty where there is none."""
    return _text(data, parts, _XMP)


def file_of_pixels(data: bytes, parts: Parts) -> bytes:
    """The same image without parts that say nothing of its pixels: Pillow refuses a PNG if one of those is damaged."""
    if _nothing_but(_SEEN, data, parts):
        return data
    kept = sorted((part for name in _SEEN & parts.keys() for part in parts[name]), key=lambda part: part.start)
    view = memoryview(data)
    return b"".join((view[:8], *(view[part.start - 8 : part.stop + 4] for part in kept)))


def copied_bytes(data: bytes, parts: Parts, *, by_pillow: bool) -> int:
    """Bytes of the copy that is made of a PNG for its decoder, which must not see all of its parts."""
    return (
        0
        if _nothing_but(_SEEN if by_pillow else _NEEDED, data, parts)
        else sum(part.stop - part.start for part in parts.get(_PIXELS, ()))
    )


def check_rows(data: bytes, parts: Parts) -> None:
    """Refuse a PNG, of any kind, that has fewer rows than it says: Pillow leaves them black.

    Args:
        data: All of the file.
        parts: From `whole_png`.

    Raises:
        DamageError: It has.
    """
    width, height, depth, colours, _, _, interlaced = HEAD.unpack_from(data, 16)
    bits = depth * _VALUES[colours]
    wanted = 0
    for left, upper, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - upper) // down)
        wanted += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    if _fewer(data, parts, wanted):
        raise DamageError("it has fewer rows than it says")


def _fewer(data: bytes, parts: Parts, wanted: int) -> bool:
    """Whether the rows have fewer bytes; they are counted a few at a time, and never held together."""
    inflate, view = zlib.decompressobj(), memoryview(data)
    for part in parts.get(_PIXELS, ()):
        for begin in range(part.start, part.stop, _INFLATED):
            piece: Any = view[begin : min(begin + _INFLATED, part.stop)]
            while piece and wanted > 0:
                wanted -= len(inflate.decompress(piece, _INFLATED))
                piece = inflate.unconsumed_tail
    # What is left inside of zlib, once all has gone in.
    while wanted > 0 and (more := inflate.decompress(b"", _INFLATED)):
        wanted -= len(more)
    return wanted > 0


def png_pixels(data: bytes, parts: Parts, shape: tuple[int, int, int], out: Bytes | None, codecs: Any) -> Bytes:
    """The pixels of a PNG of 8 bits that is not interlaced and has no palette.

    Args:
        data: All of the file.
        parts: From `whole_png`.
        shape: (height, width, channels).
        out: uint8, C-contiguous, of that shape: gets the pixels. None: an array of its own does.
        codecs: The library imagecodecs.

    Returns:
        uint8, of that shape.

    Raises:
        RuntimeError: The data cannot be decoded, or there are more or fewer rows.
    """
    height, width, channels = shape
    nbytes = height * (1 + width * channels)  # a byte before each row says how it is filtered
    if _LEAST_BYTES <= nbytes <= _MOST_BYTES:
        data = _inflated(data, parts, nbytes, codecs)
    elif not _nothing_but(_NEEDED, data, parts):  # texts may be deflated, and libspng inflates them to any size
        streams = _streams(data, parts)
        data = _file(data[:_BEGIN], sum(map(len, streams)), *streams)
    pixels: Bytes = codecs.spng_decode(data, out=out)
    return pixels.reshape(shape)  # of one channel it has none


def _inflated(data: bytes, parts: Parts, nbytes: int, codecs: Any) -> bytes:
    """The same image in a file that is not compressed."""
    stream = b"".join(_streams(data, parts))
    rows = codecs.deflate_decode(stream, out=nbytes)
    # The check sum of the rows is the stream's own.
    length = len(_STREAM) + -(-len(rows) // _MOST_IN_BLOCK) * _BLOCK.size + len(rows) + 4
    return _file(data[:_BEGIN], length, _STREAM, *_blocks(memoryview(rows)), stream[-4:])


def _streams(data: bytes, parts: Parts) -> list[memoryview]:
    """The deflated rows, which may be spread over several parts."""
    view = memoryview(data)
    return [view[part] for part in parts.get(_PIXELS, ())]


def _file(begin: bytes, length: int, *stream: bytes | memoryview) -> bytes:
    """A PNG of one part with pixels, whose check sum libspng, as it is called here, does not look at."""
    end = (bytes(4), bytes(4), _END, zlib.crc32(_END).to_bytes(4, "big"))
    return b"".join((begin, length.to_bytes(4, "big"), _PIXELS, *stream, *end))


def _blocks(rows: memoryview) -> Iterator[bytes | memoryview]:
    for begin in range(0, len(rows), _MOST_IN_BLOCK):
        block = rows[begin : begin + _MOST_IN_BLOCK]
        yield _BLOCK.pack(begin + len(block) == len(rows), len(block), _MOST_IN_BLOCK - len(block))
        yield block


def _nothing_but(names: set[bytes], data: bytes, parts: Parts) -> bool:
    """Whether a file has no other parts, not even damaged ones that were left out of ``parts``."""
    known: int = sum(part.stop - part.start + 12 for name in names & parts.keys() for part in parts[name])
    return len(data) == 8 + known


def _harmless(name: bytes, content: bytes) -> bool:
    """Whether a part of which anything may be wrong changes no pixel."""
    optional = bool(name[0] & 0x20)
    # Damage may have made this name of one that matters.
    other = all(sum(map(int.__ne__, name, known)) > 1 for known in _SEEN | {_EXIF})
    turning = name in _TEXTS and content.startswith((_RAW_EXIF, _XMP))
    return optional and other and not turning


def _text(data: bytes, parts: Parts, keyword: bytes) -> bytes:
    """The last text of a keyword, which ends with a zero byte; empty where there is none that can be read."""
    found = b""
    for name in _TEXTS:
        for part in parts.get(name, ()):
            if data.startswith(keyword, part.start):
                found = _read_text(name, data[part.start + len(keyword) : part.stop]) or found
    return found


def _read_text(name: bytes, content: bytes) -> bytes:
    deflated = name == b"zTXt"
    if name == b"zTXt":
        content = content[1:]  # the only method there is
    elif name == b"iTXt":
        deflated = content[:1] == b"\1"
        content = content[2:].split(b"\0", 2)[-1]  # language and translated keyword
    if not deflated:
        return content
    try:
        return zlib.decompressobj().decompress(content, _MOST_TEXT)
    except zlib.error:
        return b""


def _check_sum(part: memoryview) -> int:
    if len(part) > _SHORT:
        return zlib.crc32(part)
    found = 0
    for begin in range(0, len(part), _KEPT):
        found = zlib.crc32(part[begin : begin + _KEPT], found)
    return found


def _parts(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of each part that is there as a whole: its check sum is of data[begin:end], and follows."""
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
