"""Encoded images: decoding, and several images of one sample.

Pillow is part of the extra ``manifest`` and is imported with the first image. Its settings hold for the whole process
and are not changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lit_async_data.batch.spec import Array, Bytes, FieldSpec
from lit_async_data.errors import ConfigError, CorruptError, FormatError
from lit_async_data.order.permutation import Words, derived_keys
from lit_async_data.sources.images import formats
from lit_async_data.sources.images.formats import UPRIGHT, Box, Crop, Draw, Format, Head, ImageShape, values_of
from lit_async_data.sources.local_files import has_word
from lit_async_data.system import after_fork_in_child

# A JPEG is decoded at a part of its size if this many times the output pixels remain in each direction.
_MIN_OVERSAMPLING = 2
# Images that are decoded to more pixels are decoded one at a time: each takes up to 20 bytes per pixel.
_LARGE = 2**24
# Kernels of torch.nn.functional.interpolate with antialias=True, which has no ``out``.
_KERNELS = {"bilinear": "_upsample_bilinear2d_aa", "bicubic": "_upsample_bicubic2d_aa"}
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_MASKS = "masks?|labels?|segs?|segmentations?|annotations?"

_turn = threading.Lock()
after_fork_in_child(_turn._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


@dataclasses.dataclass(frozen=True)
class ImageDecoder:
    """Images of any size as arrays of one shape, stored as (H, W, C) and delivered as (C, H, W).

    ``head`` are the first bytes of files that hold a sample after these; None: files must be decoded.
    """

    shape: ImageShape
    size: tuple[int, int]
    head = None
    images = True

    @staticmethod
    def of(shape: ImageShape, data: bytes, where: str) -> ImageDecoder:
        size: Any = shape.image_size or size_of(data, shape, where)
        return ImageDecoder(shape, size)

    @property
    def spec(self) -> FieldSpec:
        return FieldSpec((self.shape.channels, *self.size), self.shape.dtype, channel=2)

    @property
    def is_random(self) -> bool:
        return self.shape.resize == "random_crop"

    def draws(self, keys: Words | None, count: int) -> Sequence[Draw]:
        if keys is None or not self.is_random:
            return [None] * count
        if self.shape.draw is not None:
            keys = derived_keys(keys, zlib.crc32(self.shape.draw.encode()))
        drawn: list[Draw] = derived_keys(keys[:, None], np.arange(4 * formats.TRIES)).tolist()
        return drawn

    def decode(self, data: Any, out: Array, draw: Draw, where: str) -> Shown:
        """Decode an image, resize it, and write it to ``out``: shape (H, W, C), undefined after an error.

        Applies the orientation in EXIF or XMP. A file that ends too soon is an error, and so are a changed byte in a
        PNG and a JPEG that libjpeg warns of; formats without checksums can have changed pixels.
        """
        shape = self.shape
        if out.dtype != shape.dtype or out.ndim != 3 or out.shape[2] != shape.channels:
            raise ValueError(f"an array of {out.dtype} {out.shape} for an image of {shape.channels} channels")
        stored = bytes(data)  # no copy of bytes
        kind = formats.format_of(stored, where)
        try:
            head = _checked_head(kind, stored, shape, where)
            height, width = formats.upright_size(head.size, head.turned)
            if shape.image_size is None and out.shape[:2] != (height, width):
                what = f"{height}×{width} pixels (height × width), but {out.shape[0]}×{out.shape[1]}"
                what += " are expected; give image_size to resize all images, or deliver them as they are by a"
                raise FormatError(f"{where}: {what} DataLoader with a collate_fn under prefetched(...)")  # noqa: TRY301
            crop = formats.crop_of(shape, height, width, (out.shape[0], out.shape[1]), draw)
            factor = _factor(kind, crop, shape)
            with _turn if height * width > _LARGE * factor**2 else contextlib.nullcontext():
                out = _filled(out, crop, shape)
                decoded = kind.decode(stored, head, factor, out if _as_stored(head, crop, shape, out) else None)
                if decoded is not out:
                    pixels = values_of(decoded, head, shape)
                    if head.turned != UPRIGHT:
                        pixels = formats.upright(pixels, head.turned)
                    box = crop.box if factor == 1 else _reduced(head, crop.box, factor, shape)
                    write_resized(pixels, box, shape, out)
        except (MemoryError, ConfigError, FormatError):
            raise
        except Exception as error:
            raise _damage(kind, error, where) from error
        return Shown((height, width), max(head.turned, head.was_turned), head.mode)


def size_of(data: Any, shape: ImageShape, where: str) -> tuple[int, int]:
    """(height, width) after orientation, without decoding; see `decode`."""
    stored = bytes(data)
    kind = formats.format_of(stored, where)
    try:
        head = _checked_head(kind, stored, shape, where)
    except (MemoryError, ConfigError, FormatError):
        raise
    except Exception as error:
        raise _damage(kind, error, where) from error
    return formats.upright_size(head.size, head.turned)


def _damage(kind: Format, error: Exception, where: str) -> Exception:
    if isinstance(error, ModuleNotFoundError):
        name = str(error.name).partition(".")[0].replace("PIL", "pillow")
        return ConfigError(f"{name} is missing; install it by pip install {name}", "image")
    if isinstance(error, ImportError):
        return ConfigError(f"a decoder cannot be loaded ({error}); install pillow and simplejpeg again", "image")
    # Pillow raises many types for damaged data; other types than these name internals of a decoder.
    said = isinstance(error, ValueError | OSError | SyntaxError)
    reason = str(error) if said else "its data are inconsistent or end too soon"
    what = f"the {kind.name} cannot be decoded ({reason}); fetch the file again, or convert it if it is whole"
    return CorruptError(f"{where}: {what}")


def _checked_head(kind: Format, data: bytes, shape: ImageShape, where: str) -> Head:
    head = kind.head(data, where)
    width, height = head.size
    if width < 1 or height < 1:
        raise ValueError(f"it has {height}×{width} pixels")
    if width * height > shape.max_pixels:
        what = f"{height}×{width} pixels (height × width) are more than max_pixels ({shape.max_pixels}), and decoding"
        raise FormatError(f"{where}: {what} may take all memory; raise max_pixels if the image really has this size")
    formats.check_mode(kind.name, head, shape, where)
    return head


def _factor(kind: Format, crop: Crop, shape: ImageShape) -> int:
    if shape.resampling == "nearest":
        return 1
    left, upper, right, lower = crop.box
    room = min((right - left) / crop.size[1], (lower - upper) / crop.size[0]) / _MIN_OVERSAMPLING
    return next((factor for factor in kind.factors if factor <= room), 1)


def _filled(out: Array, crop: Crop, shape: ImageShape) -> Array:
    """The part of the output that the image becomes, after filling the rest."""
    if crop.size == out.shape[:2]:
        return out
    (row, column), (height, width) = crop.corner, crop.size
    out[...] = shape.fill
    return out[row : row + height, column : column + width]


def _as_stored(head: Head, crop: Crop, shape: ImageShape, out: Array) -> bool:
    """Whether the decoder can write its pixels to ``out`` unchanged."""
    width, height = head.size
    fits = out.shape[:2] == (height, width) and out.flags.c_contiguous
    return fits and head.turned == UPRIGHT and head.mode == shape.target_mode and crop.box == (0, 0, width, height)


def _reduced(head: Head, box: Box, factor: int, shape: ImageShape) -> Box:
    """The box to deliver, in the upright pixels of the reduced image."""
    left, upper, right, lower = box
    height, width = formats.upright_size(head.size, head.turned)
    # The last column and row may extend beyond the image; in a mirrored image they come first.
    right_first, lower_first = formats.mirrored(head.turned)
    across = -(-width // factor) - width / factor if right_first else 0
    down = -(-height // factor) - height / factor if lower_first else 0
    box = (left / factor + across, upper / factor + down, right / factor + across, lower / factor + down)
    # A crop may begin up to a pixel earlier or later, and whole pixels are resized faster.
    return formats.whole_pixels(*box) if shape.resize in ("crop", "random_crop") else box


# -- resizing: torch's kernel for bytes is Pillow's algorithm in vector instructions -----------------------------------


def write_resized(pixels: Array, box: Box, shape: ImageShape, out: Array) -> None:
    """Resize a part of an image (uint8, or grey of uint16); grey can fill several channels."""
    if all(map(float.is_integer, map(float, box))):
        # Crop first, as torchvision does, so that pixels outside of the part do not affect its edge.
        left, upper, right, lower = map(int, box)
        pixels, box = pixels[upper:lower, left:right], (0, 0, right - left, lower - upper)
        if pixels.shape[:2] == out.shape[:2]:
            out[...] = pixels
            return
        # torch cannot crop at fractions of pixels.
        if shape.resampling in _KERNELS and pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3):
            _by_torch(pixels, shape.resampling, out)
            return
    out[...] = _by_pillow(pixels, box, (out.shape[0], out.shape[1]), shape.resampling)


def _by_torch(pixels: Bytes, interpolation: str, out: Bytes) -> None:
    import torch  # with the first image that is resized: a reader process takes a second to import it

    if not (_dense(pixels) and pixels.flags.writeable):
        pixels = np.array(pixels, order="C")  # otherwise torch copies in its own threads, or warns
    straight = out.shape[2] == pixels.shape[2] and _dense(out)
    found = out if straight else np.empty((*out.shape[:2], pixels.shape[2]), np.uint8)
    given = torch.from_numpy(pixels[None].transpose(0, 3, 1, 2))
    result = torch.from_numpy(found[None].transpose(0, 3, 1, 2))
    kernel = getattr(torch.ops.aten, _KERNELS[interpolation]).out
    kernel(given, out.shape[:2], False, None, None, out=result)
    if not straight:
        out[...] = found


def _dense(pixels: Bytes) -> bool:
    # numpy calls a single row or column contiguous whatever its strides; torch would use these strides.
    _, width, channels = pixels.shape
    return pixels.strides == (width * channels, channels, 1)


def _by_pillow(pixels: Array, box: Box, size: tuple[int, int], interpolation: str) -> Array:
    from PIL import Image

    # As floats, because Pillow's kernel for 16 bits is wrong by up to 12 410 of 65 535.
    deep = pixels.dtype != np.uint8
    given = np.ascontiguousarray(pixels, np.float32 if deep else np.uint8)
    image = Image.frombytes("F" if deep else _MODES[pixels.shape[2]], pixels.shape[1::-1], given)
    # Pillow premultiplies colours by opacity itself.
    resized = image.resize((size[1], size[0]), Image.Resampling[interpolation.upper()], box=box)
    found = np.frombuffer(resized.tobytes(), given.dtype).reshape(*size, pixels.shape[2])
    # bicubic and lanczos overshoot.
    return np.clip(np.rint(found), 0, np.iinfo(pixels.dtype).max).astype(pixels.dtype) if deep else found


class Shown(NamedTuple):
    """An image before it is cropped and resized."""

    size: tuple[int, int]  # (height, width) after it is turned
    turned: int  # by this orientation
    mode: str  # of the file, as Pillow calls it

    @property
    def stored(self) -> tuple[int, int]:
        """(height, width) before it is turned."""
        return (self.size[1], self.size[0]) if self.turned > 4 else self.size


#: The images of a field, by place of the sample and in its list.
Places = Mapping[Any, Shown]


class Alignment:
    """Image fields that share their draw, so that their pixels correspond; and arrays of the same size beside them."""

    def __init__(
        self, shapes: Mapping[str, ImageShape], arrays: Mapping[str, tuple[int, ...]], names: Mapping[str, str]
    ) -> None:
        self._shapes, by_draw = shapes, dict[str | None, list[str]]()
        for key, shape in shapes.items():
            by_draw.setdefault(shape.draw, []).append(key)
            if has_word(f"{key}/{names[key]}", _MASKS, whole=True):
                self._refuse_mixing(key, f"{key} ({names[key]}) is named as a mask")
        self._pairs = [pair for keys in by_draw.values() for pair in itertools.combinations(keys, 2)]
        self._arrays = {size: key for key, shape in arrays.items() for size in itertools.pairwise(shape)}
        self._beside = by_draw.get(None, []) if self._arrays else []
        self.keys = frozenset(itertools.chain(*self._pairs, self._beside))

    def mismatches(self, shown: Mapping[str, Places]) -> Iterator[tuple[str, Any, str]]:
        """Field, place and reason for each image that does not fit the image of another field, or an array."""
        for one, other in self._pairs if len(shown) > 1 else ():
            seconds = shown.get(other, {})
            for place, first in shown.get(one, {}).items():
                second = seconds.get(place, first)
                if first[:2] != second[:2] and (what := self._mismatch({one: first, other: second})):
                    yield other, place, f"{what}; if {one} and {other} show different things, set draw: for one"

        for key in self._beside:
            for place, image in shown.get(key, {}).items():
                yield from ((key, place, what) for what in self._beside_arrays(key, image))

    def _beside_arrays(self, key: str, image: Shown) -> Iterator[str]:
        shape, moved = self._shapes[key], dict[Any, tuple[str, str]]()
        cut = f"changed by resize: {shape.resize}", "set resize: stretch"
        if shape.resize == "random_crop" or (shape.resize != "stretch" and not _alike(image.size, shape.image_size)):
            moved[image.size] = cut
        if shape.resize == "random_crop":  # with other crops, an array of the delivered size may show the same part
            moved[shape.image_size] = cut
        if image.turned != UPRIGHT:
            way = f"write {key} as it looks, ImageOps.exif_transpose(image).save(…), and turn what its pixels gave"
            moved[image.stored] = f"turned by the orientation in its file ({image.turned})", way
        for size in moved.keys() & self._arrays.keys():
            array, (how, way) = self._arrays[size], moved[size]
            what = f"{key} is {how}, but {array}, an array of its height and width, is not: {way}; or store {array} as"
            yield f"{what} images, class numbers with mode: P; if they show different things, set draw: for {key}"

    def _mismatch(self, pair: Mapping[str, Shown]) -> str:
        for (key, image), (mate, other) in itertools.permutations(pair.items()):
            if image.turned != UPRIGHT == other.turned and _alike(image.stored, other.size):
                what = f"{key} is turned by the orientation in its file ({image.turned}), but {mate}"
                what += f", whose shape is that of the stored pixels, is not: turn {mate} too if it was made from the "
                return f"{what}stored pixels, or write {key} as it looks: ImageOps.exif_transpose(image).save(…)"
        masks = [key for key in pair if self._shapes[key].target_mode == formats.INDICES]
        if len(masks) == 1 and not _alike(*(each.size for each in pair.values())):
            sizes = " and ".join("{} has {}×{}".format(key, *each.size) for key, each in pair.items())
            return f"{sizes} pixels (height × width), so mask and image differ in shape: cut the mask as the image is"
        return ""

    def check_modes(self, shown: Mapping[str, Places]) -> None:
        """Refuse palettes, and grey that is resized, without a mode in the first images: masks would lose numbers."""
        for key in sorted({*itertools.chain(*self._pairs)} & shown.keys()):
            modes = {each.mode for each in shown[key].values()}
            if modes & {*formats.PALETTES}:
                self._refuse_mixing(key, "the first image has a palette, beside another image", always=True)
            if modes & {*formats.GREYS} and self._shapes[key].image_size:
                self._refuse_mixing(key, "the first image is grey, beside another image")

    def _refuse_mixing(self, key: str, what: str, *, always: bool = False) -> None:
        shape = self._shapes[key]
        if shape.mode is None and (always or shape.resampling != "nearest"):
            resized = shape.image_size and not always
            mixed = "resizing would mix numbers" if resized else "as RGB, numbers of a palette would be lost"
            what = f"missing; {what}, and {mixed}; set P for the numbers of a mask, L for grey tones, or RGB for "
            raise ConfigError(f"{what}colours (of a mask: interpolation: nearest)", f"fields.{key}.mode")


def _alike(one: tuple[int, int], other: Any) -> bool:
    """Whether two images have one shape, up to a scale and the rounding of sides."""
    return bool(abs(one[0] * other[1] - one[1] * other[0]) <= max(*one, *other))
