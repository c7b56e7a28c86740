"""What `HDF5Source` should deliver, by numpy alone: every sample at once, by loops over ``dataset[...]``."""

from __future__ import annotations

import collections
import contextlib
import glob
import itertools
import os
import pickle
import re
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, Field, HDF5Source, LoaderOptions


class Slab(NamedTuple):
    """A whole part: its file, its group, by batch key the value (and perhaps the length) of each row, chosen rows."""

    file: str
    group: str
    tables: dict[str, tuple[np.ndarray, ...]]
    rows: np.ndarray | None


class Model:
    """The samples of a source with these arguments; nothing here is clever, and nothing is lazy.

    Attributes:
        values: By batch key all samples as they are delivered, shape ``(len, *shape)``.
        places: File, group and row of each sample.
        parts: File, group and number of samples of each part that has any.
    """

    def __init__(self, path, fields, *, layout=None, group=None, rows=None, stride=None, **_):
        fields = {key: Field.of(field) for key, field in fields.items()}
        layouts = {next(iter(fields)): layout} if isinstance(layout, str) else dict(layout or {})
        slabs = [slab_of(file, name, fields, layouts, rows) for file, name in parts_of(path, group)]
        anchors = chosen(slabs, rows) if rows is not None else every(slabs, fields, stride or 1)
        self.places = [(slabs[part].file, slabs[part].group, row) for part, row in anchors]
        self.values = {}
        for key, field in fields.items():
            channel = "C" in layouts.get(key, "")
            of_part = [slab.tables[key] for slab in slabs]
            samples = [taken(of_part[part][0], field, row, channel=channel) for part, row in anchors]
            if samples:
                self.values[key] = delivered(np.stack(samples), field)
                if len(of_part[0]) > 1:
                    self.values[key + "_length"] = np.array([of_part[part][1][row] for part, row in anchors])
        counts = collections.Counter(part for part, _ in anchors)
        self.in_order = [part for part, _ in anchors] == sorted(counts.elements())
        self.parts = [(slabs[part].file, slabs[part].group, counts[part]) for part in sorted(counts)]

    def __len__(self):
        return len(self.places)


def natural(text):
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", text)]


def parts_of(path, group):
    """Files, and in each file the groups, with names as in `Part`."""
    for item in [path] if isinstance(path, str) else path:
        for file in sorted(glob.glob(item), key=natural):
            if group is None:
                yield file, "/"
                continue
            above, _, last = group.strip("/").rpartition("/")
            pattern = re.compile(re.escape(last).replace(r"\*", ".*").replace(r"\?", "."))
            with h5py.File(file) as opened:
                names = [name for name in (opened[above] if above else opened) if pattern.fullmatch(name)]
            yield from ((file, f"/{above}/{name}".replace("//", "/")) for name in sorted(names, key=natural))


def slab_of(file, group, fields, layouts, rows):
    with h5py.File(file) as opened:
        tables = {key: table_of(opened, group, field, layouts.get(key)) for key, field in fields.items()}
        chosen_rows = opened[inside(group, rows)][...] if isinstance(rows, str) else None
    return Slab(file, group, tables, chosen_rows)


def inside(group, name):
    return name if name.startswith("/") else f"{group}/{name}"


def table_of(file, group, field, layout):
    """One value per row: samples on axis 0, then channels; a second array holds lengths where they vary."""
    stored = file[inside(group, field.name)]
    if isinstance(stored, h5py.Group):
        return {"csr_matrix": dense, "categorical": codes}.get(stored.attrs.get("encoding-type"), padded)(stored, field)
    values = stored[...]
    if layout:
        order = [letter for letter in "NC" if letter in layout]
        order += [letter for letter in layout if letter not in order]
        values = values.transpose([layout.index(letter) for letter in order])
    if field.mask_and_scale:
        values = unpacked(values, stored.attrs)
    if field.column is not None:
        values = values[:, field.column]
    if field.lookup is not None:
        values = np.stack([values[number] for number in file[inside(group, field.lookup)][...]])
    return (values,)


def unpacked(values, attributes):
    """As NetCDF means it; exact where scale and offset are."""
    wide = values.dtype.itemsize > 2 and values.dtype.newbyteorder("=") != np.dtype("f4")
    given = {name: np.asarray(attributes[name]).ravel()[0] for name in attributes}
    marks = [given[name] for name in ("_FillValue", "missing_value") if name in given]
    absent = np.zeros(values.shape, bool)
    for mark in marks:
        absent |= values == mark
    result = values.astype("f8")
    if values.dtype.kind == "i" and given.get("_Unsigned") in ("true", b"true"):
        result[values < 0] += 256.0**values.dtype.itemsize
    result = result * float(given.get("scale_factor", 1)) + float(given.get("add_offset", 0))
    result[absent] = np.nan
    return result.astype("f8" if wide else "f4")


def dense(group, field):
    data, indices, indptr = (group[name][...] for name in ("data", "indices", "indptr"))
    matrix = np.zeros(tuple(group.attrs["shape"]), data.dtype)
    for row in range(len(matrix)):
        for place in range(indptr[row], indptr[row + 1]):
            matrix[row, indices[place]] = data[place]
    return (matrix,)


def codes(group, field):
    return (group["codes"][...],)


def padded(group, field):
    values, offsets = group["values"][...], group["offsets"][...]
    lengths = np.array([end - begin for begin, end in itertools.pairwise(offsets.tolist())], np.int64)
    table = np.zeros((len(lengths), field.max_length or max(lengths), *values.shape[1:]), values.dtype)
    for row, length in enumerate(lengths):
        table[row, :length] = values[offsets[row] : offsets[row + 1]]
    return table, lengths


def lies_inside(field, row, rows):
    """Whether all rows that a sample takes are there."""
    window = field.window
    first, end = window if isinstance(window, tuple) else (window or 0, (window or 0) + 1)
    return row + first >= 0 and row + end <= rows


def every(slabs, fields, stride):
    first = min(field.window[0] if isinstance(field.window, tuple) else field.window or 0 for field in fields.values())
    lengths = [len(next(iter(slab.tables.values()))[0]) for slab in slabs]
    return [
        (part, row)
        for part, rows in enumerate(lengths)
        for row in range(max(0, -first), rows, stride)
        if all(lies_inside(field, row, rows) for field in fields.values())
    ]


def chosen(slabs, rows):
    if isinstance(rows, str):
        return [(part, int(row)) for part, slab in enumerate(slabs) for row in indices_of(slab.rows)]
    lengths = [len(next(iter(slab.tables.values()))[0]) for slab in slabs]
    everything = [(part, row) for part, length in enumerate(lengths) for row in range(length)]
    return [everything[row] for row in indices_of(np.asarray(rows))]


def indices_of(rows):
    return [row for row, wanted in enumerate(rows) if wanted] if rows.dtype == bool else rows.tolist()


def taken(table, field, row, *, channel):
    if not isinstance(field.window, tuple):
        return table[row + (field.window or 0)]
    sample = np.stack([table[row + step] for step in range(*field.window)])
    return sample.swapaxes(0, 1) if channel else sample


def delivered(values, field):
    if field.dtype is not None:
        return values.astype(field.dtype)
    if values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(np.int64)
    return values.astype(values.dtype.newbyteorder("="))


# -- asking a source ---------------------------------------------------------------------------------------------------


def read(source, samples, keys=None):
    """What `read_into` makes of arrays full of rubbish, as it is delivered."""
    samples = np.asarray(samples, np.int64)
    out = {}
    for key in source.spec.fields if keys is None else keys:
        field = source.spec[key]
        rubbish = np.full(len(samples) * field.nbytes, 0xA5, np.uint8)
        out[key] = rubbish.view(field.dtype).reshape((len(samples), *field.stored_shape))
    source.read_into(samples, out)
    return {key: source.spec[key].delivered(array) for key, array in out.items()}


def assert_same(got, wanted, *, close=False):
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if close:
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6 * np.nanmax(np.abs(wanted), initial=0))
    else:
        np.testing.assert_array_equal(got, wanted)


def place(location):
    """A location, or a part, as the model names it."""
    return os.path.realpath(location[0]), "/" + location[1].strip("/"), location[2]


def orders(count):
    random = np.random.default_rng(count)
    everything = np.arange(count)
    return [everything, everything[::-1], random.permutation(count), random.integers(0, count, count + 3), [count - 1]]


def assert_is(source, model, *, close=False):
    """Length, keys, shapes, types, places, and values in many orders."""
    assert len(source) == len(model)
    assert list(source.spec.fields) == list(model.values)
    for key, wanted in model.values.items():
        assert (source.spec[key].shape, source.spec[key].dtype) == (wanted.shape[1:], wanted.dtype)
    for samples in orders(len(model)):
        got = read(source, samples)
        for key, wanted in model.values.items():
            assert_same(got[key], wanted[samples], close=close)
    if model.in_order:  # else the samples of a part do not follow each other
        assert [place((*part[:2], part.samples)) for part in source.parts if part.samples] == [
            place(part) for part in model.parts
        ]
    everywhere = [place(where) for where in model.places]
    assert [place(where) for where in source.locate(np.arange(len(model)))] == everywhere
    assert [place(where) for where in source.locate([len(model) - 1, 0])] == [everywhere[-1], everywhere[0]]


def check(path, fields, *, close=False, **options):
    """A source of these arguments, and a pickled copy of it, are the model of them; returns the model."""
    model = Model(path, fields, **options)
    with contextlib.closing(HDF5Source(path, fields, **options)) as source:
        assert_is(source, model, close=close)
        with contextlib.closing(pickle.loads(pickle.dumps(source))) as copied:
            got = read(copied, np.arange(len(model)))
            for key, wanted in model.values.items():
                assert_same(got[key], wanted, close=close)
            assert copied.locate([len(model) - 1]) == source.locate([len(model) - 1])
            assert (copied.spec, list(copied.parts)) == (source.spec, list(source.parts))
    return model


def check_loader(path, fields, *, shuffle, workers, passes=2, **options):
    """What a loader hands out is, for its ids, what the model has; each sample comes once per pass."""
    model = Model(path, fields, **options)
    numbers = {place(where): number for number, where in enumerate(model.places)}
    assert len(numbers) == len(model)
    asked = LoaderOptions(batch_size=7, shuffle=shuffle, shuffle_chunks=2, workers=workers, return_indices=True)
    with (
        contextlib.closing(HDF5Source(path, fields, **options)) as source,
        AsyncLoader(source, asked) as loader,
    ):
        for _ in range(passes):
            seen = []
            for batch in loader:
                where = [numbers[place(location)] for location in source.locate(batch["index"].numpy())]
                for key, wanted in model.values.items():
                    assert_same(batch[key].numpy(), wanted[where])
                seen += where
            assert (seen if shuffle == "none" else sorted(seen)) == list(range(len(model)))


# -- errors ------------------------------------------------------------------------------------------------------------


def assert_names(message, words, path):
    """A message holds these texts and, outside the folder's name, these numbers."""
    bare = message.replace(os.path.dirname(str(path)), "")
    for word in words:
        found = word in message if isinstance(word, str) else re.search(rf"(?<![\w.]){word}(?!\d)", bare)
        assert found, f"{word!r} is not in {message!r}"


def refused(error, words, path, fields, **options):
    """Building a source is an error that names these; returns it."""
    with pytest.raises(error) as caught:
        HDF5Source(path, fields, **options).close()
    assert_names(str(caught.value), words, path)
    return caught.value


def refused_when_read(error, words, path, fields, samples, **options):
    """Reading these samples is an error that names these words; building the source is none. Returns the error."""
    with contextlib.closing(HDF5Source(path, fields, **options)) as source:
        return _refused(error, words, path, source, samples)


def _refused(error, words, path, source, samples):
    with pytest.raises(error) as caught:
        read(source, samples)
    assert_names(str(caught.value), words, path)
    assert caught.value.sample_id is None or caught.value.sample_id in np.asarray(samples)
    return caught.value


def refused_sooner_or_later(error, words, path, fields, **options):
    """Building the source, or else reading all its samples, is an error that names these words; returns it."""
    try:
        source = HDF5Source(path, fields, **options)
    except error as early:
        assert_names(str(early), words, path)
        return early
    with contextlib.closing(source):
        return _refused(error, words, path, source, np.arange(len(source)))
