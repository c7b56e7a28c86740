"""A reference model of `HDF5Source` in plain numpy: loads every sample with simple loops over ``dataset[...]``."""

import collections
import contextlib
import functools
import glob
import itertools
import os
import pickle
import re
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, Field, HDF5Source
from support.sources.comparison import assert_same_samples


class PartTables(NamedTuple):
    """All rows of one part."""

    file: str
    group: str
    tables: dict[str, tuple[np.ndarray, ...]]  # by batch key the value of each row, and its length if it is ragged
    rows: np.ndarray | None  # the dataset of ``rows``, if that names one


class Model:
    """All samples of a source with these arguments, loaded at once.

    Attributes:
        values: All delivered samples by batch key, shape ``(len, *shape)``.
        places: File, group and row of each sample.
        parts: File, group and number of samples of each part that has any.
    """

    def __init__(self, path, fields, *, layout=None, group=None, rows=None, stride=None, **_):
        given = {key: Field.of(field) for key, field in fields.items()}
        layouts = {next(iter(given)): layout} if isinstance(layout, str) else dict(layout or {})
        keys = {key: [(key, n) for n, _ in enumerate(field.stacked)] or [key] for key, field in given.items()}
        fields = {each: one for key, f in given.items() for each, one in zip(keys[key], f.stacked or [f])}
        layouts |= {each: layouts[key] for key in [*layouts] for each in keys[key]}
        parts = [part_tables(file, name, fields, layouts, rows) for file, name in parts_of(path, group)]
        anchors = selected_anchors(parts, rows) if rows is not None else all_anchors(parts, fields, stride or 1)
        self.places = [(parts[part].file, parts[part].group, row) for part, row in anchors]
        self.values = {}
        for key, field in given.items():
            channels = []
            for each in keys[key]:
                tables = [part.tables[each] for part in parts]
                of, channel = fields[each], "C" in layouts.get(key, "")
                rows = [list(indices_of(parts[n].rows)).index(row) if of.per else row for n, row in anchors]
                found = [sample_at(tables[n][0], of, row, channel=channel) for (n, _), row in zip(anchors, rows)]
                channels += [delivered(np.stack(found), of)] if found else []
            if channels:
                axis = 1 if steps_of(field) is None else 2
                self.values[key] = np.stack(channels, axis) if field.stacked else channels[0]
                if field.pad:
                    self.values[key + "_mask"] = np.stack([real(tables[part][0], field, row) for part, row in anchors])
                if len(tables[0]) > 1:
                    self.values[key + "_length"] = np.array([tables[part][1][row] for part, row in anchors])
        counts = collections.Counter(part for part, _ in anchors)
        self.in_order = [part for part, _ in anchors] == sorted(counts.elements())
        self.parts = [(parts[part].file, parts[part].group, counts[part]) for part in sorted(counts)]

    def __len__(self):
        return len(self.places)


def natural_key(text):
    return [int(piece) if piece.isdecimal() else piece for piece in re.split(r"(\d+)", text)]


def parts_of(path, group):
    """File and group of each part, in the order of the source, named as in `Part`."""
    for item in [path] if isinstance(path, str) else path:
        for file in sorted(glob.glob(item), key=natural_key):
            if group is None:
                yield file, "/"
                continue
            if isinstance(group, list):
                yield from (part for each in group for part in parts_of(file, each))
                continue
            parent, _, last = group.strip("/").rpartition("/")
            pattern = re.compile(re.escape(last).replace(r"\*", ".*").replace(r"\?", "."))
            with h5py.File(file) as opened:
                names = [name for name in (opened[parent] if parent else opened) if pattern.fullmatch(name)]
            yield from ((file, f"/{parent}/{name}".replace("//", "/")) for name in sorted(names, key=natural_key))


def part_tables(file, group, fields, layouts, rows):
    with h5py.File(file) as opened:
        tables = {key: table_of(opened, group, field, layouts.get(key)) for key, field in fields.items()}
        row_dataset = table_of(opened, group, Field(rows), None)[0] if isinstance(rows, str) else None
    return PartTables(file, group, tables, row_dataset)


def path_in(group, name):
    return name if name.startswith("/") else f"{group}/{name}"


def table_of(file, group, field, layout):
    """One value per row: rows on axis 0, then channels. A second array holds the lengths of padded rows."""
    name = path_in(group, field.name)
    name, _, member = (name, "", "") if name in file else name.partition(".")
    stored = file[name]
    if isinstance(stored, h5py.Group):
        return {"csr_matrix": dense, "categorical": codes}.get(stored.attrs.get("encoding-type"), padded)(stored, field)
    values = stored[...]
    while member:
        own = next(name for name in values.dtype.names if f"{member}.".startswith(f"{name}."))
        values, member = values[own], member[len(own) + 1 :]
    if layout:
        order = [letter for letter in "NC" if letter in layout]
        order += [letter for letter in layout if letter not in order]
        values = values.transpose([*map(layout.index, order), *range(len(layout), values.ndim)])
    if field.mask_and_scale:
        values = unpacked(values, stored.attrs)
    if field.column is not None:
        values = values[:, field.column]
    if field.lookup is not None:
        values = np.stack([values[number] for number in table_of(file, group, Field(field.lookup), None)[0]])
    return (values,)


def unpacked(values, attributes):
    """Applies the mask and scale attributes of the NetCDF conventions; exact if scale and offset are."""
    wide = values.dtype.itemsize > 2 and values.dtype.newbyteorder("=") != np.dtype("f4")
    scalars = {name: np.asarray(attributes[name]).ravel()[0] for name in attributes}
    missing = np.zeros(values.shape, bool)
    for name in ("_FillValue", "missing_value"):
        if name in scalars:
            missing |= values == scalars[name]
    result = values.astype("f8")
    if values.dtype.kind == "i" and scalars.get("_Unsigned") in ("true", b"true"):
        result[values < 0] += 256.0**values.dtype.itemsize
    result = result * float(scalars.get("scale_factor", 1)) + float(scalars.get("add_offset", 0))
    result[missing] = np.nan
    return result.astype("f8" if wide else "f4")


def dense(group, field):
    data, indices, indptr = (group[name][...] for name in ("data", "indices", "indptr"))
    matrix = np.zeros(tuple(group.attrs["shape"]), data.dtype)
    for row in range(len(matrix)):
        for position in range(indptr[row], indptr[row + 1]):
            matrix[row, indices[position]] = data[position]
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


def steps_of(field):
    """The rows of a window, relative to the anchor; None if rows have no axis of their own."""
    if isinstance(field.offsets, tuple):
        return list(field.offsets)
    return list(range(*field.window)) if isinstance(field.window, tuple) else None


def window_fits(field, row, rows):
    """Whether all rows of a sample exist."""
    return all(0 <= row + step < rows for step in steps_of(field) or [field.window or 0])


def all_anchors(parts, fields, stride):
    """Part and row of each sample."""
    fields = {key: field for key, field in fields.items() if not field.pad}
    first = min((min(steps_of(field) or [field.window or 0]) for field in fields.values()), default=0)
    lengths = [len(next(iter(part.tables.values()))[0]) for part in parts]
    return [
        (part, row)
        for part, rows in enumerate(lengths)
        for row in range(max(0, -first), rows, stride)
        if all(window_fits(field, row, rows) for field in fields.values())
    ]


def selected_anchors(parts, rows):
    """Part and row of each sample that ``rows`` selects."""
    if isinstance(rows, str):
        return [(number, int(row)) for number, part in enumerate(parts) for row in indices_of(part.rows)]
    lengths = [len(next(iter(part.tables.values()))[0]) for part in parts]
    anchors = [(part, row) for part, length in enumerate(lengths) for row in range(length)]
    return [anchors[row] for row in indices_of(np.asarray(rows))]


def indices_of(rows):
    """Row numbers from row numbers or from a mask."""
    return [row for row, selected in enumerate(rows) if selected] if rows.dtype == bool else rows.tolist()


def sample_at(table, field, row, *, channel):
    if steps_of(field) is None:
        return table[row + (field.window or 0)]
    rows = [row + step for step in steps_of(field)]
    sample = np.stack([table[min(max(row, 0), len(table) - 1) if field.pad else row] for row in rows])
    if field.pad == "zero":
        sample[~real(table, field, row)] = 0
    return sample.swapaxes(0, 1) if channel else sample


def real(table, field, row):
    """Which rows of a window are there."""
    return np.array([0 <= row + step < len(table) for step in steps_of(field)])


def delivered(values, field):
    if field.dtype is not None:
        return values.astype(field.dtype)
    if values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(np.int64)
    return values.astype(values.dtype.newbyteorder("="))


def read(source, samples, keys=None):
    """Reads samples into arrays of arbitrary bytes; returns the delivered fields by key."""
    samples = np.asarray(samples, np.int64)
    out = {}
    for key in source.spec.fields if keys is None else keys:
        field = source.spec[key]
        uninitialised = np.full(len(samples) * field.nbytes, 0xA5, np.uint8)
        out[key] = uninitialised.view(field.dtype).reshape((len(samples), *field.stored_shape))
    source.read_into(samples, out)
    return {key: source.spec[key].delivered(array) for key, array in out.items()}


real_path = functools.cache(os.path.realpath)


def place(location):
    """A `Location`, or a part with its number of samples, with file and group spelled as in the model."""
    return real_path(location[0]), "/" + location[1].strip("/"), location[2]


def orders(count):
    """Sample numbers: all forwards, backwards and shuffled; random ones; the last; none."""
    random, everything = np.random.default_rng(count), np.arange(count)
    any_of_them = random.integers(0, count, count + 3)
    return [everything, everything[::-1], random.permutation(count), any_of_them, everything[-1:], everything[:0]]


def read_from(path, fields, samples=None, **options):
    """All samples of a source with these arguments, or the given ones, by key."""
    with contextlib.closing(HDF5Source(path, fields, **options)) as source:
        return read(source, np.arange(len(source)) if samples is None else samples)


def assert_reads(source, samples, model):
    """Asserts that a source reads these samples as the model has them."""
    actual = read(source, samples)
    for key, values in model.values.items():
        named = {"key": key, "samples": samples, "places": model.places}
        assert_same_samples(actual[key], values[samples], **named)


def assert_is(source, model):
    """Asserts length, keys, shapes, types, places, and values in several orders."""
    assert len(source) == len(model)
    assert list(source.spec.fields) == list(model.values)
    for key, expected in model.values.items():
        assert (source.spec[key].shape, source.spec[key].dtype) == (expected.shape[1:], expected.dtype)
    for samples in orders(len(model)):
        assert_reads(source, samples, model)
        assert [place(location) for location in source.locate(samples)] == [place(model.places[n]) for n in samples]
    if model.in_order:  # otherwise the samples of a part are not consecutive
        parts = [place((*part[:2], part.samples)) for part in source.parts if part.samples]
        assert parts == list(map(place, model.parts))


READINGS = "decoded", "copied", "locked"


def check(path, fields, *, reading=None, **options):
    """Asserts that a source with these arguments, and a pickled copy of it, equal their model; returns the model.

    ``reading`` is how the chunks should be read. "decoded" ones are copied if they lack filters and hold whole samples.
    """
    model = Model(path, fields, **options)
    with contextlib.closing(HDF5Source(path, fields, **options)) as source:
        assert source.chunks.reading in {None: READINGS, "decoded": READINGS[:2]}.get(reading, (reading,))
        assert_is(source, model)
        with contextlib.closing(pickle.loads(pickle.dumps(source))) as copied:
            assert_reads(copied, np.arange(len(model)), model)
            assert copied.locate([len(model) - 1]) == source.locate([len(model) - 1])
            assert (copied.spec, list(copied.parts)) == (source.spec, list(source.parts))
    return model


def check_loader(path, fields, *, shuffle, workers, passes=2, worker_kind="auto", **options):
    """Asserts that a loader delivers the samples of the model, each once per pass."""
    model = Model(path, fields, **options)
    numbers = {place(location): number for number, location in enumerate(model.places)}
    assert len(numbers) == len(model)
    order = {"batch_size": 7, "shuffle": shuffle, "shuffle_chunks": 2, "return_indices": True}
    reading = {"workers": workers, "worker_kind": worker_kind}
    with (
        contextlib.closing(HDF5Source(path, fields, **options)) as source,
        AsyncLoader(source, order | reading) as loader,
    ):
        for _ in range(passes):
            seen = []
            for batch in loader:
                samples = [numbers[place(location)] for location in source.locate(batch["index"].numpy())]
                for key, values in model.values.items():
                    named = {"key": key, "samples": samples, "places": model.places}
                    assert_same_samples(batch[key].numpy(), values[samples], **named)
                seen += samples
            assert (seen if shuffle == "none" else sorted(seen)) == list(range(len(model)))


def assert_names(message, words, path):
    """Asserts that a message holds these texts and, outside the folder's name, these numbers."""
    bare = message.replace(os.path.dirname(str(path)), "")
    for word in words:
        match = word in message if isinstance(word, str) else re.search(rf"(?<![\w.]){word}(?!\d)", bare)
        assert match, f"{word!r} is not in {message!r}"


def refused(error, words, path, fields, **options):
    """Asserts that building a source raises an error that names these words; returns it."""
    with pytest.raises(error) as caught:
        HDF5Source(path, fields, **options).close()
    assert_names(str(caught.value), words, path)
    return caught.value


def refused_when_read(error, words, path, fields, samples, **options):
    """Asserts that building a source succeeds and reading these samples raises an error that names these words."""
    with contextlib.closing(HDF5Source(path, fields, **options)) as source, pytest.raises(error) as caught:
        read(source, samples)
    assert_names(str(caught.value), words, path)
    assert caught.value.sample_id is None or caught.value.sample_id in np.asarray(samples)
    return caught.value
