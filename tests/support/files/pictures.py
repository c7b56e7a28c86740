"""Images in every format, written and decoded: by the package, and plainly by Pillow."""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.formats import ImageShape

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
DEEP = (np.arange(30 * 40, dtype="u4") * 4001 % 65536).astype("u2").reshape(30, 40)  # 16 bits
WHERE = "there/x.png"


def stored(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def exif(turned):
    """What a camera notes of how it was held."""
    found = Image.Exif()
    found[0x0112] = turned
    return found


def a_png(width, height, depth, colour, rows=b"", *, streams=None):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *((b"IDAT", each) for each in streams or [zlib.compress(rows)]), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def decoded(data, shape=None, size=None, key=None):
    """What the package decodes; the size is that of the shape, or of the file, unless it is given."""
    shape = shape or ImageShape()
    height, width = size or shape.image_size or images.size_of(data, shape, WHERE)
    out = np.full((height, width, shape.channels), 77, shape.dtype)
    images.ImageDecoder(shape, ()).decode(data, out, draw_of(shape, key), WHERE)
    return out


def draw_of(shape, key):
    """The draw of one image from its key; None: the middle."""
    (draw,) = images.ImageDecoder(shape, ()).draws(None if key is None else np.array([key], np.uint64), 1)
    return draw


def plainly(data, mode, size=None, box=None, resample=Image.Resampling.BILINEAR):
    """By Pillow, in the simplest way there is; size as (width, height)."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image.info.pop("transparency", None) if mode in ("RGB", "L") else None
    image = image.convert(mode)
    if box and all(edge == int(edge) for edge in box):
        image, box = image.crop(box), None
    image = image.resize(size, resample, box=box) if size else image
    return np.asarray(image).reshape(image.height, image.width, -1)
