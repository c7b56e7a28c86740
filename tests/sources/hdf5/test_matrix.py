"""Every storage × every type, layout, field and order of HDF5 samples, and files that have lived, against h5py."""

import itertools
import tempfile

import h5py
import numpy as np
import pytest
from h5py import h5d
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from support.files.hdf5 import (
    DTYPES,
    EARLY,
    ENUMS,
    FAST,
    INCREMENTAL,
    LATE,
    LIBVERS,
    PIPELINE,
    STORAGES,
    create,
    libhdf5,
    numbered,
    stored_as,
)
from support.files.values import some
from support.sources.oracle import Model, check, check_loader, refused

from lit_async_data import Field, FormatError

pytestmark = pytest.mark.usefixtures("no_extra_codecs")
SIZES = {"N": 11, "C": 3, "H": 5, "W": 4}
FIRST = ["NC", "NCHW", "NHWC", "NHCW", "NT", "NTHWC", "NDZ", "NAB", "NZCQ"]
MIDDLE = ["TNC", "CNT", "HNWC", "CHNW", "TNZ", "ZDNTC"]
LAST = ["CN", "TN", "HWCN", "CHWN", "HCWN", "DZN", "AZCN"]
LAYOUTS = FIRST + MIDDLE + LAST


def values_of(shape, dtype):
    """Any bit pattern; of labels, those that int64 holds."""
    values = some(shape, dtype)
    return values >> np.array(1, dtype) if np.dtype(dtype).kind == "u" and len(shape) == 1 else values


@pytest.mark.parametrize("number", range(len(DTYPES)), ids=lambda number: str(DTYPES[number]))
def test_every_storage_of_every_type(path, number):
    """Each storage meets each layout, too: one for each type, in turn; and of every other type, numbers alone."""
    dtype, layouts = DTYPES[number], {}
    for turn, storage in enumerate(STORAGES):
        layouts[storage] = LAYOUTS[(number + turn) % len(LAYOUTS)]
        if (number + turn) % 2:
            layouts[f"{storage} alone"] = "N"
    file_options = {"libver": LIBVERS[number % len(LIBVERS)], "userblock_size": [0, 512][number % 2]}
    with h5py.File(path, "w", **file_options) as file:
        for name, layout in layouts.items():
            shape = tuple(SIZES.get(letter, 2) for letter in layout)
            arguments, _ = stored_as(name.removesuffix(" alone"), shape)
            create(file, name, dtype=dtype, **arguments)[...] = values_of(shape, dtype)
    for name, layout in layouts.items():
        check(path, {name: name}, layout=layout, reading=STORAGES[name.removesuffix(" alone")][1])


PLAIN = [("onset", ">i8"), ("z", "c8"), ("count", ">u2", (3,)), ("cat", ENUMS[1]), ("ok", "?"), ("x.y", "f2")]
TEXT = h5py.string_dtype()
RECORDS = {
    "plain": [*PLAIN, ("pos", [("x", ">f4"), ("y", "u8")])],
    "padded": np.dtype([*PLAIN, ("pos", np.dtype([("x", ">f4"), ("y", "u8")], align=True))], align=True),
    # In memory they take other bytes than in the file.
    "text": [("note", TEXT), *PLAIN, ("notes", TEXT, (2,)), ("pos", [("x", ">f4"), ("note", TEXT), ("y", "u8")])],
}


@pytest.mark.parametrize("record", RECORDS)
def test_members_of_every_storage(path, record):
    dtype = np.dtype(RECORDS[record])
    with h5py.File(path, "w", userblock_size=512) as file:
        file["text.onset"] = np.arange(11)  # a dataset of this very name
        for storage, (shape, key) in itertools.product(STORAGES, {(11,): "", (2, 11): " across"}.items()):
            values = np.zeros(shape, dtype)
            for number, name in enumerate(("onset", "z", "count", "ok", "x.y")):
                values[name] = some(values[name].shape, values[name].dtype, number)
            values["cat"] = np.arange(11) % 2
            values["pos"]["x"], values["pos"]["y"] = some(shape, ">f4", 7), numbered(shape)
            fill = None
            if record == "text":
                values["note"], values["notes"], values["pos"]["note"] = "a", ["bc", "d"], "efg"
            else:
                fill = values[(0,) * len(shape)]
            dataset = create(file, storage + key, dtype=dtype, fill=fill, **stored_as(storage, shape)[0])
            dataset[..., 4:] = values[..., 4:]
    for storage, (_, reading) in STORAGES.items():
        fields = {name: f"{storage}.{name}" for name in ("onset", "z", "count", "cat", "ok", "x.y", "pos.x", "pos.y")}
        fields |= {"column": Field(f"{storage}.count", column=1), "window": Field(f"{storage}.count", window=(-1, 3))}
        check(path, fields | {"dataset": "text.onset"}, reading=reading)
        across = {"onset": f"{storage} across.onset", "count": Field(f"{storage} across.count", window=(0, 2))}
        check(path, across, layout=dict.fromkeys(across, "CN"), reading=reading)


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage != "compact"])
def test_large_channels_of_every_storage(path, storage):
    shape, dtypes = (11, 60, 50), {"a": "f4", "b": ">f4", "c": "f4"}
    with h5py.File(path, "w") as file:
        for number, (name, dtype) in enumerate(dtypes.items()):
            create(file, name, dtype=dtype, **stored_as(storage, shape)[0])[...] = some(shape, "f4", number)
    fields = {"x": list(dtypes), "w": Field(["c", "b"], window=(0, 3))}
    fields["last"] = Field(["b", Field("c", window=(-2, 5, 3), pad="last")], window=(-2, 5, 3), pad="last")
    check(path, fields, reading=STORAGES[storage][1])
    check(path, fields, memory_map=False)


SHAPE = (13, 7, 5)
LOSSLESS = [
    *([name] for name in ("gzip", "shuffle", "fletcher32", "lzf", "scaleoffset", "nbit")),
    *itertools.permutations(PIPELINE, 2),
    *itertools.permutations(PIPELINE, 3),
    ["gzip", "shuffle", "gzip"],
    ["shuffle", "lzf", "fletcher32"],
    ["scaleoffset", "shuffle", "gzip", "fletcher32"],
]


@pytest.mark.parametrize("filters", LOSSLESS, ids=" ".join)
def test_filters_in_any_order_and_number(path, filters):
    # HDF5 1.14 cannot read values that it stored with scale-offset, if they need all bits.
    random = "scaleoffset" not in filters or h5py.version.hdf5_version_tuple >= (2,)
    with h5py.File(path, "w") as file:
        for dtype in ("u1", "i4", ">i8"):
            values = (numbered(SHAPE) // 50).astype(dtype)
            if random:
                values[4:] = some((9, 7, 5), dtype)
            create(file, dtype, SHAPE, dtype, chunks=(4, 3, 5), filters=filters)[...] = values
    reading = "locked" if list(filters) == ["shuffle"] or not set(filters) <= FAST else None
    if list(filters) == [name for name in PIPELINE if name in filters] and not reading:
        reading = "decoded"
    for dtype in ("u1", "i4", ">i8"):
        check(path, {"x": dtype}, reading=reading)


FILLS = {
    "0": {},
    "7": {"fill": 7},
    "-1": {"fill": -1},
    # libhdf5 leaves its output buffer unchanged where there is no value; h5py passes zeros.
    "never": {"fill_time": h5d.FILL_TIME_NEVER},
    "never 7": {"fill_time": h5d.FILL_TIME_NEVER, "fill": 7},
    **({"undefined": {"undefined_fill": True}} if libhdf5() else {}),
}


@pytest.mark.parametrize(
    ("alloc", "libver"), [(EARLY, "earliest"), (EARLY, "v110"), (LATE, "v110"), (INCREMENTAL, "earliest")]
)
@pytest.mark.parametrize("filters", [[], PIPELINE], ids=str)
def test_chunks_never_written(path, alloc, libver, filters):
    chunks = {"tiles": (4, 3, 2), "slabs": (4, 7, 5), "rows": (1, 7, 5)}
    with h5py.File(path, "w", libver=(libver, "v110")) as file:
        for (name, shape), (fill, given) in itertools.product(chunks.items(), FILLS.items()):
            options = {"chunks": shape, "filters": filters, "alloc": alloc, **given}
            dataset = create(file, f"{name} {fill}", SHAPE, ">i4", **options)
            dataset[5:7, 2:4] = 1
            dataset[12, 6, 4] = 2
    for name, fill in itertools.product(chunks, FILLS):
        left = alloc == INCREMENTAL and fill in {"never", "never 7", "undefined"}
        layout = "HWN" if name == "tiles" else "NHW"
        fields = {"x": f"{name} {fill}", "w": Field(f"{name} {fill}", window=(0, 3))}
        check(path, fields, layout=dict.fromkeys(fields, layout), reading="locked" if left else "decoded")


@pytest.mark.parametrize("alloc", [EARLY, LATE])
@pytest.mark.parametrize("userblock", [0, 512])
def test_a_contiguous_dataset_never_written(path, alloc, userblock):
    """With a user block libhdf5 gives its last byte as the offset of such a dataset, where zeros may lie."""
    fills = ["0", "7", "never", "never 7"]
    with h5py.File(path, "w", userblock_size=userblock) as file:
        for fill in fills:
            create(file, f"{fill} alone", (9,), "i1", alloc=alloc, **FILLS[fill])
            create(file, fill, (2, 2, 3, 1), "i1", alloc=alloc, **FILLS[fill])
    for fill in fills:
        reading = None if "never" in fill else "copied" if alloc == EARLY else "locked"
        for name in (f"{fill} alone", fill):
            check(path, {"x": name}, reading=reading)


KINDS = {
    "contiguous": {},
    "big-endian": {"dtype": ">i2"},
    "chunked": {"chunks": 6},
    "gzip": {"chunks": 6, "compression": "gzip"},
    "gzip rows": {"chunks": 1, "compression": "gzip", "shuffle": True, "dtype": ">i2"},
}
PARTS = [("site1.h5", 2, 31), ("site1.h5", 10, 40), ("site1.h5", 1, 9), ("site2.h5", 1, 22), ("site2.h5", 5, 27)]


def write(group, name, values, kind, **more):
    options = {"dtype": values.dtype, **KINDS[kind], **more}
    if "chunks" in options:
        options["chunks"] = tuple(min(options["chunks"], size) for size in values.shape)
    group.create_dataset(name, data=values, **options)


def write_part(group, kind, first, rows):
    """A recording whose values begin with ``first``, with every kind of field."""
    random = np.random.default_rng(rows)
    storage = {key: value for key, value in KINDS[kind].items() if key != "dtype"}
    write(group, "eeg", (np.arange(3 * rows).reshape(3, rows) + first).astype("i2"), kind)
    write(group, "audio", np.arange(rows, dtype="i2") + first, kind)
    write(group, "table", (np.arange(rows * 4).reshape(rows, 4) + first).astype("i2"), kind)
    write(group, "other", (np.arange(rows * 4).reshape(rows, 4) * 3 - first).astype("i2"), kind)
    write(group, "ecg", (np.arange(3 * rows).reshape(3, rows) * 3 - first).astype("i2"), kind)
    write(group, "packed", (np.arange(rows * 2).reshape(rows, 2) % 50).astype("i2"), kind)
    group["packed"].attrs.update(scale_factor=0.5, add_offset=16.0, _FillValue=np.int16(7))
    write(group, "animal", (np.arange(rows) % 3).astype("u1"), kind, dtype=ANIMALS)
    write(group, "stage", np.arange(rows, dtype="i2") % 5, kind)
    group["night"], group["age"] = (np.arange(rows) // 16).astype("u1"), np.array([30, 40, 50], "f4") + first
    group["train"], group["order"] = np.arange(rows) % 3 == 1, np.array([8, 3, 6])
    group["people"] = np.array([(30, "a"), (40, "b"), (50, "c")], [("age", ">f4"), ("name", TEXT)])
    picks = [(8, 5 + first, "a"), (3, 7 - first, "b"), (6, first, "a")]
    group["picks"] = np.array(picks, [("row", "u2"), ("label", ">i2"), ("kind", TEXT)])
    write(group, "marks", np.arange(6).reshape(3, 2).astype("i2") - first, kind)
    record = np.zeros(rows, [("night", "i1"), ("at", [("x", ">f4"), ("z", "i2", (3,))]), ("kind", ANIMALS)])
    record["night"], record["kind"] = np.arange(rows) % 3, np.arange(rows) % 2
    record["at"]["x"], record["at"]["z"] = np.arange(rows) + first, random.integers(-99, 99, (rows, 3))
    write(group, "record", record, kind, dtype=record.dtype)
    matrix = random.integers(1, 100, (rows, 12)) * (random.random((rows, 12)) < 0.3)
    at, columns = np.nonzero(matrix)
    cells = group.create_group("cells")
    cells.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": matrix.shape})
    ends = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=rows))])
    for name, values in {"data": matrix[at, columns].astype("i2"), "indices": columns, "indptr": ends}.items():
        write(cells, name, values, kind, **({"dtype": values.dtype} if name != "data" else {}))
    lengths = random.integers(0, 9, rows)
    lengths[0] = 9
    words = group.create_group("words")
    write(words, "values", np.arange(lengths.sum(), dtype="i2") + first, kind)
    words["offsets"] = np.cumsum([0, *lengths])
    kinds = group.create_group("kind")
    kinds.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
    options = {**storage, "chunks": (6,)} if storage else {}
    kinds.create_dataset("codes", data=(np.arange(rows) % 4).astype("i1"), **options)
    kinds["categories"] = np.array(["a", "b", "c", "d"], object)


ANIMALS = h5py.enum_dtype({"cow": 2, "cat": 0, "dog": 1}, "u1")


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    """Two files of three and two recordings, each stored in another way."""
    folder = tmp_path_factory.mktemp("ward")
    for number, (kind, (name, patient, rows)) in enumerate(zip(KINDS, PARTS, strict=True)):
        with h5py.File(folder / name, "a") as file:
            write_part(file.create_group(f"patient_{patient}"), kind, 50 * number, rows)
    return f"{folder}/site*.h5"


def use(*, layout=None, rows=None, stride=None, **fields):
    return {"fields": fields, "layout": layout, "rows": rows, "stride": stride}


EEG = {"x": Field("eeg", window=(-2, 6)), "y": Field("stage", classes=list("abcde")), "layout": "CN"}
USES = {
    "recordings": use(x="eeg", y="stage", layout="CN"),
    "columns": use(x=Field("table", column=0), y=Field("table", column=3, dtype="int16")),
    "packed": use(x=Field("packed", mask_and_scale=True), y="animal"),
    "a packed column": use(x=Field("packed", mask_and_scale=True, column=1, dtype="float16")),
    "lookup in columns": use(
        x=Field("table", lookup="night", column=3, dtype="int64"),
        packed=Field("packed", lookup="night", column=1, mask_and_scale=True),
    ),
    "channels": use(x=["table", "other"], y=["stage", Field("other", column=1), "record.night"], a="audio"),
    "channels, cast": use(x=Field(["table", "other"], dtype="float32"), y=["stage", "audio"]),
    "windows of channels across": use(x=Field(["ecg", "eeg"], window=(0, 3)), layout="WN"),
    "windows of channels, padded": use(
        x=Field(["other", "table"], window=(-5, 12), pad="last"),
        y=Field(["stage", "audio"], window=(-9, 5, 4), pad="zero", dtype="int64"),
        packed=Field(["packed", "packed"], mask_and_scale=True, window=(0, 5), pad="last"),
    ),
    "members": use(z="record.at.z", kind="record.kind", age=Field("people.age", lookup="night")),
    "windows of members": use(
        x=Field("record.at.x", window=(-3, 5), pad="zero"),
        z=Field("record.at.z", column=2, window=(-3, 1, 2), dtype="float32"),
        age=Field("people.age", lookup="record.night"),
        rows="picks.row",
    ),
    "values of anchors": use(
        y=Field("picks.label", per="anchor"),
        x=Field("eeg", window=(-3, 1)),
        marks=Field("marks", per="anchor", dtype="float32"),
        both=Field(["picks.label", "picks.row"], per="anchor", dtype="int64"),
        layout={"x": "CN"},
        rows="picks.row",
    ),
    "sparse, cast": use(x=Field("cells", dtype="float32")),
    "ragged": use(x=Field("words", max_length=10), y=Field("animal", classes=["cat", "dog", "cow", "elk"])),
    "ragged, cast": use(x=Field("words", max_length=9, dtype="float32"), y="night"),
    "windows with gaps": use(**EEG, stride=11),
    "windows of several chunks": use(x=Field("audio", window=(-3, 17)), y=Field("table", window=(5, 6))),
    "windows of everything": use(
        next=Field("eeg", window=8),
        ages=Field("age", lookup="night", window=(0, 2)),
        columns=Field("table", column=1, window=(-1, 3), dtype="float32"),
        packed=Field("packed", mask_and_scale=True, window=(0, 5)),
        layout={"next": "CN"},
        stride=2,
    ),
    "padded": use(x=Field("eeg", window=(-5, 6), pad="last"), y="stage", layout="CN"),
    "every fifth, padded": use(
        x=Field("eeg", window=(-15, 1, 5), pad="last"), y=Field("table", window=(-9, 5, 4), pad="zero"), layout="CN"
    ),
    "mask": use(x="eeg", y="stage", layout="CN", rows="train"),
    "indices": use(x=Field("audio", window=(-3, 1)), y="stage", rows="order"),
    "rows": use(**EEG, rows=np.array([3, 2, 11, 17, 42, 60, 73, 90, 110])),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_every_storage(ward, use):
    for mapped in (True, False) if "channels" in use else (True,):
        check(ward, group="patient_*", memory_map=mapped, **USES[use])


# Each use meets one in turn.
HANDED_OUT = list(zip(USES, itertools.cycle([("chunk", 0), ("none", 2), ("chunk", 2), ("global", 2)])))


@pytest.mark.parametrize(("use", "way"), HANDED_OUT)
def test_what_the_loader_hands_out_is_right_for_its_ids(ward, use, way):
    check_loader(ward, group="patient_*", shuffle=way[0], workers=way[1], **USES[use])


@pytest.mark.processes
@pytest.mark.parametrize("shuffle", ["none", "chunk"])
def test_what_reader_processes_hand_out_is_right_for_its_ids(ward, shuffle):
    options = USES["padded"] | {"shuffle": shuffle, "workers": 1, "worker_kind": "process", "passes": 1}
    check_loader(ward, group="patient_*", **options)


def may_have_raw_edges(filters):
    """Whether edge chunks may be left unfiltered here; without gzip there is a test of its own."""
    return libhdf5() is not None and (not set(filters) <= FAST or "gzip" in filters)


@st.composite
def storages(draw, shape, dtype):
    """Arguments of `create` for any storage of this shape."""
    arguments = {"alloc": draw(st.sampled_from([None, EARLY, LATE]))}
    arguments["fill_time"] = draw(st.sampled_from([None, h5d.FILL_TIME_ALLOC, h5d.FILL_TIME_IFSET]))
    plain = not h5py.check_enum_dtype(dtype)
    if plain and dtype.kind in "iuf" and draw(st.booleans()):
        arguments["fill"] = 3
    how = draw(st.sampled_from(["contiguous", "compact", *["chunked"] * 4]))
    if how == "compact":
        arguments.update(compact=True, alloc=EARLY)
    if how == "chunked":
        maxshape = tuple(draw(st.sampled_from([size, size, size + 3, None])) for size in shape)
        limits = [size if limit == size else size + 3 for size, limit in zip(shape, maxshape)]
        filters = draw(st.lists(st.sampled_from(PIPELINE), max_size=3))
        if draw(st.integers(0, 3)) == 0:
            filters = draw(st.sampled_from([["lzf"], ["shuffle", "lzf"]]))
        if plain and dtype.kind in "iu" and draw(st.integers(0, 7)) == 0:
            filters = ["scaleoffset", *filters]
        arguments.update(
            maxshape=maxshape,
            chunks=tuple(draw(st.integers(1, limit)) for limit in limits),
            filters=filters,
            raw_edges=may_have_raw_edges(filters) and draw(st.integers(0, 7)) == 0,
        )
    return arguments


@st.composite
def fields_of(draw, dtype):
    """One to three fields of one dataset, each with a window, a column or a type of its own."""
    window = st.one_of(
        st.none(),
        st.integers(-4, 4),
        st.tuples(st.integers(-5, 4), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))),
        st.tuples(st.integers(-5, 4), st.integers(1, 9), st.integers(1, 4)).map(lambda n: (n[0], n[0] + n[1], n[2])),
        st.lists(st.integers(-5, 5), min_size=1, max_size=4),
    )
    fields = {}
    for key in "xyz"[: draw(st.integers(1, 3))]:
        chosen = draw(window)
        pad = draw(st.sampled_from([None, "last", "zero"])) if isinstance(chosen, tuple | list) else None
        rows = {"offsets" if isinstance(chosen, list) else "window": chosen}
        to = draw(st.sampled_from([None, None, "f8"])) if dtype.kind in "iu" and dtype.itemsize < 8 else None
        fields[key] = Field("data", **rows, pad=pad, dtype=to)
    return fields


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    letters=st.text("CTDZHWXYA", max_size=4).filter(lambda text: len(set(text)) == len(text)),
    rows=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    stride=st.one_of(st.none(), st.integers(1, 5)),
    file_options=st.fixed_dictionaries(
        {"userblock_size": st.sampled_from([0, 512]), "libver": st.sampled_from(LIBVERS), "track_order": st.booleans()}
    ),
    data=st.data(),
)
def test_any_fields_of_any_datasets(*, letters, rows, dtype, stride, file_options, data):
    layout = "".join(data.draw(st.permutations("N" + letters)))
    fields = data.draw(fields_of(dtype))
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/any.h5"
        with h5py.File(path, "w", **file_options) as file:
            for number, count in enumerate(rows):
                shape = tuple(count if letter == "N" else 2 + ord(letter) % 3 for letter in layout)
                arguments = data.draw(storages(shape, dtype))
                dataset = create(file.create_group(f"part{number}"), "data", shape, dtype, **arguments)
                values = values_of(shape, dtype)
                if data.draw(st.booleans()):  # what can be compressed
                    values = np.broadcast_to(values[(slice(0, 1),) * len(shape)], shape)
                first = data.draw(st.sampled_from([0, 0, count // 2]))  # what lies before is never written
                part = tuple(slice(first, None) if letter == "N" else slice(None) for letter in layout)
                dataset[part] = values[part]
                if arguments.get("filters") and not arguments["raw_edges"] and data.draw(st.booleans()):
                    # one chunk as if no filter had been there
                    chunk = np.zeros(arguments["chunks"], dtype)
                    mask = 2 ** len(arguments["filters"]) - 1
                    dataset.id.write_direct_chunk((0,) * len(shape), chunk.tobytes(), filter_mask=mask)
        options = {"layout": dict.fromkeys(fields, layout), "stride": stride, "group": "part*"}
        try:
            model = Model(path, fields, **options)
        except OSError:
            reject()  # libhdf5 allocates chunks early that it cannot read, where no filter made them smaller
        # Windows that all end before their anchor: whether that may lie behind the last row, the text leaves open.
        if max((max(field.steps) + 1 for field in fields.values() if not field.pad), default=1) < 1:
            reject()
        if len(model):
            check(path, fields, **options)
        else:
            refused(FormatError, [path], path, fields, **options)


@st.composite
def lives(draw):
    """A dataset that is resized, and what happens to it: a new extent, then some values."""
    rank = draw(st.integers(1, 3))
    chunks = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    maxshape = tuple(draw(st.sampled_from([None, None, 9])) for _ in range(rank))
    extents = draw(st.lists(st.tuples(*[st.integers(1, 9)] * rank), min_size=1, max_size=5))
    filters = draw(st.sampled_from([[], ["gzip"], ["shuffle", "gzip"], ["fletcher32"], ["lzf"]]))
    properties = {"fill": draw(st.sampled_from([None, 3])), "alloc": draw(st.sampled_from([EARLY, LATE, INCREMENTAL]))}
    pages = draw(st.sampled_from([{}, {}, {"fs_strategy": "page", "fs_page_size": 512, "libver": ("v110", "v110")}]))
    options = {"userblock_size": draw(st.sampled_from([0, 512])), "libver": draw(st.sampled_from(LIBVERS)), **pages}
    return {"chunks": chunks, "maxshape": maxshape, "filters": filters, **properties}, extents, options


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(lives(), st.integers(0, 2))
def test_a_dataset_that_grew_and_shrank_is_what_it_is_now(life, place):
    """Except with unfiltered edge chunks: libhdf5 2.0 cannot read its own result then."""
    arguments, extents, options = life
    letters = list("AB"[: len(extents[0]) - 1])
    letters.insert(place, "N")
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/x.h5"
        with h5py.File(path, "w", **options) as file:
            dataset = create(file, "data", extents[0], "i4", **arguments)
            for number, extent in enumerate(extents):
                dataset.resize(extent)
                part = tuple(slice(0, max(1, size - number)) for size in extent)
                dataset[part] = numbered(extent)[part] + 1000 * number
        check(path, {"x": "data"}, layout="".join(letters))
