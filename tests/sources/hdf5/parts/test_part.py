"""Recordings as people store them: windows, groups, several files and chosen rows, literally, and what is refused."""

import pickle
import shutil

import h5py
import numpy as np
import pytest
from support.files.hdf5 import numbered
from support.sources.oracle import check, read, read_from, refused

from lit_async_data import AsyncDataError, ConfigError, Field, FormatError, HDF5Source, MissingError, split
from lit_async_data.sources.hdf5.index import index

ROWS = {
    "any order": np.array([17, 0, 11, 3, 19, 4]),
    "big-endian": np.array([2, 3, 11, 19], ">i4"),
    "mask": np.isin(np.arange(20), [2, 3, 11, 17]),
}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_may_be_chosen(h5, rows):
    data, wanted = {"data": numbered((20, 3)), "chunks": (8, 2), "compression": "gzip"}, ROWS[rows]
    path = h5(data=data, labels=np.arange(20), chosen=wanted)
    for chosen in (wanted, "chosen", "/chosen"):
        model = check(path, {"x": "data", "y": "labels"}, layout="NC", rows=chosen)
        assert model.values["y"].tolist() == (np.flatnonzero(wanted) if wanted.dtype == bool else wanted).tolist()


def test_chosen_rows_in_the_file_are_those_of_each_part_or_the_same_for_all(patients):
    path = patients()
    with h5py.File(path, "r+") as file:
        for number, rows in {1: [3, 0], 2: [4], 10: [2, 1]}.items():
            file[f"patient_{number}/split/train"] = rows
        file["first"] = [0]
    fields = {"x": "signal", "y": "label"}
    check(path, fields, group="patient_*", rows="split/train")
    assert check(path, fields, group="patient_*", rows="/first").values["y"].tolist() == [100, 200, 1000]


EVENTS = np.array([(0.1, 7), (0.3, 8), (0.2, 9)], [("onset", "f8"), ("label", "i8")])
NO_EVENTS = {
    "numbers": ("onset", np.array([10, 30, 20]), np.array([], "i8")),
    "seconds": ("onset", EVENTS["onset"], np.array([], "f8")),
    "a mask": ("onset", np.isin(np.arange(80), [10, 20, 30]), np.zeros(80, bool)),
    "MATLAB": ("onset", np.array([[0.1, 0.3, 0.2]]), np.zeros(2, "u8")),
    "records": ("events.onset", EVENTS, EVENTS[:0]),
    "none that fits": ("onset", np.array([10, 30, 20]), np.array([79, 0])),
}


@pytest.mark.parametrize("kind", NO_EVENTS)
def test_files_without_events_are_left_out_with_one_line(h5, caplog, kind):
    rows, some, none = NO_EVENTS[kind]
    paths = [h5(f"{n}.h5", eeg=np.arange(80.0)) for n in range(3)]
    for path, events in zip(paths, (some, none, some), strict=True):
        with h5py.File(path, "a") as file:
            file[rows.partition(".")[0]] = events
            file["y"] = np.arange(3 if events is some else 2 if kind == "none that fits" else 0)
            if kind == "MATLAB" and events is none:
                file["onset"].attrs["MATLAB_empty"] = np.uint8(1)
    fields = {"x": Field("eeg", window=(-2, 5)), "y": Field("y", per="anchor")}
    rate = {"rate": 100} if some.dtype.kind in "fV" else {}
    got = read_from(paths, fields, rows=rows, **rate)
    assert got["y"].tolist() == [0, 1, 2] * 2
    assert got["x"][:3, 2].tolist() == ([10, 20, 30] if kind == "a mask" else [10, 30, 20])
    assert caplog.messages == [f"1 of 3 parts hold no samples and are left out: {paths[1]}"]
    refused(AsyncDataError, ["rows: ", paths[1]], paths[1], fields, rows=rows, **rate)
    both = [paths[1], shutil.copy(paths[1], f"{paths[1]}.copy")]
    refused(FormatError, ["no part holds samples", "rows="], both, fields, rows=rows, **rate)


def test_labels_without_events_and_fields_without_rows_are_an_error(h5):
    given = {"eeg": np.arange(80.0), "y": np.arange(2)}
    paths = [h5(f"{n}.h5", **given, onset=np.arange(n), z=np.arange(40 * n)) for n in (2, 0)]
    fields = {"x": "eeg", "y": Field("y", per="anchor")}
    refused(FormatError, [f"{paths[1]}:/y", "has 2 values for 0 anchors"], paths, fields, rows="onset")
    refused(FormatError, [f"{paths[1]}:/z", "(0,)", "no samples"], paths, {"x": "eeg", "z": "z"})
    path = h5("twice.h5", eeg=np.arange(80.0), onset=[3, 9, 9], y=np.arange(3))
    refused(FormatError, ["3 anchors, at 2 different rows (9 comes again)"], path, fields, rows="onset")


def test_events_whose_windows_leave_the_recording_are_left_out_with_their_labels(h5):
    path = h5(eeg=np.arange(80.0), onset=[78, 40, 1, 9], y=[5, 6, 7, 8], ends=[11, 80], time=np.arange(80) / 10)
    label = Field("y", per="anchor")
    source = HDF5Source(path, {"x": Field("eeg", window=(-2, 5)), "y": label}, rows="onset")
    assert [place.row for place in source.locate([0, 1])] == [40, 9]
    assert "2 of 4 chosen rows begin no window" in repr(source)
    got = read(pickle.loads(pickle.dumps(source)), [0, 1])
    assert (got["y"].tolist(), got["x"][:, 2].tolist()) == ([6, 8], [40, 9])
    for fields, episodes, labels in (
        ({"x": Field("eeg", window=(-2, 5), pad="zero")}, None, [5, 6, 7, 8]),
        ({"x": Field("eeg", window=(-2, 5))}, {"ends": "ends"}, [6]),
        ({"x": Field("eeg", offsets=[0.0, 0.3], time="time"), "z": "eeg"}, None, [6, 7, 8]),
    ):
        assert read_from(path, {**fields, "y": label}, rows="onset", episodes=episodes)["y"].tolist() == labels
    for rows in ([40, 78], {"x.h5": [40, 78]}):  # a list of labels that is not in the file would no longer fit
        refused(ConfigError, ["78 is one of the 80 rows"], path, {"x": Field("eeg", window=(0, 5))}, rows=rows)
    refused(ConfigError, ["80 is not one of"], h5("b.h5", eeg=np.arange(80), at=[80, 1]), {"x": "eeg"}, rows="at")


WRONG = {
    "too large": (np.array([1, 20]), [20]),
    "negative": (np.array([1, -1]), [-1]),
    "mask too short": (np.ones(19, bool), [19]),
    "empty": (np.array([], "i8"), []),
    "no whole numbers": (np.array([1.0, 2.0]), ["float64", "if they are seconds, give rate="]),
    "two axes": (np.array([[1, 2], [3, 4]]), []),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("in_file", [False, True])
def test_wrong_rows_are_named(h5, wrong, in_file):
    rows, said = WRONG[wrong]
    path = h5(labels=np.arange(20), chosen=rows)
    refused(AsyncDataError, ["rows", *said], path, {"y": "labels"}, rows="chosen" if in_file else rows)


RATES = [100, np.float32(100), "fs", Field("eeg", attr="rate"), {"attr": "rate"}]


@pytest.mark.parametrize("rate", RATES, ids=str)
def test_seconds_are_rows_at_a_rate(h5, rate):
    events = np.array([(0.1, 7), (0.304, 8), (0.206, 9)], [("onset", "f8"), ("label", "i4")])
    path = h5(eeg=numbered((80, 2)), events=events, onset=events["onset"][None], fs=[[100.0]], y=np.arange(80))
    with h5py.File(path, "a") as file:
        file["eeg"].attrs["rate"] = file.attrs["rate"] = np.array([100.0], "f4")
    fields = {"x": Field("eeg", window=(-2, 3)), "y": "y", "label": Field("events.label", per="anchor")}
    got = read_from(path, fields, rows="events.onset", rate=rate)
    assert (got["y"].tolist(), got["label"].tolist()) == ([10, 30, 21], [7, 8, 9])
    assert got["x"][1].tolist() == numbered((80, 2))[28:33].tolist()
    for rows in ("onset", [0.1, 0.304, 0.206], {"x.h5": [0.1, 0.304, 0.206]}):
        assert read_from(path, ["y"], rows=rows, rate=rate)["y"].tolist() == [10, 30, 21]


def test_each_part_has_its_own_rate_and_times_of_nwb_count_from_its_starting_time(tmp_path):
    with h5py.File(tmp_path / "x.nwb", "w") as file:
        for name, rate, start in (("a", 10.0, 0.0), ("b", 20.0, [1.5]), ("c", 10.0, 2), ("d", 10.0, [0.0, 1])):
            file[f"{name}/data"], file[f"{name}/starting_time"] = np.arange(60), start
            file[f"{name}/starting_time"].attrs["rate"], file[f"{name}/onset"] = rate, [2.0, 2.5]
    path, options = str(tmp_path / "x.nwb"), {"group": "?", "rate": Field("starting_time", attr="rate")}
    for rows in ("onset", {part: [2.0, 2.5] for part in "abcd"}, [[2.0, 2.5], np.array([2, 2.5], "f4")] * 2):
        assert read_from(path, ["data"], rows=rows, **options)["data"].tolist() == [20, 25, 10, 20, 0, 5, 20, 25]
    said = ["seconds count from the beginning of each part", "rows={'a': […], …}"]
    refused(ConfigError, said, path, ["data"], rows=[2.0], **options)


@pytest.mark.parametrize(
    ("rows", "rate", "said"),
    [
        ([0.1, np.nan], 10, "rows: it holds nan at 1, which is no time"),
        ([2.0], 10, "rows: 2 s at 10 Hz, row 20, is not one of the 20 rows"),
        ("yes", 10, "rows: 2.5 s at 10 Hz, row 25, is not one of the 20 rows"),
        ([0.1], 0, "rate: 0, of "),
        ([0.1], "y", "rate: 'y', of "),
        ([0.1], {"name": "y", "rat": 1}, "rate.rat: no such option"),
        (None, 10, "rate: goes with rows="),
    ],
    ids=str,
)
def test_times_and_rates_that_are_none_are_named(h5, rows, rate, said):
    refused(ConfigError, [said], h5(y=np.arange(20), yes=np.array([2.5])), {"y": "y"}, rows=rows, rate=rate)


def test_an_attribute_is_the_value_of_all_rows_of_its_part(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs.update(site=5, pair=["a", "b"], null=h5py.Empty("f8"))
        for patient in range(3):
            file[f"p{patient}/data"] = np.arange(10 * (patient + 1))
            file[f"p{patient}"].attrs["age"] = 40.5 + patient
    fields = {"x": Field("data", window=(0, 4)), "age": Field(attr="age"), "site": Field("/", attr="site")}
    source = HDF5Source(tmp_path / "x.h5", fields, group="p*", stride=10)
    assert source.column("age").tolist() == [40.5, 41.5, 41.5, 42.5, 42.5, 42.5]
    assert (source.column("site") == 5).all()
    refused(ConfigError, ["none is a dataset"], tmp_path / "x.h5", [Field(attr="age")], group="p*")
    for wrong, said in (
        (Field("/", attr="pair"), r"x.h5:/: its attribute 'pair' holds object \(2,\), not numbers, nor one text"),
        (Field("/", attr="null"), r"x.h5:/: its attribute 'null' holds float64 \(0,\), not numbers"),
        (Field(attr="weight"), "/p0: its attribute 'weight' is missing; write it"),
    ):
        with pytest.raises((FormatError, MissingError), match=said):
            HDF5Source(tmp_path / "x.h5", {"x": "data", "y": wrong}, group="p*")


@pytest.mark.parametrize("sample", ["row", "group"])
def test_an_attribute_of_numbers_keeps_its_shape(tmp_path, sample, monkeypatch):
    monkeypatch.setattr(index, "changed_recently", lambda *_: False)
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["ct"] = np.zeros((2, 3), "u1")
            file["ct"].attrs.update(spacing=[0.5, 0.5, 1 + number], ints=np.array([1, 2, number], "i2"), one=[number])
            file["ct"].attrs.update(length=np.zeros(2 + number), mixed=np.zeros(3, "f8" if number else "i2"))
            file.attrs["affine"] = np.eye(4) + number
    fields = {key: Field("ct", attr=key) for key in ("ints", "one")} | {"affine": Field(attr="affine"), "x": "ct"}
    fields |= {key: Field("ct", attr=key, dtype="float32") for key in ("spacing", "mixed")}
    path, wanted = str(tmp_path / "*.h5"), {"ints": np.array([1, 2, 1], "i2"), "affine": np.eye(4) + 1}
    wanted |= {"spacing": np.array([0.5, 0.5, 2], "f4"), "mixed": np.zeros(3, "f4")}
    for _ in range(2):  # the second takes groups from the cache
        source = HDF5Source(path, fields, sample=sample, cache_dir=tmp_path / "kept")
    for key, values in wanted.items():
        np.testing.assert_array_equal(source[len(source) - 1][key], values, strict=True)
    assert source.column("one").tolist() == [0, 1] if sample == "group" else [0, 0, 1, 1]
    with pytest.raises(FormatError, match=r"1.h5:/ct@length: .* float64 \(3,\), but in .*0.h5 they are float64 \(2,\)"):
        HDF5Source(path, {"x": "ct", "y": Field("ct", attr="length")}, sample=sample)
    with pytest.raises(ConfigError, match=r"fields.y.kind: .*ct@ints holds int16 arrays, which is not text"):
        HDF5Source(path, {"x": "ct", "y": Field("ct", attr="ints", kind="text")}, sample=sample)


@pytest.mark.parametrize(
    ("window", "options", "grouping"),
    [
        (None, {}, ([(100, 10)], 1.0, 1, 1)),
        (None, {"rows": [5, 95, 99, 12]}, ([(1, 1), (2, 2), (1, 1)], 1.0, 1, 1)),
        ((-2, 7), {"stride": 10}, ([(10, 1)], 1.0, 1, 1)),  # each lies in one chunk
        ((-2, 7), {}, ([(80, 40), (12, 12)], 1.2, 4, 5)),  # the last chunk of four is decoded for the next group too
    ],
)
def test_samples_are_grouped_by_the_chunks_that_they_begin_in(h5, window, options, grouping):
    path = h5(x={"data": numbered((100, 8)), "chunks": (10, 8), "compression": "gzip"})
    _, runs, *others = HDF5Source(path, {"x": Field("x", window=window)}, **options)._grouping
    assert ([(run.samples, run.rows) for run in runs], *others) == grouping


def test_the_column_of_groups_is_the_name_of_each_sample_s_group(patients, h5):
    source = HDF5Source(patients(), ["label"], group="patient_*")
    names = [f"x.h5:/patient_{number}" for number, count in ((1, 4), (2, 5), (10, 3)) for _ in range(count)]
    assert source.column("group").tolist() == names
    for by in ({"by": "group"}, {"groups": "group"}):
        assert len(split(source, {"train": ["patient_1", "patient_10"], "val": ["patient_2"]}, **by)["val"]) == 5
    stored = HDF5Source(h5(**{"a/y": np.arange(2), "a/group": ["u", "v"]}), ["y"], group="a*")
    assert stored.column("group").tolist() == ["u", "v"]
    with pytest.raises(ConfigError, match=r"is a rule, and .* also has a column"):
        split(stored, {"train": 0.5, "val": 0.5}, groups="group")
    with pytest.raises(MissingError, match="has no dataset '/group'"):
        HDF5Source(h5("flat.h5", y=np.arange(2)), ["y"]).column("group")


@pytest.mark.parametrize("options", [{"rate": "hz"}, {"time": "t"}], ids=str)
def test_windows_of_rows_at_two_rates_bring_one_warning(h5, caplog, options):
    paths = [h5(f"{rate}.h5", x=np.arange(2000), on=[1.0, 2], hz=rate, t=np.arange(2000) / rate) for rate in (250, 200)]
    window = Field("x", window=(0, 256))
    for field, given in ((Field("x", offsets=[0, 0.5], time="t"), paths), (Field("x"), paths), (window, paths[:1])):
        HDF5Source(given, {"x": field}, rows="on", **options)
    assert not caplog.messages
    HDF5Source(paths, {"x": window}, rows="on", **options)
    said = f"{paths[1]} has 200 rows per second, {paths[0]} has 250 rows per second: windows"
    assert [each.startswith(said) for each in caplog.messages] == [True]
