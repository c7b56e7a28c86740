"""What is suggested for HDF5 files can be meant, and both lines read it."""

import contextlib

import h5py
import numpy as np
import pytest
from support.files import examples
from support.lines import check, check_said, only, sides

from lit_async_data import Field, HDF5Source
from lit_async_data.tools.inspect import hdf5_files
from lit_async_data.tools.inspect.hdf5_files import hdf5_report


def test_images_with_labels():
    examples.images("scan.h5")
    suggestion = only(hdf5_report(["scan.h5"]))
    assert suggestion.call.python() == (
        "from lit_async_data import HDF5Source\n"
        'source = HDF5Source("scan.h5", {"x": "images", "y": "labels"}, layout={"x": "NHWC"})'
    )
    assert suggestion.call.command() == (
        "python train.py data=hdf5 data.train.path=scan.h5 'data.train.fields={x: images, y: labels}' "
        "'data.train.layout={x: NHWC}'"
    )
    assert check(suggestion)["x"].shape == (4, 3, 16, 12)
    note, said, floats = suggestion.notes
    assert said == "y is from 0 to 4"
    assert 'on a GPU, device_transform=ToFloat("x") makes float32' in floats
    with sides(suggestion, note.partition(" keeps each patient")[0]) as found:
        assert {key: len(side) % 10 for key, side in found.items()} == {"train": 0, "val": 0}


def test_a_file_without_samples_says_so():
    with h5py.File("empty.h5", "w") as file:
        file["x"], _ = np.zeros((0, 8)), file.create_group("a/b")
    (note,) = hdf5_report(["empty.h5"]).notes
    assert note.startswith("no dataset looks like samples")


def test_a_file_of_more_datasets_than_are_looked_at_says_so(monkeypatch):
    monkeypatch.setattr(hdf5_files, "MOST_DATASETS", 1)
    examples.images("a.h5", 8)
    report = hdf5_report(["a.h5"])
    assert len(report.datasets) == 1
    assert report.notes[-1] == "no more than the first 1 datasets are looked at"


@pytest.mark.parametrize("labels", [False, True])
def test_windows_of_groups(labels):
    examples.recording("rec.h5", labels=labels)
    report = hdf5_report(["rec.h5"])
    assert report.groups == [{"name": "run_*", "count": 3}]
    assert [(each.name, each.rows, each.groups) for each in report.datasets][-1] == ("run_*/eeg/signal", (400, 402), 3)
    windows = only(report)
    assert 'group="run_*", stride=8)' in windows.call.python()
    assert '{"name": "eeg/signal", "window": (0, 64)}' in windows.call.python()
    batch = check(windows)
    assert batch["x"].shape == (4, 64, 6)
    assert batch["y"].tolist() == [3, 3, 3, 3] if labels else batch["y"].shape == (4, 8, 6)


def test_files_of_other_stages_are_left_out():
    for stage, samples in (("train", 20), ("val", 8), ("test", 4)):
        examples.images(f"{stage}.h5", samples)
    suggestion = only(hdf5_report(["*.h5"]))
    assert suggestion.call.path == "train.h5"
    check(suggestion)


def test_several_files_are_parts_of_one_source_by_a_pattern_that_matches_only_them():
    for number in range(3):
        examples.images(f"scan_{number}.h5", 10 + number)
    examples.masks("other.h5")
    suggestion = only(hdf5_report(["scan_*.h5"]))
    assert 'HDF5Source("scan_*.h5", ' in suggestion.call.python()
    assert suggestion.samples == 33
    check(suggestion)
    listed = only(hdf5_report(["scan_2.h5", "scan_0.h5"]))
    assert 'HDF5Source(["scan_2.h5", "scan_0.h5"], ' in listed.call.python()
    check(listed)


def test_matlab_stores_samples_last_and_class_numbers_as_doubles():
    examples.matlab("faces.mat")
    report = hdf5_report(["faces.mat"])
    suggestion = only(report)
    assert '"y": {"name": "y", "column": 0}}, layout={"x": "CHWN"})' in suggestion.call.python()
    batch = check(suggestion)
    assert batch["x"].shape == (4, 3, 20, 16)
    assert batch["y"].tolist() == [1, 2, 3, 4]
    assert suggestion.reading == "copied"
    assert any("count classes from 0" in note for note in suggestion.notes)
    assert any("MATLAB stores axes in reverse" in note for note in suggestion.notes)
    assert next(each for each in report.datasets if each.name == "X").why.startswith("samples are on axis 3")


NAMED = {f"img_{n}": np.zeros((8, 9, 3), "u1") for n in range(10)}
MOLECULES = {f"mol_{n}/pos": np.zeros((20 + n, 3)) for n in range(3)} | {f"mol_{n}/target": float(n) for n in range(3)}
OPAQUE = {f"s{n}/{k}": np.arange(9) if k == "y" else np.void(examples.JPEG.tobytes()) for n in (1, 2) for k in "ay"}
EPISODES = {f"data/demo_{number}/actions": np.zeros((20 + number, 7), "f4") for number in (1, 2, 10)}
EPISODES |= {f"data/demo_{number}/obs/rgb": np.zeros((20 + number, 24, 24, 3), "u1") for number in (1, 2, 10)}
EPISODES["mask/train"] = [b"demo_1"]
IMAGES, ROWS, COUNT, NUMBERS = np.zeros((40, 28, 28), "u1"), np.zeros((40, 9), "f4"), np.arange(40), np.arange(200)
EEG = {"eeg": np.zeros((4000, 6), "f4")}
EVENTS = np.array([(400 * n, n % 3) for n in range(8)], [("onset", "i8"), ("label", "i4")])
UNLABELLED = {f"a/{n}.x": IMAGES[n] for n in range(12)} | {f"labels/{n}": n for n in range(11)}
# What writes a file; what the one suggestion says, None if there is none; what a note says; what is said nowhere.
MEANT = [
    ({"x": IMAGES, "index": COUNT, "counter": COUNT, "valid": COUNT >= 0}, '{"x": "x"}', "", "index"),
    ({"x": ROWS, "y": np.append(np.arange(39), np.nan)}, '{"x": "x", "y": "y"}', "float64", "y is from"),
    ({"x": np.zeros((200, 9), "f4"), "y": NUMBERS[::-1], "origin/part": NUMBERS // 9}, '{"x": "x"}', "", "origin"),
    ({"x": ROWS, "y": np.eye(10)[np.arange(40) % 10]}, '{"x": "x", "y": "y"}', "float64", ""),
    (EPISODES, '{"x": "obs/rgb", "y": "actions"}, group="data/demo_*", layout={"x": "NHWC"})', "", "mask"),
    (examples.anndata, '"y": "obs/cell_type"', "", ""),
    (
        lambda path: examples.anndata(path, missing=True),
        '"y": {"name": "obs/cell_type", "null": "drop"}',
        "left out",
        "",
    ),
    (examples.masks, '{"x": "volume", "y": "mask"}', "", ""),
    (examples.stages, '{"x": "X_train", "y": "y_train"}', "", "test"),
    (examples.of_pandas, None, "pandas.read_hdf(", "axis1"),
    (examples.ragged, '{"x": ".", "y": "label"}', "", "window"),
    (lambda path: examples.ragged(path, "seq/"), '{"x": "seq", "y": "label"}', "", "window"),
    ({"data": np.zeros((64, 9000), "f4"), "gain": np.arange(64)}, 'layout={"x": "CN", "y": "CN"}', "", "gain"),
    (EEG | {"events": EVENTS}, '"events.label", "per": "anchor"}}, rows="events.onset")', "", "stride"),
    (EEG | {"starts": EVENTS["onset"] + 800}, '"window": (0, 512), "pad": "zero"}}, rows="starts")', "", "stride"),
    ({"Series/data": np.zeros((300, 4), "f4"), "electrodes/imp": np.arange(4) // 2}, "(0, 64)", "", "electrodes"),
    (lambda path: examples.grid(path, "time", "lat", "lon"), '{"x": "v"}', "", "level"),
    (examples.netcdf, '{"x": {"name": "t2m", "mask_and_scale": True}}', "", "lat"),
    (lambda path: examples.grid(path, "lat", "lon"), None, "no dataset looks like samples", ""),
    (examples.one_each, '"y": "label"}, group="*", sample="group", layout={"x": "HWC"})', "", "0 samples"),
    (lambda path: examples.one_each(path, label=None), '{"x": "image", "y": {"attr": "label"}}', "", "0 samples"),
    (MOLECULES, '{"x": "pos", "y": "target"}, group="mol_*", sample="group")', "batch_by=x", "0 samples"),
    (lambda x: examples.one_each(x, "v{}", "", compression="gzip"), "v*", "10 datasets compressed: each sample", ""),
    (NAMED, '{"x": "img_*"}, sample="dataset", layout={"x": "HWC"})', "uint8, 10 datasets", "y is from"),
    (lambda path: examples.one_each(path, "a/{}.x", "labels/{}"), '{"x": "a/*.x", "y": "labels/*"}, sam', "to 9", ""),
    (UNLABELLED, '{"x": "a/*.x", "y": "labels/*"}, sam', "", "y is from"),
    ({f"s{n}/{k}": n if k == "y" else examples.JPEG for n in (1, 2) for k in "ay"}, '"y": "y"}, g', "BGR", "a single"),
    (OPAQUE, '"image_size": [8, 9]}}, group="s*", sample="group")', "BGR", ""),
    (examples.one_jpeg_each, '"image_size": [8, 9]}, "y": {"attr": "label"}}, sam', "BGR", ""),
    ({f"d/{n // 9}/f/{n % 9}": IMAGES[n] for n in range(18)}, None, "9 datasets has no dataset 'd/0/f/*'", ""),
    ({"img_1": IMAGES[0], "img_2": IMAGES[1], "img_3": IMAGES[2]}, None, "with a * for what differs", ""),
    ({f"x{n}": np.arange(40.0) for n in range(9)}, None, "no dataset looks like samples", "dataset="),
    ({"cube": np.zeros((80, 80, 50), "u2"), "gt": np.zeros((80, 80), "u1")}, None, "(80, 80, 50) may be one", ""),
    ({"image": np.zeros((32, 32, 3), "u1")}, None, "image of shape (32, 32, 3) may be one sample: its rows", ""),
    (examples.compound, None, "no dataset looks like samples", ""),
]


@pytest.mark.parametrize(("write", "suggested", "noted", "never"), MEANT)
def test_what_is_suggested_can_be_meant(write, suggested, noted, never):
    write("x.h5") if callable(write) else examples.datasets("x.h5", write)
    check_said(hdf5_report(["x.h5"]), suggested, noted, never)


def test_the_layout_of_a_group_that_is_a_sample_is_not_that_of_rows():
    examples.one_each("x.h5")
    assert not hdf5_report(["x.h5"]).datasets[0].why


def test_one_file_per_sample_is_no_file_of_rows():
    for number in range(3):
        examples.datasets(f"{number}.h5", {"image": np.zeros((8, 9), "f4"), "label": number})
    assert only(hdf5_report(["*.h5"])).call.python().endswith('{"x": "image", "y": "label"}, sample="group")')


def test_groups_of_one_image_each_are_samples():
    examples.jpegs("all.h5")
    with h5py.File("all.h5") as every, h5py.File("x.h5", "w") as file:
        for number in range(3):
            every.copy(f"separate/{number}", file.create_group(f"s{number}"), "a")
    assert "hold one image each: group='*'" in hdf5_report(["x.h5"]).notes[0]
    with contextlib.closing(HDF5Source("x.h5", {"x": Field("a", decode="image")}, group="*", sample="group")) as found:
        assert len(found) == 3


@pytest.mark.parametrize("name", ["text", "opaque", "variable", "padded", "separate", "joined"])
def test_encoded_images_are_decoded_by_what_is_suggested(name):
    examples.jpegs("all.h5")
    with h5py.File("all.h5") as every, h5py.File("x.h5", "w") as file:
        every.copy(name, file)
        file["action"] = np.zeros((6, 2000))  # more bytes than the images have, and still what to predict
    suggestion = only(hdf5_report(["x.h5"]))
    assert suggestion.batch["x"] == {"dtype": "uint8", "shape": (3, 10, 12)}
    camera = f"x: {{name: {name}, decode: image, image_size: [10, 12]}}"
    assert f"data.train.fields={{{camera}, y: action}}" in suggestion.call.command()
    assert any("channels: BGR" in each for each in suggestion.notes)
    check(suggestion)
