"""Bad input: each kind raises the right exception at once, with a message that says where and what to do."""

import contextlib
import re

import h5py
import numpy as np
import pytest

from lit_async_data import AsyncLoader, Field, HDF5Source, LoaderOptions
from lit_async_data.batch.transforms import Normalize
from lit_async_data.errors import AsyncDataError, ConfigError, FormatError, MemoryBudgetError, MissingError

NAN, INFINITY = float("nan"), float("inf")
NO_PATH = ["path: ", "is not a file, a glob or a list"]


def refused(kind, said, build):
    """Checks that building something raises exactly this exception, or one of these, with these words in its text."""
    with pytest.raises(AsyncDataError) as caught:
        build()
    message = str(caught.value)
    assert type(caught.value) in (kind if isinstance(kind, tuple) else (kind,)), message
    assert [word for word in said if word not in message] == [], message
    return caught.value


@pytest.fixture
def file(h5):
    """10 images NHWC with labels, 9 other rows, and a group."""
    of_group = {"patient/data": np.zeros((10, 3)), "patient/age": np.zeros(10)}
    images = np.zeros((10, 8, 8, 3), "u1")
    return h5("scan.h5", data=images, labels=np.arange(10), others=np.arange(9), **of_group)


def test_a_missing_file_also_of_several_is_named_with_the_folder_it_was_looked_for_from(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for paths in ("scan2.h5", [file, "scan2.h5"]):
        error = refused(MissingError, [f"{tmp_path}/scan2.h5", "no such file"], lambda paths=paths: HDF5Source(paths))
        assert error.file == f"{tmp_path}/scan2.h5"


@pytest.mark.parametrize(
    ("kind", "paths", "said"),
    [
        (ConfigError, ["{file}", "{file}"], ["{file}", "twice", "count twice"]),
        (MissingError, "scans/*.h5", ["scans/*.h5", "matches no file", "{folder}"]),
        (FormatError, "{folder}", ["{folder}", "a folder", "{folder}/*.h5"]),
        *((ConfigError, path, NO_PATH) for path in (None, 5, [], [None], ["x.h5", 5], b"x.h5", {"x.h5"})),
    ],
    ids=repr,
)
def test_paths_that_name_no_files_or_one_twice_are_refused(*, file, tmp_path, monkeypatch, kind, paths, said):
    monkeypatch.chdir(tmp_path)
    known = {"file": file, "folder": tmp_path}
    if isinstance(paths, str):
        paths = paths.format(**known)
    elif isinstance(paths, list):
        paths = [path.format(**known) if isinstance(path, str) else path for path in paths]
    refused(kind, [word.format(**known) for word in said], lambda: HDF5Source(paths))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Data", "did you mean data?"),
        ("patient/dat", "did you mean patient/data?"),
        ("species", "holds: data, labels, others, patient"),
        ("patient/species", "/patient holds: age, data"),
        ("data/x", "holds: data, labels, others, patient"),
    ],
)
def test_for_a_dataset_that_is_not_there_near_names_or_all_are_shown(file, name, hint):
    error = refused(MissingError, [file, repr(name), hint], lambda: HDF5Source(file, ["data", name]))
    assert (error.file, error.dataset) == (file, name)


def test_what_is_missing_is_named_with_the_first_of_what_there_is(h5):
    many = h5(**{f"case{number:03}": np.arange(3) for number in range(200)})
    error = refused(MissingError, ["'x'", "case000", "(200 in all)", "inspect lists"], lambda: HDF5Source(many, ["x"]))
    assert len(str(error)) < 400


@pytest.mark.parametrize("name", ["patient", "/patient/"])
def test_a_group_is_called_a_group_with_what_it_holds(file, name):
    said = [f"{file}:/patient: is a group, not a dataset", "/patient holds: age, data"]
    error = refused(FormatError, said, lambda: HDF5Source(file, [name]))
    assert (error.file, error.dataset) == (file, name)


OF_A_FIELD = (ConfigError, FormatError, MissingError)
PER_ANCHOR = Field("events.label", per="anchor")


@pytest.fixture
def table(tmp_path):
    """Records, anchors, and channels of several shapes."""
    kind = [("label", "i4"), ("pos", [("x", "f4")]), ("note", h5py.string_dtype()), ("notes", h5py.vlen_dtype("i4"))]
    channels = {"a": ((5, 3), "f4"), "wide": ((5, 4), "f4"), "double": ((5, 3), "f8")}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, (shape, dtype) in {"table": ((3,), kind), "x": ((9, 4), "f8"), **channels}.items():
            file.create_dataset(name, shape, dtype)
        file["text"], file["two"] = ["a"] * 5, [1, 2]
        file["events"] = np.array([(1, 0), (4, 1), (6, 0)], [("onset", "i8"), ("label", "u1")])
    return str(tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("field", "rows", "said"),
    [
        # Members of records.
        ("table.labl", None, ["has no member 'labl'; its members are label, pos.x, note, notes"]),
        ("table.note", None, ["table.note: no text in rows 0, 1, 2; write it"]),
        ("table.notes", None, ["table.notes: holds values of variable length"]),
        ({"name": "table.label", "column": 0}, None, ["fields.y.column: 0, but", "table.label", "has no columns"]),
        # Values of anchors, which need a row of their own each.
        ("events.label", "events.onset", ["write fields={'y': Field('events.label', per='anchor')}"]),
        ("x", "events", ["/events holds records, so name a member of them: events.onset, events.label"]),
        (PER_ANCHOR, None, ["fields.y.per: 'anchor' needs rows=NAME"]),
        (PER_ANCHOR, "two", ["events.label: has 3 values for 2 anchors"]),
        ({"name": "events.label", "per": "anchor", "window": [0, 2]}, "two", ["fields.y.window: does not apply"]),
        # Channels, which must be alike.
        (["a", "wide"], None, ["/wide has 5 rows of float32 (4,), but ", "/a has 5 rows of float32 (3,)"]),
        (["a", "double"], None, ["/double has 5 rows of float64 (3,), but ", "/a has 5 rows of float32", "dtype="]),
        (["a", "text"], None, ["/text does not hold numbers"]),
    ],
    ids=repr,
)
def test_members_anchors_and_channels_that_are_none_are_named_with_those_that_are(table, field, rows, said):
    fields = {"x": "x", "y": field} if rows or field is PER_ANCHOR else {"y": field}
    error = refused(OF_A_FIELD, said, lambda: HDF5Source(table, fields, rows=rows))
    if isinstance(field, list):
        assert isinstance(error, ConfigError) or (error.file, error.dataset) == (table, field[1])
        more = ["give C another letter"]
        refused(ConfigError, more, lambda: HDF5Source(table, {"x": [field[0]] * 2}, layout="NC"))


def virtual(file):
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "data", (3,))
    file.create_virtual_dataset("bad", layout)


# Values, a type that has none in this file, or a function that writes them.
NO_FIELDS = {
    "text on two axes": (np.array([[b"cat", b"dog"]] * 3), ["holds text", "on 2 axes; store them on one"]),
    "compound": (np.zeros(3, [("x", "f4"), ("y", "f4")]), ["compound", "name one of their members: bad.x, bad.y"]),
    "variable length": (h5py.vlen_dtype("i4"), ["variable length", "none was ever written", "values and offsets"]),
    "encoded images": (np.array([np.void(b"\xff\xd8\xff\xe0 and on")] * 3), ["encoded images", "decode='image'"]),
    "references": (h5py.ref_dtype, ["references", "store the values that they refer to"]),
    "long doubles": (np.zeros(3, np.longdouble), ["float128", "store it as another type"]),
    "scalar": (3.0, ["single value", "one value per sample"]),
    "nothing": (h5py.Empty("f4"), []),
    "no samples": (np.zeros((0, 8, 8)), ["(0, 8, 8)", "no samples"]),
    "empty samples": (np.zeros((3, 0)), ["(3, 0)", "no samples"]),
    "virtual": (virtual, ["virtual", "give the files it is made of"]),
    "external storage": (
        lambda file: file.create_dataset("bad", (3,), "f4", external=[("values.bin", 0, 12)]),
        ["in another file", "write them to a dataset"],
    ),
    "endless link": (h5py.SoftLink("/bad"), ["cannot be opened"]),
}


@pytest.mark.parametrize("kind", NO_FIELDS)
def test_what_no_batch_can_hold_is_named_with_what_to_do(h5, kind):
    path = h5(data=np.zeros((3, 4)))
    values, said = NO_FIELDS[kind]
    with h5py.File(path, "r+") as file:
        if isinstance(values, np.dtype):
            file.create_dataset("bad", (3,), dtype=values)
        elif callable(values):
            values(file)
        else:
            file["bad"] = values
    error = refused(FormatError, [f"{path}:/bad: ", *said], lambda: HDF5Source(path, ["data", "bad"]))
    assert (error.file, error.dataset) == (path, "bad")


IMAGES = {"data": np.zeros((10, 8, 8, 3), "u1"), "labels": np.arange(10), "others": np.arange(9)}
OF_MATLAB = {"data": np.zeros((3, 8, 6, 10), "u1"), "labels": np.arange(10)}
CLIMATE = {"t2m": np.zeros((12, 4, 6)), "height": np.zeros((4, 6)), "latitude": np.zeros(4)}
FRAMES = {"signal": np.arange(12), "images": np.arange(3.0) * 10, "frame": np.arange(12) // 4}
OF_ROWS = {"data": np.zeros((50, 8)), "labels": np.arange(50.0)[None] % 3}


@pytest.mark.parametrize(
    ("datasets", "fields", "options", "said"),
    [
        # Values of other rows.
        (IMAGES, "data others", {}, ["data has 10", "others has 9", "Field('others', lookup=NAME)", "rows="]),
        (FRAMES, "signal images", {}, ["signal has 12", "Field('images', lookup=NAME)"]),
        (FRAMES, "signal images", {"rows": "frame"}, ["images has 3", "Field('images', per='anchor')"]),
        # Values for all rows.
        (CLIMATE, "t2m height", {}, ["height has the shape of one row of t2m", "leave 'height' out", "once"]),
        (CLIMATE, "t2m latitude", {}, ["layout={'t2m': 'HNW'}", "share it, leave 'latitude' out"]),
        # Another axis.
        (IMAGES, "data labels", {"layout": "HNWC"}, ["data has 8", "write layout={'data': 'NHWC'}. Else"]),
        (OF_MATLAB, "data labels", {}, ["on axis 3? Then write layout={'data': 'CHWN'}"]),
        (OF_ROWS, "data labels", {}, ["on axis 1? Then write layout={'labels': 'HN'}", "column=0, dtype='int64')"]),
    ],
)
def test_what_is_said_of_lengths_that_differ_fits(h5, datasets, fields, options, said):
    path = h5(**datasets)
    error = refused(FormatError, [path, *said], lambda: HDF5Source(path, fields.split(), **options))
    assert ("layout" in str(error)) == any("layout" in each for each in said)


@pytest.mark.parametrize(
    ("datasets", "fields", "layout", "wanted"),
    [
        (FRAMES, {"x": "signal", "y": Field("images", lookup="frame")}, None, [0.0] * 4 + [10.0] * 4 + [20.0] * 4),
        (OF_MATLAB, {"x": "data", "y": "labels"}, {"x": "CHWN"}, list(range(10))),
        (OF_ROWS, {"x": "data", "y": Field("labels", column=0, dtype="int64")}, {"y": "HN"}, [0, 1, 2] * 16 + [0, 1]),
    ],
)
def test_who_follows_it_has_a_source(h5, datasets, fields, layout, wanted):
    with contextlib.closing(HDF5Source(h5(**datasets), fields, layout=layout)) as source:
        assert source.column("y").tolist() == wanted
        assert source.spec["x"].shape in ((), (3, 8, 6), (8,))


def test_an_attribute_is_called_one(h5, file):
    with h5py.File(file, "r+") as opened:
        opened.attrs["age"] = 40
        opened["patient"].attrs["sex"] = 1
        opened["data"].attrs["site"] = 2
    for name, of, field in (
        ("age", "the file", Field(attr="age")),
        ("patient/sex", "/patient", Field(attr="sex")),
        ("data/site", "/data", Field("data", attr="site")),
    ):
        given = f"Field('data', attr={field.attr!r})" if field.name else f"Field(attr={field.attr!r})"
        said = [f"no dataset {name!r}: {field.attr!r} is an attribute of {of}", f"read it by {given}"]
        refused(MissingError, said, lambda name=name: HDF5Source(file, ["data", name]))


@pytest.mark.parametrize(("shape", "layout"), [((5, 8, 3), "NWC"), ((5, 8, 8, 3), "NHWC"), ((5, 4, 8, 8, 3), "NDHWC")])
def test_the_layout_that_normalize_names_fits_the_dataset(h5, shape, layout):
    path, normalize = h5(data=np.zeros(shape, "f4")), Normalize(mean=[0, 0, 0], std=[1, 1, 1])
    with contextlib.closing(HDF5Source(path, ["data"])) as wrong, AsyncLoader(wrong, {"batch_size": 5}) as loader:
        refused(ConfigError, [f'layout={{"x": "{layout}"'], lambda: normalize(next(loader)))
    source = HDF5Source(path, ["data"], layout=layout)
    with contextlib.closing(source), AsyncLoader(source, {"batch_size": 5}) as loader:
        assert normalize(next(loader))[0].shape[:2] == (5, 3)


@pytest.mark.parametrize(("group", "hint"), [("run_*/camera", True), ("run_*/camera_*", False)])
def test_wildcards_before_the_last_component_are_pointed_to_the_names(h5, group, hint):
    path = h5(**{"run_1/camera/x": np.arange(3), "run_2/camera/x": np.arange(2)})
    said = ["only the last component", *["group='run_*', fields={KEY: 'camera/NAME'}"] * hint]
    error = refused(ConfigError, said, lambda: HDF5Source(path, ["x"], group=group))
    assert ("fields=" in str(error)) == hint


def test_files_of_one_source_that_differ_in_shape_or_type_are_both_named(h5, file):
    for other, shown in (((4, 8, 8, 1), "u1"), "(8, 8, 1)"), (((4, 8, 8, 3), "i1"), "int8"):
        path = h5("scan2.h5", data=np.zeros(*other), labels=np.arange(4))
        said = [f"{path}:/data", file, shown, "must agree"]
        error = refused(FormatError, said, lambda path=path: HDF5Source([file, path]))
        assert (error.file, error.dataset) == (path, "data")
    path = h5("scan2.h5", data=np.zeros((4, 8, 8, 3), "u1"))
    assert refused(MissingError, [path, "'labels'"], lambda: HDF5Source([file, path])).file == path


NO_FIELD = "not a dataset name, a Field or a mapping"
LETTERS = "different capital letters, one per axis, with N for the samples"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([""], ["fields.0: ", "''", NO_FIELD]),
        ({"x": ["data", None]}, ["fields.x.", "None", NO_FIELD]),
        ({"x": ["data", {"attr": "age"}]}, ["fields.x.name", "is no dataset of numbers"]),
        ({"x": [Field("data", window=(0, 2)), "labels"]}, ["fields.x.window", "labels and data have different ones"]),
    ],
    ids=repr,
)
def test_fields_that_are_none_are_quoted(file, fields, said):
    refused(ConfigError, said, lambda: HDF5Source(file, fields))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("NTHWC", ["'NTHWC'", "names 5 axes", "data has 4", "(10, 8, 8, 3)"]),
        *((layout, [repr(layout), LETTERS]) for layout in ("nhwc", "NHHC", "HWCD")),
        ({"data": "NHWC"}, ["'data'", "not one of the fields x, labels"]),  # it goes by batch key
        (5, []),
    ],
    ids=repr,
)
def test_a_layout_that_does_not_fit_is_quoted_with_what_would(file, layout, said):
    fields = {"x": "data", "labels": "labels"}
    refused(ConfigError, ["layout: ", *said], lambda: HDF5Source(file, fields, layout=layout))


@pytest.mark.parametrize("fields", [["index"], {"index": "labels"}], ids=["sequence", "mapping"])
def test_a_field_called_index_cannot_go_with_return_indices(h5, fields):
    source = HDF5Source(h5(index=np.arange(10), labels=np.arange(10)), fields)
    options = LoaderOptions(batch_size=2, return_indices=True)
    refused(ConfigError, ["return_indices: ", "'index'", "another key"], lambda: AsyncLoader(source, options))
    assert len(AsyncLoader(source, LoaderOptions(batch_size=2))) == 5


FITTING, MISSING = {"batch_size": 2}, ["batch_size: missing", "how many samples"]


@pytest.mark.parametrize(
    ("kind", "options", "given", "said"),
    [
        *((ConfigError, options, {}, MISSING) for options in (None, {}, {"workers": 2})),
        *((ConfigError, options, {}, ["options: ", repr(options)]) for options in (32, "32", [("batch_size", 32)])),
        (ConfigError, FITTING, {"rank": 0, "world_size": 11}, ["10 samples", "11 ranks", "at most 10 ranks"]),
        *((ConfigError, FITTING, {"world_size": ranks}, [f"world_size: {ranks}"]) for ranks in (0, -1)),
        *(
            (ConfigError, FITTING, {"device_depth": depth}, ["device_depth: ", repr(depth), "whole number from 0 on"])
            for depth in (-1, 1.0, "2", True, None)
        ),
        # Without a budget, that of the machine holds.
        (MemoryBudgetError, {"batch_size": 10**12}, {}, ["memory_budget: ", "bytes"]),
        (MemoryBudgetError, {"batch_size": 10, "queue_depth": 10**9}, {}, ["memory_budget: ", "bytes"]),
    ],
    ids=repr,
)
def test_what_is_given_to_a_loader_is_quoted(file, kind, options, given, said):
    refused(kind, said, lambda: AsyncLoader(HDF5Source(file), options, **given))


@pytest.mark.parametrize(
    ("attribute", "dtype", "said"),
    [
        ("units", "i2", "has none of scale_factor, .*, which mask_and_scale applies"),
        ("scale_factor", "i2", "its attribute scale_factor is .*, not one number"),
        ("scale_factor", "?", "holds bool, which mask_and_scale does not apply to"),
    ],
)
def test_unpacking_what_is_not_packed_is_an_error(h5, attribute, dtype, said):
    path = h5(data=np.ones((4, 2), dtype))
    with h5py.File(path, "r+") as file:
        file["data"].attrs[attribute] = [0, 1]
    with pytest.raises(FormatError, match=f"/data: {said}") as caught:
        HDF5Source(path, {"x": Field("data", mask_and_scale=True)})
    assert (caught.value.file, caught.value.dataset) == (path, "/data")


@pytest.mark.parametrize("workers", [0, 1])
def test_slots_beyond_the_budget_say_how_many_bytes_would_do(file, workers):
    source, options = HDF5Source(file), {"batch_size": 10, "queue_depth": 7, "workers": workers}
    said = ["memory_budget: ", "slots", "the budget of 100 ", "smaller batch_size or queue_depth"]
    error = refused(MemoryBudgetError, said, lambda: AsyncLoader(source, options | {"memory_budget": 100}))
    (needed,) = map(int, re.findall(r"need (\d+) bytes", str(error)))
    assert needed >= 2 * 10 * source.spec.nbytes
    assert len(AsyncLoader(source, options | {"memory_budget": needed})) == 1
    refused(MemoryBudgetError, [str(needed)], lambda: AsyncLoader(source, options | {"memory_budget": needed - 1}))
