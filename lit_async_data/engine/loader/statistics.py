"""`statistics`: mean, standard deviation and the like of the fields of a source, in one pass in storage order."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from lit_async_data.batch.spec import Array, BatchSpec, FieldSpec, length_key, mask_key
from lit_async_data.batch.transforms import FieldStatistics, Moments
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import ConfigError, few
from lit_async_data.options import explains_names
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.composed.composed import SubsetSource
from lit_async_data.sources.contract.checks import check_source, values_of
from lit_async_data.sources.contract.source import Source, read
from lit_async_data.sources.contract.user_code import digest, probes
from lit_async_data.sources.local_files import CacheFolder
from lit_async_data.system import usable_cores

log = logging.getLogger(__name__)

# Bytes of a batch; and the most samples, and bytes, whose change invalidates a cached result.
BATCH_BYTES, PROBES, PROBE_BYTES = 8 * 2**20, 32, 2**26
# The most reader threads, and classes.
MOST_THREADS, MOST_CLASSES = 8, 2**16
# The number is raised when the statistics, or their meaning, change.
HEAD = b"lit_async_data: statistics, version 2; may be deleted\n"

Axis = Literal["channels"] | int | Sequence[int] | None
Kept = Mapping[str, tuple[int, ...]]
Counted = dict[str, Moments]


@explains_names()
def statistics(
    source: Source,
    fields: str | int | Sequence[str | int] | None = None,
    *,
    axis: Axis | Mapping[str, Axis] = "channels",
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[Any, FieldStatistics]:
    """Mean, standard deviation, least and largest value, NaNs and classes of the fields of a source.

    Reads every sample once, in storage order, as an `AsyncLoader` does, so each chunk is decoded once. Counts what the
    source delivers, before any transform: values after ``mask_and_scale``, images after they are resized. NaN, which
    ``mask_and_scale`` fills in, is counted apart; the padding of windows and of samples of variable length is left out.
    −100, which marks labels to ignore, counts as a number; only ``class_counts`` leaves it out. Rows that several
    windows share count in each. On a terminal, a bar shows how far it is.

    Args:
        source: Any source; a side of a split, so that training's statistics know nothing of validation.
        fields: Keys of a dict batch, or indices into a tuple batch. None: all of real numbers.
        axis: Which axes of a sample, without N, to keep: ``0`` gives a number for each place on axis 0, ``(0, 1)`` for
            each pair, None one for the whole field. ``"channels"``: axis 0, or the axis that ``layout`` calls C, of
            samples with three axes or more or a C; None for others, and for patches and points without a C. In windows,
            the same axis of a row. A mapping has one of these for some fields.
        cache_dir: A folder of yours, to which only you may write, keeps the result. The source is read again if its
            fingerprint, the time of a file or one of up to 32 samples has changed. Images of a table are not checked.

    Returns:
        A `FieldStatistics` for each field, by its key or index in a batch.

    Raises:
        ConfigError: ``fields`` or ``axis`` does not fit the source, or ``cache_dir`` is not yours alone.
        ReadError, SourceError: A sample cannot be read.

    Example:
        >>> from lit_async_data import split
        >>> from lit_async_data.testing import ArraySource
        >>> sides = split(ArraySource({"x": np.ones((10, 3, 8, 8)), "y": np.arange(10)}), {"train": 0.8, "val": 0.2})
        >>> found = statistics(sides["train"])
        >>> found["x"].mean.tolist(), int(found["x"].count[0]), int(found["y"].count)
        ([1.0, 1.0, 1.0], 512, 8)
    """
    check_source("source", source)
    spec, keys = source.spec, chosen_fields(source.spec, fields)
    given: Mapping[str, Axis] = axis if isinstance(axis, Mapping) else dict.fromkeys(keys.values(), axis)
    if unknown := given.keys() - keys.values():
        what = f"{min(unknown)!r} is not one of {few(list(keys.values()))}"
        raise ConfigError(f"{what}, whose statistics are asked", "axis")
    axes: dict[str, Axis] = {name: given.get(name, "channels") for name in keys.values()}
    kept = {name: _kept(name, spec[name], each) for name, each in axes.items()}
    if cache_dir is None:
        counted = _read(source, kept)
    else:
        folder, file = CacheFolder(cache_dir, "statistics"), f"{_state(source, kept)}.statistics"
        if (body := folder.load(source.name, file, HEAD)) is None:
            counted = _read(source, kept)
            np.savez(buffer := io.BytesIO(), *(array for moments in counted.values() for array in moments))
            folder.store(source.name, file, HEAD, buffer.getvalue())
        else:
            with np.load(io.BytesIO(body), allow_pickle=False) as stored:
                arrays = iter([stored[each] for each in stored.files])
            counted = {key: Moments(*itertools.islice(arrays, len(Moments._fields))) for key in kept}
    return {key: counted[name].statistics(spec[name], kept[name]) for key, name in keys.items()}


def chosen_fields(spec: BatchSpec, fields: Any) -> dict[Any, str]:
    """The names of fields, by their keys or indices in a batch."""
    keys = {key if spec.as_mapping else at: key for at, key in enumerate(spec)}
    keys = {at: key for at, key in keys.items() if spec[key].dtype.kind != "c" and not spec[key].texts}
    listed = fields if isinstance(fields, Sequence) and not isinstance(fields, str) else (fields,)
    if not listed or not keys:
        what = "empty; name at least one, or leave it out" if keys else "no field of the source holds real numbers"
        raise ConfigError(what, "fields")
    for key in () if fields is None else listed:
        if key not in keys:
            what = f"{key!r} is not one of {', '.join(map(repr, keys))}, the fields of real numbers"
            ways = f"the texts of a column are counted by numpy.unique(source.column({key!r}), return_counts=True)"
            raise ConfigError(f"{what}; {ways}", "fields")
    return keys if fields is None else {key: keys[key] for key in listed}


def _kept(key: str, field: FieldSpec, axis: Axis) -> tuple[int, ...]:
    """The axes of a sample to keep, ascending."""
    axes = len(field.shape)
    if axis == "channels":
        if field.lead in _filled_axes(field) or (field.channel is None and axes - field.lead < 3):
            return ()
        if field.channel is None and (count := field.shape[field.lead]) > 4 and field.shape[-1] in (1, 3, 4):
            means = f"{key} of {field.shape} has {count} means, one for each place on axis {field.lead}"
            log.warning("statistics: %s; if axis %d holds the channels, name it by axis= or layout=", means, axes - 1)
        return (field.lead,)
    given: list[Any] = [] if axis is None else list(axis) if isinstance(axis, Sequence) else [axis]
    kept = {each % axes for each in given if isinstance(each, int) and -axes <= each < axes}
    filled = kept.intersection(_filled_axes(field))
    if len(kept) < len(given) or filled:
        why = f"axis {min(filled)} has padding" if filled else f"samples have shape {field.shape}, without N"
        raise ConfigError(f"{axis!r} cannot be kept of {key}: {why}; keep another, or None", "axis")
    return tuple(sorted(kept))


def _filled_axes(field: FieldSpec) -> range:
    """The axes of a sample that may have padding."""
    if field.masked:
        first = int(field.channel is not None and not field.lead)  # channels come before a window, but for images
        return range(first, first + field.masked)
    return range(bool(field.ragged or field.padded))


class _InStorageOrder(SubsetSource):
    """Some fields of some samples, and the masks or lengths that tell them from padding."""

    def __init__(self, source: Source, samples: Indices, keys: Sequence[str]) -> None:
        super().__init__(source, samples)
        filled = [key for key in keys if _filled_axes(source.spec[key])]
        telling = [mask_key(key) if source.spec[key].masked else length_key(key) for key in filled]
        specs = {key: source.spec[key] for key in [*keys, *telling]}
        for key, field in specs.items():  # concatenated, unless they are padded on the left
            specs[key] = dataclasses.replace(field, concat=field.ragged and field.padded != "left")
        self._fields = BatchSpec(specs, as_mapping=True)

    def _check(self, source: Source) -> None:
        check_source("source", source)  # a mixture too: each sample counts once, whatever its share

    @property
    def spec(self) -> BatchSpec:
        return self._fields


def _read(source: Source, kept: Kept) -> Counted:
    order, reading = source.layout().order, source.chunks.reading
    if order is None:  # a subset may have any order
        order = np.argsort(source.ids(np.arange(len(source))), kind="stable")
    part = _InStorageOrder(source, order, list(kept))
    options = {
        "batch_size": _samples_at_a_time(part),
        "shuffle": "none",
        "augment": False,
        "workers": min(usable_cores(), MOST_THREADS) if reading == "decoded" else "auto",
        "worker_kind": "auto" if reading == "python" else "thread",
    }
    counted: Counted = {}
    bar = tqdm(total=len(part), desc="statistics", unit=" samples", delay=1, disable=None)
    with bar, AsyncLoader(part, options, world_size=1) as loader:
        for batch in loader:
            for name, axes in kept.items():
                field, values = part.spec[name], batch[name].numpy()
                real = batch[mask_key(name)].numpy() if field.masked else None
                if (field.ragged or field.padded) and not field.concat:
                    places = np.arange(values.shape[1])[:: -1 if field.padded == "left" else 1]
                    real = places < batch[length_key(name)].numpy()[:, None]
                if (found := _counted(field, axes, values, real)) is not None:
                    counted[name] = Moments.together([counted[name], found] if name in counted else [found])
            bar.update(len(batch[[*part.spec][-1]]))
    return counted


def _samples_at_a_time(part: Source) -> int:
    """The number of samples that fit into the bytes of a batch, even if they are the longest."""
    nbytes = np.zeros(len(part), np.int64)
    for key, field in part.spec.items():
        each, lengths = field.nbytes, length_key(key)
        nbytes += each // field.shape[0] * values_of(part, lengths, "fields") if field.concat else each
    return max(int(np.searchsorted(np.cumsum(np.sort(nbytes)[::-1]), BATCH_BYTES, side="right")), 1)


def _counted(field: FieldSpec, axes: Sequence[int], values: Array, real: Array | None) -> Moments | None:
    """The moments of a batch without its padding; None if it has nothing else."""
    classes = np.zeros(0, np.int64)
    if field.classes and field.shape == (len(field.classes),):  # several classes per sample
        classes = (values > 0).sum(0)
    elif field.dtype.kind in "biu" and not field.shape:
        numbers = values.astype(np.float64).clip(-1, MOST_CLASSES).astype(np.int64)
        classes = np.bincount(numbers[numbers >= 0], minlength=MOST_CLASSES + 1)
    kept = [axis + 1 for axis in axes]
    if filled := [axis + 1 for axis in _filled_axes(field)]:  # each row or element is a sample
        values = values if field.concat else np.moveaxis(values, filled, range(1, len(filled) + 1))[real]
        kept = [axis - len(filled) * (axis > filled[0]) for axis in kept]
    if not values.size:
        return None
    return Moments.of(values, kept)._replace(classes=classes[None])


def _state(source: Source, kept: Kept) -> str:
    """A digest of files, samples and some of their values."""
    files = []
    for path in sorted({part.file for part in source.parts}):
        with contextlib.suppress(OSError):  # the parts of some sources are no files
            files.append(os.stat(path))
    some = probes(len(source), min(max(PROBE_BYTES // max(source.spec.nbytes, 1), 2), PROBES))
    places = source.places()
    samples = hashlib.blake2b(np.stack([places.which, places.rows]).tobytes(), digest_size=8).hexdigest()
    times = [(each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in files]
    state = json.dumps([source.fingerprint(), list(kept.items()), samples, times])
    return digest(state, *read(source, some, kept).values())
