"""TIFF: which of its images are pages, what is not supported, and JPEG strips."""

from __future__ import annotations

import functools
import io
import struct
from typing import Any, NamedTuple

from lit_async_data.errors import FormatError
from lit_async_data.sources.manifest.images.formats.image_bytes import TIFF, DamageError, cut_short
from lit_async_data.sources.manifest.images.formats.jpeg import check_jpeg

_NEW_SUBFILE_TYPE, _OLD_SUBFILE_TYPE, _WIDTH, _HEIGHT = 254, 255, 256, 257
_COMPRESSION, _EXIF, _JPEG_TABLES = 259, 34665, 347
_COLOURS, _SUBSAMPLING, _YCBCR = 262, 530, 6
_BITS, _SAMPLES, _ROWS, _PLANES, _TILE_WIDTH, _TILE_LENGTH = 258, 277, 278, 284, 322, 323
_TAG_NAMES = {
    _BITS: "BitsPerSample",
    _SAMPLES: "SamplesPerPixel",
    _COLOURS: "PhotometricInterpretation",
    339: "SampleFormat",
    _COMPRESSION: "Compression",
}
_OFFSETS, _COUNTS = (273, 324), (279, 325)  # of strips and of tiles
_READ_TAGS = {_NEW_SUBFILE_TYPE, _OLD_SUBFILE_TYPE, _WIDTH, _HEIGHT, _EXIF, *_TAG_NAMES}
# Bits of NewSubfileType, and a value of the older tag, that mark smaller copies and masks.
_SMALLER, _MASK, _OLD_SMALLER = 1, 4, 2
_JPEG, _GROUP_4, _OPTIONAL = 7, 4, ("lzma", "zstd", "webp")
_PLAIN = ("L", "LA", "RGB", "RGBA")
_LETTERS = {3: "H", 4: "I", 13: "I", 16: "Q"}  # struct letters of number types
# The longest side of an Exif thumbnail; cameras store it as an unmarked second image.
_THUMBNAIL = 160


class _Image(NamedTuple):
    """The first value of each relevant tag of an image."""

    tags: dict[int, int]

    @property
    def size(self) -> tuple[int, int]:
        return self.tags.get(_WIDTH, 0), self.tags.get(_HEIGHT, 0)


def pages_of(data: bytes, where: str) -> list[int]:
    """The numbers of the images in a TIFF that are pages, not overviews, thumbnails or masks.

    Args:
        data: All bytes of the file.
        where: The file in messages.

    Raises:
        CorruptError: A directory is outside of the file.
        FormatError: Pillow does not read such files.
    """
    if data.startswith(b"MM\x00+"):
        raise FormatError(
            f"{where}: a BigTIFF of big-endian numbers, which is not supported; convert it to little-endian"
        )
    try:
        images = _images(data)
    except (struct.error, OverflowError):  # an offset beyond the file
        raise cut_short(TIFF, where) from None
    pages = [number for number, image in enumerate(images) if not _is_smaller(image.tags)]
    if len(pages) == len(images) == 2 and _is_thumbnail(images[1], images[0]):
        return [0]
    return pages or [0]


def unsupported_tiff(data: bytes, error: Exception) -> str:
    """The tags of a TIFF that Pillow does not support; empty if something else is wrong.

    Args:
        data: All bytes of the file.
        error: The error of Pillow when it opened the file.
    """
    from PIL import TiffImagePlugin

    if str(error) == "Windows Media Photo files not yet supported":
        return "JPEG XR"
    unknown_pixels = str(error) == "unknown pixel mode"
    if not (unknown_pixels or isinstance(error.__cause__, KeyError)):
        return ""
    tags = next((image.tags for image in _images(data)), {})
    if not unknown_pixels and tags.get(_COMPRESSION, 1) in TiffImagePlugin.COMPRESSION_INFO:
        return ""
    return (
        ", ".join(f"{name} {tags[tag]}" for tag, name in _TAG_NAMES.items() if tag in tags)
        or "no tags that describe its pixels"
    )


def check_page(image: Any, where: str) -> None:
    """Refuse a page that Pillow opens but cannot decode.

    Args:
        image: The Pillow image.
        where: The file in messages.

    Raises:
        FormatError: Pillow cannot decode it.
    """
    compression, tags = image.info.get("compression"), image.tag_v2
    if not configured(compression):
        raise FormatError(
            f"{where}: a TIFF of {compression} data, which this installation of Pillow cannot decode; store it with "
            "another compression"
        )
    if (tags.get(_COLOURS), compression) != (_YCBCR, "raw"):
        return
    if tags.get(_SUBSAMPLING, (1, 1)) != (1, 1):
        raise FormatError(
            f"{where}: a TIFF of uncompressed, subsampled YCbCr, which is not supported; convert it to RGB"
        )
    if image.tile[0].args[0] != "YCbCr":  # Pillow 12 looks for four values per pixel
        raise FormatError(
            f"{where}: a TIFF of uncompressed YCbCr, which Pillow decodes from version 13 on; install it, or convert "
            "the image to RGB"
        )


def keep_as_stored(image: Any) -> None:
    """Make Pillow decode a TIFF without rotating it: a rotated copy would double the memory.

    Args:
        image: The Pillow image at the page.
    """
    image.load_end = lambda: None
    image._size = image._tile_size  # noqa: SLF001


def strip_bytes(image: Any) -> int:
    """Bytes that Pillow holds besides the pixels: a strip or tile, and two copies of fax data for the check.

    Args:
        image: The Pillow image.
    """
    if image.tile[0].codec_name != "libtiff":
        return 0
    tags, (width, height) = image.tag_v2, image.size
    columns, rows = tags.get(_TILE_WIDTH, width), min(tags.get(_TILE_LENGTH, tags.get(_ROWS, height)), height)
    values = tags.get(_SAMPLES, 1) if tags.get(_PLANES, 1) == 1 else 1
    strip = int(rows * -(-columns * values * max(tags.get(_BITS, (1,))) // 8))
    return strip + (2 * rows * columns if tags.get(_COMPRESSION) == _GROUP_4 else 0)


def is_plain(image: Any) -> bool:
    """Whether Pillow delivers the values of a TIFF as they are stored.

    Args:
        image: The Pillow image.
    """
    packed = image.info.get("compression") not in ("jpeg", "tiff_jpeg", "webp")
    raw_mode = image.tile[0].args[0]
    same = (image.mode, raw_mode) == ("I;16", "I;16N") or (raw_mode == image.mode and image.mode in _PLAIN)
    return packed and same and image.tag_v2.get(_PLANES, 1) == 1


@functools.cache
def configured(compression: str | None) -> bool:
    """Whether Pillow's libtiff was built with a compression, by Pillow's name of it."""
    from PIL import Image

    if compression not in _OPTIONAL:
        return True
    try:
        Image.new("RGB", (16, 16)).save(io.BytesIO(), "TIFF", compression=compression)
    except (OSError, RuntimeError, ValueError):
        return False
    return True


def check_jpegs(data: bytes, tags: Any) -> None:
    """Raise DamageError if libjpeg finds damage in a JPEG strip or tile, which Pillow does not report.

    Args:
        data: All bytes of the file.
        tags: Pillow's tags of the page.
    """
    if tags.get(_COMPRESSION) != _JPEG:
        return
    tables = tags.get(_JPEG_TABLES, b"")
    offsets, counts = (tags.get(both[0], tags.get(both[1], ())) for both in (_OFFSETS, _COUNTS))
    for offset, count in zip(offsets, counts, strict=False):
        strip = data[offset : offset + count]
        if len(strip) < count:
            raise DamageError("a strip is outside of the file")
        if count:  # an unwritten tile has no data
            check_jpeg(tables[:-2] + strip[2:] if tables else strip)


def _is_smaller(tags: dict[int, int]) -> bool:
    if _NEW_SUBFILE_TYPE in tags:
        return bool(tags[_NEW_SUBFILE_TYPE] & (_SMALLER | _MASK))
    return tags.get(_OLD_SUBFILE_TYPE) == _OLD_SMALLER


def _is_thumbnail(image: _Image, first: _Image) -> bool:
    unmarked = _NEW_SUBFILE_TYPE not in image.tags and _OLD_SUBFILE_TYPE not in image.tags
    small = max(image.size) <= _THUMBNAIL and all(
        2 * side <= whole for side, whole in zip(image.size, first.size, strict=True)
    )
    return _EXIF in first.tags and unmarked and small


def _images(data: bytes) -> list[_Image]:
    """The chain of directories, up to a repetition.

    Raises:
        struct.error, OverflowError: The chain leaves the file.
    """
    order, big = "<" if data.startswith(b"II") else ">", data[2] == 43
    # Number of entries, entry without its values, offset.
    number, entry, offset = (
        struct.Struct(order + letters) for letters in (("Q", "HHQ", "Q") if big else ("H", "HHI", "I"))
    )
    images: dict[int, _Image] = {}
    (place,) = offset.unpack_from(data, 8 if big else 4)
    while place and place not in images:
        (entries,) = number.unpack_from(data, place)
        begin, size = place + number.size, entry.size + offset.size
        tags = {}
        for position in range(begin, begin + entries * size, size):
            tag, kind, values = entry.unpack_from(data, position)
            if tag in _READ_TAGS and values and kind in _LETTERS:
                value = struct.Struct(order + _LETTERS[kind])
                inline = values * value.size <= offset.size
                value_position = position + entry.size if inline else offset.unpack_from(data, position + entry.size)[0]
                (tags[tag],) = value.unpack_from(data, value_position)
        images[place] = _Image(tags)
        (place,) = offset.unpack_from(data, begin + entries * size)
    return list(images.values())
