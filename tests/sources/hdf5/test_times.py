"""Rows at times around the time of a sample: the nearest, or the last before it, within a tolerance."""

import logging
import pickle

import h5py
import numpy as np
import pytest
from support.sources.oracle import read, refused

from lit_async_data import ConfigError, Field, FormatError, HDF5Source, MissingError

RNG = np.random.default_rng(0)
FAST = np.cumsum(RNG.uniform(0.004, 0.016, 900))  # a sensor at 100 Hz, whose clock trembles
SLOW = np.cumsum(RNG.uniform(0.02, 0.05, 240))
FORCE = RNG.integers(0, 9999, (900, 3))
ACTION = RNG.random((240, 2))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("times") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("force", data=FORCE, chunks=(7, 3), compression="gzip")
        file["action"], file["t_force"], file["t_action"] = ACTION, FAST, SLOW
    return path


def found(times, wanted, direction, tolerance):
    """The row for a time, one by one, and whether it is close enough, but for a thousandth of an interval."""
    slack = np.median(np.diff(times)) / 1000
    allowed = [n for n, time in enumerate(times) if direction == "nearest" or time <= wanted + slack] or [0]
    row = min(allowed, key=lambda n: abs(times[n] - wanted))
    late = times[row] - wanted
    return row, abs(late) <= tolerance + slack and (direction == "nearest" or late <= slack)


@pytest.mark.parametrize("pad", [None, "last", "zero"])
@pytest.mark.parametrize("direction", ["nearest", "backward"])
@pytest.mark.parametrize("tolerance", [0.004, 0.3])
def test_a_field_of_another_rate_has_the_row_for_each_time(path, pad, direction, tolerance):
    options = {"time": "t_force", "direction": direction, "tolerance": tolerance, "pad": pad}
    offsets = (-0.13, -0.031, 0, 0.077)
    fields = {"force": Field("force", offsets=offsets, **options), "action": Field("action", time="t_action")}
    source = HDF5Source(path, fields)
    table = [[found(FAST, own + offset, direction, tolerance) for offset in offsets] for own in SLOW]
    rows, real = (np.array(each) for each in zip(*(zip(*sample) for sample in table), strict=True))
    kept = np.flatnonzero(real.all(axis=1)) if pad is None else np.arange(240)
    assert 0 < len(kept) <= 240
    expected = FORCE[rows]
    expected[~real & (pad == "zero")] = 0
    for every in (np.arange(len(source)), RNG.integers(0, len(source), 2000)):
        batch = read(pickle.loads(pickle.dumps(source)), every)
        np.testing.assert_array_equal(batch["force"], expected[kept[every]])
        np.testing.assert_array_equal(batch["action"], ACTION[kept[every]])
        if pad:
            np.testing.assert_array_equal(batch["force_mask"], real[every])
    if pad is None:
        said = f"{240 - len(kept)} of 240 rows begin no window"
        assert (said in repr(source)) == (len(kept) < 240)
        assert [place.row for place in source.locate(range(len(source)))] == kept.tolist()


def test_a_part_without_a_sample_is_said(h5, caplog):
    paths = [h5(f"{n}.h5", x=np.arange(5), t=np.arange(5) * step) for n, step in enumerate([0.1, 5.0])]
    field = Field("x", offsets=[-0.1, 0], time="t", tolerance=0.01)
    with caplog.at_level(logging.WARNING):
        source = HDF5Source(paths, {"x": field})
    assert len(source) == 4
    said = "no row has values of t at all of its times, -0.1 to 0 s from its own, within 0.01 s"
    assert said in caplog.text
    refused(FormatError, [paths[1], said, "change offsets or tolerance"], paths[1], {"x": field})


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"time": "gone"}, MissingError, ["no dataset 'gone'"]),
        ({"time": "falls"}, FormatError, ["falls, row 3: 0.1 s comes after 0.2 s; times must rise", "write episodes="]),
        ({"time": "unsigned"}, FormatError, ["unsigned, row 1: 4 s comes after 5 s; times must rise"]),
        ({"time": "few"}, FormatError, ["few: has shape (3,)", "if these are times of other rows, the field"]),
        ({"time": "words"}, FormatError, ["words: holds object, not seconds"]),
        ({"time": "nan"}, FormatError, ["nan, row 2: nan s comes after 1.0 s"]),
        ({}, ConfigError, ["offsets: [-0.1, 0] is neither", "seconds need time=NAME"]),
        ({"time": "t", "tolerance": -1}, ConfigError, ["tolerance: -1 is not a number of seconds"]),
        ({"time": "t", "direction": "forward"}, ConfigError, ["direction: 'forward' is not one of nearest, backward"]),
        ({"offsets": [0], "direction": "backward"}, ConfigError, ["direction: needs time=NAME"]),
        ({"time": "t", "offsets": None, "attr": "a"}, ConfigError, ["time: does not apply to an attribute"]),
    ],
    ids=str,
)
def test_wrong_times_are_named(h5, options, error, said):
    path = h5(
        x=np.arange(5),
        t=np.arange(5) / 10,
        falls=[0, 0.1, 0.2, 0.1, 0.3],
        unsigned=np.array([5, 4, 6, 7, 8], "u4"),
        few=[0, 1, 2],
        words=["a", "b", "c", "d", "e"],
        nan=[0, 1, np.nan, 3, 4],
    )
    refused(error, said, path, {"x": {"name": "x", "offsets": [-0.1, 0]} | options})


def test_times_of_the_anchors_rise_too(h5):
    path = h5(x=np.arange(4), t=[0, 2.0, 1.0, 3.0], y=np.arange(9), t_y=np.arange(9) / 2)
    fields = {"x": Field("x", time="t"), "y": Field("y", offsets=[0.0], time="t_y", pad="last")}
    refused(FormatError, ["t, row 2: 1.0 s comes after 2.0 s"], path, fields)


@pytest.mark.parametrize("step", [0.01, 10.0])
@pytest.mark.parametrize("restart", [True, False])
def test_the_interval_is_that_within_episodes_which_may_be_empty_or_a_single_row(h5, step, restart):
    lengths = [1, 3, 0, 1, 1, 2, 0]
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    times = np.arange(8) * step - first * step * restart + 3
    path = h5(x=np.arange(8), t=times, lengths=lengths)
    field = Field("x", offsets=[-step, 0.0], time="t", pad="zero")
    source = HDF5Source(path, {"x": field}, episodes={"lengths": "lengths"})
    batch = read(source, np.arange(8))
    assert batch["x_mask"].tolist() == [[row > begin, True] for row, begin in enumerate(first)]
    assert batch["x"].tolist() == [[(row - 1) * (row > begin), row] for row, begin in enumerate(first)]


def test_samples_that_repeat_a_row_across_a_gap_of_the_sensor_overlap(h5):
    path = h5(x=np.arange(20), t=[*range(10), *range(90, 100)], y=np.arange(100), t_y=np.arange(100))
    fields = {"y": Field("y", time="t_y"), "x": Field("x", offsets=[0.0], time="t", pad="last")}
    rows = read(source := HDF5Source(path, fields), np.arange(100))["x"][:, 0]
    shared = max(later - sample for sample in range(100) for later in range(100) if rows[sample] == rows[later])
    assert source.chunks.overlap >= shared > 39


def test_chosen_rows_without_values_at_all_times_are_named(h5, caplog):
    paths = [h5(f"{name}.h5", x=np.arange(5), t=np.arange(5) / 10) for name in "ab"]
    fields = {"x": Field("x", offsets=[-0.1, 0], time="t")}
    said = ["rows: 0 is one of the 5 rows", "without values of t at all of its times, -0.1 to 0 s from its own"]
    refused(ConfigError, said, paths[0], fields, rows=[3, 0])
    refused(ConfigError, ["rows: 5 is not one of the 5 rows"], paths, fields, rows=[[1], [5]])
    assert len(HDF5Source(paths, fields, rows={"a.h5": [3, 1]})) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("rows", [300, 90])
def test_without_other_fields_the_first_gives_the_times_of_the_samples(h5, rows):
    cam, force = np.arange(rows) / 30, np.arange(300) / 100
    path = h5(cam=cam, cam_t=cam, force=force, force_t=force)
    fields = {name: Field(name, offsets=[-0.1, 0.0], time=f"{name}_t", pad="last") for name in ("cam", "force")}
    batch = read(HDF5Source(path, fields), np.arange(rows))
    np.testing.assert_allclose(batch["cam"][45], [1.4, 1.5])
    np.testing.assert_allclose(batch["force"][45], [1.4, 1.5])
    said = ["have the times cam_t and force_t; name the times of the samples: Field('cam') needs time=NAME"]
    refused(ConfigError, said, path, {"row": "cam", **fields})


NEAR = "and almost no sample has another row so near; offsets, tolerance and all times need one unit"
BEYOND = "almost all samples look before the first or after the last; offsets, tolerance and all times need one unit"


def doubts(caplog, path, fields, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        HDF5Source(path, fields, **options)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("step", "offsets", "said"),
    [
        (33.3, [-0.2, 0.0], f"lie 33.3 apart (median), but offsets reach 0.2 s, {NEAR}"),
        (0.1, [-0.01, 0.01], f"lie 0.1 apart (median), but offsets reach 0.02 s, {NEAR}"),
        (1 / 24, [-3600, 0], f"lie 0.0416667 apart (median), but at -3600 s {BEYOND}"),
        (1, [0, 3600.5], f"lie 1 apart (median), but at 3600.5 s {BEYOND}"),
        (1, [-0.5, 0.5], ""),
        (33, [-200, 0], ""),
        (1 / 30, [-0.2, 0.0], ""),
        (10.0, [0.0], ""),
    ],
    ids=str,
)
def test_offsets_in_another_unit_than_times_bring_one_warning(h5, caplog, step, offsets, said):
    paths = [h5(f"{n}.h5", x=np.arange(300), t=np.arange(300) * step) for n in range(2)]
    for direction in ("nearest", "backward"):
        field = Field("x", offsets=offsets, time="t", pad="last", direction=direction)
        found = doubts(caplog, paths, {"x": field})
        assert len(found) == bool(said)
        assert all(f"{paths[0]}: x: the times in t lie" in line and said in line for line in found)


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (np.arange(32) * 5, {"offsets": [-1, 0], "direction": "backward"}),
        (np.arange(13) * 60, {"offsets": [-0.1, 0], "tolerance": 60}),
        ([9.1, 80.2], {"offsets": [0], "tolerance": 0.01}),
    ],
    ids=["backward", "nearest", "rare events"],
)
def test_a_sensor_slower_than_the_samples_brings_no_warning(h5, caplog, times, options):
    path = h5(a=np.arange(3000), at=np.arange(3000) / 30, s=np.arange(len(times)), st=times)
    slow = Field("s", time="st", pad="last", **options)
    assert not doubts(caplog, path, {"a": Field("a", time="at"), "s": slow})


@pytest.mark.parametrize("offsets", [[0.0], [-0.1, 0.0]])
def test_clocks_of_two_units_or_two_starts_bring_a_warning(h5, caplog, offsets):
    times = np.arange(3000) / 100
    path = h5(a=np.arange(900), at=np.arange(900) / 30, s=np.arange(3000), st=times * 1000, later=times + 1.7e9)
    slow = {"a": Field("a", time="at"), "s": Field("s", offsets=offsets, time="st", pad="last")}
    [said] = doubts(caplog, path, slow)
    assert "900 samples, from 0 to 29.9667, are at " in said
    assert "of its 3000 rows; offsets, tolerance and all times need one unit, and both clocks one time that" in said
    [said] = doubts(caplog, path, {"s": Field("s", time="st"), "a": Field("a", offsets=offsets, time="at", pad="last")})
    assert BEYOND in said
    [said] = doubts(caplog, path, slow | {"s": Field("s", offsets=offsets, time="later", pad="last")})
    assert f"at {offsets[0]:g} s {BEYOND}, and both clocks one time that is 0" in said


@pytest.mark.parametrize("direction", ["nearest", "backward"])
@pytest.mark.parametrize("roundings", [1.6, 2.6, 3.9, 4.1, 4.6, 7.7])
def test_float32_is_refused_or_gives_the_rows_of_exact_times(h5, direction, roundings):
    step = roundings * float(np.spacing(np.float32(140_000)))
    times = 140_000 + np.arange(2000) * step
    path = h5(x=np.arange(2000), t=times.astype("f4"), begins=np.repeat(np.arange(100), 20))
    fields = {"x": Field("x", offsets=[-5 * step, -step, 0.0], time="t", direction=direction, pad="last")}
    if roundings < 4:
        refused(FormatError, ["too coarse to tell rows"], path, fields, episodes="begins")
        return
    batch = read(HDF5Source(path, fields, episodes="begins"), np.arange(2000))
    wanted, begin = np.arange(2000)[:, None] + [-5, -1, 0], np.arange(2000)[:, None] // 20 * 20
    np.testing.assert_array_equal(batch["x"], np.maximum(wanted, begin))
    np.testing.assert_array_equal(batch["x_mask"], wanted >= begin)


@pytest.mark.parametrize(("first", "said"), [(1.7e9, "to 128 s"), (6e5, "to 0.0625 s"), (140_000, "to 0.0156 s")])
def test_float32_too_coarse_to_tell_the_rows_apart_is_an_error(h5, first, said):
    times = (first + np.arange(300) / 30).astype("f4")
    path = h5(x=np.arange(300), t=times, u=first + np.arange(300) / 30)
    said = ["t: float32 rounds times near", said, "write float64, or seconds since the first row"]
    refused(FormatError, said, path, {"x": Field("x", offsets=[-0.2, 0.0], time="t")})
    timed = Field("x", offsets=[0.0], time="u")
    refused(FormatError, said, path, {"x": Field("x", time="t"), "y": timed})
    assert len(HDF5Source(path, {"x": Field("x", time="u"), "y": timed})) == 300


def test_rows_in_seconds_are_those_nearest_to_the_times_of_rows(h5):
    times = np.cumsum([5.0, 0.1, 0.1, 0.12, 0.09, 0.1, 3.0, 0.1])
    onsets = {"onset": [5.2, 4.95, 5.33, 8.5, 5.12, 8.7], "label": [3, 1, 4, 1, 5, 9]}
    later = np.array(onsets["onset"])
    paths = [h5(f"{n}.h5", x=np.arange(8) + 10 * n, t=times + 100 * n, onset=later + 100 * n) for n in (0, 1)]
    rows = [2, 0, 3, 6, 1, 7]
    source = HDF5Source(paths, {"x": "x"}, rows="onset", time="t")
    assert read(source, np.arange(12))["x"].tolist() == [*rows, *(10 + row for row in rows)]
    by_part = HDF5Source(paths, {"x": Field("x", window=(0, 2))}, rows={"0": [5.1], "1": [108.44]}, time="t")
    assert read(by_part, [0, 1])["x"].tolist() == [[1, 2], [16, 17]]
    labelled = h5("labelled.h5", x=np.arange(8), t=times, **onsets)
    source = HDF5Source(labelled, {"x": "x", "y": Field("label", per="anchor")}, rows="onset", time="t", exclude=[4])
    assert source.column("y").tolist() == [3, 1, 4, 1, 9]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": [5.0, 7.0]}, "rows: it holds 7.0 at 1, which is further than 0.1 s, the median interval"),
        ({"rows": [8.3]}, "rows: 8.3 s, row 6, is one of the 7 rows of"),
        ({"rows": None}, "time: goes with rows=, which hold seconds"),
        ({"rows": [5.0], "rate": 10}, "rate: 10: give the rows per second, rate=, or the dataset of their times"),
    ],
    ids=str,
)
def test_wrong_seconds_of_rows_are_named(h5, options, said):
    path = h5(x=np.arange(7), t=[5.0, 5.1, 5.2, 5.3, 5.4, 8.2, 8.3])
    refused(ConfigError, [said], path, {"x": Field("x", window=(0, 2))}, **{"time": "t"} | options)
