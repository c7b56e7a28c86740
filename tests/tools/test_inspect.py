"""``inspect``: what it says of files is what sources do, and the lines that it suggests read them."""

import contextlib
import csv
import dataclasses
import json
import re
import shlex
from pathlib import Path

import h5py
import hydra
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from PIL import Image
from pyarrow import parquet
from support.files import examples
from support.lightning.command_line import CONFIGS

from lit_async_data import AsyncLoader, Field, HDF5Source, split
from lit_async_data.__main__ import main
from lit_async_data.tools.call import Call
from lit_async_data.tools.inspect import hdf5_files
from lit_async_data.tools.inspect.command import report_on
from lit_async_data.tools.inspect.contents import SHOWN
from lit_async_data.tools.inspect.report import ColumnReport, Report, Suggestion

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def built_by_python(suggestion):
    """The source that the suggested Python builds."""
    names = {}
    exec(suggestion.call.python(), names)
    return names["source"]


def built_by_command(suggestion):
    """The source that the suggested command line builds."""
    _, script, *overrides = shlex.split(suggestion.call.command())
    assert script == "train.py"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        module = hydra.utils.instantiate(compose("train", overrides).data)
    source = module.sources["train"][0]
    return source if "data=hdf5" in overrides else source.source  # of a table or a folder, it is one side of a split


def first_batch(source):
    with AsyncLoader(source, {"batch_size": 4, "shuffle": False, "workers": 0}) as loader:
        return {key: np.asarray(values) for key, values in next(loader).items()}


def check(suggestion):
    """Both lines build the same source, of the samples and batches that the report tells; returns the first batch."""
    with contextlib.closing(built_by_python(suggestion)) as source:
        assert len(source) == suggestion.samples
        batch = first_batch(source)
        told = {key: (each["dtype"], tuple(each["shape"])) for key, each in suggestion.batch.items()}
        assert {key: (str(values.dtype), values.shape[1:]) for key, values in batch.items()} == told
        assert source.chunks.reading == suggestion.reading
    with contextlib.closing(built_by_command(suggestion)) as other:
        same = first_batch(other)
        assert len(other) == suggestion.samples
        assert {key: np.array_equal(batch[key], same[key]) for key in batch} == dict.fromkeys(batch, True)
    return batch


def only(report):
    (suggestion,) = report.suggestions
    return suggestion


def test_images_with_labels():
    examples.images("scan.h5")
    suggestion = only(report_on(["scan.h5"]))
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
    names = {"split": split}
    exec(suggestion.call.python(), names)
    sides = eval(note.partition(" keeps each patient")[0], names)
    assert {key: len(side) % 10 for key, side in sides.items()} == {"train": 0, "val": 0}
    names["source"].close()


@pytest.mark.parametrize("damaged", [False, True])
def test_what_does_not_fit_is_named(damaged):
    examples.images("a.h5", 8)
    Path("b.h5").write_text("no") if damaged else examples.masks("b.h5")
    (note,) = report_on(["a.h5", "b.h5"]).notes
    assert "does not fit: " in note
    assert ("b.h5: is not an HDF5 file" in note) == damaged


def test_a_file_without_samples_says_so():
    with h5py.File("empty.h5", "w") as file:
        file["x"] = np.zeros((0, 8))
        file.create_group("a/b")
    (note,) = report_on(["empty.h5"]).notes
    assert note.startswith("no dataset looks like samples")


def test_a_file_of_more_datasets_than_are_looked_at_says_so(monkeypatch):
    monkeypatch.setattr(hdf5_files, "MOST_DATASETS", 1)
    examples.images("a.h5", 8)
    report = report_on(["a.h5"])
    assert len(report.datasets) == 1
    assert report.notes[-1] == "no more than the first 1 datasets are looked at"


@pytest.mark.parametrize("labels", [False, True])
def test_windows_of_groups(labels):
    examples.recording("rec.h5", labels=labels)
    report = report_on(["rec.h5"])
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
    suggestion = only(report_on(["*.h5"]))
    assert suggestion.call.path == "train.h5"
    check(suggestion)


def test_several_files_are_parts_of_one_source_by_a_pattern_that_matches_only_them():
    for number in range(3):
        examples.images(f"scan_{number}.h5", 10 + number)
    examples.masks("other.h5")
    suggestion = only(report_on(["scan_*.h5"]))
    assert 'HDF5Source("scan_*.h5", ' in suggestion.call.python()
    assert suggestion.samples == 33
    check(suggestion)
    listed = only(report_on(["scan_2.h5", "scan_0.h5"]))
    assert 'HDF5Source(["scan_2.h5", "scan_0.h5"], ' in listed.call.python()
    check(listed)


def test_matlab_stores_samples_last_and_class_numbers_as_doubles():
    examples.matlab("faces.mat")
    report = report_on(["faces.mat"])
    suggestion = only(report)
    assert '"y": {"name": "y", "column": 0}}, layout={"x": "CHWN"})' in suggestion.call.python()
    batch = check(suggestion)
    assert batch["x"].shape == (4, 3, 20, 16)
    assert batch["y"].tolist() == [1, 2, 3, 4]
    assert suggestion.reading == "copied"
    assert any("count classes from 0" in note for note in suggestion.notes)
    assert any("MATLAB stores axes in reverse" in note for note in suggestion.notes)
    assert next(each for each in report.datasets if each.name == "X").why.startswith("samples are on axis 3")


def test_a_path_with_everything_that_shells_hydra_and_patterns_treat_specially():
    for name in ('a b\'s (v2), {x: 1} [0-9] "q" é.h5', "back\\slash.h5", "=,#~$HOME.h5", "null"):
        examples.images(name, 8)
        check(only(report_on([name])))
    with h5py.File("names.h5", "w") as file:
        file["my images (raw)"], file["true"] = np.zeros((20, 8, 8, 3), "u1"), np.arange(20) % 2
    check(only(report_on(["names.h5"])))


@pytest.mark.parametrize("sizes", [1, 3])
def test_a_folder_of_classes(folder, sizes, capsys):
    examples.class_folders("photos", sizes)
    report = report_on(["photos"])
    suggestion = only(report)
    size = "" if sizes == 1 else " data.source.image_size=224"
    assert suggestion.call.command() == f"python train.py data=folder data.source.root=photos{size}"
    check(suggestion)
    assert main(["inspect", "photos"]) == 0
    assert suggestion.call.command() in capsys.readouterr().out


@pytest.mark.parametrize("table", ["tables/birds.csv", "photos/birds.csv"])
def test_absolute_paths_start_from_the_folder_that_all_of_them_are_in(folder, table):
    rows = ["file,species"]
    for name in ("auk", "owl"):
        (folder / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(f"photos/{name}/1.png")
        rows += [f"{folder}/photos/{name}/1.png,{name}"] * 4
    Path("tables").mkdir()
    Path(table).write_text("\n".join(rows))
    report = report_on([table])
    source = built_by_python(only(report))
    assert [source[number]["y"] for number in (0, 7)] == [0, 1]
    source.close()
    assert report.columns[0].examples[0].endswith("photos/auk/1.png")


def written(table, suffix):
    """Writes a table of pyarrow; returns its name."""
    rows, name = table.to_pylist(), f"birds.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, name)
    elif suffix == "jsonl":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=";" if suffix == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return name


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_images(folder, suffix):
    report = report_on([written(examples.bird_table(folder), suffix)])
    assert {each.name: each.kind for each in report.columns} == {
        "id": "number", "path": "image", "species": "class", "site": "class",
    }  # fmt: skip
    suggestion = only(report)
    assert '{"x": "path", "y": "species"}' in suggestion.call.python()
    assert 'id="id"' in suggestion.call.python()
    assert "image_size" not in suggestion.call.python()
    check(suggestion)
    assert any('groups="site"' in note for note in suggestion.notes)


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_a_table_with_a_column_of_stages_and_images_of_several_sizes(folder, suffix):
    suggestion = only(report_on([written(examples.bird_table(folder, split=True, sizes=3), suffix)]))
    assert "image_size=224" in suggestion.call.python()
    assert 'split(source, by="part") has the sides that it names: training, val' in suggestion.notes
    check(suggestion)


def test_folders_that_fit_are_all_named(folder):
    for name in ("large", "small"):
        examples.class_folders(f"tables/{name}", 1)
    Path("tables/t.csv").write_text("file,species\n" + "auk/0.png,auk\nowl/1.png,owl\n" * 20)
    suggestion = only(report_on(["tables/t.csv"]))
    assert suggestion.call.options["root"] == "tables/large"
    assert "files lie in other folders, too: root='tables/small'" in suggestion.notes
    check(suggestion)


MOLECULES = {
    f"mol_{n}/{name}": of(n)
    for n in range(3)
    for name, of in (("target", float), ("pos", lambda n: np.zeros((20 + n, 3))))
}
EPISODES = {f"data/demo_{number}/actions": np.zeros((20 + number, 7), "f4") for number in (1, 2, 10)}
EPISODES |= {f"data/demo_{number}/obs/rgb": np.zeros((20 + number, 24, 24, 3), "u1") for number in (1, 2, 10)}
EPISODES["mask/train"] = [b"demo_1"]
IMAGES, ROWS = np.zeros((40, 28, 28), "u1"), np.zeros((40, 9), "f4")
EEG = {"eeg": np.zeros((4000, 6), "f4")}
EVENTS = np.array([(400 * n, n % 3) for n in range(8)], [("onset", "i8"), ("label", "i4")])
# What writes a file; what the one suggestion says, None if there is none; what a note says; what is said nowhere.
MEANT = [
    ({"images": IMAGES, "index": np.arange(40), "valid": np.ones(40, bool)}, '{"x": "images"}', "", "index"),
    ({"x": ROWS, "y": np.append(np.arange(39), np.nan)}, '{"x": "x", "y": "y"}', "float64", "y is from"),
    ({"x": ROWS, "counter": np.arange(40)}, '{"x": "x"}', "", "counter"),
    ({"x": IMAGES, "origin/part": np.arange(40) // 9}, '{"x": "x"}', "", "origin"),
    ({"x": ROWS, "y": np.eye(10)[np.arange(40) % 10]}, '{"x": "x", "y": "y"}', "float64", ""),
    (EPISODES, '{"x": "obs/rgb", "y": "actions"}, group="data/demo_*", layout={"x": "NHWC"})', "", "mask"),
    (examples.anndata, '"y": "obs/cell_type"', "", ""),
    (lambda path: examples.anndata(path, missing=True), '"y": "obs/phase"', "", ""),
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
    (
        lambda path: examples.one_each(path, "img_{}", ""),
        '{"x": "img_*"}, sample="dataset", layout={"x": "HWC"})',
        "uint8, 10 datasets",
        "y is from",
    ),
    (lambda path: examples.one_each(path, "a/{}.x", "labels/{}"), '{"x": "a/*.x", "y": "labels/*"}, sam', "to 9", ""),
    (
        {f"a/{n}.x": IMAGES[n] for n in range(12)} | {f"labels/{n}": n for n in range(11)},
        '{"x": "a/*.x", "y": "labels/*"}, sam',
        "",
        "y is from",
    ),
    (examples.one_jpeg_each, '"image_size": [8, 9]}, "y": {"attr": "label"}}, sam', "BGR", ""),
    ({f"d/{n // 9}/f/{n % 9}": IMAGES[n] for n in range(18)}, None, "9 datasets has no dataset 'd/0/f/*'", ""),
    ({"img_1": IMAGES[0], "img_2": IMAGES[1], "img_3": IMAGES[2]}, None, "with a * for what differs", ""),
    ({f"x{n}": np.arange(40.0) for n in range(9)}, None, "no dataset looks like samples", "dataset="),
    (
        {"image": np.zeros((32, 32, 3), "u1")},
        None,
        "image of shape (32, 32, 3) may be one sample: its rows are none",
        "",
    ),
    (examples.compound, None, "no dataset looks like samples", ""),
]


@pytest.mark.parametrize(("write", "suggested", "noted", "never"), MEANT)
def test_what_is_suggested_can_be_meant(write, suggested, noted, never):
    write("x.h5") if callable(write) else examples.datasets("x.h5", write)
    check_said(report_on(["x.h5"]), suggested, noted, never)


def test_datasets_that_cannot_be_read_are_counted():
    examples.datasets("x.h5", {f"runs/{number}": h5py.SoftLink("/lost") for number in range(9)})
    with h5py.File("x.h5", "a") as file:
        file.create_dataset(b"s\xe9", data=[1]), file.create_group(b"g\xe9")
    assert [each.type for each in report_on(["x.h5"]).datasets] == ["int64", "9 datasets"]


def check_said(report, suggested, noted, never=""):
    assert len(report.suggestions) == (suggested is not None)
    said = " ".join(
        [*report.notes, *(line for each in report.suggestions for line in (each.call.python(), *each.notes))]
    )
    assert (suggested or "") in said
    assert noted in " ".join([said, *(f"{each.type} {each.why}" for each in report.datasets)])
    assert not never or never not in said
    for each in report.suggestions:
        check(each)


def test_the_layout_of_a_group_that_is_a_sample_is_not_that_of_rows():
    examples.one_each("x.h5")
    assert not report_on(["x.h5"]).datasets[0].why


def test_one_file_per_sample_is_no_file_of_rows():
    for number in range(3):
        examples.datasets(f"{number}.h5", {"image": np.zeros((8, 9), "f4"), "label": number})
    suggested = only(report_on(["*.h5"])).call
    assert suggested.python().endswith('{"x": "image", "y": "label"}, sample="group")')


@pytest.mark.parametrize(("given", "stages"), [(["*.h5", "t/patients.csv"], "0 1 2"), (["*.h5"], "train train val")])
def test_a_table_with_a_row_for_each_file_labels_the_samples(folder, given, stages):
    (folder / "t").mkdir()
    for number in range(3):
        examples.datasets(f"scan_{number}.h5", {"image": np.zeros((8, 9, 9), "f4")})
    rows = [f"scan_{n}{'.h5' * (n % 2)},{'ab'[n % 2]},{stage}" for n, stage in enumerate(stages.split())]
    Path(given[-1].replace("*.h5", "patients.csv")).write_text("\n".join(["scan,diagnosis,fold", *rows]))
    suggestion = report_on(given).suggestions[0]
    assert suggestion.call.options["on"] == {"scan": "file"}
    assert check(suggestion)["y"].tolist() == [0, 0, 0, 0]
    names = {"split": split}
    exec(suggestion.call.python(), names)
    sides = eval(suggestion.notes[0].partition('"fold")')[0] + '"fold")', names)
    assert {key: len(side) for key, side in sides.items()} == {"train": 16, "val": 8}
    names["source"].close()


def test_groups_of_one_image_each_are_samples():
    examples.jpegs("all.h5")
    with h5py.File("all.h5") as every, h5py.File("x.h5", "w") as file:
        for number in range(3):
            every.copy(f"separate/{number}", file.create_group(f"s{number}"), "photo")
    assert "hold one image each: group='*'" in report_on(["x.h5"]).notes[0]
    fields = {"x": Field("photo", decode="image")}
    with contextlib.closing(HDF5Source("x.h5", fields, group="*", sample="group")) as source:
        assert len(source) == 3


def test_encoded_images_are_recognised_by_their_first_bytes():
    examples.jpegs("x.h5")
    found = {each.name: (each.type, each.shape[0], each.reading) for each in report_on(["x.h5"]).datasets}
    assert found.pop("joined") == ("variable, JPEG images", 6, "decoded")
    assert found == dict.fromkeys(("text", "opaque", "variable", "padded", "separate"), ("JPEG images", 6, "decoded"))


@pytest.mark.parametrize("name", ["text", "opaque", "variable", "padded", "separate", "joined"])
def test_encoded_images_are_decoded_by_what_is_suggested(name):
    examples.jpegs("all.h5")
    with h5py.File("all.h5") as every, h5py.File("x.h5", "w") as file:
        every.copy(name, file)
        file["action"] = np.zeros((6, 2000))  # more bytes than the images have, and still what to predict
    suggestion = only(report_on(["x.h5"]))
    assert suggestion.batch["x"] == {"dtype": "uint8", "shape": (3, 10, 12)}
    camera = f"x: {{name: {name}, decode: image, image_size: [10, 12]}}"
    assert f"data.train.fields={{{camera}, y: action}}" in suggestion.call.command()
    assert any("channels: BGR" in each for each in suggestion.notes)
    check(suggestion)


def test_the_first_sample_may_be_empty():
    examples.jpegs("x.h5")
    with h5py.File("x.h5", "a") as file, h5py.File("y.h5", "w") as groups:
        for name in file.keys() - {"variable"}:
            del file[name]
        file["variable"][0] = np.zeros(0, np.uint8)
        for number in range(5):
            groups[f"run_{number}/signal"], groups[f"run_{number}/label"] = np.ones((number and 9, 3), "f4"), number % 2
    images, signals = (only(report_on([name])) for name in ("x.h5", "y.h5"))
    assert images.batch["x"] == {"dtype": "uint8", "shape": (3, 10, 12)}
    assert images.notes[-1].startswith("the first that can be read is sample 1: --check-all")
    assert signals.batch["x"] == {"dtype": "float32", "shape": (9, 3)}


TABLES = [
    ("0.png,1\n1.png,0\n", None, "the first line looks like data (0.png)"),
    ("path,label,slice\nx.h5,0,0\nx.h5,1,1\nx.h5,0,2\n", '{"name": "path", "row": "slice", "dataset": "images"', ""),
    ("a,tags\n" + "1,b|c\n2,c\n3,b\n4,b|c\n5,c|b\n", '{"name": "tags", "separator": "|"}', ""),
    ("a,tags\n" + "1,\n2,c\n3,b\n4,b|c\n", '{"name": "tags", "separator": "|", "null": "zero"}', ""),
    ("a,b,target,when\n" + "1,.5,1,x\n2,1,0,x\n3,2,1,x\n4,3,0,x\n", '{"x": ["a", "b"], "y": "target"}', ""),
    ("a,species,kinds\n" + "1,b,p\n2,c,p\n3,b,q\n4,c,q\n", '"y": "species"', ""),
]


@pytest.mark.parametrize(("rows", "suggested", "noted"), TABLES)
def test_what_is_suggested_for_a_table_can_be_meant(rows, suggested, noted):
    examples.images("x.h5")
    header, _, rest = rows.partition("\n")
    Path("t.csv").write_text(f"{header}\n{rest * 6}")
    check_said(report_on(["t.csv"]), suggested, noted)


def test_a_dataset_is_read_as_a_source_of_it_alone_would_read_it():
    examples.everything("all.h5")
    report = report_on(["all.h5"])
    readable = {each.name: each.reading for each in report.datasets if each.reading}
    assert readable.keys() == {
        "contiguous", "chunked", "split", "gzip", "gzip_split", "scale_offset", "big_endian", "compact", "ragged",
        "text",
    }  # fmt: skip
    for name, reading in readable.items():
        with_source = HDF5Source("all.h5", {"x": name})
        assert with_source.chunks.reading == reading, name
        with_source.close()
    assert set(readable.values()) == {"copied", "decoded", "locked"}
    why = {each.name: each.why for each in report.datasets}
    assert why["contiguous"] == ""
    assert (
        why["gzip"] == "2 samples share a chunk and are decoded together; the chunk shuffle decodes them once per epoch"
    )
    assert why["gzip_split"].startswith("each sample is spread over 4 chunks")
    assert why["scale_offset"].startswith("it has filters that only libhdf5 decodes; pack ")
    assert why["single"].startswith("holds a single value; ")
    assert why["soft"].startswith("is a broken link")
    assert why["lengths"].startswith(
        "holds values of variable length that cannot be read, since none was ever written; "
    )
    assert "holds no samples" in why["empty"]
    gzip = next(each for each in report.datasets if each.name == "gzip")
    assert (gzip.chunks, gzip.filters) == ((2, 8, 6), ("shuffle", "gzip 4"))
    assert gzip.stored_bytes < gzip.bytes == 12 * 8 * 6 * 8


def failure(capsys, *arguments):
    assert main(["inspect", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert re.fullmatch(r"error: [^\n]+\n", said.err)
    return said.err


def test_wrong_input_ends_with_one_line_and_status_2(capsys, folder):
    examples.images("x.h5", 8)
    Path("text.h5").write_text("no")
    Path("short.h5").write_bytes(Path("x.h5").read_bytes()[:2000])
    Path("empty").mkdir()
    Path("sheet.xlsx").write_bytes(b"")
    assert "missing.h5: no such file" in failure(capsys, "missing.h5")
    assert "*.nope: matches no file" in failure(capsys, "*.nope")
    assert "text.h5: is not an HDF5 file" in failure(capsys, "text.h5")
    assert "short.h5: is damaged: shorter than when it was written; copy it again" in failure(capsys, "short.h5")
    assert f"{folder} is a folder of HDF5 files; write {folder}/*.h5" in failure(capsys, str(folder))
    assert "empty has no folders; it needs one for each class" in failure(capsys, "empty")
    assert "pandas.read_excel('sheet.xlsx')" in failure(capsys, "sheet.xlsx")
    assert "t.csv is a table or a folder; give one" in failure(capsys, "t.csv", "x.h5")
    assert "image-size: describes what --check-all reads; add" in failure(capsys, "x.h5", "--image-size", "8")
    assert "no such file" in failure(capsys, "missing.csv").lower()


def test_a_pipe_gets_every_name_whole_and_no_colour(capsys):
    name = "a_dataset_with_a_name_that_no_terminal_is_wide_enough_for/" * 4 + "images"
    with h5py.File("x.h5", "w") as file:
        file[name], file["labels"] = np.zeros((20, 8, 8, 3), "u1"), np.arange(20) % 2
    assert main(["inspect", "x.h5"]) == 0
    said = capsys.readouterr().out
    assert sum(name in line for line in said.splitlines()) >= 3  # table, Python, command line
    assert "\x1b" not in said
    assert not re.search(r"[ \t]\n", said)


def test_json_tells_what_the_report_does(capsys):
    examples.images("x.h5", 8)
    assert main(["inspect", "x.h5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(report_on(["x.h5"]).as_dict()))
    assert told["version"] == 3
    assert [each["name"] for each in told["datasets"]] == ["age", "images", "labels", "patient"]


def test_the_document_names_every_key_of_the_json():
    page = (ROOT / "docs/tools/inspect.md").read_text()
    names = [field.name for part in (Report, ColumnReport) for field in dataclasses.fields(part)]
    names += [*SHOWN, *Report("", [], suggestions=[Suggestion("", Call("HDF5Source", ""))]).as_dict()["suggestions"][0]]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_document_shows_what_is_printed(capsys):
    examples.images("scan.h5", 6000)
    assert main(["inspect", "scan.h5"]) == 0
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/tools/inspect.md").read_text(), re.DOTALL)[1]

    def plain(text):  # without sizes, which depend on zlib, and what follows from their widths
        return re.sub(r"[\d.]+ [KM]?i?B|[\s─]+", " ", text).split()

    assert plain(shown) == plain(capsys.readouterr().out)
