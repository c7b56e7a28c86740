"""What ``inspect`` suggests for episodes, volumes, events and masks, and for a table beside its folder of images."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from support.files import examples
from support.lines import check, only, sides

from lit_async_data.__main__ import main
from lit_async_data.tools.inspect import hdf5_report, report_on, table_report

ROWS = {"obs": np.zeros((60, 8), "f4"), "action": np.zeros((60, 2), "f4")}
LAST = np.isin(np.arange(60), [9, 39, 59])
EPISODES = [
    ({"episode_index": np.repeat([0, 1, 2], [10, 30, 20])}, "episode_index"),
    ({"meta/trajectory_id": np.repeat(["a", "b", "c"], [10, 30, 20]).astype("S")}, "meta/trajectory_id"),
    ({"terminals": LAST & (np.arange(60) > 9), "timeouts": LAST}, {"flags": ["terminals", "timeouts"]}),
    ({"dones": LAST}, {"flags": "dones"}),
    ({"meta/episode_ends": [10, 40, 60]}, {"ends": "meta/episode_ends"}),
    ({"ep_len": [10, 30, 20], "ep_offset": [0, 10, 40]}, {"starts": "ep_offset", "lengths": "ep_len"}),
    ({"total_steps": [10, 30, 20]}, {"lengths": "total_steps"}),
]


@pytest.mark.parametrize(("divided", "episodes"), EPISODES)
def test_episodes_end_to_end_are_kept_whole(divided, episodes):
    examples.datasets("play.h5", ROWS | divided)
    suggestion = only(hdf5_report(["play.h5"]))
    assert suggestion.call.options["episodes"] == episodes
    assert suggestion.call.fields == {"x": "obs", "y": "action"}
    check(suggestion)
    note = next(each for each in suggestion.notes if 'groups="episode"' in each)
    with sides(suggestion, note.partition(" keeps each episode")[0]) as found:
        assert sorted(map(len, found.values())) in ([10, 50], [20, 40], [30, 30])


DEMOS = {f"demo_{n}/{name}": values for n in range(3) for name, values in (ROWS | {"dones": LAST}).items()}


@pytest.mark.parametrize("given", [{"total_steps": [10, 70]}, {"episode_index": np.arange(60) % 2}, {"dones": [0, 1]}])
def test_what_divides_no_rows_is_left_out(given):
    examples.datasets("play.h5", ROWS | given)
    assert only(hdf5_report(["play.h5"])).call.options == {}
    examples.datasets("demos.h5", DEMOS)  # each of which is an episode
    assert only(hdf5_report(["demos.h5"])).call.options == {"group": "demo_*"}


SIZES = [(12, 30, 41), (9, 33, 37), (70, 66, 80)]


def volumes(where, *, channels=(), mask="mask"):
    """A volume for each size, and beside it a mask: ``where`` says in which file and group."""
    for number, size in enumerate(SIZES):
        path, group = where(number)
        with h5py.File(path, "a") as file:
            file[f"{group}/ct"] = np.zeros((*channels, *size), "i2")
            if mask:
                file[f"{group}/{mask}"] = np.ones(size, "u1")


@pytest.mark.parametrize("where", [lambda n: (f"p_{n}.h5", ""), lambda n: ("all.h5", f"patient_{n}")])
@pytest.mark.parametrize(("channels", "mask"), [((), "mask"), ((), "tumour"), ((), ""), ((2,), "seg/label")])
def test_volumes_of_several_sizes_are_read_as_patches(where, channels, mask):
    volumes(where, channels=channels, mask=mask)
    suggestion = only(hdf5_report(["*.h5"]))
    names = {"x": "ct", "y": mask} if mask else {"x": "ct"}
    expected = {key: {"name": name, "patch": [9, 30, 37]} for key, name in names.items()}
    assert suggestion.call.fields == expected
    assert suggestion.call.options.get("layout") == ({"x": "CDHW"} if channels else None)
    assert any("volumes of 3 sizes" in note for note in suggestion.notes)
    parts = "group" if "group" in suggestion.call.options else "file"
    assert any(f'groups="{parts}"' in note for note in suggestion.notes)
    check(suggestion)


def test_a_table_beside_volumes_joins_its_labels_to_masks():
    volumes(lambda n: (f"p_{n}.h5", ""))
    Path("patients.csv").write_text("patient,diagnosis\np_0,a\np_1,b\np_2,a\n")
    suggestion = only(report_on(["p_*.h5", "patients.csv"]))
    assert suggestion.call.options == {"table": "patients.csv", "on": {"patient": "file"}}
    assert suggestion.call.fields["diagnosis"] == "diagnosis"
    assert suggestion.call.fields["y"]["name"] == "mask"
    check(suggestion)
    assert main(["inspect", "--check-all", "p_0.h5", "p_1.h5", "p_2.h5", "patients.csv"]) == 0


def test_volumes_that_are_datasets_of_one_group_are_no_slices_of_the_first():
    kinds = (("volumes", "i2"), ("masks", "u1"))
    every = {f"{name}/P{n}": np.zeros(size, kind) for n, size in enumerate(SIZES) for name, kind in kinds}
    examples.datasets("all.h5", every)
    suggestion = only(hdf5_report(["all.h5"]))
    assert [key["name"] for key in suggestion.call.fields.values()] == ["volumes/P*", "masks/P*"]
    assert suggestion.call.options == {"sample": "dataset"}
    check(suggestion)


@pytest.mark.parametrize("rate", ["attribute", "file", "dataset"])
@pytest.mark.parametrize(("onset", "last"), [("onset", 39.5), ("onset", 9990), ("trigger_row", 400)])
def test_windows_begin_at_events(onset, last, rate):
    events = {f"events/{onset}": np.array([0, 1, last]), "events/label": [0, 1, 0]}
    rates = {"rate": 250.0} if rate == "dataset" else {}
    examples.datasets("eeg.h5", {"eeg": np.zeros((10_000, 8), "f4"), **events, **rates})
    with h5py.File("eeg.h5", "a") as file:
        (file["eeg"] if rate == "attribute" else file).attrs["fs" if rate != "dataset" else "age"] = 250.0
    suggestion = only(hdf5_report(["eeg.h5"]))
    options = suggestion.call.options
    assert options["rows"] == f"events/{onset}"
    expected = {"attribute": {"name": "eeg", "attr": "fs"}, "dataset": {"name": "rate"}, "file": {"attr": "fs"}}[rate]
    assert options.get("rate") == (expected if last == 39.5 else None)
    assert suggestion.call.fields["y"] == {"name": "events/label", "per": "anchor"}
    assert "pad" not in suggestion.call.fields["x"]  # an event whose window leaves the recording is left out
    assert check(suggestion)["y"].tolist() == [0, 1, 0][: 3 if last == 400 else 2]


def recordings(path, group="S{:02}", *, events=False, of=lambda time, number: (8, time), **label):
    """A recording for each of 10 subjects, which differ in length."""
    with h5py.File(path, "w") as file:
        for number in range(10):
            eeg = file.create_dataset(f"{group.format(number)}/eeg", of(4000 + 30 * number, number), "f4")
            eeg.parent.attrs.update(label)
            if events:
                eeg.parent["onset"], eeg.parent["label"] = np.arange(number + 4) * 300, np.arange(number + 4) % 2


WINDOWS = {"x": {"name": "eeg", "window": [0, 256]}}


@pytest.mark.parametrize("group", ["S{:02}", "data/sub-{:x}"])
def test_recordings_of_groups_have_windows_along_time(group, capsys):
    recordings("eeg.h5", group, events=True)
    suggestion = only(hdf5_report(["eeg.h5"]))
    assert suggestion.call.fields == WINDOWS | {"y": {"name": "label", "per": "anchor"}}
    assert suggestion.call.options == {"group": group.partition("{")[0] + "*", "rows": "onset", "layout": {"x": "CN"}}
    assert suggestion.samples == sum(range(4, 14))
    assert check(suggestion)["x"].shape[1:] == (8, 256)
    assert main(["inspect", "eeg.h5"]) == 0
    assert "8×4,000–4,270" in capsys.readouterr().out


@pytest.mark.parametrize("label", [{}, {"label": 1}])
def test_recordings_without_events_have_windows_end_to_end(label):
    recordings("eeg.h5", **label)
    suggestion = only(hdf5_report(["eeg.h5"]))
    assert suggestion.call.fields == WINDOWS | ({"y": {"attr": "label"}} if label else {})
    assert suggestion.call.options == {"group": "S*", "stride": 256, "layout": {"x": "CN"}}
    check(suggestion)
    assert main(["pack", "eeg.h5", "-o", "packed.h5"]) == 0


def test_names_of_classes_that_files_number_differently_are_named():
    for path, names in (("a.h5ad", ["B", "NK"]), ("b.h5ad", ["NK", "B"])):
        with h5py.File(path, "w") as file:
            file["X"], file["obs/donor"] = np.zeros((9, 5), "f4"), np.arange(9)
            file["obs/cell_type/codes"], file["obs/cell_type/categories"] = np.arange(9) % 2, np.array(names, "S")
            file["obs/cell_type"].attrs["encoding-type"] = "categorical"
    report = hdf5_report(["a.h5ad", "b.h5ad"])
    assert "cell_type" not in only(report).call.python()
    assert len(report.notes) == 1
    assert "'y': 'obs/cell_type'" in report.notes[0].replace('"', "'")
    assert "classes=['B', 'NK']) numbers them by name" in report.notes[0]


@pytest.mark.parametrize(("shape", "layout"), [((8, 9), {"x": "NHWC"}), ((8, 9, 1), {"x": "NHWC", "mask": "NHWC"})])
def test_a_mask_beside_labelled_images_is_a_field(shape, layout):
    datasets = {"images": np.zeros((20, 8, 9, 3), "u1"), "labels": np.arange(20) % 2}
    examples.datasets("x.h5", {**datasets, "mask": np.zeros((20, *shape), "u1"), "masks_small": np.zeros((20, 4, 4))})
    suggestion = only(hdf5_report(["x.h5"]))
    assert suggestion.call.fields == {"x": "images", "y": "labels", "mask": "mask"}
    assert suggestion.call.options["layout"] == layout
    check(suggestion)


def test_attributes_are_listed(capsys):
    examples.datasets("x.h5", {"run_0/x": np.zeros((9, 4)), "run_1/x": np.zeros((9, 4))})
    with h5py.File("x.h5", "a") as file:
        file.attrs["site"], file["run_0"].attrs["affine"], file["run_0/x"].attrs["fs"] = "a" * 99, np.eye(4), 256.0
    report = hdf5_report(["x.h5"])
    assert report.attributes == {"/": [f"site {'a' * 24}"], "run_0": ["affine (4, 4)"], "run_0/x": ["fs 256.0"]}
    assert main(["inspect", "x.h5"]) == 0
    assert " · run_0: affine (4, 4)\n" in capsys.readouterr().out


@pytest.fixture
def birds():
    Path("photos").mkdir()
    for number in range(8):
        Image.new("RGB", (8, 9)).save(f"photos/{number}.png")
    lines = "".join(f"{n}.png,{'ab'[n % 2]},{'xyz'[n % 3]}\n" for n in range(8))
    Path("birds.csv").write_text(f"path,kind,species\n{lines}")


@pytest.mark.usefixtures("birds")
def test_the_folder_beside_a_table_is_found_and_other_labels_are_named():
    suggestion = only(table_report("birds.csv"))
    assert suggestion.call.options == {"root": "photos"}
    assert "other labels: species" in suggestion.notes
    check(suggestion)


@pytest.mark.usefixtures("birds")
def test_commands_take_the_folder_that_is_given(capsys):
    Path("a").mkdir()
    Path("photos").rename("a/photos")
    report = table_report("birds.csv")
    assert not report.suggestions
    assert "0.png: no such file" in report.notes[0]
    assert report.notes[-1] == "--root FOLDER, or root=, says where the paths begin"
    root = ["birds.csv", "--root", "a/photos"]
    for words in (["inspect"], ["inspect", "--check-all"], ["doctor", "--seconds", "0.05"]):
        assert main([*words, *root]) == 0
    assert 'root="a/photos"' in capsys.readouterr().out
    check(only(report_on(root[:1], root=root[2])))
    examples.images("x.h5", 8)
    assert main(["inspect", "x.h5", "--root", "a"]) == 2
    assert "root: HDF5Source has no such option" in capsys.readouterr().err


def test_the_dataset_of_files_in_the_folder_beside_a_table_is_found():
    Path("sessions").mkdir()
    examples.datasets("sessions/a.h5", {"images": np.zeros((40, 8, 7, 3), "u1"), "n": np.arange(40)})
    Path("t.csv").write_text("path,row,label\n" + "".join(f"a.h5,{n},{'ab'[n % 2]}\n" for n in range(40)))
    suggestion = only(table_report("t.csv"))
    assert suggestion.call.options == {"root": "sessions"}
    assert suggestion.call.fields["x"] == {"name": "path", "dataset": "images", "layout": "NHWC"}
    check(suggestion)
    assert main(["pack", "sessions/a.h5", "--fields", "picture=images", "-o", "a.h5"]) == 0
    Path("sessions/a.h5").unlink()
    report = table_report("t.csv")  # of a file whose fields have the names of datasets
    assert not report.suggestions
    assert "has no dataset 'data'" in report.notes[0]


@pytest.mark.usefixtures("birds")
@pytest.mark.parametrize("first", ["photos/0.png;photos/1.png", "photos/0.png"])
def test_paths_in_one_cell_are_separated(first):
    Path("t.csv").write_text(f"views,label\n{first},a\n" + "photos/2.png,b\nphotos/3.png;photos/4.png,a\n" * 20)
    suggestion = only(table_report("t.csv"))
    assert suggestion.call.fields == {"x": {"name": "views", "separator": ";"}, "y": "label"}
    assert suggestion.batch["x"]["shape"] == (2, 3, 9, 8)
    check(suggestion)
    assert main(["inspect", "t.csv", "--check-all"]) == 0
