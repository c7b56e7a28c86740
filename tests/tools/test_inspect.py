"""What ``inspect`` suggests for files, tables and folders can be meant, and both lines read it."""

import contextlib
import datetime as dt
import decimal
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import csv, parquet
from support.files import examples, writers
from support.lines import built_by_python, built_by_report, check, check_said, first_batch, only, sides
from support.sources.oracle import read

from lit_async_data import HDF5Source, ManifestSource
from lit_async_data.__main__ import main
from lit_async_data.errors import AsyncDataError
from lit_async_data.tools.inspect import hdf5_report, report_on, table_report


@pytest.mark.parametrize("sizes", [1, 3])
def test_a_folder_of_classes(folder, sizes, capsys):
    examples.class_folders("photos", sizes)
    Path("photos/auk/Thumbs.db").touch()
    report = report_on(["photos"])
    assert [each.partition("skipped")[2] for each in report.notes] == [" files that are neither images nor .npy: 1 .db"]
    suggestion = only(report)
    size = "" if sizes == 1 else " data.source.image_size=224"
    assert suggestion.call.command() == f"python train.py data=folder data.source.root=photos{size}"
    check(suggestion)
    assert main(["inspect", "photos"]) == 0
    assert suggestion.call.command() in capsys.readouterr().out


def test_wrong_input_ends_with_one_line_and_status_2(capsys):
    examples.images("x.h5", 8)
    Path("text.h5").write_text("no")
    Path("empty").mkdir()
    Path("sheet.xlsx").write_bytes(b"")
    for arguments, said in {
        "missing.h5": "missing.h5: no such file",
        "*.nope": "*.nope: matches no file",
        "text.h5": "text.h5: is not an HDF5 file",
        "empty": "empty has no folders; it needs one for each class",
        "sheet.xlsx": "pandas.read_excel('sheet.xlsx')",
        "x.h5 --image-size 8": "image-size: describes what --check-all reads; add",
    }.items():
        assert main(["inspect", *arguments.split()]) == 2
        told = capsys.readouterr()
        assert not told.out
        assert re.fullmatch(r"error: [^\n]+\n", told.err)
        assert said in told.err


@pytest.mark.parametrize("labels", [False, True])
def test_groups_of_equal_structure_are_one_source(labels):
    examples.recording("rec.h5", labels=labels)
    report = hdf5_report(["rec.h5"])
    assert report.groups == [{"name": "run_*", "count": 3}]
    assert [(each.name, each.rows, each.groups) for each in report.datasets][-1] == ("run_*/eeg/signal", (400, 402), 3)
    rows = only(report)
    batch = check(rows)
    assert batch["x"].shape == (4, 6)
    assert batch["y"].tolist() == [0, 1, 2, 3] if labels else "y" not in batch
    note = next(each for each in rows.notes if each.startswith("split("))
    with sides(rows, note.partition(" keeps each group")[0]) as found:
        assert {key: len(side) // 100 for key, side in found.items()} == {"train": 8, "val": 4}


def test_files_of_other_stages_are_left_out():
    for stage, samples in (("train", 20), ("val", 8), ("test", 4)):
        examples.images(f"{stage}.h5", samples)
    suggestion = only(hdf5_report(["*.h5"]))
    assert suggestion.call.path == "train.h5"
    check(suggestion)
    assert main(["pack", *(f"{stage}.h5" for stage in ("train", "val", "test")), "-o", "all.h5"]) == 0
    with h5py.File("all.h5") as file:
        assert len(file["x"]) == 32  # of all files that are named


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


PNG = np.frombuffer(examples.stored(Image.new("RGB", (9, 8)), "PNG"), "u1")
NAMED = {f"img_{n}": np.zeros((8, 9, 3), "u1") for n in range(10)}
MOLECULES = {f"mol_{n}/pos": np.zeros((20 + n, 3)) for n in range(3)} | {f"mol_{n}/target": float(n) for n in range(3)}
OPAQUE = {f"s{n}/{k}": np.arange(9) if k == "y" else np.void(examples.JPEG.tobytes()) for n in (1, 2) for k in "ay"}
EPISODES = {f"data/demo_{number}/actions": np.zeros((20 + number, 7), "f4") for number in (1, 2, 10)}
EPISODES |= {f"data/demo_{number}/obs/rgb": np.zeros((20 + number, 24, 24, 3), "u1") for number in (1, 2, 10)}
EPISODES["mask/train"] = [b"demo_1"]
EVENTS = {"onset": [10, 500, 1700], "label": [0, 1, 0]}
MINARI = {f"e_{n}/observations": np.zeros((n + 1, 8), "f4") for n in (10, 30, 5)}
MINARI |= {f"e_{n}/actions": np.zeros((n, 2), "f4") for n in (10, 30, 5)}
WAVE = {"wave": np.zeros(5000, "f4"), "times": np.arange(5000) / 250}
WAVE["events"] = np.array([(100, 1), (900, 0)], [("onset", "i8"), ("type", "i8")])
IMAGES, ROWS, COUNT = np.zeros((40, 28, 28), "u1"), np.zeros((40, 9), "f4"), np.arange(40)
RAGGED = {"values": np.arange(900.0), "offsets": np.arange(31) * 30}
STAGES = {f"X_{stage}": np.zeros((count, 1, 9, 9), "u1") for stage, count in (("train", 30), ("test", 12))}
STAGES |= {f"y_{stage}": np.arange(count) % 10 for stage, count in (("train", 30), ("test", 12))}
UNLABELLED = {f"a/{n}.x": IMAGES[n] for n in range(12)} | {f"labels/{n}": n for n in range(11)}
# What writes a file; what the one suggestion says, None if there is none; what a note says; what is said nowhere.
MEANT = [
    ({"x": IMAGES, "index": COUNT, "counter": COUNT, "valid": COUNT >= 0}, '{"x": "x"}', "", "index"),
    ({"x": ROWS, "y": np.eye(10)[np.arange(40) % 10]}, '{"x": "x", "y": "y"}', "float64", ""),
    (EPISODES, '{"x": "obs/rgb", "y": "actions"}, group="data/demo_*", layout={"x": "NHWC"})', "", "mask"),
    (examples.anndata, '"y": "obs/cell_type"', "", ""),
    (examples.matlab, '"y": {"name": "y", "column": 0}}, layout={"x": "CHWN"})', "", ""),
    (examples.images, '{"x": "images", "y": "labels"}, layout={"x": "NHWC"})', 'groups="patient")', ""),
    (lambda x: examples.anndata(x, missing=True), '"y": {"name": "obs/cell_type", "null": "drop"}', "left out", ""),
    (STAGES, '{"x": "X_train", "y": "y_train"}', "", "test"),
    (examples.of_pandas, None, "pandas.read_hdf(", "axis1"),
    ({**RAGGED, "label": np.arange(30) % 3}, '{"x": ".", "y": "label"}', "", "window"),
    ({f"seq/{name}": values for name, values in RAGGED.items()}, '{"x": "seq"}', "batch_by=x", "window"),
    (
        {"data": np.zeros((64, 9000), "f4"), "gain": np.arange(64)},
        '{"x": {"name": "data", "window": [0, 256]}}, stride=256, layout={"x": "CN"})',
        "",
        "gain",
    ),
    (lambda path: examples.grid(path, "time", "lat", "lon"), '{"x": "v"}', "", "level"),
    (examples.netcdf, '{"x": {"name": "t2m", "mask_and_scale": True}}', "", "lat"),
    (examples.one_each, '"y": "label"}, group="*", sample="group", layout={"x": "HWC"})', "", "0 samples"),
    (lambda path: examples.one_each(path, label=None), '{"x": "image", "y": {"attr": "label"}}', "", "0 samples"),
    (MOLECULES, '{"x": "pos", "y": "target"}, group="mol_*", sample="group")', "batch_by=x", "0 samples"),
    (lambda x: examples.one_each(x, "v{}", "", compression="gzip"), "v*", "10 datasets compressed: each sample", ""),
    (NAMED, '{"x": "img_*"}, sample="dataset", layout={"x": "HWC"})', "uint8, 10 datasets", ""),
    (UNLABELLED, '{"x": "a/*.x", "y": "labels/*"}, sam', "", ""),
    ({f"s{n}/{k}": n if k == "y" else examples.JPEG for n in (1, 2) for k in "ay"}, '"y": "y"}, g', "BGR", ""),
    ({f"a/{n}": (examples.JPEG, PNG)[n % 2] for n in range(4)}, '"name": "a", "decode": "image"', "4 datasets", ""),
    (OPAQUE, '"image_size": [8, 9]}}, group="s*", sample="group")', "BGR", ""),
    (lambda x: examples.one_each(x, "a/{}", None, values=examples.JPEG), '[8, 9]}, "y": {"attr": "label"}}', "BGR", ""),
    ({f"d/{n // 9}/f/{n % 9}": IMAGES[n] for n in range(18)}, None, "9 datasets has no dataset 'd/0/f/*'", ""),
    ({"cube": np.zeros((80, 80, 50), "u2"), "gt": np.zeros((80, 80), "u1")}, None, "(80, 80, 50) may be one", ""),
    ({"image": np.zeros((32, 32, 3), "u1")}, None, "image of shape (32, 32, 3) may be one sample: ", ""),
    ({"run_info/y": COUNT, **{f"run_{n}/x": np.zeros((9, 4)) for n in (1, 2)}}, 'group="run_[0-9]*"', "", ""),
    ({"eeg": np.zeros((64, 2000), "f4"), **EVENTS}, '"window": [0, 256]}, "y": {"name": "label"', "", ""),
    (MINARI, '{"x": {"name": "observations", "per": "edge"}, "y": "actions"}', 'groups="group"', ""),
    (WAVE, '{"x": {"name": "wave", "window": [0, 256]}, "y": {"name": "events.type", "per": "anchor"}', "", "times"),
    ({"events/table": np.zeros(9, [("energy", "f4"), ("class", "i4")])}, None, "no dataset looks like samples", ""),
]


@pytest.mark.parametrize(("write", "suggested", "noted", "never"), [*MEANT, *writers.LAYOUTS])
def test_what_is_suggested_can_be_meant_and_packed(write, suggested, noted, never, capsys):
    write("x.h5") if callable(write) else examples.datasets("x.h5", write)
    report = hdf5_report(["x.h5"])
    check_said(report, suggested, noted, never)
    capsys.readouterr()
    fails = not report.suggestions or write is UNLABELLED  # of which one sample cannot be read
    assert main(["pack", "x.h5", "-o", "packed.h5"]) == (2 if fails else 0)
    told = capsys.readouterr()
    assert ("--fields x=NAME y=NAME" in told.err) == (not report.suggestions)
    for each in () if fails else report.suggestions[:1]:
        with contextlib.closing(each.call.build()) as source, contextlib.closing(built_by_report(told.out)) as packed:
            values, others = (read(of, np.arange(len(of))) for of in (source, packed))
            for key, found in values.items():
                assert np.array_equal(found, others[key], equal_nan=True), key


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(writers.NAMES), st.tuples(*map(st.sampled_from, writers.VALUES)), min_size=1))
def test_what_is_suggested_for_any_datasets_gives_batches(given):
    examples.datasets("x.h5", {name: np.zeros(shape, dtype) for name, (shape, dtype) in given.items()})
    for each in hdf5_report(["x.h5"]).suggestions:
        with contextlib.closing(built_by_python(each.call.python())) as source:
            assert set(first_batch(source)) == set(each.batch)


def test_one_file_per_sample_is_no_file_of_rows():
    for number in range(3):
        examples.datasets(f"{number}.h5", {"image": np.zeros((8, 9), "f4"), "label": number})
    assert only(hdf5_report(["*.h5"])).call.python().endswith('{"x": "image", "y": "label"}, sample="group")')


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


def written(table, suffix):
    name = f"birds.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, name)
    elif suffix == "jsonl":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        csv.write_csv(table, name, csv.WriteOptions(delimiter=";" if suffix == "tsv" else ","))
    return name


@pytest.mark.parametrize(("suffix", "sizes"), [("csv", 1), ("parquet", 1), ("tsv", 3), ("jsonl", 3)])
def test_a_table_of_images(folder, suffix, sizes):
    report = table_report(written(examples.bird_table(folder, split=sizes > 1, sizes=sizes), suffix))
    kinds = {"id": "number" if suffix in ("csv", "tsv") else "class", "path": "image", "species": "class"}
    assert {each.name: each.kind for each in report.columns}.items() >= kinds.items()
    suggestion = only(report)
    assert '{"x": "path", "y": "species"}' in suggestion.call.python()
    assert 'id="id"' in suggestion.call.python()
    assert ("image_size=224" in suggestion.call.python()) == (sizes > 1)
    check(suggestion)


@pytest.mark.parametrize(("table", "root"), [("tables/t.csv", "."), ("tables/t.csv", "/"), ("photos/t.csv", "/")])
def test_paths_may_start_from_the_current_folder_or_the_root_of_the_file_system(folder, table, root):
    examples.class_folders("photos", 1)
    Path("tables").mkdir()
    start = f"{folder}/" if root == "/" else ""
    Path(table).write_text("file,species\n" + f"{start}photos/auk/0.png,auk\n{start}photos/owl/1.png,owl\n" * 20)
    report = table_report(table)
    assert report.columns[0].examples[0].endswith("photos/auk/0.png")
    check(only(report))


TABLES = [
    ("0.png,1\n1.png,0\n", None, "the first line looks like data (0.png)"),
    ("path,label,row\nx.h5,0,0\nx.h5,1,1\nx.h5,0,2\n", '{"name": "path", "dataset": "images"', ""),
    ("path,label,row,dataset\nx.h5,0,0,age\nx.h5,1,1,age\nx.h5,0,2,age\n", '{"x": "path", "y": "label"}', ""),
    ("path,label\na.png,0\n,1\na.png,1\n", '{"name": "path", "null": "drop"}, "y": "label"', ""),
    ("a,tags\n" + "1,\n2,c\n3,b\n4,c\n", '{"name": "tags", "null": "drop"}', ""),
    ("id,a,b,target,when\n" + "1,1,.5,1,x\n2,2,1,0,x\n3,3,2,1,x\n", '{"x": ["a", "b"], "y": "target"}', ""),
    ("a,species,kinds\n" + "1,b,p\n2,c,p\n3,b,q\n4,c,q\n", '"y": "species"', ""),
]


@pytest.mark.parametrize(("rows", "suggested", "noted"), TABLES)
def test_what_is_suggested_for_a_table_can_be_meant(rows, suggested, noted):
    examples.images("x.h5"), Image.new("RGB", (8, 9)).save("a.png")
    header, _, rest = rows.partition("\n")
    Path("t.csv").write_text(f"{header}\n{rest * 6}")
    check_said(table_report("t.csv"), suggested, noted)


@pytest.mark.parametrize("shape", [(24, 24, 4), (20, 24)])
def test_a_file_per_slice_has_its_mask(shape):
    for number in range(4):
        examples.datasets(f"slice_{number}.h5", {"image": np.zeros(shape), "mask": np.zeros((*shape[:2], 3), "u1")})
    suggestion = only(hdf5_report(["slice_*.h5"]))
    assert '{"x": "image", "y": "mask"}, sample="group"' in suggestion.call.python()
    check(suggestion)


@pytest.mark.parametrize("keep_parts", [[], ["--keep-parts"]])
def test_all_fields_of_a_packed_file_are_suggested(keep_parts):
    scans(dose=np.zeros((4, 5)), weights=np.ones((4, 5)))
    fields = ["picture=image", "dose=dose", "weights=weights"]
    assert main(["pack", "scan_0.h5", "scan_1.h5", "--fields", *fields, "-o", "packed.h5", *keep_parts]) == 0
    suggestion = hdf5_report(["packed.h5"]).suggestions[0]
    assert suggestion.call.fields == {each: each for each in ("dose", "picture", "weights")}
    assert check(suggestion)["picture"].shape[1:] == (3, 8, 9)


def scans(**datasets):
    """Four files, `scan_0.h5` to `scan_3.h5`, of five rows each."""
    for number in range(4):
        own = {name: values[number] for name, values in datasets.items()}
        examples.datasets(f"scan_{number}.h5", {"image": np.zeros((5, 8, 9, 3), "u1"), **own})


def by_folder():
    for number in range(4):
        Path(f"p{number}").mkdir()
        examples.datasets(f"p{number}/scan.h5", {"x": np.zeros((5, 4))})


def groups():
    examples.datasets("study.h5", {f"eeg/rat_{n}/x": np.zeros((9, 4)) for n in range(4)})


def attributes():
    groups()
    with h5py.File("study.h5", "a") as file:
        for number, group in enumerate(file["eeg"].values()):
            group.attrs["patient"] = 70 + number


RATS, IDS = [f"rat_{n}" for n in range(5)], np.arange(70, 74)
OF_ROWS = np.repeat(IDS, 5).reshape(4, 5)
# What is written, the names of the files, a column, its values, and what `on` says of them.
JOINED = [
    (scans, "scan_*.h5", "scan", [f"scan_{n}" for n in range(6)], "file"),
    (scans, "scan_*.h5", "file", [f"scan_{n}.h5" for n in range(4)], "file"),
    (lambda: scans(mask=np.zeros((4, 5, 8, 9, 3), "u1")), "scan_*.h5", "file", [f"scan_{n}" for n in range(4)], "file"),
    (by_folder, "**/*.h5", "path", [f"p{n}/scan.h5" for n in range(4)], "file"),
    (groups, "study.h5", "rat number", RATS, "group"),
    (lambda: scans(patient=OF_ROWS), "scan_*.h5", "patient", list(map(str, IDS)), "patient"),
    (lambda: scans(subject=OF_ROWS.astype("S")), "scan_*.h5", "PatientID", [*IDS, *range(40)], "subject"),
    (lambda: scans(**{"meta/patient": OF_ROWS}), "scan_*.h5", "patient", IDS, "meta/patient"),
    (attributes, "study.h5", "patient", list(map(str, IDS)), {"attr": "patient"}),
]


def tabled(column, values, **others):
    kinds = np.array(["a", "b", "a"])[np.arange(len(values)) % 3]
    names = {"score": np.arange(len(values)) / 2, column: list(values), "diagnosis": kinds, **others}
    parquet.write_table(pa.table(names), "patients.parquet")
    return "patients.parquet"


@pytest.mark.parametrize(("write", "files", "column", "values", "what"), JOINED)
def test_the_column_of_a_table_that_names_files_groups_or_ids_gives_their_labels(write, files, column, values, what):
    write()
    report = report_on([files, tabled(column, values)])
    suggestion = only(report)
    assert suggestion.call.options["on"] == (what if what == column else {column: what})
    assert "unmatched" not in suggestion.call.options
    assert "y" not in suggestion.call.options.get("layout", {})  # not that of a mask
    assert "y has 2 classes: a, b" in suggestion.notes
    assert any(note.startswith("split(") for note in suggestion.notes)
    assert not report.notes
    assert [each.name for each in report.columns] == ["score", column, "diagnosis"]
    assert check(suggestion)["y"][0] == 0


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("id", [70, 71, 72, None]),
        ("count", range(200)),  # most numbers are in it
        ("row", range(8)),  # labels are no ids
        ("Prüfling", [f"scan_{n}" for n in range(4)]),  # no key for Hydra
    ],
)
def test_a_table_without_a_column_that_fits_is_named(column, values):
    scans(patient=OF_ROWS, label=[np.arange(5)] * 4)
    table = tabled(column, values)
    report = report_on(["scan_*.h5", table])
    assert f"image with label: no column of {table} names files or groups" in report.notes[0]
    assert "table" not in only(report).call.options
    assert check(only(report))["y"].tolist() == [0, 1, 2, 3]


def test_commands_refuse_a_table_that_does_not_fit(capsys):
    scans(count=[np.arange(5)] * 4)
    table = tabled("id", range(200))
    for words in (["doctor", "scan_0.h5", table], ["inspect", "--check-all", "scan_0.h5", "--table", table]):
        assert main(words) == 2
        assert f"on: no column of {table} fits, as inspect says; name yours: --on" in capsys.readouterr().err


def test_samples_without_a_row_are_left_out_and_the_first_is_named():
    scans(patient=OF_ROWS)
    report = report_on(["scan_*.h5", tabled("patient", ["70", "73"])])
    assert "2 of 4 ids have no row: '71', '72'; their samples are left out" in report.notes[0]
    suggestion = only(report)
    assert suggestion.call.options["unmatched"] == "skip"
    assert suggestion.samples == 10
    assert suggestion.call.fields["y"] == "diagnosis"  # not the ids, although there are only two
    assert not any("other labels" in note for note in suggestion.notes)
    check(suggestion)


def test_an_attribute_of_another_name_is_given_with_an_at_sign(capsys):
    attributes()
    table = tabled("id", IDS)
    assert main(["inspect", "study.h5", "--table", table]) == 0
    assert "else give on={COLUMN: DATASET}, or on={COLUMN: Field(attr=NAME)}" in capsys.readouterr().out
    given = ["--group", "eeg/*", "--fields", "x=x", "score=score", "--on", "id=@patient"]
    assert main(["pack", "study.h5", table, *given, "-o", "a.h5"]) == 0
    with contextlib.closing(HDF5Source("a.h5", ["score"])) as packed:
        assert packed.column("score")[::9].tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize("typed", [["patients.parquet"], ["--table", "patients.parquet"]])
def test_commands_find_the_column_for_fields_that_are_given(typed, capsys):
    scans(patient=OF_ROWS)
    files, table = [f"scan_{n}.h5" for n in range(4)], tabled("patient", IDS)
    assert main(["pack", *files, *typed, "--fields", "x=image", "score=score", "-o", "a.h5"]) == 0
    with contextlib.closing(HDF5Source("a.h5", ["score"])) as packed:
        assert packed.column("score")[::5].tolist() == [0, 0.5, 1, 1.5]
    assert main(["pack", *files, *typed, "-o", "b.h5"]) == 0
    assert f'"y": "diagnosis"}}, layout={{"x": "NHWC"}}, table="{table}", on="patient"' in capsys.readouterr().out
    assert main(["pack", *files, *typed, "--on", "score=file", "-o", "c.h5"]) == 2  # nothing is searched
    assert main(["doctor", *files, *typed, "--seconds", "0.05"]) == 0
    assert main(["inspect", "--check-all", *files, *typed]) == 0


ARROW = [(kind, [1, None, 3]) for kind in (pa.int32(), pa.uint64(), pa.float64(), pa.timestamp("us"), pa.duration("s"))]
ARROW += [(kind, ["b", "a", None]) for kind in (pa.string(), pa.binary(), pa.dictionary(pa.int8(), pa.string()))]
ARROW += [(kind, [None] * 3) for kind in (pa.null(), pa.string(), pa.float32(), pa.list_(pa.string()))]
ARROW += [(pa.list_(kind), [[1, 2], None, [3, 4]]) for kind in (pa.int64(), pa.float32())]
ARROW += [(pa.list_(pa.string()), each) for each in ([["blue"], [], ["red", "blue"]], [["a.png"], ["b.png"], None])]
ARROW += [(pa.struct({"bytes": pa.binary()}), [{"bytes": each}] * 3) for each in (b"no image", examples.JPEG.tobytes())]
ARROW += [(pa.string(), [name] * 3) for name in ("a.png", "a.npy", "a.txt", "s3://a")]
ARROW += [
    (pa.bool_(), [True, False, True]),
    (pa.date32(), [dt.date(2026, 1, 2)] * 3),
    (pa.decimal128(9, 2), [decimal.Decimal("1.25"), decimal.Decimal(2), None]),
    (pa.string(), ["1,5", "2", "3"]),
    (pa.string(), ["[1, 2]", "[2]", "[]"]),
    (pa.list_(pa.int64()), [[1], [1, 2], []]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)]] * 3),
]


@pytest.mark.parametrize(("kind", "values"), ARROW, ids=lambda given: str(given)[:40])
def test_a_column_is_what_a_table_source_makes_of_it(kind, values):
    Image.new("RGB", (8, 8)).save("a.png")
    np.save("a.npy", np.zeros(3))
    parquet.write_table(pa.table({"c": pa.array(values, kind), "other": [0, 1, 2]}), "t.parquet")
    column = table_report("t.parquet").columns[0]
    dropped = 0 < column.missing < 3
    why, expected = "", None
    try:
        source = ManifestSource("t.parquet", {"x": {"name": "c", "null": "drop"} if dropped else "c"})
        field, kind = source.spec["x"], source.chunks.reading
        expected = "image" if len(field.shape) >= 3 else "npy" if kind == "opened" else "number"
        expected = "class" if field.classes else expected
        assert len(source) == 3 - column.missing
    except AsyncDataError as error:
        why = error.message
    assert (column.kind, column.why) == (expected, why)
