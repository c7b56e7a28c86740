"""`FieldSpec` and `BatchSpec` describe a batch; `BatchLayout` places its fields in a slot."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_async_data.errors import MissingError
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.permutation import Indices
from lit_async_data.order.weights import IGNORED

# cudaMalloc and torch's pinned allocator align to this. A field that starts here can be copied directly.
ALIGNMENT = 512
# Element types that a tensor can have, as (kind, itemsize) of numpy.
TENSOR_TYPES = {("b", 1), *((k, n) for k in "iu" for n in (1, 2, 4, 8)), *(("f", n) for n in (2, 4, 8))}
TENSOR_TYPES |= {("c", 8), ("c", 16)}
# A field of at most this many bytes per batch is handed out as a copy, so that a list of labels keeps no slots alive.
SMALL_BYTES = 64 * 1024
# Samples of a concatenated field are read padded first: as many at a time as fit into the bytes of a batch, or these.
RUN_BYTES = 2**20

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
NOTHING: Mapping[str, Indices] = MappingProxyType({})
MASK = "mask"  # the field that is False for the samples that fill up a short batch


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """One field of a sample.

    Attributes:
        shape: Shape of one delivered sample, without N. Channels come first, or after the first ``lead`` axes.
        dtype: Delivered element type, in native byte order.
        channel: Axis of the stored sample that holds the channels; None if no axis moves.
        classes: Names of the values 0, 1, 2, …; empty if they have none.
        narrow: Stored element type, if it takes fewer bytes than ``dtype``. A source can fill arrays of either type;
            values for a device are copied in the narrow type and cast there.
        lead: Number of axes before the channels in the delivered sample: 1 for a window whose rows come first, all
            axes for a patch without channels.
        ragged: Whether samples have fewer elements on axis 0, and are padded there.
        texts: Texts of the values 0, 1, 2, … that are not classes, such as the ids of patients.
        concat: Whether a batch has the elements of its samples one after the other, without padding.
        padded: The side on which samples with fewer elements on axis 0 are padded, also to a given length.
        masked: Number of axes that may have padding, 1 for a window; the field ``KEY_mask`` is False for that.
        meanings: Names of numbers other than 0, 1, 2, …. Comparing specs ignores them; see `contradict`.
        columns: A digest of the names that files give columns; empty without. Comparing specs ignores it.

    Example:
        >>> image = FieldSpec((3, 64, 48), np.dtype(np.uint8), channel=2)     # stored as NHWC
        >>> image.stored_shape, image.nbytes
        ((64, 48, 3), 9216)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    channel: int | None = None
    classes: tuple[str, ...] = ()
    narrow: np.dtype[Any] | None = None
    lead: int = 0
    ragged: bool = False
    texts: tuple[str, ...] = ()
    concat: bool = False
    padded: Literal["left", "right"] | None = None
    masked: int = 0
    meanings: tuple[tuple[int, str], ...] = dataclasses.field(default=(), compare=False)
    columns: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" if self.shape else str(self.dtype)

    @property
    def fits_tensor(self) -> bool:
        """Whether tensors have the dtype; not if a source of the user gives something else than a dtype."""
        return getattr(self.dtype, "isnative", False) and (self.dtype.kind, self.dtype.itemsize) in TENSOR_TYPES

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one sample in the slot: axes in the order of the file, so that reading moves no bytes."""
        if self.channel is None:
            return self.shape
        rest = list(self.shape)
        rest.insert(self.channel, rest.pop(self.lead))
        return tuple(rest)

    @property
    def named(self) -> dict[int, str]:
        """The names of numbers, from ``classes`` or ``meanings``."""
        return dict(enumerate(self.classes)) or dict(self.meanings)

    @property
    def labels(self) -> bool:
        """Whether the values are classes, flags, or one integer per sample, and so are not normalised by default."""
        whole = self.dtype.kind in "iu" and not self.shape
        return bool(self.classes or self.meanings) or self.dtype.kind == "b" or whole

    @property
    def moves(self) -> bool:
        """Whether the slot has the channels on another axis than the delivered sample."""
        return self.channel not in (None, self.lead)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize

    def delivered(self, stored: Any) -> Any:
        """Returns a C-contiguous array or tensor of shape ``(n, *stored_shape)`` as a view with the axes N, C, …."""
        if not self.moves:
            return stored
        assert self.channel is not None
        if self.shape[self.lead] == 1 or math.prod(self.stored_shape[self.lead : self.channel]) == 1:
            # Only axes of length 1 move. Gradients get the strides of the input, and DDP expects contiguous ones.
            return stored.reshape(len(stored), *self.shape)
        order = list(range(stored.ndim))
        order.insert(self.lead + 1, order.pop(self.channel + 1))
        return stored.transpose(order) if isinstance(stored, np.ndarray) else stored.permute(order)


def contradict(names: Mapping[int, str], others: Mapping[int, str]) -> bool:
    """Whether the mappings disagree on the name of a number, or on the number of a name."""
    taken = set(others.values())
    return any(others[number] != name if number in others else name in taken for number, name in names.items())


def listed_names(names: Mapping[int, str]) -> str:
    """Names for a message; with their numbers, unless these count from 0."""
    return ", ".join(names.values() if 0 in names else (f"{n} {name}" for n, name in names.items())) or "no names"


def length_key(key: str) -> str:
    return f"{key}_length"


def mask_key(key: str) -> str:  # the field that is False for rows of a window that are padding
    return f"{key}_mask"


def offsets_key(key: str) -> str:  # the field of the first elements of the samples, and the end of the last sample
    return f"{key}_offsets"


class BatchSpec(Mapping[str, FieldSpec]):
    """The fields of a batch in order, and whether batches are dicts or tuples. A mapping of keys to fields. Immutable.

    Args:
        fields: The field of each batch key.
        as_mapping: Batches are dicts if True, else tuples in the order of ``fields``.

    Example:
        >>> spec = BatchSpec({"x": FieldSpec((3, 8, 8), np.dtype("u1"))}, as_mapping=True)
        >>> spec["x"].shape, list(spec), "y" in spec
        ((3, 8, 8), ['x'], False)
        >>> spec
        <BatchSpec of dicts: x uint8 (3, 8, 8)>
    """

    def __init__(self, fields: Mapping[str, FieldSpec], *, as_mapping: bool) -> None:
        self.fields: Mapping[str, FieldSpec] = MappingProxyType(dict(fields))
        self.as_mapping = as_mapping

    def __getitem__(self, key: str) -> FieldSpec:
        return self.fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __str__(self) -> str:
        return ", ".join(f"{key} {field}" for key, field in self.fields.items())

    def __repr__(self) -> str:
        return f"<BatchSpec of {'dicts' if self.as_mapping else 'tuples'}: {self}>"

    def __reduce__(self) -> Any:
        return functools.partial(BatchSpec, as_mapping=self.as_mapping), (dict(self.fields),)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchSpec):
            return NotImplemented
        return self.as_mapping == other.as_mapping and list(self.fields.items()) == list(other.fields.items())

    __hash__ = None  # type: ignore[assignment]  # equality is by content

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one sample over all fields."""
        return sum(field.nbytes for field in self.fields.values())

    def empty(self, samples: int, keys: Iterable[str] | None = None) -> dict[str, Array]:
        """Returns an array for samples in their stored shape for each of ``keys``, or for each field."""
        shapes = {key: self[key].stored_shape for key in (self if keys is None else keys)}
        return {key: np.empty((samples, *shape), self[key].dtype) for key, shape in shapes.items()}

    @functools.cached_property
    def _named(self) -> dict[str, dict[int, str]]:
        whole = {each: field for each, field in self.items() if field.dtype.kind in "iu"}
        return {each: dict(enumerate(field.texts)) or field.named for each, field in whole.items()}

    def names(self, key: str, codes: Any) -> npt.NDArray[np.str_]:
        """The names of the numbers of a field: its classes, meanings, or texts (``kind="text"``).

        Args:
            key: A key.
            codes: Values of that field, as in a batch, of any shape.

        Returns:
            Text of the same shape; empty for −100, which marks a missing value.

        Raises:
            MissingError: The field has no names, or several classes per sample.
            IndexError: A number has no name.

        Example:
            >>> birds = FieldSpec((), np.dtype("i8"), classes=("auk", "emu"))
            >>> BatchSpec({"y": birds}, as_mapping=True).names("y", [1, 0, -100]).tolist()
            ['emu', 'auk', '']
        """
        named, texts = self._named, self._named.get(key, {})
        if not texts or (self[key].shape == (len(texts),) and self[key].dtype == np.uint8):
            listed = ", ".join(each for each in named if named[each]) or "none"
            raise MissingError(f"{key!r} holds no numbers with names; fields with names: {listed}")
        numbers = np.asarray(codes.cpu() if hasattr(codes, "cpu") else codes)
        flat = [texts.get(number, "" if number == IGNORED else None) for number in numbers.ravel().tolist()]
        if None in flat or numbers.dtype.kind not in "iu":
            wrong = numbers.ravel()[[each is None for each in flat]].tolist()[:1] or numbers.dtype
            raise IndexError(f"{key}: {wrong} is not one of the numbers {min(texts)} to {max(texts)}, which have names")
        return np.array(flat, np.str_).reshape(numbers.shape)

    def narrowed(self) -> BatchSpec:
        """Returns this spec with each field in its narrow type, for copies to a device."""
        fields = {
            key: field if field.narrow is None else dataclasses.replace(field, dtype=field.narrow, narrow=None)
            for key, field in self.fields.items()
        }
        return BatchSpec(fields, as_mapping=self.as_mapping)

    def packed(self, values: Mapping[str, Any]) -> dict[str, Any] | tuple[Any, ...]:
        """Converts values by key to a batch: a dict or a tuple."""
        return dict(values) if self.as_mapping else tuple(map(values.__getitem__, self.fields))


def longest_of(specs: Sequence[BatchSpec]) -> BatchSpec:
    """The first spec, with the meanings of all specs and the greatest length of fields of variable length."""
    fields = dict(specs[0].fields)
    for key, first in specs[0].items():
        meanings = {number: name for spec in specs if key in spec for number, name in spec[key].meanings}
        fields[key] = field = dataclasses.replace(first, meanings=tuple(sorted(meanings.items())))
        if field.ragged:
            longest = max(spec.fields.get(key, field).shape[:1] for spec in specs)
            fields[key] = dataclasses.replace(field, shape=(*longest, *field.shape[1:]))
    return BatchSpec(fields, as_mapping=specs[0].as_mapping)


class Extent(NamedTuple):
    rows: int  # samples
    width: int | None = None  # padded length of samples of variable length, in batches by length
    totals: tuple[int, ...] = ()  # elements of all samples, for each concatenated field


class BatchLayout:
    """The place of each field in the bytes of a slot. Immutable.

    Large fields come first, each aligned and copied to the device by itself. Small fields (`SMALL_BYTES` per batch at
    most) follow in one block from ``small_start`` on, which needs a single copy if the slot holds one batch.

    Without ``buckets``, samples of variable length are padded to the longest. ``concat`` holds the lengths of the
    samples of each concatenated field. ``repeats``: a batch may contain a sample twice. ``least``: short batches are
    filled to this number of samples, or with buckets to the size of their bucket; 0 for no filling.
    """

    def __init__(
        self,
        spec: BatchSpec,
        capacity: int,
        batches: int = 1,
        buckets: Buckets | None = None,
        concat: Mapping[str, Indices] = NOTHING,
        *,
        repeats: bool = False,
        least: int = 0,
    ) -> None:
        self.spec, self.batches, self.buckets, self.concat = spec, batches, buckets, concat
        # Whether a slot holds a single batch, since batches differ in size.
        self.alone, self.least = buckets is not None or bool(concat), least
        # Elements of fields of variable length: the most per batch, and the mean per sample.
        elements = {key: most_elements(of, capacity, repeats=repeats) for key, of in concat.items()}
        self._ragged = [key for key, field in spec.fields.items() if field.ragged and buckets is not None]
        if buckets is not None:
            elements |= dict.fromkeys(self._ragged, (buckets.elements, buckets.mean_width))
        rows = dict.fromkeys(spec, capacity) | {offsets_key(key): capacity + 1 for key in concat}
        fixed = {key: field.nbytes * rows[key] for key, field in spec.fields.items() if key not in elements}
        self.small = tuple(key for key, nbytes in fixed.items() if nbytes <= SMALL_BYTES)
        self.large = tuple(key for key in spec.fields if key not in self.small)
        sizes = {key: nbytes * batches for key, nbytes in fixed.items()}
        self.sample_bytes = sum(spec[key].nbytes for key in fixed)  # on average
        for key, (most, mean) in elements.items():
            element = spec[key].nbytes // spec[key].shape[0]
            sizes[key] = element * most
            self.sample_bytes += int(element * mean)
        whole = sum(spec[key].nbytes * capacity for key in concat)
        # The memory in which samples of concatenated fields are padded first.
        self.padded_bytes = min(max(sum(sizes[key] for key in concat), RUN_BYTES), whole)
        self.offsets: dict[str, int] = {}  # the first byte of each field
        self.small_start = self._place(self.large, sizes, 0)
        self.nbytes = max(self._place(self.small, sizes, self.small_start), ALIGNMENT)
        self.edges = frozenset(map(offsets_key, concat))  # fields with one row more than there are samples
        self._fields = [  # computed once, since every batch needs them
            (key, self.offsets[key], field.nbytes, field.dtype, field.stored_shape)
            for key, field in spec.fields.items()
        ]

    def _place(self, keys: tuple[str, ...], sizes: dict[str, int], end: int) -> int:
        for key in keys:
            self.offsets[key] = end
            end += -(-sizes[key] // ALIGNMENT) * ALIGNMENT
        return end

    def extent(self, samples: Indices) -> Extent:
        width = None if self.buckets is None else self.buckets.width(samples)
        return Extent(len(samples), width, tuple(int(of[samples].sum()) for of in self.concat.values()))

    def missing(self, rows: int, extent: Extent) -> int:
        """The number of repeated samples that fill a batch."""
        least = self.least
        if self.buckets is not None:
            assert extent.width is not None
            least = int(self.buckets.sizes[np.searchsorted(self.buckets.bounds, extent.width)])
        return max(least - rows, 0)

    def shapes(self, extent: Extent) -> dict[str, tuple[int, ...]]:
        shapes = {key: (extent.rows, *shape) for key, _, _, _, shape in self._fields}
        if extent.width is not None:
            for key in self._ragged:
                shapes[key] = (extent.rows, extent.width, *shapes[key][2:])
        for key, total in zip(self.concat, extent.totals, strict=True):
            shapes[key], shapes[offsets_key(key)] = (total, *shapes[key][2:]), (extent.rows + 1,)
        return shapes

    def views(self, memory: Bytes, extent: Extent, first: int = 0) -> dict[str, Array]:
        """The arrays of a batch in a slot; its first sample is at row ``first``."""
        count, shapes, views = extent.rows, self.shapes(extent) if self.alone else None, {}
        for key, offset, nbytes, dtype, shape in self._fields:  # a comprehension would cost another call per batch
            of_field = (count, *shape) if shapes is None else shapes[key]
            views[key] = np.ndarray(of_field, dtype, memory, offset + first * nbytes)
        return views

    def views_of(self, memory: Bytes, samples: Indices, first: int = 0) -> dict[str, Array]:
        """The arrays for these samples of one batch; the offsets of concatenated fields are filled in."""
        views = self.views(memory, self.extent(samples), first)
        for key, of in self.concat.items():
            views[offsets_key(key)][0] = 0
            np.cumsum(of[samples], out=views[offsets_key(key)][1:])
        return views


def most_elements(lengths: Indices, capacity: int, *, repeats: bool = False) -> tuple[int, float]:
    longest = np.sort(lengths)[-capacity:]
    return max(int(longest[-1]) * capacity if repeats else int(longest.sum()), 1), float(lengths.mean())
